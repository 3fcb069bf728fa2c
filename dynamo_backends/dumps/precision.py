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

from ..errors import first_line
from ..graphs.graph_text import GraphNode
from ..numerics.arrays import as_array, dtype_name
from ..numerics.rule import FORMATS, SUM_UNITS, judge
from .bisection import delta_debug
from .reading import DumpedGraph, DumpError, find_run, read_data_set, read_json
from .schema import RowEntry
from .stage_graphs import stage_graphs

LOW = (torch.float16, torch.bfloat16)

MOST_RUNS = 500  # the most variants that are tried

_ITEM = "getitem"  # it takes one of several results as it is

_ARGUMENTS = "arguments"  # the folder of the recorded arguments of a graph, see ``debug.observer``


@dataclasses.dataclass(frozen=True)
class ResultError:
    """The error of a result of a graph."""

    name: str
    dtype: str
    error: float  # the absolute error; infinite if elements are NaN or infinite that are not in float64
    allowed: float  # the tolerance at the same element

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed


@dataclasses.dataclass(frozen=True)
class Precision:
    """The result for a graph."""

    # ``not low``: no node is in low precision; ``ok``: the results are right; ``found``; ``not precision``: the results
    # are wrong even with all nodes in float32; ``not finite``: so are those in float64; ``unfinished``: the set is
    # right, but after ``MOST_RUNS`` variants it may not be the smallest
    outcome: str
    nodes: Sequence[RowEntry] = ()  # those that must be in float32, in execution order
    candidates: int = 0  # how many nodes are in low precision
    in_pytorch: int = 0  # how many of these ran in PyTorch
    tried: int = 0  # how many variants ran
    before: Sequence[ResultError] = ()  # the errors in the graph's precision
    after: Sequence[ResultError] = ()  # the errors with the set in float32

    def as_json(self) -> dict[str, object]:
        """Infinite errors become ``null``."""
        fields = dataclasses.asdict(self)
        for item in (*fields["before"], *fields["after"]):
            item["is_right"] = item["error"] <= item["allowed"]
            item["error"] = item["error"] if math.isfinite(item["error"]) else None
        names = ("name", "operator", "module", "source")
        return {**fields, "nodes": [{name: getattr(node, name) for name in names} for node in self.nodes]}


def find_precision(graph: DumpedGraph, *, progress: Callable[[str], None] = lambda said: None) -> Precision:
    """Finds the nodes of a graph that must compute in float32.

    ``progress`` is called with a line of text for each variant.

    Raises:
        DumpError: no run was compared, an argument was not recorded, or PyTorch cannot run a node.
    """
    rows = {row.name: row for row in graph.rows()}
    if not any(row.dtype in ("float16", "bfloat16") for row in rows.values()):
        return Precision("not low")
    search = PrecisionSearch(graph)
    names = search.candidates
    if not names:
        return Precision("not low")
    before = after = search.errors([])
    outcome, found = "ok", list[str]()
    if not search.is_finite:
        outcome = "not finite"
    elif not _are_right(before):
        outcome, after = "not precision", search.errors(names)
        if _are_right(after):

            def suffices(some: Sequence[str]) -> bool:
                if search.tried >= MOST_RUNS:
                    return False
                is_right = _are_right(search.errors(some))
                progress(f"{len(some)} nodes in float32: {'right' if is_right else 'wrong'}")
                return is_right

            found = delta_debug(names, suffices)
            outcome = "found" if search.tried < MOST_RUNS else "unfinished"
            after = search.errors(found)
    known = {name: row for name in names if (row := rows.get(name) or rows.get(f"{name}__0"))}
    in_pytorch = sum(row.region is None for row in known.values())
    nodes = [dataclasses.replace(known.get(name) or search.row_of(name), name=name) for name in found]
    return Precision(outcome, nodes, len(names), in_pytorch, search.tried, before, after)


class PrecisionSearch:
    """Runs variants of a graph. ``candidates`` are the nodes in low precision; ``is_finite``: float64's results."""

    def __init__(self, graph: DumpedGraph) -> None:
        path = stage_graphs(find_run(graph.folder), graph, "aten")[0].path.with_suffix(".json")
        nodes = [node for node in read_json(path, list[GraphNode]) if "." not in node.name]
        self._nodes = [node for node in nodes if node.kind == "node"]
        inputs = [node for node in nodes if node.kind == "input"]
        recorded = read_data_set(graph.folder / _ARGUMENTS, "input")
        if len(recorded) != len(inputs):
            raise DumpError(f"{graph.folder / _ARGUMENTS} has {len(recorded)} of {len(inputs)} arguments; dump again")
        self._arguments = {node.name: _argument(node, array) for node, (_, array) in zip(inputs, recorded, strict=True)}
        (output,) = (node for node in nodes if node.kind == "output")
        self._outputs = [name for name in re.findall(r"\w+", " ".join(output.arguments)) if name != "None"]
        self.tried = 0
        self._plain = self._run((), torch.float32)
        read = {node.name: set(re.findall(r"\w+", " ".join(node.arguments))) for node in self._nodes}
        low = {name for name, value in self._plain.items() if any(map(_is_low, pytree.tree_leaves(value)))}
        self.candidates = [
            node.name
            for node in self._nodes
            if node.operator != _ITEM and low.intersection({node.name, *read[node.name]})
        ]
        dtypes = {item.dtype for value in self._plain.values() for item in pytree.tree_leaves(value) if _is_low(item)}
        self._coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        every = self._run([node.name for node in self._nodes], torch.float64)
        names = [name for name in self._outputs if name not in self._arguments and _is_compared(self._plain[name])]
        self._exact = {name: as_array(every[name]) for name in names}
        self.is_finite = all(np.isfinite(value).all() for value in self._exact.values())

    def row_of(self, name: str) -> RowEntry:
        """What is known of a node that a later pass removed."""
        node = next(node for node in self._nodes if node.name == name)
        return RowEntry(name, node.operator, source=node.source)

    def errors(self, names: Collection[str]) -> list[ResultError]:
        """The errors of the results with these nodes in float32."""
        self.tried += 1
        values = self._run(names, torch.float32) if names else self._plain
        return [self._error(name, values[name].to(self._plain[name].dtype)) for name in self._exact]

    def _error(self, name: str, value: torch.Tensor) -> ResultError:
        """Of a result in float32, the rounding of the nodes in low precision is allowed."""
        exact, dtype = self._exact[name], dtype_name(value.dtype)
        coarser = dtype_name(self._coarsest) if value.dtype is torch.float32 else dtype
        terms = SUM_UNITS * FORMATS[coarser].epsilon * _ordinary(exact)
        found, _ = judge(as_array(value), exact, coarser, np.full(exact.shape, terms))
        return ResultError(name, dtype, math.inf if found.nonfinite else found.error, found.limit)

    def _run(self, wide_nodes: Collection[str], wide: torch.dtype) -> dict[str, Any]:
        """All values; those of ``wide_nodes`` in the dtype ``wide``. Random numbers are the same in each run."""
        chosen, values = set(wide_nodes), dict(self._arguments)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for node in self._nodes:
                function, is_random = _function(node.operator)
                change = _widened(wide) if node.name in chosen and not is_random else _narrowed
                change = _kept if node.operator == _ITEM else change
                read = _Read(values, getattr(self, "_plain", values), change)
                args, kwargs = [], {}
                for text in node.arguments:
                    key, _, rest = text.partition("=") if re.match(r"\w+=", text) else ("", "", text)
                    value = read.value(ast.parse(rest, mode="eval").body)
                    if key:
                        kwargs[key] = value
                    else:
                        args.append(value)
                if is_random:
                    torch.manual_seed(0)
                try:
                    values[node.name] = function(*args, **kwargs)
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    raise DumpError(f"{node.name} ({node.operator}) does not run: {first_line(str(error))}") from None
        return values


@dataclasses.dataclass(frozen=True)
class _Read:
    """Evaluates the text of an argument. A dump is untrusted: names, numbers, dtypes and the like, and no code."""

    values: Mapping[str, Any]
    plain: Mapping[str, Any]  # the values in the graph's precision
    change: Callable[[Any, Any], Any]

    def value(self, tree: ast.expr) -> Any:
        match tree:
            case ast.Name(id=name) if name in self.values:
                return pytree.tree_map(self.change, self.values[name], self.plain[name])
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
                if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                    return self.change(found, found)
            case ast.Call(func=ast.Name(id="device"), keywords=keywords):
                return torch.device(**{str(item.arg): self.value(item.value) for item in keywords})
        raise DumpError(f"the argument {ast.unparse(tree)} of a node cannot be read")


def _widened(wide: torch.dtype) -> Callable[[Any, Any], Any]:
    """Widens tensors and dtypes."""

    def is_narrower(dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < wide.itemsize

    def change(value: Any, _: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide if is_narrower(value) else value
        return value.to(wide) if isinstance(value, torch.Tensor) and is_narrower(value.dtype) else value

    return change


def _kept(value: Any, _: Any) -> Any:
    return value


def _narrowed(value: Any, plain: Any) -> Any:
    """A tensor in the dtype that it has in the graph's precision."""
    return value.to(plain.dtype) if isinstance(value, torch.Tensor) else value


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
    if array.dtype.kind in "biufc":
        tensor = torch.from_numpy(np.array(array))
    else:
        bits = torch.from_numpy(np.array(array).view(f"u{array.dtype.itemsize}"))
        tensor = bits.view(getattr(torch, array.dtype.name))
    strides = re.search(r"\]\[([\d, ]+)\]$", node.types[0])
    if strides is None:
        return tensor
    given = torch.empty_strided(tensor.shape, [int(item) for item in strides[1].split(",")], dtype=tensor.dtype)
    return given.copy_(tensor)


def _is_low(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW


def _is_compared(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (*LOW, torch.float32)


_FAR = 1e3
"""How many times larger than the lower quartile an outlier is."""


def _ordinary(value: np.ndarray) -> float:
    """The root mean square of the elements that are neither 0 nor far larger than the lower quartile."""
    size = np.abs(value[np.isfinite(value) & (value != 0)]).reshape(-1)
    if not size.size:
        return 0.0
    quartile = np.partition(size, size.size // 4)[size.size // 4]
    return float(np.sqrt(np.square(size[size <= _FAR * quartile]).mean()))


def _are_right(errors: Sequence[ResultError]) -> bool:
    return all(item.is_right for item in errors)
