"""What the stages from ``post_grad`` on exchange; observers see all of it. What runs is the ``Program`` alone."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from ..graphs.artifacts import GraphName, Region, Split
from ..partition.program import LoadedRegion, Program, RegionProgram
from ..runtime.executable import Executable
from ..runtime.session import Session
from ..weights.region_session import RegionSession, Weight

if TYPE_CHECKING:  # an observer is there before anything is compiled
    import onnx_ir as ir

    from passes.engine.results import PassResult

    from ..errors import KernelFaultError
    from ..graphs.in_place import PartialWrite
    from ..numerics.exact import Environment
    from .product_kernels import ProductKernel


@dataclasses.dataclass(frozen=True, eq=False)
class PostGradGraph:
    """A graph after the passes of ``post_grad``.

    Attributes:
        name, module: of the graph.
        passes: the results of these passes.
        evaluation: its values on real arguments, if the passes of ``onnx`` are checked.
        weights: the arguments that may be constants, by placeholder.
        writes: those that may be in place.
        is_undone: whether a pass so far was undone.
        seconds: the duration of ``split``, ``export``, ``onnx_passes`` and ``session``, over all regions and attempts.
    """

    name: GraphName
    module: fx.GraphModule
    passes: list[PassResult]
    evaluation: Environment | None
    weights: Mapping[fx.Node, Weight]
    writes: Sequence[PartialWrite]
    is_undone: bool = False
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to ``seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


@dataclasses.dataclass(frozen=True, eq=False)
class EmittedRegion:
    """A region as an ONNX model.

    Attributes:
        region: its nodes, inputs and outputs.
        model: the model as it was translated.
        optimized_model: the model after the passes of the stage ``onnx``.
        passes: the results of these passes.
        constants: the weights that are constants of its session, by position among its inputs.
        fault: a wrong kernel of the first provider that a node would run on; then nothing may load the model.
        program: what ``load`` takes.
    """

    region: Region
    model: ir.Model
    optimized_model: ir.Model
    passes: list[PassResult]
    constants: Mapping[int, Weight]
    fault: KernelFaultError | None
    program: RegionProgram


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledRegion:
    """A region with its models and its session, for observers.

    Attributes:
        graph: the graph that it is a part of.
        emitted: its models.
        loaded: the model that ONNX Runtime runs, and its session.
        products: how its products are computed, with the weights of the compile; empty if no observer watches.
    """

    graph: GraphName
    emitted: EmittedRegion
    loaded: LoadedRegion
    products: Sequence[ProductKernel] = ()

    @property
    def region(self) -> Region:
        """Its nodes, inputs and outputs."""
        return self.emitted.region

    @property
    def model(self) -> ir.Model:
        """The model as it was translated."""
        return self.emitted.model

    @property
    def optimized_model(self) -> ir.Model:
        """The model after the passes of the stage ``onnx``."""
        return self.emitted.optimized_model

    @property
    def passes(self) -> list[PassResult]:
        """The results of these passes."""
        return self.emitted.passes

    @property
    def executable(self) -> Executable:
        """The model that ONNX Runtime loaded, and its settings."""
        return self.loaded.executable

    @property
    def session(self) -> RegionSession:
        """Runs the region; it may rebuild its session when weights change."""
        assert self.loaded.session is not None
        return self.loaded.session

    @property
    def bound(self) -> Session:
        """Its session; with several sets of weights, one of their sessions."""
        return self.session.bound


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledGraph:
    """A forward, backward or inference graph and all that was compiled from it, for observers.

    Attributes:
        name: which graph.
        module: the graph of the stage ``post_grad``.
        split: its regions, and the reason for each node in PyTorch.
        regions: the compiled regions.
        program: what is loaded.
        passes: the results of the ``post_grad`` passes.
        seconds: see ``PostGradGraph``.
    """

    name: GraphName
    module: fx.GraphModule
    split: Split
    regions: list[CompiledRegion]
    program: Program
    passes: list[PassResult]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
