"""Captures a module with ``torch.export``: a functional ATen graph, and the user's names of its inputs and results.

The graph has our decompositions, as the graphs that AOTAutograd passes to the stage ``joint`` in ``torch.compile``.
Arguments that are no tensors (``None``, flags, numbers) are constants of the graph.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from ..errors import ExportError, first_line
from ..exporter.decompositions import decomposed, table_for_export, table_of_extensions
from ..exporter.recurrent_layers import recurrent_layers_as_one
from ..exporter.translate import value_names
from ..exporter.upstream_faults import IN_A_FILE
from ..graphs.locations import UserName, is_of_pytorch_or_ours, set_user_name, short_file, where
from ..graphs.size_assumptions import assume_not_empty, sizes_may_be_one
from ..weights.region_session import Weight
from .arguments import Call, ordered, without_sharing
from .sizes import Size, dims_of_leaves, limit_of, named_sizes, other_sizes, resized, sizes_of

aten = torch.ops.aten

TRAINING_MODE = ". The model is in training mode: model.eval() turns off dropout and updates of batch norm"
"""What to do about what only a model in training mode does."""

_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
}
"""Operators that check an argument and have no result. ONNX has none."""


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured module.

    Attributes:
        graph: its placeholders are ``weights`` and ``inputs``; it returns a tuple of different nodes.
        weights: by placeholder.
        inputs: the user's names of the other placeholders, in the order of the arguments.
        leaves: for each input, its position among the leaves of ``call``.
        outputs: the user's names of the results, in the order of what the module returns.
        nodes: for each result, its position among what the graph returns.
        returned: for each result, its position among the leaves of what the module returns; the others are ``None``.
        sizes: the symbolic sizes.
        call: the example, with its arguments ``ordered``.
        program: what ``torch.export`` captured.
        decomposed: a copy of ``graph``, which the stages change; it returns the results.
    """

    graph: fx.GraphModule
    weights: Mapping[fx.Node, Weight]
    inputs: Mapping[fx.Node, str]
    leaves: Sequence[int]
    outputs: Sequence[str]
    nodes: Sequence[int]
    returned: Sequence[int]
    sizes: Mapping[sympy.Symbol, Size]
    call: Call
    program: ExportedProgram
    decomposed: fx.GraphModule

    def renamed(self, inputs: Sequence[str], outputs: Sequence[str]) -> Captured:
        """A copy with new names for the first inputs and results.

        Raises:
            ValueError: too many names, an empty one, or two that are equal.
        """
        if len(inputs) > len(self.inputs) or len(outputs) > len(self.outputs):
            raise ValueError(
                f"input_names has {len(inputs)} names for {len(self.inputs)} inputs, output_names has {len(outputs)} "
                f"for {len(self.outputs)} results"
            )
        names = [*inputs, *list(self.inputs.values())[len(inputs) :]]
        others = [*outputs, *(f"output_{name}" if name in names else name for name in self.outputs[len(outputs) :])]
        if len({*names, *others}) < len(names) + len(others) or not all([*names, *others]):
            text = ", ".join([*names, *others])
            raise ValueError(
                f"a name is empty, or two inputs or results have it: {text}. Pass input_names, output_names"
            )
        return dataclasses.replace(self, inputs=dict(zip(self.inputs, names, strict=True)), outputs=others)

    @functools.cached_property
    def reference(self) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """The program without ATen's decompositions, which may change strides, and its first arguments."""
        with recurrent_layers_as_one():
            program = decomposed(self.program, table_of_extensions())
        without_checks(program.graph_module)
        names = [str(spec.target) for spec in program.graph_signature.input_specs if spec.target is not None]
        return program.graph_module, [_tensor(program, name) for name in names]

    def calls_with_other_sizes(self, module: torch.nn.Module) -> tuple[list[Call], str]:
        """A call with larger, and one with smaller sizes, if some are dynamic and the program and module take them;
        and what was raised last for sizes that they do not take."""
        inputs = list(zip(self.leaves, (node.meta["val"] for node in self.inputs), strict=True))
        found, raised = [], ""
        for choices in other_sizes(self.sizes):
            for call in (resized(inputs, self.call, symbols) for symbols in choices):
                try:
                    with torch.no_grad():
                        for run in (self.program.module(), module):
                            args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, call)
                            run(*args, **kwargs)
                except Exception as error:  # a guard of the program, or whatever an operator raises
                    raised = f"{type(error).__name__}: {first_line(str(error))}"
                    continue
                found.append(call)
                break
        return found, raised


def capture(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, opset: int
) -> Captured:
    """Captures a module.

    Args:
        module, args, kwargs: a call.
        dynamic_shapes: as in ``torch.export.export``. A text instead of a ``Dim`` is the name of ``Dim.DYNAMIC``.
        opset: the ONNX opset, which decides what is decomposed.

    Raises:
        ExportError: ``torch.export`` cannot capture it, it changes a parameter, a buffer or an argument, or it returns
            neither a tensor nor a number.
    """
    if isinstance(dynamic_shapes, (torch.export.ShapesCollection, torch.export.AdditionalInputs)):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(module, args, kwargs)
    call = ordered(module, (args, kwargs))
    by_name = inspect.signature(module.forward).bind(*call[0], **call[1]).arguments
    dims_of_inputs = dims_of_leaves(dict(by_name), _by_name(dynamic_shapes, by_name))
    with torch.no_grad():
        try:
            with recurrent_layers_as_one():
                original = _exported(module, without_sharing(module, call), dynamic_shapes)
            table = table_for_export(opset, original.graph_module)
            with recurrent_layers_as_one():
                program = decomposed(original, table)
        except Exception as error:  # the model and PyTorch raise any type
            raise ExportError(_reason(error)) from error
    graph = program.graph_module
    without_checks(graph)
    _bags_without_gradients(graph)
    _check_example(graph)
    assume_not_empty(graph)
    _check_effects(program, is_training=module.training)
    _check_dtypes(original, program)
    outputs, returned, nodes = _results(program)
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    specs = list(zip(placeholders, program.graph_signature.input_specs, strict=True))
    weights = _weights(program, [(node, str(spec.target)) for node, spec in specs if spec.target is not None])
    user = [(node, spec.arg) for node, spec in specs if spec.kind is InputKind.USER_INPUT]
    leaves = [i for i, (_, argument) in enumerate(user) if not isinstance(argument, ConstantArgument)]
    inputs = {node: str(argument.name) for node, argument in map(user.__getitem__, leaves)}
    for node, name in inputs.items():
        set_user_name(node, UserName(name))
    for node, _ in user:
        if node not in inputs:
            graph.graph.erase_node(node)
    named = [(name, node.meta["val"]) for node, name in inputs.items()]
    sizes = named_sizes(original, named, [dims_of_inputs[i] for i in leaves])
    for node in graph.graph.nodes:
        node.meta[IN_A_FILE] = True
    graph.recompile()
    copied = _copied(graph, nodes)
    return Captured(graph, weights, inputs, leaves, outputs, nodes, returned, sizes, call, original, copied)


def _copied(module: fx.GraphModule, results: Sequence[int]) -> fx.GraphModule:
    """A copy of a graph that returns these of its results; nodes have the names that their values have in the file."""
    copied = copy.deepcopy(module)
    for node, new in zip(module.graph.nodes, copied.graph.nodes, strict=True):
        new.name = value_names(node)[0] if node.target is operator.getitem else node.name
    output = copied.graph.output_node()
    output.args = (tuple(output.args[0][i] for i in results),)
    return copied


def _exported(module: torch.nn.Module, call: Call, dynamic_shapes: Any) -> ExportedProgram:
    """The program of ``torch.export``.

    If that limits a size to numbers near the example's, or rejects the example, the one that assumes less of sizes, if
    there is one.
    """
    dims = pytree.tree_leaves(dynamic_shapes)
    limits = {getattr(item, "max", None) for dim in dims for item in (dim, getattr(dim, "root", None))}
    dims = pytree.tree_map_only(str, lambda _: Dim.DYNAMIC, dynamic_shapes)
    program, failure = None, None
    try:
        program = torch.export.export(module, *call, dynamic_shapes=dims)
        if all(limit_of(known) in {None, *limits} for known in program.range_constraints.values()):
            return program
    except Exception as error:  # the model and PyTorch raise any type
        failure = error
    try:
        with sizes_may_be_one():
            return torch.export.export(module, *call, dynamic_shapes=dims)
    except Exception as error:  # the same
        if program is None:
            raise failure or error from None
        return program


def without_checks(module: fx.GraphModule) -> None:
    """Removes the operators that only check an argument, and what only they read."""
    for node in [node for node in module.graph.nodes if node.target in _CHECKS]:
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _bags_without_gradients(module: fx.GraphModule) -> None:
    """Embedding bags of which only the first result is used become PyTorch's operator for inference, which has a
    translation."""
    bags = aten._embedding_bag.default, aten._embedding_bag_forward_only.default
    for node in [node for node in module.graph.nodes if node.target in bags]:
        if all(user.args[1] == 0 for user in node.users):
            node.target = aten._embedding_bag_forward_only.default


def _by_name(dynamic_shapes: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """``dynamic_shapes`` by the names of arguments."""
    if dynamic_shapes is None or isinstance(dynamic_shapes, Mapping):
        return dynamic_shapes
    return dict(zip(arguments, dynamic_shapes, strict=False))


def _reason(error: BaseException) -> str:
    """Why ``torch.export`` failed, in a line: the error of the model, or that of PyTorch with the model's line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_of_pytorch_or_ours(frame.filename)]
    paragraph = " ".join(str(error).strip().split("\n\n")[0].split())[:500]
    text = f"{type(error).__name__}: {paragraph}"
    line = f" ({short_file(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    raised_at = traceback.extract_tb(error.__traceback__)[-1].filename
    who = "torch.export cannot capture the model" if is_of_pytorch_or_ours(raised_at) else "the model raises"
    return f"{who}{': ' if who.endswith('model') else ' '}{text}{line}"


def _check_effects(program: ExportedProgram, *, is_training: bool) -> None:
    """Raises ``ExportError`` for a program that changes a buffer, a parameter or an argument, or uses other objects."""
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.CUSTOM_OBJ, InputKind.TOKEN):
            raise ExportError(f"the model uses {spec.target or spec.arg.name}, which is neither a tensor nor a number")
    results = program.graph_module.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind is not OutputKind.USER_OUTPUT:
            what = spec.kind.name.split("_")
            line = where(node) or "an unknown line"
            raise ExportError(
                f"the model changes its {' '.join(what[:-1]).lower()} {spec.target!r} at {line}, and an ONNX model has "
                "no state: return the new value, or if it changes only in its first call, call the model once before"
                f"{TRAINING_MODE if is_training else ''}"
            )


def _check_example(graph: fx.GraphModule) -> None:
    """Raises ``ExportError`` if a dynamic size of an argument is 0: files are made for sizes from 1."""
    for node in graph.graph.find_nodes(op="placeholder"):
        for size in sizes_of(node.meta["val"]):
            if isinstance(size, torch.SymInt) and size.node.hint == 0:
                raise ExportError(f"a dynamic size of {node} is 0 in the example: pass one with a size from 1")


def _check_dtypes(original: ExportedProgram, program: ExportedProgram) -> None:
    """Raises ``ExportError`` if a result lost its dtype in decompositions: those of RNNs ignore autocast."""
    for before, after in zip(*(item.graph.output_node().args[0] for item in (original, program)), strict=True):
        dtypes = [getattr(node.meta["val"], "dtype", None) for node in (before, after) if isinstance(node, fx.Node)]
        if len({*dtypes}) > 1:
            raise ExportError(f"torch.export loses autocast: {before} has {dtypes[0]}, and would have {dtypes[1]}")


def _results(program: ExportedProgram) -> tuple[list[str], list[int], list[int]]:
    """The names of the results, their positions among the leaves, and among the nodes that the graph returns.

    Makes nodes of numbers, and drops ``None`` and repeated nodes.
    """
    graph = program.graph_module.graph
    output = graph.output_node()
    leaves: Sequence[Any] = output.args[0]
    structure = program.call_spec.out_spec
    assert structure is not None
    names = _names_of_leaves(structure)
    nodes, returned = [], []
    for i, leaf in enumerate(leaves):
        if leaf is None:
            continue
        if not isinstance(leaf, fx.Node):
            leaf = _constant(program, leaf, names[i])
        nodes.append(leaf)
        returned.append(i)
    if not nodes:
        raise ExportError("the model returns no tensor")
    different = list(dict.fromkeys(nodes))
    output.args = (tuple(different),)
    return [names[i] for i in returned], returned, list(map(different.index, nodes))


def _constant(program: ExportedProgram, value: object, name: str) -> fx.Node:
    """A node with a number as a tensor without dimensions."""
    if not isinstance(value, (bool, int, float)):
        raise ExportError(f"the model returns {value!r} as {name}, which is neither a tensor nor a number")
    graph = program.graph_module.graph
    dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(aten.full.default, ([], value), {"dtype": dtype})
    mode = next(item.meta["val"].fake_mode for item in graph.nodes if isinstance(item.meta.get("val"), torch.Tensor))
    with mode:
        node.meta["val"] = torch.full([], value, dtype=dtype)
    return node


def _names_of_leaves(structure: pytree.TreeSpec) -> list[str]:
    """``logits`` or ``hidden_states_0`` for parts of a dict or a dataclass, else ``output`` and ``output_0``."""
    positions = list(range(structure.num_leaves))
    try:
        paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(positions, structure))
    except ValueError:  # a registered class without names
        return [f"output_{i}" for i in positions]
    found = []
    for path, _ in paths:
        parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        has_name = path and not isinstance(path[0], pytree.SequenceKey)
        found.append("_".join(parts if has_name else ["output", *parts]))
    return found


def _tensor(program: ExportedProgram, name: str) -> torch.Tensor:
    """A parameter, buffer or constant."""
    found = program.state_dict[name] if name in program.state_dict else program.constants[name]
    assert isinstance(found, torch.Tensor)
    return found


def _weights(program: ExportedProgram, placeholders: Sequence[tuple[fx.Node, str]]) -> dict[fx.Node, Weight]:
    """The parameters, buffers and constants by placeholder. Placeholders of one tensor become one."""
    first: dict[object, fx.Node] = {}
    tensors = {}
    for node, name in placeholders:
        tensor = _tensor(program, name)
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        node.replace_all_uses_with(first.setdefault(memory, node))
        tensors[node] = Weight(name, tensor.detach())
    for node, weight in tensors.items():
        if node.users:
            set_user_name(node, UserName(weight.name, is_static=True))
        else:
            program.graph_module.graph.erase_node(node)
    return {node: weight for node, weight in tensors.items() if node.users}
