"""Placement by time: which engines are tried, which may be chosen, and that results stay eager's."""

from __future__ import annotations

import copy
import functools
import gc
import json
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.utils.checkpoint
import transformers as tf
from conftest import assert_same_as_eager, compiled, counted
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends import decomposition_table
from dynamo_backends.cache.graphs import CachedGraphs
from dynamo_backends.cli import main
from dynamo_backends.errors import Kind, Reason, SessionError
from dynamo_backends.exporter.decompose import decompose
from dynamo_backends.graphs import inductor
from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.numerics.whole_graph import ResultCheck, difference_of_results, sampled
from dynamo_backends.options import parse_options
from dynamo_backends.placement import autotuner, engines
from dynamo_backends.placement.autotuner import Autotuner, TunedGraph
from dynamo_backends.placement.engines import INDUCTOR, ONNX, PYTORCH, Placement
from dynamo_backends.placement.search import Search
from dynamo_backends.runtime.session import Session

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMO_BACKENDS_PLACEMENT")  # tests/conftest.py sets it


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", "1")
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


SETTLED = 26
"""Calls after which any search is over."""


@pytest.fixture(params=[PYTORCH, ONNX])
def winner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that wins each search."""
    return plan(monkeypatch, request.param)


def plan(monkeypatch: pytest.MonkeyPatch, winner: str) -> str:
    """Makes one engine win: the clock returns a shorter time for it."""
    ran = Search.ran

    def biased(self: Search, graph: int, milliseconds: float, elements: int = 1) -> None:
        ran(self, graph, 20.0 if self.engine == winner else 29.0, elements)

    monkeypatch.setattr(Search, "ran", biased)
    return winner


def settled_on(engine: str, *directions: str) -> bool:
    """Whether a search for each of these graphs chose the engine since the test began."""
    return all(counted(f"autotuned {direction} {engine}") == 1 for direction in directions)


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


def test_training_is_eagers_while_engines_are_tried_and_after(winner: str) -> None:
    expected, actual = Net(), Net()
    actual.load_state_dict(expected.state_dict())
    images = [torch.randn(2, 3, 8, 8) for _ in range(SETTLED)]
    run = torch.compile(actual, backend="onnxrt")
    for ours, eagers in zip(list(steps(actual, run, images)), list(steps(expected, expected, images)), strict=True):
        # weights after many steps, each rounded in another order
        torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-5)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, msg=name, rtol=1e-3, atol=1e-5)
    assert settled_on(winner, "forward", "backward"), dict(counters["dynamo_backends"])


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


def test_outcomes_are_kept(cache: Path, winner: str) -> None:
    model, image = Net(), torch.randn(2, 3, 8, 8)

    def train(steps: int) -> None:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(model, backend="onnxrt")
        for _ in range(steps):
            run(image).sum().backward()

    train(SETTLED)
    assert settled_on(winner, "forward", "backward")
    train(2)
    assert not settled_on(winner, "forward")
    assert (counted("nodes_on_onnx") > 0) == (winner == ONNX)
    assert main(["cache", "--clear"]) == 0
    train(SETTLED)
    assert settled_on(winner, "forward", "backward")


def test_a_search_waits_until_the_job_is_long_enough(
    cache: Path, winner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch runs a short job, and warns of forwards without a backward all the same."""
    monkeypatch.setenv("DYNAMO_BACKENDS_AUTOTUNE_BUDGET", "5")
    clock, passed = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])
    budget = autotuner.Budget()
    for module in (autotuner, engines):
        monkeypatch.setattr(module, "BUDGET", budget)
    model, image = Net(), torch.randn(2, 3, 8, 8)

    def train(steps: int) -> None:
        for _ in range(steps):
            run(image).sum().backward()

    run = torch.compile(model, backend="onnxrt")
    train(SETTLED)
    assert counted("nodes_on_onnx") == counted("autotuning_calls") == 0
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for _ in range(2 * SETTLED):
            run(image)
    assert "torch.no_grad()" in caplog.text
    passed[0] += 1e6
    train(SETTLED)
    assert settled_on(winner, "forward", "backward")

    torch._dynamo.reset()
    counters.clear()
    passed[0] -= 1e6
    run = torch.compile(model, backend="onnxrt")
    train(2)
    assert (counted("nodes_on_onnx") > 0) == (winner == ONNX)  # what is known needs no search


def test_an_outcome_serves_some_processes_and_is_found_again(tmp_path: Path) -> None:
    kept = CachedGraphs(parse_options({"cache_dir": str(tmp_path)}))

    def tuner() -> Autotuner:
        return Autotuner([PYTORCH, ONNX], ["inference"], cache=kept, frame="frame")

    first = tuner()
    while not first.search.is_over:
        first.search.ran(0, 90 if first.engine(0) == ONNX else 100)
    served = 0
    while (later := tuner()).search.is_over:
        assert later.engine(0) == ONNX and later.search.milliseconds == {PYTORCH: 100, ONNX: 90}
        served += 1
    assert 5 < served < 100


def test_forwards_without_a_backward(cache: Path, winner: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning names the remedy, the fastest engine runs them, and training is searched for as a whole."""
    model, image = Net(), torch.randn(2, 3, 8, 8)
    model.eval()
    run = torch.compile(model, backend="onnxrt")
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for _ in range(10 * SETTLED):
            result = run(image)
    torch.testing.assert_close(result, model(image))
    assert counted(f"autotuned forward-only {winner}") == 1
    [warning] = [record.getMessage() for record in caplog.records]
    assert "torch.no_grad()" in warning and "torch.inference_mode()" in warning
    result.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model(image).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    assert not settled_on(winner, "forward")

    torch._dynamo.reset()
    counters.clear()
    run = torch.compile(model, backend="onnxrt")
    run(image).sum().backward()
    assert not counted("nodes_on_onnx")  # the next process knows nothing of it
    for _ in range(SETTLED):
        run(image).sum().backward()
    assert settled_on(winner, "forward", "backward")


def test_training_after_forwards_without_a_backward(winner: str) -> None:
    expected, actual = Net(), Net()
    actual.load_state_dict(expected.state_dict())
    images = [torch.randn(2, 3, 8, 8) for _ in range(SETTLED)]
    run = torch.compile(actual, backend="onnxrt")
    for image in images * 10:
        run(image)
    assert counted(f"autotuned forward-only {winner}") == 1
    actual.load_state_dict(expected.state_dict())
    for ours, eagers in zip(list(steps(actual, run, images)), list(steps(expected, expected, images)), strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-5)
    assert settled_on(winner, "forward", "backward")


def test_onnx_debug_shows_what_would_run_on_onnx_runtime(cache: Path, winner: str) -> None:
    model, image = Net(), torch.randn(2, 3, 8, 8)
    run = torch.compile(model, backend="onnxrt")
    for _ in range(SETTLED):
        run(image).sum().backward()
    torch._dynamo.reset()
    torch.compile(model, backend="onnx_debug", options={"dump_dir": str(cache / "dump")})(image).sum().backward()
    graphs = json.loads((cache / "dump" / "latest" / "manifest.json").read_text())["graphs"]
    assert [graph["direction"] for graph in graphs] == ["forward", "backward"]
    assert all(graph["share_on_onnx"] > 0 for graph in graphs)


def test_a_transformer_trains(winner: str) -> None:
    config = tf.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = tf.BertForMaskedLM(config)
    batch = {"input_ids": torch.randint(50, (2, 8)), "labels": torch.randint(50, (2, 8))}
    other = copy.deepcopy(model)
    run = torch.compile(other, backend="onnxrt")
    for i in range(16):
        torch.manual_seed(i)
        expected = model(**batch).loss
        expected.backward()
        torch.manual_seed(i)
        actual = run(**batch).loss
        actual.backward()
        torch.testing.assert_close(actual, expected)
    for (name, theirs), ours in zip(model.named_parameters(), other.parameters(), strict=True):
        # sums of sixteen steps, each rounded in another order
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=1e-4, atol=1e-5)


def test_sizes_that_change(winner: str) -> None:
    function = torch.compile(lambda x, w: nn.functional.gelu(x @ w).square().sum(), backend="onnxrt", dynamic=True)
    for rows in range(3, 3 + SETTLED):
        x, w = torch.randn(rows, 4), torch.randn(4, 4, requires_grad=True)
        other = w.detach().clone().requires_grad_()
        function(x, w).backward()
        nn.functional.gelu(x @ other).square().sum().backward()
        torch.testing.assert_close(w.grad, other.grad)


def test_threads_that_call_while_engines_are_tried(winner: str) -> None:
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
    for _ in range(SETTLED * 3):
        function(torch.ones(4))
    assert was_free == [False]
    assert counted(f"autotune_rejected {INDUCTOR}") == 0


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
            images = [torch.randn(2, 3, 8, 8) for _ in range(SETTLED)]
            run = torch.compile(actual, backend="onnxrt", mode="max-autotune")
            if train:
                for ours, eagers in zip(
                    list(steps(actual, run, images)), list(steps(expected, expected, images)), strict=True
                ):
                    # weights after many steps, each rounded in another order
                    torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-5)
            else:
                for image in images:
                    with torch.no_grad():
                        torch.testing.assert_close(run(image), expected(image))
                        for model in (expected, actual):
                            model.convolution.weight.mul_(1.01)
            directions = ("forward", "backward") if train else ("inference",)
            assert settled_on(winner, *directions), dict(counters["dynamo_backends"])


def test_arguments_that_are_written_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, ONNX)

    def function(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2

    state = torch.zeros(4)
    run = torch.compile(function, backend="onnxrt", mode="max-autotune")
    for i in range(1, SETTLED):
        assert run(state, torch.ones(4)).tolist() == [2.0 * i] * 4
        assert state.tolist() == [float(i)] * 4
    assert settled_on(ONNX, "inference")


def test_a_written_argument_with_gaps_is_copied_with_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor checks strides, and results have those of arguments."""
    plan(monkeypatch, ONNX)

    def function(state: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.index_copy_(1, positions, x)
        return state.amax(1)

    state = torch.zeros(2, 8, 8)[..., :4]
    run = torch.compile(function, backend="onnxrt", mode="max-autotune")
    with torch.no_grad():
        for i in range(1, SETTLED):
            assert run(state, torch.tensor([3]), torch.full((2, 1, 4), float(i))).tolist() == [[float(i)] * 4] * 2
    assert counted(f"autotune_rejected {ONNX}") == counted(f"autotune_rejected {INDUCTOR}") == 0
    assert settled_on(ONNX, "inference")


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


def test_gradients_of_leaves_alone_while_engines_are_tried(winner: str) -> None:
    """``autograd.grad`` runs no node that accumulates."""
    model = Net()
    run = torch.compile(model, backend="onnxrt")
    for _ in range(SETTLED):
        image = torch.randn(2, 3, 8, 8)
        torch.manual_seed(0)
        gradients = torch.autograd.grad(run(image).sum(), list(model.parameters()))
        torch.manual_seed(0)
        expected = torch.autograd.grad(model(image).sum(), list(model.parameters()))
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)
    assert settled_on(winner, "forward", "backward")


def test_a_checkpoint_around_a_compiled_model(winner: str) -> None:
    """Its forward runs again in the backward, and must save what it saved before."""
    model = nn.Linear(8, 8)
    run = torch.compile(model, backend="onnxrt")
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(4 * SETTLED):
        x.grad = None
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
        torch.testing.assert_close(x.grad, model.weight.sum(0).expand(4, 8))


def test_a_checkpoint_with_dropout_inside(winner: str) -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(lambda t: nn.functional.dropout(t * 3, 0.5), x, use_reentrant=False)

    run = torch.compile(dropped, backend="onnxrt")
    for _ in range(SETTLED):
        x = torch.ones(64, requires_grad=True)
        result = run(x)
        result.sum().backward()
        torch.testing.assert_close(x.grad, result.detach())  # the mask of the forward


def test_an_error_of_the_users_leaves_gradients_on(winner: str) -> None:
    table, layer = torch.randn(4, 8), nn.Linear(8, 8)

    def looked_up(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            row = table[i]
        return layer(x) + row

    run = torch.compile(looked_up, backend="onnxrt")
    for step in range(SETTLED):
        try:
            run(torch.randn(1, 8), torch.tensor([9 if step % 3 == 1 else 1])).sum().backward()
        except IndexError:
            assert step % 3 == 1
        assert torch.is_grad_enabled()


AZURE = "AzureExecutionProvider"
needs_second = pytest.mark.skipif(
    AZURE not in onnxruntime.get_available_providers(), reason="the installed ONNX Runtime has another second provider"
)


@needs_second
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("of", [ONNX, f"{ONNX} on CPUExecutionProvider"])
def test_each_provider_that_is_listed_is_an_engine(of: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, of)
    options = {"placement": "fastest", "providers": [AZURE, "CPUExecutionProvider"], "check_providers": False}
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    run = torch.compile(model, backend="onnxrt", options=options)
    with torch.set_grad_enabled(training):
        for _ in range(2 * SETTLED):
            x = torch.randn(3, 8)
            result = run(x)
            torch.testing.assert_close(result, model(x))
            if training:
                result.sum().backward()
    assert settled_on(of, *(["forward", "backward"] if training else ["inference"]))


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
    for _ in range(SETTLED):
        x = torch.randn(shape)
        for model, call in ((expected, expected), (actual, run)):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                call(x).float().square().mean().backward()
        for (name, theirs), ours in zip(expected.named_parameters(), actual.parameters(), strict=True):
            largest = float(theirs.grad.abs().max())  # some are sums that cancel
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name, rtol=0, atol=0.03 * largest + 1e-3)
    assert {engine: counted(f"autotune_rejected {engine}") for engine in (ONNX, INDUCTOR)} == {ONNX: 0, INDUCTOR: 0}
    assert settled_on(ONNX, "forward", "backward")
    assert "failed on this call" not in caplog.text


# The autotuner itself


def boxed(function: Callable[..., list[torch.Tensor]]) -> Callable[[list[object]], object]:
    def run(args: list[object]) -> object:
        given = list(args)
        args.clear()
        return function(*given)

    return run


def doubles(x: torch.Tensor) -> list[torch.Tensor]:
    return [x * 2]


def tuned(
    candidates: dict[str, Callable[[], Any]],
    function: Callable[..., Any] = lambda x: [x * 2],
    args: Sequence[torch.Tensor] = (torch.ones(3),),
    reference: Callable[..., Any] = doubles,
) -> tuple[TunedGraph, Autotuner]:
    """A tuned inference graph, and the function that builds the other engines."""
    tuner = Autotuner([PYTORCH, *candidates], ["inference"])
    return TunedGraph(GraphName(0, "inference"), traced(function, *args), boxed(reference), candidates, tuner), tuner


def called(candidates: dict[str, Callable[..., Any]]) -> Autotuner:
    """The autotuner after a search whose reference is ``doubles``; each call must return the reference's result."""
    run, tuner = tuned({name: (lambda function=function: boxed(function)) for name, function in candidates.items()})
    for i in range(4 * SETTLED):
        args: list[object] = [torch.full((2000,), float(i))]
        [result] = run(args)  # type: ignore[misc]
        assert not args
        assert result.tolist() == [2.0 * i] * 2000
    assert tuner.search.is_over
    return tuner


def slow(x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(300):
        x.sin()
    return [x * 2]


def failing(x: torch.Tensor) -> list[torch.Tensor]:
    raise RuntimeError("no memory\nat all")


def test_a_slow_engine_loses() -> None:
    search = called({"slow": slow}).search
    assert search.engine == PYTORCH
    assert search.milliseconds["slow"] > search.milliseconds[PYTORCH]


def fails_later() -> Callable[..., Any]:
    calls = [0]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        calls[0] += 1
        if calls[0] > 3:
            raise RuntimeError("a kernel failed")
        return [x * 2]

    return run


@pytest.mark.parametrize(
    "other", [failing, lambda x: [x * 2.01 + 0.001], lambda x: [(x * 2).double()], lambda x: [x * 2, x], fails_later()]
)
def test_what_fails_or_is_wrong_is_rejected(other: Callable[..., Any]) -> None:
    tuner = called({"other": other})
    assert tuner.search.engine == PYTORCH
    assert list(tuner.rejected) == ["other"]
    assert list(tuner.search.milliseconds) == [PYTORCH] or not tuner.search.milliseconds
    assert counted("autotune_rejected other") == 1


def test_a_session_that_fails_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch does not help an engine out that is only tried."""

    def fail(self: Session, args: object) -> object:
        raise SessionError("not today")

    monkeypatch.setattr(Session, "__call__", fail)
    layer = torch.nn.Linear(4, 4)
    function = compiled(lambda x: torch.sort(layer(x), stable=True).values.tanh(), options={"placement": "measured"})
    for _ in range(3 * SETTLED):
        function(torch.randn(2, 4)).sum().backward()
    assert counted(f"autotune_rejected {ONNX}") == 1  # for the frame
    assert counted("runtime_failures") == 0
    assert settled_on(PYTORCH, "forward", "backward")


def test_an_engine_that_is_built_again_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner is another one, as is what a compile of it may do."""
    ran = Search.ran
    monkeypatch.setattr(Search, "ran", lambda search, graph, milliseconds, elements=1: ran(search, graph, 20.0))
    monkeypatch.setattr(autotuner, "_SEARCH_AGAIN_AFTER", 5)
    functions = iter([doubles, lambda x: [x * 3]])
    run, tuner = tuned({"other": lambda: boxed(next(functions))})
    for _ in range(4 * SETTLED):
        [result] = run([torch.ones(3)])  # type: ignore[misc]
        assert result.tolist() == [2.0] * 3
    assert next(functions, None) is None
    assert list(tuner.rejected) == ["other"]


def test_what_cannot_be_built_is_rejected() -> None:
    def build() -> Any:
        raise ImportError("no compiler")

    run, tuner = tuned({"other": build})
    for _ in range(3 * SETTLED):
        run([torch.ones(2)])
    assert "no compiler" in tuner.rejected["other"] and tuner.search.is_over


INDEXED = (lambda x, i: [x[i] * 2], (torch.ones(3), torch.tensor([0])), lambda x, i: [x[i] * 2])


def test_an_engine_is_compared_although_the_first_call_was_an_error_of_the_users() -> None:
    """What is never compared with PyTorch's results runs no call."""

    run, tuner = tuned({"wrong": lambda: boxed(lambda x, i: [x[i] * 3])}, *INDEXED)
    errors = 0
    for i in range(4 * SETTLED):
        index = torch.tensor([9 if i in (20, 21, 22) else 1])
        try:
            assert run([torch.ones(3), index])[0].tolist() == [2.0]  # type: ignore[index]
        except IndexError:
            errors += 1
    assert errors == 3
    assert tuner.search.is_over and list(tuner.rejected) == ["wrong"]


def test_an_error_of_the_users_in_the_call_that_settles() -> None:
    run, tuner = tuned({"other": lambda: boxed(lambda x, i: [x[i] * 2])}, *INDEXED)
    tuner.search = Search([PYTORCH, "other"], 1, known={PYTORCH: 1.0, "other": 2.0})
    with pytest.raises(IndexError):
        run([torch.ones(3), torch.tensor([9])])
    assert counted("internal_failures") == 0 and not tuner.rejected


def test_a_comparison_that_fails_leaves_the_graph_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> str:
        raise MemoryError("full")

    monkeypatch.setattr(autotuner, "difference_of_results", fails)
    run, tuner = tuned({"wrong": lambda: boxed(lambda x: [x * 3])})
    for _ in range(2 * SETTLED):
        assert run([torch.ones(2)])[0].tolist() == [2.0, 2.0]  # type: ignore[index]
    assert counted("internal_failures") == 1
    assert tuner.search.is_over and tuner.search.engine == PYTORCH


class Counted(torch.autograd.Function):
    """A backward that counts its calls in a tensor, or draws a random number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, count)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, count = ctx.saved_tensors
        count.add_(1)
        return torch.tanh(gradient * x) + torch.rand_like(x), None


def test_a_backward_that_writes_and_draws_runs_once_a_step(winner: str) -> None:
    count = torch.zeros(())
    run = torch.compile(lambda x: Counted.apply(x, count).sum(), backend="onnxrt")  # type: ignore[no-untyped-call]
    for i in range(SETTLED):
        torch.manual_seed(i)
        x = torch.ones(4, requires_grad=True)
        run(x).backward()
        torch.manual_seed(i)
        torch.testing.assert_close(x.grad, torch.ones(4).tanh() + torch.rand(4))
    assert count.item() == SETTLED


def test_results_that_cannot_be_read_reject_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends, also if it is PyTorch's."""

    def fails(results: object) -> Any:
        raise RuntimeError("what is this?")

    monkeypatch.setattr(autotuner, "sampled", fails)
    tuner = called({"other": doubles})
    assert list(tuner.rejected) == ["other"] and tuner.search.engine == PYTORCH


def test_what_is_written_is_compared() -> None:
    def adds(by: float) -> Callable[..., Any]:
        return lambda state, x: [state.copy_(state + by), x * 2][1:]

    run, tuner = tuned(
        {"wrong": lambda: boxed(adds(2)), "right": lambda: boxed(adds(1))},
        adds(1),
        (torch.ones(3), torch.ones(3)),
        adds(1),
    )
    for i in range(5 * SETTLED):
        state = torch.full((3,), float(i))
        run([state, torch.ones(3)])
        assert state.tolist() == [i + 1.0] * 3
    assert tuner.search.is_over
    assert list(tuner.rejected) == ["wrong"]


def test_what_a_failing_engine_wrote_and_drew_is_undone() -> None:
    calls = [0]

    def adds(fails_at: int, state: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        calls[0] += 1
        state.copy_(state + torch.rand(3))
        if calls[0] == fails_at:
            raise RuntimeError("after the write")
        return [x * 2]

    for fails_at in (1, 3):  # the call that is compared, and a timed one
        calls[0] = 0
        run, tuner = tuned(
            {"other": lambda fails_at=fails_at: boxed(functools.partial(adds, fails_at))},
            lambda state, x: [state.copy_(state + torch.rand(3)), x * 2][1:],
            (torch.ones(3), torch.ones(3)),
            lambda state, x: [state.copy_(state + torch.rand(3)), x * 2][1:],
        )
        for i in range(2 * SETTLED):
            torch.manual_seed(i)
            run([state := torch.zeros(3), torch.ones(3)])
            torch.manual_seed(i)
            assert state.tolist() == torch.rand(3).tolist()
        assert list(tuner.rejected) == ["other"]


@pytest.mark.parametrize(
    "value",
    [torch.eye(3).to_sparse(), torch.ones(3).to(torch.float8_e4m3fn), torch.randn(700, 800).t(), torch.ones(2**20)],
)
def test_results_of_every_kind_are_compared(value: torch.Tensor) -> None:
    wrong = (value.to(torch.float32) * 2).to(value.dtype)
    assert not is_different(value, value.clone())
    assert is_different(value, wrong)
    if value.layout is torch.strided and value.dim() == 2:
        assert is_different(value, value.contiguous())  # it lies otherwise in memory


def is_different(expected: torch.Tensor, actual: torch.Tensor, moved: torch.Tensor | None = None) -> bool:
    """Whether a result differs from one that another run of the graph, ``moved``, shows to be uncertain."""
    [sample] = sampled([expected])
    elements: torch.Tensor = sample.elements  # type: ignore[attr-defined]
    exact = elements.to_dense().double()
    check = ResultCheck({0: elements}, lambda seed: {0: exact if seed is None or moved is None else moved.double()})
    return bool(difference_of_results(sampled([expected]), sampled([actual]), lambda: check))


@pytest.mark.parametrize(("error", "is_wrong"), [(0.5, False), (100.0, True)])
def test_elements_that_are_nothing_but_rounding(error: float, is_wrong: bool) -> None:
    """Terms cancel: how far a rounding of the arguments moves the result tells how far another may be off."""
    cancelled = torch.tensor([1.0, 1.0, 0.0, 0.0])
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0]) + 1e-12 * cancelled
    moved, actual = expected + 1e-9 * cancelled, expected + error * 1e-9 * cancelled
    assert is_different(expected, actual, moved) == is_wrong
    assert is_different(expected, actual)


def test_results_that_are_nothing_but_rounding() -> None:
    """Any would be right, so none is told to be: PyTorch runs the graph."""
    assert is_different(torch.full((4,), 1e-12), torch.full((4,), 5e-10), torch.full((4,), 1e-9))


# The search


Cost = Callable[[str, int], float]
"""The milliseconds that an engine takes for a graph."""


def step(tuner: Autotuner, cost: Cost, forwards: int = 1) -> None:
    """A training step in which the forward, and then the backward, is called so often."""
    for graph in (0, 1):
        for _ in range(forwards):
            engine = tuner.engine(graph)  # which may begin another search
            tuner.search.ran(graph, cost(engine, graph))


def searched(cost: Cost, engines: str = "PO", forwards: int = 1) -> tuple[str, int]:
    """The fastest of these engines, and the number of steps until it is known."""
    tuner, steps = Autotuner(engines, ["forward", "backward"]), 0
    while not tuner.search.is_over:
        step(tuner, cost, forwards)
        steps += 1
        assert steps < 200
    return tuner.search.engine, steps


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"P": (100, 100), "O": (98, 98)}, "P"),
        ({"P": (100, 100), "O": (90, 90)}, "O"),
        ({"P": (100, 100), "O": (50, 180)}, "P"),
        ({"P": (100, 100), "O": (10, 150)}, "O"),
        ({"P": (100, 100), "O": (500, 500)}, "P"),
        ({"P": (100, 100), "O": (90, 300), "I": (120, 60)}, "I"),
        ({"P": (100, 100), "O": (90, 80), "I": (90, 75)}, "I"),
        ({"P": (100, 100)}, "P"),
    ],
)
@pytest.mark.parametrize("forwards", [1, 7, 64])
def test_the_fastest_engine_wins(times: dict[str, tuple[float, float]], winner: str, forwards: int) -> None:
    """Also if a step calls the forward several times before the backward."""
    fastest, steps = searched(lambda engine, graph: times[engine][graph], "".join(times), forwards)
    assert fastest == winner
    assert steps <= SETTLED


def test_a_slow_engine_runs_a_few_steps_only() -> None:
    engines: list[str] = []

    def cost(engine: str, graph: int) -> float:
        engines.append(engine)
        return 1.0 if engine == "P" else 10.0

    searched(cost)
    assert engines.count("O") <= 2 * 3


def test_noise_decides_nothing() -> None:
    """A slow start, or a pause in one call."""
    calls = {"P": 0, "O": 0}

    def cost(engine: str, graph: int) -> float:
        calls[engine] += 1
        return (90 if engine == "P" else 100) * (5 if engine == "P" and calls["P"] <= 6 else 1)

    assert searched(cost)[0] == "P"
    calls["O"] = 0

    def paused(engine: str, graph: int) -> float:
        calls[engine] += 1
        return (60 if engine == "O" else 100) + (300 if engine == "O" and calls["O"] == 3 else 0)

    assert searched(paused)[0] == "O"


@pytest.mark.parametrize("milliseconds", [0.1, 5.0, 100.0])
def test_forwards_that_no_backward_follows_are_timed_alone(milliseconds: float) -> None:
    """The next backward runs in PyTorch, and then whole steps are timed."""
    tuner, engines = Autotuner("PO", ["forward", "backward"]), []
    while not tuner.search.is_over:
        engines.append(tuner.engine(0))
        tuner.search.ran(0, milliseconds * (0.8 if engines[-1] == "O" else 1))
    assert tuner.engine(0) == "O"
    assert engines.index("O") <= 5 * SETTLED and len(engines) <= 10 * SETTLED
    assert tuner.engine(1) == "P" and not tuner.search.is_over
    tuner.search.ran(1, 1e9)  # of no whole step
    for _ in range(SETTLED):
        step(tuner, lambda engine, graph: {"P": (100, 100), "O": (50, 180)}[engine][graph])
    assert tuner.search.is_over and tuner.search.engine == "P"
    assert tuner.search.milliseconds["P"] == 200


def test_steps_of_several_forwards_are_whole_steps() -> None:
    tuner = Autotuner("PO", ["forward", "backward"])
    search = tuner.search
    for forwards in (32, 64, 1000, 2):
        step(tuner, lambda engine, graph: 100, forwards)
    assert tuner.search is search


def test_what_is_rejected_while_forwards_are_timed_alone_is_rejected_in_steps() -> None:
    tuner = Autotuner("POI", ["forward", "backward"])
    while not tuner.search.is_over:
        engine = tuner.engine(0)
        if engine == "O":
            tuner.reject("O", "is wrong")
        tuner.search.ran(0, {"P": 100, "I": 90}[tuner.search.engine])
    assert tuner.search.engine == "I"
    tuner.engine(1)
    for _ in range(2 * SETTLED):
        step(tuner, lambda engine, graph: {"P": 100, "I": 90}[engine])
    assert tuner.search.is_over and tuner.search.engine == "I"


def test_times_are_compared_by_element_of_the_forwards_arguments() -> None:
    tuner = Autotuner("PO", ["forward", "backward"])
    for size in range(SETTLED):
        for graph in (0, 1):
            milliseconds = {"P": (100, 100), "O": (50, 120)}[tuner.engine(graph)][graph]
            tuner.search.ran(graph, milliseconds * (1 + size % 3), (512, 5120)[graph] * (1 + size % 3))
    assert tuner.search.is_over and tuner.search.engine == "O"


def test_what_is_rejected_in_a_backward_runs_no_forward() -> None:
    tuner = Autotuner("PO", ["forward", "backward"])
    for _ in range(SETTLED):
        for graph in (0, 1):
            engine = tuner.engine(graph)
            if engine == "O" and graph == 1:
                tuner.reject("O", "is wrong")
            tuner.search.ran(graph, 50 if tuner.search.engine == "O" else 100)
    assert tuner.search.is_over and tuner.search.engine == "P"


def test_sparse_gradients() -> None:
    layer = nn.Embedding(10, 4, sparse=True)
    run = torch.compile(lambda rows: nn.functional.gelu(layer(rows)).sum(), backend="onnxrt")
    for i in range(9):
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
    with torch.library._scoped_library("test_placement", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", lambda x: (called.append(1), x * torch.rand(4))[1], "CPU")
        library.impl("counted", torch.empty_like, "Meta")
        operator = torch.ops.test_placement.counted
        with torch.no_grad():
            run = torch.compile(lambda x: operator(x.sin()).cos(), backend="onnxrt", **settings)
            for i in range(3 * SETTLED):
                torch.manual_seed(i)
                actual = run(torch.ones(4))
                torch.manual_seed(i)
                torch.testing.assert_close(actual, operator(torch.ones(4).sin()).cos())
                assert len(called) == 2 * (i + 1)


class UnknownBackward(torch.autograd.Function):
    """A cosine whose gradient an operator of another library computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = torch.ops.test_placement.negative(gradient)
        return result


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_pytorch_runs_both_directions_if_one_may_not_run_twice(
    direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A search for the other alone would wait for whole steps, keep all times, and find no backward."""
    with torch.library._scoped_library("test_placement", "FRAGMENT") as library:
        library.define("negative(Tensor x) -> Tensor")
        library.impl("negative", torch.neg, "CPU")
        library.impl("negative", torch.empty_like, "Meta")
        operator = torch.ops.test_placement.negative
        torch.library.register_autograd("test_placement::negative", lambda ctx, gradient: -gradient, lib=library)
        run = compiled(UnknownBackward.apply if direction == "backward" else lambda x: operator(x.sin()))
        x = torch.ones(4, requires_grad=True)
        run(x).sum().backward()
        before = counted("autotuning_calls")
        for _ in range(60):
            run(x).sum().backward()
    assert counted("autotuning_calls") <= before + 1, "the forward's, which is told of the backward"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_forward_mode_after_inductor_won(monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, INDUCTOR)
    run = torch.compile(lambda x: x.sin() * x, backend="onnxrt", mode="max-autotune")
    x = torch.randn(4)
    for _ in range(SETTLED):
        run(x)
    assert settled_on(INDUCTOR, "inference")
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones(4)))).tangent
    torch.testing.assert_close(tangent, x.cos() * x + x.sin())


def test_an_outcome_whose_compiler_is_gone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4)

    def called_often() -> None:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(lambda x: x.sin() * x, backend="onnxrt", mode="max-autotune")
        for _ in range(3 * SETTLED):
            torch.testing.assert_close(run(x), x.sin() * x)

    def broken(*args: object) -> object:
        raise RuntimeError("no C++ compiler")

    with monkeypatch.context() as patch:
        plan(patch, INDUCTOR)
        called_often()
        assert settled_on(INDUCTOR, "inference")
        called_often()
        assert not settled_on(INDUCTOR, "inference")
    monkeypatch.setattr(inductor, "compile_with_inductor", broken)
    called_often()
    assert counted(f"autotune_rejected {INDUCTOR}") == 1 and counted("internal_failures") == 0
    assert settled_on(PYTORCH, "inference") or settled_on(ONNX, "inference")


def test_an_outcome_of_which_a_part_cannot_be_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward is settled when the backward turns out not to compile."""

    def train(steps: int) -> None:
        torch._dynamo.reset()
        run = torch.compile(lambda x: torch.sin(x).sum(), backend="onnxrt", mode="max-autotune")
        for _ in range(steps):
            x = torch.ones(4, requires_grad=True)
            run(x).backward()
            torch.testing.assert_close(x.grad, torch.ones(4).cos())

    compile_with_inductor = inductor.compile_with_inductor

    def broken(module: fx.GraphModule, direction: str) -> Any:
        assert direction == "forward"
        return compile_with_inductor(module, direction)

    with monkeypatch.context() as patch:
        plan(patch, INDUCTOR)
        train(3 * SETTLED)
        assert settled_on(INDUCTOR, "forward", "backward")
    monkeypatch.setattr(inductor, "compile_with_inductor", broken)
    train(3 * SETTLED)
    assert counted(f"autotune_rejected {INDUCTOR}") == 1 and counted("internal_failures") == 0
    assert settled_on(PYTORCH, "forward", "backward") or settled_on(ONNX, "forward", "backward")


@pytest.mark.parametrize("answer", [[], None, 3, {}, [{}, 0], [None, 0], [{"other": 1.0}, 0], [{PYTORCH: "fast"}, 0]])
def test_a_record_that_is_no_outcome(cache: Path, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CachedGraphs(parse_options({"cache_dir": str(cache)}))
    keep_fact = kept.keep_fact
    monkeypatch.setattr(kept, "keep_fact", lambda question, _: keep_fact(question, answer))

    def tuner() -> Autotuner:
        return Autotuner([PYTORCH, ONNX], ["inference"], cache=kept)

    first = tuner()
    while not first.search.is_over:
        first.search.ran(0, 100 if first.engine(0) == PYTORCH else 90)
    assert len(list(cache.rglob("*.cached"))) == 1
    assert not tuner().search.is_over


def test_no_clock_decides_where_results_must_be_the_same_each_time() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        run = torch.compile(lambda x: (x.sin() * x).sum(), backend="onnxrt")
        for _ in range(SETTLED):
            run(torch.ones(4, requires_grad=True)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [name for name in counters["dynamo_backends"] if "autotune" in name]


def test_the_references_own_error_is_the_callers() -> None:
    run, _ = tuned({"other": lambda: boxed(doubles)}, reference=failing)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no memory"):
            run([torch.ones(2)])


def test_other_threads_do_not_wait_for_a_compiler() -> None:
    is_compiling, may_go_on = threading.Event(), threading.Event()

    def build() -> Any:
        is_compiling.set()
        assert may_go_on.wait(30)
        return boxed(doubles)

    run, _ = tuned({"other": build})
    run([torch.ones(2)])

    def go_on() -> None:
        while not is_compiling.is_set():
            run([torch.ones(2)])

    thread = threading.Thread(target=go_on)
    thread.start()
    assert is_compiling.wait(30)
    assert run([torch.ones(2)])[0].tolist() == [2.0, 2.0]  # type: ignore[index]
    may_go_on.set()
    thread.join(30)
    assert not thread.is_alive()


def test_inductor_is_not_tried_when_it_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "seconds_of_inductor", 1e9)
    run = torch.compile(lambda x: x.sin() * x, backend="onnxrt", mode="max-autotune")
    for _ in range(3 * SETTLED):
        run(torch.ones(4))
    assert counted(f"autotune_rejected {INDUCTOR}") == 1


def test_only_the_winner_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides PyTorch; what the other engines hold is freed when a search is over."""
    plan(monkeypatch, ONNX)

    class Made:
        def __call__(self, args: list[object]) -> object:
            return [args[0] * 2]  # type: ignore[operator]

    made: dict[str, Any] = {}

    def builder(name: str) -> Callable[[], Any]:
        def make() -> Any:
            runner = Made()
            made[name] = weakref.ref(runner)
            return runner

        return make

    run, _ = tuned({name: builder(name) for name in (ONNX, INDUCTOR)})
    for _ in range(3 * SETTLED):
        run([torch.ones(3)])
    gc.collect()
    assert made[INDUCTOR]() is None
    assert made[ONNX]() is not None


@pytest.mark.parametrize(("slower", "is_tried_again"), [(23.0, True), (40.0, False)])
def test_an_engine_that_was_nearly_as_fast_is_tried_again(
    slower: float, is_tried_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuner, "_SEARCH_AGAIN_AFTER", 5)
    faster = [ONNX]
    ran = Search.ran

    def biased(self: Search, graph: int, milliseconds: float, elements: int = 1) -> None:
        ran(self, graph, 20.0 if self.engine == faster[0] else slower, elements)

    monkeypatch.setattr(Search, "ran", biased)
    run, tuner = tuned({ONNX: lambda: boxed(doubles)})
    while not tuner.search.is_over:
        run([torch.ones(3)])
    assert tuner.search.engine == ONNX
    faster[0] = PYTORCH
    for _ in range(2 * SETTLED):
        run([torch.ones(3)])
    assert tuner.search.is_over and (tuner.search.engine == PYTORCH) == is_tried_again


@pytest.mark.parametrize("error", [MemoryError(), SessionError("full", Reason(Kind.OUT_OF_MEMORY, "full"))])
def test_an_engine_that_wanted_memory_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, ONNX)
    monkeypatch.setattr(autotuner, "_SEARCH_AGAIN_AFTER", 5)
    failures = [error]

    def wants_memory(x: torch.Tensor) -> list[torch.Tensor]:
        if failures:
            raise failures.pop()
        return [x * 2]

    run, tuner = tuned({ONNX: lambda: boxed(wants_memory)})
    while not tuner.search.is_over:
        run([torch.ones(3)])
    assert tuner.search.engine == PYTORCH and counted(f"autotune_rejected {ONNX}") == 1
    for _ in range(2 * SETTLED):
        run([torch.ones(3)])
    assert tuner.search.is_over and tuner.search.engine == ONNX


def test_an_engine_that_holds_for_some_sizes_only_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def assuming(module: fx.GraphModule, direction: str) -> Any:
        sizes = [
            node.meta["val"].shape[0] for node in module.graph.find_nodes(op="placeholder") if node.meta["val"].dim()
        ]
        assert all(size == 5 for size in sizes)  # guards
        return boxed(lambda *args: [args[-1] * 2])

    monkeypatch.setattr(inductor, "compile_with_inductor", assuming)
    run = torch.compile(lambda x: x * 2, backend="onnxrt", mode="max-autotune", dynamic=True)
    for size in (5, *range(5, 3 * SETTLED)):
        assert run(torch.ones(size)).tolist() == [2.0] * size
    assert counted(f"autotune_rejected {INDUCTOR}") == 1


def test_what_tells_frames_apart() -> None:
    def captured(scale: float) -> fx.GraphModule:
        inner = fx.symbolic_trace(lambda x: x * scale)
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_module("inner", (x,)))
        return fx.GraphModule({"inner": inner}, graph)

    module, image = captured(2.0), torch.ones(2, 3, 4, 4)
    described = engines.describe_frame(module, [image])
    assert described == engines.describe_frame(captured(2.0), [torch.zeros(2, 3, 4, 4)])
    others = [
        engines.describe_frame(captured(3.0), [image]),
        *(
            engines.describe_frame(module, [other])
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
        others.append(engines.describe_frame(module, [image]))
    with torch.autocast("cpu", torch.float16):
        others.append(engines.describe_frame(module, [image]))
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
    actual = [run(x, w) for _ in range(SETTLED)]
    torch.manual_seed(0)
    for ours in actual:
        torch.testing.assert_close(ours, noisy(x) * w)


IMPORTS = """
import json, sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
torch.compile(model, backend="onnxrt")(torch.randn(2, 8)).sum().backward()
assert model[0].weight.grad is not None
heavy = ("onnx", "onnx_ir", "onnxscript", "passes.catalog",
         "dynamo_backends.pipeline.stages", "torch._inductor.compile_fx")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def test_the_first_step_imports_nothing_of_onnx(cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


# What a graph must be to be tuned


def traced(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_what_may_run_twice() -> None:
    x = torch.ones(3)
    assert engines.may_run_twice(traced(lambda x: x + torch.rand(3), x))
    assert not engines.may_run_twice(traced(lambda x: (x + 1, torch.rand(3, device="meta")), x))
    assert engines.may_run_twice(traced(lambda x, y: y.copy_(x + 1), x, x.clone()))
    assert not engines.may_run_twice(traced(lambda x: (x + 1).add_(2), x))
    asserting = traced(lambda x: (torch.ops.aten._assert_async.msg(x.sum() > 0, "no"), x + 1)[1], x)
    assert not engines.may_run_twice(asserting)


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
