"""Finds the nodes of a low-precision graph that must compute in float32 for its results to be right.

::

    found = find_precision(run.graphs[0])
    for node in found.nodes:
        print(node.name, node.operator, node.source)

All nodes of the stage ``aten`` run in PyTorch on the recorded arguments, whether they ran there or on ONNX Runtime. A
variant has some nodes in float32: they read and return float32, for other nodes the values are rounded. It is right if
its results have the errors that ``numerics/rule.py`` allows, against the same graph in float64. Delta debugging finds a
smallest set of nodes: none of them can be left out.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..common.random_state import unchanged_random_state
from ..errors import first_line
from ..graphs.graph_text import GraphNode
from ..numerics.arrays import as_array, dtype_name
from ..numerics.rule import FORMATS, SUM_UNITS, judge
from .bisection import delta_debug
from .model_judging import as_tensor
from .reading import DumpedGraph, DumpError, find_run, read_data_set, read_json
from .schema import RowEntry
from .stage_graphs import stage_graphs

LOW = (torch.float16, torch.bfloat16)

_ITEM = "getitem"  # it takes one of several results as it is

_ARGUMENTS = "arguments"  # the folder of the recorded arguments of a graph, see ``debug.observer``


@dataclasses.dataclass(frozen=True)
class ResultError:
    """The error of a result of a graph."""

    name: str
    dtype: str
    error: float | None  # the absolute error; ``None`` if elements are NaN or infinite that are not in float64
    allowed: float  # the tolerance at the same element

    @property
    def is_right(self) -> bool:
        return self.error is not None and self.error <= self.allowed


@dataclasses.dataclass(frozen=True)
class Precision:
    """The result for a graph."""

    # ``not low``: no node is in low precision; ``ok``: the results are right; ``found``; ``not precision``: the results
    # are wrong even with all nodes in float32; ``not finite``: so are those in float64
    outcome: str
    nodes: Sequence[RowEntry] = ()  # those that must be in float32, in execution order
    candidates: int = 0  # how many nodes are in low precision
    in_pytorch: int = 0  # how many of these ran in PyTorch
    tried: int = 0  # how many variants ran
    before: Sequence[ResultError] = ()  # the errors in the graph's precision
    after: Sequence[ResultError] = ()  # the errors with the set in float32


def find_precision(graph: DumpedGraph, *, progress: Callable[[str], None] = lambda said: None) -> Precision:
    """Finds the nodes of a graph that must compute in float32.

    ``progress`` is called with a line of text for each variant.

    Raises:
        DumpError: no run was compared, an argument was not recorded, or PyTorch cannot run a node.
    """
    rows = {row.name: row for row in graph.rows()}
    is_low = any(row.dtype in ("float16", "bfloat16") for row in rows.values())
    search = PrecisionSearch(graph) if is_low else None
    if search is None or not search.candidates:
        return Precision("not low")

    def suffices(some: Sequence[str]) -> bool:
        is_right = all(item.is_right for item in search.errors(some))
        progress(f"{len(some)} nodes in float32: {'right' if is_right else 'wrong'}")
        return is_right

    names, found = search.candidates, list[str]()
    before = after = search.errors([])
    outcome = "ok" if search.is_finite else "not finite"
    if search.is_finite and not all(item.is_right for item in before):
        outcome, found = ("found", delta_debug(names, suffices)) if suffices(names) else ("not precision", [])
        after = search.errors(found or names)
    known = {name: row for name in names if (row := rows.get(name) or rows.get(f"{name}__0"))}
    in_pytorch = sum(row.region is None for row in known.values())
    nodes = [dataclasses.replace(known.get(name) or search.row_of(name), name=name) for name in found]
    return Precision(outcome, nodes, len(names), in_pytorch, search.tried, before, after)


class PrecisionSearch:
    """Runs variants of a graph. ``candidates`` are the nodes in low precision; ``is_finite``: float64's results."""

    def __init__(self, graph: DumpedGraph) -> None:
        path = stage_graphs(find_run(graph.folder), graph, "aten")[0].path.with_suffix(".json")
        nodes = [node for node in read_json(path, list[GraphNode]) if "." not in node.name]
        self._nodes = {node.name: node for node in nodes if node.kind == "node"}
        inputs = [node for node in nodes if node.kind == "input"]
        recorded = read_data_set(graph.folder / _ARGUMENTS, "input")
        if len(recorded) != len(inputs):
            raise DumpError(f"{graph.folder / _ARGUMENTS} has {len(recorded)} of {len(inputs)} arguments; dump again")
        self._arguments = {node.name: _argument(node, array) for node, (_, array) in zip(inputs, recorded, strict=True)}
        self.tried, self._plain = 0, dict[str, Any]()
        self._plain = self._run((), torch.float32)
        low = {name for name, value in self._plain.items() if _low_dtypes(value)}
        self.candidates = [
            name for name, node in self._nodes.items() if node.operator != _ITEM and low & {name, *_names_in(node)}
        ]
        dtypes = {dtype for value in self._plain.values() for dtype in _low_dtypes(value)}
        self._coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        wide = self._run(list(self._nodes), torch.float64)
        (output,) = (node for node in nodes if node.kind == "output")
        results = {name: self._plain[name] for name in _names_in(output) if name in self._nodes}
        self._exact = {
            name: as_array(wide[name])
            for name, value in results.items()
            if isinstance(value, torch.Tensor) and value.dtype in (*LOW, torch.float32)
        }
        self.is_finite = all(np.isfinite(value).all() for value in self._exact.values())

    def row_of(self, name: str) -> RowEntry:
        """What is known of a node that a later pass removed."""
        return RowEntry(name, self._nodes[name].operator, source=self._nodes[name].source)

    def errors(self, names: Collection[str]) -> list[ResultError]:
        """The errors of the results with these nodes in float32."""
        self.tried += 1
        values = self._run(names, torch.float32) if names else self._plain
        return [self._error(name, values[name].to(self._plain[name].dtype)) for name in self._exact]

    def _error(self, name: str, value: torch.Tensor) -> ResultError:
        """Of a result in float32, the rounding of the nodes in low precision is allowed."""
        exact = self._exact[name]
        coarser = dtype_name(self._coarsest if value.dtype is torch.float32 else value.dtype)
        with np.errstate(over="ignore"):
            typical = np.linalg.norm(exact) / math.sqrt(max(exact.size, 1))
        rounded = np.full(exact.shape, SUM_UNITS * FORMATS[coarser].epsilon * typical)
        found, _ = judge(as_array(value), exact, coarser, rounded)
        return ResultError(name, dtype_name(value.dtype), None if found.nonfinite else found.error, found.limit)

    def _run(self, wide_nodes: Collection[str], wide: torch.dtype) -> dict[str, Any]:
        """All values; those of ``wide_nodes`` in the dtype ``wide``. Random numbers are the same in each run."""
        chosen, values = set(wide_nodes), dict(self._arguments)
        with torch.no_grad(), unchanged_random_state():
            for name, node in self._nodes.items():
                function, is_random = _function(node.operator)
                to = wide if name in chosen and not is_random else None
                read = _Read(values, self._plain or values, to, node.operator == _ITEM)
                texts = [re.match(r"(?:(\w+)=)?(.*)", text, re.DOTALL) for text in node.arguments]
                given = [(item[1], read.value(ast.parse(item[2], mode="eval").body)) for item in texts if item]
                if is_random:
                    torch.manual_seed(0)
                try:
                    values[name] = function(*(v for key, v in given if not key), **{key: v for key, v in given if key})
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    raise DumpError(f"{name} ({node.operator}) does not run: {first_line(str(error))}") from None
        return values


def _names_in(node: GraphNode) -> list[str]:
    """The names, among others, in the arguments of a node."""
    return re.findall(r"\w+", " ".join(node.arguments))


@dataclasses.dataclass(frozen=True)
class _Read:
    """Evaluates the text of an argument. A dump is untrusted: names, numbers, dtypes and the like, and no code."""

    values: Mapping[str, Any]
    plain: Mapping[str, Any]  # the values in the graph's precision
    wide: torch.dtype | None  # the dtype of narrower tensors; by default that in the graph's precision
    as_is: bool  # whether tensors stay as they are

    def value(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Name(id=name) if name in self.values:
                return pytree.tree_map(self._changed, self.values[name], self.plain[name])
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item) for item in items]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                found = getattr(torch, name, None)
                if isinstance(found, torch.dtype):
                    return self.wide if self._is_narrower(found) else found
                if isinstance(found, (torch.layout, torch.memory_format)):
                    return found
            case ast.Call(func=ast.Name(id="device"), keywords=keywords):
                return torch.device(**{str(item.arg): self.value(item.value) for item in keywords})
        raise DumpError(f"the argument {ast.unparse(tree)} of a node cannot be read")

    def _is_narrower(self, dtype: torch.dtype) -> bool:
        return self.wide is not None and dtype.is_floating_point and dtype.itemsize < self.wide.itemsize

    def _changed(self, value: Any, plain: Any) -> Any:
        if not isinstance(value, torch.Tensor) or self.as_is:
            return value
        if self.wide is None:
            return value.to(plain.dtype)
        return value.to(self.wide) if self._is_narrower(value.dtype) else value


@functools.cache
def _function(name: str) -> tuple[Callable[..., Any], bool]:
    """What a node calls, and whether it draws random numbers; ``DumpError`` if it may do more than return a value."""
    if name == "aten.copy_.default":  # AOTAutograd writes a new value into an argument
        return (lambda argument, value: value), False
    if name in ("aten.view.default", "aten._unsafe_view.default"):  # the strides may be others in another dtype
        return torch.ops.aten.reshape.default, False
    namespace, _, rest = name.partition(".")
    found: Any = getattr(operator, name, None) if name.isidentifier() else None
    if namespace in ("aten", "prims") and rest.count(".") == 1:
        packet, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
        if found is not None and (found._schema.is_mutable or packet == "from_file"):
            found = None
    if found is None:
        raise DumpError(f"precision cannot run {name}: it changes its arguments, or is no ATen operator")
    return found, torch.Tag.nondeterministic_seeded in getattr(found, "tags", ())


def _argument(node: GraphNode, array: np.ndarray) -> Any:
    """A recorded argument, with the strides that it had."""
    if node.types[0].startswith("Sym"):
        return array.item()
    tensor, strides = as_tensor(array), re.search(r"\]\[([\d, ]+)\]$", node.types[0])
    if strides is None:
        return tensor
    given = torch.empty_strided(tensor.shape, [int(item) for item in strides[1].split(",")], dtype=tensor.dtype)
    return given.copy_(tensor)


def _low_dtypes(value: object) -> set[torch.dtype]:
    """The dtypes of low precision among nested tensors."""
    return {item.dtype for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)}.intersection(LOW)
