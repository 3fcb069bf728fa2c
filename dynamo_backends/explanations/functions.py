"""``explain`` and ``coverage``: what ``torch.compile`` and our backends make of a call, which runs in PyTorch.

::

    print(dynamo_backends.explain(model)(x))        # text
    dynamo_backends.coverage(model)(x)              # the same as data

It is the pipeline up to the split, with a lowering that keeps the split and runs the graphs in PyTorch.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from ..errors import Reason
from ..graphs import aot
from ..graphs.artifacts import GraphName, Split, operator_name
from ..graphs.locations import is_user_file, short_file, where
from ..options import parse_options
from ..partition.regions import Support, split_graph
from ..pipeline.lowering import Lowering
from ..pipeline.observer import Observer
from ..pipeline.pipeline import Pipeline
from ..runtime.custom_operators import load_libraries
from ..weights.frozen_session import Weight
from .explanation import AtenGraph, DynamoGraph, Explanation, Fallback, Guard, remedy_of


def explain(
    function: Callable[..., object],
    *,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:
    """Explains a call: graphs, graph breaks, operators, guards; what would run on ONNX Runtime, what not, and why.

    As with ``torch._dynamo.explain``, all that was compiled in this process is reset before and after, and the function
    is run once, in PyTorch: it changes what it changes. Where its results require gradients, their backward is run too,
    and no gradient is kept. No session is made of a graph; of operators that were not met before one is made each, to
    ask whether ONNX Runtime runs it.

    Args:
        function: a function or a module.
        options: those of the backend ``onnxrt``; ``providers`` and ``opset`` matter.
        dynamic: as in ``torch.compile``.

    Returns:
        A function that takes the arguments of ``function``; its result is an ``Explanation``, which prints as text.

    Raises:
        TypeError: ``function`` cannot be called.
        ValueError: an unknown option or an impossible value.
    """
    if not callable(function):
        raise TypeError(f"explain takes a function or a module, not {function!r}: explain(model)(*inputs)")
    checked = dataclasses.replace(parse_options(options), fallback="pytorch", verify_passes=False)
    load_libraries(checked.custom_op_libraries)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        torch._dynamo.reset()
        listener = _Listener()
        lowering = _SplitLowering(Support(checked.opset, checked.providers))
        pipeline = Pipeline(checked, listener, lowering)
        try:
            run = aot.compiled_with_guards(function, pipeline.compile_dynamo_graph, dynamic, listener.guards.extend)
            results = run(*args, **kwargs)
            _run_backward(results)
            listener.hear()
        finally:
            torch._dynamo.reset()
        shown = {graph.details for graph in listener.graphs.values()}
        unused = {said: number for said, number in listener.said.items() if said not in shown}
        graphs = [
            dataclasses.replace(graph, graphs=lowering.graphs.get(index, []))
            for index, graph in listener.graphs.items()
        ]
        return Explanation(graphs, [_guard(item) for item in listener.guards], unused)

    return explained


def coverage(
    function: Callable[..., object],
    *,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., dict[str, Any]]:
    """What ``explain`` finds as data: dicts, lists, texts and numbers, which ``json`` can write.

    Arguments and errors are those of ``explain``. The keys are the attributes of ``explanation.Explanation``,
    ``DynamoGraph``, ``AtenGraph``, ``Fallback`` and ``Guard``; each of AOTAutograd's graphs has ``share_on_onnx``.
    """
    explained = explain(function, options=options, dynamic=dynamic)
    return lambda *args, **kwargs: explained(*args, **kwargs).as_json()


class _Listener(Observer):
    """Keeps what is known of Dynamo's graphs."""

    def __init__(self) -> None:
        self.graphs: dict[int, DynamoGraph] = {}
        self.guards: list[Any] = []
        self.said: collections.Counter[str] = collections.Counter()
        self._heard = _said_by_dynamo()  # of other functions, which were compiled before

    def hear(self) -> list[str]:
        """What Dynamo has said since the last time of what it does not trace."""
        now = _said_by_dynamo()
        new, self._heard = now - self._heard, now
        for said, number in new.items():
            self.said[said.strip()] += number
        return [said.strip() for said in new]

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        super().stage(name, graph, artifact)
        if name != "dynamo":
            return
        assert isinstance(artifact, fx.GraphModule)
        frame = aot.frame_being_compiled()
        assert frame is not None  # explain calls Dynamo
        call = None if is_user_file(frame.file) else aot.call_being_compiled()
        line = f"{short_file(frame.file)}:{frame.line}"
        new = self.hear()
        details = frame.details
        if details not in new and len(new) == 1:  # of a branch on data Dynamo names the bytecode here
            details = new[0]
        self.graphs[graph.index] = DynamoGraph(
            graph.index,
            frame.function,
            line if call is None else f"{line}, called from {call}",
            frame.reason,
            f"{short_file(frame.end_file)}:{frame.end_line}" if frame.end_line else "",
            details if frame.details else "",
            dict(collections.Counter(_called(node) for node in artifact.graph.nodes if node.op.startswith("call_"))),
            [],
        )

    def gave_up(self, graph: GraphName, why: str) -> None:
        self.graphs.pop(graph.index, None)


def _said_by_dynamo() -> collections.Counter[str]:
    """All that Dynamo has said in this process of what it does not trace, with how often."""
    return collections.Counter(counters["graph_break"]) + collections.Counter(counters["unimplemented"])


class _SplitLowering(Lowering):
    """Keeps how the graphs of the stage ``post_grad`` are split, and runs them in PyTorch."""

    def __init__(self, support: Support) -> None:
        self._support = support
        self.graphs: dict[int, list[AtenGraph]] = {}

    def look(self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight]) -> None:
        split = split_graph(module, self._support, {})
        self.graphs.setdefault(name.index, []).append(_aten_graph(name, split))


def _aten_graph(name: GraphName, split: Split) -> AtenGraph:
    on_onnx = collections.Counter(str(node.target) for region in split.regions for node in region.operators)
    fallbacks = sorted(fallbacks_of(split), key=lambda item: (item.by_design, -item.number))
    return AtenGraph(f"{name.index}/{name.direction}", len(split.regions), dict(on_onnx.most_common()), fallbacks)


def fallbacks_of(split: Split) -> list[Fallback]:
    """The operators of a graph that run in PyTorch, by what they are and why."""
    lines: dict[tuple[str, Reason], list[str]] = {}
    for node, reason in split.coverage.in_pytorch.items():
        lines.setdefault((operator_name(node), reason), []).append(where(node))
    return [
        Fallback(
            operator,
            len(found),
            reason.kind.name,
            str(reason),
            remedy_of(reason.kind, operator),
            reason.by_design,
            [line for line in dict.fromkeys(found) if line],
        )
        for (operator, reason), found in lines.items()
    ]


def _called(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    return getattr(node.target, "__name__", str(node.target))


def _run_backward(results: object) -> None:
    """Runs the backward of all results that have one, for its graphs; the gradients are let go."""
    leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    ends = [leaf for leaf in leaves if leaf.grad_fn is not None]
    starts: list[torch.Tensor] = []
    functions: list[Any] = [end.grad_fn for end in ends]
    seen = set(functions)
    for function in functions:
        if hasattr(function, "variable"):
            starts.append(function.variable)
        following = {other for other, _ in function.next_functions if other is not None} - seen
        seen |= following
        functions += following
    if starts:
        torch.autograd.grad(ends, starts, [torch.ones_like(end) for end in ends], allow_unused=True)


def _guard(guard: Any) -> Guard:
    frame = guard.user_stack[-1] if guard.user_stack else None
    line = f"{short_file(frame.filename)}:{frame.lineno}" if frame is not None else ""
    conditions = [item for item in guard.code_list or [] if "_dynamo_" not in item]  # marks of Dynamo's own
    return Guard(guard.name, guard.create_fn_name(), conditions, line)
