"""The form of an entry in the tables of known upstream faults.

``runtime/kernel_faults.py`` lists faults of ONNX Runtime's kernels by ONNX node, ``exporter/upstream_faults.py`` faults
by ATen operator. Each entry names the demonstration that ``tests/project/test_upstream.py`` runs, and that fails once
upstream has mended the fault.
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
    """Every node of the operator meets the fault."""
    return True


@dataclasses.dataclass(frozen=True)
class Fault(Generic[NodeT]):
    """Something upstream that computes another result than it should.

    Attributes:
        shown_by: the demonstration in ``tests/upstream_faults.py``.
        operators: those that meet the fault: ONNX operators and optimizers by name, ATen operators by overload; empty
            for any.
        text: what is wrong, for people.
        applies: whether a node of one of the operators meets the fault.
        versions: of the library, as a requirement is written; open at the end until a version is known to be mended.
        library: whose fault it is: ``onnxruntime``, its CPU provider's, or ``onnxscript``.
        kind: of the reason that a node runs in PyTorch.
    """

    shown_by: str
    operators: Set[object]
    text: str
    applies: Callable[[NodeT], bool] = always
    versions: str = ">=1.24"
    library: str = "onnxruntime"
    kind: Kind = Kind.UPSTREAM_FAULT

    @property
    def reason(self) -> Reason:
        """Why a node that meets the fault runs in PyTorch."""
        return Reason(self.kind, self.text)

    @property
    def is_installed(self) -> bool:
        """Whether the installed version of the library has the fault."""
        return _is_installed(self.library, self.versions)

    def is_of(self, providers: Sequence[str]) -> bool:
        """Whether the provider that comes first has the fault; the CPU provider may take what another leaves."""
        return self.library != "onnxruntime" or providers[0] == "CPUExecutionProvider"


@functools.cache
def _is_installed(library: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(installed_version(library), prereleases=True)


@functools.cache
def installed_version(library: str) -> Version:
    """The version of an installed library, whichever of its builds it is (``onnxruntime-openvino``)."""
    try:
        return Version(metadata.version(library))
    except metadata.PackageNotFoundError:
        return Version(metadata.version(metadata.packages_distributions()[library][0]))
