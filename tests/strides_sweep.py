"""Finds the operators whose fake tensors have the strides of the real kernels.

::

    python tests/strides_sweep.py --processes 2                   # all, some ten minutes
    python tests/strides_sweep.py --only aten::roll,aten::cat     # some, with an example of each difference
    python tests/strides_sweep.py --write                         # and writes the two files
    python tests/strides_sweep.py --sample 1/20 --seed 7          # checks the file; exit code 1: an entry is wrong

The calls of ATen operators in PyTorch's operator database, forward and backward, are repeated in many layouts of their
arguments (permuted, channels last, sliced, expanded, with sizes of one, with mixed dtypes) by the real kernel, by the
meta kernel (a ``FakeTensorMode``) and by our decomposition. An operator agrees if all three have the same strides in
each layout, also in dimensions of size one, since kernels choose their output layout by these.

Each operator is judged in its own process: some kernels crash on unexpected layouts.

The same calls tell which arguments have elements and which have indices, for ``graphs/example_values.py``:
``argument_names.json``, which ``--write`` writes too.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import logging
import multiprocessing
import multiprocessing.connection
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from operators import entries
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends.exporter.decompositions import decomposition_table

_FOLDER = Path(__file__).resolve().parent.parent / "dynamo_backends" / "graphs"
FILE = _FOLDER / "agreeing_operators.json"
NAMES = _FOLDER / "argument_names.json"
DTYPES = (torch.float32, torch.float16, torch.int64)
_KINDS = 200
_ROW_MAJOR, _WHOLE = 60, 120
_CALLS = 8
"""Calls of an operator that are varied: those with the most dimensions, half of them with sizes of one."""
_SECONDS = 1.2
"""For an operator."""
_LARGEST = 20_000
_FEWEST = 4
"""An operator of which fewer layouts of a kind could be tried is not listed; nor one of which fewer could be tried with
four dimensions, if it takes these: memory formats begin there."""
KINDS = ("row_major", "without_ones")
"""Of arguments: all row-major; others without a dimension of size one. Of those with one the kernel is always asked."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
Dtypes = collections.defaultdict[str, set[torch.dtype]]


@dataclasses.dataclass
class Outcome:
    """How often an operator agreed and differed, of row-major arguments and of others, with an example of each."""

    agreed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    differed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ranks: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)


class _Recorder(TorchDispatchMode):
    """Keeps the calls of operators that change no argument, and the dtypes of all arguments by name."""

    def __init__(self, calls: dict[Any, dict[object, Call]], dtypes: Dtypes) -> None:
        super().__init__()
        self._calls = calls
        self._dtypes = dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            self._dtypes[name].update(tensor.dtype for tensor in tensors)
        if func.namespace == "aten" and not func._schema.is_mutable:
            leaves = pytree.tree_leaves((args, kwargs))
            kind = tuple(map(_kind, leaves))
            sizes = [leaf.numel() for leaf in leaves if _is_tensor(leaf)]
            known = self._calls.setdefault(func, {})
            if sizes and min(sizes) > 0 and max(sizes) <= _LARGEST and kind not in known and len(known) < _KINDS:
                known[kind] = pytree.tree_map(_copied, (args, kwargs))
        return func(*args, **kwargs)


def _kind(leaf: object) -> object:
    """A key of an argument; calls whose arguments have other keys are varied separately."""
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim, leaf.dtype, 1 in leaf.shape
    return leaf if isinstance(leaf, int) else type(leaf)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _copied(value: object) -> object:
    if not isinstance(value, torch.Tensor) or not _is_tensor(value):
        return value
    return value.detach().clone(memory_format=torch.preserve_format)


def recorded(names: Sequence[str] | None = None) -> tuple[dict[Any, list[Call]], Dtypes]:
    """The calls of ATen's operators in the operator database, and the dtypes of arguments by name.

    Args:
        names: entries of the database, by default all.
    """
    dtypes: Dtypes = collections.defaultdict(set)
    calls: dict[Any, dict[object, Call]] = {}
    for name, op in entries().items():
        if names is not None and name not in names:
            continue
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            trains = op.supports_autograd and dtype.is_floating_point
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=trains), 12))
                except Exception:  # some entries have no samples in a dtype that they name
                    continue
                for sample in samples:
                    _run(op, sample, _Recorder(calls, dtypes), trains=trains)
    return {func: _most_dimensions(list(known.values())) for func, known in calls.items()}, dtypes


def argument_names(dtypes: Dtypes) -> dict[str, list[str]]:
    """The names of arguments that have elements, and of those that have indices, which are never bytes."""
    elements = {name for name, found in dtypes.items() if any(map(_has_elements, found))}
    indices = {name for name, found in dtypes.items() if found & {torch.int32, torch.int64}} - elements
    return {"elements": sorted(elements), "indices": sorted(indices)}


def _has_elements(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _run(op: Any, sample: Any, recorder: _Recorder, *, trains: bool) -> None:
    try:
        with recorder:
            results = op(sample.input, *sample.args, **sample.kwargs)
            roots = [leaf for leaf in pytree.tree_leaves(results) if _is_tensor(leaf) and leaf.requires_grad]
            if trains and roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    except Exception:  # of the sample; what it called before counts
        pass


def _most_dimensions(calls: list[Call]) -> list[Call]:
    def dimensions(call: Call) -> int:
        return sum(leaf.ndim for leaf in pytree.tree_leaves(call) if _is_tensor(leaf))

    random.Random(0).shuffle(calls)
    found = sorted(calls, key=dimensions, reverse=True)
    with_ones = [any(_is_tensor(leaf) and 1 in leaf.shape for leaf in pytree.tree_leaves(call)) for call in found]
    halves = ([call for call, has in zip(found, with_ones, strict=True) if has is wanted] for wanted in (False, True))
    return [call for half in halves for call in half[: _CALLS // 2]]


# Layouts


def _row_major(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _in_order(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return x.permute(list(order)).contiguous().permute([list(order).index(i) for i in range(x.ndim)])


def _swapped(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return _in_order(x, order)


def _sliced(x: torch.Tensor) -> torch.Tensor:
    memory = x.new_zeros([2 * size for size in x.shape])
    return memory[tuple(slice(0, 2 * size, 2) for size in x.shape)].copy_(x)


def _with_gap(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros([*x.shape[:-1], x.shape[-1] + 3])[..., 1 : x.shape[-1] + 1].copy_(x)


LAYOUTS = {
    "row-major": _row_major,
    "reversed": lambda x: _in_order(x, list(range(x.ndim))[::-1]),
    "last two swapped": lambda x: _swapped(x, -1, -2) if x.ndim > 1 else x,
    "first two swapped": lambda x: _swapped(x, 0, 1) if x.ndim > 1 else x,
    "channels last": lambda x: _in_order(x, [0, *range(2, x.ndim), 1]) if x.ndim > 2 else x,
    "first is last": lambda x: _in_order(x, [*range(1, x.ndim), 0]),
    "sliced": _sliced,
    "with a gap": _with_gap,
    "expanded": lambda x: x[:1].expand(x.shape) if x.shape[0] else x,
    "expanded inside": lambda x: x[..., :1].expand(x.shape) if x.shape[-1] else x,
}
_BESIDE = (torch.float16, torch.int32, torch.float64)


_ONES = {"": None, ", ones lie at 1": 1, ", ones lie as rows do": 0}
"""Strides of dimensions of size one: as they are, 1, and that of the dimension next to the innermost."""

Relaid = Callable[[], Call]


def layouts(call: Call, *, cuts: bool) -> Iterator[tuple[str, Relaid]]:
    """The call in other layouts; with ``cuts`` also with sizes of one, with more dimensions, with other dtypes."""
    leaves, structure = pytree.tree_flatten(call)
    tensors = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
    wider = [("", leaves), *_wider(leaves, tensors)] if cuts else [("", leaves)]
    bases = [(text + cut, base) for text, wide in wider for cut, base in [("", wide), *_cut(wide, tensors, cuts=cuts)]]

    def relaid(base: list[Any], relay: Any, which: str, stride: int | None) -> Call:
        found = list(base)
        for position, i in enumerate(tensors):
            is_relaid = which == "all" or (which == "first") == (position == 0)
            if base[i].ndim:
                found[i] = _with_ones_at(relay(base[i]), stride) if is_relaid else _row_major(base[i])
        return pytree.tree_unflatten(found, structure)

    for cut, base in bases:
        has_ones = any(1 in base[i].shape for i in tensors)
        for name, relay in LAYOUTS.items():
            for which in ("all", "first", "others") if len(tensors) > 1 and name != "row-major" else ("all",):
                for ones, stride in _ONES.items() if has_ones else [("", None)]:
                    text = f"{cut}{name}{ones} ({which})"
                    yield text, functools.partial(relaid, base, relay, which, stride)


def _with_ones_at(x: torch.Tensor, stride: int | None) -> torch.Tensor:
    if stride is None or 1 not in x.shape or not x.numel():
        return x
    inner = min(((step, size) for size, step in zip(x.shape, x.stride(), strict=True) if size > 1), default=(1, 1))
    value = stride or inner[0] * inner[1]
    steps = [value if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, steps)


def _wider(leaves: list[Any], tensors: list[int]) -> Iterator[tuple[str, list[Any]]]:
    """All tensors of the most dimensions with further ones, up to four and five; memory formats depend on that."""
    most = max(leaves[i].ndim for i in tensors)
    for count in (4, 5):
        if 0 < most < count:
            found = list(leaves)
            for i in tensors:
                if leaves[i].ndim == most:
                    found[i] = leaves[i].expand(*(2, 3, 2, 2)[: count - most], *leaves[i].shape).contiguous()
            yield f"{count} dimensions, ", found


def _cut(leaves: list[Any], tensors: list[int], *, cuts: bool) -> Iterator[tuple[str, list[Any]]]:
    """Sizes of one in place of each size, and in each dimension of the first tensor; other dtypes of that."""
    first = tensors[0]
    if not cuts:
        return
    for size in sorted({size for i in tensors for size in leaves[i].shape if size > 1})[:4]:
        found = list(leaves)
        for i in tensors:
            for dim, there in enumerate(leaves[i].shape):
                if there == size:
                    found[i] = found[i].narrow(dim, 0, 1)
        yield f"1 instead of {size}, ", found
    for dim in range(leaves[first].ndim):
        if leaves[first].shape[dim] > 1:
            yield f"size {dim} is 1, ", [*leaves[:first], leaves[first].narrow(dim, 0, 1), *leaves[first + 1 :]]
    if len(tensors) > 1:
        for dtype in _BESIDE:
            if leaves[first].dtype.is_floating_point and dtype is not leaves[first].dtype:
                yield f"the first of {dtype}, ", [*leaves[:first], leaves[first].to(dtype), *leaves[first + 1 :]]


# Judging


def judge(func: Any, calls: Sequence[Call], decomposition: Any, *, cuts: bool) -> Outcome:
    """Compares the strides of an operator's results in all layouts, as far as the time goes."""
    outcome = Outcome()
    end = time.process_time() + _SECONDS
    seen = set()
    variants = [variant for call in calls for variant in layouts(call, cuts=cuts)]
    random.Random(0).shuffle(variants)
    row_major = [variant for variant in variants if "row-major" in variant[0]]
    whole = [variant for variant in variants if "1" not in variant[0] and "row-major" not in variant[0]]
    others = [variant for variant in variants if "1" in variant[0] and "row-major" not in variant[0]]
    for name, make in row_major[:_ROW_MAJOR] + whole[:_WHOLE] + others:
        if time.process_time() > end:
            break
        try:
            call = make()
        except RuntimeError:  # a layout that these sizes cannot have
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(call) if _is_tensor(leaf)]
        key = (str([(x.shape, x.stride(), x.dtype) for x in tensors]), str(pytree.tree_map(_without_tensor, call)))
        if key in seen:
            continue
        seen.add(key)
        try:
            real = strides(func(*call[0], **call[1]))
        except Exception:  # arguments that do not fit together
            continue
        if not any(real):
            continue
        has_ones = any(size == 1 for x in tensors for size in x.shape)
        kind = "row_major" if all(map(_is_plain, tensors)) else "ones" if has_ones else "without_ones"
        rank = "4" if any(x.ndim >= 4 for x in tensors) else "less"
        wrong = {name: found for name, found in _compiled(func, call, decomposition).items() if found != real}
        (outcome.differed if wrong else outcome.agreed)[kind] += 1
        outcome.ranks[kind + rank] += 1
        if wrong:
            given = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]
            outcome.examples.setdefault(kind, f"{name}: {given}: the kernel {real}, {wrong}")
    return outcome


def _without_tensor(value: object) -> object:
    return "tensor" if isinstance(value, torch.Tensor) else value


def _is_plain(x: torch.Tensor) -> bool:
    """Whether strides are those of new row-major memory, in dimensions of size one too."""
    return x.stride() == torch.empty(x.shape).stride()


def _compiled(func: Any, call: Call, decomposition: Any) -> dict[str, object]:
    """The strides by the meta kernel, and by the decomposition if there is one; what raises has none."""
    found: dict[str, object] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        args, kwargs = pytree.tree_map(lambda x: _as_fake(mode, x) if isinstance(x, torch.Tensor) else x, call)
        for name, function in (("fake", func), ("decomposed", decomposition)):
            if function is not None:
                try:
                    results = function(*args, **kwargs)
                except Exception as error:
                    found[name] = type(error).__name__
                else:
                    if results is not NotImplemented:
                        found[name] = strides(results)
    return found


def _as_fake(mode: FakeTensorMode, x: torch.Tensor) -> torch.Tensor:
    if not _is_tensor(x) or type(x) is not torch.Tensor:
        return mode.from_tensor(x)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)


def strides(results: object) -> list[object]:
    """The strides of all tensors of a result; those of tensors without elements address nothing."""
    leaves = pytree.tree_leaves(results)
    return [x.stride() if _is_tensor(x) and x.numel() else None for x in leaves if isinstance(x, torch.Tensor)]


def _judge_in_child(sender: Any, func: Any, calls: Sequence[Call], decomposition: Any, cuts: bool) -> None:
    signal.alarm(60)
    torch.set_num_threads(1)
    logging.disable()  # PyTorch writes a traceback of each call that does not fit
    sys.stderr = open("/dev/null", "w")  # noqa: SIM115
    sender.send(judge(func, calls, decomposition, cuts=cuts))


def outcomes(calls: dict[Any, list[Call]], processes: int) -> dict[str, Outcome]:
    """The outcomes of all operators, by name.

    Each operator has its own process; after a crash, sizes are not varied. This thread forks all of them: a child
    that is forked while another thread forks may wait for a lock forever.
    """
    table = {target: _plain(function) for target, function in decomposition_table().items()}
    waiting = [(func, True) for func in calls]
    running: dict[Any, tuple[Any, bool, Any]] = {}
    found = {}
    while waiting or running:
        while waiting and len(running) < processes:
            func, cuts = waiting.pop()
            receiver, sender = multiprocessing.Pipe(duplex=False)
            arguments = (sender, func, calls[func], table.get(func), cuts)
            process = multiprocessing.get_context("fork").Process(target=_judge_in_child, args=arguments)
            process.start()
            sender.close()
            running[receiver] = (func, cuts, process)
        for receiver in multiprocessing.connection.wait(list(running)):
            func, cuts, process = running.pop(receiver)
            try:
                found[func.name()] = receiver.recv()
            except EOFError:
                found[func.name()] = Outcome()
                if cuts:
                    waiting.append((func, False))
            process.join()
    return dict(sorted(found.items()))


def _plain(function: Any) -> Any:
    """A decomposition without the wrapper that corrects its strides."""
    return function.args[1] if isinstance(function, functools.partial) and len(function.args) > 1 else function


def table_of(found: dict[str, Outcome]) -> dict[str, list[str]]:
    """The content of the file."""
    agreeing = {kind: {name for name, outcome in found.items() if _agrees(outcome, kind)} for kind in KINDS}
    return {kind: sorted(names) for kind, names in agreeing.items()}


def _agrees(outcome: Outcome, kind: str) -> bool:
    takes_four = any(outcome.ranks[kind + "4"] for kind in KINDS)
    enough = outcome.agreed[kind] >= _FEWEST and (outcome.ranks[kind + "4"] >= _FEWEST or not takes_four)
    return enough and not outcome.differed[kind]


def wrongly_listed(found: dict[str, Outcome]) -> list[str]:
    """The operators that differ although the file lists them."""
    listed = json.loads(FILE.read_text(encoding="utf-8"))
    return sorted(name for kind in KINDS for name in listed[kind] if name in found and found[name].differed[kind])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators by name, with commas between them")
    parser.add_argument("--sample", default="1", help="the part of the operators that is tried, such as 1/20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="writes agreeing_operators.json and argument_names.json")
    given = parser.parse_args()
    calls, dtypes = recorded()
    arguments = argument_names(dtypes)
    names = sorted(func.name() for func in calls)
    top, _, bottom = given.sample.partition("/")
    chosen = set(random.Random(given.seed).sample(names, max(1, round(len(names) * int(top) / int(bottom or 1)))))
    chosen = set(given.only.split(",")) if given.only else chosen
    found = outcomes({func: calls[func] for func in calls if func.name() in chosen}, given.processes)
    for name, outcome in found.items():
        if outcome.differed:
            print(f"{name}: agreed {dict(outcome.agreed)}, differed {dict(outcome.differed)}")
            for kind, example in outcome.examples.items():
                print(f"    {kind}: {example}" if given.only else f"    {kind}: {example[:300]}")
    table = table_of(found)
    wrong = wrongly_listed(found)
    print(f"{len(found)} operators: {', '.join(f'{len(names)} {kind}' for kind, names in table.items())}")
    if given.write:
        FILE.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")
        NAMES.write_text(json.dumps(arguments, indent=0) + "\n", encoding="utf-8")
        return 0
    print(f"{len(wrong)} of those that are listed differ{': ' if wrong else ''}{', '.join(wrong)}")
    has_other_names = arguments != json.loads(NAMES.read_text(encoding="utf-8"))
    if has_other_names:
        print(f"{NAMES.name} is not what the database tells: --write")
    return int(bool(wrong) or has_other_names)


if __name__ == "__main__":
    sys.exit(main())
