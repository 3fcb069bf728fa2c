"""PyTorch's operator database through the backend: samples, and the comparison with eager.

The tests in ``test_operators.py`` use the first sample of each entry. Run as a script it sweeps further, each
part in worker processes so that one that dies is seen and named::

    python tests/operators.py float32 --samples all
    python tests/operators.py float16 bfloat16 int64 --samples 3
    python tests/operators.py float32 --mode gradients
    python tests/operators.py float32 --mode dynamic
    python tests/operators.py float32 --mode weights    # all arguments but the first are held by a module
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import multiprocessing
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def entries() -> dict[str, OpInfo]:
    """The database's entries by name."""
    return {name_of(op): op for op in op_db}


def first_dtype(op: OpInfo) -> torch.dtype:
    """float32, or for an entry without it, its first dtype in the order of their names."""
    supported = op.supported_dtypes("cpu")
    return torch.float32 if torch.float32 in supported else min(supported, key=str)


def seed(number: int = 0) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def samples(
    op: OpInfo, dtype: torch.dtype, number: int | None = 1, *, gradients: bool = False
) -> Iterator[SampleInput]:
    """The first ``number`` samples of an entry (``None``: all), the same at each call."""
    seed()
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), number)


def copy_of(value: object) -> object:
    """Arguments with their tensors copied: strides kept, gradients asked for where the original does."""

    def copy(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, value)


def is_random(op: OpInfo, sample: SampleInput) -> bool:
    """Whether the result is random numbers or uninitialized memory: eager differs from itself with another
    seed."""
    if "empty" in op.name:
        return True
    results = []
    for number in (1, 2):
        seed(number)
        results.append(call(op, copy_of((sample.input, sample.args, sample.kwargs))))
    return difference(results[0], results[1], exact=True) is not None


def call(op: OpInfo, arguments: object) -> object:
    input, args, kwargs = arguments  # type: ignore[misc]
    return op.op(input, *args, **kwargs)


def difference(actual: object, expected: object, *, exact: bool = False) -> str | None:
    """How a result differs from eager's in structure, type, dtype, shape, strides or values; ``None`` if it
    does not.

    Values are compared with the default tolerances of ``torch.testing.assert_close`` for their dtype, NaN
    equal to NaN.
    """
    if type(actual) is not type(expected):
        return f"type {type(actual).__name__} instead of {type(expected).__name__}"
    if isinstance(expected, (tuple, list)):
        if len(actual) != len(expected):  # type: ignore[arg-type]
            return f"{len(actual)} results instead of {len(expected)}"  # type: ignore[arg-type]
        pairs = zip(actual, expected, strict=True)  # type: ignore[call-overload]
        found = (difference(a, e, exact=exact) for a, e in pairs)
        return next((f"result {i}: {text}" for i, text in enumerate(found) if text is not None), None)
    if isinstance(expected, dict):
        items = list(actual.items())  # type: ignore[attr-defined]
        return difference(items, list(expected.items()), exact=exact)
    if not isinstance(expected, torch.Tensor):
        equal = actual == expected or (actual != actual and expected != expected)
        return None if equal else f"{actual!r} instead of {expected!r}"
    assert isinstance(actual, torch.Tensor)
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype} instead of {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if actual.layout != expected.layout:
        return f"layout {actual.layout} instead of {expected.layout}"
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=False, **tolerance)
    except AssertionError as error:
        return "values: " + " ".join(str(error).split())
    if expected.layout is torch.strided and strides(actual) != strides(expected):
        return f"strides {actual.stride()} instead of {expected.stride()}"
    return None


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: an empty tensor has none, nor has a dimension of size 1."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def compiled_difference(
    op: OpInfo,
    sample: SampleInput,
    *,
    backend: str = "onnxrt",
    dynamic: bool | None = False,
    gradients: bool = False,
) -> str | None:
    """How ``op`` on ``sample`` through a backend differs from eager: results, changed arguments, gradients.

    Raises:
        Whatever the backend raises where eager does not.
    """

    def run(arguments: object) -> object:
        return call(op, arguments)

    arguments = (sample.input, sample.args, sample.kwargs)
    ours, theirs = copy_of(arguments), copy_of(arguments)
    seed()
    expected = run(theirs)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, dynamic=dynamic)
    seed()
    actual = compiled(ours)
    found = difference(actual, expected)
    if found is None:
        found = difference(pytree.tree_leaves(ours), pytree.tree_leaves(theirs))
        found = f"arguments after the call: {found}" if found is not None else None
    if found is None and gradients:
        loss(expected).backward()
        loss(actual).backward()
        found = difference(*(_gradients(item) for item in (ours, theirs)))
        found = f"gradients: {found}" if found is not None else None
    return found


class _Holder(torch.nn.Module):
    """An entry whose tensors but the first are a module's own, so that they are constants of the session."""

    def __init__(self, op: OpInfo, arguments: object) -> None:
        super().__init__()
        self._op = op
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), len(leaves))
        self._names = [f"leaf_{i}" for i in range(len(leaves))]
        for name, leaf in zip(self._names, leaves, strict=True):
            setattr(self, name, leaf)

    def forward(self, first: object) -> object:
        leaves = [first if i == self._first else getattr(self, name) for i, name in enumerate(self._names)]
        return call(self._op, pytree.tree_unflatten(leaves, self._structure))


def difference_with_weights(op: OpInfo, sample: SampleInput, *, backend: str = "onnxrt") -> str | None:
    """How ``op`` differs from eager where all tensors but the first are constants, before and after they change."""
    arguments = (sample.input, sample.args, sample.kwargs)
    ours, theirs = _Holder(op, copy_of(arguments)), _Holder(op, copy_of(arguments))
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, dynamic=False)
    first = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    with torch.no_grad():
        for change in (None, _flip):
            if change is not None:
                change(ours)
                change(theirs)
            seed()
            expected = theirs(copy_of(first))
            seed()
            found = difference(compiled(copy_of(first)), expected)
            if found is not None:
                return found if change is None else f"after the weights changed: {found}"
    return None


def _flip(holder: _Holder) -> None:
    """Other numbers: those there are, the other way round."""
    for name in holder._names:
        leaf = getattr(holder, name)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided and leaf.ndim:
            leaf.copy_(leaf.flip(0))


def loss(results: object) -> torch.Tensor:
    """The sum of all differentiable results."""
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    total = torch.zeros(())
    for item in tensors:
        total = total + (item.abs() if item.is_complex() else item).sum()
    return total


def _gradients(arguments: object) -> list[object]:
    return [
        leaf.grad for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _sweep(
    names: Sequence[str],
    dtype: torch.dtype,
    number: int | None,
    mode: str,
    backend: str,
    send: Callable[[object], None],
) -> None:
    """Compares the entries in a worker process, and sends (name, sample, outcome, text) for each sample."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = entries()
    for name in names:
        op = table[name]
        send(("begin", name))
        try:
            for index, sample in enumerate(samples(op, dtype, number, gradients=mode == "gradients")):
                outcome, text = _judge(op, sample, mode, backend)
                send((name, index, outcome, text))
        except Exception as error:  # the database itself has no sample on this machine
            send((name, -1, "no sample", f"{type(error).__name__}: {error}"[:300]))
        send(("end", name))


def _judge(op: OpInfo, sample: SampleInput, mode: str, backend: str) -> tuple[str, str]:
    try:
        if is_random(op, sample):
            return "random", ""
        if mode == "gradients":
            expected = call(op, copy_of((sample.input, sample.args, sample.kwargs)))
            loss(expected).backward()
    except Exception as error:
        return "eager raises", f"{type(error).__name__}: {error}"[:300]
    try:
        if mode == "weights":
            found = difference_with_weights(op, sample, backend=backend)
        else:
            found = compiled_difference(
                op, sample, backend=backend, dynamic=mode == "dynamic", gradients=mode == "gradients"
            )
    except Exception as error:
        text = traceback.format_exc().strip().splitlines()
        return "error", f"{type(error).__name__}: {str(error)[:400]} || {' | '.join(text[-6:])[-600:]}"
    return ("right", "") if found is None else ("wrong", found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dtypes", nargs="+")
    parser.add_argument("--samples", default="1")
    parser.add_argument("--mode", default="values", choices=["values", "gradients", "dynamic", "weights"])
    parser.add_argument("--only", default="")
    parser.add_argument("--backend", default="onnxrt")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    number = None if options.samples == "all" else int(options.samples)
    lines: list[dict[str, object]] = []
    for dtype_name in options.dtypes:
        dtype = getattr(torch, dtype_name)
        table = entries()
        names = [name for name, op in table.items() if dtype in op.supported_dtypes("cpu")]
        if options.mode == "gradients":
            names = [
                n for n in names if table[n].supports_autograd and dtype in table[n].supported_backward_dtypes("cpu")
            ]
        if options.only:
            wanted = options.only.split(",")
            names = [name for name in names if name in wanted]
        counts: collections.Counter[str] = collections.Counter()
        for name, index, outcome, text in _run_workers(names, dtype, number, options.mode, options.backend):
            counts[outcome] += 1
            lines.append({"dtype": dtype_name, "name": name, "sample": index, "outcome": outcome, "text": text})
            if outcome in ("wrong", "error", "died"):
                print(f"{dtype_name} {name}[{index}] {outcome}: {text}", flush=True)
        print(dtype_name, options.mode, dict(counts), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(lines, file, indent=1)


def _run_workers(
    names: Sequence[str], dtype: torch.dtype, number: int | None, mode: str, backend: str
) -> Iterator[tuple[str, int, str, str]]:
    """Runs the sweep in a forked process; when that dies, names the entry and goes on after it in a new
    one."""
    context = multiprocessing.get_context("fork")
    left = list(names)
    while left:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_sweep, args=(left, dtype, number, mode, backend, sender.send))
        process.start()
        sender.close()
        current = None
        try:
            while True:
                message = receiver.recv()
                if message[0] == "begin":
                    current = message[1]
                elif message[0] == "end":
                    left.remove(message[1])
                    current = None
                else:
                    yield message
        except EOFError:
            process.join()
        if current is not None:
            yield current, -1, "died", f"exit code {process.exitcode}"
            left.remove(current)


if __name__ == "__main__":
    sys.exit(main())
