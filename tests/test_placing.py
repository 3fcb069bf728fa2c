"""Graphs run where they are faster: what is tried, what may win, and that results stay eager's."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import assert_same_as_eager, compiled, counted
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends import contest, decomposition_table, inductor, placing
from dynamo_backends.artifacts import GraphName
from dynamo_backends.cache.graphs import CachedGraphs
from dynamo_backends.cache.store import Record
from dynamo_backends.contest import Contest, Outcome
from dynamo_backends.errors import SessionError
from dynamo_backends.exporter.decompose import decompose
from dynamo_backends.options import parse_options
from dynamo_backends.placing import INDUCTOR, ONNX, PYTORCH
from dynamo_backends.runtime.binding import BoundSession

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMO_BACKENDS_PLACEMENT")  # tests/conftest.py sets it


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", "1")
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(params=[PYTORCH, ONNX])
def winner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way that wins each contest."""
    return plan(monkeypatch, request.param)


def plan(monkeypatch: pytest.MonkeyPatch, winner: str) -> str:
    """Lets one way win: the clock says that it takes less."""
    clocked = Contest._clocked

    def biased(self: Contest, name: str, *args: Any) -> tuple[object, float]:
        result, milliseconds = clocked(self, name, *args)
        return result, milliseconds * 1e-6 + (1.0 if name == winner else 1.3)

    monkeypatch.setattr(Contest, "_clocked", biased)
    return winner


class Net(nn.Module):
    """Layers whose gradients are one kernel each, dropout, and statistics that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x)).relu().mean((2, 3))
        return torch.log_softmax(self.layers(x), -1)


def steps(model: nn.Module, run: Callable[..., Any], images: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, image in enumerate(images):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = run(image).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.detach()
        yield torch.rand(1)  # the generator is where it is in eager


def test_training_is_eagers_during_the_contest_and_after(winner: str) -> None:
    expected, actual = Net(), Net()
    actual.load_state_dict(expected.state_dict())
    images = [torch.randn(2, 3, 8, 8) for _ in range(8)]
    run = torch.compile(actual, backend="onnxrt")
    for ours, eagers in zip(list(steps(actual, run, images)), list(steps(expected, expected, images)), strict=True):
        torch.testing.assert_close(ours, eagers)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, msg=name)
    assert counted(f"contest_won {winner}") == 2, dict(counters["dynamo_backends"])


def test_the_first_step_is_pytorchs() -> None:
    model = Net()
    torch.compile(model, backend="onnxrt")(torch.randn(2, 3, 8, 8)).sum().backward()
    assert counted("nodes_on_onnx") == 0
    assert counted("nodes_in_pytorch") > 0


@pytest.mark.parametrize(
    "settings",
    [{"options": {"placement": "onnx"}}, {"options": {"fallback": "error"}}, {"options": {"verify_passes": True}}],
)
def test_all_on_onnx_runtime_where_that_is_asked_for(settings: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled(model, **settings)(torch.randn(2, 4)).sum().backward()
    assert counted("nodes_on_onnx") > 0


def test_inference_is_not_measured() -> None:
    assert_same_as_eager(lambda x: x.sin() + 1, torch.randn(3))
    assert counted("nodes_on_onnx") == 2


def test_a_graph_without_gradients_under_enabled_gradients() -> None:
    weight = nn.Parameter(torch.randn(4))
    assert_same_as_eager(lambda x: nn.functional.gelu(x) * (weight > 0), torch.randn(4), calls=3)
    assert counted("nodes_on_onnx") > 0


def test_outcomes_are_kept_and_seen_in_the_dump(cache: Path, winner: str) -> None:
    model, image = Net(), torch.randn(2, 3, 8, 8)
    run = torch.compile(model, backend="onnxrt")
    for _ in range(6):
        run(image).sum().backward()
    torch._dynamo.reset()
    counters.clear()
    again = torch.compile(model, backend="onnxrt")
    for _ in range(3):
        again(image).sum().backward()
    assert counted(f"contest_won {winner}") == 0
    assert (counted("nodes_on_onnx") > 0) == (winner == ONNX)
    torch._dynamo.reset()
    torch.compile(model, backend="onnx_debug", options={"dump_dir": str(cache / "dump")})(image).sum().backward()
    graphs = json.loads((cache / "dump" / "latest" / "manifest.json").read_text())["graphs"]
    assert [graph["direction"] for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        assert graph["verdict"].startswith("ok"), graph["verdict"]
        assert (graph["share_on_onnx"] > 0) == (winner == ONNX)
        if winner == PYTORCH:
            reason = graph["in_pytorch"][0]["reason"]
            assert reason.startswith(f"the graph is fastest by {PYTORCH}: {PYTORCH} ") and f"ms; {ONNX} " in reason


def test_a_transformer_trains(winner: str) -> None:
    config = tf.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = tf.BertForMaskedLM(config)
    batch = {"input_ids": torch.randint(50, (2, 8)), "labels": torch.randint(50, (2, 8))}
    other = copy.deepcopy(model)
    run = torch.compile(other, backend="onnxrt")
    for i in range(7):
        torch.manual_seed(i)
        expected = model(**batch).loss
        expected.backward()
        torch.manual_seed(i)
        actual = run(**batch).loss
        actual.backward()
        torch.testing.assert_close(actual, expected)
    for (name, theirs), ours in zip(model.named_parameters(), other.parameters(), strict=True):
        # sums of seven steps, each rounded in another order
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=1e-4, atol=1e-5)


def test_sizes_that_change(winner: str) -> None:
    function = torch.compile(lambda x, w: nn.functional.gelu(x @ w).square().sum(), backend="onnxrt", dynamic=True)
    for rows in (3, 4, 5, 6, 7, 8, 3):
        x, w = torch.randn(rows, 4), torch.randn(4, 4, requires_grad=True)
        other = w.detach().clone().requires_grad_()
        function(x, w).backward()
        nn.functional.gelu(x @ other).square().sum().backward()
        torch.testing.assert_close(w.grad, other.grad)


def test_threads_that_call_during_the_contest(winner: str) -> None:
    function = torch.compile(lambda x: (x.sin() * x).sum(), backend="onnxrt")
    wrong = []

    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            x = torch.randn(40, generator=generator, requires_grad=True)
            function(x).backward()
            expected = (x.cos() * x + x.sin()).detach()
            # a float32 sum of two terms near 1, of which each rounds by 6e-8
            if not torch.allclose(x.grad, expected, atol=1e-6):  # type: ignore[arg-type]
                wrong.append(seed)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_candidates_are_built_while_no_other_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """FX traces for one thread at a time, and a thread that calls a compiled function is not to be told off."""
    was_free: list[bool] = []
    compile_with_inductor = inductor.compile_with_inductor

    def watched(module: fx.GraphModule, direction: str) -> Any:
        def look() -> None:
            was_free.append(compile_lock.acquire(blocking=False))
            if was_free[-1]:
                compile_lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.compiler.is_compiling()
        return compile_with_inductor(module, direction)

    monkeypatch.setattr(inductor, "compile_with_inductor", watched)
    function = torch.compile(lambda x: x.sin() * x, backend="onnxrt", mode="max-autotune")
    for _ in range(3):
        function(torch.ones(4))
    assert was_free == [False]
    assert counted(f"contest_out {INDUCTOR}") == 0


# max-autotune


@pytest.mark.parametrize("train", [False, True])
def test_max_autotune_with_each_winner(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference and training, by each of the three ways, with weights that change and a generator that moves on."""
    for winner in (PYTORCH, ONNX, INDUCTOR):
        torch._dynamo.reset()
        counters.clear()
        with monkeypatch.context() as patch:
            plan(patch, winner)
            expected, actual = Net().train(train), Net().train(train)
            actual.load_state_dict(expected.state_dict())
            images = [torch.randn(2, 3, 8, 8) for _ in range(7)]
            run = torch.compile(actual, backend="onnxrt", mode="max-autotune")
            if train:
                for ours, eagers in zip(
                    list(steps(actual, run, images)), list(steps(expected, expected, images)), strict=True
                ):
                    # weights after up to seven steps, each rounded in another order
                    torch.testing.assert_close(ours, eagers, rtol=1e-4, atol=1e-5)
            else:
                for image in images:
                    with torch.no_grad():
                        torch.testing.assert_close(run(image), expected(image))
                        for model in (expected, actual):
                            model.convolution.weight.mul_(1.1)
            assert counted(f"contest_won {winner}") == (2 if train else 1), dict(counters["dynamo_backends"])


def test_arguments_that_are_written_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, ONNX)

    def function(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    state = torch.zeros(4)
    run = torch.compile(function, backend="onnxrt", mode="max-autotune")
    for i in range(1, 9):
        assert run(state, torch.ones(4)).tolist() == [2.0 * i] * 4
        assert state.tolist() == [float(i)] * 4
    assert counted(f"contest_won {ONNX}") == 1


def test_the_mode_is_the_option() -> None:
    assert parse_options(mode="max-autotune").placement == "fastest"
    assert parse_options(mode="max-autotune-no-cudagraphs").placement == "fastest"
    assert parse_options(mode="default").placement == parse_options().placement == "measured"
    assert (parse_options().spin, parse_options(mode="reduce-overhead").spin) == (1, 20)
    for wrong in (-1, 1001, 0.5, True):
        with pytest.raises(ValueError, match="option 'spin': expected"):
            parse_options({"spin": wrong})
    with pytest.raises(ValueError, match="expected one of 'measured', 'onnx', 'fastest'"):
        parse_options({"placement": "gpu"})


def test_reduce_overhead_runs() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: x.sin() @ x, backend="onnxrt", mode="reduce-overhead")
    x = torch.randn(4, 4)
    torch.testing.assert_close(function(x), x.sin() @ x)


NORMALIZED = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)), (6, 4)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU()), (2, 3, 6, 6)),
    "batches": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), (2, 3, 6, 6)),
    "images": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU()), (2, 3, 6, 6)),
}


@pytest.mark.parametrize(
    ("of", "dtype", "mode"),
    [
        ("layers", torch.bfloat16, "max-autotune"),
        ("groups", torch.float16, "default"),
        ("batches", torch.bfloat16, "default"),
        ("images", torch.float16, "default"),
    ],
)
def test_normalizations_under_autocast_run_by_each_way(
    of: str, dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Their statistics are float32, which PyTorch's fake tensors deny; a backward reads those of any forward."""
    plan(monkeypatch, ONNX)
    make, shape = NORMALIZED[of]
    expected = make()
    actual = copy.deepcopy(expected)
    run = torch.compile(actual, backend="onnxrt", mode=mode)
    for _ in range(4):
        x = torch.randn(shape)
        for model, call in ((expected, expected), (actual, run)):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                call(x).float().square().mean().backward()
        for (name, theirs), ours in zip(expected.named_parameters(), actual.parameters(), strict=True):
            largest = float(theirs.grad.abs().max())  # some are sums that cancel
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=0, atol=0.03 * largest + 1e-3)
    out = {way: counted(f"contest_out {way}") for way in (ONNX, INDUCTOR)}
    assert out == {ONNX: 0, INDUCTOR: 0}
    assert counted(f"contest_won {ONNX}") == 2
    assert "failed on this call" not in caplog.text


# The contest itself


def boxed(function: Callable[..., list[torch.Tensor]]) -> Callable[[list[object]], object]:
    def run(args: list[object]) -> object:
        given = list(args)
        args.clear()
        return function(*given)

    return run


def doubles(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 2]


def called(candidates: dict[str, Callable[..., Any]], calls: int = 6, **more: Any) -> list[Outcome]:
    """Outcomes of a contest whose reference is ``doubles``; each call must return what that returns."""
    outcomes: list[Outcome] = []
    ways = {name: (lambda function=function: boxed(function)) for name, function in candidates.items()}
    run = Contest(GraphName(0, "forward"), {"reference": lambda: boxed(doubles), **ways}, ended=outcomes.append, **more)
    for i in range(calls):
        args: list[object] = [torch.full((2000,), float(i))]
        [result] = run(args)  # type: ignore[misc]
        assert not args
        assert result.tolist() == [2.0 * i] * 2000
    return outcomes


def slow(x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(300):
        x.sin()
    return [x * 2]


def failing(x: torch.Tensor) -> list[torch.Tensor]:
    raise RuntimeError("no memory\nat all")


def test_a_slow_candidate_loses_at_once() -> None:
    [outcome] = called({"slow": slow}, calls=2)
    assert outcome.winner == "reference"
    assert outcome.milliseconds["slow"] > outcome.milliseconds["reference"] * contest._HOPELESS


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (failing, "it failed: RuntimeError: no memory"),
        (lambda x: [x * 2.01 + 0.001], "result 0 has other values"),
        (lambda x: [(x * 2).double()], "result 0 is torch.float64, not torch.float32"),
        (lambda x: [x * 2, x], "2 results, not 1"),
    ],
)
def test_what_fails_or_is_wrong_is_out(other: Callable[..., Any], why: str) -> None:
    [outcome] = called({"other": other})
    assert outcome.winner == "reference"
    assert why in outcome.out["other"]
    assert list(outcome.milliseconds) == ["reference"]
    assert why in str(outcome)


def test_a_session_that_fails_is_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch does not help a candidate out, and nobody is warned of what may never be used."""

    def fail(self: BoundSession, args: object) -> object:
        raise SessionError("not today")

    monkeypatch.setattr(BoundSession, "__call__", fail)
    layer = torch.nn.Linear(4, 4)
    function = compiled(lambda x: torch.sort(layer(x), stable=True).values.tanh(), options={"placement": "measured"})
    for _ in range(6):
        function(torch.randn(2, 4)).sum().backward()
    assert counted("contest_out ONNX Runtime") == 2  # forward and backward
    assert counted("runtime_failures") == 0
    assert "run in PyTorch" not in caplog.text and "not today" not in caplog.text


def test_what_cannot_be_built_is_out() -> None:
    def build() -> Any:
        raise ImportError("no compiler")

    outcomes: list[Outcome] = []
    run = Contest(GraphName(0), {"reference": lambda: boxed(doubles), "other": build}, ended=outcomes.append)
    for _ in range(2):
        run([torch.ones(2)])
    assert outcomes[0].out == {"other": "it cannot be compiled: ImportError: no compiler"}


def test_a_candidate_is_compared_although_the_reference_failed_at_first() -> None:
    failures = [True]

    def reference(x: torch.Tensor) -> list[torch.Tensor]:
        if len(x) == 1 and failures:
            failures.clear()
            raise ValueError("one element")
        return doubles(x)

    outcomes: list[Outcome] = []
    ways = {"reference": lambda: boxed(reference), "other": lambda: boxed(lambda x: [x * 3])}
    run = Contest(GraphName(0), ways, ended=outcomes.append)
    run([torch.ones(2)])
    with pytest.raises(ValueError, match="one element"):
        run([torch.ones(1)])
    run([torch.ones(2)])
    assert "other values" in outcomes[0].out["other"]


def test_what_is_written_is_compared() -> None:
    def adds(by: float) -> Callable[..., list[torch.Tensor]]:
        return lambda state, x: [state.copy_(state + by), x * 2][1:]

    outcomes: list[Outcome] = []
    ways = {"reference": lambda: boxed(adds(1)), "wrong": lambda: boxed(adds(2)), "right": lambda: boxed(adds(1))}
    run = Contest(GraphName(0), ways, written=[0], ended=outcomes.append)
    for i in range(6):
        state = torch.full((3,), float(i))
        run([state, torch.ones(3)])
        assert state.tolist() == [i + 1.0] * 3
    assert outcomes[0].out == {"wrong": "it computes something else: result 1 has other values"}


@pytest.mark.parametrize(
    "value",
    [torch.eye(3).to_sparse(), torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e5m2)],
)
def test_results_of_every_kind_are_compared(value: torch.Tensor) -> None:
    outcomes: list[Outcome] = []
    right, wrong = boxed(lambda x: [value.clone()]), boxed(lambda x: [(value.to(torch.float32) * 2).to(value.dtype)])
    ways = {"reference": lambda: right, "right": lambda: right, "wrong": lambda: wrong}
    run = Contest(GraphName(0), ways, ended=outcomes.append)
    for _ in range(6):
        run([torch.ones(1)])
    assert outcomes[0].out == {"wrong": "it computes something else: result 0 has other values"}


def test_a_reference_that_could_not_be_built_is_tried_again() -> None:
    def build() -> Any:
        raise MemoryError("now")

    run = Contest(GraphName(0), {"reference": build, "other": lambda: boxed(doubles)})
    for _ in range(2):
        with pytest.raises(MemoryError, match="now"):
            run([torch.ones(2)])


def test_sparse_gradients() -> None:
    layer = nn.Embedding(10, 4, sparse=True)
    run = torch.compile(lambda rows: nn.functional.gelu(layer(rows)).sum(), backend="onnxrt")
    for i in range(6):
        layer.weight.grad = None
        rows = torch.tensor([i, 1, 1])
        run(rows).backward()
        actual = layer.weight.grad.to_dense()  # type: ignore[attr-defined]
        layer.weight.grad = None
        nn.functional.gelu(layer(rows)).sum().backward()
        torch.testing.assert_close(actual, layer.weight.grad.to_dense())  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{}, {"mode": "max-autotune"}])
def test_operators_of_other_libraries_run_once_a_call(settings: dict[str, Any]) -> None:
    called = []
    with torch.library._scoped_library("test_placing", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", lambda x: (called.append(1), x * torch.rand(4))[1], "CPU")
        library.impl("counted", torch.empty_like, "Meta")
        operator = torch.ops.test_placing.counted
        with torch.no_grad():
            run = torch.compile(lambda x: operator(x.sin()).cos(), backend="onnxrt", **settings)
            for i in range(7):
                torch.manual_seed(i)
                actual = run(torch.ones(4))
                torch.manual_seed(i)
                torch.testing.assert_close(actual, operator(torch.ones(4).sin()).cos())
                assert len(called) == 2 * (i + 1)


def test_forward_mode_after_inductor_won(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, INDUCTOR)
    run = torch.compile(lambda x: x.sin() * x, backend="onnxrt", mode="max-autotune")
    x = torch.randn(4)
    for _ in range(6):
        run(x)
    assert counted(f"contest_won {INDUCTOR}") == 1
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones(4)))).tangent
    torch.testing.assert_close(tangent, x.cos() * x + x.sin())


def test_an_outcome_whose_compiler_is_gone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)

    def called_often() -> None:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(lambda x: x.sin() * x, backend="onnxrt", mode="max-autotune")
        for _ in range(6):
            torch.testing.assert_close(run(x), x.sin() * x)

    def broken(*args: object) -> object:
        raise RuntimeError("no C++ compiler")

    with monkeypatch.context() as patch:
        plan(patch, INDUCTOR)
        called_often()
        assert counted(f"contest_won {INDUCTOR}") == 1
        called_often()
        assert counted(f"contest_won {INDUCTOR}") == 0
    monkeypatch.setattr(inductor, "compile_with_inductor", broken)
    called_often()
    assert counted(f"contest_out {INDUCTOR}") == 1
    assert counted(f"contest_won {PYTORCH}") + counted(f"contest_won {ONNX}") == 1


@pytest.mark.parametrize(
    "header",
    [
        [],
        None,
        3,
        {},
        {"winner": "PyTorch", "milliseconds": None, "out": {}},
        {"winner": [], "milliseconds": {}, "out": 1},
    ],
)
def test_a_record_that_is_no_outcome(cache: Path, header: Any) -> None:
    kept = CachedGraphs(parse_options({"cache_dir": str(cache)}))
    key = kept._key_of_outcome("frame", "forward", [PYTORCH, ONNX])
    assert key is not None
    kept._store.put(key, Record(header))
    assert kept.outcome("frame", "forward", [PYTORCH, ONNX]) is None
    assert kept._store.get(key) is None


def test_no_clock_decides_where_results_must_be_the_same_each_time() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        run = torch.compile(lambda x: (x.sin() * x).sum(), backend="onnxrt")
        for _ in range(7):
            run(torch.ones(4, requires_grad=True)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [name for name in counters["dynamo_backends"] if "contest" in name]


def test_the_references_own_error_is_the_callers() -> None:
    run = Contest(GraphName(0), {"reference": lambda: boxed(failing), "other": lambda: boxed(doubles)})
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no memory"):
            run([torch.ones(2)])


@pytest.mark.parametrize(
    ("milliseconds", "decided_in", "winner"),
    [(0.98, 5, "reference"), (0.95, 5, "other"), (0.5, 3, "other"), (1.3, 3, "reference"), (1.6, 2, "reference")],
)
def test_who_wins_and_when(milliseconds: float, decided_in: int, winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Contest._clocked

    def told(self: Contest, name: str, *args: Any) -> tuple[object, float]:
        return clocked(self, name, *args)[0], 1.0 if name == "reference" else milliseconds

    monkeypatch.setattr(Contest, "_clocked", told)
    assert called({"other": doubles}, calls=decided_in - 1) == []
    [outcome] = called({"other": doubles}, calls=decided_in)
    assert outcome == Outcome(winner, {"reference": 1.0, "other": milliseconds}, {})


@pytest.mark.parametrize(("rounded", "is_out"), [(0.5, False), (30.0, True)])
def test_float64_judges_what_differs_by_more_than_rounding_usually_grows_to(rounded: float, is_out: bool) -> None:
    """The reference is wrong by 1 %; the other by half of that, or by thirty times as much."""

    def exact(args: Sequence[Any], state: torch.Tensor | None) -> list[torch.Tensor]:
        assert state is None
        return [args[0].double() * 2 / 1.01]

    [outcome] = called({"other": lambda x: [x * 2 / 1.01 * (1 - 0.01 * rounded)]}, exact=exact)
    assert bool(outcome.out) == is_out


def test_other_strides_are_out_but_for_sizes_of_one() -> None:
    for shape, strides, is_out in (((3, 4), (1, 3), True), ((1, 4), (1, 1), False)):
        outcomes: list[Outcome] = []
        ways = {
            "reference": lambda: boxed(lambda x: [x * 2]),
            "other": lambda strides=strides: boxed(lambda x: [torch.empty_strided(x.shape, strides).copy_(x * 2)]),
        }
        run = Contest(GraphName(0), ways, ended=outcomes.append)
        for _ in range(6):
            run([torch.ones(shape)])
        assert bool(outcomes[0].out) == is_out


def test_other_threads_do_not_wait_for_a_compiler() -> None:
    is_compiling, may_go_on = threading.Event(), threading.Event()

    def build() -> Any:
        is_compiling.set()
        assert may_go_on.wait(30)
        return boxed(doubles)

    run = Contest(GraphName(0), {"reference": lambda: boxed(doubles), "other": build})
    run([torch.ones(2)])
    thread = threading.Thread(target=run, args=([torch.ones(2)],))
    thread.start()
    assert is_compiling.wait(30)
    assert run([torch.ones(2)])[0].tolist() == [2.0, 2.0]  # type: ignore[index]
    may_go_on.set()
    thread.join(30)
    assert not thread.is_alive()


def test_other_threads_wait_for_the_reference() -> None:
    is_compiling, may_go_on = threading.Event(), threading.Event()

    def build() -> Any:
        is_compiling.set()
        assert may_go_on.wait(30)
        return boxed(doubles)

    run = Contest(GraphName(0), {"reference": build})
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(run([torch.ones(2)]))) for _ in range(2)]
    threads[0].start()
    assert is_compiling.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # it has nothing to run yet
    may_go_on.set()
    for thread in threads:
        thread.join(30)
    assert [result[0].tolist() for result in results] == [[2.0, 2.0]] * 2


def test_inductor_is_not_tried_when_it_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing._budget, "left", 0.0)
    place = placing.Placing("", None)
    outcomes: list[Outcome] = []
    for direction in ("forward", "backward"):
        module = traced(lambda x: [x * 2], torch.ones(2))
        ways = {PYTORCH: lambda module: boxed(doubles), INDUCTOR: lambda module: boxed(doubles)}
        run = place.place(GraphName(0, direction), module, ways)
        assert isinstance(run, Contest)
        run._ended = outcomes.append
        for _ in range(6):
            run([torch.ones(2)])
    assert [list(outcome.out) for outcome in outcomes] == [[], [INDUCTOR]]


def test_a_reference_that_cannot_be_built_at_first_is_built_again() -> None:
    failures = [True]

    def build() -> Any:
        if failures:
            failures.clear()
            raise MemoryError("full")
        return boxed(doubles)

    run = Contest(GraphName(0), {"reference": build})
    with pytest.raises(MemoryError, match="full"):
        run([torch.ones(2)])
    assert run([torch.ones(2)])[0].tolist() == [2.0, 2.0]  # type: ignore[index]


def test_only_the_winner_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph, and what the others hold, are let go when a contest is over."""
    plan(monkeypatch, ONNX)
    module = traced(lambda x: [x.sin() * 2], torch.ones(3))

    class Made:
        def __call__(self, args: list[object]) -> object:
            return [args[0].sin() * 2]  # type: ignore[attr-defined]

    made: dict[str, Any] = {}

    def way(name: str) -> Callable[[fx.GraphModule], Any]:
        def make(module: fx.GraphModule) -> Any:
            runner = Made()
            made[name] = weakref.ref(runner)
            return runner

        return make

    run = placing.Placing("", None).place(
        GraphName(0, "forward"), module, {name: way(name) for name in (PYTORCH, ONNX)}
    )
    graph = weakref.ref(module)
    del module
    for _ in range(6):
        run([torch.ones(3)])
    gc.collect()
    assert counted(f"contest_won {ONNX}") == 1
    assert graph() is None
    assert made[PYTORCH]() is None
    assert made[ONNX]() is not None


def test_what_assumes_sizes_is_out_and_so_is_what_is_made_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, ONNX)
    module = make_fx(lambda x: [x * 2], tracing_mode="symbolic")(torch.ones(5))

    def assuming(module: fx.GraphModule) -> Any:
        [x] = module.graph.find_nodes(op="placeholder")
        assert x.meta["val"].shape[0] == 5  # guards
        return boxed(doubles)

    ways = {PYTORCH: lambda module: boxed(doubles), ONNX: assuming, INDUCTOR: lambda module: boxed(doubles)}
    outcomes: list[Outcome] = []
    monkeypatch.setattr(placing.Placing, "known", lambda *_: None)
    place = placing.Placing("", None)
    run = place.place(GraphName(0, "forward"), module, ways)
    backward = place.place(GraphName(0, "backward"), module, ways)
    assert isinstance(run, Contest)
    run._ended = outcomes.append
    for size in (5, 5, 6, 7):
        assert run([torch.ones(size)])[0].tolist() == [2.0] * size  # type: ignore[index]
    why = "it cannot be compiled: it would hold for some sizes only"
    assert outcomes[0].out == {ONNX: why, INDUCTOR: why}
    assert backward([torch.ones(4)])[0].tolist() == [2.0] * 4  # type: ignore[index]


def test_what_tells_frames_apart() -> None:
    def captured(scale: float) -> fx.GraphModule:
        inner = fx.symbolic_trace(lambda x: x * scale)
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_module("inner", (x,)))
        return fx.GraphModule({"inner": inner}, graph)

    module, image = captured(2.0), torch.ones(2, 3, 4, 4)
    described = placing.describe_frame(module, [image])
    assert described == placing.describe_frame(captured(2.0), [torch.zeros(2, 3, 4, 4)])
    others = [
        placing.describe_frame(captured(3.0), [image]),
        *(
            placing.describe_frame(module, [other])
            for other in (
                image.double(),
                image[:1],
                image.clone().requires_grad_(),
                image.to(memory_format=torch.channels_last),
                image.to("meta"),
                2,
            )
        ),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        others.append(placing.describe_frame(module, [image]))
    with torch.autocast("cpu", torch.float16):
        others.append(placing.describe_frame(module, [image]))
    assert len({described, *others}) == 1 + len(others)


@torch.library.custom_op("dynamo_backends_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_operator_that_draws_and_does_not_say_so(winner: str) -> None:
    run = torch.compile(lambda x, w: noisy(x.detach()) * w, backend="onnxrt")
    x, w = torch.ones(4), torch.ones(4, requires_grad=True)
    torch.manual_seed(0)
    actual = [run(x, w) for _ in range(7)]
    torch.manual_seed(0)
    for ours in actual:
        torch.testing.assert_close(ours, noisy(x) * w)


IMPORTS = """
import json, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
torch.compile(model, backend="onnxrt")(torch.randn(2, 8)).sum().backward()
assert model[0].weight.grad is not None
heavy = ("onnx", "onnx_ir", "onnxscript", "passes.catalog", "dynamo_backends.compiling", "torch._inductor.compile_fx")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def test_the_first_step_imports_nothing_of_onnx(cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


# What a graph must be for a contest


def traced(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_what_may_run_twice() -> None:
    x = torch.ones(3)
    assert placing.may_run_twice(traced(lambda x: x + torch.rand(3), x))
    assert placing._draws(traced(lambda x: x + torch.rand(3), x))
    assert not placing._draws(traced(lambda x: x + 1, x))
    assert not placing.may_run_twice(traced(lambda x: (x + 1, torch.rand(3, device="meta")), x))
    asserting = traced(lambda x: (torch.ops.aten._assert_async.msg(x.sum() > 0, "no"), x + 1)[1], x)
    assert not placing.may_run_twice(asserting)


def test_what_is_written() -> None:
    x = torch.ones(3)
    assert placing.written_arguments(traced(lambda x, y: y.copy_(x + 1), x, x.clone())) == [1]
    assert placing.written_arguments(traced(lambda x: x + 1, x)) == []
    assert placing.written_arguments(traced(lambda x: (x + 1).add_(2), x)) is None


# Decomposing a graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.gelu_backward(x, x.sin()),
        lambda x: aten.native_layer_norm_backward(
            x, x, [4], x.mean(-1, True), x.mean(-1, True), x[0], x[1], [True] * 3
        ),
        lambda x: aten.native_dropout(x, 0.0, True),
        lambda x: aten._softmax_backward_data(x, x.softmax(-1), -1, torch.float32),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_a_decomposed_graph_computes_the_same(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    module = traced(function, x)
    table = decomposition_table()
    whole = [node.target for node in module.graph.nodes if node.target in table]
    expected = torch.utils._pytree.tree_leaves(module(x))
    assert decompose(module, table) == len(whole)
    module.graph.lint()
    assert not [node for node in module.graph.nodes if node.target in table]
    assert all("val" in node.meta for node in module.graph.nodes if node.op == "call_function")
    for ours, theirs in zip(torch.utils._pytree.tree_leaves(module(x)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_decomposition_into_itself_is_none() -> None:
    module = traced(lambda x: aten.gelu_backward(x, x), torch.ones(3))
    assert decompose(module, {aten.gelu_backward.default: lambda *args, **kwargs: NotImplemented}) == 0
    assert [node.target for node in module.graph.find_nodes(op="call_function", target=aten.gelu_backward.default)]


def test_each_layout_is_decomposed_for_itself() -> None:
    """Alike but for their strides: the results lie as those of each do."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns = x.sin().t()
        return aten.gelu_backward(x, x), aten.gelu_backward(columns, columns)

    module = traced(function, torch.randn(4, 4))
    assert decompose(module, decomposition_table()) == 2
    results = module.graph.output_node().args[0]
    assert [node.meta["val"].stride() for node in results] == [(4, 1), (1, 4)]  # type: ignore[union-attr]


# fallback="inductor"


def partly(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """ONNX has no complex numbers: what is between the products runs in PyTorch."""
    z = torch.view_as_complex((x @ y).reshape(-1, 2))
    power = torch.view_as_real(z * z.conj() + z).reshape(x.shape)
    values, order = torch.sort(power * 2, -1)
    return values @ y, order, power


def test_inductor_compiles_what_onnx_runtime_cannot_run() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    settings = {"options": {"fallback": "inductor"}}
    assert_same_as_eager(partly, x, y, calls=2, settings=settings)
    assert counted("nodes_by_inductor") > 1
    assert counted("nodes_on_onnx") > 0
    assert_same_as_eager(
        partly, x.requires_grad_(), y, settings={"options": {**settings["options"], "placement": "onnx"}}
    )


def test_random_numbers_beside_what_inductor_compiles() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.sort(x.sin(), -1)
        return torch.cummax(values * torch.rand_like(x), -1)[0] + torch.rand(4)

    assert_same_as_eager(function, torch.randn(4, 4), calls=2, settings={"options": {"fallback": "inductor"}})


def test_what_inductor_cannot_compile_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def broken(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", broken)
    assert_same_as_eager(partly, torch.randn(4, 4), torch.randn(4, 4), settings={"options": {"fallback": "inductor"}})
    assert counted("inductor_failures") > 0
