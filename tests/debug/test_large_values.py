"""The tolerance is per element: a fault is found next to much larger values, and in half precision.

``test_rounding.py`` has similar values that are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from conftest import compiled
from onnxscript import opset18 as op
from torch import nn
from torch.utils._pytree import tree_leaves

from dynamo_backends.dumps.reading import find_run
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.exporter.converters.normalization import layer_norm
from dynamo_backends.exporter.translate import find_translation
from dynamo_backends.graphs.locations import short_file

aten = torch.ops.aten
LOWEST = torch.finfo(torch.float32).min
HALF = (torch.bfloat16, torch.float16)


class Part(nn.Module):
    def __init__(self, function: Callable[..., object], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args, *self.layers)


class Whole(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Identity(), part])

    def forward(self, *args: torch.Tensor) -> object:
        return self.parts[1](*self.parts[0](args))


def run(
    dump: Path,
    function: Callable[..., object],
    *made: Any,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    seeds: int = 1,
    **settings: object,
) -> list[Any]:
    """The compared graphs of a function of tensors, or of ``some``, and of new layers."""
    torch.manual_seed(0)
    layers = [layer for item in made if callable(item) and isinstance(layer := item(), nn.Module)]
    options = {"dump_dir": str(dump), "compare": "every"}
    call = compiled(Whole(Part(function, *layers)).to(dtype), backend="onnx_debug", options=options, **settings)
    for seed in range(seeds):
        torch.manual_seed(seed)
        given = [item() if callable(item) else item.clone() for item in made]
        args = [
            item.to(dtype) if item.is_floating_point() else item for item in given if isinstance(item, torch.Tensor)
        ]
        with torch.set_grad_enabled(training):
            results = call(*[item.requires_grad_(training) if item.is_floating_point() else item for item in args])
        if training:
            torch.autograd.backward([(item * torch.randn_like(item)).sum() for item in tree_leaves(results)])
    return list(find_run(dump).graphs)


def some(*shape: int, size: float = 1.0, last: float = 1.0, offset: float = 0.0) -> Callable[[], torch.Tensor]:
    """Random numbers; those of the last index are larger by a factor."""

    def make() -> torch.Tensor:
        value = torch.randn(shape) * size
        value[-1] *= last
        return value + offset

    return make


def causal(value: float) -> torch.Tensor:
    return torch.full((8, 8), value).triu(1)


Change = Callable[..., Any]
"""Makes a wrong result of the right one and the operator's arguments."""


def times(factor: float) -> Change:
    return lambda y, *args, **kwargs: op.Mul(y, factor)


def near_nothing(factor: float) -> Change:
    """A fault: results are wrong by a factor where the argument is less than 0.01."""
    return lambda y, x, *args, **kwargs: op.Where(
        op.Less(op.Abs(x), op.CastLike(0.01, x)), op.Mul(y, op.CastLike(factor, y)), y
    )


def small(factor: float) -> Change:
    """A fault in small elements only."""
    return lambda y, *args, **kwargs: op.Where(op.Less(op.Abs(y), 50.0), op.Mul(y, factor), y)


def first(factor: float, axis: int = 0) -> Change:
    """A fault in the first row, or column, only."""

    def change(y: ir.Value, *args: object, **kwargs: object) -> object:
        one, others = op.Slice(y, [0], [1], [axis]), op.Slice(y, [1], [2**31 - 1], [axis])
        return op.Concat(op.Mul(one, factor), others, axis=axis)

    return change


def rolled(y: ir.Value, *args: object, **kwargs: object) -> object:
    """A fault: each row is that of the next index."""
    return op.Concat(op.Slice(y, [1], [2**31 - 1], [0]), op.Slice(y, [0], [1], [0]), axis=0)


def where_infinite(wrong: Callable[[Any], Any]) -> Change:
    return lambda y, *args, **kwargs: op.Where(op.IsInf(y), wrong(y), y)


def instead(converter: Callable[..., object]) -> Change:
    return lambda y, *args, **kwargs: converter(*args, **kwargs)


def quick_gelu(factor: float) -> Change:
    return instead(lambda x, **kwargs: op.Mul(x, op.Sigmoid(op.Mul(x, factor))))


def epsilon(number: float) -> Change:
    return instead(lambda x, shape, weight, bias, _: layer_norm(x, shape, weight, bias, number))


def first_result(factor: float) -> Change:
    return lambda y, *args, **kwargs: (op.Mul(y[0], factor), *y[1:])


ROWS, MORE, OUTLIER, IMAGE = some(4, 8), some(8, 8), some(4, 8, last=1e4), some(2, 3, 6, 6)
FEW = torch.tensor([0, 3, 5, 7])
NORM, LINEAR, CONV = partial(nn.LayerNorm, 8), partial(nn.Linear, 8, 8), partial(nn.Conv2d, 3, 4, 3)
A_NORM, A_BATCH_NORM = aten.native_layer_norm, aten._native_batch_norm_legit_no_training
IN_LAYER = (A_NORM, A_BATCH_NORM, aten.convolution, aten.embedding)

FAULTS: dict[str, tuple[Any, ...]] = {
    "masked_fill": (aten.masked_fill, small(1.1), lambda x: x.masked_fill(x > 1, -1e9), ROWS),
    "mask": (aten.add, small(1.05), lambda x, m: (x + m).softmax(-1), MORE, causal(-1e9)),
    "lowest mask": (aten.add, small(1.05), lambda x, m: (x + m).softmax(-1), MORE, causal(LOWEST)),
    "gelu": (aten.gelu, quick_gelu(1.702), lambda x: F.gelu(x), some(4, 8, last=3e4)),
    "abs": (aten.abs, small(1.002), lambda x: x.abs(), OUTLIER),
    "residual": (aten.add, small(1.01), lambda x, y: x + y.sin(), some(4, 8, last=3e3), ROWS),
    "norm 1e-12": (A_NORM, epsilon(1e-5), lambda x, f: f(x), ROWS, partial(nn.LayerNorm, 8, 1e-12)),
    "norm 1e-6": (A_NORM, epsilon(1e-5), lambda x, f: f(x), ROWS, partial(nn.LayerNorm, 8, 1e-6)),
    "small norm": (A_NORM, epsilon(1e-6), lambda x, f: f(x), some(4, 8, size=1e-3), NORM),
    "one small row": (A_NORM, epsilon(1e-6), lambda x, f: f(x), some(4, 8, size=1e3, last=1e-5), NORM),
    "cat": (aten.cat, small(1.001), lambda x: torch.cat([x * 1e6, x.sin()]), ROWS),
    "matmul": (aten.mm, first(1.01), lambda x, y: x @ y, OUTLIER, MORE),
    "conv": (aten.convolution, first(1.01, 1), lambda x, f: f(x), IMAGE, CONV),
    "softmax": (aten._softmax, times(1.01), lambda x: x.softmax(-1), OUTLIER),
    "mean": (aten.mean, first(1.01), lambda x: x.mean(-1), OUTLIER),
    "sum": (aten.sum, first(1.01), lambda x: x.sum(-1), OUTLIER),
    "rsqrt": (aten.rsqrt, first(1.001), lambda x: x.square().rsqrt(), some(4, 8, last=1e-6)),
    "pow": (aten.pow, small(1.001), lambda x: x**2, OUTLIER),
    "exp": (aten.exp, small(1.001), lambda x: x.exp(), some(4, 8, last=20)),
    "div": (aten.div, small(1.001), lambda x, y: x / y, ROWS, some(4, 8, last=1e-6)),
    "index": (aten.index, rolled, lambda x, i: x.sin()[i], some(9, 8), FEW),
    "gather": (aten.gather, rolled, lambda x, i: x.sin().gather(0, i[:, None]), some(9, 8), FEW),
    "slice": (aten.slice, rolled, lambda x: x.sin()[2:].exp(), some(9, 8)),
    "where": (aten.where, instead(lambda c, x, y: op.Where(c, y, x)),
              lambda x, y: torch.where(x > 0, x, y), ROWS, ROWS),
    "batch norm": (A_BATCH_NORM, first_result(1.01), lambda x, f: f(x), IMAGE, lambda: nn.BatchNorm2d(3).eval()),
    "embedding": (aten.embedding, rolled, lambda i, f: f(i), FEW, partial(nn.Embedding, 9, 4)),
    "cumsum": (aten.cumsum, first(1.001), lambda x: x.cumsum(-1), OUTLIER),
    "sigmoid": (aten.sigmoid, times(1.001), lambda x: x.sigmoid(), some(4, 8, size=10)),
    "tanh": (aten.tanh, times(1.001), lambda x: x.tanh(), some(4, 8, size=0.01, last=1e3)),
    "gt": (aten.ge, instead(op.Greater), lambda x: x.round() >= 1, ROWS),
    "floor": (aten.round, instead(op.Floor), lambda x: x.round(), OUTLIER),
    "argmax": (aten.argmax, instead(lambda x, dim: op.ArgMax(x, axis=0, keepdims=0)), lambda x: x.argmax(-1), MORE),
    "infinite mask": (aten.masked_fill, where_infinite(lambda y: op.Abs(op.Sign(y))),
                      lambda x: x.masked_fill(x > 0, -torch.inf), ROWS),
    "overflow": (aten.exp, where_infinite(lambda y: op.Sub(y, y)), lambda x: x.exp(), some(4, 8, offset=88)),
    "wrong infinity": (aten.exp, where_infinite(op.Neg), lambda x: x.exp(), some(4, 8, offset=88)),
    "logarithm of 0": (aten.log, where_infinite(lambda y: op.Sub(y, y)), lambda x: x.relu().log(), ROWS),
    "small square": (aten.pow, times(2.0), lambda x: x**2, some(4, 8, size=1e-4)),
    "small exponential": (aten.exp, times(1.1), lambda x: x.exp(), some(4, 8, offset=-15)),
    "small root": (aten.sqrt, times(1.5), lambda x: 1e-3 * x / ((x * x).sqrt() + 1e-8), some(16, 8, size=1e-7)),
}  # fmt: skip
HALF_FAULTS: dict[str, tuple[Any, ...]] = {
    "sigmoid": (aten.sigmoid, times(1.03), lambda x, f: f(x).sigmoid(), ROWS, LINEAR),
    "gelu": (aten.gelu, quick_gelu(1.4), lambda x, f: F.gelu(f(x)), ROWS, LINEAR),
    "quick gelu": (aten.sigmoid, instead(lambda x: op.Sigmoid(op.Mul(x, 1.4 / 1.702))),
                   lambda x, f: f(x) * (1.702 * x).sigmoid(), ROWS, LINEAR),
    "add": (aten.add, times(1.05), lambda x, f: f(x) + x, ROWS, LINEAR),
    "softmax": (aten._softmax, times(1.05), lambda x, f: f(x).softmax(-1), ROWS, LINEAR),
    "layer norm": (A_NORM, first_result(1.04), lambda x, f, g: f(g(x)), ROWS, LINEAR, NORM),
    "matmul": (aten.mm, times(1.05), lambda x, f: f(x) @ x.T, ROWS, LINEAR),
    "mul": (aten.mul, times(1.04), lambda x, f: f(x) * x, ROWS, LINEAR),
}  # fmt: skip

NEAR_NOTHING = torch.cat([torch.linspace(-6, 6, 1000), torch.linspace(1e-3, 9e-3, 24)]).view(64, 16)
"""The errors of other elements of their row, such as the sine of 3.14, excuse nothing at the small ones."""

FLOAT16_FAULTS: dict[str, tuple[Any, ...]] = {
    "small silu": (aten.silu, near_nothing(1.05), lambda x: F.silu(x), NEAR_NOTHING),
    "small gelu": (aten.gelu, near_nothing(1.05), lambda x: F.gelu(x), NEAR_NOTHING),
    "small sine": (aten.sin, near_nothing(1.2), lambda x: x.sin(), NEAR_NOTHING),
}


def plant(monkeypatch: pytest.MonkeyPatch, packet: Any, change: Change) -> None:
    """Makes the converter of an operator wrong."""
    for target in (getattr(packet, name) for name in packet.overloads()):
        right: Any = find_translation(target, 18)
        if right is not None:
            wrong = lambda *args, right=right, **kwargs: change(right(*args, **kwargs), *args, **kwargs)  # noqa: E731
            monkeypatch.setitem(CONVERTERS, target, wrong)


def assert_named(graphs: list[Any], node: str, function: Any, module: str) -> None:
    """The verdict names the node and the lambda's line; its row has the path of the module."""
    (graph,) = [graph for graph in graphs if graph.verdict != "ok"]
    place = f"{short_file(__file__)}:{function.__code__.co_firstlineno})"
    assert graph.verdict.startswith(f"diverges at {node}") and place in graph.verdict, graph.verdict
    rows = json.loads((graph.folder / "side_by_side.json").read_text())["rows"]
    assert [row["module"] for row in rows if row["name"] == graph.entry.blame.value] == [module]


CASES = [(FAULTS, name, torch.float32) for name in FAULTS]
CASES += [(HALF_FAULTS, name, dtype) for name in HALF_FAULTS for dtype in HALF]
CASES += [(FLOAT16_FAULTS, name, torch.float16) for name in FLOAT16_FAULTS]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("faults", "name", "dtype"), CASES, ids=[f"{name}-{dtype}" for _, name, dtype in CASES])
def test_a_fault(
    faults: dict[str, Any], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packet, change, function, *made = faults[name]
    plant(monkeypatch, packet, change)
    module = f"parts.1.layers.{made[1:].index(made[-1])}" if packet in IN_LAYER else "parts.1"
    assert_named(run(tmp_path, function, *made, dtype=dtype), packet.__name__, function, module)


def test_a_fault_of_one_layer_of_twelve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    right, calls = CONVERTERS[target], []

    def wrong(query: ir.Value, *args: Any, **kwargs: Any) -> object:
        calls.extend([query] * (query.producer() is not None))  # not where the runtime is asked what it takes
        found: Any = right(query, *args, **kwargs)
        return (op.Mul(found[0], 1.01), *found[1:]) if len(calls) == 8 else found

    monkeypatch.setitem(CONVERTERS, target, wrong)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    config = tf.BertConfig(num_hidden_layers=12, **sizes)
    function = lambda i, bert: bert(i).last_hidden_state  # noqa: E731
    graphs = run(tmp_path, function, torch.arange(12)[None], lambda: tf.BertModel(config).eval())
    assert_named(
        graphs, f"{target.overloadpacket.__name__}_7__0", function, "parts.1.layers.0.encoder.layer.7.attention.self"
    )
