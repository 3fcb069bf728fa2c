"""Runs every operator of PyTorch's database in every dtype and several modes, and compares with eager.

::

    python tests/operators_sweep.py --processes 4                         # all of it, hours
    python tests/operators_sweep.py --sample 1/40 --seed 7                # a random part of it
    python tests/operators_sweep.py --mode special --dtype float32,int64
    python tests/operators_sweep.py --mode values --only add,nn.functional.conv2d --samples all

Modes: ``values``, the unchanged samples; ``gradients``, compared too; ``dynamic``, with symbolic sizes; ``weights``,
all tensors but the first held by a module; ``special``, with infinities, NaN, zeros, subnormals and the largest numbers
in the arguments; ``layouts``, with views, empty tensors, single elements, an additional dimension, conjugate and
negative bits.

A right result has eager's dtype, shape, strides, shared memory and values, including signs of zeros. A value as near to
the float64 result as eager's is right too. Four kinds of differences are counted separately: ``sum overflows``, where a
sum of the largest numbers overflows in one order only; ``signs of zeros``, of operators that are not elementwise; what
PyTorch's own backend ``aot_eager`` gets wrong too; and what is ``known``, see ``_KNOWN``.

Exit code 1: a case is wrong, raises, crashes or hangs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import logging
import random
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from operator_variants import LAYOUTS, VALUES, varied
from operators import (
    call,
    compiled_difference,
    copy_of,
    difference,
    difference_with_weights,
    entries,
    entry_name,
    is_random,
    loss,
    samples,
    seed,
)
from torch.testing._comparison import default_tolerances
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, SampleInput, UnaryUfuncInfo
from torch.utils import _pytree as pytree
from workers import Ended, judged

MODES = ("values", "gradients", "dynamic", "weights", "special", "layouts")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
RIGHT, WRONG, ERROR = "right", "wrong", "error"
OVERFLOWS, SIGNS, PYTORCHS, KNOWN = "sum overflows", "signs of zeros", "PyTorch's own", "known"
FAULTS = (WRONG, ERROR)

_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose exact results are float64's."""

_MAY_VANISH = ("nn.functional.elu", "nn.functional.selu", "nn.functional.silu", "sinc")
"""Results of these are right beside the largest ones only: very small ones become 0, see ``docs/upstream.md``."""

_KNOWN = {
    ("linalg.pinv.singular", "one more dimension"): "values",  # of a matrix without an inverse, rounding decides
}
"""What is left, by entry and variant, with a part of what is said."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An entry of the database in a dtype, in a mode; ``number`` of its samples, all with ``None``."""

    mode: str
    dtype: str
    name: str
    number: int | None = 1

    def __str__(self) -> str:
        return f"{self.mode} {self.dtype} {self.name}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a sample; ``variant`` names what was changed in it."""

    case: Case
    sample: int
    variant: str
    outcome: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.outcome}: {self.case}[{self.sample}] {self.variant}: {self.text}"


def cases(modes: Sequence[str] = MODES, dtypes: Sequence[str] = DTYPES, number: int | None = None) -> list[Case]:
    """All cases; ``number`` of samples each, by default all in float32, three in other dtypes, one in other modes, in
    ``layouts`` that of the most dimensions."""
    found = []
    table = entries()
    for mode in modes:
        for dtype in dtypes:
            default = 1 if mode != "values" else None if dtype == "float32" else 3
            given = getattr(torch, dtype)
            for name, op in table.items():
                takes = op.supported_backward_dtypes if mode == "gradients" else op.supported_dtypes
                if given in takes("cpu") and (mode != "gradients" or op.supports_autograd):
                    found.append(Case(mode, dtype, name, default if number is None else number))
    return found


def judge(case: Case) -> list[Report]:
    """Compares the samples of a case with eager."""
    op, reports = entries()[case.name], []
    try:
        given = list(enumerate(_samples(op, case)))
    except Exception as error:
        return [Report(case, -1, "", "no sample", _line(error))]
    if case.mode == "layouts":
        given = sorted(given, key=lambda numbered: _dimensions(numbered[1]), reverse=True)[: case.number]
    for index, sample in given:
        for variant, changed in _variants(sample, case.mode):
            reports.append(Report(case, index, variant, *_judge_sample(op, changed, case.mode, variant)))
    return reports


def _samples(op: OpInfo, case: Case) -> Iterator[SampleInput]:
    number = None if case.mode == "layouts" else case.number
    return samples(op, getattr(torch, case.dtype), number, gradients=case.mode == "gradients")


def _dimensions(sample: SampleInput) -> int:
    """Of the tensor with the most; only with two can one be transposed."""
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return max((leaf.ndim for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0)


def _variants(sample: SampleInput, mode: str) -> Iterator[tuple[str, SampleInput]]:
    """The samples that a mode makes of one, with their names."""
    changes = {"special": VALUES, "layouts": LAYOUTS}.get(mode)
    if changes is None:
        yield "", sample
        return
    for name, change in changes.items():
        arguments = varied((sample.input, sample.args, sample.kwargs), change)
        if arguments is not None:
            input, args, kwargs = arguments  # type: ignore[misc]
            yield name, SampleInput(input, args=args, kwargs=kwargs)


def _judge_sample(op: OpInfo, sample: SampleInput, mode: str, variant: str) -> tuple[str, str]:
    try:
        if is_random(op, sample):
            return "random", ""
        if mode == "gradients":
            loss(call(op, copy_of((sample.input, sample.args, sample.kwargs)))).backward()
    except Exception as error:
        return "eager raises", _line(error)
    found = _difference(op, sample, mode, variant, "onnxrt")
    if found is None:
        return RIGHT, ""
    theirs = _difference(op, sample, mode, variant, "aot_eager")
    if theirs is not None and theirs.startswith(ERROR) == found.startswith(ERROR):
        return PYTORCHS, found
    if _KNOWN.get((entry_name(op), variant), "?") in found:
        return KNOWN, found
    kind = found.partition(":")[0]
    return kind if kind in (ERROR, OVERFLOWS, SIGNS) else WRONG, found


def _difference(op: OpInfo, sample: SampleInput, mode: str, variant: str, backend: str) -> str | None:
    """How a backend differs from eager."""
    try:
        if mode == "weights":
            return difference_with_weights(
                op, sample, backend=backend, compare=lambda *results: _compare(op, results[2], variant, *results[:2])
            )
        compare = functools.partial(_compare, op, (sample.input, sample.args, sample.kwargs), variant)
        return compiled_difference(
            op,
            sample,
            backend=backend,
            dynamic=mode == "dynamic",
            gradients=mode == "gradients",
            compare=difference if mode == "gradients" else compare,
        )
    except Exception as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
            raise  # the comparison's own fault
        return f"{ERROR}: {_line(error)}"


def _line(error: Exception) -> str:
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "dynamo_backends" in frame.filename]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def _compare(op: OpInfo, arguments: object, variant: str, actual: object, expected: object) -> str | None:
    """As ``difference``, with the signs of zeros; but what is as near to float64's result as eager's is right."""
    found = difference(actual, expected)
    if found is not None and "values: " not in found:
        return found
    exact = _exact(op, arguments)
    leaves = [pytree.tree_leaves(item) for item in (actual, expected)]
    is_elementwise = isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo))
    sums_extremes = variant == "extreme" and not is_elementwise
    exacts = [None] * len(leaves[0]) if exact is None else pytree.tree_leaves(exact)
    texts = [
        _compare_tensors(
            *each,
            is_elementwise=is_elementwise,
            may_vanish=op.name in _MAY_VANISH,
            largest_summed=_largest(arguments) if sums_extremes else None,
        )
        for each in zip(*leaves, exacts, strict=True)
    ]
    of_kind = sorted(filter(None, texts), key=lambda text: text.startswith((OVERFLOWS, SIGNS)))
    return next(iter(of_kind), None)


def _compare_tensors(
    ours: object,
    eagers: object,
    exact: object,
    *,
    is_elementwise: bool,
    may_vanish: bool,
    largest_summed: float | None,
) -> str | None:
    """``largest_summed``: the largest number of the arguments, where sums of numbers near the dtype's largest are made.
    Such a sum overflows in one order and not in another, and where its terms cancel, their rounding is what is left."""
    text = difference(ours, eagers)
    if not isinstance(eagers, torch.Tensor) or not eagers.is_floating_point() or eagers.itemsize == 1:
        return text
    if eagers.layout is not torch.strided:
        return text
    assert isinstance(ours, torch.Tensor)
    zeros = (ours == 0) & (eagers == 0) & (ours.signbit() != eagers.signbit())
    if bool(zeros.any()):
        return f"{WRONG if is_elementwise else SIGNS}: {int(zeros.sum())} zeros of {zeros.numel()} have another sign"
    vanished = (ours == 0) & (eagers != 0)  # which may be below an absolute tolerance
    if is_elementwise and not may_vanish and bool(vanished.any()):
        return f"{WRONG}: {int(vanished.sum())} of {vanished.numel()} are 0 instead of {eagers[vanished][:3].tolist()}"
    if is_elementwise and eagers.dtype is torch.float64 and text is None and eagers.numel():
        off, scale = (ours - eagers).abs().nan_to_num(0, posinf=0), eagers.abs().nan_to_num(0, posinf=0).max()
        if bool((off > 1e-11 * scale).any()):
            return f"{WRONG}: off by {off.max().item():.1g} at values up to {scale.item():.1g}, in float64"
    if text is None or not isinstance(exact, torch.Tensor):
        return text
    rtol, atol = default_tolerances(eagers)
    eps = torch.finfo(eagers.dtype).eps
    right = torch.isclose(ours, eagers, rtol=rtol, atol=atol, equal_nan=True)
    overflows = ~(ours.isfinite() & eagers.isfinite())
    if eagers.dtype in _ROUNDED:
        off = (eagers.double() - exact).abs().nan_to_num(0, posinf=0)
        if not is_elementwise and off.numel():
            off = off.max()  # a sum is as exact as its largest terms, which the places of a result share
        allowed = 2 * off + 4 * eps * exact.abs()
        right |= ours.isfinite() & exact.isfinite() & ((ours.double() - exact).abs() <= allowed.nan_to_num(0, 0))
        if not is_elementwise:
            right |= ours == exact.to(eagers.dtype)
        overflows &= exact.isfinite()
    if largest_summed is not None:
        right |= (ours / 2 - eagers / 2).abs() <= eps / 2 * largest_summed
    if bool(right.all()):
        return None
    if largest_summed is not None and bool(overflows.any()):  # and what is computed from it
        return f"{OVERFLOWS}: {int((overflows & ~right).sum())} of {right.numel()}"
    return text


def _largest(arguments: object) -> float:
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in tensors if leaf.layout is torch.strided and leaf.numel()]
    real = [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]
    return max((leaf.double().abs().nan_to_num(0, posinf=0).max().item() for leaf in real), default=0.0)


def _exact(op: OpInfo, arguments: object) -> object | None:
    """The result in float64, ``None`` if there is none."""

    def widened(leaf: object) -> object:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype in _ROUNDED else leaf

    try:
        seed()
        return call(op, pytree.tree_map(widened, copy_of(arguments)))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None


def _judge_quietly(case: Case) -> list[Report]:
    logging.getLogger("dynamo_backends").setLevel(logging.ERROR)  # what falls back is no fault
    return judge(case)


def sweep(chosen: Sequence[Case], processes: int, limit: float) -> Iterator[Report]:
    """The reports on the cases, as they come."""
    for case, answer, _ in judged(chosen, _judge_quietly, processes=processes, limit=limit):
        yield from [Report(case, -1, "", ERROR, answer.why)] if isinstance(answer, Ended) else answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default=",".join(MODES), help="with commas between")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="with commas between")
    parser.add_argument("--only", default="", help="names of entries, with commas between")
    parser.add_argument("--samples", help="of each entry: a number, or all")
    parser.add_argument("--sample", default="1/1", help="a part of the cases, 1/40")
    parser.add_argument("--seed", type=int, default=0, help="of the part")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="JSON with all reports")
    settings = parser.parse_args(arguments)

    modes, dtypes = settings.mode.split(","), settings.dtype.split(",")
    if unknown := {*modes} - {*MODES} | {*dtypes} - {*DTYPES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = cases(modes, dtypes)
    if settings.samples:
        number = None if settings.samples == "all" else int(settings.samples)
        chosen = [dataclasses.replace(case, number=number) for case in chosen]
    if settings.only:
        wanted = set(settings.only.split(","))
        if unknown := wanted - entries().keys():
            parser.error(f"no such entry: {', '.join(sorted(unknown))}")
        chosen = [case for case in chosen if case.name in wanted]
    part, of = map(int, settings.sample.split("/"))
    if part < of:
        chosen = random.Random(settings.seed).sample(chosen, max(1, len(chosen) * part // of))

    start, reports = time.monotonic(), []
    for report in sweep(chosen, settings.processes, settings.limit):
        reports.append(report)
        if report.outcome in (*FAULTS, OVERFLOWS, SIGNS, PYTORCHS, KNOWN):
            print(report, flush=True)
    if settings.out:
        settings.out.write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    counts = collections.Counter(report.outcome for report in reports)
    print(f"{dict(counts)}, {len(chosen)} cases in {time.monotonic() - start:.0f} s")
    return int(any(counts[outcome] for outcome in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
