"""The nodes of a graph, read from the code of an FX graph or from an ONNX model; and ONNX models as text.

FX graphs are read from their code in the dump, line by line; nothing of it is executed. ONNX models as text have a line
for each node::

    input x: f32[2, 3]
    relu: f32[2, 3] = Relu(x)  # model.py:17
    return relu
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx_ir as ir

Kind = Literal["input", "initializer", "node", "output"]


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """A node of a graph, an input, an initializer or the list of outputs.

    Attributes:
        kind: what it is.
        results: names of what it computes, at least one; of the outputs ``("return",)``.
        operator: ``aten.relu.default``, ``getitem``, ``Relu``, ``com.microsoft.Gelu``; empty for all but nodes.
        arguments: as they are written: names of values, constants, ``axis=-1``.
        types: of each result ``f32[2, 3]``, in FX with strides: ``f32[2, 3][3, 1]``; or empty where it is not known.
        source: the user's ``file:line``, or empty.
        code: that line, where it is known.
        origin: the FX node that an ONNX node was translated from, or empty.
        user_name: what the user calls an input: ``encoder.fc.weight``, or empty.
    """

    kind: Kind
    results: tuple[str, ...]
    operator: str = ""
    arguments: tuple[str, ...] = ()
    types: tuple[str, ...] = ("",)
    source: str = ""
    code: str = ""
    origin: str = ""
    user_name: str = ""

    @property
    def name(self) -> str:
        """The name of its first result."""
        return self.results[0]

    @property
    def call(self) -> str:
        """``aten.relu.default(x)``."""
        return f"{self.operator}({', '.join(self.arguments)})"

    @property
    def text(self) -> str:
        """It in one line, without its source."""
        if self.kind == "output":
            return f"return {', '.join(self.arguments)}"
        results = ", ".join(
            f"{name}: {type_}" if type_ else name for name, type_ in zip(self.results, self.types, strict=True)
        )
        if self.kind == "node":
            return f"{results} = {self.call}"
        return f"{self.kind} {results}" + "".join(f" = {value}" for value in self.arguments)


_FREED = re.compile(r";  (\w+ = )+None$", re.MULTILINE)


def without_freeing(code: str) -> str:
    """The code of an FX graph without the statements that let go of a value, which move with every use."""
    return _FREED.sub("", code)


_CLASS = re.compile(r"\s*class [\w<>]+\(.*\):")
_ASSIGNMENT = re.compile(r'\s+(?P<name>\w+)(?:: "(?P<type>[^"]*)")? = (?P<value>.*?)(?:  # .*)?')
_IN_PLACE = re.compile(r'\s+(?P<value>.* .?= .*);  (?P<name>\w+)(?:: "(?P<type>[^"]*)")? = [\w.]+')
_DECLARED = re.compile(r'\s+(?P<name>\w+)(?:: "(?P<type>[^"]*)")?,?(?:  # (?P<said>.*))?')
_FLATTENED = re.compile(r"\s+.* = fx_pytree\.tree_flatten_spec\(\[(?P<names>[\w, ]*)\], .*")
_LOCATION = re.compile(r"\s*# (?:File:|called from) (?P<file>.*?):(?P<line>\d+)(?: in .*?)?(?:, code: (?P<code>.*))?")


def fx_nodes(code: str) -> list[GraphNode]:
    """The nodes of an FX graph, from the code that ``print_readable`` makes of it, subgraphs after their graph.

    Args:
        code: a file of a stage.

    Returns:
        In the order of the code. What is in a subgraph bears its name: ``true_graph_0.sin``.
    """
    return list(_FxReader().read(code))


class _FxReader:
    """Reads the code of a graph."""

    def __init__(self) -> None:
        self._prefix = ""
        self._known: set[str] = set()
        self._inputs: dict[str, GraphNode] = {}

    def read(self, code: str) -> Iterator[GraphNode]:
        source = code_line = ""
        returned: list[str] | None = None
        is_first = True
        for line in without_freeing(code).splitlines():
            stripped = line.strip()
            if returned is not None or stripped.startswith("return"):
                returned = [*(returned or []), _without_comment(stripped)]
                if _is_closed("".join(returned)):
                    yield from self._flush()
                    yield self._output("".join(returned))
                    returned = None
            elif _CLASS.fullmatch(line):
                self._prefix = "" if is_first else f"{stripped[len('class ') :].split('(')[0]}."
                self._known = set()
                is_first = False
            elif match := _LOCATION.fullmatch(line):
                source, code_line = f"{match['file']}:{match['line']}", match["code"] or ""
            elif match := _FLATTENED.fullmatch(line):  # the joint graph's two arguments, whose items are declared
                for name in match["names"].split(", "):
                    self._inputs.pop(name, None)
            elif not stripped or stripped.startswith(("#", "def ", ")")):
                continue
            elif match := _IN_PLACE.fullmatch(line) or _ASSIGNMENT.fullmatch(line):
                for node in self._assigned(match["name"], match["type"] or "", match["value"]):
                    is_node = node.kind == "node"
                    yield dataclasses.replace(node, source=source, code=code_line) if is_node else node
            elif match := _DECLARED.fullmatch(line):
                name, said = match["name"], match["said"] or ""
                if name != "self":
                    user_name = "" if "AOTInput(" in said else said
                    self._inputs[name] = GraphNode(
                        "input", (self._prefix + name,), types=(match["type"] or "",), user_name=user_name
                    )
        yield from self._flush()

    def _assigned(self, name: str, type_: str, value: str) -> Iterator[GraphNode]:
        if value in self._inputs:  # Dynamo's placeholders: ``l_x_ = L_x_``
            node = self._inputs.pop(value)
            self._known.add(name)
            yield dataclasses.replace(node, results=(self._prefix + name,))
            return
        yield from self._flush()
        operator, arguments = _parsed(value, self._known)
        self._known.add(name)
        yield GraphNode("node", (self._prefix + name,), operator, arguments, (type_,))

    def _flush(self) -> Iterator[GraphNode]:
        """The inputs that bear their own name."""
        self._known.update(self._inputs)
        yield from self._inputs.values()
        self._inputs = {}

    def _output(self, statement: str) -> GraphNode:
        names = statement.removeprefix("return").strip().removeprefix("pytree.tree_unflatten(")
        names = names.removesuffix(", self._out_spec)").strip("([, ])")
        arguments = tuple(item.strip() for item in names.split(",") if item.strip())
        return GraphNode("output", (f"{self._prefix}return",), arguments=arguments)


def _without_comment(line: str) -> str:
    return line.split("  # ")[0].strip()


def _is_closed(statement: str) -> bool:
    return all(statement.count(left) <= statement.count(right) for left, right in ("()", "[]"))


_SYMBOLS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
}


def _parsed(value: str, known: set[str]) -> tuple[str, tuple[str, ...]]:
    """The operator and the arguments of the right side of an assignment."""
    try:
        tree: ast.AST = ast.parse(value, mode="eval").body
    except SyntaxError:  # ``x += y``, or an argument whose text is no Python
        return value, ()
    encoded = value.encode()

    def text(node: ast.expr) -> str:
        return encoded[node.col_offset : node.end_col_offset].decode()

    if isinstance(tree, ast.Call):
        arguments = [text(item) for item in tree.args]
        arguments += [f"{item.arg or '**'}={text(item.value)}" for item in tree.keywords]
        if isinstance(tree.func, ast.Attribute) and text(tree.func.value) in known:
            return f".{tree.func.attr}", (text(tree.func.value), *arguments)
        return text(tree.func).removeprefix("torch.ops."), tuple(arguments)
    if isinstance(tree, ast.Subscript):
        return "getitem", (text(tree.value), text(tree.slice))
    if isinstance(tree, ast.BinOp) and type(tree.op) in _SYMBOLS:
        return _SYMBOLS[type(tree.op)], (text(tree.left), text(tree.right))
    if isinstance(tree, ast.Attribute):
        owner = text(tree.value)
        return ("get_attr", (tree.attr,)) if owner == "self" else (f".{tree.attr}", (owner,))
    return value, ()


_ABBREVIATIONS = {
    "FLOAT": "f32",
    "DOUBLE": "f64",
    "FLOAT16": "f16",
    "BFLOAT16": "bf16",
    "INT64": "i64",
    "INT32": "i32",
    "INT16": "i16",
    "INT8": "i8",
    "UINT8": "u8",
    "BOOL": "b8",
    "COMPLEX64": "c64",
    "COMPLEX128": "c128",
}
"""As FX writes them."""

_LONGEST_CONSTANT = 8
"""Elements of a constant that are written out."""


def onnx_nodes(model: ir.Model) -> list[GraphNode]:
    """The nodes of an ONNX model's graph: inputs, initializers, nodes, outputs.

    Args:
        model: it, of which each value has a name.
    """
    return [*_onnx_nodes(model.graph, model.graph.initializers.values())]


def _onnx_nodes(graph: ir.Graph | ir.Function, initializers: Sequence[ir.Value] = ()) -> Iterator[GraphNode]:
    held = {id(value) for value in initializers}
    for value in graph.inputs:
        if id(value) not in held:
            yield GraphNode("input", (str(value.name),), types=(_type(value),))
    for value in initializers:
        yield GraphNode("initializer", (str(value.name),), arguments=_content(value), types=(_type(value),))
    for node in graph:
        arguments = [str(value.name) if value is not None else "None" for value in node.inputs]
        arguments += [f"{name}={_attribute(attribute)}" for name, attribute in node.attributes.items()]
        yield GraphNode(
            "node",
            tuple(str(value.name) for value in node.outputs),
            f"{node.domain}.{node.op_type}" if node.domain else node.op_type,
            tuple(arguments),
            tuple(map(_type, node.outputs)),
            source=node.metadata_props.get("source", ""),
            origin=node.metadata_props.get("fx_node", ""),
        )
    yield GraphNode("output", ("return",), arguments=tuple(str(value.name) for value in graph.outputs))


def model_text(model: ir.Model) -> str:
    """An ONNX model, one line for each input, initializer and node: results, types, operator, attributes, source."""
    lines = [_line(node) for node in onnx_nodes(model)]
    for function in model.functions.values():
        lines += ["", f"function {function.domain}.{function.name}:"]
        lines += [f"    {_line(node)}" for node in _onnx_nodes(function)]
    return "\n".join(lines) + "\n"


def _line(node: GraphNode) -> str:
    return f"{node.text}  # {node.source}" if node.source else node.text


def _type(value: ir.Value) -> str:
    if value.dtype is None:
        return ""
    dtype = _ABBREVIATIONS.get(value.dtype.name, value.dtype.name.lower())
    return dtype + (f"[{', '.join(map(str, value.shape))}]" if value.shape is not None else "")


def _content(value: ir.Value) -> tuple[str, ...]:
    tensor = value.const_value
    return () if tensor is None or tensor.size > _LONGEST_CONSTANT else (str(tensor.numpy().tolist()),)


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"  # what the caller of the function gives
    kind = attribute.type.name
    if kind == "TENSOR":
        tensor = attribute.as_tensor()
        return str(tensor.numpy().tolist()) if tensor.size <= _LONGEST_CONSTANT else f"<{tensor.size} elements>"
    if kind in ("GRAPH", "GRAPHS"):
        return "<graph>"
    if kind == "FLOAT":
        return f"{attribute.as_float():.7g}"  # its float32
    return str(attribute.value)
