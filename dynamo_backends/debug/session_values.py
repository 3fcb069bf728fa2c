"""The values inside a session: its optimized model with more outputs, which computes what the session computed."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx

from ..dumps.submodels import Parts
from ..exporter.results import number_dtype
from ..exporter.translate import value_names
from ..graphs.artifacts import RegionOutput
from ..numerics.operator_facts import base_name
from ..partition.exposed_values import add_outputs, exposing
from ..partition.regions import results_of
from ..pipeline.stage_data import CompiledRegion
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.constants import TABLE
from ..runtime.kernel_faults import DTYPES_BY_NAME
from ..runtime.session import Session
from .optimized_models import final_session, optimized_model, tensor_of, used_constants

_BLOCKED = "com.microsoft.nchwc"
"""The domain of nodes whose results have blocks of channels as their last dimension; only convolutional networks have
them, on processors with wide vectors."""

_ACTIVATIONS = frozenset(
    {"relu", "sigmoid", "tanh", "hardtanh", "clamp", "clamp_min", "leaky_relu", "hardsigmoid"}
)  # fmt: skip
"""Operators that ONNX Runtime fuses into a convolution."""


MOST_BYTES = 2**29
"""The size of the values that are shown at once."""


class SessionValues:
    """Shows the values of a region that its session has, without changing what it computes.

    The session itself does not run, and may be freed. Values that optimizers removed are missing.

    Args:
        compiled: the region.
        bound: the session of it that ran.

    Attributes:
        names: of the values, as the exporter gave them.
        guessed: those of ``names`` in a blocked layout: ONNX Runtime renames them, so that a name may be wrong.
        constants: results of nodes that were folded when the region was exported.
        cuts: by name, the values of ``names`` from which the session computes it.

    Raises:
        SessionError: ONNX Runtime does not write the model, or rejects it with more outputs.
    """

    def __init__(self, compiled: CompiledRegion, bound: Session) -> None:
        model, constants = optimized_model(bound)
        results = {_name(item): item for node in compiled.region.operators for item in _results_of(node)}
        self.guessed = frozenset(_show_blocked(model, results))
        values = {str(value.name): value for node in model.graph for value in node.outputs}
        computed = [spec for spec in bound.outputs if spec.name in values]  # others are constants
        model.graph.outputs[:] = [values[spec.name] for spec in computed]
        returned = {spec.name: dataclasses.replace(spec, written=None) for spec in computed}
        specs = [output_spec(item, name) for name, item in results.items() if name in values and name not in returned]
        specs = [spec for spec in specs if not spec.is_number]
        self.names = frozenset(spec.name for spec in specs)
        self.constants = {name: item for name, item in _constants(compiled.model) if name in results}
        stops = {name: _unpermuted(name) for name in (*self.names, *self.constants, *returned)}
        self.cuts = {known: _cut(values[name], stops) for name, known in stops.items() if name in values}
        add_outputs(model, values, specs)
        self._inputs, self._settings, self._model = bound.inputs, exposing(bound.settings), model
        self._specs = {spec.name: spec for spec in (*returned.values(), *specs)}
        self._constants = used_constants(model, constants)
        self._whole: Session | None = None

    def parts(self, args: Sequence[object]) -> Iterator[dict[str, object]]:
        """The values by name, those of the region's outputs included; in parts of ``MOST_BYTES``, in execution order.

        Raises:
            SessionError: ONNX Runtime failed.
        """
        if not self._specs:  # all of it was folded
            return
        parts = self._plan(args)
        if len(parts) > 1:
            yield from self._run_parts(parts, args)
            return
        if self._whole is None:
            outputs = list(self._specs.values())
            self._whole = final_session(self._model, self._settings, self._inputs, outputs, self._constants)
        results = self._whole(args)
        yield dict(zip(map(_unpermuted, self._specs), results, strict=True))

    def run(self, args: Sequence[object]) -> dict[str, object]:
        """All values at once."""
        return {name: value for part in self.parts(args) for name, value in part.items()}

    def _plan(self, args: Sequence[object]) -> list[list[int]]:
        """The positions of the nodes of each part."""
        numbers = _numbers(self._inputs, args)
        parts: list[list[int]] = [[]]
        left = MOST_BYTES
        for i, node in enumerate(self._model.graph):
            size = sum(_bytes(value, numbers) for value in node.outputs if value.is_graph_output())
            if size > left and parts[-1]:
                parts.append([])
                left = MOST_BYTES
            parts[-1].append(i)
            left -= size
        return parts

    def _run_parts(self, parts: Sequence[Sequence[int]], args: Sequence[object]) -> Iterator[dict[str, object]]:
        """Each part as a model of its own, which reads the results of the parts before it and has its own weights."""
        cutter = Parts(self._model, self._constants)
        given = {
            name: (spec, value)
            for spec, value in zip(self._inputs, args, strict=True)
            for name in (spec.name, spec.name + TABLE)
        }
        last_reader = {str(value.name): number for number, kept in enumerate(parts) for value in cutter.inputs_of(kept)}
        for number, kept in enumerate(parts):
            model = cutter.cut(kept)
            if model is None:  # it has no results
                continue
            constants = {str(v.name): self._constants[v.name] for v in model.graph.inputs if v.name in self._constants}
            read = [given[name] for value in model.graph.inputs if (name := str(value.name)) not in constants]
            session = final_session(model, self._settings, [spec for spec, _ in read], [], constants)
            _add_types(cutter.outputs_of(kept), session.output_types)
            outputs = [self._specs.get(str(value.name)) or _spec_of(value) for value in cutter.outputs_of(kept)]
            results = session.returning(outputs)([value for _, value in read])
            found = dict(zip((spec.name for spec in outputs), results, strict=True))
            given |= {name: (_input_of(spec), found[name]) for spec in outputs if (name := spec.name) in last_reader}
            given = {name: item for name, item in given.items() if last_reader.get(name, 0) > number}
            yield {_unpermuted(name): value for name, value in found.items() if name in self._specs}


class ShownSessions:
    """Caches a ``SessionValues`` for each session, as long as the session lives."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[object, SessionValues] = weakref.WeakKeyDictionary()

    def of(self, compiled: CompiledRegion, bound: Session) -> SessionValues:
        """See ``SessionValues``; raises as that does."""
        if bound not in self._made:
            self._made[bound] = SessionValues(compiled, bound)
        return self._made[bound]


def output_spec(output: RegionOutput, name: str) -> OutputSpec:
    """How a result of a node is returned by a model under a name."""
    value = output.node.meta["val"]
    value = value if output.index is None else value[output.index]
    if isinstance(value, torch.Tensor):
        return OutputSpec(name, value.dtype, device=value.device)
    dtype = number_dtype(value)
    assert dtype is not None
    return OutputSpec(name, dtype, is_number=True)


def _unpermuted(name: str) -> str:
    """The name of the value that a model returns in the order of its memory, see ``RegionOutput``."""
    return name.removesuffix("__memory")


def _results_of(node: fx.Node) -> list[RegionOutput]:
    return results_of(node) if "val" in node.meta else []


def _name(output: RegionOutput) -> str:
    return value_names(output.node)[output.index or 0]


def _numbers(specs: Sequence[InputSpec], args: Sequence[object]) -> dict[str, int]:
    """The symbolic sizes of arguments by name."""
    found: dict[str, int] = {}
    for spec, value in zip(specs, args, strict=True):
        actual = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size, number in zip(spec.sizes or (), actual, strict=False):
            if isinstance(size, str) and isinstance(number, int):
                found[size] = number
    return found


def _bytes(value: ir.Value, numbers: Mapping[str, int]) -> int:
    """The size of a value; a size that is not known counts as one."""
    sizes = [] if value.shape is None else [size if isinstance(size, int) else str(size) for size in value.shape]
    elements = math.prod(size if isinstance(size, int) else numbers.get(size, 1) for size in sizes)
    return elements * (math.ceil(value.dtype.itemsize) if value.dtype is not None else 1)


def _add_types(values: Sequence[ir.Value], types: Mapping[str, str]) -> None:
    """An optimized model has no types of values that ONNX Runtime made, such as those between fused nodes."""
    for value in values:
        if value.dtype is None:
            value.dtype = DTYPES_BY_NAME[types[str(value.name)]]


def _spec_of(value: ir.Value) -> OutputSpec:
    """A value that a later part reads."""
    assert value.dtype is not None
    return OutputSpec(str(value.name), ir.tensor_adapters.to_torch_dtype(value.dtype))


def _input_of(spec: OutputSpec) -> InputSpec:
    """How a later part reads what a part returned."""
    return InputSpec(spec.name, None if spec.is_number else spec.dtype, spec.permutation)


def _is_pair_of_casts(value: ir.Value, reader: ir.Node) -> bool:
    """Whether a value was rounded to half precision and is read as float32: ONNX Runtime may remove both casts."""
    producer = value.producer()
    return producer is not None and producer.op_type == reader.op_type == "Cast"


def _constants(model: ir.Model) -> Iterator[tuple[str, torch.Tensor]]:
    """The constants of a model by name."""
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            yield name, tensor_of(value.const_value)


def _cut(value: ir.Value, stops: Mapping[str, str]) -> frozenset[str]:
    """The nearest values from which a value is computed; ``stops`` has their names, by those in the model."""
    seen, waiting, found = set[ir.Node](), [value.producer()], set[str]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for item in filter(None, node.inputs):
            if item.name in stops and not _is_pair_of_casts(item, node):
                found.add(stops[item.name])
            else:
                waiting.append(item.producer())
    return frozenset(found)


def _show_blocked(model: ir.Model, results: Mapping[str, RegionOutput]) -> Iterator[str]:
    """Adds values in the ordinary layout beside those in a blocked one; yields their names.

    ONNX Runtime names such a node ``<value>_nchwc``, after the node that it was. What it fused into it, an addition or
    an activation, moves the value on.
    """
    known = {value.name for node in model.graph for value in node.outputs}
    for node in list(model.graph):
        if node.domain != _BLOCKED or node.op_type.startswith("Reorder"):
            continue
        output = results.get(re.sub(r"_nchwc.*", "", node.name or ""))
        output = _after_fusions(node, output) if output is not None else None
        fake = output.node.meta.get("val") if output is not None else None
        if output is None or isinstance(fake, (tuple, list)) or not isinstance(fake, torch.Tensor):
            continue
        name = _name(output)
        if name in known or name not in results or fake.dim() < 2 or not isinstance(fake.shape[1], int):
            continue
        shown = ir.Node(_BLOCKED, "ReorderOutput", [node.outputs[0]], [ir.AttrInt64("channels", int(fake.shape[1]))])
        shown.name, shown.outputs[0].name = f"{name}_shown", name
        model.graph.append(shown)
        known.add(name)
        yield name


def _after_fusions(node: ir.Node, output: RegionOutput) -> RegionOutput | None:
    """The result of the last FX node that was fused into a blocked node; ``None`` if that is not clear."""
    found: RegionOutput | None = output
    if node.op_type == "Conv" and sum(item is not None for item in node.inputs) > 3:
        found = _only_reader(output, frozenset({"add"}))
    if (
        found is not None
        and node.attributes.get("activation") is not None
        and base_name(found.node) not in _ACTIVATIONS
    ):
        found = _only_reader(found, _ACTIVATIONS)
    return found


def _only_reader(output: RegionOutput, names: frozenset[str]) -> RegionOutput | None:
    readers = list(output.node.users)
    if output.index is not None:
        items = [user for user in readers if user.target is operator.getitem and user.args[1] == output.index]
        readers = [reader for item in items for reader in item.users]
    found = readers[0] if len(readers) == 1 else None
    return RegionOutput(found) if found is not None and base_name(found) in names else None
