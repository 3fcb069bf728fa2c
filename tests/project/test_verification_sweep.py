"""``verification_sweep.py``: the outcomes of its cases, and that it has enough of each kind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import verification_sweep as sweep
from verification_faults import FAULTS, Fault, Planting
from verification_models import MODELS

from dynamo_backends.pipeline import pass_target


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a case sets for its process is undone."""
    monkeypatch.setattr(pass_target, "has_units_for_bfloat16", pass_target.has_units_for_bfloat16)
    logger = logging.getLogger("dynamo_backends")
    level = logger.level
    yield
    logger.setLevel(level)


def test_there_are_enough_cases() -> None:
    kinds = [entry.kind for entry in MODELS.values()]
    assert len(MODELS) >= 60 and sum("training" in kind for kind in kinds) >= 14
    assert sum("half" in kind for kind in kinds) >= 12
    assert len(FAULTS) >= 50 and sum(not fault.causes for fault in FAULTS.values()) >= 3


def test_a_right_model() -> None:
    report = sweep.judge_right("QDQ, written out")
    assert (report.outcome, len(report.graphs)) == (sweep.OK, 1), report.line()
    assert report.ratio > 0 and report.eager_megabytes > 0


@pytest.mark.parametrize("name", ["silu x 1.01", "joint: silu x 1.01 in the perceptron"])
def test_a_fault_that_is_found(name: str) -> None:
    report = sweep.judge_planted(name)
    assert report.outcome == sweep.FOUND, report.line()
    assert any(line in report.expected for line in FAULTS[name].lines)


def test_a_fault_that_is_not_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS["silu x 1.01"]
    monkeypatch.setitem(FAULTS, "silu x 1.01", Fault(**{**vars(fault), "plant": lambda: _nothing()}))
    assert sweep.judge_planted("silu x 1.01").outcome == sweep.NOT_PLANTED


class _nothing:
    def __enter__(self) -> Planting:
        return Planting()

    def __exit__(self, *error: object) -> None: ...


OK = sweep.GraphVerdict("0/inference", "ok")
WRONG = sweep.GraphVerdict("0/inference", "diverges at h", cause=("node", ""), blamed=(("h", "a.py:1"),))
DOUBTFUL = sweep.GraphVerdict("0/backward", "not comparable: why")


@pytest.mark.parametrize(
    ("graphs", "outcome"),
    [
        ([], sweep.NO_GRAPH),
        ([OK], sweep.OK),
        ([OK, DOUBTFUL], sweep.NOT_COMPARABLE),
        ([OK, DOUBTFUL, WRONG], sweep.ACCUSED),
        ([sweep.GraphVerdict("0/inference", "None")], sweep.NOT_COMPARED),
        ([sweep.GraphVerdict("0/inference", "ok", ("something",))], sweep.UNCHECKED),
    ],
)
def test_the_outcome_of_a_right_model(graphs: list[sweep.GraphVerdict], outcome: str) -> None:
    assert sweep.of_right(graphs)[0] == outcome


@pytest.mark.parametrize(
    ("lines", "graphs", "outcome"),
    [
        (("a.py:1",), [OK, WRONG], sweep.FOUND),
        (("a.py:2",), [OK, WRONG], sweep.MISNAMED),
        (("a.py:1",), [OK, DOUBTFUL], sweep.UNCHECKED),
        (("a.py:1",), [OK], sweep.MISSED),
    ],
)
def test_the_outcome_of_a_fault(lines: tuple[str, ...], graphs: list[sweep.GraphVerdict], outcome: str) -> None:
    fault = Fault(**{**vars(FAULTS["silu x 1.01"]), "lines": lines})
    assert sweep.of_fault(fault, graphs, 1)[0] == outcome
    assert sweep.of_fault(fault, graphs, 0)[0] == sweep.NOT_PLANTED
