"""Shared helpers: a clean compiler for each test, and the comparison of a compiled function with eager.

A test says what it compiles and with which arguments; ``assert_same_as_eager`` compares everything::

    def test_several_outputs():
        assert_same_as_eager(lambda x: (x + 1, x * 2), torch.randn(2, 3))
"""

from __future__ import annotations

import collections
import copy
import itertools
import logging
import os
import platform
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_flatten, tree_leaves

from dynamo_backends import events
from dynamo_backends.exporter.decompositions import SUMS_AT_INDICES
from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.partition.runnable_region import OnProvider, RunnableRegion
from dynamo_backends.pipeline import pass_target, pipeline
from dynamo_backends.runtime.executable import Executable
from dynamo_backends.runtime.settings import SessionSettings
from passes import Pass, register, unregister
from passes.engine.fx.editing import is_view

os.environ["DYNAMO_BACKENDS_CACHE"] = "0"  # what is tested is compiled; tests/cache/test_cache.py turns it on
os.environ["DYNAMO_BACKENDS_PLACEMENT"] = (
    "onnx"  # what trains is on ONNX Runtime; tests/placement/test_placement.py measures
)
os.environ["DYNAMO_BACKENDS_AUTOTUNE_BUDGET"] = "100"

logging.getLogger("torch.__trace").propagate = False  # its thousands of empty lines would follow each failure

if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are shared out among the processes: one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and the processes that tests start
    torch.set_num_threads(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Runs tests given by name, or with ``-s``, in this process; otherwise one worker for each core."""
    by_name = all("::" in argument for argument in config.args)
    return 0 if by_name or config.option.capture == "no" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dynamo-backends")
    group.addoption("--all-cases", action="store_true", help="run also what is left out otherwise")
    seed = os.environ.get("TEST_SEED", "0")
    group.addoption("--seed", default=seed, help="which slow tests and cases are run otherwise (default: %(default)s)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases of tests that are marked ``sampled(n)``, of which one of n is run, and 7 of 8 slow tests.

    Not if tests are given by name. A test is slow if ``durations.txt`` names it.
    """
    if config.option.all_cases or config.option.keyword or any("::" in argument for argument in config.args):
        return
    groups = collections.defaultdict[tuple[str, int], list[pytest.Item]](list)
    slow = set(re.findall(r"\S+::\S+", DURATIONS.read_text(encoding="utf-8")))
    for item in items:
        test = item.nodeid.split("[")[0]
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            groups[test, mark.args[0]].append(item)
        elif test.removeprefix("tests/") in slow:
            groups["slow", 8].append(item)
    left_out: set[pytest.Item] = set()
    for (name, part), of_group in groups.items():
        number = -(-len(of_group) // part)
        left_out.update(set(of_group) - set(random.Random(f"{name} {config.option.seed}").sample(of_group, number)))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Records the processor time of each test, with the processes that it started and waited for."""
    before = _processor_seconds()
    item.user_properties.append(("processor_seconds_before", before))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "teardown":
        before = dict(item.user_properties)["processor_seconds_before"]
        item.user_properties.append(("processor_seconds", _processor_seconds() - before))
    return (yield)


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


DURATIONS = Path(__file__).with_name("durations.txt")

_SLOW = 5.0
"""Seconds of processor time from which a test is slow, all of its cases together."""

_seconds_by_file: collections.Counter[str] = collections.Counter()
_seconds_by_test: collections.Counter[str] = collections.Counter()
_tests_by_file: collections.Counter[str] = collections.Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        test = report.nodeid.split("[")[0].removeprefix("tests/")
        file = test.split("::")[0]
        seconds = dict(report.user_properties)["processor_seconds"]
        _seconds_by_file[file] += seconds
        _seconds_by_test[test] += seconds
        _tests_by_file[file] += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes the time of files and slow tests to ``durations.txt`` if the suite ran with ``--all-cases`` and passed."""
    option = session.config.option
    is_whole = session.config.args == session.config.getini("testpaths") and not (option.keyword or option.markexpr)
    if exitstatus or not (is_whole and option.all_cases) or "PYTEST_XDIST_WORKER" in os.environ or option.deselect:
        return
    rows = sorted(_seconds_by_file.items(), key=lambda row: (-round(row[1]), row[0]))
    total, tests = sum(_seconds_by_file.values()), _tests_by_file.total()
    lines = [f"{total / 60:.0f} minutes of processor time, {tests} tests, {platform.machine()}; seconds, tests, file:"]
    lines += [f"{seconds:5.0f} {_tests_by_file[file]:5d}  {file}" for file, seconds in rows]
    slow = [(test, seconds) for test, seconds in _seconds_by_test.most_common() if seconds > _SLOW]
    lines += ["", f"Tests of more than {_SLOW:.0f} seconds:"]
    lines += [f"{seconds:5.0f}  {test}" for test, seconds in slow]
    DURATIONS.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def clean_compiler() -> Iterator[None]:
    """Each test starts without compiled graphs, counts and logged causes, with the same random numbers, at graph 0."""
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    counters.clear()
    events.logged.clear()
    pipeline.graph_numbers = itertools.count()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def without_units_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the processor has no bfloat16 units; with them, PyTorch runs bfloat16."""
    monkeypatch.setattr(pass_target, "has_units_for_bfloat16", lambda: False)


@pytest.fixture
def rebuilt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions take no time to build: one whose weights changed is rebuilt, however short it ran."""
    monkeypatch.setattr("dynamo_backends.weights.region_session.clock", lambda: 0.0)


@pytest.fixture
def planted() -> Iterator[Callable[[Pass], None]]:
    """Registers a pass for the duration of a test."""
    names: list[str] = []

    def plant(item: Pass) -> None:
        register(item)
        names.append(item.name)

    yield plant
    for name in names:
        unregister(name)


def counted(event: str) -> int:
    """How often an event was counted since the test began."""
    return counters["dynamo_backends"][event]


def assert_on_onnx() -> None:
    """Asserts that all operators of this test's graphs ran on ONNX Runtime.

    Except views and sums at repeated indices, which run in PyTorch.
    """
    targets = [event.split()[1] for event in counters["dynamo_backends"] if event.startswith("fallback ")]
    sums = {str(target) for target in SUMS_AT_INDICES}
    in_pytorch = [target for target in targets if target not in sums and not _is_view(target)]
    assert not in_pytorch, f"these run in PyTorch: {in_pytorch}"
    assert counted("nodes_on_onnx") > 0, "nothing runs on ONNX Runtime"
    assert counted("runtime_failures") == 0, "ONNX Runtime failed while running a region"
    assert counted("wrong_results") == 0, "ONNX Runtime returned another shape or dtype than eager"


def _is_view(target: str) -> bool:
    namespace, *names = target.split(".")
    return namespace == "aten" and is_view(getattr(getattr(torch.ops.aten, names[0]), names[1]))


def runnable_region(
    session: Callable[..., object],
    in_pytorch: Callable[..., object],
    graph: GraphName = GraphName(0),  # noqa: B008
    index: int = 0,
) -> RunnableRegion:
    """A region on the CPU provider, with any function as its session."""
    executable = Executable(b"", (), (), SessionSettings(("CPUExecutionProvider",)))
    provider = OnProvider(executable, session)  # type: ignore[arg-type]
    return RunnableRegion(graph, index, [provider], in_pytorch, lambda executable, args: session)  # type: ignore


def compiled(function: Callable[..., object], **settings: object) -> Callable[..., object]:
    """``torch.compile`` with our backend."""
    return torch.compile(function, **{"backend": "onnxrt", **settings})  # type: ignore[call-overload]


def assert_same_as_eager(
    function: Callable[..., object],
    *args: object,
    calls: int = 1,
    tolerance: Mapping[str, float] | None = None,
    settings: Mapping[str, object] | None = None,
    **kwargs: object,
) -> Callable[..., object]:
    """Runs a function or module in eager and compiled, each on its own copy of its state, and compares

    - the results: structure, Python type, dtype, shape, strides, ``requires_grad``, values (NaN equals NaN);
    - which results share memory with each other and with the arguments;
    - the arguments, and the module's parameters and buffers, after the call;
    - the state of the random generator;
    - if results require gradients: the gradients of arguments and parameters, and the random state after the backward.

    Args:
        function: what is compiled.
        args, kwargs: its arguments; they are copied, and views of one tensor stay views of one tensor.
        calls: how many times both are called, in turn, on the same copies.
        tolerance: ``rtol`` and ``atol``, if ``torch.testing``'s are too small; the test says why.
        settings: arguments of ``torch.compile``.

    Returns:
        The compiled function.
    """
    expected_function, actual_function = copy.deepcopy(function), copy.deepcopy(function)
    expected_inputs, actual_inputs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
    compiled_function = compiled(actual_function, **(settings or {}))
    for call in range(calls):
        expected = _call(expected_function, expected_inputs, seed=call)
        actual = _call(compiled_function, actual_inputs, seed=call)
        close = dict(tolerance or {})
        assert_same_values(actual.results, expected.results, **close)
        assert torch.equal(actual.random_state, expected.random_state), "the random generators went apart"
        aliases = aliases_of(expected.results, expected_inputs)
        assert aliases_of(actual.results, actual_inputs) == aliases, "other results share memory than in eager"
        assert_same_values(actual_inputs, expected_inputs, **close)
        assert_same_values(_state(actual_function), _state(expected_function), **close)
        if expected.differentiable:
            assert_same_values(actual.gradients(), expected.gradients(), **close)
            assert_same_values(_gradients(actual_inputs), _gradients(expected_inputs), **close)
            gradients = _gradients(_state(expected_function))
            assert_same_values(_gradients(_state(actual_function)), gradients, **close)
    return compiled_function


class _call:
    """One call with a seed: its results, and on request the gradients of its inputs."""

    def __init__(self, function: Callable[..., object], inputs: tuple, seed: int) -> None:
        torch.manual_seed(seed)
        args, kwargs = inputs
        self.results = function(*args, **kwargs)
        self.random_state = torch.get_rng_state()
        self.differentiable = [leaf for leaf in _tensors(self.results) if leaf.requires_grad]

    def gradients(self) -> torch.Tensor:
        """Runs the backward with random gradients, the same in each run; returns the random state after."""
        torch.manual_seed(1234)
        torch.autograd.backward(self.differentiable, [torch.randn_like(leaf) for leaf in self.differentiable])
        return torch.get_rng_state()


def _state(function: Callable[..., object]) -> dict[str, torch.Tensor]:
    if not isinstance(function, torch.nn.Module):
        return {}
    return {**dict(function.named_parameters()), **dict(function.named_buffers())}


def _gradients(tensors: object) -> list[torch.Tensor | None]:
    return [leaf.grad for leaf in _tensors(tensors) if leaf.is_leaf]


def _tensors(structure: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def aliases_of(results: object, inputs: object) -> list[list[int]]:
    """For each tensor among results and inputs, the positions of the others that share its memory."""
    owners: list[object] = []
    for position, tensor in enumerate(_tensors((results, inputs))):
        address = tensor.untyped_storage().data_ptr()
        owners.append(address if tensor.numel() else f"empty {position}")
    return [[i for i, other in enumerate(owners) if other == owner] for owner in owners]


def assert_same_values(actual: object, expected: object, **tolerance: float) -> None:
    """Asserts that tensors are close, of equal dtype, shape and strides, and everything else is equal."""
    actual_leaves, actual_structure = tree_flatten(actual)
    expected_leaves, expected_structure = tree_flatten(expected)
    assert actual_structure == expected_structure
    for ours, eagers in zip(actual_leaves, expected_leaves, strict=True):
        assert type(ours) is type(eagers), f"{type(ours)} instead of {type(eagers)}"
        if isinstance(eagers, torch.Tensor):
            torch.testing.assert_close(ours, eagers, equal_nan=True, **tolerance)  # dtype and shape too
            assert significant_strides(ours) == significant_strides(eagers)
            assert ours.requires_grad == eagers.requires_grad
        elif isinstance(eagers, float):
            assert ours == pytest.approx(eagers, rel=tolerance.get("rtol", 1e-6), nan_ok=True)
        else:
            assert ours == eagers


def significant_strides(tensor: torch.Tensor) -> Sequence[int]:
    """The strides of dimensions with more than one element.

    Those of an empty tensor and of a dimension of size one are arbitrary, and PyTorch's fake tensors, from which every
    compiler reads strides, differ from eager there: ``torch.randn(0, 3).t() + 1`` has strides (1, 3), its fake tensor
    (1, 1).
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return ()
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
