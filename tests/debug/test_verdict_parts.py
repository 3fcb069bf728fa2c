"""The parts of a verdict one by one: a row, the conclusion."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dynamo_backends.debug.rows import Blame, Finding, GraphComparison, Row
from dynamo_backends.debug.verdict import conclude
from dynamo_backends.dumps.blame import Cause, CauseKind
from dynamo_backends.dumps.schema import Error, Instability
from dynamo_backends.numerics.element_records import Extent
from dynamo_backends.numerics.rule import Measure
from dynamo_backends.numerics.verdicts import Verdict

# A row

RIGHT = Measure(1e-7, 1.0, 0, 1.0, share=0.1, error=1e-7, limit=1e-6)
WRONG = Measure(0.5, 1e6, 0, 1.0, share=1e5, error=0.5, limit=5e-6)


def row(**fields: object) -> Row:
    return Row("mul", "aten.mul.Tensor", dtype="float32", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "mark", "is_right"),
    [
        ({}, " ", True),
        ({"error": RIGHT}, "~", True),
        ({"error": Measure(), "equals_eager": True}, "=", True),
        ({"error": RIGHT, "complaint": "dtype"}, "!", False),
        ({"complaint": "dtype"}, "!", False),
        ({"error": WRONG}, "!", False),
        ({"error": RIGHT, "eager": WRONG}, "~", True),
        ({"error": RIGHT, "instability": Instability(2, WRONG)}, "?", True),
        ({"error": WRONG, "instability": Instability(2, WRONG)}, "?", False),
    ],
)
def test_what_a_row_says(fields: dict[str, object], mark: str, is_right: bool) -> None:
    found = row(**fields)
    assert (found.mark, found.is_right) == (mark, is_right)
    assert (found.entry.mark, found.entry.is_right) == (mark, is_right)
    assert bool(found.fault) == (found.error is WRONG)


def test_how_many_threads_an_unstable_session_has() -> None:
    assert str(Instability(1, WRONG)).startswith("with 1 thread, ")
    assert str(Instability(3, WRONG)).startswith("with 3 threads, ")


@pytest.mark.parametrize(("nan", "infinite", "overflows"), [(1, 0, True), (0, 1, True), (0, 0, False)])
def test_where_eager_overflows_and_the_run_does_not(nan: int, infinite: int, overflows: bool) -> None:
    found = row(eager_extent=Extent(-1.0, 1.0, nan, infinite), extent=Extent(-1.0, 1.0))
    assert found.eager_overflows == overflows
    assert not row(eager_extent=found.eager_extent, extent=found.eager_extent).eager_overflows


def test_the_worst_output_is_that_of_the_largest_share() -> None:
    def output(name: str, *, error: float, scale: float, nonfinite: int = 0, **fields: object) -> Row:
        ours = Measure(error, 1.0, nonfinite, scale)
        return Row(name, "aten.mul.Tensor", dtype="float32", **{"is_output": True, "error": ours, **fields})  # type: ignore[arg-type]

    rows = [
        output("large", error=1.0, scale=1e6),
        output("small", error=0.1, scale=1.0, eager=RIGHT),
        output("zero", error=0.01, scale=0.0),
        output("inside", error=9.0, scale=1.0, is_output=False),
        row(is_output=True),
    ]
    comparison = GraphComparison(rows=rows)
    assert comparison.worst == Error("small", rows[1].error, RIGHT)  # type: ignore[arg-type]
    rows.append(output("infinite", error=0.0, scale=1.0, nonfinite=1))
    assert comparison.worst is not None and comparison.worst.value == "infinite"
    assert GraphComparison(rows=rows[3:5]).worst is None


def test_the_worst_error_of_what_diverges_is_a_fault() -> None:
    """A small error of the outputs says nothing of a pass that is wrong."""
    rows = [row(is_output=True, error=RIGHT), row(error=WRONG, eager=RIGHT)]
    rows[0].name, rows[1].name = "y", "x"
    by_a_pass = Finding(Blame("z", BAD, difference=Verdict("off", WRONG, RIGHT)))
    of_a_result = Finding(wrong=[result("y", Verdict("off", WRONG, RIGHT))])
    of_dtype = Finding(wrong=[result("y", Verdict("dtype torch.int64 instead of torch.int32"))])
    for finding, value in ((by_a_pass, "z"), (of_a_result, "y"), (of_dtype, None)):
        worst = conclude(GraphComparison(rows=rows), [finding], {}).worst
        assert (worst and worst.value) == value and (worst is None or worst.onnx == WRONG)
    blamed = GraphComparison(Blame("x", Cause(CauseKind.NODE), source="a.py:3"), rows=rows)
    assert blamed.worst is not None and blamed.worst.value == "x"


# The conclusion

BAD = Cause(CauseKind.PASS, "joint.bad")
MUL = Blame("mul", Cause(CauseKind.NODE), source="a.py:3")


def result(name: str, said: Verdict = Verdict("off")) -> Blame:  # noqa: B008
    return Blame(name, Cause(CauseKind.RESULT), source="a.py:7", difference=said)


OFF = result("sin")


def culprit(node: str) -> Finding:
    return Finding(Blame(node, BAD, source="a.py:7", difference=Verdict("off by a lot")))


@pytest.mark.parametrize(
    ("blame", "findings", "expected", "note"),
    [
        (None, [], None, "as it was"),
        (None, [Finding()], None, "as it was"),
        (MUL, [Finding()], MUL, "as it was"),
        (None, [Finding(), culprit("sin")], ("sin", BAD), "off by a lot"),
        (None, [culprit("sin"), culprit("cos")], ("sin", BAD), "off by a lot"),
        (MUL, [culprit("sin")], ("sin", BAD), "mul (a.py:3)"),
        (None, [Finding(wrong=[OFF, result("cos")])], OFF, ""),
        (MUL, [Finding(wrong=[OFF])], MUL, "as it was"),
    ],
)
def test_the_earliest_fault_is_the_verdict(
    blame: Blame | None, findings: Sequence[Finding], expected: Blame | tuple[str, Cause] | None, note: str
) -> None:
    found = conclude(GraphComparison(blame, note="as it was"), findings, {})
    assert found.unchecked == [] and note in found.note and found.ok == (expected is None)
    if isinstance(expected, Blame):
        expected = (expected.value, expected.cause)
    assert (found.blame and (found.blame.value, found.blame.cause)) == expected
    assert found.blame is None or found.verdict.startswith(f"diverges at {found.blame.value} ({found.blame.source})")


def test_what_was_not_checked_is_said_of_what_is_ok() -> None:
    findings = [Finding(unchecked=["b"]), Finding(unchecked=["c", "d", "e"])]
    found = conclude(GraphComparison(unchecked=["a"]), findings, {})
    assert found.ok and found.unchecked == ["a", "b", "c", "d", "e"] and "a; b; c" in found.note
    found = conclude(GraphComparison(MUL, note="as it was"), findings, {})
    assert (found.note, found.unchecked) == ("as it was", ["b", "c", "d", "e"])
