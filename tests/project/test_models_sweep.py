"""``models_sweep.py``: a few of its cases, and that it reports wrong results, crashes and hangs."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import models_sweep
import pytest
import torch
from architectures import ARCHITECTURES
from models_sweep import BREAKS, ERROR, MODES, RIGHT, WRONG, Report, cases, page, run_case, sweep


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("unet with text", "training"),
        ("mamba", "inference"),
        ("roberta", "autocast"),
    ],
)
def test_model_is_right(name: str, mode: str) -> None:
    report = run_case(name, mode)
    assert report.outcome == RIGHT, report.text
    assert report.on_onnx > report.in_pytorch


def test_there_are_a_hundred_architectures_of_all_kinds() -> None:
    kinds = Counter(entry.kind for entry in ARCHITECTURES.values())
    assert len(ARCHITECTURES) > 100
    assert {"encoder", "decoder", "encoder-decoder", "mixture of experts", "state space", "vision", "detection",
            "segmentation", "speech", "multimodal", "diffusion"} <= set(kinds)  # fmt: skip


def test_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: object, **settings: object) -> object:
        return lambda **inputs: {"sample": function(**inputs)["sample"] * 1.001}  # type: ignore[operator]

    compiling = models_sweep.compiling
    monkeypatch.setattr(models_sweep, "compiling", lambda backend: wrong if backend == "onnxrt" else compiling(backend))
    report = run_case("unet", "inference")
    assert report.outcome == WRONG
    assert report.text.startswith("call 0, result 0: error")


def test_more_breaks_than_aot_eager_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(function: object, **settings: object) -> object:
        def with_break(**inputs: torch.Tensor) -> object:
            torch._dynamo.graph_break()
            return function(**inputs)  # type: ignore[operator]

        return torch.compile(with_break, backend="eager")

    compiling = models_sweep.compiling
    monkeypatch.setattr(
        models_sweep, "compiling", lambda backend: breaking if backend == "onnxrt" else compiling(backend)
    )
    assert run_case("unet", "inference").outcome == BREAKS


def _dies_or_hangs(case: tuple[str, str]) -> Report:
    name, mode = case
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        time.sleep(60)
    return Report(name, mode, RIGHT)


def test_process_that_dies_or_hangs_is_named() -> None:
    given = [("hangs", ""), ("dies", ""), ("lives", "")]
    reports = {report.name: report for report in sweep(given, 1, limit=2, judge=_dies_or_hangs)}
    assert reports["lives"].outcome == RIGHT
    assert (reports["dies"].outcome, reports["dies"].text) == (ERROR, "the process died")
    assert reports["hangs"].outcome == ERROR and "2 s" in reports["hangs"].text


def test_page_has_a_row_for_each_architecture_and_says_what_was_not_run() -> None:
    text = page([Report("llama", "inference", RIGHT, on_onnx=9, in_pytorch=1), Report("t5", "training", WRONG, "by 1")])
    assert all(f"\n| {name} | {entry.kind} |" in text for name, entry in ARCHITECTURES.items())
    assert "- `t5/training`: wrong: by 1" in text
    row = next(line for line in text.splitlines() if line.startswith("| llama |"))
    assert row.split(" | ")[2:4] == ["right", "not run"]
    assert row.split(" | ")[-2] == "90%"
    assert len(cases()) > 5 * len(MODES)
