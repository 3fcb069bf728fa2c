"""``explain`` and ``coverage``: graphs, graph breaks, guards, and what runs in PyTorch for which reason."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dynamo_backends
from dynamo_backends.cli import main
from dynamo_backends.errors import Kind
from dynamo_backends.explanations.explanation import remedy_of
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.runtime import session

LINEAR = torch.nn.Linear(3, 3)


def broken(x: torch.Tensor, factor: int) -> torch.Tensor:
    y = LINEAR(x) * factor
    print("between the graphs")
    y = torch.linalg.svdvals(y)
    if y.sum() < 0:
        y = y * -1
    return torch.sort(torch.nn.functional.dropout(y)).values


@pytest.fixture(scope="module")
def explanation() -> dynamo_backends.explanations.explanation.Explanation:
    return dynamo_backends.explain(broken)(torch.randn(2, 3), 3)


def test_graphs_end_where_and_why_they_do(explanation) -> None:
    first = broken.__code__.co_firstlineno
    assert [(graph.function, graph.breaks) for graph in explanation.graphs] == [
        ("broken", True),
        ("broken", True),
        ("broken", False),
    ]
    assert [int(graph.ends_at.rsplit(":")[-1]) - first for graph in explanation.graphs] == [2, 4, 6]
    assert all(Path(__file__).name in graph.line for graph in explanation.graphs)
    printed, branched, last = explanation.graphs
    assert "print" in printed.details and "Hint" in printed.details
    assert "Data-dependent branching" in branched.details
    assert last.ends and not last.details
    assert printed.operators == {"linear": 1, "mul": 1}
    assert not explanation.unused


def test_what_runs_where_is_said_with_all_reasons_and_remedies(explanation) -> None:
    names = [part.name.split("/")[1] for graph in explanation.graphs for part in graph.graphs]
    assert names == ["forward", "backward"] * 3
    forward = explanation.graphs[0].graphs[0]
    assert forward.share_on_onnx == 1 and not forward.in_pytorch and forward.on_onnx["aten.addmm.default"] == 1
    (svd,) = explanation.graphs[1].graphs[0].in_pytorch
    assert (svd.kind, svd.number, svd.by_design) == ("NO_TRANSLATION", 1, False)
    assert "register_converter(torch.ops.aten._linalg_svd.default)" in svd.remedy
    assert svd.lines[0].endswith(f":{broken.__code__.co_firstlineno + 3}")
    kinds = [item.kind for item in explanation.graphs[2].graphs[0].in_pytorch]
    assert "RANDOM" in kinds and kinds.index("RANDOM") >= kinds.index("UNINITIALIZED") - 1


def test_guards_name_the_arguments(explanation) -> None:
    own = {guard.name: guard for guard in explanation.guards if guard.name.startswith("L[")}
    assert own["L['factor']"].conditions == ["L['factor'] == 3"]
    assert own["L['x']"].kind == "TENSOR_MATCH"


def test_the_text_has_it_all(explanation) -> None:
    text = str(explanation)
    assert text.startswith("3 graphs, 2 graph breaks, ")
    for said in ("aten._linalg_svd.default", "L['factor'] == 3", "Hint:"):
        assert said in text
    assert "Developer debug context" not in text


def test_dropout_that_is_active_is_told() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    with torch.no_grad():
        explanation = dynamo_backends.explain(model)(torch.randn(2, 4))
        inference = dynamo_backends.explain(model.eval())(torch.randn(2, 4))
    assert any("ropout" in note and "test_explain.py:" in note for note in explanation.notes)
    assert not any("ropout" in note for note in inference.notes)


def test_no_session_of_a_graph_is_made_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    monkeypatch.setattr(session.Session, "__init__", lambda *args, **kwargs: pytest.fail("a session of a graph"))
    found = dynamo_backends.coverage(model, options={"fallback": "error"})(torch.randn(2, 3))
    assert json.loads(json.dumps(found)) == found
    assert [part["share_on_onnx"] for part in found["graphs"][0]["graphs"]] == [1.0, 1.0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_without_a_graph_says_why() -> None:
    @torch._dynamo.disable
    def hidden(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    found = dynamo_backends.explain(lambda x: hidden(x))(torch.ones(2))
    assert found.graphs == [] and any("disable" in said for said in found.unused)


def test_a_module_of_a_library_is_called_by_the_users_line() -> None:
    (graph,) = dynamo_backends.explain(torch.nn.Linear(3, 4))(torch.ones(2, 3)).graphs  # this line
    line = 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if "# this line" in text)
    assert graph.line.endswith(f"called from {short_file(__file__)}:{line}")


def test_unknown_options_and_symbolic_sizes() -> None:
    with pytest.raises(ValueError, match="unknown option 'opsett'"):
        dynamo_backends.explain(torch.sin, options={"opsett": 18})
    with pytest.raises(TypeError, match="tensor"):
        dynamo_backends.explain(torch.ones(2))  # type: ignore[arg-type]
    found = dynamo_backends.explain(lambda x: x.reshape(-1) + x.shape[0], dynamic=True)(torch.ones(3, 4))
    assert found.graphs[0].graphs[0].share_on_onnx > 0


def test_what_is_computed_of_a_symbolic_float_would_run_with_sizes_that_are_known() -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((3,), x.shape[0] / 2)

    found = dynamo_backends.explain(filled, dynamic=True)(torch.randn(4, 3))
    remedies = [item.remedy for item in found.graphs[0].graphs[0].in_pytorch]
    assert any("dynamic=False" in remedy for remedy in remedies)


def test_a_layer_that_is_one_operator_has_the_remedy_of_its_reason() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.inference_mode():
        found = dynamo_backends.explain(layer)(torch.randn(2, 4, 16))
    (fallback,) = found.graphs[0].graphs[0].in_pytorch
    assert "set_fastpath_enabled(False)" in fallback.remedy and fallback.remedy in fallback.reason


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "mlp"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"0/inference +5 +5 ", text) and "_parameters" not in text
    assert main(["explain", "mlp", "--train", "--dynamic", "--json", "--options", "opset=20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["name"].split("/")[1] for part in found["graphs"][0]["graphs"]] == ["forward", "backward"]
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "mlp", "--options", "opset"])
    assert "NAME=VALUE" in capsys.readouterr().err


DEEP = (
    "def deep(x):"
    + """
    x = torch.linalg.svdvals(x.tanh()) + x
    torch._dynamo.graph_break()"""
    * 11
)


class Generating(torch.nn.Linear):
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


def test_the_text_is_one_screen_for_a_model_of_any_depth() -> None:
    functions: dict[str, Any] = {"torch": torch}
    exec(DEEP, functions)
    found = dynamo_backends.explain(functions["deep"])(torch.randn(4, 4))
    assert len(found.graphs) == 11
    whole = found.text(all_rows=True)
    assert len(str(found).splitlines()) < 45
    assert "--all" in str(found) and "--all" not in whole
    for graph in found.graphs:
        assert f"\n{graph.graphs[0].name} " in whole


def test_what_the_call_decides_is_said() -> None:
    """The engine of a training graph, gradients that are on, and what ``generate`` runs."""
    model, x = Generating(4, 4), torch.randn(4, 4)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            said = dynamo_backends.explain(model, options={"placement": "measured"})(x).notes
        assert any("no_grad" in note for note in said) == any("'placement'" in note for note in said) == enabled
        assert any("torch.compile(model.forward" in note for note in said)
    assert not any("generate" in note for note in dynamo_backends.explain(LINEAR)(x[:, :3]).notes)


def test_products_of_quantized_layers_have_the_line_that_calls_the_layer() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaModel(config).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    with torch.no_grad():
        found = dynamo_backends.explain(model)(torch.ones(1, 4, dtype=torch.int64), use_cache=False)
    # with AVX-512 VNNI torchao adds up the weights of each layer, too
    (product,) = [item for item in found.graphs[0].graphs[0].products if item.kernel == "MatMulInteger"]
    assert product.number == 7
    for line in product.lines:
        assert re.fullmatch(rf"transformers/.*modeling_llama.py:\d+, called from {short_file(__file__)}:\d+", line)


def test_a_product_in_float32_has_the_reason() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    for dtype, config in (
        (torch.float32, Int8WeightOnlyConfig()),
        (torch.bfloat16, IntxWeightOnlyConfig(torch.int4, PerGroup(32))),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).eval().to(dtype)
        quantize_(model, config)
        with torch.no_grad():
            found = dynamo_backends.explain(model)(torch.ones(2, 64, dtype=dtype))
        (product,) = found.graphs[0].graphs[0].products
        assert "from 8 bits" in product.bits and "activations" in product.why


USERS = """
import torch

class Fails(torch.nn.Module):
    def forward(self, x):
        return {}["weights.pt"]

def fails(rows=2):
    return Fails(), torch.randn(rows)

def raises():
    return torch.load({}["weights.pt"])

def sized(rows):
    return Fails(), torch.randn(rows)
"""


def test_errors_of_the_users_module_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "users.py"
    file.write_text(USERS)
    for name, line in (("fails", 6), ("raises", 12)):
        assert main(["explain", f"{file}:{name}"]) == 2
        said = capsys.readouterr().err
        assert f"MODEL '{file}:{name}'" in said and f"KeyError: 'weights.pt' ({file}:{line})" in said
        assert "Traceback" not in said and "dynamo_backends/" not in said
    assert main(["explain", str(file)]) == 2
    said = capsys.readouterr().err
    assert "file.py:function" in said
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n")
    assert main(["explain", f"{tmp_path}/script.py:fails"]) == 2
    assert f"SystemExit: 3 ({tmp_path}/script.py:2)" in capsys.readouterr().err


@pytest.mark.parametrize("kind", Kind)
def test_every_reason_has_a_remedy(kind: Kind) -> None:
    remedy = remedy_of(kind, "aten.sin.default")
    assert remedy and "{}" not in remedy


def test_nothing_is_said_of_what_was_compiled_before() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    torch.compile(other, backend="onnxrt")(torch.randn(3))
    assert "other" not in str(dynamo_backends.explain(lambda x: x * 2)(torch.randn(3)))
    assert not dynamo_backends.coverage(lambda x: x * 2)(torch.randn(3))["unused"]


def test_functions_of_numbers_are_named_alike_in_every_process() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * math.floor(x.shape[0] ** 0.3)

    found = str(dynamo_backends.coverage(function, dynamic=True)(torch.randn(3, 4)))
    assert "torch.sym_float" in found and " at 0x" not in found and "built-in" not in found
