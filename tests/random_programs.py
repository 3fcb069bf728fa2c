"""Random programs against eager: operators, dtypes, views, in-place changes, control flow, gradients.

A program is Python source: a function of a few tensors, with a line for each step. Steps that eager rejects are
dropped, so every program runs in eager. The compiled program must give the same in each of a few calls with other
sizes: values, dtypes, shapes, strides, shared memory of results, changed arguments, gradients, random state.

A different value is right if it is as near to float64 as eager's error and rounding allow. What differs or raises in
the same way with ``aot_eager`` is PyTorch's, and is reported separately. A failing program is reduced by removing
steps, results and arguments as long as it fails in the same way. (Hypothesis would shrink the random choices that
produced a program; replacing a step by one of its operands takes a tenth of the compiles.)

As a script it runs many programs in subprocesses, so that a crash is reported::

    python tests/random_programs.py 0 10000 --jobs 2
    python tests/random_programs.py 17 18 --shrink      # one, and the smallest program that fails like it
    python tests/random_programs.py 17 18 --show

Exit code 1: a program differs, raises, hangs or crashes.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import dataclasses
import functools
import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import conftest  # noqa: F401  the settings of the tests
import torch
from random_steps import DIMENSIONS, DTYPES, text_of_steps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends.numerics.exact import is_floating
from dynamo_backends.numerics.function_runs import FunctionRun
from dynamo_backends.numerics.whole_graph import FunctionCheck, outputs_of
from passes.engine.fx.editing import is_view

SAME, UNSTABLE, PYTORCHS, DIFFERS, RAISES, DIED, HANGS = (
    "same",  # as eager, or as near to float64
    "unstable",  # rounding alone changes the results of eager as much
    "PyTorch's own",  # aot_eager does the same
    "differs",
    "raises",
    "died",
    "hangs",
)
FAULTS = (DIFFERS, RAISES, DIED, HANGS)
SECONDS = 120
"""After so long a program is taken to hang."""

_TRIES = 4
"""How often a program is run with noise, to see what rounding does to it."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor argument.

    Attributes:
        dimensions: names of sizes, or numbers.
        dtype: a name.
        form: how it lies in memory: an expression of ``t``, which has the dimensions in the order of ``stored``.
        stored: the dimensions that ``t`` is made with.
        of: another argument whose memory it is a view of; ``form`` is then an expression of that.
        requires_grad: whether a gradient is asked for.
    """

    dimensions: tuple[str | int, ...]
    dtype: str = "float32"
    form: str = "t"
    stored: tuple[str | int, ...] = ()
    of: int | None = None
    requires_grad: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A statement.

    Attributes:
        name: of the value that it makes.
        text: its source, with a field for each operand: ``{0}``.
        operands: names of values that were made before.
    """

    name: str
    text: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return self.text.replace("{name}", self.name).format(*self.operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and how it is called.

    Attributes:
        arguments: by name ``v0``, ``v1`` ...
        steps: in order.
        results: the names of what it returns.
        sizes: for each call, the sizes of the dimensions.
        seed: of the values.
        training: whether gradients are computed.
        mode: ``enable_grad``, ``no_grad`` or ``inference_mode``.
        dynamic: as of ``torch.compile``.
        held: how many of the arguments, the last ones, are parameters and buffers of a module.
        options: of the backend ``onnxrt``; with ``cache`` it is compiled twice, the second time from the disk.
    """

    arguments: tuple[Argument, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    sizes: tuple[tuple[tuple[str, int], ...], ...]
    seed: int = 0
    training: bool = False
    mode: str = "enable_grad"
    dynamic: bool | None = False
    held: int = 0
    options: tuple[tuple[str, object], ...] = ()

    @property
    def names(self) -> list[str]:
        return [f"v{i}" for i in range(len(self.arguments))]

    def source(self) -> str:
        """The function ``program``, as Python source."""
        lines = [f"def program({', '.join(self.names)}):"]
        lines += [f"    {line}" for step in self.steps for line in str(step).splitlines()]
        lines.append(f"    return ({''.join(f'{name}, ' for name in self.results)})")
        return "\n".join(lines)

    def function(self) -> Callable[..., tuple[object, ...]]:
        space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source(), "<program>", "exec"), space)
        return space["program"]

    def make_arguments(self, call: int, number: int | None = None) -> list[torch.Tensor]:
        """New arguments for a call, with the values of another ``number`` if one is given."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + (call if number is None else number))
        sizes = dict(self.sizes[call])
        made: list[torch.Tensor] = []
        for argument in self.arguments:
            if argument.of is not None:
                made.append(eval(argument.form, {"t": made[argument.of], "torch": torch}))
                continue
            shape = [eval(str(item), dict(sizes)) for item in argument.stored]
            t = _values(shape, getattr(torch, argument.dtype), generator)
            value = eval(argument.form, {"t": t, "torch": torch}).detach()
            made.append(value.requires_grad_(argument.requires_grad))
        return made

    def __str__(self) -> str:
        lines = [
            f"# {self.mode}, training={self.training}, dynamic={self.dynamic}, held={self.held}, {dict(self.options)}"
        ]
        for call in range(len(self.sizes)):
            for name, argument, value in zip(self.names, self.arguments, self.make_arguments(call), strict=True):
                of = "" if argument.of is None else f" of v{argument.of}"
                grad = " requires_grad" if value.requires_grad else ""
                lines.append(
                    f"# call {call}: {name}: {argument.dtype} {tuple(value.shape)} {value.stride()}"
                    f" {argument.form}{of}{grad}"
                )
        return "\n".join([*lines, self.source()])


def _values(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_complex:
        return torch.complex(*(torch.randn(shape, generator=generator) for _ in range(2))).to(dtype)
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -3
        return torch.randint(low, 6, shape, generator=generator).to(dtype)
    return (torch.randn(shape, generator=generator) * 2).to(dtype)


# --- making them --------------------------------------------------------------------------------------------------

_SIZES = ((2, 3, 4, 5), (3, 2, 5, 4), (1, 4, 6, 2), (0, 3, 2, 2))
_FORMS = (
    ("t", lambda shape: shape),
    ("t.mT", lambda shape: (*shape[:-2], shape[-1], shape[-2])),
    ("t.transpose(0, -1)", lambda shape: (shape[-1], *shape[1:-1], shape[0])),
    ("t[1:]", lambda shape: (f"{shape[0]} + 1", *shape[1:])),
    ("t[..., ::2]", lambda shape: (*shape[:-1], f"{shape[-1]} * 2")),
    ("t[..., 0]", lambda shape: (*shape, 3)),
)
_ALIASES = ("t", "t[0]", "t[1:]", "t.mT", "t.reshape(-1)", "t.unsqueeze(0)", "t[..., :1]", "t.expand(2, *t.shape)")


class _Maker:
    """Makes one program."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        training = chance.random() < 0.4
        self.mode = "enable_grad" if training else chance.choice(["enable_grad", "no_grad", "inference_mode"])
        dynamic = chance.choice([False, False, None, True])
        held = chance.choice([0, 0, 0, 1, 2])
        calls = chance.choice([1, 2, 3]) if dynamic is not False or held else 1
        options: list[tuple[str, object]] = [("cache", True)] if chance.random() < 0.15 else []
        if held and chance.random() < 0.4:
            options.append(("weights", chance.choice(["inputs", "checked"])))
        if training and chance.random() < 0.25:  # runs on either side, then on the faster
            options += [("placement", "measured"), ("autotune_budget", 100)]
            calls, dynamic = 4, False
        orders = [chance.choices(_SIZES, [6, 4, 1, 1])[0] for _ in range(calls)]
        if held or calls == 4:  # the same weights, of the same sizes, with other values
            orders = orders[:1] * calls
        self.program = Program(
            arguments=self._arguments(chance.randint(2, 4), training, held),
            steps=(),
            results=(),
            sizes=tuple(tuple(zip(DIMENSIONS, order, strict=True)) for order in orders),
            seed=seed,
            training=training,
            mode=self.mode,
            dynamic=dynamic,
            held=held,
            options=tuple(options),
        )

    def _arguments(self, number: int, training: bool, held: int) -> tuple[Argument, ...]:
        chance = self.chance
        made: list[Argument] = []
        common = chance.choice(["float32", "float32", "float32", chance.choice(DTYPES)])
        shapes: list[tuple[str | int, ...]] = []
        for i in range(number):
            if made and i < number - held and not training and chance.random() < 0.12:
                of = chance.randrange(len(made))
                if made[of].of is None and made[of].dimensions:
                    form = chance.choice(_ALIASES if len(made[of].dimensions) > 1 else ("t", "t[1:]", "t.unsqueeze(0)"))
                    made.append(Argument((), made[of].dtype, form, (), of))
                    continue
            rank = chance.choices([0, 1, 2, 3, 4], [1, 3, 6, 4, 2])[0]
            shape: tuple[str | int, ...] = tuple(
                chance.choice([*DIMENSIONS, 1, 3]) if chance.random() < 0.4 else DIMENSIONS[k] for k in range(rank)
            )
            if shapes and chance.random() < 0.5:
                shape = chance.choice(shapes)
                if shape and chance.random() < 0.3:  # it broadcasts
                    k = chance.randrange(len(shape))
                    shape = (*shape[:k], 1, *shape[k + 1 :]) if chance.random() < 0.5 else shape[1:]
            shapes.append(shape)
            dtype = common if chance.random() < 0.7 else chance.choice(DTYPES)
            form, stored = chance.choice(_FORMS) if len(shape) >= 2 and chance.random() < 0.3 else _FORMS[0]
            floats = dtype.startswith(("float", "bfloat", "complex"))
            requires = training and floats and chance.random() < 0.85
            made.append(Argument(shape, dtype, form, tuple(stored(shape)), None, requires))
        return tuple(made)

    def make(self) -> Program:
        wanted = self.chance.randint(3, 12)
        for _ in range(wanted * 12):
            step = self._step()
            attempt = dataclasses.replace(self.program, steps=(*self.program.steps, step), results=(step.name,))
            if is_fine(attempt):
                self.program = dataclasses.replace(self.program, steps=attempt.steps)
            if len(self.program.steps) >= wanted:
                break
        made = [step.name for step in self.program.steps]
        for _ in range(5):
            used = {name for step in self.program.steps for name in step.operands}
            results = [name for name in made if name not in used]
            results += self.chance.sample(made, min(2, len(made)))
            if self.chance.random() < 0.15:
                results.append(self.chance.choice(self.program.names))
            whole = dataclasses.replace(self.program, results=tuple(dict.fromkeys(results)))
            if is_fine(whole):
                return whole
        return dataclasses.replace(self.program, results=tuple(made[-1:]))

    def _step(self) -> Step:
        kinds = {"plain": 20, "in_place": 7, "nested": 3}
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        text = text_of_steps(self.chance, kind)
        names = [*self.program.names, *(step.name for step in self.program.steps)]
        number = 1 + max((int(field) for field in re.findall(r"\{(\d)\}", text)), default=0)
        recent = names[-4:]
        operands = tuple(self.chance.choice(recent if self.chance.random() < 0.6 else names) for _ in range(number))
        return Step(f"v{len(names)}", text, operands)


def make_program(seed: int) -> Program:
    """The program of a seed."""
    return _Maker(seed).make()


_REFUSALS = (RuntimeError, IndexError, TypeError, ValueError, UserWarning, NotImplementedError, AttributeError)


def is_fine(program: Program) -> bool:
    """Whether eager runs a program in each of its calls, without a warning, the same twice, and without huge values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # eager warns of changes in memory that overlaps itself
            first, second = (run(program, program.function(), None) for _ in range(2))
    except (*_REFUSALS, ZeroDivisionError, OverflowError, Warning):
        return False
    except torch.linalg.LinAlgError:
        return False
    for outcome in first:
        gradients = [x for x in outcome.gradients if x is not None]
        for leaf in [*outcome.results, *gradients]:
            if not isinstance(leaf, torch.Tensor):
                return False
            try:
                size = leaf.double() if leaf.dtype == torch.bool else leaf.abs().double()
            except RuntimeError:  # a part of a split whose whole was changed: autograd refuses it
                return False
            if leaf.layout is not torch.strided or leaf.is_quantized or leaf.numel() > 20000:
                return False
            if (
                not bool(size.lt(1e5).all()) and program.seed % 10
            ):  # a tenth of the programs may have infinities and NaN
                return False
    return not complaints(first, second, program, exactly=True)


# --- running and comparing them -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """The effects of a call: its results, the arguments after it, their gradients, and the random state."""

    results: list[object]
    arguments: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    tangents: dict[int, torch.Tensor]
    random_state: torch.Tensor


class Holder(torch.nn.Module):
    """A module that holds the last arguments of a function as parameters and buffers."""

    def __init__(self, function: Callable[..., object], held: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._function = function
        self._number = len(held)
        for i, value in enumerate(held):
            if value.requires_grad:
                self.register_parameter(f"held_{i}", torch.nn.Parameter(value.detach()))
            else:
                self.register_buffer(f"held_{i}", value)

    def own(self) -> list[torch.Tensor]:
        return [getattr(self, f"held_{i}") for i in range(self._number)]

    def forward(self, *arguments: torch.Tensor) -> object:
        return self._function(*arguments, *self.own())


@functools.cache
def _cache_dir() -> str:
    """A folder of this process for what it compiles."""
    folder = tempfile.mkdtemp(prefix="random_programs_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run(program: Program, function: Callable[..., Any], backend: str | None, first: int = 0) -> list[Outcome]:
    """All calls of a program, compiled by a backend, or in eager for ``None``; ``first`` is the number of the first."""
    holder = None
    if program.held:
        holder = Holder(function, program.make_arguments(0)[-program.held :])
        function = holder
    if backend is not None:
        options = {**dict(program.options), "cache_dir": _cache_dir()} if backend == "onnxrt" else {}
        function = torch.compile(function, backend=backend, dynamic=program.dynamic, options=options)
    outcomes = []
    for call in range(len(program.sizes)):
        arguments = program.make_arguments(call, first + call)
        if holder is not None:
            with torch.no_grad():
                for mine, value in zip(holder.own(), arguments[-program.held :], strict=True):
                    if call:
                        mine.copy_(value)
                    mine.grad = None
            arguments = [*arguments[: -program.held], *holder.own()]
        torch.manual_seed(first + call)
        given = arguments[: -program.held] if holder is not None else arguments
        with getattr(torch, program.mode)():
            results = list(function(*given))
        tangents: dict[int, torch.Tensor] = {}
        if program.training:
            ends = [i for i, x in enumerate(results) if isinstance(x, torch.Tensor) and x.requires_grad]
            generator = torch.Generator().manual_seed(first + call)
            tangents = {i: _tangent(results[i], generator) for i in ends}
            if ends:
                torch.autograd.backward([results[i] for i in ends], list(tangents.values()))
        gradients = [x.grad if x.is_leaf else None for x in arguments]
        outcomes.append(Outcome(results, arguments, gradients, tangents, torch.get_rng_state()))
    return outcomes


def _tangent(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn((*value.shape, 2), generator=generator, dtype=torch.float64)
    return (torch.view_as_complex(numbers) if value.is_complex() else numbers[..., 0]).to(value.dtype)


@dataclasses.dataclass(frozen=True)
class Complaint:
    """A difference: ``what`` is the same for the same kind of fault, ``text`` has the details."""

    what: str
    text: str = ""
    call: int = 0
    value: object = None


def complaints(
    actual: Sequence[Outcome], expected: Sequence[Outcome], program: Program, *, exactly: bool = False
) -> list[Complaint]:
    """How the outcomes of the calls differ; values only by more than ``assert_close`` allows."""
    found: list[Complaint] = []
    for call, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        parts = [(f"result {n}", ("result", i)) for i, n in enumerate(program.results)]
        parts += [(f"argument {n} after the call", ("input", i)) for i, n in enumerate(program.names)]
        parts += [(f"gradient of {n}", ("gradient", i)) for i, n in enumerate(program.names)]
        for name, key in parts:
            found += [
                dataclasses.replace(item, what=f"{item.what} of {name}", call=call, value=key)
                for item in _tensor_complaints(_part(ours, key), _part(theirs, key), exactly)
            ]
        if _aliases(ours) != _aliases(theirs):
            found.append(Complaint("shared memory", f"{_aliases(ours)} instead of {_aliases(theirs)}", call))
        if not torch.equal(ours.random_state, theirs.random_state):
            found.append(Complaint("random state", "", call))
    return found


def _part(outcome: Outcome, key: tuple[str, int]) -> object:
    kind, i = key
    return {"result": outcome.results, "input": outcome.arguments, "gradient": outcome.gradients}[kind][i]


def _tensor_complaints(ours: object, theirs: object, exactly: bool) -> Iterator[Complaint]:
    if type(ours) is not type(theirs):
        yield Complaint("type", f"{type(ours).__name__} instead of {type(theirs).__name__}")
        return
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        if ours != theirs and not (ours != ours and theirs != theirs):
            yield Complaint("values", f"{ours} instead of {theirs}")
        return
    for what in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(ours, what) != getattr(theirs, what):
            yield Complaint(what, f"{getattr(ours, what)} instead of {getattr(theirs, what)}")
            return
    if conftest.significant_strides(ours) != conftest.significant_strides(theirs):
        yield Complaint("strides", f"{ours.stride()} instead of {theirs.stride()} of {tuple(ours.shape)}")
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {}
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True, check_stride=False, **tolerance)
    except AssertionError:
        yield Complaint("values", f"{_short(ours)} instead of {_short(theirs)}")


def _short(value: torch.Tensor) -> str:
    text = " ".join(str(value.detach().reshape(-1)[:8].tolist()).split())
    return f"{value.dtype} {tuple(value.shape)} {text}"


def _aliases(outcome: Outcome) -> list[list[int]]:
    return conftest.aliases_of(outcome.results, outcome.arguments)


# --- judging ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        outcome: one of the words above.
        what: the kinds of its faults.
        text: what is wrong, in words.
    """

    outcome: str
    what: tuple[str, ...] = ()
    text: str = ""


def judge(program: Program, backend: str = "onnxrt") -> Verdict:
    """Compares a program with eager."""
    expected = run(program, program.function(), None)
    found = _against(program, backend, expected)
    if isinstance(found, Verdict):
        other = _against(program, "aot_eager", expected)
        return Verdict(PYTORCHS, found.what, found.text) if isinstance(other, Verdict) else found
    if not found:
        return Verdict(SAME)
    left = [item for item in found if not item.what.startswith("values") or not _is_explained(program, item, expected)]
    if not left:
        return Verdict(SAME)
    other = _against(program, "aot_eager", expected)
    text = "; ".join(f"call {item.call}: {item.what}: {item.text}" for item in left[:4])
    what = tuple(sorted({item.what for item in left}))
    if isinstance(other, Verdict) or set(what) <= {item.what for item in other}:
        return Verdict(PYTORCHS, what, text)
    if all(_is_foretold(program, item) for item in left):
        return Verdict(PYTORCHS, what, f"its fake tensors have other strides than its kernels: {text}")
    left = [item for item in left if not item.what.startswith("values") or not _is_unstable(program, item, expected)]
    if not left:
        return Verdict(UNSTABLE, what, text)
    return Verdict(DIFFERS, what, text)


def _against(program: Program, backend: str, expected: Sequence[Outcome]) -> list[Complaint] | Verdict:
    """The complaints about a backend; a verdict if it raises."""
    torch._dynamo.reset()
    function = program.function()
    try:
        actual = run(program, function, backend)
        if "cache" in dict(program.options) and backend == "onnxrt":
            torch._dynamo.reset()
            actual = run(program, function, backend)
    except Exception as error:
        lines = traceback.format_exc().strip().splitlines()
        where = [line.strip() for line in lines if "dynamo_backends" in line][-1:]
        text = f"{type(error).__name__}: {str(error)[:500]} {where}"
        return Verdict(RAISES, (type(error).__name__,), text)
    finally:
        torch._dynamo.reset()
    if backend != "aot_eager":
        for outcome, theirs in zip(actual, expected, strict=True):
            outcome.tangents = theirs.tangents
    found = complaints(actual, expected, program)
    return [dataclasses.replace(item, value=(item.value, actual)) for item in found]


def _is_foretold(program: Program, complaint: Complaint) -> bool:
    """Whether strides differ only because the fake tensors of an operator have other strides."""
    if not complaint.what.startswith(("strides", "shared memory")):  # a view of other strides may be a copy
        return False
    fake_strides = FakeStrides()
    with getattr(torch, program.mode)(), fake_strides:
        program.function()(*program.make_arguments(complaint.call))
    return bool(fake_strides.wrong)


class FakeStrides(TorchDispatchMode):
    """Finds the operators whose fake results have other strides than the real ones.

    Attributes:
        wrong: their names.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        given = pytree.tree_leaves((args, kwargs))
        fake = None
        is_functional = isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable
        if is_functional and not any(isinstance(leaf, torch.nn.Module) for leaf in given):
            try:
                with FakeTensorMode() as mode:
                    fake = func(*pytree.tree_map(functools.partial(_fake, mode), args), **(kwargs or {}))
            except Exception:  # what depends on values has no fake result
                fake = None
        result = func(*args, **(kwargs or {}))
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(fake), strict=False)
        if fake is not None and any(_have_other_strides(*pair) for pair in pairs):
            self.wrong.add(str(func))
        return result


def _fake(mode: FakeTensorMode, value: object) -> object:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _have_other_strides(real: object, fake: object) -> bool:
    if not isinstance(real, torch.Tensor) or not isinstance(fake, torch.Tensor) or real.shape != fake.shape:
        return False
    return conftest.significant_strides(real) != conftest.significant_strides(fake)


def _is_explained(program: Program, complaint: Complaint, expected: Sequence[Outcome]) -> bool:
    """Whether a value is as near to float64 as eager's, or as rounding explains."""
    key, actual = complaint.value  # type: ignore[misc]
    ours, theirs = _part(actual[complaint.call], key), _part(expected[complaint.call], key)
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or not is_floating(theirs):
        return False
    found = _reference(program, complaint.call, expected[complaint.call], key)
    return found is not None and key in found.eager and not found.judge(key, ours).is_wrong


def _reference(program: Program, call: int, expected: Outcome, key: tuple[str, int]) -> FunctionCheck | None:
    """The results and changed arguments, or the gradients, of a call; ``None`` where PyTorch has no float64 of it."""
    function = program.function()
    of = [i for i, value in enumerate(expected.gradients) if value is not None]

    def values_of(once: FunctionRun) -> dict[object, object]:
        if key[0] != "gradient":
            values = outputs_of(once)
            return {("result", item) if isinstance(item, int) else item: value for item, value in values.items()}
        outputs = [_output(once, item) for item in expected.tangents]
        found = once.gradients(outputs, list(expected.tangents.values()), [once.leaves[i] for i in of])  # type: ignore[misc]
        return {("gradient", i): value for i, value in zip(of, found, strict=True)}

    torch.manual_seed(call)
    try:
        check = FunctionCheck(
            lambda *given: list(function(*given)),
            program.make_arguments(call),
            torch.get_rng_state(),
            values_of=values_of,
        )
        _ = check.exact
        return check
    except Exception:  # no float64 of it: then eager is the only reference
        return None


def _output(once: FunctionRun, key: object) -> torch.Tensor:
    """The result that a tangent is of."""
    if isinstance(key, int):
        return once.returned[key]
    kind, position = key  # type: ignore[misc]
    return once.arguments[position] if kind == "input" else once.returned[position]._base


def _is_unstable(program: Program, complaint: Complaint, expected: Sequence[Outcome]) -> bool:
    """Whether rounding alone, in each step of the program, changes the value as much."""
    key, actual = complaint.value  # type: ignore[misc]
    ours, theirs = _part(actual[complaint.call], key), _part(expected[complaint.call], key)
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    function = program.function()
    once = dataclasses.replace(program, sizes=program.sizes[complaint.call : complaint.call + 1], held=0)
    others = []
    for number in range(_TRIES):
        try:
            with OtherRounding(number):
                [outcome] = run(once, function, None, first=complaint.call)
        except _REFUSALS:
            continue
        value = _part(outcome, key)
        if isinstance(value, torch.Tensor) and value.shape == ours.shape:
            others.append(value.detach())
    if not others:
        return False
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.detach().to(wide), theirs.detach().to(wide)
    spread = torch.stack([(value.to(wide) - theirs).abs() for value in others]).amax(0)
    near = ((ours - theirs).abs() <= 10 * spread) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    return bool((near | ~spread.isfinite()).all())


class OtherRounding(TorchDispatchMode):
    """A mode in which each operator rounds some of its results to the next number; not beyond 1, for probabilities.

    Exact results stay: integers, except of functions that are not exact.

    Args:
        seed: of the choice of elements.
    """

    supports_higher_order_operators = True
    _NEAR_INTEGERS = ("sigmoid", "tanh", "erf", "exp", "softmax", "softplus", "ndtr", "cos", "mish", "silu", "gelu")

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        returned = result = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or is_view(func):
            return result
        if func._schema.is_mutable:  # by a name under which autograd does not take it for another change
            result = [leaf.data for leaf in args[:1] if isinstance(leaf, torch.Tensor)]
        nears = any(name in str(func) for name in self._NEAR_INTEGERS)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided:
                steps = torch.randint(-1, 2, leaf.shape, generator=self._generator)
                if not nears:
                    steps *= leaf != leaf.round()
                moved = leaf + leaf * (steps * torch.finfo(leaf.dtype).eps).to(leaf.dtype)
                leaf.copy_(torch.where(leaf.abs() <= 1, moved.clamp(-1, 1), moved))
        return returned


# --- making them smaller ------------------------------------------------------------------------------------------


def shrink(program: Program, verdict: Verdict, *, attempts: int = 150, backend: str = "onnxrt") -> Program:
    """The smallest program found that has the same kind of fault."""
    kinds = {_kind(what) for what in verdict.what}
    left = attempts
    changed = True
    while changed and left > 0:
        changed = False
        for smaller in _smaller(program):
            if left <= 0:
                break
            if not is_fine(smaller):
                continue
            left -= 1
            try:
                other = judge(smaller, backend)
            except _REFUSALS:
                continue
            if other.outcome == verdict.outcome and kinds & {_kind(what) for what in other.what}:
                program, changed = smaller, True
                break
    return program


def _kind(what: str) -> str:
    return what.split(" of ")[0]


def _smaller(program: Program) -> Iterator[Program]:
    replace = dataclasses.replace
    if len(program.sizes) > 1:
        for i in range(len(program.sizes)):
            yield replace(program, sizes=program.sizes[:i] + program.sizes[i + 1 :])
    for i in range(len(program.results) if len(program.results) > 1 else 0):
        yield replace(program, results=program.results[:i] + program.results[i + 1 :])
    used = {name for step in program.steps for name in step.operands} | set(program.results)
    for i in range(len(program.steps) - 1, -1, -1):
        step = program.steps[i]
        for instead in dict.fromkeys(step.operands) if step.name in used else [""]:

            def of(name: str, old: str = step.name, new: str = instead) -> str:
                return new if name == old else name

            rest = program.steps[:i] + program.steps[i + 1 :]
            steps = tuple(replace(item, operands=tuple(map(of, item.operands))) for item in rest)
            results = tuple(dict.fromkeys(map(of, program.results)))
            yield replace(program, steps=steps, results=results)
    if program.held:
        yield replace(program, held=0)
    for i in range(len(program.options)):
        yield replace(program, options=program.options[:i] + program.options[i + 1 :])
    if program.dynamic is not False:
        yield replace(program, dynamic=False)
    if program.training:
        untrained = tuple(replace(item, requires_grad=False) for item in program.arguments)
        yield replace(program, training=False, arguments=untrained)
    for i, argument in enumerate(program.arguments):
        if argument.of is None and argument.form != "t" and not program.held:
            plain = replace(argument, form="t", stored=argument.dimensions)
            yield replace(program, arguments=(*program.arguments[:i], plain, *program.arguments[i + 1 :]))
    last = len(program.arguments) - 1
    if last > 0 and not program.held and f"v{last}" not in used:
        names = {step.name for step in program.steps}
        if f"v{last}" not in names:
            yield replace(program, arguments=program.arguments[:-1])


# --- many of them -------------------------------------------------------------------------------------------------


def _work(seeds: Sequence[int], backend: str, smaller: bool, send: Callable[[object], None]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in seeds:
        send(("begin", seed))
        send((seed, *_report(seed, backend, smaller)))


def _report(seed: int, backend: str, smaller: bool) -> tuple[str, str]:
    """The outcome of a seed, and what there is to say of it."""
    try:
        program = make_program(seed)
        if not program.steps:
            return SAME, ""
        verdict = judge(program, backend)
        if verdict.outcome == SAME:
            return SAME, ""
        if verdict.outcome in FAULTS and smaller:
            program = shrink(program, verdict, backend=backend)
            verdict = judge(program, backend)
        return verdict.outcome, f"{verdict.text}\n{program}"
    except Exception:
        return RAISES, f"the comparison itself: {traceback.format_exc()}"


def sweep(seeds: Sequence[int], backend: str, smaller: bool, block: int = 100) -> Iterator[tuple[int, str, str]]:
    """Tries programs in a process that is replaced when it dies, hangs, or has done a block of them."""
    context = multiprocessing.get_context("spawn")
    left = list(seeds)
    while left:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(left[:block], backend, smaller, sender.send))
        process.start()
        sender.close()
        current, hangs = None, False
        try:
            while True:
                if not receiver.poll(SECONDS * (10 if smaller else 1)):
                    hangs = True
                    process.kill()
                    break
                message = receiver.recv()
                if message[0] == "begin":
                    current = message[1]
                else:
                    left.remove(message[0])
                    current = None
                    yield message
        except EOFError:
            pass
        process.join()
        if current is not None:
            left.remove(current)
            what = HANGS if hangs else DIED
            yield current, what, f"exit code {process.exitcode}\n{make_program(current)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs against eager.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--backend", default="onnxrt")
    parser.add_argument("--shrink", action="store_true", help="make those that fail smaller")
    parser.add_argument("--show", action="store_true", help="print the programs, and run none")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.last)
    if arguments.show:
        for seed in seeds:
            print(f"## {seed}\n{make_program(seed)}\n")
        return 0
    counts: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()
    began = time.time()

    def job(number: int) -> None:
        for seed, outcome, text in sweep(seeds[number :: arguments.jobs], arguments.backend, arguments.shrink):
            with lock:
                counts[outcome] += 1
                if outcome != SAME:
                    print(f"## seed {seed} {outcome}: {text}\n", flush=True)
                if sum(counts.values()) % 200 == 0:
                    print(
                        f"-- {sum(counts.values())} programs, {time.time() - began:.0f} s: {dict(counts)}", flush=True
                    )

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(job, range(arguments.jobs)))
    print(f"{sum(counts.values())} programs in {time.time() - began:.0f} s: {dict(counts)}")
    return int(any(counts[outcome] for outcome in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
