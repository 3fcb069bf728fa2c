"""Compares an ONNX file with the PyTorch model that it was exported from: each value of the file is judged by PyTorch.

::

    comparison = compare_with_program(model, (), {"input_ids": ids}, load_model("model.onnx"), Runtime())
    comparison.verdict          # "ok", or "diverges at gelu (aten.gelu.default, model.py:17, in layers.0): …"

``torch.export`` captures the model. Its nodes have the names that ``torch.onnx.export`` gives the values of a file, so
that most correspond by name; others correspond by value, see ``model_rows``. PyTorch computes each value of the file
from the values that the file computed before it, see ``numerics.segments``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import traceback
from collections.abc import Mapping, Sequence, Set
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram, export
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..exporter.decompose import decompose
from ..exporter.decompositions import composite_operators, decomposed, decomposition_table
from ..graphs.locations import Frame, is_of_pytorch_or_ours, line_of_layer, module_path
from ..numerics.arrays import as_array, dtype_name, format_of
from ..numerics.exact import KERNEL_ERRORS, Environment, is_floating, run_only_exact, widened
from ..numerics.segments import Judged, RecordedValues, SegmentCheck
from ..numerics.verdicts import Verdict, epsilon
from .model_comparison import ModelComparison, is_quantized, judged_rows, notes_on
from .model_inputs import Matched, with_precision
from .model_judging import ComputedValue, ValueDifference, as_tensor, judge, noise_of
from .model_rows import aligned
from .model_values import ModelRun, NodeValue, Runtime, run_model
from .models import OnnxModel, OnnxValue, kind_of
from .reading import DumpError
from .reference_evaluator import Change


def compare_with_program(
    model: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], file: OnnxModel, runtime: Runtime
) -> ModelComparison:
    """Compares a file with a model on the same inputs.

    Args:
        model: the model, in the mode in which it was exported.
        args, kwargs: of its call; tensors in them are the inputs of the file.
        file: the ONNX model.
        runtime: what runs it.

    Raises:
        DumpError: ``torch.export`` fails, or the runtime cannot run the file on these inputs.
    """
    try:
        program = export(model, tuple(args), dict(kwargs), strict=False)
    except Exception as error:  # the user's model may raise anything
        traced = traceback.extract_tb(error.__traceback__)
        frames = [Frame(item.filename, item.lineno or 0, item.name, "") for item in traced]
        frames = [frame for frame in frames if not is_of_pytorch_or_ours(frame.file)]
        line = next((f" ({item})" for item in reversed(frames) if item.user), f" ({frames[-1]})" if frames else "")
        raise DumpError(f"torch.export fails: {type(error).__name__}: {first_line(str(error))}{line}") from error
    program = decomposed(program, decomposition_table())
    stored = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    reference = ProgramReference(program.graph_module, _arguments(program, args, kwargs), stored)
    return compare_with_reference(type(model).__name__, reference, file, runtime)


def compare_with_reference(
    name: str,
    reference: ProgramReference,
    file: OnnxModel,
    runtime: Runtime,
    names: Mapping[str, str] | None = None,
) -> ModelComparison:
    """Compares a file with a program on the arguments of the program.

    Args:
        name: of the program.
        reference: the program.
        file: the ONNX model.
        runtime: what runs it.
        names: by input of the file, that of the program; by default by name, or else in order.

    Raises:
        DumpError: the file has other inputs, or the runtime cannot run it on these.
    """
    feeds, matched = reference.inputs_of(file, names)
    other = run_model(file, feeds, runtime)
    rows, culprit = judged_rows(reference, aligned(reference.run, other, matched, by_place=True), reference.run, other)
    notes = [f"{name} was not judged: {why}" for name, why in reference.unchecked.items()] + notes_on(rows)
    return ModelComparison((name, file.name), rows, culprit, notes, is_quantized(file))


class ProgramReference:
    """A PyTorch program that judges the values of another run.

    Args:
        module: its graph.
        arguments: the values of its placeholders.
        stored: by placeholder, the user's name of a weight.
        tolerated: the names of nodes whose values may differ, and are not judged; what reads them is.

    Attributes:
        run: the program, in eager.
        unchecked: by name, why a value could not be judged.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        arguments: Sequence[object],
        stored: Mapping[str, str],
        tolerated: Set[str] = frozenset(),
    ) -> None:
        self._graph, self._tolerated = module.graph, tolerated
        self.unchecked: dict[str, str] = {}
        interpreter = fx.Interpreter(module, garbage_collect_values=False)
        with torch.no_grad():
            interpreter.run(*arguments, enable_io_processing=False)
        self._values = interpreter.env
        kinds = "placeholder", "get_attr"  # the bodies of control flow are attributes
        self._given = {node: self._values[node] for node in self._graph.nodes if node.op in kinds}
        placeholders = self._graph.find_nodes(op="placeholder")
        self._inputs = [node.name for node in placeholders if node.name not in stored]
        self._nodes = {stored.get(node.name, node.name): node for node in self._graph.nodes if node.op != "output"}
        items = [_item(name, node, self._values[node], stored) for name, node in self._nodes.items()]
        results = [node for node in pytree.tree_leaves(self._graph.output_node().args[0]) if isinstance(node, fx.Node)]
        repeated = {node for i, node in enumerate(results) if node in results[:i]}
        names = [f"{node.name} ({i})" if node in repeated else node.name for i, node in enumerate(results)]
        outputs = {name: array_of(self._values[node]) for name, node in zip(names, results, strict=True)}
        self.run = ModelRun("PyTorch", [item for item in items if item is not None], outputs)
        self._judged, self._part_of = _without_composites(module)
        buffers = [node for node in self._judged.graph.find_nodes(op="get_attr") if node not in self._part_of.values()]
        self._given_parts: Environment = {node: getattr(self._judged, str(node.target)) for node in buffers}

    def inputs_of(
        self, file: OnnxModel, known: Mapping[str, str] | None = None
    ) -> tuple[dict[str, OnnxValue], list[Matched]]:
        """The values of a file's inputs, and what corresponds to what: ``known``, by name, or else in order."""
        values = {name: self._given[self._nodes[name]] for name in self._inputs}
        given = {name: array_of(value) for name, value in values.items()}
        given = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
        dtypes = {item.name: item.dtype for item in file.inputs}
        names = list(dtypes)
        if known is not None:
            pairs = dict(known)
            given |= {name: np.asarray(values[name]) for name in pairs.values() if name not in given}
        elif set(names) <= given.keys():
            pairs = {name: name for name in names}
        elif len(names) == len(given):
            pairs = dict(zip(names, given, strict=True))
        else:
            raise DumpError(f"{file.name} has the inputs {', '.join(names)}, the model {', '.join(given) or 'none'}")
        stored = [name for name in file.initializers if name in self._nodes]
        matched = [Matched(name, name, "name") for name in stored]
        return {name: with_precision(given[partner], dtypes[name]) for name, partner in pairs.items()}, [
            *matched,
            *(Matched(name, partner, "name") for name, partner in pairs.items()),
        ]

    def can_judge(self, name: str, value: np.ndarray) -> bool:
        node = self._nodes.get(name)
        own = self._values.get(node) if node is not None and node.op == "call_function" else None
        if not isinstance(own, torch.Tensor) or own.is_complex() or kind_of(value.dtype) == "string":
            return False
        return own.numel() == value.size and own.is_floating_point() == (kind_of(value.dtype) == "float")

    def judge(
        self, values: Mapping[str, ComputedValue], constants: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, ValueDifference]:
        """See ``model_judging.ModelReference``."""
        part_of = self._part_of
        known = {_key(part_of[self._nodes[name]]): self._fitting(name, item.array) for name, item in values.items()}
        names = {_key(part_of[self._nodes[name]]): name for name in values}
        given = {self._nodes[name]: self._fitting(name, value) for name, value in (constants or {}).items()}
        found: dict[str, ValueDifference] = {}
        for tolerated in self._tolerated & values.keys():
            node = self._nodes[tolerated]
            given[node] = known.pop(_key(part_of[node]))
            found[tolerated] = ValueDifference()
        given_parts = {part_of[node]: value for node, value in {**self._given, **given}.items()}
        nodes = list(self._judged.graph.nodes)
        check = SegmentCheck(nodes, {**self._given_parts, **given_parts}, RecordedValues(known))
        for judged in check.judge():
            name = names.get((judged.node, judged.index))
            if name is not None:
                found[name] = _difference(judged, values[name], self._before(judged))
        self.unchecked = dict(check.unchecked)
        return found

    def _before(self, judged: Judged) -> list[str]:
        """The names of the program's nodes that are judged together with a value."""
        inside = {*judged.segment} - {judged.node}
        return [
            node.name for node, part in self._part_of.items() if part in inside and node.target is not operator.getitem
        ]

    def _fitting(self, name: str, value: np.ndarray) -> torch.Tensor:
        """A value in the shape and dtype of PyTorch's."""
        like = self._values[self._nodes[name]]
        assert isinstance(like, torch.Tensor)
        return as_tensor(value).reshape(like.shape).to(like.dtype)


def _without_composites(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy in which composite operators are decomposed, as AOTAutograd does: what they may round is known of their
    parts only. And by node, the node of the copy that computes the same.

    Operators with several results stay, such as recurrent layers; so do those that draw random numbers.
    """
    nodes = list(module.graph.nodes)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    operators = {node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload)}
    if not any(operator.has_kernel_for_dispatch_key(composite) for operator in operators):
        return module, {node: node for node in nodes}
    table = composite_operators()
    for node in nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor) or torch.Tag.nondeterministic_seeded in _tags(node):
            table.pop(node.target, None)
    while True:
        graph, parts = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(module.graph, parts))
        copied = fx.GraphModule(module, graph)
        followed = [node for node in nodes if node.op == "call_function" and node.target in table]
        copied.graph.output_node().args = (tuple(parts[node] for node in followed),)
        decompose(copied, table)
        [found] = copied.graph.output_node().args
        parts.update(zip(followed, found, strict=True))
        counts = collections.Counter(parts.values())
        same = {node.target for node in followed if counts[parts[node]] > 1}  # they return their argument
        if not same:
            return copied, parts
        table = {target: how for target, how in table.items() if target not in same}


def _tags(node: fx.Node) -> Sequence[torch.Tag]:
    return node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()


def _arguments(program: ExportedProgram, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """The arguments of a program's graph: weights, and the leaves of the call's arguments."""
    signature = program.graph_signature
    leaves = iter(pytree.tree_leaves((tuple(args), dict(kwargs)), is_leaf=lambda leaf: leaf is None))
    stored: dict[str, object] = {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    nodes = program.graph.find_nodes(op="placeholder")
    return [stored[names[node.name]] if node.name in names else next(leaves) for node in nodes]


def _key(node: fx.Node) -> tuple[fx.Node, int | None]:
    """The node that computes a value, and the value's position if it has several."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0], node.args[1]
    return node, None


def _item(name: str, node: fx.Node, value: object, stored: Mapping[str, str]) -> NodeValue | None:
    """A value of the program; ``None`` if it is no tensor. ``stored`` has the user's names of weights."""
    array, (source, _) = array_of(value), _key(node)
    if not isinstance(array, np.ndarray):
        return None
    kind = {"placeholder": "initializer" if node.name in stored else "input", "get_attr": "initializer"}
    inputs = tuple(stored.get(item.name, item.name) for item in source.all_input_nodes)
    what = str(source.target) if source.op == "call_function" else ""
    return NodeValue(kind.get(node.op, "result"), name, what, inputs, array, line_of_layer(source), module_path(source))


def array_of(value: object) -> OnnxValue:
    """The elements of a tensor; those in dtypes that numpy lacks in the dtype of this name of ``ml_dtypes``."""
    if not isinstance(value, torch.Tensor):
        return None
    plain, dtype = value.detach().cpu().contiguous(), getattr(ml_dtypes, dtype_name(value.dtype), None)
    return plain.numpy() if dtype is None else plain.view(torch.uint8).numpy().view(dtype).reshape(plain.shape)


def _difference(judged: Judged, value: ComputedValue, before: Sequence[str]) -> ValueDifference:
    if judged.complaint or not isinstance(judged.value, torch.Tensor) or not isinstance(judged.expected, torch.Tensor):
        return ValueDifference(Verdict(judged.complaint), segment=before)
    dtype = judged.expected.dtype
    is_rounded = epsilon(value.inside) > format_of(dtype).computed if is_floating(judged.expected) else False
    if judged.is_wrong and is_floating(judged.expected) and (is_rounded or epsilon(value.coarsest) > epsilon(dtype)):
        found = judge(value.array, judged.expected, value.coarsest, functools.partial(_again, judged))
        return dataclasses.replace(found, segment=before)
    return ValueDifference(judged.verdict(), noise_of(judged.value, judged.expected), before)


def _again(judged: Judged, change: Change) -> torch.Tensor | None:
    """What a segment computes in float64 from changed numbers."""
    environment: Environment = {
        node: torch.from_numpy(change(as_array(value))) if is_floating(value) else value
        for node, value in judged.inputs.items()
    }
    try:
        for node in judged.segment:
            environment[node] = widened(run_only_exact(node, environment))
    except KERNEL_ERRORS:
        return None
    found: Any = environment[judged.node]
    result: torch.Tensor = found if judged.index is None else found[judged.index]
    return result
