"""That the package is found, and that each part has its effect on the graph and none on the numbers."""

from __future__ import annotations

import onnx
import pytest
import torch


@pytest.fixture
def record(tmp_path):
    """Compiles and runs a function; returns the ONNX models of its one graph, and what it computed."""

    def run(function, *args):
        torch._dynamo.reset()
        options = {"dump_dir": str(tmp_path), "fallback": "error"}
        results = torch.compile(function, backend="onnx_debug", options=options)(*args)
        folder = max(tmp_path.glob("run_*"))
        return [onnx.load(path) for path in sorted(folder.glob("graph_*/*/region_0/model*.onnx"))], results

    return run


def operators(model):
    return [node.op_type for node in model.graph.node]


def feed_forward(gate, up):
    return torch.nn.functional.silu(gate) * up + 1


def test_the_pass_puts_the_operator_there_and_the_converter_translates_it(record):
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    (model, *_), result = record(feed_forward, gate, up)
    assert "SwiGLU" in operators(model)
    assert [function.name for function in model.functions] == ["SwiGLU"]
    torch.testing.assert_close(result, feed_forward(gate, up))


def test_what_is_broadcast_is_left_alone(record):
    gate, up = torch.randn(4, 8), torch.randn(8)
    (model, *_), result = record(feed_forward, gate, up)
    assert "SwiGLU" not in operators(model)
    torch.testing.assert_close(result, feed_forward(gate, up))


def test_the_onnx_rule_makes_one_of_two(record):
    x = torch.randn(4, 8)
    (model, optimized, *_), result = record(lambda x: x.relu().relu() + 1, x)
    assert operators(model).count("Relu") == 2
    assert operators(optimized).count("Relu") == 1
    torch.testing.assert_close(result, x.relu() + 1)


def test_the_gradient():
    gate, up = (torch.randn(4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(torch.ops.my_backend_extras.swiglu, (gate, up))
    compiled = torch.compile(torch.ops.my_backend_extras.swiglu, backend="onnxrt", options={"placement": "onnx"})
    gradients = torch.autograd.grad(compiled(gate, up).sum(), (gate, up))
    expected = torch.autograd.grad(feed_forward(gate, up).sum(), (gate, up))
    torch.testing.assert_close(gradients, expected)
