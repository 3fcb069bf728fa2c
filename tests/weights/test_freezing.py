"""Weights as constants of sessions: never stale, whatever changed them."""

from __future__ import annotations

import collections
import copy
import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnxruntime
import pytest
import torch
import torch._inductor.config
from conftest import counted
from operators import difference_with_weights, entries, samples
from test_session import compile_and_keep
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import LlamaConfig, LlamaForCausalLM

from dynamo_backends import decomposition_table, onnx_compiler
from dynamo_backends.debug.optimized_models import optimized_model
from dynamo_backends.errors import SessionError
from dynamo_backends.partition.runnable_region import RunnableRegion
from dynamo_backends.runtime import constants as constants_module
from dynamo_backends.runtime import session as session_module
from dynamo_backends.runtime import system_memory
from dynamo_backends.runtime.executable import Executable
from dynamo_backends.runtime.ort_internals import PublicCalls
from dynamo_backends.runtime.session import Session
from dynamo_backends.weights import changes, region_session
from dynamo_backends.weights.changes import WHOLE, Snapshot, Watch
from dynamo_backends.weights.watchable import CALLS
from passes import Pass, onnx_editing, register, unregister


class Clock:
    """The clock of frozen sessions, which stands still; to build a session with constants, and a call, may take time.

    Attributes:
        now: seconds.
        build, call: how long one takes.
        tried: the number of constants of each session that was built, or rejected.
        rejects: whether ONNX Runtime rejects constants, as when memory is exhausted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.build = self.call = 0.0
        self.tried: list[int] = []
        self.rejects = False
        load, run = Executable.load, Session.__call__

        def timed_load(executable: Executable, constants: Mapping[int, torch.Tensor] = MappingProxyType({})) -> object:
            self.tried.append(len(constants))
            self.now += self.build if constants else 0.0
            if constants and self.rejects:
                raise SessionError("planted")
            return load(executable, constants)

        def timed_run(session: Session, args: Sequence[torch.Tensor | int | bool]) -> object:
            self.now += self.call
            return run(session, args)

        monkeypatch.setattr(region_session, "clock", lambda: self.now)
        monkeypatch.setattr(Executable, "load", timed_load)
        monkeypatch.setattr(Session, "__call__", timed_run)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sessions take no time to build, so each change rebuilds them."""
    return Clock(monkeypatch)


class Network(nn.Module):
    """An embedding, products, a convolution, batch norm, a tied weight, and tensors that are no parameters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.table.weight
        self.scale = torch.full((width,), 2.0)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.gelu(self.inner(self.table(tokens)) * self.scale + self.shift)
        return self.head(self.conv(self.norm(x.mT)).mT)


TOKENS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))


def network(width: int = 32) -> Network:
    model = Network(width).eval()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model


def assert_fresh(compiled: Callable[..., torch.Tensor], model: Network) -> None:
    """Asserts that the compiled model returns the model's own result with its current weights, up to rounding."""
    with torch.no_grad():
        _assert_close(compiled(TOKENS), model(TOKENS))


def _assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding; a change of a weight makes a hundred times as much."""
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


def large() -> Network:
    """A weight so large that each call checks only a part of it."""
    model = network(128)
    assert model.inner.weight.nbytes > 2 * WHOLE
    return model


# What changes weights


def _optimizer_step(model: Network) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(TOKENS).square().mean().backward()
    optimizer.step()


def _other_state(model: Network) -> dict[str, torch.Tensor]:
    return {name: tensor * 1.5 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}


def _exponential_average(model: Network) -> None:
    for tensor in model.parameters():
        tensor.data.mul_(0.9).add_(torch.randn_like(tensor), alpha=0.1)


def _other_running_statistics(model: Network) -> None:
    model.train()
    with torch.no_grad():
        model(TOKENS)
    model.eval()


def _merged_adapter(model: Network) -> None:
    width = len(model.inner.weight)
    down, up = torch.randn(4, width), torch.randn(width, 4)
    with torch.no_grad():
        model.inner.weight += up @ down


def _through_dlpack(model: Network) -> None:
    torch.from_dlpack(model.inner.weight.detach()).mul_(2)


def _there_and_back(model: Network) -> None:
    model.double()
    model.float()
    with torch.no_grad():
        model.conv.weight.mul_(1.5)


def _swap_rows(model: Network) -> None:
    model.conv.weight.data[:] = model.conv.weight.data.roll(1, 0)


def _new_parameter(model: Network) -> None:
    model.inner.weight = nn.Parameter(torch.randn_like(model.inner.weight))


def _tied_weight(model: Network) -> None:
    with torch.no_grad():
        model.head.weight.mul_(1.5)


def _untied(model: Network) -> None:
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))


def _set(name: str, value: torch.Tensor) -> Callable[[Network], None]:
    return lambda model: setattr(model, name, value)


CHANGES: dict[str, Callable[[Network], object]] = {
    "optimizer step": _optimizer_step,
    "load_state_dict": lambda model: model.load_state_dict(_other_state(model)),
    "load_state_dict assign": lambda model: model.load_state_dict(_other_state(model), assign=True),
    ".data =": lambda model: setattr(model.inner.weight, "data", torch.randn_like(model.inner.weight)),
    ".data.copy_": lambda model: model.inner.weight.data.copy_(torch.randn_like(model.inner.weight)),
    ".data[0, 0] =": lambda model: model.inner.weight.data.__setitem__((0, 0), 7.0),
    ".data of the last element": lambda model: model.norm.bias.data.__setitem__(-1, 7.0),
    "rows swapped through .data": _swap_rows,
    "an average over .data": _exponential_average,
    "numpy": lambda model: np.multiply(model.conv.bias.detach().numpy(), 3, out=model.conv.bias.detach().numpy()),
    "DLPack": _through_dlpack,
    "running statistics": _other_running_statistics,
    "a tied weight": _tied_weight,
    "a weight no longer tied": _untied,
    "another parameter": _new_parameter,
    "a merged adapter": _merged_adapter,
    "requires_grad_": lambda model: model.requires_grad_(False),
    "float64 and back": _there_and_back,
    "a plain attribute": _set("scale", torch.full((32,), 3.0)),
    "a buffer": _set("shift", torch.ones(32)),
    "a buffer in place": lambda model: model.shift.add_(1),
    "an adapter": lambda model: setattr(model, "inner", nn.Sequential(model.inner, nn.Linear(32, 32))),
    "swap_tensors": lambda model: torch.utils.swap_tensors(
        model.inner.weight, nn.Parameter(torch.randn_like(model.inner.weight))
    ),
    "a resized storage": lambda model: model.inner.weight.untyped_storage().copy_(
        torch.randn_like(model.inner.weight).untyped_storage()
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("weights", ["constants", "inputs"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_used_at_the_next_call(change: str, weights: str) -> None:
    model = network()
    compiled = torch.compile(model, backend="onnxrt", options={"fallback": "error", "weights": weights})
    assert_fresh(compiled, model)
    assert (counted("constant_weights") > 0) == (weights == "constants")
    before = model(TOKENS).detach()
    for _ in range(2):
        CHANGES[change](model)
        assert_fresh(compiled, model)
    if change != "requires_grad_":
        assert not torch.equal(model(TOKENS), before), "the change changed nothing"
    assert_fresh(compiled, model)


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (".data.copy_", True),
        ("rows swapped through .data", True),
        ("DLPack", True),
        (".data =", False),  # the address tells
        (".data of the last element", False),  # read whole in each call
        ("a merged adapter", False),
    ],
)
def test_a_write_after_which_results_may_be_old_is_told(
    change: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = large()
    compiled = torch.compile(model, backend="onnxrt")
    assert_fresh(compiled, model)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        CHANGES[change](model)
        for _ in range(CALLS):
            compiled(TOKENS)
        assert_fresh(compiled, model)
    assert counted("weight_refreshes") == 1
    assert (counted("weights_written_unseen") > 0) == is_told
    assert not is_told or any(name in caplog.text for name, _ in model.named_parameters())


@pytest.mark.parametrize("width", [64, 5_000])
def test_statistics_of_batch_norm_that_training_wrote_are_no_reason_to_warn(
    width: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width, momentum=0.5)).eval(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="onnxrt")
    with torch.no_grad():
        for _ in range(4):
            _assert_close(compiled(x), model(x))
            model.train()
            version = model[1].running_mean._version
            model(x)
            assert model[1].running_mean._version == version, "PyTorch tells of this write now"
            model.eval()
        _assert_close(compiled(x), model(x))
    assert counted("weight_refreshes") == 4
    assert counted("weights_written_unseen") == 0
    assert "without PyTorch's knowledge" not in caplog.text


def test_an_unseen_write_anywhere_in_a_large_model_is_found_within_the_bound() -> None:
    model = large()
    compiled = torch.compile(model, backend="onnxrt")
    assert_fresh(compiled, model)
    for place in ((0, 0), (37, 41), (127, 127)):
        model.inner.weight.data[place] += 100
        with torch.no_grad():
            for _ in range(CALLS):
                result = compiled(TOKENS)
            _assert_close(result, model(TOKENS))


def test_checked_weights_are_looked_at_whole_in_each_call() -> None:
    model = large()
    compiled = torch.compile(model, backend="onnxrt", options={"weights": "checked"})
    assert_fresh(compiled, model)
    for place in ((37, 41), (64, 3)):
        model.inner.weight.data[place] += 100
        assert_fresh(compiled, model)


def test_a_raised_version_without_another_value_makes_no_session() -> None:
    model = network()
    compiled = torch.compile(model, backend="onnxrt")
    assert_fresh(compiled, model)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_fresh(compiled, model)
    assert counted("weight_refreshes") == 0


# When weights are constants


def linear() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], Callable[[], None]]:
    """A model of two layers, its compiled form, and a step of training."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)

    return model, torch.compile(model, backend="onnxrt", options={"fallback": "error"}), step


def call(model: nn.Module, compiled: Callable[[torch.Tensor], torch.Tensor], number: int = 1) -> None:
    """Right calls."""
    x = torch.randn(2, 8)
    with torch.no_grad():
        for _ in range(number):
            _assert_close(compiled(x), model(x))


@pytest.mark.parametrize(("validations", "sessions"), [(2, 1), (10, 1), (60, 2), (100, 21)])
def test_inference_after_training_has_constants_however_long_the_validations_were(
    validations: int, sessions: int, clock: Clock
) -> None:
    """Of 20 epochs, where a session takes as long to build as 40 calls. The first one never pays."""
    model, compiled, step = linear()
    clock.build, clock.call = 40.0, 1.0
    call(model, compiled)
    for _ in range(20):
        step()
        call(model, compiled, validations)
    assert sum(number > 0 for number in clock.tried) == sessions
    call(model, compiled, 200)
    assert clock.tried[-1] == 4 and counted("weights_made_inputs") == counted("weights_made_constants") > 0
    clock.tried.clear()
    call(model, compiled, 200)
    assert not clock.tried


def test_the_time_without_a_change_doubles_with_each_session_that_did_not_pay(clock: Clock) -> None:
    model, compiled, step = linear()
    clock.build, clock.call = 10.0, 1.0
    call(model, compiled)
    waited = []
    for _ in range(4):
        step()
        before, number = counted("weights_made_constants"), 0
        while counted("weights_made_constants") == before:
            call(model, compiled)
            number += 1
        waited.append(number - 1)
    assert waited == [10, 20, 40, 80]
    call(model, compiled, 20)
    step()
    call(model, compiled)
    assert counted("weights_made_inputs") == 16, "this one paid, so it is rebuilt at once"


@pytest.mark.parametrize("how", ["in place", "unseen", "another tensor"])
def test_others_are_constants_while_one_keeps_changing(how: str, clock: Clock) -> None:
    model, compiled, _ = linear()
    clock.build, clock.call = 10.0, 1.0

    def change() -> None:
        if how == "another tensor":
            model[1].bias = nn.Parameter(model[1].bias.detach() + 0.1)
        else:
            with torch.no_grad():
                (model[1].bias if how == "in place" else model[1].bias.data).add_(0.1)

    for _ in range(200):
        call(model, compiled)
        change()
    assert clock.tried == [4, 0, 3]
    call(model, compiled, 20)
    assert clock.tried == [4, 0, 3, 4], "it stopped"


def test_an_average_of_the_weights_that_is_swapped_in_and_out(clock: Clock) -> None:
    model, compiled, step = linear()
    average = [parameter.detach().clone() for parameter in model.parameters()]

    def swap() -> None:
        for i, parameter in enumerate(model.parameters()):
            parameter.data, average[i] = average[i], parameter.data

    clock.build, clock.call = 40.0, 1.0
    call(model, compiled)
    for _ in range(20):
        step()
        for tensor, parameter in zip(average, model.parameters(), strict=True):
            tensor.lerp_(parameter.detach(), 0.1)
        swap()
        call(model, compiled, 5)
        swap()
        call(model, compiled, 2)
    assert sum(number > 0 for number in clock.tried) <= 3
    clock.tried.clear()
    call(model, compiled, 500)
    assert 4 in clock.tried


def test_sessions_that_keep_paying_are_rebuilt_at_once(clock: Clock) -> None:
    model, compiled, step = linear()
    clock.build, clock.call = 10.0, 1.0
    for _ in range(6):
        call(model, compiled, 10)
        step()
    assert counted("weight_refreshes") == 5
    assert counted("weights_made_inputs") == 0


def test_every_byte_of_many_small_weights_is_looked_at_in_each_call() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    x = torch.randn(2, 8)
    compiled = torch.compile(model, backend="onnxrt")
    with torch.no_grad():
        for layer in (0, 5, 11):
            _assert_close(compiled(x), model(x))
            model[layer].weight.data[3, 5] += 30
            _assert_close(compiled(x), model(x))


def test_tensors_without_a_version_counter_are_no_constants() -> None:
    """Those made under ``inference_mode``: a write to them is seen all the same."""
    with torch.inference_mode():
        made_there = network()
        compiled = torch.compile(made_there, backend="onnxrt", options={"fallback": "error"})
        for _ in range(2):
            _assert_close(compiled(TOKENS), made_there(TOKENS))
            made_there.inner.weight.mul_(2)
    assert counted("constant_weights") == 0
    model = network()
    compiled = torch.compile(model, backend="onnxrt", options={"fallback": "error"})
    with torch.inference_mode():
        _assert_close(compiled(TOKENS), model(TOKENS))
        weight = torch.from_numpy(model.inner.weight.detach().numpy())  # at the address of the one before
        assert weight.is_inference()
        model.inner.weight = nn.Parameter(weight)
        for _ in range(2):
            _assert_close(compiled(TOKENS), model(TOKENS))
            model.inner.weight.mul_(2)
    assert counted("constant_weights") > 0


def test_weights_can_be_freed_and_given_memory_again() -> None:
    """As FSDP does. Memory that was given back is not read: one of 40 MB is not there any more."""
    model = nn.Linear(3200, 3200, bias=False)
    x = torch.randn(2, 3200)
    compiled = torch.compile(model, backend="onnxrt")
    with torch.no_grad():
        _assert_close(compiled(x), model(x))
        storage, values = model.weight.untyped_storage(), model.weight * 2
        size = storage.size()
        storage.resize_(0)
        between = torch.empty(size, dtype=torch.int8)  # so that it comes to lie elsewhere
        storage.resize_(size)
        model.weight.data.copy_(values)
        _assert_close(compiled(x), model(x))
        old, model.weight = model.weight, nn.Parameter(values * 2)
        old.untyped_storage().resize_(0)
        _assert_close(compiled(x), model(x))
    del between


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.table = torch.randn(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.table


def test_a_tensor_of_a_module_whose_size_changes_is_an_input() -> None:
    model = WithTable()
    compiled = torch.compile(model, backend="onnxrt", options={"fallback": "error"})
    x = torch.randn(2, 16)
    with torch.no_grad():
        for width in (5, 6, 7):
            model.table = torch.randn(16, width)
            _assert_close(compiled(x), model(x))
    assert counted("constant_weights") > 0


@pytest.mark.parametrize("weights", ["constants", "checked"])
@pytest.mark.parametrize("width", [8, 128])
def test_a_write_while_a_session_is_made_that_is_undone(
    weights: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread that swaps moving averages in and out."""
    model, x = nn.Linear(width, width).eval(), torch.randn(2, width)
    load, planted = Executable.load, []

    def load_meanwhile(executable: Executable, constants: Mapping[int, torch.Tensor] = MappingProxyType({})) -> object:
        if not constants or planted:
            return load(executable, constants)
        planted.append(len(constants))
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.mul_(2)
            try:
                return load(executable, constants)
            finally:
                model.weight.copy_(before)

    monkeypatch.setattr(Executable, "load", load_meanwhile)
    compiled = torch.compile(model, backend="onnxrt", options={"weights": weights, "cache": False})
    with torch.no_grad():
        compiled(x)  # as if it ran before the write was undone
        torch.testing.assert_close(compiled(x), model(x))
    assert planted


def test_one_thread_writes_while_another_one_calls() -> None:
    model = network()
    compiled = torch.compile(model, backend="onnxrt")
    assert_fresh(compiled, model)
    stop = threading.Event()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            with torch.no_grad():
                while not stop.is_set():
                    assert torch.isfinite(compiled(TOKENS)).all()
        except BaseException as error:
            failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    for _ in range(20):
        with torch.no_grad():
            model.inner.weight.mul_(1.01)
            model.conv.weight.data.mul_(0.99)
        assert_fresh(compiled, model)
    stop.set()
    caller.join()
    assert not failures
    assert_fresh(compiled, model)


# What is a constant


def test_an_embedding_table_stays_an_input_and_training_graphs_freeze_nothing() -> None:
    table = nn.Embedding(1000, 64)
    with torch.no_grad():
        compiled = torch.compile(table, backend="onnxrt")
        torch.testing.assert_close(compiled(TOKENS), table(TOKENS))
    assert counted("constant_weights") == 0
    model = nn.Linear(4, 4)
    torch.compile(model, backend="onnxrt")(torch.randn(2, 4)).sum().backward()
    assert counted("constant_weights") == 0


def test_weights_that_do_not_fit_in_memory_a_second_time_stay_inputs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    size = sum(tensor.nbytes for tensor in model.parameters())
    monkeypatch.setattr(region_session, "available", lambda: size)
    assert_fresh(torch.compile(model, backend="onnxrt"), model)
    assert counted("constant_weights") == 0
    assert "stay inputs" in caplog.text


def test_the_free_memory_is_that_of_the_machine_and_of_its_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"_MEMORY": "MemTotal: 9 kB\nMemAvailable:    4 kB\n", "_LIMIT": "max\n", "_USED": "1000\n"}
    files["_STATISTICS"] = ""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(system_memory, name, tmp_path / name)
    assert system_memory.available() == 4096
    (tmp_path / "_LIMIT").write_text("3000\n")
    assert system_memory.available() == 2000
    (tmp_path / "_STATISTICS").write_text("anon 100\ninactive_file 800\nactive_file 90\n")
    assert system_memory.available() == 2800, "files that were read count as used until memory is needed"
    for name in files:
        (tmp_path / name).unlink()
    assert system_memory.available() is None


def test_what_a_graph_writes_to_is_no_constant() -> None:
    model = network().train()
    compiled = torch.compile(copy.deepcopy(model), backend="onnxrt")
    with torch.no_grad():
        for _ in range(3):
            _assert_close(compiled(TOKENS), model(TOKENS))
    assert counted("weight_refreshes") == 0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # half precision rounds between two convolutions; the change below makes a third or more
    [(torch.float16, 5e-3), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)],
)
def test_weights_of_other_dtypes_and_layouts(dtype: torch.dtype, tolerance: float) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype).eval()
    model = model.to(memory_format=torch.channels_last)
    model.register_buffer("mask", torch.rand(4, 1, 1) > 0.5)
    model.register_buffer("window", torch.randn(8, 2, dtype=dtype)[::2, :1].view(4, 1, 1))

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.where(model.mask, model(x), model.window)

    x = torch.randn(2, 4, 9, 9, dtype=dtype).to(memory_format=torch.channels_last)
    compiled = torch.compile(run, backend="onnxrt")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), run(x), rtol=tolerance, atol=tolerance)
            model[0].weight.mul_(1.5)
            model.mask.logical_not_()


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_no_gradient_is_taken_for_the_weight_that_an_optimizer_steps(
    rate: float | torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that a step changes are attributes of Dynamo's graph, which AOTAutograd numbers apart from arguments."""
    weights = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    expected = [weight.detach() - 0.1 * i for i, weight in enumerate(weights)]
    for i, weight in enumerate(weights):
        weight.grad = torch.full((3,), float(i))
    torch.compile(torch.optim.SGD(weights, lr=rate).step, backend="onnxrt")()
    torch.testing.assert_close([weight.detach() for weight in weights], expected)
    assert counted("constant_weights") == counted("weights_left_inputs") == 0
    assert "weights are inputs" not in caplog.text


@pytest.mark.parametrize("change", ["optimizer step", "load_state_dict assign", ".data =", "a plain attribute"])
def test_weights_that_inductors_freezing_makes_attributes_of_the_graph_are_constants(change: str) -> None:
    with torch._inductor.config.patch(freezing=True):  # Dynamo reads it for every backend
        model = network()
        compiled = torch.compile(model, backend="onnxrt")
        assert_fresh(compiled, model)
        assert counted("constant_weights") > 0
        CHANGES[change](model)
        assert_fresh(compiled, model)


def test_weights_are_constants_under_aot_autograd_too() -> None:
    model = network()
    backend = aot_autograd(fw_compiler=onnx_compiler(), decompositions=decomposition_table())
    compiled = torch.compile(model, backend=backend)
    assert_fresh(compiled, model)
    assert counted("constant_weights") > 0
    with torch.no_grad():
        model.inner.weight.mul_(2)
    assert_fresh(compiled, model)


def test_a_language_model_decodes_with_constant_weights() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 64, (1, 5))
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    model.forward = torch.compile(model.forward, backend="onnxrt", dynamic=True)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)
    assert counted("constant_weights") > 0
    assert counted("weight_refreshes") == 0


def test_a_pass_is_told_which_values_are_weights() -> None:
    seen: dict[str, bool] = {}

    def look(model: object, context: object) -> int:
        seen.update({str(value.name): onnx_editing.is_weight(value) for value in model.graph.inputs})  # type: ignore
        return 0

    register(Pass("onnx.look", "Looks.", look))
    try:
        with torch.no_grad():
            torch.compile(nn.Linear(4, 3), backend="onnxrt")(torch.randn(2, 4))
    finally:
        unregister("onnx.look")
    assert sorted(seen.values()) == [False, True, True]


# Operators of PyTorch's database; python tests/operators_sweep.py --mode weights --dtype float32 tries all


CONSTANT_ARGUMENTS = (
    *("addmm", "baddbmm", "nn.functional.linear", "nn.functional.conv2d", "nn.functional.conv_transpose2d", "where"),
    *("nn.functional.batch_norm", "nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.embedding"),
    *("nn.functional.prelu", "nn.functional.scaled_dot_product_attention", "index_select", "gather", "lerp", "cat"),
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONSTANT_ARGUMENTS)
def test_an_operator_with_constant_arguments(name: str) -> None:
    op = entries()[name]
    for sample in samples(op, torch.float32, 3):
        assert difference_with_weights(op, sample) is None


def test_onnx_debug_follows_the_weights(tmp_path: Path) -> None:
    """What it judges is what runs, it leaves the weights as they are, and what it writes can be loaded."""
    model = network()
    options = {"dump_dir": str(tmp_path), "compare": "every"}
    compiled = torch.compile(model, backend="onnx_debug", options=options)
    assert_fresh(compiled, model)
    model.inner.weight.data[0, 0] += 3
    assert_fresh(compiled, model)
    values, storage = model.inner.weight.detach() * 2, model.inner.weight.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        model.inner.weight.copy_(values)
    assert_fresh(compiled, model)
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert (graph["runs"], graph["verdict"]) == (3, "ok")
    models = list((tmp_path / "latest").rglob("*.onnx"))
    assert len(models) == 3
    for path in models:
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_onnx_debug_looks_at_every_byte_of_the_weights_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that is not seen yet is told of as what it is: no node is wrong, and no session unstable."""
    model = large()
    options = {"dump_dir": str(tmp_path), "compare": "every"}
    compiled = torch.compile(model, backend="onnx_debug", options=options)
    assert_fresh(compiled, model)
    model.inner.weight.data[37, 41] += 100
    assert_fresh(compiled, model)
    assert "inner.weight changed without PyTorch's knowledge" in caplog.text
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert (graph["runs"], graph["verdict"], graph["repeated"]["0"]["differing_outputs"]) == (2, "ok", 0)


def test_onnx_debug_repeats_the_weights_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever weights another thread runs the graph with meanwhile."""
    model = Stack(2).eval()
    for layer in model.layers:
        layer.compile(backend="onnx_debug", options={"dump_dir": str(tmp_path), "compare": "every"})
    calls: list[object] = []
    run = RunnableRegion.run_to_compare

    def and_another_call(self: RunnableRegion, args: Sequence[object]) -> object:
        found = run(self, args)
        calls.append(args)
        self.session(calls[max(0, len(calls) - 2)])
        return found

    monkeypatch.setattr(RunnableRegion, "run_to_compare", and_another_call)
    with torch.no_grad():
        for _ in range(3):
            model(TOKENS)
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert (graph["runs"], graph["verdict"], graph["repeated"]["0"]["differing_outputs"]) == (6, "ok", 0)


class Stack(nn.Module):
    """Layers of one class, which are compiled one by one, and share their graph."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Network() for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        return [layer(tokens) for layer in self.layers]


def called_stack() -> tuple[Stack, list[torch.Tensor]]:
    """A stack whose layers were compiled and called three times, and its right results."""
    model = Stack().eval()
    for layer in model.layers:
        layer.compile(backend="onnxrt")
    with torch.no_grad():
        expected = [layer.forward(TOKENS) for layer in model.layers]
        for _ in range(3):
            torch.testing.assert_close(model(TOKENS), expected)
    return model, expected


def test_layers_that_share_a_graph_have_a_session_each() -> None:
    model, expected = called_stack()
    with torch.no_grad():
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert counted("weight_sets") == len(model.layers) - 1
        assert counted("weight_refreshes") == counted("weights_made_inputs") == 0

        model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()})
        expected = [layer.forward(TOKENS) for layer in model.layers]
        torch.testing.assert_close(model(TOKENS), expected)
        assert counted("weight_refreshes") == len(model.layers)
        assert counted("weights_made_inputs") == 0, "each changed once"

        model.layers[2].load_state_dict(model.layers[0].state_dict())  # a write to one of them
        expected[2] = expected[0]
        torch.testing.assert_close(model(TOKENS), expected)
        session = max(region_sessions(), key=lambda item: len(item.sets))
        assert len(session.sets) == len(model.layers)
        model.layers[1] = Network().eval()
        model.layers[1].compile(backend="onnxrt")
        gc.collect()
        expected[1] = model.layers[1].forward(TOKENS)
        torch.testing.assert_close(model(TOKENS), expected)
        assert len(session.sets) == len(model.layers), "those of the layer that is gone are not kept"
    assert counted("weight_refreshes") == 2 + len(model.layers)


def test_sessions_of_layers_do_not_busy_wait_for_each_other() -> None:
    called_stack()
    session = max(region_sessions(), key=lambda item: len(item.sets))
    bounds = [state.bound for state in session.sets.values()]
    options = [bound.ort_session(bound.threads).get_session_options() for bound in bounds]
    # Only the first was made before there were others.
    assert [item.get_session_config_entry("session.intra_op.allow_spinning") for item in options[1:]] == ["0"] * 3


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="not on Linux")
def test_the_threads_of_layers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of further layers are inputs of one session."""
    gc.collect()
    most = region_session.pool_threads() + 12
    monkeypatch.setattr(region_session, "most_threads", lambda: most)
    model = Stack(16).eval()
    for layer in model.layers:
        layer.compile(backend="onnxrt", options={"threads": 4, "cache": False})
    before = len(os.listdir("/proc/self/task"))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(TOKENS), [layer.forward(TOKENS) for layer in model.layers])
    assert counted("weight_sets") == 12 // 3 - 2  # the first is not counted, and one has its weights as inputs
    assert counted("weight_sets_full") == 1
    assert len(os.listdir("/proc/self/task")) - before < 16 * 3


def region_sessions() -> list[region_session.RegionSession]:
    return [item for item in gc.get_objects() if type(item) is region_session.RegionSession]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(5) > 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, x, -x)


def _give_publicly(options: onnxruntime.SessionOptions, constants: Mapping[str, torch.Tensor]) -> None:
    """Passes constants by ONNX Runtime's public interface, whose values have another reference count."""
    calls = PublicCalls()
    values = [
        calls.booleans(value) if value.dtype is torch.bool else calls.plain(value) for value in constants.values()
    ]
    options.add_external_initializers(list(constants), values)


@pytest.mark.parametrize(
    ("model", "give"),
    [
        (nn.Conv2d(3, 4, 3, bias=False), constants_module.give),
        (nn.Conv2d(3, 4, 3, bias=False).to(memory_format=torch.channels_last), constants_module.give),
        (Masked(), constants_module.give),
        (nn.Conv2d(3, 4, 3, bias=False), _give_publicly),
    ],
    ids=["rows", "channels last", "booleans", "rows, public"],
)
def test_weights_of_two_graphs_are_let_go_by_both(
    model: nn.Module, give: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "give", give)
    inputs = torch.randn(2, 3, 5, 5), torch.randn(3, 3, 5, 5)
    compiled = torch.compile(model, backend="onnxrt", dynamic=False)
    before = region_sessions()
    with torch.no_grad():
        for change in range(4):
            if change:
                new = {
                    name: tensor * -1 if tensor.is_floating_point() else ~tensor
                    for name, tensor in model.state_dict().items()
                }
                model.load_state_dict(new, assign=True)
                del new
            for x in inputs * 2:
                _assert_close(compiled(x), model(x))
    assert [len(item.sets) for item in region_sessions() if item not in before] == [1, 1]


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_graph_that_one_for_symbolic_sizes_replaced_holds_its_weights_no_longer(dynamic: bool | None) -> None:
    """Size 1 has a graph of its own. With ``dynamic=False`` each size has one, and none is freed."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    function = torch.compile(model, backend="onnxrt", dynamic=dynamic)
    others = region_sessions()
    with torch.no_grad():
        for size in (2, 3, 1, 2, 3, 1):
            torch.testing.assert_close(function(torch.ones(size, 4)), model(torch.ones(size, 4)))
    is_symbolic = dynamic is None
    sets = sorted(len(item.sets) for item in region_sessions() if item not in others)
    assert sets == ([0, 1, 1] if is_symbolic else [1, 1, 1]) and counted("weight_sets") == 0
    assert counted("replaced_sessions_freed") == is_symbolic


def test_only_the_graph_that_was_compiled_again_is_freed() -> None:
    """Not that of another function, or another result of ``torch.compile``, with the same weights."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    static, symbolic = (torch.compile(model, backend="onnxrt", dynamic=dynamic) for dynamic in (False, True))
    other = torch.compile(lambda x: model(x).sin(), backend="onnxrt", dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            for function, size in ((static, 2), (other, 2), (symbolic, 3)):
                function(torch.ones(size, 4))
    assert counted("replaced_sessions_freed") == counted("weight_sets") == 0


def test_a_freed_session_that_is_called_all_the_same_is_rebuilt_once() -> None:
    """That of a graph with another guard, besides the sizes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()

    def run(x: torch.Tensor, scale: str) -> torch.Tensor:
        return model(x) * (2 if scale == "twice" else 3)

    compiled = torch.compile(run, backend="onnxrt")
    with torch.no_grad():
        for size, scale in ((2, "twice"), *[(3, "thrice"), (2, "twice"), (4, "thrice")] * 3):
            x = torch.ones(size, 4)
            torch.testing.assert_close(compiled(x, scale), run(x, scale))
            if size == 3:
                with torch.no_grad():
                    model[0].weight.add_(1)
    assert counted("replaced_sessions_freed") == counted("weight_sets") == 1


def test_memory_that_is_written_to_while_another_has_its_place() -> None:
    """As an average of the weights that is swapped in by ``.data``; its own versions count the writes."""
    model = network(256)
    average = model.inner.weight.detach().clone()
    compiled = torch.compile(model, backend="onnxrt")
    for i in range(4):
        assert_fresh(compiled, model)
        model.inner.weight.data, average = average, model.inner.weight.data
        assert_fresh(compiled, model)
        average[3, 5 + i] += 1
        model.inner.weight.data, average = average, model.inner.weight.data


def test_weights_of_sets_that_are_too_many_are_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_session, "MOST_SETS", 2)
    model, expected = called_stack()
    with torch.no_grad():
        assert counted("weight_sets") == 1
        model.layers[3].inner.bias.data += 1
        expected[3] = model.layers[3].forward(TOKENS)
        torch.testing.assert_close(model(TOKENS), expected)


def test_weights_that_onnx_runtime_refuses_as_constants_are_tried_again(clock: Clock) -> None:
    """As often as waiting pays, and without a slow call in between."""
    model, compiled, _ = linear()
    clock.build, clock.call, clock.rejects = 10.0, 1.0, True
    call(model, compiled, 100)
    assert (counted("constant_weights"), counted("weights_left_inputs")) == (0, 4)
    assert clock.tried == [4, 0, 4, 4, 4]
    clock.rejects = False
    call(model, compiled, 200)
    assert clock.tried[5:] == [4] and counted("weights_made_constants") == 4


def test_memory_that_is_short_when_the_model_is_compiled_may_suffice_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled, _ = linear()
    clock.build, clock.call = 10.0, 1.0
    with monkeypatch.context() as patched:
        patched.setattr(region_session, "available", lambda: 0)
        call(model, compiled, 3)
    assert counted("weights_left_inputs") == 4
    call(model, compiled, 20)
    assert counted("weights_made_constants") == 4


def test_a_session_that_cannot_be_rebuilt(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are inputs then; calls take no lock, and it is tried again."""
    model, compiled, step = linear()
    clock.build, clock.call = 10.0, 1.0
    call(model, compiled, 10)
    clock.rejects = True
    step()
    slow = []
    current_state = region_session.RegionSession._current_state
    monkeypatch.setattr(
        region_session.RegionSession, "_current_state", lambda *args: slow.append(1) or current_state(*args)
    )
    call(model, compiled, 100)
    assert clock.tried == [4, 4, 0, 4, 4, 4]
    assert len(slow) == 4, "one for the change, one for each attempt"
    clock.rejects = False
    call(model, compiled, 200)
    assert clock.tried[6:] == [4]
    assert counted("runtime_failures") == 0


# The watch


def test_a_watch_sees_each_byte() -> None:
    """Of small tensors at once, of large ones within the bound, whatever their sizes."""
    tensors = [torch.zeros(700, 1001), torch.zeros(3, dtype=torch.int8), torch.zeros(5, 7).t(), torch.tensor(1.0)]
    tensors += [torch.zeros(WHOLE + odd, dtype=torch.bool) for odd in (0, 1)]
    tensors += [torch.zeros(301, 77, dtype=torch.bfloat16).t(), torch.zeros(4, 3, 50, 50)[1:]]
    watch = Watch(tensors)
    for i, tensor in enumerate(tensors):
        memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        calls = 1 if tensor.nbytes <= WHOLE else CALLS
        for place in {0, len(memory) // 3, len(memory) // 2, len(memory) - 1}:
            memory.data[place] ^= 1
            assert not all(watch.is_unchanged(tensors) for _ in range(calls))
            assert watch.changed(tensors) == ([i], [i] if calls > 1 else [])
            memory.data[place] ^= 1
            assert all(watch.is_unchanged(tensors) for _ in range(CALLS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_watch_sees_changes_of_the_highest_bits(dtype: torch.dtype) -> None:
    """Such as other signs, of an even number of elements: their sum is none."""
    for places in (slice(None), slice(1, None, 2), [1001, 3003]):
        tensor = torch.ones(2**17, dtype=dtype)
        watch = Watch([tensor], complete=True)
        tensor.data[places] *= -1
        assert not watch.is_unchanged([tensor])
        assert watch.changed([tensor]) == ([0], [])


def test_a_write_that_ends_while_the_watch_looks_is_no_unseen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts a write when it has ended."""
    tensor = torch.zeros(8 * WHOLE, dtype=torch.uint8)
    watch = Watch([tensor])
    tensor.data.add_(1)
    digest = changes.xxh3_64_intdigest

    def digest_meanwhile(memory: memoryview) -> int:
        monkeypatch.setattr(changes, "xxh3_64_intdigest", digest)
        torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))
        return digest(memory)

    monkeypatch.setattr(changes, "xxh3_64_intdigest", digest_meanwhile)
    assert watch.changed([tensor]) == ([0], [])


def test_a_watch_of_nothing_sees_no_change() -> None:
    watch = Watch([])
    assert watch.is_unchanged([])
    assert watch.changed([]) == ([], [])


def test_a_snapshot_tells_which_tensors_stayed_the_same() -> None:
    tensors = [torch.zeros(100) for _ in range(6)]
    tensors[4].untyped_storage().resize_(0)
    snapshot = Snapshot(enumerate(tensors))
    tensors[0].add_(1)
    tensors[1].data[3] = 1
    tensors[2].data = torch.zeros(100)
    tensors[3].untyped_storage().resize_(0)
    assert snapshot.unchanged(enumerate(tensors)) == {5}


class WithPositions(nn.Module):
    """Lookups at constant indices (positions) and at the user's, in one table and in two."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.table = nn.Embedding(9, 8), nn.Embedding(20, 8)
        self.register_buffer("order", torch.arange(5).flip(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens) + self.positions(self.order + 1) * self.positions(tokens.clamp(max=8)).sin()


def test_a_lookup_at_known_indices_is_made_once() -> None:
    model = WithPositions()
    with torch.no_grad():
        [graph] = compile_and_keep(model, TOKENS)
        session = graph.regions[0].bound
        nodes = collections.Counter(node.op_type for node in optimized_model(session)[0].graph)
        assert nodes["Gather"] == 2, "those at the tokens"
        compiled = torch.compile(model, backend="onnxrt")
        for _ in range(2):
            torch.testing.assert_close(compiled(TOKENS), model(TOKENS))
            model.order.add_(1)


def test_a_tied_table_is_read_in_pytorchs_memory_and_packed_for_the_product() -> None:
    model = network()
    with torch.no_grad():
        [graph] = compile_and_keep(model, TOKENS)
    session = graph.regions[0].bound
    tables = [name for name in session.input_names if name.endswith(".table")]
    assert [name.removesuffix(".table") in session.constants for name in tables] == [True]
