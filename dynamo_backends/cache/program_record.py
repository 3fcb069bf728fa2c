"""Converts a Program to a record of the store, and back."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..common.strides import ExactStrides
from ..errors import Kind, Reason
from ..graphs.graph_json import CannotStoreError, decode, decode_graph, encode, encode_graph
from ..options import Options
from ..partition.coverage import CoverageCounts
from ..partition.program import Program, RegionCode, RegionProgram
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.executable import Executable
from ..runtime.providers import as_precise_as_pytorch, fallbacks, usable
from ..runtime.settings import SessionSettings
from .description import bytes_of, check_plain, constants
from .store import StoredRecord


def to_record(program: Program, originals: Mapping[str, torch.Tensor]) -> StoredRecord:
    """A Program as a record, which refers by name to ``originals``, the constants of the graph before its passes.

    Raises:
        CannotStoreError: a part of it cannot be stored.
    """
    names = {id(tensor): name for name, tensor in originals.items()}
    references: dict[str, str] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, value in program.attributes.items():
        if "." in name or not isinstance(value, torch.Tensor):
            is_graph = isinstance(value, fx.GraphModule)
            raise CannotStoreError("a subgraph" if is_graph else "an attribute of a module in a module")
        if id(value) in names:
            references[name] = names[id(value)]
            continue
        check_plain(value)
        if not value.is_contiguous() or type(value) is not torch.Tensor or value.requires_grad:
            raise CannotStoreError("a constant that is not row-major")
        stored[name] = value
    executables = [region.executable for region in program.regions]
    coverage = program.coverage
    header = {
        "code": encode_graph(program.code, regions=len(program.regions)),
        "regions": [_encode_executable(item) for item in executables],
        "in_pytorch": [_code_text(region) for region in program.regions],
        "checked": [region.checked is not None for region in program.regions],
        "others": [_indices_of_others(region) for region in program.regions],
        "originals": references,
        "constants": [[name, encode((item.dtype, tuple(item.shape)), {})] for name, item in stored.items()],
        "mixed_signs": program.mixed_signs,
        "coverage": [
            coverage.regions,
            coverage.on_onnx,
            [[target, reason.kind.name, reason.text, number] for target, reason, number in coverage.fallbacks],
        ],
    }
    return StoredRecord(header, [*(item.model for item in executables), *map(bytes_of, stored.values())])


def from_record(record: StoredRecord, module: fx.GraphModule | None, options: Options) -> Program:
    """The Program of a record that ``to_record`` made.

    ``module`` is the graph before its passes; ``None`` if the record refers to none of its constants.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, RuntimeError: the record is not a valid Program.
    """
    header = record.header
    number = len(header["regions"])
    models, tensors = record.blobs[:number], record.blobs[number:]
    stored = {
        key: _tensor(content, *decode(encoded, []))
        for (key, encoded), content in zip(header["constants"], tensors, strict=True)
    }
    code = decode_graph(header["code"], regions=number)
    code.set_codegen(fx.graph._BoxedCodeGen())
    read = {str(node.target) for node in code.find_nodes(op="get_attr")}
    if read != {*header["originals"], *stored} or any(hasattr(_MODULE, key) or not key.isidentifier() for key in read):
        raise ValueError("the attributes that the code reads are not those that are stored")
    known = constants(module) if module is not None else {}
    attributes = {**{key: known[original] for key, original in header["originals"].items()}, **stored}
    providers = as_precise_as_pytorch(options.providers)
    on = [usable(item) for item in fallbacks(providers)]
    lists = (header[key] for key in ("in_pytorch", "checked", "others"))
    regions = tuple(
        RegionProgram(
            executable.on(on[0]),
            RegionCode(str(text)),
            tuple(executable.on(on[i]) for i in others),
            fx.GraphModule({}, decode_graph(json.loads(text)), "Region") if checked else None,
        )
        for encoded, model, text, checked, others in zip(header["regions"], models, *lists, strict=True)
        for executable in [_decode_executable(encoded, model)]
    )
    count, on_onnx, in_pytorch = header["coverage"]
    reasons = [(target, Reason(Kind[kind], text), times) for target, kind, text, times in in_pytorch]
    coverage = CoverageCounts(count, on_onnx, reasons)
    program = Program(code, attributes, regions, coverage, mixed_signs=bool(header["mixed_signs"]))
    expected = program.arguments if module is None else list(module.graph.find_nodes(op="placeholder"))
    if len(expected) != len(program.arguments):
        raise ValueError(f"expected {len(expected)} arguments, got {len(program.arguments)}")
    for i in range(number):
        program.weights_of(i)
    return program


_MODULE = fx.GraphModule({}, fx.Graph())
"""Its attributes are those of every module."""


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _code_text(region: RegionProgram) -> str:
    """The code that PyTorch runs if the region fails, as JSON.

    Raises:
        CannotStoreError: it has no text.
    """
    if not isinstance(region.in_pytorch, RegionCode):
        raise CannotStoreError("a region whose code in PyTorch cannot be stored")
    return region.in_pytorch.text


def _indices_of_others(region: RegionProgram) -> list[int]:
    """Which of ``fallbacks`` its other executables run on: not all, if the kernels of some are wrong."""
    on = list(fallbacks(region.executable.settings.providers))
    return [on.index(other.settings.providers) for other in region.others]


def _encode_executable(executable: Executable) -> Any:
    """An executable as JSON, without its model and providers. Providers come from the options, because a provider's
    options may name libraries to load."""
    kept = dataclasses.replace(executable, settings=dataclasses.replace(executable.settings, providers=()))
    _, *parts = dataclasses.astuple(kept)
    encoded = json.loads(json.dumps(encode(parts, {})))
    if _decode_executable(encoded, executable.model) != kept:
        raise CannotStoreError("a session whose settings cannot be stored exactly")
    return encoded


def _decode_executable(encoded: Any, model: bytes) -> Executable:
    inputs, outputs, settings, weights = decode(encoded, [])
    read = tuple(InputSpec(*item) for item in inputs)
    returned = tuple(
        OutputSpec(name, dtype, is_number, order, strides, exact and ExactStrides(*exact), sizes, device, written)
        for name, dtype, is_number, order, strides, exact, sizes, device, written in outputs
    )
    specs: list[InputSpec | OutputSpec] = [*read, *returned]
    for spec in specs:
        for size in spec.sizes or ():
            if isinstance(size, str):
                check_expression(size)
            elif not isinstance(size, int):
                raise ValueError(f"{size!r} is not a size")
    return Executable(model, read, returned, SessionSettings(*settings), weights)


_IN_SIZES = (
    *(ast.Expression, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
    *(ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.IfExp, ast.Call, ast.Attribute, ast.List, ast.Tuple),
)


@functools.lru_cache(maxsize=1_000)
def check_expression(text: str) -> None:
    """Checks that the text of a symbolic size, which calls evaluate, is only arithmetic.

    Raises:
        ValueError: it is not.
    """
    try:
        parsed = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is not a size") from error
    for node in ast.walk(parsed):
        is_known = isinstance(node, _IN_SIZES)
        if isinstance(node, ast.Attribute):
            is_known = isinstance(node.value, ast.Name) and node.value.id in ("math", "torch")
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if not is_known or name.startswith("__"):
            raise ValueError(f"{text!r} is not a size")
