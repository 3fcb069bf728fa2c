"""Compiled graphs that PyTorch can save: by ``torch.compile(...).aot_compile(...)``, and in its caches.

PyTorch saves Dynamo's bytecode and guards, AOTAutograd's wrappers, and for each of AOTAutograd's graphs an
``OutputCode``. Ours holds a Program in the form of the cache's records, which loading need not compile. Weights are not
saved: they are arguments of each call, and constants of the sessions that are created at the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from ..errors import AheadOfTimeError
from ..events import count
from ..graphs.aot_serialization import NotSavedError, OutputCode
from ..graphs.artifacts import GraphName, Runner
from ..graphs.graph_json import CannotStoreError
from ..graphs.late_compile import compile_at_first_call
from ..graphs.saving_mode import is_ahead_of_time
from ..graphs.traced_sources import TracedModule
from ..options import Options
from ..partition.program import Program
from ..weights.region_session import Weight
from .program_payload import ProgramPayload


class OnnxOutputCode(OutputCode):
    """A runner that can be pickled.

    Args:
        run: the runner.
        content: returns what is pickled, or raises ``CannotStoreError``.
    """

    def __init__(self, run: Runner, content: Callable[[], ProgramPayload]) -> None:
        self._run = run
        self._content = content
        self._boxed_call = True  # AOTAutograd, which copies the attributes to its wrappers, passes arguments in a list

    def __call__(self, inputs: Any) -> Any:
        """Runs the graph; ``inputs`` is a list, which is emptied."""
        return self._run(inputs)

    def __copy__(self) -> OnnxOutputCode:
        return OnnxOutputCode(self._run, self._content)

    def prepare_for_serialization(self) -> None:
        """Called on a copy before it is pickled.

        Raises:
            AheadOfTimeError, NotSavedError: a part of the graph cannot be saved; the second is not for the user.
        """
        try:
            with _disable_current_modes():  # it reads constants
                content = self._content()
        except CannotStoreError as error:
            count(f"not_saved: {error}")
            kind = AheadOfTimeError if is_ahead_of_time() else NotSavedError
            raise kind(f"a graph cannot be saved because of {error}") from error
        self._content = lambda: content

    def __getstate__(self) -> ProgramPayload:
        return self._content()

    def __setstate__(self, content: ProgramPayload) -> None:
        self.__init__(compile_at_first_call(content.load), lambda: content)  # type: ignore[misc]

    def post_compile(self, *args: object) -> None:
        """Called after the graph is loaded."""

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Called with kernels for GPUs, of which there are none."""


def saved_graph(
    run: Runner,
    name: GraphName,
    program: Program,
    weights: Mapping[int, Weight],
    options: Options,
    sources: Sequence[TracedModule],
) -> OnnxOutputCode:
    """A runner of a Program, as PyTorch can save it; see ``ProgramPayload.of``."""
    names = {i: (weight.name, weight.is_statistic) for i, weight in weights.items()}  # tensors would stay alive
    return OnnxOutputCode(run, functools.partial(ProgramPayload.of, name, program, names, options, sources))


def as_saved(run: Runner, reason: str) -> OnnxOutputCode:
    """A runner in the form that PyTorch's caches expect; if it runs no Program, saving it raises ``reason``."""

    def content() -> ProgramPayload:
        raise CannotStoreError(reason)

    return run if isinstance(run, OnnxOutputCode) else OnnxOutputCode(run, content)
