"""What one compiled model did in its calls: as a dictionary, and for Prometheus.

A ``CallStatistics`` is entered by the hooks that PyTorch runs at the start of each call of a compiled function. It
belongs to the result of one ``torch.compile``, so that models which share compiled graphs are told apart. ::

    compiled = torch.compile(model, backend="onnxrt")
    dynamo_backends.metrics(compiled)  # counting begins
    compiled(x)
    print(dynamo_backends.metrics(compiled)["latency_seconds"])
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch
from torch._dynamo.eval_frame import OptimizeContext

from ..common.call_statistics import CallStatistics, Snapshot
from ..events import FallbackCount, GraphSummary

if TYPE_CHECKING:
    from prometheus_client import Metric

PERCENTILES = (50, 90, 99)

FAILED_CALLS = (
    "runtime_failures",
    "wrong_results",
    "calls_after_failures",
    "internal_failures",
    "not_compiled_at_a_call",
    "calls_inside_forward_ad",
    "calls_without_graph",
)
"""The events after which PyTorch runs what should run on ONNX Runtime."""


class Metrics(TypedDict):
    """What ``metrics`` returns. All values are numbers, texts, and dictionaries and lists of these."""

    calls: int
    """Calls that ended, also by an exception."""
    calls_without_graph: int
    """Of these, calls in which no compiled graph ran; also in ``failures``."""
    graphs: int
    """Compiled graphs that ran in these calls and still exist."""
    operators_on_onnx: int
    """Operators of these graphs on ONNX Runtime."""
    operators_in_pytorch: int
    """Operators of these graphs in PyTorch, intended or not."""
    fallbacks: list[dict[str, object]]
    """``operator``, ``reason`` and ``number`` of operators that should run on ONNX Runtime, and run in PyTorch."""
    failures: list[dict[str, object]]
    """``event``, ``reason`` and ``number`` of failures after which PyTorch ran instead; the reason is the last one."""
    recompiles: int
    cache_hits: int
    weight_refreshes: int
    """See the page on counters, as for ``events``."""
    events: dict[str, int]
    """All that was counted during these calls."""
    seconds: float
    """The total duration of these calls."""
    seconds_outside_session: float
    """The part of it outside ONNX Runtime: Python, guards, checks of weights, operators in PyTorch, compiling."""
    latency_seconds: dict[str, float]
    """``p50``, ``p90``, ``p99`` of the last 2048 calls; empty before the first."""


def metrics(compiled: object) -> Metrics:
    """What one compiled model did since ``metrics`` was first called with it; that first call returns zeros.

    A graph that was compiled before is counted when it runs again. Backward passes are not part of a call.

    Args:
        compiled: the result of ``torch.compile`` for a function or a module; or a module with a compiled ``forward``
            (``model.forward = torch.compile(model.forward)``), or on which ``model.compile()`` was called.

    Returns:
        A dictionary that ``json`` can write.

    Raises:
        TypeError: it is not compiled, or not by itself alone: a method compiled in its class serves all objects.
    """
    return _metrics(_statistics(compiled).snapshot())


def _metrics(now: Snapshot) -> Metrics:
    values = np.percentile(now.latencies, PERCENTILES).tolist() if now.latencies else []
    counts, reasons = now.counts, now.reasons
    failures = [(event, reasons.get(event, ""), counts[event]) for event in FAILED_CALLS if event in counts]
    return Metrics(
        calls=now.calls,
        calls_without_graph=counts["calls_without_graph"],
        graphs=len(now.graphs),
        operators_on_onnx=sum(graph.on_onnx for graph in now.graphs),
        operators_in_pytorch=sum(graph.in_pytorch for graph in now.graphs),
        fallbacks=[dataclasses.asdict(item) for item in fallback_counts(now.graphs)],
        failures=[{"event": event, "reason": reason, "number": number} for event, reason, number in failures],
        recompiles=counts["recompiles"],
        cache_hits=counts["cache_hits"],
        weight_refreshes=counts["weight_refreshes"],
        events=dict(counts),
        seconds=now.seconds,
        seconds_outside_session=now.seconds - now.session_seconds,
        latency_seconds={f"p{percent}": value for percent, value in zip(PERCENTILES, values, strict=False)},
    )


def fallback_counts(graphs: Iterable[GraphSummary]) -> list[FallbackCount]:
    """The operators in PyTorch that should run on ONNX Runtime, of all graphs; equal ones are added up."""
    numbers: dict[tuple[str, str], int] = {}
    for item in (item for graph in graphs for item in graph.fallbacks):
        key = item.operator, item.reason
        numbers[key] = numbers.get(key, 0) + item.number
    return [FallbackCount(operator, reason, number) for (operator, reason), number in sorted(numbers.items())]


def _statistics(compiled: object) -> CallStatistics:
    """The statistics among a compiled model's hooks, added at first use.

    Raises:
        TypeError: see ``metrics``.
    """
    hooks = call_hooks(compiled)
    for hook in hooks:
        statistics = getattr(hook, "__self__", None)
        if isinstance(statistics, CallStatistics):
            return statistics
    statistics = CallStatistics()
    hooks.append(statistics.enter)
    return statistics


def call_hooks(compiled: object) -> list[Callable[[], Callable[[], None]]]:
    """The functions that PyTorch calls at the start of each call of a compiled function or module, and whose result it
    calls at the end; a list that may be extended.

    Args:
        compiled: the result of ``torch.compile``; or a module of which ``forward`` or all was compiled in place.

    Raises:
        TypeError: it is not compiled, or not for itself alone.
    """
    function = compiled
    if isinstance(compiled, torch.nn.Module):  # ``model.compile()`` sets the attribute
        function = getattr(compiled, "_compiled_call_impl", None) or compiled.forward
    if inspect.isfunction(function):
        context = inspect.getclosurevars(function).nonlocals.get("self")
        if isinstance(context, OptimizeContext):
            return context.enter_exit_hooks
    if inspect.ismethod(function) and hasattr(function, "get_compiler_config"):
        raise TypeError(
            f"{function.__qualname__} is compiled once for all objects of its class, so their calls cannot be told "
            "apart; call torch.compile(module), or compile() of the module, instead"
        )
    raise TypeError(
        f"expected the result of torch.compile, or a module with a compiled forward, not {type(compiled).__name__}. "
        "A function that calls a compiled model, or one that was loaded from a file, has no metrics"
    )


class Collector:
    """The metrics of several models as ``prometheus_client`` collects them; see ``prometheus_collector``."""

    def __init__(self, models: Mapping[str, object]) -> None:
        self._models = {name: _statistics(compiled) for name, compiled in models.items()}  # keeps no model alive

    def collect(self) -> Iterator[Metric]:
        """The current values, each with the label ``model``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        prefix = "dynamo_backends_"
        latency = SummaryMetricFamily(f"{prefix}call_seconds", "Duration of calls", labels=["model"])
        outside = CounterMetricFamily(f"{prefix}outside_session_seconds", "Time outside ONNX Runtime", labels=["model"])
        graphs = GaugeMetricFamily(f"{prefix}graphs", "Compiled graphs that ran", labels=["model"])
        operators = GaugeMetricFamily(f"{prefix}operators", "Operators of these graphs", labels=["model", "place"])
        labels = ["model", "operator", "reason"]
        fallbacks = GaugeMetricFamily(f"{prefix}fallbacks", "Operators that should not run in PyTorch", labels=labels)
        events = CounterMetricFamily(f"{prefix}events", "Events during calls", labels=["model", "event"])
        for name, statistics in self._models.items():
            now = _metrics(statistics.snapshot())
            for percentile, seconds in now["latency_seconds"].items():
                quantile = {"model": name, "quantile": str(int(percentile[1:]) / 100)}
                latency.add_sample(latency.name, quantile, seconds)
            latency.add_metric([name], now["calls"], now["seconds"])
            outside.add_metric([name], now["seconds_outside_session"])
            graphs.add_metric([name], now["graphs"])
            operators.add_metric([name, "onnxruntime"], now["operators_on_onnx"])
            operators.add_metric([name, "pytorch"], now["operators_in_pytorch"])
            for item in now["fallbacks"]:
                fallbacks.add_metric([name, str(item["operator"]), str(item["reason"])], float(str(item["number"])))
            for event, number in now["events"].items():
                events.add_metric([name, event], number)
        yield from (latency, outside, graphs, operators, fallbacks, events)


def prometheus_collector(models: Mapping[str, object]) -> Collector:
    """``metrics`` of compiled models for the package ``prometheus_client``, which must be installed. ::

        collector = dynamo_backends.prometheus_collector({"bert": compiled})
        prometheus_client.REGISTRY.register(collector)  # the server shows them with its own metrics
        print(prometheus_client.generate_latest(collector).decode())  # or the text of these alone

    Args:
        models: the compiled models, by the value of the label ``model``; see ``metrics``.

    Raises:
        TypeError: see ``metrics``.
    """
    return Collector(models)
