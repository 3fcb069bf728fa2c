"""The tolerances of ``repro.py`` are those of ``numerics``, and tensors have one form in files and sessions."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from dynamo_backends.dumps import repro
from dynamo_backends.dumps.cut_folder import repro_text
from dynamo_backends.dumps.model_sessions import PLAIN, ModelSession
from dynamo_backends.dumps.models import OnnxModel, kind_of
from dynamo_backends.dumps.reading import DATA_SET, write_data_set
from dynamo_backends.dumps.reference_evaluator import computed_in_float64
from dynamo_backends.dumps.schema import Settings
from dynamo_backends.numerics.rule import FORMATS


def numpy_of(value: torch.Tensor) -> np.ndarray:
    if value.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        bits = value.view(torch.uint8 if value.dtype.itemsize == 1 else torch.uint16)
        return bits.numpy().view(getattr(ml_dtypes, str(value.dtype).removeprefix("torch.")))
    return value.numpy()


def test_the_rule_of_repro(tmp_path: Path) -> None:
    """It needs numpy, onnx and onnxruntime alone, and has the tolerance of each dtype."""
    text = repro_text({})
    assert "dynamo_backends" not in "".join(line for line in text.splitlines() if "import" in line)
    (tmp_path / "repro.py").write_text(text)
    namespace: dict[str, Any] = runpy.run_path(str(tmp_path / "repro.py"))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        right = torch.linspace(1, 2, 16, dtype=torch.float64).to(dtype)
        epsilon = torch.finfo(dtype).eps
        units = FORMATS[str(torch.empty(0, dtype=dtype).abs().dtype).removeprefix("torch.")].units
        for far in (0.6, 1.8):
            value = (right.to(torch.complex128) * (1 + far * units * epsilon)).to(dtype)
            is_wrong, *_ = namespace["_comparison"]("y", numpy_of(right), {"y": numpy_of(value)})
            assert is_wrong == (far > 1), (dtype, far)


@pytest.mark.parametrize(
    "name",
    ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "int64", "bool"],
)
def test_one_form_of_tensors(name: str) -> None:
    """There and back, as ONNX Runtime's, and through a session."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)[:, ::2]
    back = repro.ort_array(repro.ort_value(array))
    assert back.dtype == dtype and np.array_equal(back, array)
    number = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    info = [onnx.helper.make_tensor_value_info(item, number, [2, 2]) for item in "xy"]
    node = onnx.helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = onnx.numpy_helper.from_array(np.array([2, 2]), "shape")
    graph = onnx.helper.make_graph([node], "same", info[:1], info[1:], [shape])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    found = ModelSession(OnnxModel(ir.from_proto(model), "same"), PLAIN)({"x": array})["y"]
    assert isinstance(found, np.ndarray) and found.dtype == dtype and np.array_equal(found, array)


def test_strings_and_sequences() -> None:
    info = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.STRING, [2])]
    tensors = onnx.helper.make_tensor_type_proto(onnx.TensorProto.STRING, [2])
    sequence = onnx.helper.make_value_info("s", onnx.helper.make_sequence_type_proto(tensors))
    nodes = [
        onnx.helper.make_node("Identity", ["x"], ["y"]),
        onnx.helper.make_node("SequenceConstruct", ["x", "y"], "s"),
    ]
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, [2]), sequence]
    graph = onnx.helper.make_graph(nodes, "strings", info, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    array = np.array(["a", "ü"], object)
    found = ModelSession(OnnxModel(ir.from_proto(model), "strings"), PLAIN)({"x": array})
    y, s = found["y"], found["s"]
    assert isinstance(y, np.ndarray) and kind_of(y.dtype) == "string" and list(y) == list(array)
    assert isinstance(s, list) and len(s) == 2


def test_settings_are_what_the_manifest_has() -> None:
    settings = Settings(("CPUExecutionProvider",), ({"a": "b"},), "ORT_ENABLE_BASIC", ("X",), 3, {"c": "d"})
    assert msgspec.convert(settings.as_json(), Settings) == settings


def test_repro_prints_a_screenful(tmp_path: Path) -> None:
    """The wrong outputs first, the others counted."""
    names = [f"y_{i}" for i in range(300)]
    info = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in ("x", *names)]
    nodes = [onnx.helper.make_node("Identity", ["x"], [name]) for name in names]
    graph = onnx.helper.make_graph(nodes, "many", info[:1], info[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    right = {name: np.ones(2, np.float32) for name in names} | {"y_123": np.zeros(2, np.float32)}
    write_data_set(tmp_path / DATA_SET, "input", {"x": np.ones(2, np.float32)})
    write_data_set(tmp_path / DATA_SET, "output", right)
    (tmp_path / "repro.py").write_text(repro_text({}))
    ended = subprocess.run([sys.executable, "repro.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 1 and len(lines) < 25, ended
    assert lines[1].startswith("y_123: error 1,") and lines[-1] == "differs: y_123"
    assert any(re.search(r"\b290 more\b.*\b0 of them\b", line) for line in lines)


def of_groups(x: np.ndarray) -> np.ndarray:
    return standardized(x.reshape(2, 2, 16), (2,)).reshape(x.shape)


def standardized(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    x = x - x.mean(axes, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("opset", "weights", "call", "expected"),
    [
        (18, "float[8,4] s", "LayerNormalization <axis = 1> (x, s)", lambda x: standardized(x, (1, 2))),
        (21, "float[8] s, float[8] b", "GroupNormalization <num_groups = 2> (x, s, b)", of_groups),
        (18, "float[2] s, float[2] b", "GroupNormalization <num_groups = 2> (x, s, b)", of_groups),
        (
            23,
            "float[4] s",
            "RMSNormalization (x, s)",
            lambda x: x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5),
        ),
    ],
)
def test_normalizations_are_in_float64_inside(
    opset: int, weights: str, call: str, expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    """ONNX's functions of them subtract squares, in float32 by default: with a large mean, nothing is left."""
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[2,8,4] x, {weights}) => (float[2,8,4] y)'
    model = ir.from_onnx_text(f"{text} {{ y = {call} }}")
    sizes = {str(item.name): tuple(item.shape or ()) for item in model.graph.inputs}
    x = (np.random.default_rng(0).standard_normal((2, 8, 4)) + 3000).astype(np.float32)
    feeds = {"x": x, "s": np.ones(sizes["s"], np.float32), "b": np.zeros(sizes.get("b", ()), np.float32)}  # type: ignore[arg-type]
    found = computed_in_float64(model, feeds, lambda model, feeds: ModelSession(OnnxModel(model, "g"), PLAIN)(feeds))  # type: ignore[arg-type]
    assert found is not None
    right = expected(x.astype(np.float64))
    np.testing.assert_allclose(found["y"], right, rtol=1e-6, atol=1e-6)  # the attribute epsilon is a float32
