"""The operator tools: which calls they see, what they report, and that they do not change the model."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onnxscript import opset18
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from dynamo_backends import op_tools, register_converter, unregister_converter
from dynamo_backends.cli import main
from dynamo_backends.common import operator_watchers
from dynamo_backends.debug.manifest import flush_manifests
from dynamo_backends.dumps.reading import find_run
from dynamo_backends.numerics import rule, whole_graph
from dynamo_backends.op_tools.capture import operator_folder
from dynamo_backends.op_tools.captured import find_calls, run_call
from dynamo_backends.op_tools.names import function_name, function_of, is_query

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ["torch", "aten"]


def quiet(tool: type[op_tools.OpTool], **arguments: object) -> op_tools.OpTool:
    return tool(quiet=True, **arguments)


def tools(folder: Path) -> dict[str, Callable[..., op_tools.OpTool]]:
    """Each tool that does not change results."""
    return {
        "capture": lambda **arguments: op_tools.OpCapture(folder, quiet=True, **arguments),
        "compare": lambda **arguments: op_tools.OpAutoCompare(capture=None, quiet=True, **arguments),
        "time": lambda **arguments: op_tools.OpTimeMeasure(quiet=True, **arguments),
        "overflow": lambda **arguments: op_tools.OpOverflowCheck(quiet=True, **arguments),
        "observe": lambda **arguments: op_tools.OpObserve(quiet=True, **arguments),
        "fallback": lambda **arguments: op_tools.OpFallback(quiet=True, **arguments),
    }


TOOLS = sorted(tools(Path()))


@pytest.fixture
def bert_step() -> Callable[[], list[torch.Tensor]]:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    model = BertForSequenceClassification(config).train()  # with dropout
    ids = torch.randint(0, 50, (2, 8))

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        loss = model(ids, labels=torch.tensor([0, 1])).loss
        loss.backward()
        return [loss, *(p.grad for p in model.parameters()), torch.rand(3)]

    return step


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TOOLS)
def test_a_model_gives_the_same_bits_with_a_tool(
    name: str, level: str, tmp_path: Path, bert_step: Callable[[], list[torch.Tensor]]
) -> None:
    expected = bert_step()
    tool = tools(tmp_path)[name](level=level)
    with tool:
        found = bert_step()
    assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, expected, bert_step()))  # nothing of it is left
    if name == "compare":
        assert tool.comparisons and not tool.failed and tool.unchecked.keys() <= {"aten.empty_like.default"}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TOOLS)
def test_nothing_remains_after_an_exception_or_a_later_backward(name: str, level: str, tmp_path: Path) -> None:
    x = torch.randn(3, requires_grad=True)
    tool = tools(tmp_path)[name](level=level)
    with pytest.raises(ZeroDivisionError), tool:
        y = (x * 2).sin()
        raise ZeroDivisionError
    assert not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()
    assert not operator_watchers.has_watchers()
    before = len(getattr(tool, "comparisons", [])), len(list(tmp_path.rglob("*")))
    y.sum().backward()
    assert (len(getattr(tool, "comparisons", [])), len(list(tmp_path.rglob("*")))) == before
    with pytest.raises(RuntimeError, match="size of tensor"), tool:  # the operator's own error is the user's
        torch.ones(2) + torch.ones(3)


def test_tools_nest_and_stop_in_any_order() -> None:
    first, second = op_tools.OpObserve(quiet=True), op_tools.OpObserve(quiet=True, level="aten")
    third = op_tools.OpObserve(quiet=True)
    for tool in (first, second, third):
        tool.start()
    torch.ones(2).exp()
    first.stop()
    torch.ones(2).sin()
    second.stop()
    torch.ones(2).cos()
    third.stop()
    names = [{signature.call.split("(")[0] for signature in tool.signatures} for tool in (first, second, third)]
    assert names[0] == {"torch.ones", "torch.Tensor.exp"}
    assert names[1] == {"aten.ones.default", "aten.exp.default", "aten.sin.default"} or "aten.sin.default" in names[1]
    assert "aten.cos.default" not in names[1]
    assert names[2] == {"torch.ones", "torch.Tensor.exp", "torch.Tensor.sin", "torch.Tensor.cos"}
    with pytest.raises(RuntimeError, match="started already"), first:
        first.start()
    assert not first.is_running


def test_a_nested_comparison_is_not_seen_by_the_tool_around_it() -> None:
    observed = op_tools.OpObserve(quiet=True)
    with observed, op_tools.OpAutoCompare(capture=None, quiet=True), op_tools.OpOverflowCheck(quiet=True):
        torch.ones(2).exp()
    assert sorted(item.call.split("(")[0] for item in observed.signatures) == ["torch.Tensor.exp", "torch.ones"]


class TestWhichOperators:
    @staticmethod
    def seen(tool: op_tools.OpObserve) -> set[str]:
        x = torch.ones(2, 3)
        with tool:
            F.gelu(F.linear(x, x)) + 1
            x.add(x)
        return {signature.call.split("(")[0] for signature in tool.signatures}

    def test_names_are_those_of_the_users_code(self) -> None:
        assert self.seen(op_tools.OpObserve(quiet=True)) == {
            "torch.nn.functional.gelu",
            "torch.nn.functional.linear",
            "torch.Tensor.add",
        }
        aten = self.seen(op_tools.OpObserve(quiet=True, level="aten"))
        assert {"aten.mm.default", "aten.gelu.default", "aten.add.Tensor"} <= aten

    @pytest.mark.parametrize("include", ["*gelu*,torch.Tensor.add", ["*gelu*", "torch.Tensor.add"]])
    def test_include_and_exclude(self, include: object) -> None:
        assert self.seen(op_tools.OpObserve(quiet=True, include=include)) == {
            "torch.nn.functional.gelu",
            "torch.Tensor.add",
        }
        found = self.seen(op_tools.OpObserve(quiet=True, include=include, exclude="*.add"))
        assert found == {"torch.nn.functional.gelu"}

    def test_environment(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("OP_OBSERVE_LIST", "*gelu*, torch.Tensor.add")
        monkeypatch.setenv("OP_OBSERVE_DISABLE_LIST", "torch.Tensor.*")
        assert self.seen(op_tools.OpObserve(quiet=True, include="*linear*")) == {"torch.nn.functional.gelu"}
        for variable in ("OP_AUTOCOMPARE_LIST", "OP_AUTO_COMPARE_LIST"):
            monkeypatch.setenv(variable, "torch.sin")
            with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
                torch.sin(torch.ones(1))
                torch.cos(torch.ones(1))
            assert [item.name for item in tool.comparisons] == ["torch.sin"]
            monkeypatch.delenv(variable)

    def test_predicate(self) -> None:
        tool = op_tools.OpObserve(quiet=True, predicate=lambda call: len(call.args) == 2)
        assert self.seen(tool) == {"torch.nn.functional.linear", "torch.Tensor.add"}

    def test_a_predicate_that_fails_is_said_once_and_the_model_runs_on(self, caplog: pytest.LogCaptureFixture) -> None:
        tool = op_tools.OpObserve(quiet=True, predicate=lambda call: call.nothing)
        assert self.seen(tool) == set()
        assert sum("torch.Tensor.add" in record.message for record in caplog.records) == 1

    def test_what_was_decided_is_in_the_log_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "dynamo_backends.op_tools")
        self.seen(op_tools.OpObserve(quiet=True, include=["*add", "torch.gellu"]))
        lines = [record.message for record in caplog.records]
        assert lines.count("apply OpObserve on torch.Tensor.add") == 1
        assert lines.count("skip OpObserve on torch.nn.functional.linear") == 1
        assert sum("'torch.gellu'" in line for line in lines) == 1

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="'torch' .*'aten'.* 'dispatcher'"):
            op_tools.OpObserve(level="dispatcher")
        with pytest.raises(TypeError, match="function add|built-in method add"):
            op_tools.OpObserve(include=[torch.add])
        with pytest.raises(ValueError, match="not 'cuda:99'"):
            op_tools.OpAutoCompare(reference="cuda:99")
        with pytest.raises(ValueError, match="floating-point dtype"):
            op_tools.OpDtypeCast(dtype=torch.int8)

    def test_names_lead_back_to_functions(self) -> None:
        for function in (
            torch.add,
            torch.Tensor.add,
            F.linear,
            F.gelu,
            torch._foreach_norm,
            torch.ops.aten.add,
            torch.ops.aten.add.Tensor,
        ):
            assert function_of(function_name(function)) is function
        for name in (
            "os.system",
            "torch.os.system",
            "torch.__class__",
            "torch.load",
            "builtins.eval",
            "aten.no_such.default",
            "a.b.c.d",
        ):
            with pytest.raises(LookupError):
                function_of(name)

    def test_what_only_asks_is_no_operator(self) -> None:
        for function in (torch.Tensor.size, torch.Tensor.dtype.__get__, torch.Tensor.is_contiguous, torch.is_tensor):
            assert is_query(function)
        with op_tools.OpObserve(quiet=True) as tool, torch.profiler.record_function("step"):
            torch.ones(2)
        assert [seen.call.split("(")[0] for seen in tool.signatures] == ["torch.ones"]
        for function in (torch.Tensor.T.__get__, torch.Tensor.item, torch.Tensor.isnan, torch.equal):
            assert not is_query(function)


class TestCapture:
    @staticmethod
    def load(call: Path, what: str) -> object:
        return torch.load(call / f"{what}.pth", weights_only=True)

    def test_what_goes_in_and_out_forward_and_backward(self, tmp_path: Path) -> None:
        x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        other = torch.randn(2, 3, requires_grad=True)
        with op_tools.OpCapture(tmp_path, quiet=True) as tool:
            hidden = x * other
            result = F.linear(hidden, w)
            (result.sum() + hidden.sum()).backward()
        calls = tool.folder.location
        assert calls.parent == tmp_path / "0"
        linear = calls / "torch.nn.functional.linear" / "0"
        given = self.load(linear, "input")
        assert torch.equal(given["args"][0], hidden) and torch.equal(given["args"][1], w)
        assert torch.equal(self.load(linear, "output")["output"], result)
        assert torch.equal(self.load(linear, "grad_outputs")["output"], torch.ones(2, 4))
        gradients = self.load(linear, "grad_inputs")
        # what this call adds, not what reached the tensor from all its readers
        assert torch.allclose(gradients["args[0]"], torch.ones(2, 4) @ w)
        assert torch.allclose(gradients["args[1]"], w.grad)
        description = json.loads((linear / "call.json").read_text())
        assert description["name"] == "torch.nn.functional.linear"
        assert Path(description["source"].rpartition(":")[0]).name == "test_op_tools.py"

    def test_an_argument_is_stored_as_it_was_before_the_call(self, tmp_path: Path) -> None:
        x = torch.ones(3)
        with op_tools.OpCapture(tmp_path, quiet=True) as tool:
            x.add_(1)
            torch.sub(x, 1, out=(y := torch.empty(3)))
            x[1:] = 5
        calls = tool.folder.location
        assert torch.equal(self.load(calls / "torch.Tensor.add_" / "0", "input")["args"][0], torch.ones(3))
        assert torch.equal(self.load(calls / "torch.Tensor.add_" / "0", "output")["output"], torch.full((3,), 2.0))
        set_item = calls / "torch.Tensor.__setitem__" / "0"
        assert torch.equal(self.load(set_item, "output")["changed"]["args[0] after it"], torch.tensor([2.0, 5, 5]))
        assert torch.equal(y, torch.ones(3))

    def test_a_view_is_stored_small_and_with_its_strides(self, tmp_path: Path) -> None:
        large = torch.randn(1000, 1000)
        for value in (large[:3, :4], large[:50].t(), large[0].expand(4, 1000), torch.empty(0, 3), large[:, 7]):
            with op_tools.OpCapture(tmp_path, quiet=True, include="*.exp") as tool:
                value.exp()
            file = tool.folder.location / "torch.Tensor.exp" / "0" / "input.pth"
            stored = torch.load(file, weights_only=True)["args"][0]
            assert torch.equal(stored, value)
            assert file.stat().st_size < 4 * value.numel() + 5_000
        assert stored.stride() == (1,)  # a column alone needs no more than itself

    def test_limits_and_samples(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        x = torch.randn(100)
        with op_tools.OpCapture(tmp_path, quiet=True, every=3, first=2, max_bytes=100) as tool:
            for _ in range(12):
                x.sin()
        calls = sorted(path.name for path in (tool.folder.location / "torch.Tensor.sin").iterdir())
        assert calls == ["0", "3"]
        stored = self.load(tool.folder.location / "torch.Tensor.sin" / "0", "input")["args"][0]
        assert stored["value"]["shape"] == [100] and stored["value"]["max"] == pytest.approx(float(x.max()))
        with op_tools.OpCapture(tmp_path / "full", quiet=True, min_free_bytes=2**62):
            x.sin()
            x.sin()
        assert not list((tmp_path / "full").rglob("*.pth"))
        assert sum("min_free_bytes" in record.message for record in caplog.records) == 1
        blocked = tmp_path / "file"
        blocked.write_text("")
        with op_tools.OpCapture(blocked, quiet=True):
            assert torch.equal(x.sin(), torch.sin(x))

    @pytest.mark.parametrize("arguments", [{"every": 0}, {"first": -1}])
    def test_wrong_samples(self, arguments: dict[str, int]) -> None:
        with pytest.raises(ValueError):
            op_tools.OpCapture(**arguments)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Operators of a user: one with a wrong kernel of float32, one with a wrong derivative."""
    library = torch.library.Library("op_tools_test", "DEF")
    library.define("wrong(Tensor x) -> Tensor")
    library.impl("wrong", lambda x: x.exp() * (1.001 if x.dtype is torch.float32 else 1), "CPU")
    torch.library.custom_op("op_tools_test::bent", mutates_args=())(_bent)
    torch.library.register_autograd(
        "op_tools_test::bent", lambda context, grad: grad * context.x.cos() * 1.01, setup_context=_keep
    )
    yield library
    library._destroy()


def _swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    return x * torch.sigmoid(x * beta)


def _bent(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def _keep(ctx: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.x = inputs[0]  # type: ignore[attr-defined]


def test_each_name_has_a_folder_of_its_own() -> None:
    names = ["a::b", "a__b", "a b", "../a", "torch.add", "x" * 400, ""]
    folders = [operator_folder(name) for name in names]
    assert len(set(folders)) == len(names) and folders[4] == "torch.add"
    assert all("/" not in folder and len(folder) < 200 for folder in folders)


class TestCompare:
    def test_a_wrong_operator_is_found_and_captured(self, library: torch.library.Library, tmp_path: Path) -> None:
        stream = io.StringIO()
        x = torch.randn(5)
        with op_tools.OpAutoCompare(capture=tmp_path, stream=stream, json=tmp_path / "found.json") as tool:
            torch.ops.op_tools_test.wrong(x.sin()).sum()
        assert [item.name for item in tool.failed] == ["torch.ops.op_tools_test.wrong"]
        assert "test_op_tools.py" in tool.failed[0].source
        lines = stream.getvalue()
        assert "allclose: False" in lines and lines.count("allclose: True") == 2
        found = json.loads((tmp_path / "found.json").read_text())
        assert [item["allclose"] for item in found["comparisons"]] == [True, False, True]
        (call,) = [path.parent for path in tmp_path.rglob("call.json")]
        assert call.parent.name == "torch.ops.op_tools_test.wrong"
        assert torch.equal(torch.load(call / "input.pth", weights_only=True)["args"][0], x.sin())
        reference = torch.load(call / "reference.pth", weights_only=True)["output"]
        assert torch.allclose(reference, x.sin().double().exp())
        assert main(["op", "run", str(call)]) == 1

    def test_the_table_starts_with_what_is_wrong_and_then_with_the_largest_share(
        self, library: torch.library.Library
    ) -> None:
        x = torch.randn(50)
        with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
            torch.ops.op_tools_test.wrong(x.neg() * 1.1)
        names = [line.split()[0] for line in tool.table().splitlines()[2:]]
        assert names == ["torch.ops.op_tools_test.wrong", "torch.Tensor.mul", "torch.Tensor.neg"]

    def test_failing_calls_leave_space_on_the_disk(
        self, library: torch.library.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
        x = torch.randn(5, requires_grad=True)
        with op_tools.OpAutoCompare(capture=tmp_path, quiet=True) as tool:
            torch.ops.op_tools_test.wrong(x.detach())
        assert len(tool.failed) == 1
        assert not list(tmp_path.rglob("call.json"))

    def test_only_the_first_failing_calls_are_captured(self, library: torch.library.Library, tmp_path: Path) -> None:
        with op_tools.OpAutoCompare(capture=tmp_path, capture_first=2, quiet=True) as tool:
            for _ in range(4):
                torch.ops.op_tools_test.wrong(torch.ones(2))
        assert len(tool.failed) == 4 and len(list(tmp_path.rglob("call.json"))) == 2

    def test_a_wrong_derivative_is_found_by_differences(self, library: torch.library.Library) -> None:
        x = torch.randn(50, requires_grad=True)
        for numerical, failing in ((False, []), (True, ["gradient of args[0] by differences"])):
            with op_tools.OpAutoCompare(capture=None, quiet=True, numerical_gradients=numerical) as tool:
                torch.ops.op_tools_test.bent(x * 2).sum().backward()
            assert [item.value for item in tool.failed] == failing
            assert {item.name for item in tool.failed} <= {"torch.ops.op_tools_test.bent"}

    @pytest.mark.parametrize("factors", [(1.0, 1.0), (1.01, 1.0), (1.0, 1.01), (1.0, -1.0)])
    @pytest.mark.parametrize("has_setup", [False, True])
    def test_the_backward_of_a_function_is_compared_with_differences_of_its_forward(
        self, factors: tuple[float, float], has_setup: bool
    ) -> None:
        """The reference is ``gradcheck``; what is called is bound before the tool starts."""

        class Scaled(torch.autograd.Function):
            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor, None]:
                x, w = ctx.saved_tensors
                return grad * w * x.cos() * factors[0], (grad * x.sin()).sum(0) * factors[1], None

        def compute(x: torch.Tensor, w: torch.Tensor, power: int) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin() * w**power, x.argmax()

        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, power: int) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.save_for_backward(x, w)
            return compute(x, w, power)

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
            ctx.save_for_backward(*inputs[:2])

        Scaled.forward = staticmethod(compute if has_setup else forward)  # type: ignore[method-assign]
        if has_setup:
            Scaled.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
        scaled = Scaled.apply
        torch.manual_seed(0)
        x, w = torch.randn(20, 5, requires_grad=True), torch.randn(5, requires_grad=True)
        is_right = torch.autograd.gradcheck(
            lambda *given: scaled(*given)[0], (x.double(), w.double(), 1), raise_exception=False
        )
        with op_tools.OpAutoCompare(capture=None, quiet=True, numerical_gradients=True) as tool:
            expected = scaled(x * 2, w, 1)[0]
            expected.square().sum().backward()
        wrong = [f"gradient of args[{i}] by differences" for i, factor in enumerate(factors) if factor != 1]
        assert [item.value for item in tool.failed] == wrong
        assert all(item.name.endswith("Scaled.apply") for item in tool.failed)
        assert is_right == (factors == (1.0, 1.0)) and not tool.unchecked
        compared = {item.value for item in tool.comparisons if item.name.endswith("Scaled.apply")}
        assert compared > {"output[0]", "output[1]", "gradient of args[0]", "gradient of args[1]"}
        assert torch.equal(scaled(x * 2, w, 1)[0], expected)

    def test_a_derivative_that_differences_do_not_show_is_said(self) -> None:
        with op_tools.OpAutoCompare(capture=None, quiet=True, numerical_gradients=True) as tool:
            torch.zeros(3, requires_grad=True).relu().sum().backward()
        assert "no derivative" in tool.unchecked["torch.Tensor.relu by differences"] and not tool.failed
        with pytest.raises(ValueError, match="level='torch'"):
            op_tools.OpAutoCompare(numerical_gradients=True, level="aten")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64])
    def test_correct_operators_are_not_accused(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        gradients = dtype.is_floating_point
        x = torch.randint(-5, 5, (6, 8)).to(dtype).requires_grad_(gradients)
        with op_tools.OpAutoCompare(capture=None, quiet=True, numerical_gradients=True) as tool:
            y = (x @ x.t() - x.sum()).sum() + x.mean(dim=0).sum() if dtype.is_floating_point else x * x + x.cumsum(0)
            x.detach().clone().fill_(3).mul_(2)
            z = F.dropout(x.detach().float() if not dtype.is_complex else x.detach().abs(), 0.5)
            z[0] = z[1]
            torch.cat([z, z.T.contiguous().view(6, 8)]).argmax(0).tolist()
            if gradients:
                (y + F.softmax(x, 0).sum() + F.layer_norm(x, (8,)).square().sum() + (x * x).sum()).backward()
        assert tool.failed == []
        assert len(tool.comparisons) > 10

    def test_a_sum_may_have_the_rounding_of_large_terms_that_cancel(self) -> None:
        generator = torch.Generator().manual_seed(0)
        terms = torch.rand(200_000, generator=generator) * 1000
        negative = -terms[torch.randperm(len(terms), generator=generator)]
        with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
            torch.cat([terms, negative]).sum()
        assert tool.failed == []

    def test_what_cannot_be_compared_is_said(self) -> None:
        with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
            torch.empty(3)
            for _ in range(2):
                torch.linalg.eigh(torch.eye(3))
            torch.func.vmap(torch.sin)(torch.ones(3))
            ctc = torch.randn(12, 2, 5).log_softmax(2), torch.ones(2, 4, dtype=torch.int64), (12, 9), (4, 2)
            F.ctc_loss(*ctc)
            torch._ctc_loss(*ctc)
        assert not tool.failed
        assert "unset" in tool.unchecked["torch._ctc_loss"]
        assert any(item.name == "torch.nn.functional.ctc_loss" for item in tool.comparisons)
        assert "without values" in tool.unchecked["torch.empty"]
        assert "not unique" in tool.unchecked["torch.linalg.eigh"]
        line = next(line for line in tool.table().splitlines() if line.startswith("torch.linalg.eigh "))
        assert line.split()[1] == "2", "calls"
        assert re.search(r"test_op_tools.py:\d+", line)

    def test_with_onnx_runtime(self, library: torch.library.Library) -> None:
        x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        with op_tools.OpAutoCompare(reference="onnx", capture=None, quiet=True) as tool:
            F.gelu(F.linear(x, w)).sum().backward()
            torch.ops.op_tools_test.wrong(x.detach())
        assert not tool.failed
        assert {(item.name, item.value) for item in tool.comparisons} >= {
            ("torch.nn.functional.linear", "gradient of args[1]"),
            ("torch.nn.functional.gelu", "output"),
        }
        assert set(tool.unchecked) == {"torch.ops.op_tools_test.wrong"}

    def test_a_wrong_converter_is_found_on_onnx_runtime_alone(self) -> None:
        swish = torch.library.custom_op("op_tools_test_onnx::swish", mutates_args=())(_swish)
        swish.register_fake(lambda x, beta: torch.empty_like(x))
        register_converter(swish)(lambda x, beta: opset18.Mul(x, opset18.Sigmoid(x)))  # beta is missing
        try:
            for reference, failed in (("float64", []), ("onnx", [1])):
                with op_tools.OpAutoCompare(reference=reference, include="*swish*", capture=None, quiet=True) as tool:
                    for beta in (1.0, 2.0):
                        swish(torch.arange(4.0), beta)
                assert [item.number for item in tool.failed] == failed and not tool.unchecked
        finally:
            unregister_converter(swish)
        assert tool.failed[0].max_diff == pytest.approx(0.2024, abs=1e-3)

    def test_with_onnx_runtime_conditions_are_tried_in_pytorch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def needs_a_try(*values: Any) -> tuple[rule.Measure, rule.Beyond]:
            found, beyond = rule.judge(*values)
            return (found if values[-1] is not values[2] and values[-1] is not None else doubted(found)), beyond

        def doubted(found: rule.Measure) -> rule.Measure:
            return dataclasses.replace(found, share=2.0)

        monkeypatch.setattr(whole_graph, "judge", needs_a_try)
        x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        with op_tools.OpAutoCompare(reference="onnx", capture=None, quiet=True) as tool:
            for _ in range(2):
                F.gelu(F.linear(x, w)).sum().backward()
        assert tool.unchecked == {} and tool.failed == []
        gradients = [item.name for item in tool.comparisons if item.value.startswith("gradient")]
        assert gradients.count("torch.nn.functional.linear") == 4

    def test_a_backward_that_the_reference_lacks_is_said(self, library: torch.library.Library) -> None:
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            if grad.dtype is torch.float64:
                raise RuntimeError("no float64 here")
            return grad * 2

        torch.library.custom_op("op_tools_test::gone", mutates_args=())(twice)
        torch.library.register_autograd("op_tools_test::gone", backward)
        with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
            torch.ops.op_tools_test.gone(torch.ones(2, requires_grad=True)).sum().backward()
        assert "no float64 here" in tool.unchecked["torch.ops.op_tools_test.gone backward"]

    def test_results_that_feed_each_others_gradients_are_not_judged_on_them(self) -> None:
        @torch.overrides.wrap_torch_function(lambda x: (x,))
        def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x.sin()
            return first, first * 2

        with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
            first, second = both(torch.randn(3, requires_grad=True))
            (first + second).sum().backward()
        (name,) = {item.name for item in tool.comparisons if "both" in item.name}
        assert f"{name} backward" in tool.unchecked and not tool.failed

    def test_a_gradient_is_not_judged_on_changed_arguments(self) -> None:
        x, y = torch.randn(3, requires_grad=True), torch.randn(3)
        with op_tools.OpAutoCompare(capture=None, quiet=True) as tool:
            result = (x + y).sum()
            y.zero_()
            result.backward()
        assert "changed in place" in tool.unchecked["torch.Tensor.add backward"]


def test_time() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    stream = io.StringIO()
    with op_tools.OpTimeMeasure(stream=stream) as tool:
        for _ in range(2):
            F.softmax(x @ x, -1).sum().backward()
    by_name = {operator.name: operator for operator in tool.operators}
    assert by_name["torch.Tensor.matmul"].calls == 2
    assert 0 < by_name["torch.Tensor.matmul"].backward < 10
    assert "f32[8, 8]" in by_name["torch.Tensor.matmul"].slowest
    assert "torch.nn.functional.softmax" in stream.getvalue()


class TestOverflow:
    def test_the_operator_that_makes_it_first_is_named(self) -> None:
        x = torch.tensor([1.0, 100.0])
        stream = io.StringIO()
        with op_tools.OpOverflowCheck(stream=stream) as tool:
            mask = torch.zeros(2).masked_fill(torch.tensor([True, False]), float("-inf"))
            F.softmax(x + mask, 0)
            (x.exp() + 1).sum()
            torch.full((2,), 50.0).exp_().mul_(torch.tensor(1e30))
        assert [item.name for item in tool.found] == ["torch.Tensor.exp", "torch.Tensor.mul_"]
        assert tool.first.infinite == 1 and "test_op_tools.py" in tool.first.source
        assert "torch.Tensor.exp made 1 infinite" in stream.getvalue()

    def test_the_line_of_the_library_and_the_module_stand_beside_the_users_line(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        model = BertForSequenceClassification(config).eval()
        with torch.no_grad():
            model.bert.encoder.layer[1].intermediate.dense.weight.fill_(3e38)
        stream = io.StringIO()
        only = {"include": "torch.nn.functional.linear", "stream": stream}
        with (
            op_tools.OpOverflowCheck(**only) as check,
            op_tools.OpObserve(**only) as observe,
            op_tools.OpAutoCompare(capture=None, **only) as compare,
            op_tools.OpCapture(tmp_path, include="torch.nn.functional.linear", quiet=True) as capture,
            torch.no_grad(),
        ):
            model(torch.zeros(1, 4, dtype=torch.int64))
        assert check.first is not None
        (compared,) = [item for item in compare.comparisons if item.number == check.first.number]
        (captured,) = [call for call in find_calls(capture.folder.location) if call.number == check.first.number]
        module = "bert.encoder.layer.1.intermediate.dense"
        for source, found in (
            (check.first.source, check.first.module),
            (compared.source, compared.module),
            (captured.source, captured.module),
        ):
            assert re.fullmatch(r"transformers/.*bert.py:\d+, called from .*test_op_tools.py:\d+", source)
            assert found == module
        assert observe.signatures[0].module == "bert.encoder.layer.0.attention.self.query"
        text = stream.getvalue()
        assert len([line for line in text.splitlines() if "modeling_bert.py" in line and module in line]) >= 3
        assert main(["op", "ls", str(captured.folder)]) == 0

    def test_in_the_backward(self) -> None:
        x = torch.zeros(2, requires_grad=True)
        with op_tools.OpOverflowCheck(quiet=True) as tool:
            (x.sqrt() * 1).sum().backward()
        assert [(item.name, item.value) for item in tool.found] == [("torch.Tensor.sqrt", "gradient of args[0]")]

    def test_it_may_end_the_run(self) -> None:
        with (
            pytest.raises(RuntimeError, match=r"torch\.log .*1 infinite"),
            op_tools.OpOverflowCheck(quiet=True, raises=True),
        ):
            torch.log(torch.zeros(1))


class TestConversion:
    def test_cast(self) -> None:
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        with op_tools.OpDtypeCast(include=["*matmul*", "*.add_"], dtype=torch.bfloat16, quiet=True) as tool:
            y = x @ w
            y.sum().backward()
            z = torch.ones(2).add_(torch.tensor(1 / 512))
        expected = (x.detach().bfloat16() @ w.detach().bfloat16()).float()
        assert y.dtype is torch.float32 and torch.equal(y, expected)
        assert x.grad is not None and x.grad.dtype is torch.float32
        assert torch.equal(z, torch.ones(2))  # 1 + 1/512 is 1 in bfloat16
        assert tool.converted == {"torch.Tensor.matmul": 1, "torch.Tensor.add_": 1}

    def test_cast_without_a_dtype_is_to_float32(self) -> None:
        x = torch.full((1,), 256.0, dtype=torch.bfloat16)
        with op_tools.OpDtypeCast(quiet=True) as tool:
            y = torch.var(torch.cat([x, x + 2]))
            torch.ones(2).exp()
        assert y.dtype is torch.bfloat16 and tool.converted["torch.var"] == 1
        assert tool.skipped["torch.Tensor.exp"].startswith("its arguments are float32 (")

    @pytest.mark.parametrize("level", LEVELS)
    def test_fallback_to_the_reference(self, level: str, bert_step: Callable[[], list[torch.Tensor]]) -> None:
        expected = bert_step()
        with op_tools.OpFallback(dtype=torch.float64, level=level, quiet=True) as tool:
            found = bert_step()
        for first, other in zip(expected, found, strict=True):
            assert first.dtype == other.dtype
            assert torch.allclose(first, other, atol=1e-5)
        assert any("linear" in name or "addmm" in name for name in tool.converted)
        assert any("view" in why for why in tool.skipped.values())

    def test_results_have_the_dtype_they_would_have(self) -> None:
        x = torch.randn(4, 4)
        with torch.autocast("cpu", torch.bfloat16), op_tools.OpFallback(dtype=torch.float64, quiet=True):
            y = F.linear(x, x)
            z = torch.zeros(3, dtype=torch.float16) + x[0, :3].half()
            w = x.to(torch.float16)
        assert (y.dtype, z.dtype, w.dtype) == (torch.bfloat16, torch.float16, torch.float16)

    def test_running_statistics_are_updated_once(self) -> None:
        norm = torch.nn.BatchNorm1d(4)
        norm(x := torch.randn(8, 4))
        other = torch.nn.BatchNorm1d(4)
        with op_tools.OpFallback(dtype=torch.float64, quiet=True) as tool:
            other(x)
        assert tool.converted == {"torch.nn.functional.batch_norm": 1}
        torch.testing.assert_close(norm.running_mean, other.running_mean)
        assert int(other.num_batches_tracked) == 1

    def test_what_is_there_already_does_not_fall_back(self) -> None:
        with op_tools.OpFallback(quiet=True) as tool:
            torch.ones(2).exp()
        assert not tool.converted and "cpu already" in tool.skipped["torch.Tensor.exp"]

    def test_an_operator_that_cannot_is_left_alone_and_said(self, library: torch.library.Library) -> None:
        with op_tools.OpDtypeCast(dtype=torch.float8_e4m3fn, quiet=True) as tool:
            assert torch.equal(torch.ones(2).cumsum(0), torch.tensor([1.0, 2.0]))
        assert "torch.Tensor.cumsum" in tool.skipped


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_fails_on_an_operator_says_so_and_goes_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tool = tools(tmp_path)[name]()
    for method in ("_before", "_after"):
        monkeypatch.setattr(type(tool), method, lambda *_: 1 / 0)
    with tool:
        assert torch.equal(torch.ones(2).exp(), torch.ones(2).exp())
    if name != "fallback":
        assert sum("torch.Tensor.exp: ZeroDivisionError" in record.message for record in caplog.records) >= 1


@pytest.mark.parametrize("level", LEVELS)
def test_transforms_are_let_be(level: str, tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = torch.randn(3)
    runs = (torch.func.hessian(function), torch.func.vmap(torch.sin), torch.func.grad(function))
    expected = [run(x) for run in runs]
    for make in tools(tmp_path).values():
        tool = make(level=level)
        with tool:
            assert all(map(torch.equal, expected, [run(x) for run in runs]))
        if isinstance(tool, op_tools.OpAutoCompare):
            assert not tool.failed and any("torch.func" in why for why in tool.unchecked.values())


def test_threads_each_have_their_own(tmp_path: Path) -> None:
    tool = op_tools.OpObserve(quiet=True)
    outside = []

    def work() -> None:
        with tool:
            torch.ones(3).exp()

    with tool:
        thread = threading.Thread(target=lambda: outside.append(torch.ones(5).sin()))
        thread.start()
        thread.join()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tool.is_running
        torch.ones(3).exp()
    calls = {signature.call: signature.count for signature in tool.signatures}
    assert calls["torch.Tensor.exp(f32[3])"] == 5
    assert not any("sin" in call for call in calls)


def test_with_checkpoints_autocast_inference_mode_and_no_grad(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout(0.5))
    x = torch.randn(2, 4, requires_grad=True)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x.grad = None
        for reentrant in (False, True):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            cast = model(x)
        with torch.inference_mode():
            inferred = model(x).add_(1)
        with torch.no_grad():
            return [x.grad.clone(), cast, inferred, model(x)]

    expected = run()
    for make in tools(tmp_path).values():
        for level in LEVELS:
            tool = make(level=level)
            with tool:
                found = run()
            assert all(map(torch.equal, expected, found)), type(tool)
            assert not getattr(tool, "failed", [])


class TestCompiled:
    @staticmethod
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(F.gelu(x) * 2)[0] + 1

    @pytest.mark.parametrize("level", LEVELS)
    def test_what_a_compiled_graph_runs_is_seen(self, level: str, tmp_path: Path) -> None:
        torch._dynamo.reset()
        x = torch.randn(3, 5)
        compiled = torch.compile(self.model, backend="onnxrt")
        expected = compiled(x)
        for name, make in tools(tmp_path).items():
            if name == "fallback":
                continue  # it runs a region in PyTorch
            tool = make(level=level)
            with tool:
                assert torch.equal(compiled(x), expected), name
                assert torch.equal(compiled(x), expected), name
            if name == "compare":
                names = {item.name for item in tool.comparisons}
                regions = {found for found in names if found.startswith("onnxruntime.graph_")}
                assert len(regions) >= 1
                assert not tool.failed and not tool.unchecked

    def test_it_compiles_under_a_tool_as_without(self) -> None:
        torch._dynamo.reset()
        x = torch.randn(3, 5)
        with op_tools.OpObserve(quiet=True, level="aten") as tool:
            torch.compile(self.model, backend="onnxrt")(x)
        names = [signature.call.split("(")[0] for signature in tool.signatures]
        assert any(name.startswith("onnxruntime.") for name in names)
        assert not any("gelu" in name for name in names)

    @pytest.mark.parametrize("level", ["torch", "aten"])
    def test_what_is_tried_in_the_first_steps_is_not_seen(self, level: str) -> None:
        """A step is seen as the user makes it: once, where the graph ran for the user."""
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        step = torch.compile(model, backend="onnxrt", options={"cache": False, "placement": "measured"})
        torch._dynamo.utils.counters.clear()
        steps = 120
        with op_tools.OpObserve(level=level, quiet=True) as tool:
            for _ in range(steps):
                step(torch.randn(8, 16)).sum().backward()
        events = torch._dynamo.utils.counters["dynamo_backends"]
        assert sum(number for event, number in events.items() if event.startswith("autotuned")) == 2
        counts: Counter[str] = Counter()
        for signature in tool.signatures:
            counts[signature.call.split("(")[0]] += signature.count
        forwards = sum(number for name, number in counts.items() if "forward.region_0" in name)
        products = {"torch.addmm", "torch.nn.functional.linear", "aten.addmm.default"}
        assert sum(number for name, number in counts.items() if name in products) / 2 + forwards == steps
        activations = {"torch.nn.functional.gelu", "torch.ops.aten.gelu.default", "aten.gelu.default"}
        assert sum(number for name, number in counts.items() if name in activations) + forwards == steps
        of_ours = ("clone", "resolve_conj", "view_as")
        assert not any(part in name for name in counts for part in of_ours), "comparisons and timing are not the user's"

    def test_a_region_falls_back_to_pytorch(self) -> None:
        torch._dynamo.reset()
        x = torch.randn(3, 5)
        compiled = torch.compile(self.model, backend="onnxrt")
        expected = compiled(x)
        with op_tools.OpFallback(include="onnxruntime.*", level="aten", quiet=True) as tool:
            assert torch.allclose(compiled(x), expected, atol=1e-6)
        assert sum(tool.converted.values()) >= 1


class TestCommand:
    @pytest.fixture
    def captured(self, tmp_path: Path) -> Path:
        x = torch.randn(2, 3, requires_grad=True)
        with op_tools.OpCapture(tmp_path, quiet=True) as tool:
            torch.manual_seed(0)
            F.dropout(F.linear(x, torch.randn(4, 3, requires_grad=True))[:, 1:], 0.5).sum().backward()
        return tool.folder.location

    def test_ls(self, captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["op", "ls", str(captured)]) == 0
        text = capsys.readouterr().out
        assert "torch.nn.functional.linear" in text and "f32[2, 3]" in text and "op run" in text
        assert main(["op", "ls", str(captured), "--json"]) == 0
        assert {call["name"] for call in json.loads(capsys.readouterr().out)} >= {"torch.nn.functional.dropout"}

    @pytest.mark.parametrize("reference", ["float64", "onnx"])
    def test_run(self, captured: Path, reference: str, capsys: pytest.CaptureFixture[str]) -> None:
        call = str(captured / "torch.nn.functional.linear" / "0")
        assert main(["op", "run", call, "--reference", reference, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["comparisons"]
        assert {item["value"] for item in found} == {"output", "gradient of args[0]", "gradient of args[1]"}
        assert main(["op", "run", call, "--forward-only"]) == 0
        assert "gradient" not in capsys.readouterr().out

    def test_all_of_a_folder_again_with_the_same_random_numbers(
        self, captured: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["op", "run", str(captured), "--json"]) == 0
        found = {item["name"] for item in json.loads(capsys.readouterr().out)["comparisons"]}
        assert found >= {"torch.nn.functional.dropout", "torch.nn.functional.linear", "torch.Tensor.__getitem__"}
        (dropout,) = find_calls(captured / "torch.nn.functional.dropout")
        assert torch.equal(run_call(dropout, contextlib.nullcontext())["output"], dropout.read("output")["output"])

    def test_what_ls_suggests_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each command as it is printed, and where none would run, the reason."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "shop_of_a_test.py").write_text(
            "import torch\n"
            "@torch.library.custom_op('shop_of_a_test::double', mutates_args=())\n"
            "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
            "library = torch.library.Library('shop_of_a_test', 'FRAGMENT')\n"
            "library.define('triple.twice(Tensor x) -> Tensor')\n"
            "library.impl('triple.twice', lambda x: x * 3, 'CompositeExplicitAutograd')\n"
        )
        importlib.import_module("shop_of_a_test")
        x = torch.randn(3, 4, requires_grad=True)
        function = torch.compile(lambda x: x.sin() + 1, backend="onnxrt")
        for level in LEVELS:
            with op_tools.OpCapture("-a folder", quiet=True, level=level, max_bytes=1000) as tool:
                F.gelu(x @ x.T).sum().backward()
                x.detach().add_(1), x.to(torch.float64), torch.empty(3), x.detach().to_sparse()
                torch.ops.shop_of_a_test.double(x.detach()), torch.ops.shop_of_a_test.triple.twice(x.detach())
                torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
                torch.relu(torch.randn(40, 40))
                with pytest.raises(RuntimeError):
                    torch.mv(x.detach(), torch.randn(7))
                with torch.no_grad():
                    function(x)
            refused: set[str] = set()
            imported: dict[str, list[str]] = {}
            for call in find_calls(tool.folder.location):
                assert main(["op", "ls", f"./{call.folder.relative_to(tmp_path)}"]) == 0
                printed = next(line for line in capsys.readouterr().out.splitlines() if re.match("try|no call", line))
                if not printed.startswith("try: "):
                    refused.add(call.name.split(".")[0 if "onnxruntime" in call.name else 1])
                    continue
                words = shlex.split(printed.replace("--import MODULE", "--import shop_of_a_test"))
                if "shop_of_a_test" in words:
                    imported[call.name] = words
                assert main(words[2:]) == 0, printed
            capsys.readouterr()
            assert refused == {"mv", "relu", "onnxruntime"}
            assert len(imported) == 2
            assert main(["op", "ls", "--", str(tool.folder.location.relative_to(tmp_path))]) == 0
            hint = capsys.readouterr().out.splitlines()[-1]
            assert main(shlex.split(hint)[2:]) == 0
        for words in imported.values():  # a process that does not know the operator
            script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dynamo_backends.cli import main; "
            script += f"sys.exit(main({words[2:]!r}))"
            subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, timeout=300)

    def test_damaged_and_foreign_folders(
        self, captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        call = captured / "torch.nn.functional.linear" / "0"
        assert main(["op", "ls", str(tmp_path / "nothing")]) == 2
        (empty := tmp_path / "empty").mkdir()
        assert main(["op", "run", str(empty)]) == 2
        (call / "input.pth").write_bytes(b"no file of ours")
        assert main(["op", "run", str(call)]) == 2
        other = captured / "torch.Tensor.sum" / "0"
        description = (other / "call.json").read_text()
        (other / "call.json").write_text(description.replace("torch.Tensor.sum", "os.system"))
        capsys.readouterr()
        assert main(["op", "run", str(captured)]) == 2
        assert str(other) in capsys.readouterr().err
        (other / "call.json").write_text(description)
        torch.save({"args": ({"__type__": "torch", "value": "load"},), "kwargs": {}}, call / "input.pth")
        assert main(["op", "run", str(call)]) == 2
        description = json.loads((call / "call.json").read_text())
        for change in ({"name": "os.system"}, {"name": 3}, {"format": 99}):
            (call / "call.json").write_text(json.dumps(description | change))
            assert main(["op", "run", str(call)]) == 2
        (call / "call.json").write_text("{")
        assert main(["op", "ls", str(call)]) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "torch.ops.load_library.__call__",
        "torch.ops.import_module.__call__",
        "torch.ops.aten.__init__",
        "aten.__dict__.clear",
        "torch.from_file",
        "aten.from_file.default",
        "torch.ops.aten.from_file",
        "aten.save.default",  # TorchScript's, which writes a file
        "torch.ops.aten.save",
    ],
)
def test_a_name_in_a_folder_is_that_of_an_operator_or_nothing(name: str) -> None:
    with pytest.raises(LookupError):
        function_of(name)


@pytest.mark.parametrize(
    ("name", "is_to_be_imported"),
    [
        ("no_such_library.scale.default", True),
        ("torch.ops.no_such_library.scale", True),
        ("torch.nn.functional.no_such_function", False),
        ("torch.Tensor.no_such_method", False),
        ("torch.manual_seed", False),
        ("aten.no_such_operator.default", False),
        ("math.sin", False),
    ],
)
def test_only_a_registered_operator_is_imported_from_a_library(
    name: str, is_to_be_imported: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with op_tools.OpCapture(tmp_path, quiet=True) as tool:
        torch.ones(2).sin()
    (call,) = tool.folder.location.glob("*sin/0")
    description = json.loads((call / "call.json").read_text())
    (call / "call.json").write_text(json.dumps(description | {"name": name}))
    assert main(["op", "run", str(call)]) == 2
    printed = capsys.readouterr().err
    assert repr(name) in printed and ("import" in printed) == is_to_be_imported
    assert printed.count(str(call)) == 1


@pytest.mark.parametrize("level", ["torch", "aten"])
def test_a_converted_call_may_change_the_shape_of_what_it_writes(level: str) -> None:
    x, out, matrix, line = torch.randn(3), torch.empty(0), torch.arange(6.0).reshape(2, 3), torch.arange(4.0)
    with op_tools.OpFallback(dtype=torch.float64, level=level, quiet=True):
        torch.add(x, 1, out=out)
        matrix.t_()
        line.unsqueeze_(0).resize_(2, 2)
    assert torch.equal(out, x + 1)
    assert torch.equal(matrix, torch.arange(6.0).reshape(2, 3).t())
    assert torch.equal(line, torch.arange(4.0).reshape(2, 2))


def test_stopping_inside_of_an_operator_is_an_error_and_loses_no_mode() -> None:
    with op_tools.OpObserve(quiet=True), op_tools.OpObserve(quiet=True) as tool:
        x = torch.randn(3, requires_grad=True)
        x.register_hook(lambda _: tool.stop())
        with pytest.raises(RuntimeError, match="stop"):
            (x * 2).sum().backward()
        assert tool.is_running
    assert not tool.is_running
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("level", ["torch", "aten"])
def test_memory_without_values_is_no_overflow(level: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills such memory with NaN
    try:
        with op_tools.OpOverflowCheck(level=level, quiet=True) as check:
            made = torch.empty(64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert made.isnan().all()
    assert check.found == []


def test_zeros_of_autograd_without_memory_are_not_read(tmp_path: Path) -> None:
    for make in tools(tmp_path).values():
        with make(level="aten") as tool:
            torch.randn(3, requires_grad=True).sgn().sum().backward()
        assert not getattr(tool, "failed", [])


def test_numbers_that_are_equal_are_other_signatures() -> None:
    x = torch.ones(2)
    with op_tools.OpObserve(include="torch.Tensor.mul", quiet=True) as observe:
        for factor in (1, True, 1.0):
            x.mul(factor)
    assert len(observe.signatures) == 3


class _ShiftedNorm(torch.autograd.Function):
    """Its gradient is off by 1e-4, in float32 only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result, mean, inverse = torch.ops.aten.native_group_norm(x, None, None, 2, 16, 400, 4, 1e-5)
        ctx.save_for_backward(x, mean, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        masks = [True, False, False]
        found = torch.ops.aten.native_group_norm_backward(
            grad.contiguous(), *ctx.saved_tensors, None, 2, 16, 400, 4, masks
        )
        return found[0] + (1e-4 if grad.dtype is torch.float32 else 0.0)


def test_gradients_of_normalizations_that_cancel_are_right() -> None:
    """That of a sum is zero, but for what the kernel rounds."""
    norms = [torch.nn.GroupNorm(4, 16), torch.nn.LayerNorm((16, 20, 20))]
    norms += [torch.nn.InstanceNorm2d(16), torch.nn.BatchNorm2d(16)]
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 16, 20, 20, requires_grad=True)
        with op_tools.OpAutoCompare(quiet=True, capture=None) as compare:
            for norm in norms:
                norm(x).sum().backward()
        assert compare.comparisons and not compare.failed, compare.failed
    with op_tools.OpAutoCompare(quiet=True, capture=None) as compare:
        _ShiftedNorm.apply(x).sum().backward()
    assert [item.value for item in compare.failed] == ["gradient of args[0]"]


_drawn = random.Random(0)


@torch.library.custom_op("op_tools_test::noisy", mutates_args=())
def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + _drawn.random())  # by Python: no state of PyTorch's repeats it


_noisy.register_fake(torch.empty_like)


def test_an_operator_that_returns_other_numbers_each_time_is_not_called_right(tmp_path: Path) -> None:
    """Its perturbed runs would excuse any error."""
    x = torch.randn(8)
    with op_tools.OpAutoCompare(quiet=True, capture=None) as compare:
        torch.ops.op_tools_test.noisy(x).exp()
    assert [item.name for item in compare.comparisons] == ["torch.Tensor.exp"]
    (name,) = compare.unchecked
    assert "op_tools_test.noisy" in name
    with torch.no_grad():
        options = {"dump_dir": str(tmp_path)}
        torch.compile(lambda x: _noisy(x.sin()) + 1, backend="onnx_debug", options=options)(x)
    flush_manifests()
    (graph,) = find_run(tmp_path).graphs
    reasons = [reason for reason in graph.entry.unchecked if "noisy" in reason]
    assert len(reasons) == 2 and any("stages" in reason for reason in reasons)
