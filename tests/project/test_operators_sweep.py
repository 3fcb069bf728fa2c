"""``operators_sweep.py``: cases that were wrong once, and that it reports wrong results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from onnxscript import opset18 as op
from operators_sweep import MODES, OVERFLOWS, RIGHT, WRONG, Case, cases, judge

from dynamo_backends import register_converter, unregister_converter

# Zeros whose signs were lost, infinities that spread, NaN that was lost, results that became 0, memory not shared.
MENDED = [
    Case("special", "float32", name)
    for name in (
        *("log1p", "expm1", "sigmoid", "pow", "special.entr", "nn.functional.celu"),
        *("diag_embed", "unsafe_split", "scatter_reduce.amin"),
        *("nn.functional.avg_pool2d", "nn.functional.adaptive_avg_pool2d", "nn.functional.max_pool2d"),
    )
] + [
    Case("special", "float64", "log_softmax"),
    Case("special", "float32", "norm.inf"),
    Case("values", "float64", "sinc"),
    Case("values", "int64", "nn.functional.avg_pool2d"),
    Case("layouts", "complex64", "mul"),
    Case("gradients", "float32", "nn.functional.avg_pool2d"),
    Case("weights", "float32", "nn.functional.linear"),
    Case("dynamic", "float32", "nn.functional.max_pool2d"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", MENDED, ids=str)
def test_a_case_is_right(case: Case) -> None:
    reports = judge(case)
    wrong = [report for report in reports if report.outcome not in (RIGHT, "eager raises", OVERFLOWS)]
    assert not wrong and any(report.outcome == RIGHT for report in reports)


@pytest.mark.parametrize(
    "translation",
    [
        lambda x: op.Mul(op.Neg(x), op.CastLike(op.Constant(value_float=1.001), x)),
        lambda x: op.Where(op.Equal(x, x), op.Neg(x), x),  # loses the sign of a zero
        lambda x: op.Where(op.IsInf(x), x, op.Neg(x)),
    ],
    ids=["digits", "zeros", "infinities"],
)
def test_what_is_wrong_is_told(translation: Callable[[object], object]) -> None:
    register_converter(torch.ops.aten.neg)(translation)
    try:
        assert WRONG in {report.outcome for report in judge(Case("special", "float32", "neg"))}
    finally:
        unregister_converter(torch.ops.aten.neg)


def test_all_operators_dtypes_and_modes_are_cases() -> None:
    chosen = cases()
    assert {case.mode for case in chosen} == {*MODES}
    assert {"float8_e5m2", "complex128", "bool", "float32"} <= {case.dtype for case in chosen}
    assert len(chosen) > 30_000
