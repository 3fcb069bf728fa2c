"""``dynamo-backends compare MODEL FILE``: exported files with planted faults, quantized and in half precision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from architectures import ARCHITECTURES
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from onnxruntime.transformers.float16 import convert_float_to_float16
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model
from torch import nn

import dynamo_backends
from dynamo_backends.cli import main
from dynamo_backends.dumps.bisect_graph import bisect_file
from dynamo_backends.dumps.model_comparison import ModelComparison, compare
from dynamo_backends.dumps.model_values import Runtime
from dynamo_backends.dumps.models import load_model
from dynamo_backends.dumps.program_comparison import compare_with_program
from dynamo_backends.dumps.reading import DumpError

Edit = Callable[[onnx.ModelProto], object]


def architecture(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    found = ARCHITECTURES[name]
    model = found.build().eval()
    model.config.use_cache = False
    for parameter in model.parameters():  # the exporter stores equal weights once
        parameter.data += 0.02 * torch.randn_like(parameter)
    inputs = found.inputs(2, 16)
    inputs.pop("attention_mask", None)  # the exporter computes rows that are masked as a whole in another way
    return model, inputs


def exported(
    model: nn.Module, inputs: dict[str, torch.Tensor], path: Path, edit: Edit | None = None
) -> onnx.ModelProto:
    torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, verbose=False, external_data=False)
    proto = onnx.load(path)
    if edit is not None:
        edit(proto)
        onnx.save(proto, path)
    return proto


def compared(name: str, tmp_path: Path, edit: Edit | None = None) -> ModelComparison:
    model, inputs = architecture(name)
    exported(model, inputs, tmp_path / "model.onnx", edit)
    return compare_with_program(model, (), inputs, load_model(tmp_path / "model.onnx"), Runtime())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["bert", "gpt2", "llama", "vit", "convnext", "resnet", "deberta", "mamba", "whisper", "segformer"]
)
def test_exported_files_are_right(name: str, tmp_path: Path) -> None:
    found = compared(name, tmp_path)
    assert found.verdict == "ok" and not found.notes
    judged = [row for row in found.rows if row.local is not None and row.first and row.first.kind == "result"]
    assert len(judged) > 10


def test_bisect_finds_nothing_in_a_file_that_is_right(tmp_path: Path) -> None:
    """Its optimizers change roundings, and ONNX Runtime has no float64 of its ``Erf``."""
    model, inputs = architecture("bert")
    proto = exported(model, inputs, tmp_path / "model.onnx")
    names = {item.name for item in proto.graph.input}
    feeds = {name: value.numpy() for name, value in inputs.items() if name in names}
    assert len(proto.graph.node) > 64 and bisect_file(tmp_path / "model.onnx", feeds).place == "nothing"


def attribute(operator: str, position: int, **values: object) -> Edit:
    """Changes an attribute of a node."""

    def edit(proto: onnx.ModelProto) -> None:
        node = [node for node in proto.graph.node if node.op_type == operator][position]
        kept = [item for item in node.attribute if item.name not in values]
        del node.attribute[:]
        node.attribute.extend([*kept, *(onnx.helper.make_attribute(key, value) for key, value in values.items())])

    return edit


def weight(name: str) -> Edit:
    """Changes an element of the weight whose name ends so."""

    def edit(proto: onnx.ModelProto) -> None:
        [item] = [item for item in proto.graph.initializer if item.name.endswith(name)]
        values = onnx.numpy_helper.to_array(item).copy()
        values[3] += 0.01
        item.CopyFrom(onnx.numpy_helper.from_array(values, item.name))

    return edit


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "edit", "place", "module"),
    [
        (
            "bert",
            attribute("Gelu", 1, approximate="tanh"),
            "activations.py",
            "intermediate.intermediate_act_fn",
        ),
        ("bert", attribute("LayerNormalization", 3, epsilon=1e-3), "modeling_bert.py", "layer.1.attention.output"),
        ("bert", weight("layer.1.output.dense.bias"), "modeling_bert.py", "layer.1.output.dense"),
        ("deberta", attribute("Softmax", 1, axis=2), "modeling_deberta.py", "layer.1.attention.self"),
        ("resnet", attribute("Conv", 3, pads=[0, 0, 2, 2]), "modeling_resnet.py", "stages.1.layers.0"),
    ],
)
def test_a_fault_in_the_file_is_named(name: str, edit: Edit, place: str, module: str, tmp_path: Path) -> None:
    """With the line and the module: an attribute, an epsilon, a weight, an axis, padding."""
    found = compared(name, tmp_path, edit)
    assert found.first_different is not None and not found.ok
    assert place in found.verdict and module in found.verdict
    wrong = [row for row in found.rows if row.local is not None and row.local.is_wrong]
    assert len(wrong) == 1, "an error is not carried to the next node"


def test_an_approximation_of_an_optimizer_is_named(tmp_path: Path) -> None:
    model, inputs = architecture("bert")
    exported(model, inputs, tmp_path / "model.onnx")
    options = FusionOptions("bert")
    options.enable_gelu_approximation = True
    optimized = optimize_model(
        str(tmp_path / "model.onnx"), "bert", num_heads=4, hidden_size=32, optimization_options=options, opt_level=0
    )
    optimized.save_model_to_file(str(tmp_path / "fast.onnx"))
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "fast.onnx"), Runtime())
    assert found.first_different is not None and found.first_different.name == "gelu"
    assert found.first_different.second is not None and found.first_different.second.operator.endswith("FastGelu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Inputs(CalibrationDataReader):
    def __init__(self, feeds: dict[str, np.ndarray]) -> None:
        self._feeds = iter([feeds])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


@pytest.fixture
def net(tmp_path: Path) -> tuple[nn.Module, dict[str, torch.Tensor], onnx.ModelProto]:
    torch.manual_seed(0)
    model, inputs = Net().eval(), {"x": torch.randn(2, 3, 16, 16)}
    return model, inputs, exported(model, inputs, tmp_path / "net.onnx")


def test_half_precision_is_rounding(net: tuple, tmp_path: Path) -> None:
    model, inputs, proto = net
    onnx.save(convert_float_to_float16(proto, keep_io_types=True), tmp_path / "half.onnx")
    half, whole = load_model(tmp_path / "half.onnx"), load_model(tmp_path / "net.onnx")
    feeds = {"x": inputs["x"].numpy()}
    assert compare_with_program(model, (), inputs, half, Runtime()).ok
    found = compare(whole, half, feeds, Runtime())
    assert found.ok and any("float16 instead of float32" in note for note in found.notes)
    found = compare(half, whole, feeds, Runtime())
    assert found.ok and not found.notes


def test_nodes_of_a_quantized_model_are_ranked(net: tuple, tmp_path: Path) -> None:
    """By the error that each adds alone; a fused Relu is not one."""
    model, inputs, _ = net
    feeds = {"x": inputs["x"].numpy()}
    paths = tmp_path / "net.onnx", tmp_path / "quantized.onnx"
    quantize_static(*map(str, paths), Inputs(feeds), quant_format=QuantFormat.QDQ)
    whole, quantized = map(load_model, paths)
    for found in (
        compare_with_program(model, (), inputs, quantized, Runtime()),
        compare(whole, quantized, feeds, Runtime()),
    ):
        assert found.is_quantized and not found.ok
        noise = [row.local.noise for row in found.ranked if row.local is not None]
        assert noise == sorted(noise, reverse=True) and 1e-4 < noise[0] < 0.1
        assert "relu" in [row.name for row in found.ranked]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user of ``torch.onnx.export`` calls it, with files of both exporters."""
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 16)\n\n    def forward(self, x):\n"
        "        return torch.softmax(self.layer(x), -1)\n\n\ndef make():\n    torch.manual_seed(0)\n"
        "    return Net(), torch.randn(3, 8)\n"
    )
    scope: dict = {}
    exec(compile(Path("app.py").read_text(), "app.py", "exec"), scope)
    model, x = scope["make"]()
    torch.onnx.export(model.eval(), (x,), "old.onnx", dynamo=False)
    proto = exported(model, {"x": x}, tmp_path / "net.onnx")
    attribute("Softmax", 0, axis=0)(proto)
    onnx.save(proto, "wrong.onnx")
    assert main(["compare", "app.py:make", "net.onnx"]) == main(["compare", "app.py:make", "old.onnx"]) == 0
    assert main(["compare", "app.py:make", "wrong.onnx"]) == 1
    assert "diverges at softmax (aten.softmax.int, app.py:10)" in capsys.readouterr().out
    assert main(["compare", "app.py:make", "wrong.onnx", "--json"]) == 1
    [found] = json.loads(capsys.readouterr().out)
    assert found["first_different"]["first"]["name"] == "softmax"


class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 8, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.elu(self.up(x)).exp()


@pytest.mark.parametrize("optimize", [False, True])
def test_operators_with_other_names_in_onnx(optimize: bool, tmp_path: Path) -> None:
    """The node itself is named, and not the one that reads it."""
    inputs = {"x": torch.randn(2, 3, 8, 8)}
    model = Upsampled().eval()
    exported(model, inputs, tmp_path / "model.onnx", attribute("ConvTranspose", 0, pads=[0, 0, 2, 2]))
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "model.onnx"), Runtime(optimize=optimize))
    assert found.first_different is not None and found.first_different.name.startswith("conv_transpose2d")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.head(self.lstm(x)[0]), -1)  # after the LSTM


def test_the_line_of_a_node_after_an_lstm(tmp_path: Path) -> None:
    model, inputs = Recurrent().eval(), {"x": torch.randn(2, 5, 8)}
    exported(model, inputs, tmp_path / "model.onnx", attribute("Softmax", 0, axis=1))
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "model.onnx"), Runtime())
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "# after the LSTM" in text)
    assert f"test_compare_with_program.py:{line}" in found.verdict


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise IndexError("no such token")


def test_the_line_of_a_model_that_raises(net: tuple, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"IndexError: no such token \(.*test_compare_with_program.py:\d+\)"):
        compare_with_program(Raising(), (), {"x": torch.ones(1)}, load_model(tmp_path / "net.onnx"), Runtime())


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.relu(), lambda x: x.tanh(), (x,)) * 2


class Pair(nn.Module):
    """Two results of one shape; ``order`` exchanges them, ``shape`` and ``dtype`` change one."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = x.sin(), x.cos()
        if self.kind == "shape":
            return first.reshape(3, 2, 4), second
        if self.kind == "dtype":
            return first.double(), second
        return (second, first) if self.kind == "order" else (first, second)


def test_control_flow(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 4)}
    exported(Branches(), inputs, tmp_path / "model.onnx")
    assert compare_with_program(Branches(), (), inputs, load_model(tmp_path / "model.onnx"), Runtime()).ok


@pytest.mark.parametrize(("kind", "ok"), [("", True), ("order", False), ("shape", False), ("dtype", True)])
def test_outputs_have_an_order_and_shapes(kind: str, ok: bool, tmp_path: Path) -> None:
    """Another dtype is told."""
    inputs = {"x": torch.randn(2, 3, 4)}
    exported(Pair(), inputs, tmp_path / "right.onnx")
    proto = exported(Pair(kind), inputs, tmp_path / "other.onnx")
    for i, output in enumerate(proto.graph.output):  # PyTorch's results have no names
        for node in proto.graph.node:
            node.output[:] = [f"out_{i}" if name == output.name else name for name in node.output]
        output.name = f"out_{i}"
    onnx.save(proto, tmp_path / "other.onnx")
    right, other = load_model(tmp_path / "right.onnx"), load_model(tmp_path / "other.onnx")
    for found in (
        compare_with_program(Pair(), (), inputs, other, Runtime()),
        compare(right, other, {"x": inputs["x"].numpy()}, Runtime()),
    ):
        assert found.ok == ok, found.verdict
        assert any("float64" in note for note in found.notes) == (kind == "dtype")


class Wide(nn.Module):
    def __init__(self, dtype: torch.dtype, inner: torch.dtype) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(8, 8, dtype=dtype), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).to(self.inner).exp().to(x.dtype) + 1


@pytest.mark.parametrize(
    ("dtype", "inner", "told"),
    [
        (torch.float64, torch.float64, True),
        (torch.float64, torch.float32, False),
        (torch.float32, torch.float32, False),
    ],
    ids=["float64", "float64 with float32", "float32"],
)
def test_a_lower_precision_between_values_that_correspond_is_told(
    dtype: torch.dtype, inner: torch.dtype, told: bool, tmp_path: Path
) -> None:
    """A file that casts down and up again: unless the model does, too."""
    model, inputs = Wide(dtype, torch.float32).eval(), {"x": torch.randn(3, 8, dtype=dtype)}
    exported(model, inputs, tmp_path / "casts.onnx")
    model.inner = inner
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "casts.onnx"), Runtime())
    assert found.ok, found.verdict
    assert any("exp" in note and "float32 instead of float64" in note for note in found.notes) == told


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_comparison_does_not_warn_of_pytorch(tmp_path: Path) -> None:
    model, inputs = Wide(torch.float32, torch.float32).eval(), {"x": torch.randn(3, 8)}
    dynamo_backends.export(model, path=tmp_path / "m.onnx", kwargs=inputs)
    assert compare_with_program(model, (), inputs, load_model(tmp_path / "m.onnx"), Runtime()).ok


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).view(2, 4, 2, 4).transpose(1, 2).softmax(-1)
            x = x + heads.transpose(1, 2).contiguous().view(2, 4, 8)
        return x


def test_names_that_are_counted_up_in_another_way_mean_nothing(tmp_path: Path) -> None:
    """Another exporter decomposes a linear layer into views: ``view_3`` is of another line there."""
    torch.manual_seed(0)
    model, inputs = Heads().eval(), {"x": torch.randn(2, 4, 8)}
    dynamo_backends.export(model, path=tmp_path / "m.onnx", kwargs=inputs)
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "m.onnx"), Runtime())
    assert found.ok, found.verdict


def test_a_file_whose_inputs_are_half(net: tuple, tmp_path: Path) -> None:
    model, inputs, proto = net
    onnx.save(convert_float_to_float16(proto), tmp_path / "half.onnx")
    assert compare_with_program(model, (), inputs, load_model(tmp_path / "half.onnx"), Runtime()).ok


class Composites(nn.Module):
    """Operators whose results near zero are differences of larger numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Linear(300, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.norm(self.conv(x).relu()), self.head(10 * y).log_softmax(-1)


def test_rounding_inside_composite_operators(tmp_path: Path) -> None:
    """It is no fault, and hides none."""
    for seed in range(3):
        torch.manual_seed(seed)
        model, inputs = Composites().eval(), {"x": torch.randn(2, 3, 16, 16), "y": torch.randn(200, 300)}
        exported(model, inputs, tmp_path / "right.onnx")
        found = compare_with_program(model, (), inputs, load_model(tmp_path / "right.onnx"), Runtime())
        assert found.ok, found.verdict
    exported(model, inputs, tmp_path / "wrong.onnx", attribute("InstanceNormalization", 0, epsilon=1.1e-5))
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "wrong.onnx"), Runtime())
    assert found.first_different is not None and found.first_different.name == "group_norm"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.scaled_dot_product_attention(x, x, x))


def test_half_precision_between_the_nodes_of_an_operator(tmp_path: Path) -> None:
    """The file rounds what PyTorch's kernel computes in float32."""
    torch.manual_seed(0)
    model, inputs = Attention().half().eval(), {"x": torch.randn(1, 4, 40, 32, dtype=torch.float16)}
    exported(model, inputs, tmp_path / "right.onnx")
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "right.onnx"), Runtime())
    assert found.ok, found.verdict
    exported(model, inputs, tmp_path / "wrong.onnx", weight("head.bias"))
    found = compare_with_program(model, (), inputs, load_model(tmp_path / "wrong.onnx"), Runtime())
    assert found.first_different is not None and found.first_different.name == "head.bias"


def test_a_misspelt_model_or_file_is_answered_with_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"")
    for first, second, near in (("berrt", "model.onnx", "bert"), ("mlp.onnx", "modl.onnx", "model.onnx")):
        assert main(["compare", first, second]) == 2
        assert f"'{near}'" in capsys.readouterr().err
