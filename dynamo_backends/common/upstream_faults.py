"""``Fault``, an entry of the tables of known upstream faults.

``runtime/kernel_faults.py`` lists faults of ONNX Runtime's kernels by ONNX node, ``exporter/upstream_faults.py`` faults
by ATen operator. Each entry names a demonstration. ``tests/project/test_upstream.py`` runs it, and fails when upstream
has fixed the fault.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from importlib import metadata
from typing import Generic, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..errors import Kind, Reason

NodeT = TypeVar("NodeT")


def always(_: object) -> bool:
    """Every node of the operator has the fault."""
    return True


@dataclasses.dataclass(frozen=True)
class Fault(Generic[NodeT]):
    """A wrong result of an upstream library."""

    shown_by: str  # the demonstration in ``tests/upstream_faults.py``
    operators: Set[object]  # ONNX operators and optimizers by name, ATen operators by overload; empty for any
    text: str  # what is wrong
    applies: Callable[[NodeT], bool] = always  # whether a node of one of the operators has the fault
    versions: str = ">=1.24"  # a requirement for the library; without an upper bound until a version is fixed
    library: str = "onnxruntime"  # or "onnxscript"; "onnxruntime" stands for its CPU provider
    kind: Kind = Kind.UPSTREAM_FAULT  # of the reason that a node runs in PyTorch
    is_refused_in_a_file: bool = True  # whether a file, which has no PyTorch, must not have it

    @property
    def reason(self) -> Reason:
        """The reason why a node with the fault runs in PyTorch."""
        return Reason(self.kind, self.text)

    @property
    def is_installed(self) -> bool:
        """Whether the installed version of the library has the fault."""
        return _is_installed(self.library, self.versions)

    def is_of(self, providers: Sequence[str]) -> bool:
        """Whether the first of the providers has the fault."""
        return self.library != "onnxruntime" or providers[0] == "CPUExecutionProvider"


@functools.cache
def _is_installed(library: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(installed_version(library), prereleases=True)


@functools.cache
def installed_version(library: str) -> Version:
    """The version of an installed library, or of a build with another name (``onnxruntime-openvino``)."""
    try:
        return Version(metadata.version(library))
    except metadata.PackageNotFoundError:
        return Version(metadata.version(metadata.packages_distributions()[library][0]))
