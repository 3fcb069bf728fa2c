"""``Program``, the result of compiling a graph, and ``load``, which makes a Program callable.

A Program is data: code in which each region is one call, the model of each region, and the code that PyTorch runs if a
session fails. Compiled graphs, graphs from the cache and the autotuner's candidates are all loaded by ``load``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ..errors import SessionError, first_line
from ..events import count, warn
from ..graphs.artifacts import GraphName, Runner, is_operator, region_name
from ..graphs.graph_json import CannotStoreError, decode_graph, encode_graph
from ..graphs.pytorch_runner import without_graph
from ..options import Options
from ..runtime.executable import Executable
from ..runtime.providers import provider_name
from ..weights.region_session import RegionSession, Weight
from ..weights.watchable import can_be_watched
from .coverage import CoverageCounts
from .runnable_region import OnProvider, RunnableRegion

logger = logging.getLogger(__name__)


class RegionCode:
    """Runs a region in PyTorch, for calls on which its session fails. The code is generated at first use.

    Args:
        text: the graph as JSON, see ``graph_json.encode_graph``. It returns the list of the region's outputs.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def of(cls, graph: fx.Graph) -> RegionCode | Callable[..., Sequence[object]]:
        """The code of a graph; generated at once if the graph cannot be encoded as JSON."""
        try:
            return cls(json.dumps(encode_graph(graph), separators=(",", ":")))
        except CannotStoreError:
            return without_graph(fx.GraphModule({}, graph, "Region"))

    @property
    def operators(self) -> int:
        """The number of operators."""
        nodes = decode_graph(json.loads(self.text)).nodes
        return sum(node.op == "call_function" and is_operator(node) for node in nodes)

    @functools.cached_property
    def _code(self) -> Callable[..., Sequence[object]]:
        return without_graph(fx.GraphModule({}, decode_graph(json.loads(self.text)), "Region"))

    def __call__(self, *args: object) -> Sequence[object]:
        return self._code(*args)


@dataclasses.dataclass(frozen=True, eq=False)
class RegionProgram:
    """One region of a Program.

    Attributes:
        executable: the model, its bindings and the settings of its session.
        in_pytorch: runs the region if its session fails.
        others: the same on other execution providers, in order of preference. One replaces the executable if ONNX
            Runtime rejects that, or if its results are wrong.
        checked: the region as a graph, with which results of other providers than the CPU's are compared, see
            ``RunnableRegion``; ``None`` if they are not.
    """

    executable: Executable
    in_pytorch: RegionCode | Callable[..., Sequence[object]]
    others: tuple[Executable, ...] = ()
    checked: fx.GraphModule | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled forward, backward or inference graph, as data.

    Attributes:
        code: runs in PyTorch. It takes its arguments boxed, and calls region ``i`` as the module ``region_i``.
        attributes: the attributes that the code reads, by name: constants, subgraphs, functions compiled by Inductor.
        regions: the parts that run on ONNX Runtime.
        coverage: how much of the graph runs where.
        varies: why another compile of the graph may give another Program, which is then not cached; else empty.
        mixed_signs: whether it is right only where products of uint8 with int8 are exact (``runtime/integer_kernels``).
    """

    code: fx.Graph
    attributes: Mapping[str, object]
    regions: tuple[RegionProgram, ...]
    coverage: CoverageCounts
    varies: str = ""
    mixed_signs: bool = False

    @functools.cached_property
    def arguments(self) -> dict[object, int]:
        """The positions of the code's arguments, by placeholder."""
        return {node: i for i, node in enumerate(self.code.find_nodes(op="placeholder"))}

    def weights_of(self, index: int) -> dict[int, int]:
        """The weights of a region: position among the region's arguments -> position among the code's arguments.

        Raises:
            ValueError: a weight is not an argument of the code, or the code does not call the region exactly once with
                the right number of arguments.
        """
        [call] = self.code.find_nodes(op="call_module", target=region_name(index))
        executable = self.regions[index].executable
        if len(call.args) != len(executable.inputs) or call.kwargs:
            raise ValueError(f"a region with {len(executable.inputs)} inputs is called with {len(call.args)} arguments")
        given = {position: call.args[position] for position in executable.weights}
        if not all(node in self.arguments for node in given.values()):
            raise ValueError("a weight of the region is not an argument of the code")
        return {position: self.arguments[node] for position, node in given.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRegion:
    """The session of a region.

    Attributes:
        executable: what it runs.
        session: ``None`` if ONNX Runtime rejected the region on all providers; then PyTorch runs it.
        rejections: why ONNX Runtime rejected the executables before.
    """

    executable: Executable
    session: RegionSession | None
    rejections: tuple[SessionError, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedProgram:
    """A Program that can be called.

    Attributes:
        run: takes the arguments boxed, and keeps no graph alive.
        module: the same as a graph module, for running it node by node.
        regions: the sessions that it calls.
    """

    run: Runner
    module: fx.GraphModule
    regions: tuple[LoadedRegion, ...]

    @property
    def rejection(self) -> SessionError | None:
        """Why ONNX Runtime runs a region on no provider, so that PyTorch does."""
        return next((region.rejections[-1] for region in self.regions if region.session is None), None)


def load(program: Program, name: GraphName, weights: Mapping[int, Weight], options: Options) -> LoadedProgram:
    """Makes a Program callable.

    Args:
        program: the Program.
        name: of the graph, for messages.
        weights: the arguments that may be constants, by position. Weights of the Program that are missing, because
            their changes cannot be noticed where a saved graph is loaded, are inputs of the sessions.
        options: of the backend.
    """
    loaded: list[LoadedRegion] = []
    modules: dict[str, object] = {}
    for i, region in enumerate(program.regions):
        known = program.weights_of(i).items()
        constants = {position: weights[argument] for position, argument in known if argument in weights}
        loaded.append(_loaded(region, constants, name.frame, options))
        modules[region_name(i)] = _runnable(region, loaded[i], constants, name, i, options)
    module = fx.GraphModule({**program.attributes, **modules}, program.code, "SplitGraph")
    return LoadedProgram(without_graph(module), module, tuple(loaded))


def warn_of_rejections(program: Program, name: GraphName, loaded: LoadedProgram) -> None:
    """Says which execution providers rejected a region that another one runs."""
    for i, (region, made) in enumerate(zip(program.regions, loaded.regions, strict=True)):
        if made.session is None:
            continue
        for executable, error in zip((region.executable, *region.others), made.rejections, strict=False):
            count("rejected_by_provider")
            why = f"{provider_name(executable.settings.providers[0])} rejects it: {first_line(str(error))}"
            warn(logger, f"{name} region {i}: {why}")


def _loaded(region: RegionProgram, weights: Mapping[int, Weight], frame: int | None, options: Options) -> LoadedRegion:
    """The session of a region on the first execution provider that does not reject it."""
    rejections: list[SessionError] = []
    for executable in (region.executable, *region.others):
        try:
            session = RegionSession(executable, weights, complete=options.weights == "checked", frame=frame)
        except SessionError as error:
            rejections.append(error)
        else:
            return LoadedRegion(executable, session, tuple(rejections))
    return LoadedRegion(region.executable, None, tuple(rejections))


def _runnable(
    region: RegionProgram,
    loaded: LoadedRegion,
    weights: Mapping[int, Weight],
    name: GraphName,
    index: int,
    options: Options,
) -> Callable[..., Sequence[object]]:
    """What the code of a Program calls for a region."""
    if loaded.session is None:
        return region.in_pytorch
    names = {i: (weight.name, weight.is_statistic) for i, weight in weights.items()}  # tensors would stay alive
    complete = options.weights == "checked"

    def build(executable: Executable, args: Sequence[Any]) -> RegionSession:
        known = {i: Weight(name, args[i], of) for i, (name, of) in names.items() if can_be_watched(args[i])}
        return RegionSession(executable, known, complete=complete, frame=frame)

    frame = name.frame
    others = region.others[len(loaded.rejections) :]
    providers = [OnProvider(loaded.executable, loaded.session), *map(OnProvider, others)]
    must_run_on_onnx = options.fallback == "error"
    return RunnableRegion(
        name, index, providers, region.in_pytorch, build, checked=region.checked, must_run_on_onnx=must_run_on_onnx
    )
