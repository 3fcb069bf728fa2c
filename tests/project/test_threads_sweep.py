"""``threads_sweep.py`` distinguishes deterministic from nondeterministic converters, and covers every layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import threads_cases
import torch
from large_layers import Layer, missing
from large_samples import SMALLEST, TooSmall, large_samples, tensors_of
from onnxscript.onnx_opset import opset18 as op
from operators import entries
from threads_cases import NOT_ON_ONNX, Report, Settings, layer_report
from threads_judge import BETWEEN_RUNS, IDENTICAL, WRONG, Subject, Verdict, judge
from threads_sweep import chosen_cases, is_fault

from dynamo_backends.exporter.converters.registry import CONVERTERS
from dynamo_backends.options import parse_options

SETTINGS = Settings(runs=3, threads=(1, 2), seconds=1.0)


def _sin(x: torch.Tensor) -> torch.Tensor:
    return op.Sin(x)


def _noisy_sin(x: torch.Tensor) -> torch.Tensor:
    return op.Add(op.Sin(x), op.RandomNormalLike(x, scale=1e-2))


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, Callable[..., object]], None]:
    """Makes a function the translation of an operator, until the test ends. ONNX Runtime has random numbers up to
    opset 21."""
    monkeypatch.setattr(threads_cases, "parse_options", lambda options: parse_options({"opset": 18}))

    def put(target: object, translation: Callable[..., object]) -> None:
        monkeypatch.setitem(CONVERTERS, target, translation)

    return put


def _layer() -> Layer:
    return Layer(torch.sin, (torch.linspace(-3, 3, 4096),))


def test_a_right_translation_is_identical(plant: Callable[[object, Callable[..., object]], None]) -> None:
    plant(torch.ops.aten.sin.default, _sin)
    report = layer_report("function/sin", _layer, SETTINGS)
    assert report.verdict.outcome == IDENTICAL, report
    assert "Sin" in report.operators


def test_a_translation_that_varies_is_wrong(plant: Callable[[object, Callable[..., object]], None]) -> None:
    plant(torch.ops.aten.sin.default, _noisy_sin)
    report = layer_report("function/sin", _layer, SETTINGS)
    assert report.verdict.outcome == WRONG, report
    assert report.verdict.different["1"] > 0
    assert "RandomNormalLike" in report.operators


def test_what_does_not_run_on_onnx_is_not_called_right() -> None:
    layer = Layer(torch.bincount, (torch.arange(8),))
    assert layer_report("function/bincount", lambda: layer, SETTINGS).verdict.outcome == NOT_ON_ONNX


def _subject(compiled: Callable[[], torch.Tensor], x: torch.Tensor) -> Subject:
    return Subject(lambda: [compiled()], lambda: [x.cumsum(0)], lambda: [x.double().cumsum(0)])


def test_a_sum_lost_in_one_run_is_wrong() -> None:
    """One number of a million is left out, in the fifth run."""
    x = torch.randn(1_000_000)
    runs = iter(range(100))

    def compiled() -> torch.Tensor:
        result = x.cumsum(0)
        if next(runs) == 4:
            result[500_000:] -= 1.0
        return result

    verdict = judge(_subject(compiled, x), runs=10, threads=(1,))
    assert verdict.outcome == WRONG
    assert verdict.different["1"] == 1


def test_another_order_of_summation_is_rounding() -> None:
    x = torch.randn(100_000)
    runs = iter(range(100))

    def compiled() -> torch.Tensor:
        parts = x.view(100, 1000)
        by_parts = (parts.cumsum(1) + (parts.sum(1).cumsum(0) - parts.sum(1))[:, None]).view(-1)
        return by_parts if next(runs) % 2 else x.cumsum(0)

    verdict = judge(_subject(compiled, x), runs=6, threads=(1,))
    assert verdict.outcome == "rounding between runs"
    assert 0 < verdict.spread < 1e-5


@pytest.mark.parametrize(
    ("verdict", "in_pytorch", "expected"),
    [
        (Verdict(IDENTICAL), [], False),
        (Verdict(WRONG), [], True),
        (Verdict(WRONG, different={"2": 1}, error=1e-3), ["aten.index_put.default"], True),
        (Verdict(WRONG, different={"2": 1}, error=5e-6), ["aten.index_put.default"], False),
        (Verdict(BETWEEN_RUNS, spread=1e-6), [], True),
        (Verdict(BETWEEN_RUNS, spread=1e-6), ["aten.index_put.default"], False),
        (Verdict(BETWEEN_RUNS, spread=1e-4), ["aten.index_put.default"], True),
    ],
)
def test_only_pytorchs_own_sums_may_vary_between_runs(verdict: Verdict, in_pytorch: list[str], expected: bool) -> None:
    assert is_fault(Report("value/anything", 0, verdict, in_pytorch=in_pytorch)) == expected


def test_no_layer_is_left_out() -> None:
    assert missing() == []


def test_samples_are_large_and_their_indices_repeat() -> None:
    made = large_samples(entries()["take_along_dim"], torch.float32, 1)[0]
    assert made.elements >= SMALLEST
    indices = [leaf for leaf in tensors_of((made.sample.input, made.sample.args)) if leaf.dtype is torch.int64]
    assert indices and all(len(leaf.unique()) < leaf.numel() / 10 for leaf in indices)
    with pytest.raises(TooSmall):
        large_samples(entries()["broadcast_shapes"], torch.float32, 1)


def test_a_share_always_has_the_dangerous_cases() -> None:
    first, second = chosen_cases("", "1/30", 1), chosen_cases("", "1/30", 2)
    assert first != second
    assert "layer/Embedding" in first and "layer/Embedding" in second
