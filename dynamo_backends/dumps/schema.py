"""What the JSON files of a dump hold: ``manifest.json``, ``side_by_side.json``, and the graphs of the stages.

Who writes a dump fills these classes, and who reads one gets them::

    entry = msgspec.convert(value, GraphEntry, str_keys=True)  # checks each value
    entry.regions[0].session.threads

A name that is not known here is ignored, and one with a default may be missing. ``docs/dump_folder.md`` is the same for
people.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

from passes.engine.results import PassResult

from .blame import Kind

Direction = Literal["inference", "forward", "backward"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)  # what AOTAutograd makes of a graph, in the order it runs

NodeKind = Literal["input", "node", "output"]

Level = Literal["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL"]


@dataclasses.dataclass(frozen=True)
class StageEntry:
    """A stage of a graph or a region, or of a graph with all its regions."""

    name: str  # one of ``stage_graphs.STAGES``
    nodes: int  # how many operators its graph has, or ONNX nodes its model
    file: str | None = None  # its file in the run folder, of several regions a pattern; ``None`` if it changed nothing
    same_as: str | None = None  # the earlier stage whose file shows it, if it changed nothing


def stage_named(stages: Iterable[StageEntry], name: str) -> StageEntry | None:
    """The stage of that name, if it is among some."""
    return next((stage for stage in stages if stage.name == name), None)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model becomes an ONNX Runtime session, with the names that ``repro.session_of`` has.

    ``threads`` is 0 for as many as there are cores. Of ``custom_op_libraries`` only those are loaded that the option of
    that name in the environment names: a folder's word is no reason to run code.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    provider_options: tuple[Mapping[str, str], ...] = ()
    graph_optimization_level: Level = "ORT_ENABLE_ALL"
    disabled_optimizers: tuple[str, ...] = ()
    threads: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = 0
    config: Mapping[str, str] = dataclasses.field(default_factory=dict)
    custom_op_libraries: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same for ``repro.session_of``."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields

    @property
    def unoptimized(self) -> Settings:
        """The same without graph optimizations."""
        return dataclasses.replace(self, graph_optimization_level="ORT_DISABLE_ALL", disabled_optimizers=())

    @property
    def text(self) -> str:
        """In words."""
        provider = self.providers[0].removesuffix("ExecutionProvider")
        level = self.graph_optimization_level.removeprefix("ORT_").removeprefix("ENABLE_").lower().replace("_", " ")
        without = f" without {', '.join(self.disabled_optimizers)}" if self.disabled_optimizers else ""
        return f"ONNX Runtime, {provider}, optimizations: {level}{without}"


@dataclasses.dataclass(frozen=True)
class RegionEntry:
    """A region of a graph."""

    index: int
    folder: str  # in the run folder
    nodes: int  # FX operators
    onnx_nodes: int  # of its model; ``onnx_nodes_optimized``: after our passes
    onnx_nodes_optimized: int
    passes: Sequence[PassResult]  # those of the stage ``onnx``
    session: Settings
    constants: Sequence[str]  # the inputs whose values are constants of the session
    stages: Sequence[StageEntry]  # its models


@dataclasses.dataclass(frozen=True)
class FallbackEntry:
    """A node that runs in PyTorch: its operator, why, and the line."""

    node: str
    operator: str
    reason: str
    source: str


@dataclasses.dataclass(frozen=True)
class DistanceEntry:
    """A ``numerics.measure.Measure``; ``None`` for a number that is NaN or infinite, which JSON does not have."""

    max_abs: float | None
    max_rel: float | None
    rmse: float | None
    max_ulp: float | None
    nonfinite: int
    scale: float | None
    share: float | None
    position: int = 0
    error: float | None = None
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class ErrorEntry:
    """The error of a value, and eager's where it is known."""

    value: str
    onnx: DistanceEntry
    eager: DistanceEntry | None


@dataclasses.dataclass(frozen=True)
class BlamedValue:
    """A value that is wrong."""

    value: str  # the FX node, with ``__i`` for the i-th of several results; what a result is called that has no row
    _: dataclasses.KW_ONLY
    user_name: str = ""  # what the user calls it, ``grad of fc.weight``, or ``""``
    gradients: Sequence[str] = ()  # in a backward, what the user gets that is computed next of it
    region: int | None = None  # that computes it; ``None`` in PyTorch, or where a stage before the regions is to blame
    source: str = ""  # the line, see ``exporter.locations.place``, or ``""``
    module: str = ""  # the path of the ``nn.Module`` that computes it, or ``""``
    code: str = ""  # the file and line of what made it wrong, a pass or a registered converter; or ``""``
    more: int = 0  # how many more nodes are wrong by themselves
    because: str = ""  # what else makes it wrong, such as a wrong forward; or ``""``


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlameEntry(BlamedValue):
    """What a verdict names, and the cause, see ``blame.Cause``."""

    kind: Kind
    name: str
    stage: str = ""
    cause: str = ""  # in words


@dataclasses.dataclass
class Cost:
    """Where one run spent its time, and what crossed between ONNX Runtime and PyTorch."""

    region_milliseconds: dict[int, float] = dataclasses.field(default_factory=dict)  # of each region's call
    pytorch_milliseconds: float = 0.0  # of all nodes in PyTorch
    crossing_tensors: int = 0  # values that one region computes and another or PyTorch reads, or the reverse
    crossing_bytes: int = 0  # their size


@dataclasses.dataclass(frozen=True)
class RepeatedEntry:
    """A region that ran again: how many outputs had other bits, and why it could not run, or ``""``."""

    differing_outputs: int
    failure: str


@dataclasses.dataclass
class GraphEntry:
    """An entry of ``graphs``: a graph that was compiled, and with defaults what its runs found."""

    index: int  # the number of Dynamo's graph
    direction: Direction
    folder: str  # in the run folder
    nodes: int  # operators in all, without the unpacking of several results
    nodes_on_onnx: int
    share_on_onnx: float  # 0 to 1
    regions: Sequence[RegionEntry]  # in the order they run
    in_pytorch: Sequence[FallbackEntry]
    passes: Sequence[PassResult]  # those of the stage ``post_grad``
    stages: Sequence[StageEntry]  # ``aten`` and ``post_grad``
    names: Mapping[str, str]  # what the user calls the arguments, by their FX names
    seconds: Mapping[str, float]  # how long it took to compile, by stage
    reference: str  # what its runs are compared with
    files_in: str | None = None  # the run folder of the process that compiled it and forked this one
    status: str = "compiled"  # ``compared`` once a run was; ``bisected`` of what ``bisect`` cut out
    runs: int = 0
    compared_runs: int = 0
    runs_at_other_sizes: int = 0  # how many ran at sizes at which none was compared
    compared_sizes: list[dict[str, object]] = dataclasses.field(default_factory=list)  # by argument, of some runs
    sizes: dict[str, object] = dataclasses.field(default_factory=dict)  # those of the verdict
    verdict: str | None = None  # ``ok``, ``diverges at …``, ``not comparable: …``; ``None`` if no run was compared
    note: str = ""  # what is known beside it
    blame: BlameEntry | None = None  # what the verdict names
    worst: ErrorEntry | None = None  # see ``debug.rows.GraphComparison.worst``
    unchecked: Sequence[str] = ()  # what could not be compared, or not with float64, each with the reason
    rescued: Mapping[int, str] = dataclasses.field(default_factory=dict)  # what ONNX Runtime said, by region
    cost: Cost | None = None  # of the compared run
    repeated: Mapping[int, RepeatedEntry] = dataclasses.field(default_factory=dict)  # by region

    @property
    def as_compiled(self) -> GraphEntry:
        """The same before its first run, with the defaults."""
        known = [field.name for field in dataclasses.fields(self) if field.default is field.default_factory]
        return GraphEntry(**{name: getattr(self, name) for name in known})


@dataclasses.dataclass(frozen=True)
class LineEntry:
    """A line of a function."""

    function: str
    file: str
    line: int | None
    place: str = ""  # where a graph begins: the line, and where it is a library's the user's that led there


@dataclasses.dataclass(frozen=True)
class EndEntry:
    """Where a graph of Dynamo's ends, and why: ``the end of the function`` or ``graph break: …``, with the details."""

    reason: str
    file: str
    line: int | None
    details: str = ""


@dataclasses.dataclass
class DynamoGraphEntry:
    """An entry of ``dynamo_graphs``."""

    index: int
    where: LineEntry | None
    end: EndEntry | None
    stages: Sequence[StageEntry]  # ``dynamo``, ``pre_grad`` and ``joint``
    called_from: LineEntry | None = None  # the user's line
    given_up: str | bool = False  # why Dynamo does not use it, or ``False``
    not_compiled: dict[str, str] = dataclasses.field(default_factory=dict)  # why PyTorch runs it, by direction
    files_in: str | None = None  # as of a graph
    passes: Sequence[PassResult] = ()  # those of ``pre_grad`` and ``joint``


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """``manifest.json``. Its graphs are checked one by one when they are read: a damaged one hides no others."""

    schema_version: int
    started: str = ""  # when, as ISO 8601 in UTC
    forked_from: str | None = None  # the run folder of the process that forked this one
    working_folder: str = ""  # where relative paths of the user's files begin
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of the backend, as they were given
    dynamo_graphs: Sequence[object] = ()  # each a ``DynamoGraphEntry``
    graphs: Sequence[object] = ()  # each a ``GraphEntry``
    counters: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class FrameEntry:
    """A call on the way to an operator: where it is, the code, and whether the file is the user's."""

    file: str
    line: int
    function: str
    code: str
    user: bool


@dataclasses.dataclass(frozen=True)
class ExtentEntry:
    """See ``numerics.value_range.Extent``."""

    smallest: float | None
    largest: float | None
    nan: int
    infinite: int


@dataclasses.dataclass(frozen=True)
class ElementEntry:
    """See ``numerics.value_range.nonfinite_elements``."""

    index: Sequence[int]
    value: float | str
    inputs: Mapping[str, float | str]


@dataclasses.dataclass(frozen=True)
class InstabilityEntry:
    """How far a value was from itself when it was computed again, with how many threads each time."""

    threads: int
    other_threads: int
    difference: DistanceEntry


@dataclasses.dataclass
class ValueFacts:
    """What is known of a value of a graph, but its numbers."""

    name: str  # the FX node, with ``__i`` for the i-th of several results; the ONNX value bears the same name
    operator: str  # the ATen operator, or ``placeholder`` or ``get_attr``
    module: str = ""  # path of the ``nn.Module`` that called it
    source: str = ""  # the user's own ``file:line``
    user_name: str = ""  # ``fc.weight`` of an argument, ``grad of fc.weight`` of a result; or ``""``
    dtype: str = ""  # eager's, without the ``torch.`` prefix
    shape: tuple[int, ...] = ()  # eager's
    region: int | None = None  # that computes it; ``None`` in PyTorch
    is_output: bool = False  # whether the graph returns it
    equals_eager: bool = False  # whether the runtime's propagated value is eager's, bit for bit
    index: tuple[int, ...] = ()  # of the element whose local error is worst, where that is no rounding
    inputs: Sequence[str] = ()  # the values that the node reads, as rows have their names
    has_infinite_argument: bool = False  # whether a number among its arguments is infinite or NaN, as of a mask
    is_uninitialized: bool = False  # whether it is memory as it is, without values
    complaint: str = ""  # a dtype or shape that is not eager's, or ``""``
    converter: str = ""  # the file and line of the registered function that is the operator's translation, or ``""``

    @property
    def is_computed(self) -> bool:
        """Whether the graph computes it, and does not take it as an argument or hold it."""
        return self.operator not in ("placeholder", "get_attr")


@dataclasses.dataclass
class RowEntry(ValueFacts):
    """A value in ``side_by_side.json``."""

    stack: Sequence[FrameEntry] = ()  # the calls that led to it, outermost first
    onnx: DistanceEntry | None = None  # propagated distance to exact
    eager: DistanceEntry | None = None  # eager's distance to exact
    # the error of the node by itself, on what it is given in the model: to eager's result on the same if that is no
    # more than rounding, else to float64's
    local_onnx: DistanceEntry | None = None
    local_eager: DistanceEntry | None = None  # eager's distance to the same: nothing, or the error that it has
    # distance to exact of what the session that really ran computed: what it returned, or the value of that name in the
    # model ONNX Runtime made of it
    session: DistanceEntry | None = None
    session_instability: InstabilityEntry | None = None  # how that came out another time, where its bits differed
    # the same of the node alone, on eager's inputs; it is looked for where the session or the node alone differs by
    # more than rounding
    local_instability: InstabilityEntry | None = None
    eager_extent: ExtentEntry | None = None  # of eager's value; ``None`` of integers
    onnx_extent: ExtentEntry | None = None  # of the runtime's propagated value, or the one of PyTorch's in the run
    session_extent: ExtentEntry | None = None  # of what ``session`` is the distance of
    nonfinite_elements: Sequence[ElementEntry] = ()  # some that are NaN or infinite, of eager's value or the runtime's
    mark: str = " "
    locally_explained: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonEntry:
    """``side_by_side.json``; the rows are in execution order."""

    verdict: str = ""
    note: str = ""
    rows: Sequence[RowEntry]


@dataclasses.dataclass(frozen=True)
class NodeEntry:
    """A node of a stage's FX graph."""

    kind: NodeKind
    name: str  # of its value, those of a subgraph after the subgraph's: ``cond_true_0.sin``; of the output ``return``
    operator: str  # operator, arguments, type: as of ``graph_text.GraphNode``
    arguments: tuple[str, ...]
    type: str
    source: str
    user_name: str


@dataclasses.dataclass(frozen=True)
class FxGraphEntry:
    """``aten.json`` and those of the other stages that are FX graphs."""

    nodes: Sequence[NodeEntry]  # in the order of the graph, those of a subgraph after it
    lines: Mapping[str, str]  # the code of each line that a node comes from
