"""Registered converters of users: kinds of nodes, several results, gradients, and the errors for faulty ones."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime_extensions
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from onnxscript import opset18, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from dynamo_backends import NotTranslatable, explain, operator_set, register_converter, unregister_converter
from dynamo_backends.cli import main
from dynamo_backends.exporter.registration import registered_targets
from dynamo_backends.runtime import custom_operators
from dynamo_backends.runtime.settings import SessionSettings
from dynamo_backends.runtime.subprocess_session import check_in_subprocess

aten = torch.ops.aten
ONLY_ONNX = {"fallback": "error", "placement": "onnx"}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Removes the converters that a test registers."""
    before = registered_targets()
    yield
    unregister_converter(*(registered_targets() - before))


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("converted", "FRAGMENT") as library:
        yield library


def define(library: torch.library.Library, schema: str, function: Callable[..., object]) -> torch._ops.OpOverload:
    """Defines an operator that is its own fake implementation."""
    library.define(schema)
    name = schema.split("(")[0]
    library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.converted, name).default


def test_an_onnx_operator_and_python_arguments(library: torch.library.Library) -> None:
    swish = define(
        library, "swish(Tensor x, float beta=1.0) -> Tensor", lambda x, beta=1.0: x * torch.sigmoid(x * beta)
    )

    @register_converter(swish)
    def convert(x, beta=1.0):
        return op.Mul(x, op.Sigmoid(op.Mul(x, beta)))

    x = torch.randn(3, 4)
    assert_same_as_eager(lambda x: swish(x) + swish(x, 2.5), x, settings={"options": ONLY_ONNX})
    assert_same_as_eager(lambda x: swish(x.double(), 0.1), x, settings={"options": ONLY_ONNX})


def test_a_registration_that_is_taken_back() -> None:
    register_converter(torch.ops.aten.relu)(lambda x: op.Neg(x))
    unregister_converter(torch.ops.aten.relu)
    assert_same_as_eager(lambda x: x.relu() + 1, torch.randn(3, 4), settings={"options": ONLY_ONNX})
    unregister_converter(torch.ops.aten.relu)  # as often as one likes
    with pytest.raises(TypeError, match="expected an operator"):
        unregister_converter("relu")


def test_an_operator_of_another_domain(library: torch.library.Library) -> None:
    quick = define(library, "quick(Tensor x) -> Tensor", lambda x: x * torch.sigmoid(1.702 * x))
    microsoft = operator_set("com.microsoft")
    register_converter(quick)(lambda x: microsoft.QuickGelu(x, alpha=1.702))
    assert_same_as_eager(lambda x: quick(x) + 1, torch.randn(5), settings={"options": ONLY_ONNX})


def test_several_results_of_which_one_is_not_used(library: torch.library.Library) -> None:
    both = define(library, "both(Tensor x) -> (Tensor, Tensor)", lambda x: (x.amax(-1), x.argmax(-1)))

    @register_converter(both)
    def convert(x):
        return op.ReduceMax(x, op.Constant(value_ints=[-1]), keepdims=0), op.ArgMax(x, axis=-1, keepdims=0)

    assert_same_as_eager(lambda x: both(x), torch.randn(3, 4), settings={"options": ONLY_ONNX})
    assert_same_as_eager(lambda x: both(x)[1] + 1, torch.randn(3, 4), settings={"options": ONLY_ONNX})


own = Opset("own.functions", 1)


@script(own, default_opset=opset18)
def half_of(x):
    return op.Mul(x, op.CastLike(0.5, x))


@script(own, default_opset=opset18)
def half_and_rest(x, power: float = 2.0):
    half = half_of(x)
    return half, op.LeakyRelu(op.Pow(half, op.CastLike(power, half)), alpha=power)


def test_an_onnxscript_function_stays_one(library: torch.library.Library, tmp_path: Path) -> None:
    halves = define(
        library, "halves(Tensor x, float power) -> (Tensor, Tensor)", lambda x, power: (x * 0.5, (x * 0.5) ** power)
    )
    register_converter(halves)(half_and_rest)
    options = {"fallback": "error", "dump_dir": str(tmp_path)}
    x = torch.rand(3, 4) + 0.5
    assert_same_as_eager(lambda x: halves(x + 1, 3.0)[1], x, settings={"backend": "onnx_debug", "options": options})
    (path,) = tmp_path.glob("latest/graph_*/inference/region_0/model.onnx")
    model = onnx.load(path)
    assert {item.name for item in model.functions} == {"half_of", "half_and_rest"}
    assert "half_and_rest" in [node.op_type for node in model.graph.node]


def test_functions_of_one_name_are_not_taken_for_one_another(library: torch.library.Library) -> None:
    def function_of(number: float):
        if number == 1:

            @script(own, default_opset=opset18)
            def added(x):
                return op.Add(x, op.CastLike(1.0, x))
        else:

            @script(own, default_opset=opset18)
            def added(x):
                return op.Add(x, op.CastLike(2.0, x))

        return added

    one = define(library, "one(Tensor x) -> Tensor", lambda x: x + 1)
    two = define(library, "two(Tensor x) -> Tensor", lambda x: x + 2)
    register_converter(one)(function_of(1))
    register_converter(two)(function_of(2))
    assert_same_as_eager(lambda x: two(one(x)), torch.randn(3))


def test_a_custom_op_with_its_gradient() -> None:
    @torch.library.custom_op("converted::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @torch.library.custom_op("converted::cube_gradient", mutates_args=())
    def cube_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return 3 * gradient * x**2

    cube.register_fake(torch.empty_like)
    cube_gradient.register_fake(lambda gradient, x: torch.empty_like(x))
    cube.register_autograd(
        lambda ctx, gradient: cube_gradient(gradient, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    register_converter(cube)(lambda x: op.Mul(op.Mul(x, x), x))
    register_converter(cube_gradient)(lambda gradient, x: op.Mul(op.Mul(op.Mul(x, x), 3.0), gradient))
    x = torch.randn(3, requires_grad=True)
    assert_same_as_eager(lambda x: cube(x).sin(), x, settings={"options": ONLY_ONNX})
    assert counted("nodes_in_pytorch") == 0


def test_a_library_of_custom_operators(
    library: torch.library.Library,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That of onnxruntime-extensions has ``Inverse``, which ONNX has not."""
    monkeypatch.setattr(custom_operators, "_loaded", ())
    inverse = define(library, "inverse(Tensor x) -> Tensor", torch.inverse)
    contrib = operator_set("ai.onnx.contrib")
    register_converter(inverse)(lambda x: contrib.Inverse(x))
    x = torch.eye(3) + 0.1 * torch.rand(3, 3)
    path = onnxruntime_extensions.get_library_path()
    assert_same_as_eager(lambda x: inverse(x) + 1, x)
    assert counted("fallback converted.inverse.default") == 1  # the runtime does not know it
    options = {**ONLY_ONNX, "custom_op_libraries": [path], "dump_dir": str(tmp_path)}
    for backend in ("onnxrt", "onnx_debug"):
        torch._dynamo.reset()
        assert_same_as_eager(lambda x: inverse(x) + 1, x, settings={"backend": backend, "options": options})
    manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    assert [graph["verdict"] for graph in manifest["graphs"]] == ["ok"]

    # Other providers than the CPU's are tried in a process that has to load the library, too.
    (model,) = (tmp_path / "latest").rglob("model.onnx")
    check_in_subprocess(model.read_bytes(), SessionSettings(("CPUExecutionProvider",), threads=1), {"x": [3, 3]})

    # A dump is not enough for its library to be loaded.
    command = ["profile", str(manifest["graphs"][0]["folder"]), "-d", str(tmp_path), "--runs", "1"]
    assert main(command) == 2
    assert f"DYNAMO_BACKENDS_CUSTOM_OP_LIBRARIES={path}" in capsys.readouterr().err
    monkeypatch.setenv("DYNAMO_BACKENDS_CUSTOM_OP_LIBRARIES", path)
    assert main(command) == 0


@pytest.mark.parametrize(
    ("libraries", "datum"),
    [("x.so", "'custom_op_libraries'.*'x.so'"), (["/no/file.so"], "/no/file.so"), ([__file__], __file__)],
)
def test_a_library_that_is_none(libraries: object, datum: str) -> None:
    with pytest.raises(Exception, match=datum):
        torch.compile(torch.sin, backend="onnxrt", options={"custom_op_libraries": libraries})(torch.ones(2))


def refuse(x):
    raise NotTranslatable("it takes no vectors")


def fail(x):
    raise KeyError("axis")


@pytest.mark.parametrize(
    ("convert", "datum"),
    [
        (refuse, "no vectors"),
        (fail, rf"KeyError: 'axis' \(\S*{Path(__file__).name}:{fail.__code__.co_firstlineno + 1}\)"),
        (lambda x: (x, x), "2 results"),
        (lambda x: op.Cast(x, to=11), "DOUBLE .*FLOAT"),
        (lambda x: op.Unsqueeze(x, [0]), r"\(1, 3\) .*\(3,\)"),
        (lambda x: None, "None "),
        (lambda x: operator_set("no.domain").Nothing(x), "no.domain"),
    ],
)
def test_a_fault_of_a_converter_is_said_with_the_operator_and_the_line(
    convert: Callable[..., object], datum: str, library: torch.library.Library, caplog: pytest.LogCaptureFixture
) -> None:
    same = define(library, "same(Tensor x) -> Tensor", torch.clone)
    register_converter(same)(convert)

    def model(x):
        return same(x) + 1

    with caplog.at_level(logging.WARNING, logger="dynamo_backends"):
        assert_same_as_eager(model, torch.randn(3))
    (message,) = [item for item in caplog.messages if "the converter" in item and "converted.same.default" in item]
    assert f"{Path(__file__).name}:{model.__code__.co_firstlineno + 1}" in message
    assert re.search(datum, message)


def test_a_decomposed_operator_stays_whole_for_its_converter() -> None:
    assert counted("fallback aten.logit.default") == 0
    calls = []

    @register_converter(torch.ops.aten.logit)
    def convert(x, eps=None):
        calls.append(x)
        return op.Log(op.Div(x, op.Sub(1.0, x)))

    assert_same_as_eager(lambda x: torch.logit(x), torch.rand(3) * 0.8 + 0.1, settings={"options": ONLY_ONNX})
    assert calls


def test_what_is_no_operator_or_no_function_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="torch.ops"):
        register_converter(torch.sin)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        register_converter()
    with pytest.raises(TypeError, match="expected a function"):
        register_converter(torch.ops.aten.sin.default)(None)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="onnxscript"):
        operator_set("")
    with pytest.raises(TypeError, match="must be a string"):
        operator_set(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="converter"):
        operator_set("com.microsoft").Gelu(1)
    register_converter(torch.ops.aten.sin.default)(refuse)
    register_converter(torch.ops.aten.sin.default)(refuse)  # as a module that is imported again does
    with pytest.raises(ValueError, match="converter refuse"):
        register_converter(torch.ops.aten.sin.default)(fail)
    register_converter(torch.ops.aten.cos.default)(lambda x: x)
    with pytest.raises(ValueError, match="unregister_converter"):
        register_converter(torch.ops.aten.cos.default)(lambda x: -x)
    register_converter(torch.ops.aten.linear.default)(refuse)
    assert "aten.linear" in caplog.text


def test_no_pass_takes_an_operator_from_its_converter() -> None:
    """``onnx.attention`` would take the softmax, ``pre_grad.interpolate`` and AOTAutograd the interpolation."""
    called = set()

    @register_converter(aten._softmax.default)
    def softmax(x: ir.Value, dim: int, half: bool) -> object:
        called.add("softmax")
        return op.Softmax(x, axis=dim)

    @register_converter(aten.upsample_bilinear2d)
    def upsample(x: ir.Value, size: list[int], align: bool, *factors: float) -> object:
        called.add("upsample")
        return op.Resize(x, None, None, op.Constant(value_ints=[*x.shape[:2], *size]), mode="linear")

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended = torch.softmax(q @ k.transpose(-1, -2) * 0.35, -1) @ v
        return torch.nn.functional.interpolate(attended, scale_factor=2, mode="bilinear")

    q = torch.randn(2, 4, 8, 8)
    assert_same_as_eager(model, q, q + 1, q * 2, settings={"options": ONLY_ONNX})
    assert called == {"softmax", "upsample"}
    assert not counted("pass onnx.attention") and not counted("pass pre_grad.interpolate")


def test_a_converter_of_another_operator_keeps_sizes_symbolic() -> None:
    """To see which operators a function calls, it runs on fake tensors: that must not fix their sizes."""
    register_converter(aten.sinh.default)(lambda x: op.Sinh(x))
    x = torch.randn(3, 7, 8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    function = compiled(lambda x: torch.nn.functional.interpolate(x.sin(), size=(14, 16), mode="bilinear"))
    for images in (x, x[:2].clone()):
        function(images)
    assert counted("graphs") == 1


def test_a_converter_of_an_operator_in_a_subgraph_is_told_of() -> None:
    @register_converter(aten.sin.default)
    def sine(x: ir.Value) -> object:
        return op.Sin(x)

    explained = explain(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(torch.randn(3))
    (unused,) = explained.unused_extensions
    assert "aten.sin.default" in unused and "cond" in unused


def test_a_wrong_converter_is_named_with_its_line(tmp_path: Path) -> None:
    @register_converter(aten.sinh.default)
    def negative(x: ir.Value) -> object:
        return op.Neg(op.Sinh(x))

    function = compiled(lambda x: x.sinh(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.randn(3))
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    line = f"{Path(__file__).name}:{negative.__code__.co_firstlineno}"
    assert graph["blame"]["code"] == line and line in graph["verdict"]
