"""Attention written out in a model runs on ONNX Runtime with eager's results, in inference and in training.

The forms are those of PyTorch's ``fuse_attention``, and others.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers as tf
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from torch._inductor.fx_passes import fuse_attention
from zoo import SMALL, tokens_with_labels

# The forms of PyTorch's own pass


def _forms() -> Iterator[tuple[str, Callable[..., object], list[torch.Tensor], dict[str, float]]]:
    """Name, function, example inputs and scalars of each form PyTorch fuses."""
    for name, settings in fuse_attention._get_sfdp_patterns(torch.device("cpu")):
        if "training" in name or "half" in name:
            continue
        name = name.removesuffix("_inference")
        function = getattr(fuse_attention, name.removesuffix("_bs1"))
        if function.__name__ == "_sfdp_pattern_28":  # calls another, of noncontiguous tensors
            function = fuse_attention._sfdp_pattern_4
        yield name, function, settings["example_inputs"], settings["scalar_workaround"]


FORMS = {name.removeprefix("_sfdp_pattern_"): form for name, *form in _forms()}

NARROW = {"7", "8", "9", "10"}
"""Forms that round the probabilities to float16, and are attention only in half precision."""

IN_FLOAT32 = {"21", "22", "23", "24", "25", "26", "27"}
"""Forms with float32 written into them."""


def _ours(function: Callable[..., object]) -> Callable[..., object]:
    """The function as if it were defined here: Dynamo does not trace functions in PyTorch's own files."""
    code = function.__code__.replace(co_filename=__file__)
    return types.FunctionType(code, {**vars(fuse_attention), "__name__": __name__})


def _arguments(form: str, dtype: torch.dtype, dropout: float) -> list[object]:
    function, examples, scalars = FORMS[form]
    tensors, arguments = iter(examples), []
    for name in inspect.signature(function).parameters:
        if name == "dropout_p":
            arguments.append(dropout)
        elif name in scalars:
            arguments.append(0.5)
        else:
            arguments.append(_argument(next(tensors), dtype))
    return arguments


def _argument(example: torch.Tensor, dtype: torch.dtype) -> object:
    if example.ndim == 0:
        return 2.0
    shape = [min(size, 16) for size in example.shape]
    if example.dtype is torch.bool:
        return torch.rand(shape) > 0.3
    return torch.randn(shape).to(dtype).requires_grad_(example.requires_grad)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", sorted(FORMS))
def test_known_forms_in_inference(form: str) -> None:
    dtype = torch.float16 if form in NARROW else torch.float32
    arguments = [item.detach() if isinstance(item, torch.Tensor) else item for item in _arguments(form, dtype, 0.0)]
    half = {"atol": 1e-2, "rtol": 1e-2}  # eager rounds scores and probabilities to float16
    with torch.no_grad():
        assert_same_as_eager(_ours(FORMS[form][0]), *arguments, tolerance=half if dtype is torch.float16 else None)
    assert_on_onnx()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", sorted(form for form in FORMS if form.removesuffix("_bs1") not in NARROW | IN_FLOAT32))
def test_known_forms_in_training(form: str) -> None:
    """Results and gradients in float64, dropout drawing eager's numbers."""
    assert_same_as_eager(_ours(FORMS[form][0]), *_arguments(form, torch.float64, dropout=0.3))


# Other forms


def scores_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = scores_of(q, k)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (item[:, :2].repeat_interleave(2, dim=1) for item in (k, v))
    return scores_of(q, k).softmax(-1) @ v


def einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhsd,bhtd->bhst", q, k) * 0.25
    return torch.einsum("bhst,bhtd->bhsd", scores.softmax(-1), v)


def relative_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As T5: no scale, a learned bias; here one of the arguments is the bias, so that it has a gradient."""
    return ((q @ k.transpose(-2, -1)) + v.sum(0, keepdim=True).mean(-1, keepdim=True)).softmax(-1) @ v


def two_masks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    padding = torch.zeros(2, 1, 1, 8)
    padding[1, :, :, 5:] = torch.finfo(torch.float32).min
    return (scores_of(q, k) + padding.to(q.dtype) + (-torch.arange(8.0).to(q.dtype))).softmax(-1) @ v


def scaled_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q * 0.3) @ (k * 0.7).transpose(-2, -1)).softmax(-1) @ v


def matrices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scores_of(q[0, 0], k[0, 0]).softmax(-1) @ v[0, 0]


def merged_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (item.reshape(8, 8, 16) for item in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).view(2, 4, 8, 8).softmax(-1).view(8, 8, 8), v).view(2, 4, 8, 16)


def fully_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Eager gives NaN for a fully masked row."""
    hidden = torch.zeros(8, 8, dtype=torch.bool)
    hidden[3] = True
    return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


def finite_fill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A fully masked row is the mean of the values, since all scores are the same finite fill."""
    hidden = torch.zeros(8, 8, dtype=torch.bool)
    hidden[3] = True
    return torch.where(hidden, torch.tensor(-1e4, dtype=q.dtype), scores_of(q, k)).softmax(-1) @ v


OTHER_FORMS = {
    function.__name__: function
    for function in (
        causal,
        grouped,
        relative_bias,
        two_masks,
        scaled_query,
        matrices,
        merged_heads,
        fully_masked,
        finite_fill,
        einsum,
    )
}


def queries(dtype: torch.dtype = torch.float32, **settings: bool) -> list[torch.Tensor]:
    return [torch.randn(2, 4, 8, 16, dtype=dtype, **settings) for _ in range(3)]


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_in_inference(form: str) -> None:
    with torch.no_grad():
        assert_same_as_eager(OTHER_FORMS[form], *queries())
    assert_on_onnx()


@pytest.mark.parametrize("form", sorted(set(OTHER_FORMS) - {"fully_masked"}))
def test_other_forms_in_training(form: str) -> None:
    assert_same_as_eager(OTHER_FORMS[form], *queries(torch.float64, requires_grad=True))


@pytest.mark.parametrize("form", ["causal", "grouped", "scaled_query"])
def test_dynamic_shapes(form: str) -> None:
    """Batch and length are symbols; the number of features is a module's, as its scale is."""
    function = compiled(OTHER_FORMS[form])
    with torch.no_grad():
        for batch, length in ((2, 8), (3, 5)):
            arguments = [torch.randn(batch, 4, length, 16) for _ in range(3)]
            for argument in arguments:
                torch._dynamo.mark_dynamic(argument, 0)
                torch._dynamo.mark_dynamic(argument, 2)
            torch.testing.assert_close(function(*arguments), OTHER_FORMS[form](*arguments))
    assert counted("graphs") == 1 and counted("recompiles") == 0


def test_a_hook_on_the_scores_is_not_lost() -> None:
    def hooked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        probabilities = Doubled.apply(scores_of(q, k)).softmax(-1)
        return probabilities @ v

    assert_same_as_eager(hooked, *queries(torch.float64, requires_grad=True))


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


NO_ATTENTION = {
    "another dimension": lambda q, k, v: scores_of(q, k).softmax(-2) @ v,
    "scaled after the mask": lambda q, k, v: ((q @ k.mT + v[..., :1].mT) * 0.5).softmax(-1) @ v,
    "something between": lambda q, k, v: torch.tanh(scores_of(q, k)).softmax(-1) @ v,
    "scores are an input": lambda q, k, v: q[..., :8].softmax(-1) @ v,
    "no value": lambda q, k, v: scores_of(q, k).softmax(-1).sum(-1),
    "rows mixed": lambda q, k, v: scores_of(q, k).reshape(2, 4, 4, 16).softmax(-1) @ v.reshape(2, 4, 16, 8),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_no_attention_stays(name: str) -> None:
    with torch.no_grad():
        assert_same_as_eager(NO_ATTENTION[name], *queries())
    assert counted("pass onnx.attention") == 0


# Models


def test_a_model_that_writes_attention_out() -> None:
    """Its queries share keys and values."""
    config = tf.Qwen2Config(**SMALL, num_key_value_heads=2, attn_implementation="eager", use_cache=False)
    module = tf.Qwen2ForCausalLM(config).eval()
    torch.set_num_threads(1)  # more threads than heads keep the pass from firing
    with torch.no_grad():
        assert_same_as_eager(module, **tokens_with_labels())
    assert counted("pass onnx.attention") == 2
    torch._dynamo.reset()
    sums = {"rtol": 1e-4, "atol": 1e-5}  # float32 gradients, summed over another order
    assert_same_as_eager(module.train(), tolerance=sums, **tokens_with_labels())
