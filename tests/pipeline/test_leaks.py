"""Memory does not grow with compiles, calls, or freed results: a short run of ``leaks.py``."""

from __future__ import annotations

import torch
from leaks import call_a_model, compile_and_reset, growth, memory_of_results, watched


def test_compiles_leave_no_more_than_pytorch_does() -> None:
    beside = list(watched(compile_and_reset("aot_eager"), 6, looks=3))
    assert growth(list(watched(compile_and_reset(), 9, looks=3)), beside) == []


def test_calls_leave_nothing() -> None:
    assert growth(list(watched(call_a_model(), 2_000, looks=4))) == []


def test_results_let_go_are_given_back() -> None:
    held, left = memory_of_results()
    assert held > 200
    assert left < 64


def test_what_grows_is_told() -> None:
    kept: list[object] = []
    found = growth(list(watched(lambda i: kept.append([torch.zeros(300_000), [[] for _ in range(100)]]), 40, looks=4)))
    assert len(found) == 2
