"""PyTorch's operators of attention on a GPU: their translations, run on the CPU, and their float64."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import compiled
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import scaled_dot_product_attention

from dynamo_backends.errors import TranslationError
from dynamo_backends.exporter.translate import fold_constants, translate
from dynamo_backends.graphs.artifacts import RegionInput, RegionOutput
from dynamo_backends.numerics.exact import TOLERANT_REPLACEMENTS, OperatorError
from dynamo_backends.runtime.binding import InputSpec, OutputSpec
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings

aten = torch.ops.aten
B, H, S, T, D = 2, 4, 5, 7, 8


def translated(function: Any, arguments: Sequence[object], results: Sequence[int], **settings: object) -> list[Any]:
    """Results of a call on a GPU, computed by its translation on the CPU."""
    graph = fx.Graph()
    nodes: list[object] = []
    for i, argument in enumerate(arguments):
        nodes.append(graph.placeholder(f"x{i}") if isinstance(argument, torch.Tensor) else argument)
    call = graph.call_function(function, tuple(nodes), settings)  # type: ignore[arg-type]
    with FakeTensorMode():
        for node, argument in zip(nodes, arguments, strict=True):
            if isinstance(node, fx.Node) and isinstance(argument, torch.Tensor):
                device = "cuda" if argument.dim() else "cpu"
                node.meta["val"] = torch.empty(argument.shape, dtype=argument.dtype, device=device)
        values = fx.map_arg(call.args, lambda node: node.meta["val"])
        call.meta["val"] = function(*values, **settings)
    for index in results:  # the others are not read
        item = graph.call_function(operator.getitem, (call, index))
        item.meta["val"] = call.meta["val"][index]
    inputs = [RegionInput(node) for node in call.all_input_nodes]
    model = fold_constants(translate([call], inputs, [RegionOutput(call, index=i) for i in results], opset=23))
    given = [item for item in arguments if isinstance(item, torch.Tensor)]
    read = [InputSpec(str(value.name), item.dtype) for value, item in zip(model.graph.inputs, given, strict=True)]
    made = [
        OutputSpec(str(value.name), call.meta["val"][i].dtype, sizes=tuple(call.meta["val"][i].shape))
        for value, i in zip(model.graph.outputs, results, strict=True)
    ]
    return Session(model, SessionSettings(("CPUExecutionProvider",)), read, made)(given)


def heads(length: int, number: int = H, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(B, number, length, D).to(dtype)


def of_operator(name: str, mask: torch.Tensor | None, is_causal: bool, scale: float | None) -> tuple[Any, list[object]]:
    """The operator, and its arguments after query, key and value, by position."""
    given: dict[str, list[object]] = {
        "efficient": [mask, True, 0.0, is_causal],
        "flash": [0.0, is_causal, False],
        "cudnn": [mask, True, 0.0, is_causal, False],
    }
    return getattr(aten, f"_scaled_dot_product_{name}_attention").default, given[name]


def mask_of(shape: tuple[int, ...]) -> torch.Tensor:
    hidden = torch.rand(shape) < 0.3
    hidden[..., 0] = False
    hidden[0, 0, 1] = True  # a row that sees nothing
    return torch.zeros(shape).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(
    ("name", "shape", "is_causal"),
    [
        ("efficient", None, False),
        ("efficient", None, True),
        ("efficient", (B, H, S, T), False),
        ("flash", None, False),
        ("flash", None, True),
        ("cudnn", (B, H, S, T), False),
        ("cudnn", None, True),
    ],
)
def test_results_and_gradients(name: str, shape: tuple[int, ...] | None, is_causal: bool, scale: float | None) -> None:
    query, key, value = heads(S), heads(S if is_causal else T), heads(S if is_causal else T)
    mask = None if shape is None else mask_of(shape)
    function, others = of_operator(name, mask, is_causal, scale)
    output, logsumexp = translated(function, [query, key, value, *others], [0, 1], scale=scale)
    wide = [item.double().requires_grad_() for item in (query, key, value)]
    expected = scaled_dot_product_attention(
        *wide, attn_mask=None if mask is None else mask.double(), is_causal=is_causal, scale=scale
    )
    torch.testing.assert_close(output, expected.detach().float())
    in_float64 = TOLERANT_REPLACEMENTS[function](*(item.detach() for item in wide), *others, scale=scale)  # type: ignore[operator]
    torch.testing.assert_close(in_float64[0], expected.detach())
    torch.testing.assert_close(in_float64[1].float(), logsumexp)

    gradient = torch.randn_like(output)
    expected.backward(gradient.double())
    backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
    saved = [output, logsumexp]
    seed, lengths = torch.tensor(0), [None, None, S, T]
    arguments: dict[str, list[object]] = {
        "efficient": [mask, *saved, seed, seed, 0.0, [True, True, True, False], is_causal],
        "flash": [*saved, *lengths, 0.0, is_causal, seed, seed],
        "cudnn": [*saved, seed, seed, mask, *lengths, 0.0, is_causal],
    }
    found = translated(backward, [gradient, query, key, value, *arguments[name]], [0, 1, 2], scale=scale)
    right = [item.grad for item in wide]
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs.float())  # type: ignore[union-attr]
    doubled = [item.double() if isinstance(item, torch.Tensor) and item.dim() else item for item in arguments[name]]
    in_float64 = TOLERANT_REPLACEMENTS[backward](  # type: ignore[operator]
        gradient.double(), *(item.detach() for item in wide), *doubled, scale=scale
    )
    for ours, theirs in zip(in_float64, right, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # of an output that was rounded to float32


def test_half_precision() -> None:
    query, key, value = (heads(S, dtype=torch.float16) for _ in range(3))
    function, others = of_operator("flash", None, False, None)
    output, logsumexp = translated(function, [query * 9, key, value, *others], [0, 1])
    assert (output.dtype, logsumexp.dtype) == (torch.float16, torch.float32)
    expected = scaled_dot_product_attention(query.double() * 9, key.double(), value.double())
    torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-3)  # the result is rounded to 2**-11


def test_the_gradient_of_a_mask() -> None:
    query, key, value, mask = heads(S), heads(T), heads(T), mask_of((B, H, S, T)).clamp(min=-9.0)
    function, others = of_operator("efficient", mask, False, None)
    output, logsumexp = translated(function, [query, key, value, *others], [0, 1])
    gradient, seed = torch.randn_like(output), torch.tensor(0)
    saved = [output, logsumexp, seed, seed, 0.0, [True, True, True, True]]
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    [found] = translated(backward, [gradient, query, key, value, mask, *saved], [3])
    wide = mask.double().requires_grad_()
    scaled_dot_product_attention(query.double(), key.double(), value.double(), wide).backward(gradient.double())
    torch.testing.assert_close(found, wide.grad.float())  # type: ignore[union-attr]


def test_the_gradient_of_a_mask_that_is_broadcast_is_not_translated() -> None:
    query, key, value, mask = heads(S), heads(T), heads(T), mask_of((1, H, S, T))
    function, others = of_operator("efficient", mask, False, None)
    output, logsumexp = translated(function, [query, key, value, *others], [0, 1])
    seed = torch.tensor(0)
    saved = [output, logsumexp, seed, seed, 0.0, [True, True, True, True]]
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    with pytest.raises(TranslationError, match="broadcast"):
        translated(backward, [output, query, key, value, mask, *saved], [0])
    with pytest.raises(TranslationError, match="random"):
        translated(backward, [output, query, key, value, mask, *saved[:4], 0.5, [True] * 4], [0])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_softmax_of_rows_that_are_hidden(dim: int) -> None:
    x = torch.randn(3, 4, 5)
    x.select(dim, 0)[:] = -torch.inf
    x[:, 1, 2], x[1, :, 3], x[2, 2, :], x[2, 2, 1] = -torch.inf, -torch.inf, -torch.inf, torch.nan
    function = compiled(lambda x: aten._safe_softmax.default(x, dim), options={"fallback": "error"})
    torch.testing.assert_close(function(x), aten._safe_softmax.default(x, dim), equal_nan=True)


def test_a_length_that_is_not_known() -> None:
    graph, shapes = fx.Graph(), ShapeEnv()
    length = shapes.create_unbacked_symint()
    nodes = [graph.placeholder(name) for name in "qkv"]
    with FakeTensorMode(shape_env=shapes):
        for node in nodes:
            node.meta["val"] = torch.empty(B, H, length, D, device="cuda")
        for name in ("efficient", "flash", "cudnn"):
            function, others = of_operator(name, None, False, None)
            call = graph.call_function(function, (*nodes, *others))
            call.meta["val"] = function(*(node.meta["val"] for node in nodes), *others)
            item = graph.call_function(operator.getitem, (call, 0))
            item.meta["val"] = call.meta["val"][0]
            translate([call], [RegionInput(node) for node in nodes], [RegionOutput(call, index=0)], opset=23)


def test_dropout_is_not_translated() -> None:
    query = heads(S)
    for name, others in (("efficient", [None, True, 0.5, False]), ("flash", [0.5, False, False])):
        function = getattr(aten, f"_scaled_dot_product_{name}_attention").default
        with pytest.raises(TranslationError, match="random"):
            translated(function, [query, query, query, *others], [0])
        with pytest.raises(OperatorError):
            TOLERANT_REPLACEMENTS[function](query.double(), query.double(), query.double(), *others)  # type: ignore[operator]
