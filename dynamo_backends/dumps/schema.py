"""The format of ``manifest.json`` and ``side_by_side.json``; the graphs of the stages are lists of ``GraphNode``.

``debug`` fills these classes, and ``reading`` returns them::

    entry = msgspec.convert(value, GraphEntry, str_keys=True)  # checks each value
    entry.regions[0].session.threads

Unknown names are ignored; a field with a default may be missing. ``docs/dump_folder.md`` documents the same.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from passes.engine.results import PassResult

from ..numerics.element_records import Extent, NonfiniteElement, WrongElements
from .blame import CauseKind

Direction = Literal["inference", "forward", "backward"]

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)  # of AOTAutograd's graphs, in execution order

Level = Literal["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL"]


_MOST_REASONS = 3
"""Reasons that a message has; ``in_pytorch`` has all."""


@dataclasses.dataclass(frozen=True)
class StageEntry:
    """A stage of a graph or a region, or of a graph with all its regions."""

    name: str  # one of ``stage_graphs.STAGES``
    nodes: int  # operators of its graph, or ONNX nodes of its model
    file: str | None = None  # in the run folder, a pattern for several regions; ``None`` if the stage changed nothing
    same_as: str | None = None  # the earlier stage with the same graph, if the stage changed nothing


def stage_named(stages: Iterable[StageEntry], name: str) -> StageEntry | None:
    return next((stage for stage in stages if stage.name == name), None)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of an ONNX Runtime session, as for ``repro.session_of``.

    ``threads`` is 0 for one per core. Only those ``custom_op_libraries`` are loaded that the environment names, too.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    provider_options: tuple[Mapping[str, str], ...] = ()
    graph_optimization_level: Level = "ORT_ENABLE_ALL"
    disabled_optimizers: tuple[str, ...] = ()
    threads: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = 0
    config: Mapping[str, str] = dataclasses.field(default_factory=dict)
    custom_op_libraries: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()  # or libraries of providers that are not built in: ``onnxruntime-ep-openvino 1.8.1``

    def as_json(self) -> dict[str, Any]:
        """The dictionary for ``repro.session_of``."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields

    @property
    def unoptimized(self) -> Settings:
        """These settings without graph optimizations."""
        return dataclasses.replace(self, graph_optimization_level="ORT_DISABLE_ALL", disabled_optimizers=())


@dataclasses.dataclass(frozen=True)
class ProductEntry:
    """A product, ONNX Runtime's kernel for it, and the bits of its operands: ``float32 x 4 bits``."""

    node: str
    kernel: str
    bits: str
    source: str  # the user's line
    why: str  # why a branch without integers was taken


@dataclasses.dataclass(frozen=True)
class RegionEntry:
    """A region of a graph."""

    index: int
    folder: str  # in the run folder
    nodes: int  # FX operators
    onnx_nodes: int  # of ``model.onnx``
    onnx_nodes_optimized: int  # after our passes
    passes: Sequence[PassResult]  # of the stage ``onnx``
    session: Settings
    constants: Sequence[str]  # the inputs that are constants of the session
    stages: Sequence[StageEntry]
    products: Sequence[ProductEntry] = ()


@dataclasses.dataclass(frozen=True)
class FallbackEntry:
    """A node that runs in PyTorch, the reason, and the user's line."""

    node: str
    operator: str
    reason: str
    source: str


@dataclasses.dataclass(frozen=True)
class MeasureEntry:
    """A ``numerics.rule.Measure``; numbers that are NaN or infinite are ``None``."""

    max_abs: float | None
    max_ulp: float | None
    nonfinite: int
    scale: float | None
    share: float | None
    position: int = 0
    error: float | None = None
    limit: float | None = None


M = TypeVar("M")
"""A ``MeasureEntry`` in a file; a ``numerics.rule.Measure`` while it is made."""


@dataclasses.dataclass(frozen=True)
class Error(Generic[M]):
    """The error of a value, and eager's if known."""

    value: str
    onnx: M
    eager: M | None


@dataclasses.dataclass(frozen=True)
class BlamedValue:
    """A value that is wrong."""

    value: str  # the FX node, with ``__i`` for the i-th of several results; or the name of a result without a row
    _: dataclasses.KW_ONLY
    user_name: str = ""  # such as ``grad of fc.weight``
    gradients: Sequence[str] = ()  # in a backward, the user's gradients that depend on it, in execution order
    region: int | None = None  # ``None`` in PyTorch, or if the fault is in a stage before the regions
    source: str = ""  # the user's line, see ``graphs.locations.location_text``
    module: str = ""  # the path of the ``nn.Module``
    code: str = ""  # the file and line of the pass, converter or decomposition at fault
    more: int = 0  # how many more nodes are wrong by themselves
    elements: WrongElements | None = None  # those that exceed the tolerance


def node_of(value: str) -> str:
    """The FX node of a value: ``max_1`` of ``max_1__0``, and ``__and__`` of itself."""
    return re.sub(r"(?<!^)__\d+$", "", value)


@dataclasses.dataclass(frozen=True)
class WrongNodeEntry:
    """A node that is wrong by itself."""

    value: str  # as in ``BlamedValue``, with the next four
    operator: str
    source: str
    module: str
    code: str
    error: MeasureEntry | None  # its local error; ``None`` for a discrete value, or another dtype or shape
    elements: str  # how many are wrong, and what they have in common, see ``WrongElements.text``; or the complaint


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlameEntry(BlamedValue):
    """The value that a verdict names, and the cause, see ``blame.Cause``."""

    kind: CauseKind
    name: str
    stage: str = ""
    cause: str = ""  # for people


@dataclasses.dataclass
class Cost:
    """The time of one run, and the tensors passed between ONNX Runtime and PyTorch."""

    region_milliseconds: dict[int, float] = dataclasses.field(default_factory=dict)  # by region
    pytorch_milliseconds: float = 0.0  # of all nodes in PyTorch
    crossing_tensors: int = 0  # passed between regions, or between a region and PyTorch
    crossing_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class RepeatedEntry:
    """The result of running a region a second time."""

    differing_outputs: int  # not equal bit for bit
    failure: str  # why it could not run, or ``""``


@dataclasses.dataclass
class GraphEntry:
    """An entry of ``graphs``: a compiled graph. Fields with defaults are results of its runs."""

    index: int  # of Dynamo's graph
    direction: Direction
    folder: str  # in the run folder
    nodes: int  # operators, without ``getitem`` of several results
    nodes_on_onnx: int
    share_on_onnx: float  # 0 to 1
    regions: Sequence[RegionEntry]  # in execution order
    in_pytorch: Sequence[FallbackEntry]
    passes: Sequence[PassResult]  # of the stage ``post_grad``
    stages: Sequence[StageEntry]  # ``aten`` and ``post_grad``
    names: Mapping[str, str]  # the user's names of the arguments, by FX name
    seconds: Mapping[str, float]  # compile time by stage
    reference: str  # to what its runs are compared
    dropout: Sequence[str] = ()  # the lines where dropout is active
    files_in: str | None = None  # the run folder of the parent process, if that compiled it before a fork
    status: str = "compiled"  # ``compared`` after a comparison; ``bisected`` for the cut of a bisection
    runs: int = 0
    compared_runs: int = 0
    runs_at_other_sizes: int = 0  # runs at sizes of which none was compared
    compared_sizes: list[dict[str, object]] = dataclasses.field(default_factory=list)  # by argument, of some runs
    sizes: dict[str, object] = dataclasses.field(default_factory=dict)  # those of the verdict
    verdict: str | None = None  # ``ok``, ``diverges at …``, ``not comparable: …``; ``None`` if no run was compared
    note: str = ""  # additional information
    blame: BlameEntry | None = None  # the value that the verdict names
    wrong_nodes: Sequence[WrongNodeEntry] = ()  # the largest errors first; ``blame.more`` counts all but one
    worst: Error[MeasureEntry] | None = None  # see ``debug.rows.GraphComparison.worst``
    nonfinite: Mapping[str, int] = dataclasses.field(default_factory=dict)  # NaN and infinite elements, by result
    unchecked: Sequence[str] = ()  # what was not compared, or not with float64, each with the reason
    rescued: Mapping[int, str] = dataclasses.field(default_factory=dict)  # ONNX Runtime's errors, by region
    cost: Cost | None = None  # of the compared run
    repeated: Mapping[int, RepeatedEntry] = dataclasses.field(default_factory=dict)  # by region

    @property
    def why_in_pytorch(self) -> str:
        """The reasons of operators in PyTorch, each with its first operator."""
        first = {item.reason: item.operator for item in reversed(self.in_pytorch)}
        texts = [f"{operator}: {reason}" for reason, operator in reversed(first.items())]
        return "; ".join(texts[:_MOST_REASONS]) or "it has no operators"

    @property
    def as_compiled(self) -> GraphEntry:
        """The entry before the first run, with the defaults."""
        known = [field.name for field in dataclasses.fields(self) if field.default is field.default_factory]
        return GraphEntry(**{name: getattr(self, name) for name in known})


@dataclasses.dataclass(frozen=True)
class LineEntry:
    """A line of a function."""

    function: str
    file: str
    line: int | None
    place: str = ""  # ``file:line`` where a graph begins; for a library's file, also the user's line that called it


@dataclasses.dataclass(frozen=True)
class EndEntry:
    """Where and why a graph of Dynamo ends."""

    reason: str  # ``the end of the function`` or ``graph break: …``
    file: str
    line: int | None
    details: str = ""

    @property
    def place(self) -> str:
        """``file:line``."""
        return ":".join(str(part) for part in (self.file, self.line) if part)


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
    files_in: str | None = None  # as in ``GraphEntry``
    passes: Sequence[PassResult] = ()  # of ``pre_grad`` and ``joint``

    @property
    def begins(self) -> LineEntry:
        """``where``; with empty texts if it is unknown, as with ``onnx_compiler``."""
        return self.where or LineEntry("", "", None)

    @property
    def ends(self) -> EndEntry:
        return self.end or EndEntry("", "", None)

    @property
    def passes_seconds(self) -> float:
        return sum(result.milliseconds for result in self.passes) / 1e3


@dataclasses.dataclass
class RunEntry:
    """``manifest.json``. Graphs are checked one by one when they are read, so that a damaged one hides no others."""

    schema_version: int
    started: str = ""  # ISO 8601, UTC
    forked_from: str | None = None  # the run folder of the parent process
    working_folder: str = ""  # to which paths of the user's files are relative
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of the backend
    dynamo_graphs: Sequence[object] = ()  # each a ``DynamoGraphEntry``
    graphs: Sequence[object] = ()  # each a ``GraphEntry``
    counters: Mapping[str, object] = dataclasses.field(default_factory=dict)
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)  # functions that Dynamo does not compile: why
    unused: Sequence[str] = ()  # converters and passes that a user registered and no graph used, and why


@dataclasses.dataclass(frozen=True)
class FrameEntry:
    """A stack frame of an operator's call; ``user`` says whether the file is the user's."""

    file: str
    line: int
    function: str
    code: str
    user: bool


@dataclasses.dataclass(frozen=True)
class Instability(Generic[M]):
    """A value that is right in one run and wrong in another, or wrong in both and not the same."""

    threads: int  # of the session
    difference: M  # the error of the wrong value

    def __str__(self) -> str:
        return f"with {self.threads} thread{'s' if self.threads > 1 else ''}, run to run"


@dataclasses.dataclass
class ValueRow(Generic[M]):
    """A value of a graph and its error."""

    name: str  # the FX node, with ``__i`` for the i-th of several results; the ONNX value has the same name
    operator: str  # the ATen operator, or ``placeholder`` or ``get_attr``
    module: str = ""  # the path of the ``nn.Module``
    source: str = ""  # the user's ``file:line``
    user_name: str = ""  # ``fc.weight`` for an argument, ``grad of fc.weight`` for a result
    dtype: str = ""  # eager's, without the ``torch.`` prefix
    shape: tuple[int, ...] = ()  # eager's
    region: int | None = None  # ``None`` in PyTorch
    is_output: bool = False  # whether the graph returns it
    origin: str = ""  # ``session``, ``PyTorch``, ``argument``; ``""``: the run does not have it, eager's is shown
    segment: Sequence[str] = ()  # the nodes before it that are judged together with it
    step: str = ""  # the last step that was taken to judge it, see ``numerics.segments``
    equals_eager: bool = False  # whether it is eager's on the same inputs, bit for bit
    index: tuple[int, ...] = ()  # of the element with the worst error, if that exceeds the tolerance
    inputs: Sequence[str] = ()  # the names of the rows that the node reads
    has_infinite_argument: bool = False  # whether a number among its arguments is infinite or NaN, as in a mask
    is_uninitialized: bool = False  # whether it is uninitialized memory
    complaint: str = ""  # a dtype, shape, or symbolic integer that is not eager's
    converter: str = ""  # the file and line of the converter of a node on ONNX Runtime
    is_registered: bool = False  # whether that is a user's, see ``register_converter``
    wrong_elements: WrongElements | None = None  # those that exceed the tolerance, of a wrong value
    error: M | None = None  # against PyTorch on the same inputs; ``None`` if the value is not known
    eager: M | None = None  # eager's error against float64 on the same inputs, if that was needed
    instability: Instability[M] | None = None  # if the value differed in another run
    eager_extent: Extent | None = None  # of eager's result on the same inputs; ``None`` for integers
    extent: Extent | None = None  # of the value
    mean_difference: float | None = None  # from eager's, in units in the last place; of many elements that differ
    nonfinite_elements: Sequence[NonfiniteElement] = ()  # some elements of eager's value or of ONNX Runtime's

    @property
    def is_computed(self) -> bool:
        """Whether it is neither an argument nor a constant of the graph."""
        return self.operator not in ("placeholder", "get_attr")


@dataclasses.dataclass
class RowEntry(ValueRow[MeasureEntry]):
    """A row of ``side_by_side.json``."""

    stack: Sequence[FrameEntry] = ()  # outermost first
    mark: str = " "
    is_right: bool = True

    @property
    def where(self) -> str:
        """The source line, with the line of a library that it leads to, see ``graphs.locations.location_text``."""
        if not self.stack or self.stack[-1].user:
            return self.source
        frame = self.stack[-1]
        file = frame.file.rpartition("site-packages/")[2]
        return f"{file}:{frame.line}, called from {self.source}" if self.source else f"{file}:{frame.line}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparisonEntry:
    """``side_by_side.json``, with rows in execution order."""

    verdict: str = ""
    note: str = ""
    rows: Sequence[RowEntry]
