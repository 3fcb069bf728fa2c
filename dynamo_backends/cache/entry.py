"""A compiled graph as a record of the store, and back: its regions' executables, the code around them, the report."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
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
from .code import CannotStoreError, decode, decode_graph, encode, encode_graph
from .description import bytes_of, check_plain, constants
from .store import Record


def to_record(graph: CompiledGraph, in_pytorch: Sequence[fx.Graph], originals: Mapping[str, torch.Tensor]) -> Record:
    """What is kept of a compiled graph.

    Args:
        graph: the graph.
        in_pytorch: for each region its nodes, for calls on which its session fails.
        originals: the constants that the graph read before its passes.

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
    executables = [region.executable for region in graph.regions]
    report = Report.of(graph.split)
    header = {
        "assembled": encode_graph(graph.assembled.graph, [region.runnable for region in graph.regions]),
        "regions": [_encode_executable(item) for item in executables],
        "in_pytorch": [encode_graph(region) for region in in_pytorch],
        "originals": found,
        "constants": [[name, encode((item.dtype, tuple(item.shape)), {})] for name, item in made.items()],
        "report": [
            report.regions,
            report.on_onnx,
            [[target, reason.kind.name, reason.text, number] for target, reason, number in report.fallbacks],
        ],
    }
    return Record(header, [*(item.model for item in executables), *map(bytes_of, made.values())])


def from_record(
    record: Record, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight], options: Options
) -> tuple[Runner, Report]:
    """What runs, with sessions that are made now, and the report on it.

    Args:
        record: made by ``to_record``.
        name: which graph.
        module: the graph before its passes; its constants are taken from it.
        weights: the arguments that may be constants, by placeholder.
        options: of the backend.

    Raises:
        SessionError: ONNX Runtime refused a model.
        ValueError, LookupError, TypeError, AttributeError, RuntimeError: the record describes no graph.
    """
    header = record.header
    assembled, number = header["assembled"], len(header["regions"])
    models, tensors = record.blobs[:number], record.blobs[number:]
    made = {
        key: _tensor(content, *decode(encoded, []))
        for (key, encoded), content in zip(header["constants"], tensors, strict=True)
    }
    read = {target for op, _, target, _, _ in assembled if op == "get_attr"}
    if read != {*header["originals"], *made} or any(hasattr(_MODULE, key) or not key.isidentifier() for key in read):
        raise ValueError("attributes that are not kept, not read, or of every module")
    regions, on_onnx, fallbacks = header["report"]
    reasons = [(target, Reason(Kind[kind], text), times) for target, kind, text, times in fallbacks]
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    calls = {target[1]: args for op, _, target, args, _ in assembled if op == "call_function" and target[0] == "region"}
    runnable = []
    for i, (encoded, model) in enumerate(zip(header["regions"], models, strict=True)):
        executable = _decode_executable(encoded, model)
        held = {}
        for position in executable.weights:
            kind, index = calls[i][1][position]
            if kind != "node" or assembled[index][0] != "placeholder":  # these are the first nodes of a graph
                raise ValueError("a weight that is no argument")
            held[position] = weights[placeholders[index]]
        settings = dataclasses.replace(executable.settings, providers=options.providers)
        session = load(dataclasses.replace(executable, settings=settings), held, complete=options.weights == "checked")
        in_pytorch = _Later(header["in_pytorch"][i])
        runnable.append(RunnableRegion(name, i, session, in_pytorch, options.fallback == "error"))
    graph = decode_graph(assembled, runnable)
    graph.set_codegen(fx.graph._BoxedCodeGen())
    known = constants(module)
    attributes = {key: known[original] for key, original in header["originals"].items()}
    run = without_graph(fx.GraphModule({**attributes, **made}, graph, "SplitGraph"))
    return run, Report(regions, on_onnx, reasons)


_MODULE = fx.GraphModule({}, fx.Graph())
"""A module without attributes of its own."""


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


class _Later:
    """The code of a region for PyTorch, which is made when it is first needed."""

    def __init__(self, encoded: list[Any]) -> None:
        self._encoded = encoded

    @functools.cached_property
    def _code(self) -> Callable[..., Sequence[object]]:
        return without_graph(fx.GraphModule({}, decode_graph(self._encoded), "Region"))

    def __call__(self, *args: object) -> Sequence[object]:
        return self._code(*args)


def _encode_executable(executable: Executable) -> Any:
    """All of it but the model, and the providers: the options say which, as some of their options name libraries."""
    kept = dataclasses.replace(executable, settings=dataclasses.replace(executable.settings, providers=()))
    _, *parts = dataclasses.astuple(kept)
    encoded = json.loads(json.dumps(encode(parts, {})))
    if _decode_executable(encoded, executable.model) != kept:
        raise CannotStoreError("it is another when it is read again")
    return encoded


def _decode_executable(encoded: Any, model: bytes) -> Executable:
    inputs, outputs, settings, weights = decode(encoded, [])
    read = tuple(InputSpec(*item) for item in inputs)
    returned = tuple(
        OutputSpec(name, dtype, is_number, order, strides, exact and ExactStrides(*exact), sizes, device)
        for name, dtype, is_number, order, strides, exact, sizes, device in outputs
    )
    specs: list[InputSpec | OutputSpec] = [*read, *returned]
    for spec in specs:
        for size in spec.sizes or ():
            if isinstance(size, str):
                _check_expression(size)
            elif not isinstance(size, int):
                raise ValueError(f"{size!r} is no size")
    return Executable(model, read, returned, SessionSettings(*settings), weights)


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
        if not is_known or name.startswith("__"):
            raise ValueError(f"{text!r} is no size")
