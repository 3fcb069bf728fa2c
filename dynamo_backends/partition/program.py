"""What compiling makes of a graph, a ``Program``, and the one way from there to what runs, ``load``.

A Program is data: code in which each region is one call, the regions' models, what PyTorch runs where a session fails.
A graph that was just compiled, one from the cache, and a candidate of the autotuner are loaded alike.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from ..graphs.artifacts import GraphName, RunnableRegion, Runner, region_name, without_graph
from ..graphs.graph_json import CannotStoreError, decode_graph, encode_graph
from ..options import Options
from ..runtime.binding import BoundSession
from ..runtime.executable import Executable
from ..weights.frozen_session import FrozenSession, Weight, load_session
from .coverage import Report

if TYPE_CHECKING:
    from .provider_check import CheckedSession


class RegionCode:
    """A region's nodes as PyTorch runs them, for calls on which its session fails; made when they are first needed.

    Args:
        text: the graph as JSON, see ``graph_code.encode_graph``, from the region's inputs to the list of its outputs.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def of(cls, graph: fx.Graph) -> RegionCode | Callable[..., Sequence[object]]:
        """The code of a graph; made at once where the graph cannot be described."""
        try:
            return cls(json.dumps(encode_graph(graph), separators=(",", ":")))
        except CannotStoreError:
            return without_graph(fx.GraphModule({}, graph, "Region"))

    @functools.cached_property
    def _code(self) -> Callable[..., Sequence[object]]:
        return without_graph(fx.GraphModule({}, decode_graph(json.loads(self.text)), "Region"))

    def __call__(self, *args: object) -> Sequence[object]:
        return self._code(*args)


@dataclasses.dataclass(frozen=True, eq=False)
class RegionProgram:
    """One region of a Program.

    Attributes:
        executable: the model, and how it is run.
        in_pytorch: what runs where its session fails.
        check: how its results are compared with PyTorch's on other execution providers than the CPU's, if they are.
    """

    executable: Executable
    in_pytorch: RegionCode | Callable[..., Sequence[object]]
    check: ProviderCheck | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ProviderCheck:
    """How a region's results are compared with PyTorch's.

    Attributes:
        module: the region's nodes as PyTorch runs them one by one.
        others: the same executable on other execution providers, in the order in which they are tried where the results
            are not PyTorch's.
    """

    module: fx.GraphModule
    others: tuple[Executable, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled forward, backward or inference graph, as data.

    Attributes:
        code: what PyTorch runs; it takes its arguments boxed, and calls the region ``i`` as the module ``region_i``.
        attributes: what the code reads besides its arguments, by name: constants, subgraphs, what Inductor compiled.
        regions: what runs on ONNX Runtime. Which arguments of the code are its weights, the code says.
        report: how much of the graph runs where.
        varies: why another compile of the graph may come out otherwise; empty if it does not.
    """

    code: fx.Graph
    attributes: Mapping[str, object]
    regions: tuple[RegionProgram, ...]
    report: Report
    varies: str = ""

    @functools.cached_property
    def arguments(self) -> dict[object, int]:
        """The arguments of the code, with their positions."""
        return {node: i for i, node in enumerate(self.code.find_nodes(op="placeholder"))}

    def weights_of(self, index: int) -> dict[int, int]:
        """The weights of a region: for each position among its arguments that among the arguments of the code.

        Raises:
            ValueError: one is no argument of the code, or the code does not call the region once as it is to be called.
        """
        [call] = self.code.find_nodes(op="call_module", target=region_name(index))
        executable = self.regions[index].executable
        if len(call.args) != len(executable.inputs) or call.kwargs:
            raise ValueError(f"a call with {len(call.args)} arguments of a region with {len(executable.inputs)}")
        given = {position: call.args[position] for position in executable.weights}
        if not all(node in self.arguments for node in given.values()):
            raise ValueError("a weight that is no argument")
        return {position: self.arguments[node] for position, node in given.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """What runs of a Program.

    Attributes:
        run: takes the arguments boxed, and keeps no graph alive.
        module: the same with its graph, for who runs it node by node.
        regions: what it calls.
    """

    run: Runner
    module: fx.GraphModule
    regions: tuple[RunnableRegion, ...]


def load(
    program: Program,
    name: GraphName,
    weights: Mapping[int, Weight],
    options: Options,
    sessions: Sequence[BoundSession | FrozenSession] | None = None,
) -> Loaded:
    """Makes a Program run.

    Args:
        program: the Program.
        name: which graph, for people.
        weights: the arguments that may be constants, by position.
        options: of the backend.
        sessions: those of the regions, where the compile had to make them to know that ONNX Runtime takes the models.

    Raises:
        SessionError: ONNX Runtime refused a model.
    """
    complete = options.weights == "checked"
    regions = []
    for i, region in enumerate(program.regions):
        held = {position: weights[argument] for position, argument in program.weights_of(i).items()}
        build = functools.partial(load_session, constants=held, complete=complete)
        session = build(region.executable) if sessions is None else sessions[i]
        checked: BoundSession | FrozenSession | CheckedSession = session
        if region.check is not None:
            from .provider_check import CheckedSession  # it leads to the libraries that make models

            called, check = f"{name} region {i}", region.check
            checked = CheckedSession(called, session, region.executable, check.others, build, check.module)
        regions.append(RunnableRegion(name, i, checked, region.in_pytorch, options.fallback == "error"))
    called_by_code = {region_name(region.index): region for region in regions}
    module = fx.GraphModule({**program.attributes, **called_by_code}, program.code, "SplitGraph")
    return Loaded(without_graph(module), module, tuple(regions))
