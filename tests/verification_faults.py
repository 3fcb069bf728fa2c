"""Faults for ``verification_sweep.py --planted``: each is planted alone, and the verdict must name it.

A fault is a wrong converter, pass, decomposition, optimizer or session, and a program that has what it changes. The
line of the program that must be named has the comment ``# here``, if it has more than one line::

    _converter("cos", aten.cos.default, lambda x: op.Mul(op.Cos(x), 1.01), lambda x: x.cos(), _normal(64))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnxscript import opset18 as op
from torch import fx, nn
from torch.nn import functional as F
from verification_models import MODELS, Program, WrittenOut, by_pt2e

from dynamo_backends.dumps.blame import CauseKind
from dynamo_backends.exporter import decompositions
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.runtime.session import Session
from dynamo_backends.weights import changes
from passes import Pass, PassContext, register, unregister

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed

Causes = frozenset[tuple[str, str]]


@dataclasses.dataclass
class Planting:
    """How often a fault was planted so far."""

    count: int = 0


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        kind: where it is planted.
        build: the program.
        plant: plants it while its context is open.
        causes: kinds and names, one of which the verdict must have; empty if it is no fault.
        lines: ``file.py:1``, one of which must be named; empty if any may be.
        values: how the name of the value begins that must be named, one of these.
        calls: steps to run.
        operator: the operator whose converter is wrong; it must not run in PyTorch.
        is_below_the_unit: whether it is as small as rounding, so that it may be missed.
    """

    kind: str
    build: Callable[[], Program]
    plant: Callable[[], AbstractContextManager[Planting]]
    causes: Causes
    lines: tuple[str, ...]
    values: tuple[str, ...] = ("",)
    calls: int = 1
    operator: str = "-"
    is_below_the_unit: bool = False

    @property
    def expected(self) -> str:
        """What the verdict must name."""
        causes = " or ".join(sorted(" ".join(filter(None, cause)) for cause in self.causes))
        places = " or ".join(self.lines) or " or ".join(filter(None, self.values)) or "any value"
        return f"{causes} at {places}" if causes else "no fault"

    def is_at(self, value: str, source: str) -> bool:
        """Whether a value of a line is one that must be named."""
        return value.startswith(self.values) and (not self.lines or Path(source).name in self.lines)


FAULTS: dict[str, Fault] = {}


def _add(name: str, fault: Fault) -> None:
    assert name not in FAULTS, name
    FAULTS[name] = fault


Make = Callable[[], Sequence[torch.Tensor]]
Target = Callable[..., object]


def _normal(*shape: int, factor: float = 1.0, dtype: torch.dtype = torch.float32) -> Make:
    return lambda: [(torch.randn(*shape) * factor).to(dtype)]


def _program(make: Callable[[], Target], inputs: Make, training: bool = False, **more: Any) -> Callable[[], Program]:
    """A program that calls a function, and in training computes gradients of its result."""

    def build() -> Program:
        target, given = make(), inputs()

        def step(function: Target) -> object:
            if not training:
                with torch.no_grad():
                    return function(*given)
            result: Any = function(*given)
            return result.square().sum().backward()

        return Program(target, step, **more)

    return build


def _maker(program: Any) -> tuple[Callable[[], Target], tuple[str, ...]]:
    """What makes a function or module, and the lines that may be named."""
    if inspect.isclass(program):
        return program, _lines(program.forward)
    return lambda: program, _lines(program)


def _lines(function: Any) -> tuple[str, ...]:
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    numbers = {line for *_, line in function.__code__.co_lines() if line}
    marked = {line for line in numbers if "# here" in text[line - 1]}
    return tuple(f"{Path(__file__).name}:{line}" for line in sorted(marked or numbers))


NODE: Causes = frozenset({(CauseKind.NODE.value, "")})


# ---------------------------------------------------------------------------------------------------- wrong converters


@contextlib.contextmanager
def _wrong_converter(target: object, wrong: Callable[..., object]) -> Iterator[Planting]:
    planting = Planting()

    @functools.wraps(wrong)
    def counted(*args: object, **kwargs: object) -> object:
        planting.count += 1
        return wrong(*args, **kwargs)

    with mock.patch.dict(CONVERTERS, {target: counted}):
        yield planting


def _converter(
    name: str,
    target: object,
    wrong: Callable[..., object],
    program: Target | type[nn.Module],
    inputs: Make,
    *,
    training: bool = False,
    causes: Causes = NODE,
    below: bool = False,
    **more: Any,
) -> None:
    make, lines = _maker(program)
    build = _program(make, inputs, training, **more)
    kind = "converter, training" if training else "converter"
    if not causes:
        kind = "no fault"
    _add(
        name,
        Fault(
            kind,
            build,
            lambda: _wrong_converter(target, wrong),
            causes,
            lines,
            operator=str(target),
            is_below_the_unit=below,
        ),
    )


def _scaled(factor: float, function: Callable[..., Any]) -> Callable[..., object]:
    return lambda *args, **kwargs: op.Mul(function(*args, **kwargs), factor)


def _ints(*numbers: int) -> ir.Value:
    value: ir.Value = op.Constant(value_ints=list(numbers))
    return value


def _scalar(number: int) -> ir.Value:
    value: ir.Value = op.Constant(value_int=number)
    return value


def _silu(x: ir.Value) -> Any:
    return op.Mul(x, op.Sigmoid(x))


def _tanh_gelu(x: ir.Value, approximate: str = "none") -> Any:
    inner = op.Mul(0.7978845608, op.Add(x, op.Mul(0.044715, op.Mul(x, op.Mul(x, x)))))
    return op.Mul(op.Mul(x, 0.5), op.Add(op.Tanh(inner), 1.0))


class Perceptron(nn.Module):
    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        h = F.silu(h)  # here
        return self.down(h)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        h = F.silu(h)  # here
        return self.second(h).mean((2, 3))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, activation=F.gelu, batch_first=True, dropout=0.0)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x)
        h = F.silu(h)  # here
        return self.head(h)


class Feed(nn.Module):
    """A feed-forward block with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        h = F.gelu(h)  # here
        return x + self.down(h)


_ROWS = _normal(32, 64)
_converter("silu x 1.01", aten.silu.default, _scaled(1.01, _silu), Perceptron, _ROWS)
_converter("silu x (1 + 1e-5)", aten.silu.default, _scaled(1 + 1e-5, _silu), Perceptron, _ROWS)
_converter("gelu by tanh", aten.gelu.default, _tanh_gelu, Feed, _ROWS)
_converter(
    "tanh x (1 + 6e-7)", aten.tanh.default, _scaled(1 + 6e-7, op.Tanh), lambda x: x.exp().tanh(), _ROWS, below=True
)
_converter(
    "half tanh x 1.0004",
    aten.tanh.default,
    lambda x: op.Cast(op.Mul(op.Tanh(op.Cast(x, to=ir.DataType.FLOAT)), 1.0004), to=ir.DataType.FLOAT16),
    lambda x: x.exp().tanh(),
    _normal(32, 64, dtype=torch.float16),
    below=True,
)
_converter(
    "half tanh x 1.01",
    aten.tanh.default,
    lambda x: op.Cast(op.Mul(op.Tanh(op.Cast(x, to=ir.DataType.FLOAT)), 1.01), to=ir.DataType.FLOAT16),
    lambda x: x.exp().tanh(),
    _normal(32, 64, dtype=torch.float16),
)


def _rational_tanh(x: ir.Value) -> Any:
    square = op.Mul(x, x)
    return op.Clip(op.Div(op.Mul(x, op.Add(square, 27.0)), op.Add(op.Mul(square, 9.0), 27.0)), -1.0, 1.0)


def _short_erf(x: ir.Value) -> Any:
    """Abramowitz and Stegun 7.1.26: an absolute error of 1.5e-7, a large relative one near zero."""
    t = op.Reciprocal(op.Add(op.Mul(op.Abs(x), 0.3275911), 1.0))
    series = op.Mul(t, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = op.Mul(t, op.Add(series, factor))
    return op.Mul(op.Sign(x), op.Sub(1.0, op.Mul(series, op.Exp(op.Neg(op.Mul(x, x))))))


def _shorter_erf(x: ir.Value) -> Any:
    """Abramowitz and Stegun 7.1.25: an absolute error of 2.5e-5."""
    t = op.Reciprocal(op.Add(op.Mul(op.Abs(x), 0.47047), 1.0))
    series = op.Mul(t, op.Add(op.Mul(t, op.Add(op.Mul(t, 0.7478556), -0.0958798)), 0.3480242))
    return op.Mul(op.Sign(x), op.Sub(1.0, op.Mul(series, op.Exp(op.Neg(op.Mul(x, x))))))


_converter("tanh by a fraction", aten.tanh.default, _rational_tanh, lambda x: x.exp().tanh(), _ROWS)
_converter(
    "erf by a short series",
    aten.erf.default,
    _short_erf,
    lambda x: torch.erf(x),
    _normal(4096, factor=0.01),
    below=True,  # of the largest result
)
_converter("erf by a shorter series", aten.erf.default, _shorter_erf, lambda x: torch.erf(x), _normal(4096))


def _products(large: float) -> Make:
    """A matrix whose last column's terms are large and cancel in each product."""

    def make() -> Sequence[torch.Tensor]:
        x, w = torch.randn(32, 64), torch.randn(64, 48)
        x[:, 1::2] = x[:, ::2]
        w[1::2, -1] = -w[::2, -1]
        w[:, -1] *= large
        return [x, w]

    return make


for _factor, _large in ((1.01, 1e5), (1.02, 1e6), (1.5, 1e7)):
    _converter(
        f"mm x {_factor} beside {_large:g}",
        aten.mm.default,
        _scaled(_factor, op.MatMul),
        lambda x, w: (x @ w).sin(),
        _products(_large),
    )
_converter("mm x (1 + 1e-4)", aten.mm.default, _scaled(1 + 1e-4, op.MatMul), lambda x, w: (x @ w).cos(), _products(1.0))


def _half_product(x: ir.Value, w: ir.Value) -> Any:
    """With a clip that keeps ONNX Runtime from removing the casts."""
    halves = (op.Cast(item, to=ir.DataType.FLOAT16) for item in (x, w))
    clipped = (op.Cast(op.Clip(half, *_half_bounds()), to=ir.DataType.FLOAT) for half in halves)
    return op.MatMul(*clipped)


def _half_bounds() -> list[Any]:
    return [op.Constant(value=ir.tensor(np.float16(bound))) for bound in (-6e4, 6e4)]


_converter("mm in float16", aten.mm.default, _half_product, lambda x, w: (x @ w).cos(), _products(1.0))
_converter(
    "addmm with the weight transposed twice",
    aten.addmm.default,
    lambda bias, x, w: op.Add(op.MatMul(x, op.Transpose(w, perm=[1, 0])), bias),
    lambda x, w, b: torch.addmm(b, x, w).sin(),
    lambda: [torch.randn(8, 32), torch.randn(32, 32), torch.randn(32)],
)
_converter(
    "log1p by log(x + 1)",
    aten.log1p.default,
    lambda x: op.Log(op.Add(x, 1.0)),
    lambda x: torch.log1p(x),
    _normal(64, factor=1e-8),
)


def _damped_log1p(x: torch.Tensor) -> torch.Tensor:
    small = torch.log1p(x)  # here
    return 1 + small.sum(-1)


_converter(
    "log1p by log(x + 1), damped",
    aten.log1p.default,
    lambda x: op.Log(op.Add(x, 1.0)),
    _damped_log1p,
    _normal(16, 64, factor=1e-8),
)
_converter(
    "expm1 by exp(x) - 1",
    aten.expm1.default,
    lambda x: op.Sub(op.Exp(x), 1.0),
    lambda x: torch.expm1(x).sin(),
    _normal(64, factor=1e-7),
)
_converter(
    "sigmoid by 1 - sigmoid(-x)",
    aten.sigmoid.default,
    lambda x: op.Sub(1.0, op.Sigmoid(op.Neg(x))),
    lambda x: torch.sigmoid(x) * 2,
    lambda: [torch.linspace(-30, 30, 256)],
    below=True,  # of the largest result
)
_converter(
    "softplus by log(1 + exp(x))",
    aten.softplus.default,
    lambda x, beta=1.0, threshold=20.0: op.Log(op.Add(op.Exp(x), 1.0)),
    lambda x: F.softplus(x) * 2,
    lambda: [torch.linspace(-30, 30, 256)],
)
_converter(
    "pow by exp and log",
    aten.pow.Tensor_Scalar,
    lambda x, y: op.Exp(op.Mul(op.Log(x), float(y))),
    lambda x: (x**3).sin(),
    lambda: [torch.rand(256) * 1e4 + 1e3],
    below=True,  # the logarithm's rounding, multiplied
)
_converter(
    "log_softmax by log(softmax(x))",
    aten._log_softmax.default,
    lambda x, dim, half: op.Log(op.Softmax(x, axis=dim)),
    lambda x: F.log_softmax(x, -1),
    _normal(16, 64, factor=100.0),
)


def _plain_softmax(x: ir.Value, dim: int, half: bool) -> Any:
    exponents = op.Exp(x)
    return op.Div(exponents, op.ReduceSum(exponents, _ints(dim), keepdims=1))


def _attend(x: torch.Tensor) -> torch.Tensor:
    scores = x @ x.transpose(-1, -2)
    shares = scores.softmax(-1)  # here
    return shares @ x


_converter(
    "softmax without the maximum, large", aten._softmax.default, _plain_softmax, _attend, _normal(4, 32, 64, factor=2.0)
)
_converter(
    "softmax without the maximum, small",
    aten._softmax.default,
    _plain_softmax,
    lambda x: torch.softmax(x - 120, -1),
    _ROWS,
)
_converter(
    "softmax of another dimension",
    aten._softmax.default,
    lambda x, dim, half: op.Softmax(x, axis=-2),
    _attend,
    _normal(4, 32, 64, factor=0.1),
)


def _gelu_behind_sums(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(16, x.shape[1]).index_put((index,), x, accumulate=True)
    h = F.gelu(table)  # here
    return h.sum(0)


def _gelu_behind_writes(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """PyTorch does not say which of several rows stays, but what follows is right or wrong on any of them."""
    table = torch.zeros(16, x.shape[1]).index_put((index,), x)
    h = F.gelu(table)  # here
    return h.sum(0)


def _repeated() -> Sequence[torch.Tensor]:
    return [torch.randn(200, 64), torch.randint(16, (200,))]


for _name, _behind in (("sums", _gelu_behind_sums), ("writes", _gelu_behind_writes)):
    _converter(f"gelu by tanh behind {_name} at repeated indices", aten.gelu.default, _tanh_gelu, _behind, _repeated)
_converter(
    "gelu x 1.001 behind sums at repeated indices",
    aten.gelu.default,
    lambda x, approximate="none": op.Mul(op.Mul(x, op.Mul(op.Add(op.Erf(op.Mul(x, 0.70710678)), 1.0), 0.5)), 1.001),
    _gelu_behind_sums,
    _repeated,
)


def _causal(x: torch.Tensor) -> torch.Tensor:
    index = torch.arange(x.shape[1])
    allowed = index[None, :] <= index[:, None]  # here
    scores = (x @ x.transpose(1, 2) / 8).masked_fill(~allowed, -1e9)
    return scores.softmax(-1) @ x


_converter(
    "causal mask off by one",
    aten.le.Tensor,
    lambda x, y: op.LessOrEqual(x, op.Add(y, _ints(1))),
    _causal,
    _normal(1, 256, 64),
)
_converter(
    "causal mask without the diagonal",
    aten.le.Tensor,
    lambda x, y: op.Less(x, y),
    _causal,
    _normal(1, 256, 64),
)


def _causal_by_time(x: torch.Tensor) -> torch.Tensor:
    times = torch.arange(x.shape[1]) * 0.1 + x[0, 0, 0] * 0
    allowed = times[None, :] <= times[:, None]  # here
    scores = (x @ x.transpose(1, 2) / 8).masked_fill(~allowed, -1e9)
    return scores.softmax(-1) @ x


_converter(
    "causal mask of times off by one",
    aten.le.Tensor,
    lambda x, y: op.LessOrEqual(x, op.Add(y, 0.1001)),
    _causal_by_time,
    _normal(1, 256, 64),
)


def _causal_by_summed_times(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    times = steps.exp().cumsum(0)
    allowed = times[None, :] <= times[:, None]  # here
    scores = (x @ x.transpose(1, 2) / 8).masked_fill(~allowed, -1e9)
    return scores.softmax(-1) @ x


def _summed_times() -> Sequence[torch.Tensor]:
    return [torch.randn(1, 256, 64), torch.randn(256)]


_converter(
    "causal mask of summed times without the diagonal",
    aten.le.Tensor,
    lambda x, y: op.Less(x, y),
    _causal_by_summed_times,
    _summed_times,
)
_converter(
    "causal mask of summed times off by a little",
    aten.le.Tensor,
    lambda x, y: op.LessOrEqual(x, op.Add(y, 0.5)),
    _causal_by_summed_times,
    _summed_times,
)


def _wrong_rows(x: ir.Value) -> Any:
    first, rest = (op.Slice(x, _ints(a), _ints(b), _ints(0)) for a, b in ((0, 100), (100, 1000)))
    return op.Concat(op.Sinh(first), op.Mul(op.Sinh(rest), 1.01), axis=0)


def _wrong_last(x: ir.Value) -> Any:
    rest, last = (op.Slice(x, _ints(a), _ints(b), _ints(0)) for a, b in ((0, 4095), (4095, 4096)))
    return op.Concat(op.Cos(rest), op.Add(op.Cos(last), 1e-3), axis=0)


def _wrong_row(x: ir.Value) -> Any:
    parts = (op.Slice(x, _ints(a), _ints(b), _ints(0)) for a, b in ((0, 100), (100, 101), (101, 1000)))
    first, one, rest = (op.Sinh(part) for part in parts)
    return op.Concat(first, op.Mul(one, 1.01), rest, axis=0)


_converter("wrong rows beyond 100", aten.sinh.default, _wrong_rows, lambda x: torch.sinh(x).cos(), _normal(128, 16))
_converter("one wrong row", aten.sinh.default, _wrong_row, lambda x: torch.sinh(x).cos(), _normal(128, 16))
_converter("a wrong last element", aten.cos.default, _wrong_last, lambda x: x.cos().sinh(), _normal(4096))


class Long(nn.Module):
    """A hundred equal layers, of which each is a little less exact than eager's and the last but one is wrong."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(98):
            h = torch.cos(h)
        h = torch.cos(h)  # here
        return torch.sin(h)


class _WrongAt:
    """A cosine that is off by a few units, and once by more."""

    def __init__(self, wrong: int, factor: float) -> None:
        self.wrong, self.factor, self.calls = wrong, factor, 0

    def __call__(self, x: ir.Value) -> Any:
        self.calls += 1
        return op.Mul(op.Cos(x), self.factor if self.calls == self.wrong + 1 else 1 + 3e-7)  # the first call probes


for _factor in (1.01, 1 + 1e-4):
    _converter(f"the 99th cosine x {_factor}", aten.cos.default, _WrongAt(99, _factor), Long, _normal(64))


def _normalized(x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, (32,))  # here
    return h.sin()


_LAYER_NORM: Callable[..., Any] = CONVERTERS[aten.native_layer_norm.default]
_converter(
    "layer norm of another axis",
    aten.native_layer_norm.default,
    lambda x, shape, weight, bias, eps: (
        op.Div(
            op.Sub(x, op.ReduceMean(x, _ints(1), keepdims=1)),
            op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), _ints(1), keepdims=1), eps)),
        ),
        *_LAYER_NORM(x, shape, weight, bias, eps)[1:],
    ),
    _normalized,
    _normal(4, 32, 32),
)
_converter(
    "layer norm with another epsilon",
    aten.native_layer_norm.default,
    lambda x, shape, weight, bias, eps: _LAYER_NORM(x, shape, weight, bias, eps * 100),
    _normalized,
    _normal(4, 32, 32),
)
_converter(
    "sum of another dimension",
    aten.sum.dim_IntList,
    lambda x, dim, keepdim=False, dtype=None: op.ReduceSum(x, _ints(3 - dim[0]), keepdims=int(keepdim)),
    lambda x: x.sin().sum(2).cos(),
    _normal(4, 16, 16),
)
_converter(
    "variance without Bessel's correction",
    aten.var.correction,
    lambda x, dim=None, correction=None, keepdim=False: op.ReduceMean(
        op.Pow(op.Sub(x, op.ReduceMean(x, _ints(*dim), keepdims=1)), 2.0), _ints(*dim), keepdims=int(keepdim)
    ),
    lambda x: x.exp().var(-1).log(),
    _normal(32, 1000),
)
_converter(
    "variance by squares",
    aten.var.correction,
    lambda x, dim=None, correction=None, keepdim=False: op.Mul(
        op.Sub(
            op.ReduceMean(op.Mul(x, x), _ints(*dim), keepdims=int(keepdim)),
            op.Pow(op.ReduceMean(x, _ints(*dim), keepdims=int(keepdim)), 2.0),
        ),
        1000 / 999,
    ),
    lambda x: (x + 1000).var(-1).log(),
    _normal(32, 1000),
)
_converter(
    "rsqrt with an epsilon",
    aten.rsqrt.default,
    lambda x: op.Reciprocal(op.Sqrt(op.Add(x, 1e-5))),
    lambda x: torch.rsqrt(x.square()).sin(),
    _normal(256),
)
_converter(
    "argmin for argmax",
    aten.argmax.default,
    lambda x, dim=None, keepdim=False: op.ArgMin(x, axis=dim, keepdims=int(keepdim)),
    lambda x: x.sin().argmax(-1),
    _normal(16, 100),
)
_converter(
    "integers off by one",
    aten.add.Tensor,
    lambda x, y, alpha=1: op.Add(op.Add(x, y), _ints(1)),
    lambda x, y: (x + y) * 2,
    lambda: [torch.arange(100), torch.arange(100)],
)
_converter(
    "large integers off by one",
    aten.add.Tensor,
    lambda x, y, alpha=1: op.Add(op.Add(x, y), _ints(1)),
    lambda x, y: (x + y) * 2,
    lambda: [torch.full((3,), 1_700_000_000_000_000_000), torch.arange(3)],
)
_converter(
    "an index off by one",
    aten.embedding.default,
    lambda table, index, *rest: op.Gather(table, op.Max(op.Sub(index, _ints(1)), _ints(0))),
    lambda table, index: F.embedding(index, table).sin(),
    lambda: [torch.randn(50, 16), torch.randint(50, (4, 8))],
)
_converter(
    "cumulative sum without its own element",
    aten.cumsum.default,
    lambda x, dim, dtype=None: op.CumSum(x, op.Constant(value_int=dim), exclusive=1),
    lambda x: x.sin().cumsum(1).cos(),
    _normal(8, 64),
)
_converter(
    "round half up",
    aten.round.default,
    lambda x: op.Floor(op.Add(x, 0.5)),
    lambda x: (x / 2).round() * 3,
    lambda: [torch.arange(-20.0, 20.0)],
)
_converter(
    "floor for truncation",
    aten.div.Tensor_mode,
    lambda x, y, rounding_mode=None: op.Floor(op.Div(x, y)),
    lambda x, y: torch.div(x, y, rounding_mode="trunc") + 1,
    lambda: [torch.randn(64) * 10, torch.randn(64)],
)
_converter(
    "greater or equal for greater",
    aten.gt.Scalar,
    lambda x, y: op.GreaterOrEqual(x, float(y)),
    lambda x: torch.where(x.round() > 0, x, x * 2),
    _normal(256),
)
_converter(
    "clamp that loses NaN",
    aten.clamp.default,
    lambda x, low=None, high=None: op.Where(op.GreaterOrEqual(x, low), op.Min(x, high), low),
    lambda x: x.log().clamp(-1.0, 1.0) * 2,
    _normal(64),
)
_converter(
    "cat in another order",
    aten.cat.default,
    lambda items, dim=0: op.Concat(*reversed(items), axis=dim),
    lambda x, y: torch.cat([x.sin(), y.cos()], 1).exp(),
    lambda: [torch.randn(4, 16), torch.randn(4, 16)],
)


def _convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.conv2d(x.sin(), w, padding=1)  # here
    return h.cos()


def _images() -> Sequence[torch.Tensor]:
    return [torch.randn(2, 16, 20, 20), torch.randn(8, 16, 3, 3) / 12]


def _conv(pads: Sequence[int], factor: float) -> Callable[..., Any]:
    return lambda x, w, *rest: op.Mul(op.Conv(x, w, pads=list(pads)), factor)


_converter("convolution padded on one side", aten.convolution.default, _conv([0, 0, 2, 2], 1.0), _convolved, _images)
_converter("convolution x (1 + 1e-5)", aten.convolution.default, _conv([1, 1, 1, 1], 1 + 1e-5), _convolved, _images)


def _pooled(x: torch.Tensor) -> torch.Tensor:
    h = F.max_pool2d(x.sin() - 3, 3, stride=2, padding=1)  # here
    return h.exp()


_MAX_POOL = CONVERTERS[aten.max_pool2d_with_indices.default]
_converter(
    "maximum pooling padded by -2",
    aten.max_pool2d_with_indices.default,
    lambda *args: (op.Max((found := _MAX_POOL(*args))[0], op.Constant(value_float=-2.0)), found[1]),
    _pooled,
    _normal(2, 4, 16, 16),
)
_converter(
    "average pooling that counts the padding",
    aten.avg_pool2d.default,
    lambda x, *args: op.AveragePool(x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1),
    lambda x: F.avg_pool2d(x.sin(), 3, 2, 1, count_include_pad=False).exp(),
    _normal(2, 4, 16, 16),
)
_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CONVERTER = CONVERTERS[_FLASH]


_converter(
    "attention with another scale",
    _FLASH,
    lambda q, k, v, *args, **kwargs: _FLASH_CONVERTER(
        q, k, v, *args, **{**kwargs, "scale": 1.02 * (kwargs.get("scale") or 32**-0.5)}
    ),
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).sin(),
    lambda: [torch.randn(1, 4, 64, 32) for _ in range(3)],
)


# -------------------------------------------------------------------------------------------------- backward converters


_NORM_BACKWARD = CONVERTERS[aten.native_layer_norm_backward.default]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.norm(h)  # here
        return self.last(h)


def _scaled_result(right: Callable[..., Any], position: int, factor: float) -> Callable[..., object]:
    def wrong(*args: object, **kwargs: object) -> object:
        results = list(right(*args, **kwargs))
        results[position] = op.Mul(results[position], factor)
        return tuple(results)

    return wrong


for _position, _what in enumerate(("input", "weight", "bias")):
    _converter(
        f"gradient of layer norm's {_what} x 1.02",
        aten.native_layer_norm_backward.default,
        _scaled_result(_NORM_BACKWARD, _position, 1.02),
        Normed,
        _ROWS,
        training=True,
    )
_BATCH_NORM = CONVERTERS[aten._native_batch_norm_legit_functional.default]


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.norm(h)  # here
        return h.sin()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.rest = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.query(x), self.rest(x)
        return F.scaled_dot_product_attention(q, k, x).sin()  # here


class Filtering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).sin()  # here
        return self.second(h).cos()  # here


_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_converter(
    "gradient of attention's query x 1.01",
    _FLASH_BACKWARD,
    _scaled_result(CONVERTERS[_FLASH_BACKWARD], 0, 1.01),
    Attending,
    _normal(2, 4, 16, 32),
    training=True,
)
_converter(
    "gradient of convolution's weight x 1.01",
    aten.convolution_backward.default,
    _scaled_result(CONVERTERS[aten.convolution_backward.default], 1, 1.01),
    Filtering,
    _normal(2, 3, 12, 12),
    training=True,
)
_converter(
    "running variance x 1.01",
    aten._native_batch_norm_legit_functional.default,
    _scaled_result(_BATCH_NORM, 4, 1.01),
    BatchNormed,
    _ROWS,
    training=True,
)


def _loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores = x.sin() * 3
    return F.cross_entropy(scores, target)  # here


_NLL: Callable[..., Any] = CONVERTERS[aten.nll_loss_forward.default]
_converter(
    "mean that counts ignored targets",
    aten.nll_loss_forward.default,
    lambda *args: (op.Mul(_NLL(*args)[0], 0.9), _NLL(*args)[1]),
    _loss,
    lambda: [torch.randn(40, 10), torch.where(torch.arange(40) % 10 == 0, -100, torch.randint(10, (40,)))],
)


# ----------------------------------------------------------------------------------------------------------- no faults


_converter(
    "argmax of the last of equals",
    aten.argmax.default,
    lambda x, dim=None, keepdim=False: op.ArgMax(x, axis=dim, keepdims=int(keepdim), select_last_index=1),
    lambda x: (x * 2).argmax(-1),
    lambda: [torch.randint(4, (16, 100)).float()],
)
_converter(
    "a sum in two halves",
    aten.sum.dim_IntList,
    lambda x, dim, keepdim=False, dtype=None: op.Add(
        *(
            op.ReduceSum(op.Slice(x, _ints(a), _ints(b), _ints(1)), _ints(1), keepdims=int(keepdim))
            for a, b in ((0, 500), (500, 1000))
        )
    ),
    lambda x: x.sin().sum(1).cos(),
    _normal(16, 1000),
    causes=frozenset(),
)
_converter(
    "a product in two halves",
    aten.mm.default,
    lambda x, w: op.Add(
        *(
            op.MatMul(op.Slice(x, _ints(a), _ints(b), _ints(1)), op.Slice(w, _ints(a), _ints(b), _ints(0)))
            for a, b in ((0, 30), (30, 64))
        )
    ),
    lambda x, w: (x @ w).sin(),
    _products(1e3),
    causes=frozenset(),
)


# -------------------------------------------------------------------------------------------------------- wrong passes


Edit = Callable[[Any, PassContext], int]


@contextlib.contextmanager
def _wrong_pass(stage: str, edit: Edit) -> Iterator[Planting]:
    planting = Planting()

    def run(graph: Any, context: PassContext) -> int:
        fired = edit(graph, context)
        planting.count += fired
        return fired

    register(Pass(f"{stage}.planted", "Planted by the sweep.", run))
    try:
        yield planting
    finally:
        unregister(f"{stage}.planted")


def _pass(
    name: str,
    stage: str,
    edit: Edit,
    program: Target | type[nn.Module],
    inputs: Make,
    *,
    training: bool = False,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> None:
    make, lines = _maker(program)

    def cast() -> Target:
        made = make()
        return made.to(dtype) if isinstance(made, nn.Module) else made

    build = _program(
        cast, lambda: [item.to(dtype) if item.is_floating_point() else item for item in inputs()], training, **more
    )
    kind = f"pass, {stage}{', training' if training else ''}"
    causes: Causes = frozenset({(CauseKind.PASS.value, f"{stage}.planted")})
    _add(name, Fault(kind, build, lambda: _wrong_pass(stage, edit), causes, lines))


def _after(targets: Sequence[object], make: Callable[[fx.Graph, fx.Node], fx.Node], only: int | None = None) -> Edit:
    """Inserts nodes after each node with one of the targets, or after one of them."""

    def edit(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in targets]
        nodes = nodes if only is None else nodes[only : only + 1]
        for node in nodes:
            before = set(module.graph.nodes)
            with module.graph.inserting_before(node.next):
                result = make(module.graph, node)
            for added in set(module.graph.nodes) - before:
                for key in ("val", "example_value"):
                    if key in node.meta:
                        added.meta.setdefault(key, node.meta[key])
            node.replace_all_uses_with(result, lambda user: user in before)  # noqa: B023
            context.matches.append(node.name)
        module.recompile()
        return len(nodes)

    return edit


def _times(factor: float, stage: str) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    multiply: Callable[..., object] = torch.mul if stage == "pre_grad" else aten.mul.Tensor
    return lambda graph, node: graph.call_function(multiply, (node, factor))


def _after_onnx(names: Callable[[str], bool], make: Callable[[ir.Value], list[ir.Node]]) -> Edit:
    """Inserts ONNX nodes after a value, which keeps its name."""

    def edit(model: ir.Model, context: PassContext) -> int:
        fired = 0
        for node in list(model.graph):
            for value in node.outputs:
                if not names(str(value.name)):
                    continue
                nodes = make(value)
                result = nodes[-1].outputs[0]
                for user, index in list(value.uses()):
                    if user not in nodes:
                        user.replace_input_with(index, result)
                value.name, result.name = f"before_{value.name}", value.name
                model.graph.insert_after(node, nodes)
                model.graph.outputs[:] = [result if item is value else item for item in model.graph.outputs]
                fired += 1
        return fired

    return edit


def _onnx_times(factor: float) -> Callable[[ir.Value], list[ir.Node]]:
    def make(value: ir.Value) -> list[ir.Node]:
        constant = ir.node("Constant", [], {"value": ir.tensor(np.float32(factor))})
        return [constant, ir.node("Mul", [value, constant.outputs[0]])]

    return make


def _scale(stage: str, factor: float = 1.01) -> Edit:
    if stage == "onnx":
        return _after_onnx(lambda name: name == "silu", _onnx_times(factor))
    return _after([F.silu, aten.silu.default], _times(factor, stage))


_STAGES = ("pre_grad", "joint", "post_grad", "onnx")
_PROGRAMS: dict[str, tuple[type[nn.Module], Make]] = {
    "perceptron": (Perceptron, _ROWS),
    "convolutional": (Convolutional, _normal(2, 3, 16, 16)),
    "transformer": (Transformer, _normal(2, 12, 32)),
}
for _i, _stage in enumerate(_STAGES):
    for _j, (_name, (_model, _inputs)) in enumerate(_PROGRAMS.items()):
        _trains = (_i + _j) % 2 == 1
        _pass(f"{_stage}: silu x 1.01 in the {_name}", _stage, _scale(_stage), _model, _inputs, training=_trains)
    _pass(f"{_stage}: silu x (1 + 1e-5)", _stage, _scale(_stage, 1 + 1e-5), Perceptron, _ROWS)
for _stage, _dtype in (("pre_grad", torch.bfloat16), ("joint", torch.float16), ("post_grad", torch.bfloat16)):
    _pass(
        f"{_stage}: silu x 1.01 in {str(_dtype).removeprefix('torch.')}",
        _stage,
        _scale(_stage),
        Perceptron,
        _ROWS,
        dtype=_dtype,
    )


class Damped(nn.Module):
    """Twelve equal layers; the end reduces the error of one to the size of rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for i in range(12):
            h = torch.tanh(h + 0.1 * i)
            h = F.silu(h)  # here
        return 1.0 + 1e-7 * h


for _stage in _STAGES:
    _pass(
        f"{_stage}: silu x 1.01, damped",
        _stage,
        _after_onnx(lambda name: name == "silu_6", _onnx_times(1.01))
        if _stage == "onnx"
        else _after([F.silu, aten.silu.default], _times(1.01, _stage), only=6),
        Damped,
        _normal(8, 16),
    )


def _lower(stage: str, dtype: torch.dtype) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    cast: Callable[..., object] = torch.Tensor.to if stage == "pre_grad" else aten._to_copy.default

    def make(graph: fx.Graph, node: fx.Node) -> fx.Node:
        lowered = graph.call_function(cast, (node,), {"dtype": dtype})
        if "val" in node.meta:
            lowered.meta["val"] = node.meta["val"].to(dtype)
        return graph.call_function(cast, (lowered,), {"dtype": torch.float32})

    return make


for _stage in _STAGES[:3]:
    _pass(
        f"{_stage}: silu in bfloat16",
        _stage,
        _after([F.silu, aten.silu.default], _lower(_stage, torch.bfloat16)),
        Perceptron,
        _ROWS,
    )


class MixedPrecision(nn.Module):
    """Bfloat16 beside float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)  # here
        return self.layer((x * scale).bfloat16()).float() + x


for _stage in ("joint", "post_grad"):
    make_mixed, _mixed_lines = _maker(MixedPrecision)
    _add(
        f"{_stage}: rsqrt in bfloat16 beside bfloat16",
        Fault(
            f"pass, {_stage}",
            _program(make_mixed, _ROWS),
            functools.partial(_wrong_pass, _stage, _after([aten.rsqrt.default], _lower(_stage, torch.bfloat16))),
            frozenset({(CauseKind.PASS.value, f"{_stage}.planted")}),
            _mixed_lines,
        ),
    )


def _replace(old: object, new: object) -> Edit:
    def edit(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is old]
        for node in nodes:
            node.target = new
        module.recompile()
        return len(nodes)

    return edit


_pass(
    "post_grad: sin written into the user's input",
    "post_grad",
    _replace(aten.sin.default, aten.sin_.default),
    lambda x: torch.sin(x) * 2,
    _ROWS,
)
_pass(
    "post_grad: exp written into what is read later",
    "post_grad",
    _replace(aten.exp.default, aten.exp_.default),
    lambda x: (h := x.cos()).exp() + h,
    _ROWS,
)
_pass(
    "joint: argmin for argmax",
    "joint",
    _replace(aten.argmax.default, aten.argmin.default),
    lambda x: (x * 2).argmax(-1),
    _ROWS,
)
_pass("pre_grad: less for greater", "pre_grad", _replace(operator.gt, operator.lt), lambda x: x.sin() > 0, _ROWS)
_pass("joint: less for greater", "joint", _replace(aten.gt.Scalar, aten.lt.Scalar), lambda x: x.sin() > 0, _ROWS)


def _argument(target: object, position: int, value: object) -> Edit:
    """Replaces an argument of all nodes with a target."""

    def edit(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is target and len(node.args) > position]
        for node in nodes:
            node.args = (*node.args[:position], value, *node.args[position + 1 :])
        module.recompile()
        return len(nodes)

    return edit


_pass(
    "joint: integers off by one",
    "joint",
    _argument(aten.add.Tensor, 1, 2),
    lambda x: x + 1,
    lambda: [torch.full((3,), 5)],
)
_pass(
    "joint: sum of another dimension",
    "joint",
    _argument(aten.sum.dim_IntList, 1, [1]),
    lambda x: x.sin().sum(2).cos(),
    _normal(4, 16, 16),
)


for _stage, _pair in (("pre_grad", (operator.le, operator.lt)), ("joint", (aten.le.Tensor, aten.lt.Tensor))):
    _pass(
        f"{_stage}: causal mask of summed times without the diagonal",
        _stage,
        _replace(*_pair),
        _causal_by_summed_times,
        _summed_times,
    )


def _masked(x: torch.Tensor) -> torch.Tensor:
    later = torch.triu(torch.ones(256, 256, dtype=torch.bool), 1)  # here
    return x.masked_fill(later, -1e9).softmax(-1)


def _mask_alone(x: torch.Tensor) -> torch.Tensor:
    return torch.triu((x * 2 + 1 > -1e3), 1)


for _stage in _STAGES[:3]:
    _edit = _argument(torch.triu if _stage == "pre_grad" else aten.triu.default, 1, 2)
    _pass(f"{_stage}: causal mask off by one", _stage, _edit, _masked, _normal(1, 256, 256))
    _pass(f"{_stage}: causal mask alone off by one", _stage, _edit, _mask_alone, _normal(256, 256))


def _without(target: object) -> Edit:
    """Replaces nodes by their first argument."""

    def edit(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is target]
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        module.recompile()
        return len(nodes)

    return edit


_pass(
    "post_grad: casts to integers removed",
    "post_grad",
    _without(aten._to_copy.default),
    lambda x: (x * 3).to(torch.int32).to(torch.float32) + 1,
    _ROWS,
)
_pass("joint: clamp removed", "joint", _without(aten.clamp.default), lambda x: x.clamp(-2.5, 2.5).sin(), _ROWS)


def _half_detached(module: fx.GraphModule, context: PassContext) -> int:
    nodes = module.graph.find_nodes(op="call_function", target=F.silu)
    for node in nodes:
        before = set(module.graph.nodes)
        with module.graph.inserting_before(node.next):
            detached = module.graph.call_method("detach", (node,))
            halves = [module.graph.call_function(torch.mul, (item, 0.5)) for item in (node, detached)]
            total = module.graph.call_function(torch.add, tuple(halves))
        node.replace_all_uses_with(total, lambda user: user in before)  # noqa: B023
        context.matches.append(node.name)
    module.recompile()
    return len(nodes)


def _detached(module: fx.GraphModule, context: PassContext) -> int:
    nodes = module.graph.find_nodes(op="call_function", target=F.silu)
    for node in nodes:
        with module.graph.inserting_before(node):
            detached = module.graph.call_method("detach", (node.args[0],))
        detached.meta.update(node.args[0].meta)
        node.args = (detached,)
        context.matches.append(node.name)
    module.recompile()
    return len(nodes)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + F.silu(self.gate)


_pass("pre_grad: half of a gradient", "pre_grad", _half_detached, Perceptron, _ROWS, training=True)
_pass("pre_grad: a lost gradient", "pre_grad", _detached, Gated, _ROWS, training=True)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(64, 64), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = self.drop(h)  # here
        return h.sin()


def _other_scale(module: fx.GraphModule, context: PassContext) -> int:
    nodes = [
        node
        for node in module.graph.nodes
        if node.target is aten.mul.Tensor and isinstance(node.args[1], float) and abs(node.args[1] - 1 / 0.7) < 1e-3
    ]
    for node in nodes[:1]:
        node.args = (node.args[0], 1.3)
    module.recompile()
    return len(nodes[:1])


_pass("joint: another scale of dropout", "joint", _other_scale, Dropped, _ROWS, training=True)


def _attribute(op_type: str, name: str, change: Callable[[Any], Any]) -> Edit:
    """Changes an attribute of all ONNX nodes of a type."""

    def edit(model: ir.Model, context: PassContext) -> int:
        nodes = [node for node in model.graph if node.op_type == op_type and name in node.attributes]
        for node in nodes:
            value = change(node.attributes[name].value)
            kind = node.attributes[name].type
            node.attributes[name] = ir.Attr(name, kind, value)
        return len(nodes)

    return edit


_pass(
    "onnx: another epsilon of layer norm",
    "onnx",
    _attribute("LayerNormalization", "epsilon", lambda e: e * 100),
    _normalized,
    _normal(4, 32, 32, factor=0.1),
)
_pass(
    "onnx: softmax of another axis",
    "onnx",
    _attribute("Softmax", "axis", lambda axis: 1),
    _attend,
    _normal(4, 32, 64, factor=0.1),
)
_pass(
    "onnx: another transposition",
    "onnx",
    _attribute("Transpose", "perm", lambda perm: [0, 2, 1]),
    lambda x: x.sin().permute(0, 2, 1).contiguous().permute(1, 0, 2).cos() @ x,
    _normal(16, 16, 16),
)


def _in_half(value: ir.Value) -> list[ir.Node]:
    half = ir.node("Cast", [value], {"to": ir.DataType.FLOAT16})
    return [half, ir.node("Cast", [half.outputs[0]], {"to": ir.DataType.FLOAT})]


_pass("onnx: silu in float16", "onnx", _after_onnx(lambda name: name == "silu", _in_half), Perceptron, _ROWS)


# ----------------------------------------------------------------------------------------------- wrong decompositions


@contextlib.contextmanager
def _wrong_decomposition(target: object, wrong: Callable[..., object]) -> Iterator[Planting]:
    planting, right = Planting(), decompositions.whole_table

    def counted(*args: object, **kwargs: object) -> object:
        planting.count += 1
        return wrong(*args, **kwargs)

    with mock.patch.object(decompositions, "whole_table", lambda opset: {**right(opset), target: counted}):
        yield planting


def _silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return grad * sigmoid * (1 + x * (1 - sigmoid))


class Rectified(nn.Module):
    """Some of what it rectifies is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.weight * x)  # here
        return h + self.weight


def _decomposition(
    name: str,
    target: torch._ops.OpOverload,
    wrong: Callable[..., object],
    program: Target | type[nn.Module],
    inputs: Make,
    *,
    training: bool = False,
) -> None:
    make, lines = _maker(program)
    causes = frozenset({(CauseKind.DECOMPOSITION.value, str(target))})
    build = _program(make, inputs, training)
    _add(name, Fault("decomposition", build, lambda: _wrong_decomposition(target, wrong), causes, lines))


for _factor in (1.01, 1 + 1e-5):
    _decomposition(
        f"decomposition of silu x {_factor}",
        aten.silu.default,
        lambda x, factor=_factor: x * torch.sigmoid(x) * factor,
        Perceptron,
        _ROWS,
    )
    _decomposition(
        f"decomposition of silu's gradient x {_factor}",
        aten.silu_backward.default,
        lambda grad, x, factor=_factor: _silu_backward(grad, x) * factor,
        Perceptron,
        _ROWS,
        training=True,
    )
_decomposition(
    "gradient of relu at 0",
    aten.threshold_backward.default,
    lambda grad, x, threshold: torch.where(x >= 0, grad, 0.0),
    Rectified,
    lambda: [torch.randint(-2, 3, (32, 16)).float()],
    training=True,
)
_decomposition(
    "gradient of gelu by sigmoid",
    aten.gelu_backward.default,
    lambda grad, x, approximate="none": grad * torch.sigmoid(x * 1.702),
    Feed,
    _ROWS,
    training=True,
)


# ------------------------------------------------------------------------- optimizers, sessions, weights, and races


@contextlib.contextmanager
def _wrong_optimizer(edit: Edit) -> Iterator[Planting]:
    """ONNX Runtime's optimizers change the model so."""
    planting, create = Planting(), onnxruntime.InferenceSession

    def optimize_badly(model: bytes, options: Any, **kwargs: Any) -> object:
        if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
            changed = ir.from_proto(onnx.load_model_from_string(model))
            planting.count += edit(changed, PassContext("onnx.none"))
            model = ir.to_proto(changed).SerializeToString()
        return create(model, options, **kwargs)

    with mock.patch.object(onnxruntime, "InferenceSession", optimize_badly):
        yield planting


OPTIMIZER: Causes = frozenset({(CauseKind.OPTIMIZER.value, "")})


def _optimizer(name: str, edit: Edit, program: Target | type[nn.Module], inputs: Make) -> None:
    make, lines = _maker(program)
    _add(name, Fault("optimizer", _program(make, inputs), lambda: _wrong_optimizer(edit), OPTIMIZER, lines))


_optimizer("optimizer: silu x 1.01", _scale("onnx"), Perceptron, _ROWS)
_optimizer(
    "optimizer: silu x 1.01, damped",
    _after_onnx(lambda name: name == "silu_6", _onnx_times(1.01)),
    Damped,
    _normal(8, 16),
)
_optimizer("optimizer: silu in float16", _after_onnx(lambda name: name == "silu", _in_half), Perceptron, _ROWS)


@contextlib.contextmanager
def _wrong_session() -> Iterator[Planting]:
    """Only optimized sessions compute another function; no dumped model does."""
    planting, original = Planting(), Session.create

    def create(self: Session, threads: int) -> onnxruntime.InferenceSession:
        kept = self.model
        model = ir.from_proto(onnx.load_model_from_string(kept))
        for node in model.graph:
            if node.op_type == "Sinh" and self.settings.optimize:
                node.op_type = "Tanh"
                planting.count += 1
        self.model = ir.to_proto(model).SerializeToString()
        try:
            return original(self, threads)
        finally:
            self.model = kept

    with mock.patch.object(Session, "create", create):
        yield planting


def _sinh(x: torch.Tensor) -> torch.Tensor:
    h = x.exp() * 0.1
    return torch.sinh(h).cos()  # here


_add(
    "session of another model",
    Fault(
        "session",
        _program(lambda: _sinh, _normal(64)),
        _wrong_session,
        frozenset({(CauseKind.SESSION.value, ""), *OPTIMIZER}),
        _lines(_sinh),
    ),
)
_add(
    "noise",
    Fault(
        "race",
        _program(lambda: _sinh, _normal(64), options={"opset": 21}),
        lambda: _wrong_converter(aten.sinh.default, lambda x: op.Add(op.Sinh(x), op.RandomNormalLike(x, scale=0.01))),
        frozenset({(CauseKind.UNSTABLE.value, "runs")}),
        _lines(_sinh),
    ),
)
_add(
    "noise of 1e-5",
    Fault(
        "race",
        _program(lambda: _sinh, _normal(64), options={"opset": 21}),
        lambda: _wrong_converter(
            aten.sinh.default, lambda x: op.Mul(op.Sinh(x), op.RandomUniformLike(x, low=1 - 1e-5, high=1 + 1e-5))
        ),
        frozenset({(CauseKind.UNSTABLE.value, "runs")}),
        _lines(_sinh),
    ),
)


@contextlib.contextmanager
def _unnoticed() -> Iterator[Planting]:
    """Changes of weights are not noticed."""
    with mock.patch.object(changes.Watch, "changed", lambda self, tensors: ([], [])):
        yield Planting(1)


def _changing(path: str) -> Callable[[], Program]:
    """A model of which a weight changes after each call."""

    def build() -> Program:
        model, x = Perceptron(), torch.randn(32, 64)

        def step(function: Target) -> object:
            with torch.no_grad():
                result = function(x)
                model.get_parameter(path).mul_(1.1)
            return result

        return Program(model, step)

    return build


for _path in ("down.weight", "up.bias"):
    _add(
        f"stale {_path}",
        Fault(
            "stale weight",
            _changing(_path),
            _unnoticed,
            frozenset({(CauseKind.STALE_WEIGHT.value, _path)}),
            (),
            calls=2,
        ),
    )


# ------------------------------------------------------------------------------------------------- quantized models


class Quantizing(WrittenOut):
    """As ``WrittenOut``, with its lines here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layer(x))
        scale = h.abs().amax(-1, keepdim=True) / 127  # here
        whole = (h / scale).round().clamp(-128, 127)  # here
        stored = whole.to(torch.int8).float()
        return (stored * scale) @ (self.weight.float() * self.scales).t()


_WIDE_ROWS = _normal(64, 128)
_converter("quantization: scale", aten.div.Tensor, lambda x, y: op.Mul(op.Div(x, y), 1.01), Quantizing, _WIDE_ROWS)
_converter(
    "quantization: bounds",
    aten.clamp.default,
    lambda x, low=None, high=None: op.Clip(x, -90.0, 90.0),
    Quantizing,
    _WIDE_ROWS,
)
_converter("quantization: zero point", aten.round.default, lambda x: op.Add(op.Round(x), 1.0), Quantizing, _WIDE_ROWS)
_converter("quantization: truncation for rounding", aten.round.default, lambda x: op.Floor(x), Quantizing, _WIDE_ROWS)
_converter(
    "quantization: largest of all rows",
    aten.amax.default,
    lambda x, dim=(), keepdim=False: op.Expand(op.ReduceMax(x), _ints(64, 1)),
    Quantizing,
    _WIDE_ROWS,
)
_pass(
    "quantization: wrong pass",
    "post_grad",
    _after([aten.round.default], _times(1.01, "post_grad")),
    Quantizing,
    _WIDE_ROWS,
)


def _quantize(factor: float = 1.0, zero: int = 0, low: int = 0) -> Callable[..., object]:
    def convert(x: ir.Value, step: float, zero_point: int, least: int, most: int, dtype: object) -> object:
        whole = op.Add(op.Round(op.Div(x, step * factor)), float(zero_point + zero))
        return op.Cast(op.Clip(whole, float(least + low), float(most)), to=ir.DataType.UINT8)

    return convert


def _pt2e() -> Program:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    return by_pt2e(lambda: model, lambda: torch.randn(32, 64))


for _name, _wrong in (
    ("scale", _quantize(factor=1.01)),
    ("zero point", _quantize(zero=1)),
    ("bounds", _quantize(low=60)),
    ("division by the scale", _quantize()),
):
    _is_right = _name.startswith("division")  # eager multiplies by the reciprocal, whose last place may turn a tie
    _add(
        f"pt2e: {_name}",
        Fault(
            "no fault" if _is_right else "converter",
            _pt2e,
            functools.partial(_wrong_converter, decomposed.quantize_per_tensor.default, _wrong),
            frozenset() if _is_right else NODE,
            (),
        ),
    )


# ------------------------------------------------------------------------------------------------------- whole models


def _in_model(
    name: str,
    model: str,
    plant: Callable[[], AbstractContextManager[Planting]],
    causes: Causes,
    *values: str,
    operator: object = "-",
) -> None:
    """A fault in a model of ``verification_models.py``, of which the value must be named."""
    fault = Fault(f"in {model}", MODELS[model].build, plant, causes, (), values or ("",), operator=str(operator))
    _add(f"{model}: {name}", fault)


def _converter_in_model(name: str, model: str, target: object, wrong: Callable[..., object], *values: str) -> None:
    _in_model(name, model, lambda: _wrong_converter(target, wrong), NODE, *values, operator=target)


def _conv_of(factor: float) -> Callable[..., Any]:
    def convert(
        x: ir.Value,
        w: ir.Value,
        bias: ir.Value | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        *rest: Any,
    ) -> Any:
        groups = rest[-1]
        sizes = {"strides": list(stride), "dilations": list(dilation), "group": groups}
        return op.Mul(op.Conv(x, w, bias, pads=list(padding) * 2, **sizes), factor)

    return convert


_CONV = aten.convolution.default
_converter_in_model("gelu by tanh", "bert", aten.gelu.default, _tanh_gelu, "gelu")
_converter_in_model("silu x (1 + 1e-5)", "llama", aten.silu.default, _scaled(1 + 1e-5, _silu), "silu")
_converter_in_model("convolution x 1.01", "resnet-18", _CONV, _conv_of(1.01), "convolution")
_converter_in_model("convolution x (1 + 1e-5)", "resnet-18", _CONV, _conv_of(1 + 1e-5), "convolution")
_converter_in_model("convolution x 1.001", "mobilenet_v1", _CONV, _conv_of(1.001), "convolution")
for _model_name in ("bert, training", "vit, training"):
    _converter_in_model(
        "gradient of layer norm's weight x 1.01",
        _model_name,
        aten.native_layer_norm_backward.default,
        _scaled_result(_NORM_BACKWARD, 1, 1.01),
        "native_layer_norm_backward",
    )
_converter_in_model(
    "another epsilon of layer norm",
    "swin",
    aten.native_layer_norm.default,
    lambda x, shape, weight, bias, eps: _LAYER_NORM(x, shape, weight, bias, eps * 1000),
    "native_layer_norm",
)
_converter_in_model(
    "attention with another scale",
    "gpt2",
    _FLASH,
    lambda q, k, v, *args, **kwargs: _FLASH_CONVERTER(
        q, k, v, *args, **{**kwargs, "scale": 1.01 * (kwargs.get("scale") or 64**-0.5)}
    ),
    "_scaled_dot_product",
)
_converter_in_model(
    "a wrong mask", "masks of -1e9", aten.triu.default, lambda x, diagonal=0: op.Trilu(x, _scalar(diagonal + 1)), "triu"
)
for _stage, _model_name in (("joint", "llama, bfloat16"), ("post_grad", "llama"), ("post_grad", "llama, training")):
    _in_model(
        f"pass {_stage}, silu x 1.01",
        _model_name,
        functools.partial(_wrong_pass, _stage, _scale(_stage)),
        frozenset({(CauseKind.PASS.value, f"{_stage}.planted")}),
    )
_in_model(
    "optimizer, a relu x 1.01",
    "resnet-18",
    lambda: _wrong_optimizer(_after_onnx(lambda name: name == "relu_3", _onnx_times(1.01))),
    OPTIMIZER,
)
_in_model(
    "optimizer, a relu x (1 + 1e-4)",
    "resnet-18",
    lambda: _wrong_optimizer(_after_onnx(lambda name: name == "relu_3", _onnx_times(1 + 1e-4))),
    OPTIMIZER,
)
_in_model(
    "optimizer, gelu in float16",
    "bert",
    lambda: _wrong_optimizer(_after_onnx(lambda name: name == "gelu", _in_half)),
    OPTIMIZER,
)
