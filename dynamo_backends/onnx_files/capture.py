"""Captures a module with ``torch.export``: a functional ATen graph, and the user's names of its inputs and results.

The graph has our decompositions, as the graphs that AOTAutograd passes to the stage ``joint`` in ``torch.compile``.
Arguments that are no tensors (``None``, flags, numbers) are constants of the graph.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from ..errors import ExportError
from ..exporter.decompositions import table_for_export
from ..graphs.locations import UserName, set_user_name, where
from ..weights.frozen_session import Weight

aten = torch.ops.aten

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
        graph: its placeholders are ``weights`` and ``inputs``; it returns a tuple of nodes.
        weights: by placeholder.
        inputs: the user's names of the other placeholders, in the order of the arguments.
        leaves: for each input, its position among the leaves of ``(args, kwargs)``.
        outputs: the user's names of the results, in the order of what the module returns.
        returned: for each result, its position among the leaves of what the module returns; the others are ``None``.
        sizes: the user's names of symbolic sizes.
        program: what ``torch.export`` captured.
    """

    graph: fx.GraphModule
    weights: Mapping[fx.Node, Weight]
    inputs: Mapping[fx.Node, str]
    leaves: Sequence[int]
    outputs: Sequence[str]
    returned: Sequence[int]
    sizes: Mapping[str, str]
    program: ExportedProgram

    def renamed(self, inputs: Sequence[str], outputs: Sequence[str]) -> Captured:
        """A copy with new names for the first inputs and results.

        Raises:
            ValueError: too many names, or two that are equal.
        """
        if len(inputs) > len(self.inputs) or len(outputs) > len(self.outputs):
            raise ValueError(
                f"input_names has {len(inputs)} names for {len(self.inputs)} inputs, output_names has {len(outputs)} "
                f"for {len(self.outputs)} results"
            )
        names = [*inputs, *list(self.inputs.values())[len(inputs) :]]
        others = [*outputs, *(f"output_{name}" if name in names else name for name in self.outputs[len(outputs) :])]
        if len({*names, *others}) < len(names) + len(others):
            raise ValueError(f"two inputs or results have the same name: {', '.join([*names, *others])}")
        return dataclasses.replace(self, inputs=dict(zip(self.inputs, names, strict=True)), outputs=others)

    def with_other_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """The same call with each dynamic size one larger or, if the program rejects that, doubled.

        Elements are repeated to fill them. ``None`` if no size is dynamic, or the program rejects both.
        """
        fakes = [node.meta["val"] for node in self.inputs]
        sizes = [size for fake in fakes for size in _sizes_of(fake) if isinstance(size, torch.SymInt)]
        hints = {size.node.expr: size.node.hint for size in sizes if size.node.expr.is_Symbol}
        for factor, more in ((1, 1), (2, 0)) if hints else ():
            leaves, structure = pytree.tree_flatten((args, kwargs))
            symbols = {symbol: factor * hint + more for symbol, hint in hints.items()}
            for i, fake in zip(self.leaves, fakes, strict=True):
                leaves[i] = _resized(leaves[i], fake, symbols)
            call: Call = pytree.tree_unflatten(leaves, structure)
            try:
                with torch.no_grad():
                    self.program.module()(*call[0], **call[1])
            except Exception:  # a guard of the program, or whatever an operator raises
                continue
            return call
        return None


Call: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"
"""Positional and keyword arguments."""


def _sizes_of(fake: Any) -> Sequence[Any]:
    """The sizes of a fake tensor, or a number itself."""
    return fake.shape if isinstance(fake, torch.Tensor) else [fake]


def _resized(value: Any, fake: Any, symbols: Mapping[Any, int]) -> Any:
    """A value with other sizes; ``symbols`` are the numbers of a fake value's symbols."""
    for dim, size in enumerate(_sizes_of(fake)):
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols <= symbols.keys():
            number = int(size.node.expr.subs(symbols))
            if not isinstance(value, torch.Tensor):
                return number
            value = value.index_select(dim, torch.arange(number) % value.shape[dim])
    return value


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
    dims = pytree.tree_map_only(str, lambda _: torch.export.Dim.DYNAMIC, dynamic_shapes)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.export about itself
        try:
            original = torch.export.export(module, args, kwargs, dynamic_shapes=dims)
            program = original.run_decompositions(table_for_export(opset))
        except Exception as error:  # the model and PyTorch raise any type
            raise ExportError(f"torch.export cannot capture the model: {_summary(error)}") from error
    graph = program.graph_module
    for node in [node for node in graph.graph.nodes if node.target in _CHECKS]:
        graph.graph.erase_node(node)
    _check_effects(program)
    outputs, returned = _results(program)
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
    values = pytree.tree_leaves((args, kwargs))
    named = _named_sizes(dynamic_shapes, _arguments_by_name(module, args, kwargs))
    sizes = _sizes(inputs, [values[i] for i in leaves], list(named))
    graph.recompile()
    return Captured(graph, weights, inputs, leaves, outputs, returned, sizes, original)


def _summary(error: BaseException) -> str:
    """The type of an error and the first paragraph of its message, in a line."""
    paragraph = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(paragraph.split())[:500]}"


def _check_effects(program: ExportedProgram) -> None:
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
            )


def _results(program: ExportedProgram) -> tuple[list[str], list[int]]:
    """The names of the results and their positions among the leaves; makes nodes of numbers, and drops ``None``."""
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
    output.args = (tuple(nodes),)
    return [names[i] for i in returned], returned


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


def _weights(program: ExportedProgram, placeholders: Sequence[tuple[fx.Node, str]]) -> dict[fx.Node, Weight]:
    """The parameters, buffers and constants by placeholder. Placeholders of one tensor become one."""
    first: dict[object, fx.Node] = {}
    tensors = {}
    for node, name in placeholders:
        tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        node.replace_all_uses_with(first.setdefault(memory, node))
        tensors[node] = Weight(name, tensor.detach())
    for node, weight in tensors.items():
        if node.users:
            set_user_name(node, UserName(weight.name, is_static=True))
        else:
            program.graph_module.graph.erase_node(node)
    return {node: weight for node, weight in tensors.items() if node.users}


def _arguments_by_name(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    return inspect.signature(module.forward).bind(*args, **kwargs).arguments


def _named_sizes(dims: Any, value: Any) -> Iterator[tuple[torch.Tensor, int, str]]:
    """The tensors, dimensions and names of the dimensions that ``dynamic_shapes`` names."""
    if not isinstance(dims, (Mapping, list, tuple)):
        return
    if isinstance(value, torch.Tensor):
        for i, dim in dims.items() if isinstance(dims, Mapping) else enumerate(dims):
            name = dim if isinstance(dim, str) else getattr(dim, "__name__", "")
            if name.isidentifier():
                yield value, i, name
    elif isinstance(dims, Mapping):
        for key in dims:
            yield from _named_sizes(dims[key], value[key])
    else:
        values = value.values() if isinstance(value, Mapping) else pytree.tree_leaves(value)
        for part, item in zip(dims, values, strict=False):
            yield from _named_sizes(part, item)


def _sizes(
    inputs: Mapping[fx.Node, str], values: Sequence[object], named: Sequence[tuple[torch.Tensor, int, str]]
) -> dict[str, str]:
    """The names of the symbols in the sizes of inputs: the user's, else ``input_ids_dim_0``."""
    found: dict[str, str] = {}
    symbols = [
        (node, i, str(size), value)
        for node, value in zip(inputs, values, strict=True)
        for i, size in enumerate(_sizes_of(node.meta["val"]))
        if isinstance(size, torch.SymInt)
    ]
    for _, i, symbol, value in symbols:
        for tensor, position, name in named:
            if tensor is value and i == position:
                found.setdefault(symbol, name)
    for node, i, symbol, _ in symbols:
        is_tensor = isinstance(node.meta["val"], torch.Tensor)
        found.setdefault(symbol, f"{inputs[node]}_dim_{i}" if is_tensor else inputs[node])
    return found
