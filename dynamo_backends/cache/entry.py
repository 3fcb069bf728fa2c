"""A compiled graph as bytes, and back: its regions' executables, the code around them, and the report on it."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..artifacts import CompiledGraph, GraphName, RunnableRegion, Runner, without_graph
from ..coverage_report import Report
from ..frozen import Weight, load
from ..numerics.exact import attribute
from ..options import Options
from ..reasons import Kind, Reason
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.executable import Executable
from ..runtime.settings import SessionSettings
from ..strides import ExactStrides
from .code import CannotStoreError, decode_graph, encode_graph
from .description import bytes_of, check_plain, constants
from .store import Record


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is kept of a compiled graph.

    Attributes:
        assembled: its nodes, each region a call, see ``code.encode_graph``.
        regions: what runs on ONNX Runtime, on the execution providers of the options.
        in_pytorch: for each region its nodes, for calls on which its session fails.
        originals: from an attribute that the graph reads to the attribute it was before the passes.
        constants: attributes that the passes made.
        report: what runs where.
    """

    assembled: list[Any]
    regions: list[Executable]
    in_pytorch: list[list[Any]]
    originals: dict[str, str]
    constants: dict[str, torch.Tensor]
    report: Report

    def runner(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight], options: Options
    ) -> Runner:
        """What runs, with sessions that are made now.

        Args:
            name: which graph.
            module: the graph before its passes; its constants are taken from it.
            weights: the arguments that may be constants, by placeholder.
            options: of the backend.

        Raises:
            SessionError: ONNX Runtime refused a model.
            ValueError: something that the graph calls does not exist.
        """
        self._check_attributes()
        placeholders = list(module.graph.find_nodes(op="placeholder"))
        calls = {
            target[1]: args
            for op, _, target, args, _ in self.assembled
            if op == "call_function" and target[0] == "region"
        }
        regions = []
        for i, executable in enumerate(self.regions):
            given = calls[i][1]
            held = {}
            for position in executable.weights:
                kind, index = given[position]
                if kind != "node" or self.assembled[index][0] != "placeholder":  # these are the first nodes of a graph
                    raise ValueError("a weight that is no argument")
                held[position] = weights[placeholders[index]]
            settings = dataclasses.replace(executable.settings, providers=options.providers)
            executable = dataclasses.replace(executable, settings=settings)
            session = load(executable, held, complete=options.weights == "checked")
            in_pytorch = _Later(self.in_pytorch[i])
            regions.append(RunnableRegion(name, i, session, in_pytorch, options.fallback == "error"))
        graph = decode_graph(self.assembled, regions)
        graph.set_codegen(fx.graph._BoxedCodeGen())
        known = constants(module)
        attributes = {name: known[original] for name, original in self.originals.items()}
        return without_graph(fx.GraphModule({**attributes, **self.constants}, graph, "SplitGraph"))

    def _check_attributes(self) -> None:
        """Checks that what the graph reads from its module is what is kept, and nothing that each module has.

        Raises:
            ValueError: it is something else.
        """
        given = {*self.originals, *self.constants}
        if {target for op, _, target, _, _ in self.assembled if op == "get_attr"} != given:
            raise ValueError("attributes that are not kept, or not read")
        taken = sorted(name for name in given if hasattr(_MODULE, name) or not name.isidentifier())
        if taken:
            raise ValueError(f"a constant that is called {taken[0]!r}")


_MODULE = fx.GraphModule({}, fx.Graph())
"""A module without attributes of its own."""


class _Later:
    """The code of a region for PyTorch, which is made when it is first needed."""

    def __init__(self, encoded: list[Any]) -> None:
        self._encoded = encoded

    @functools.cached_property
    def _code(self) -> Callable[..., Sequence[object]]:
        return without_graph(fx.GraphModule({}, decode_graph(self._encoded), "Region"))

    def __call__(self, *args: object) -> Sequence[object]:
        return self._code(*args)


def entry_of(graph: CompiledGraph, in_pytorch: Sequence[fx.Graph], originals: Mapping[str, torch.Tensor]) -> Entry:
    """What is kept of a compiled graph.

    Args:
        graph: the graph.
        in_pytorch: its regions.
        originals: the constants that it read before its passes.

    Raises:
        CannotStoreError: something of it cannot be kept.
    """
    names = {id(tensor): name for name, tensor in originals.items()}
    found: dict[str, str] = {}
    made: dict[str, torch.Tensor] = {}
    for node in graph.assembled.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = attribute(graph.assembled, name)
        if "." in name or not isinstance(value, torch.Tensor):
            raise CannotStoreError("an attribute of a module in a module")
        if id(value) in names:
            found[name] = names[id(value)]
            continue
        check_plain(value)
        if not value.is_contiguous() or type(value) is not torch.Tensor or value.requires_grad:
            raise CannotStoreError("a constant that is not row-major")
        made[name] = value
    return Entry(
        encode_graph(graph.assembled.graph, [region.runnable for region in graph.regions]),
        [region.executable for region in graph.regions],
        [encode_graph(region) for region in in_pytorch],
        found,
        made,
        Report.of(graph.split),
    )


def to_record(entry: Entry) -> Record:
    """An entry as the store keeps it."""
    header = {
        "assembled": entry.assembled,
        "regions": [_encode_executable(item) for item in entry.regions],
        "in_pytorch": entry.in_pytorch,
        "originals": entry.originals,
        "constants": [[name, _name(item.dtype), list(item.shape)] for name, item in entry.constants.items()],
        "report": [
            entry.report.regions,
            entry.report.on_onnx,
            [[target, reason.kind.name, reason.text, number] for target, reason, number in entry.report.fallbacks],
        ],
    }
    blobs = [*(item.model for item in entry.regions), *map(bytes_of, entry.constants.values())]
    return Record(header, blobs)


def from_record(record: Record) -> Entry:
    """The entry that ``to_record`` described.

    Raises:
        ValueError, KeyError, TypeError: it described none.
    """
    header = record.header
    count = len(header["regions"])
    models, tensors = record.blobs[:count], record.blobs[count:]
    regions, on_onnx, fallbacks = header["report"]
    return Entry(
        header["assembled"],
        [_decode_executable(item, model) for item, model in zip(header["regions"], models, strict=True)],
        header["in_pytorch"],
        header["originals"],
        {
            name: torch.frombuffer(bytearray(content), dtype=_dtype(dtype)).reshape(shape)
            if content
            else torch.empty(shape, dtype=_dtype(dtype))
            for (name, dtype, shape), content in zip(header["constants"], tensors, strict=True)
        },
        Report(
            int(regions),
            int(on_onnx),
            tuple(
                (str(target), Reason(Kind[kind], str(text)), int(number)) for target, kind, text, number in fallbacks
            ),
        ),
    )


def _encode_executable(executable: Executable) -> dict[str, Any]:
    settings = executable.settings
    return {
        "inputs": [
            [item.name, _name(item.dtype), item.permutation, item.sizes, str(item.device)] for item in executable.inputs
        ],
        "outputs": [
            [
                *(item.name, _name(item.dtype), item.is_number, item.permutation, item.strides),
                *(item.exact and dataclasses.astuple(item.exact), item.sizes, str(item.device)),
            ]
            for item in executable.outputs
        ],
        "threads": settings.threads,
        "shares_graph": settings.shares_graph,
        "spin": settings.spin,
        "optimize": settings.optimize,
        "disabled_optimizers": settings.disabled_optimizers,
        "weights": executable.weights,
    }


def _decode_executable(encoded: Mapping[str, Any], model: bytes) -> Executable:
    inputs = tuple(
        InputSpec(name, None if dtype is None else _dtype(dtype), _tuple(order), _sizes(sizes), torch.device(device))
        for name, dtype, order, sizes, device in encoded["inputs"]
    )
    outputs = tuple(
        OutputSpec(
            name,
            _dtype(dtype),
            is_number=is_number,
            permutation=_tuple(order),
            strides=_tuple(strides),
            exact=exact and ExactStrides(*map(_tuple, exact)),
            sizes=_sizes(sizes),
            device=torch.device(device),
        )
        for name, dtype, is_number, order, strides, exact, sizes, device in encoded["outputs"]
    )
    settings = SessionSettings(
        (),  # the options say which; a file does not, as some of their options name libraries
        encoded["threads"],
        encoded["shares_graph"],
        encoded["spin"],
        encoded["optimize"],
        tuple(encoded["disabled_optimizers"]),
    )
    return Executable(model, inputs, outputs, settings, tuple(encoded["weights"]))


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


def _tuple(items: Sequence[int] | None) -> tuple[int, ...] | None:
    if not all(isinstance(item, int) for item in items or ()):
        raise ValueError(f"{items} are no numbers")
    return None if items is None else tuple(items)


def _sizes(items: Sequence[int | str] | None) -> tuple[int | str, ...] | None:
    for item in items or ():
        if isinstance(item, str):
            _check_expression(item)
        elif not isinstance(item, int):
            raise ValueError(f"{item!r} is no size")
    return None if items is None else tuple(items)


_IN_SIZES = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
    *(ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.IfExp, ast.Call, ast.Attribute, ast.List, ast.Tuple),
)


@functools.lru_cache(maxsize=1_000)
def _check_expression(text: str) -> None:
    """Checks that the text of a symbolic size, which is computed in calls, is arithmetic and nothing else.

    Raises:
        ValueError: it is something else.
    """
    try:
        parsed = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no size") from error
    for node in ast.walk(parsed):
        is_known = isinstance(node, _IN_SIZES)
        if isinstance(node, ast.Attribute):
            is_known = isinstance(node.value, ast.Name) and node.value.id in ("math", "torch")
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        is_known = is_known and not name.startswith("__")
        if not is_known:
            raise ValueError(f"{text!r} is no size")
