"""Attention written out in ONNX becomes one operator, with eager's values also in fully masked rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_same_as_eager, counted
from onnx_ir.passes import common
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dynamo_backends import decomposition_table, onnx_compiler
from passes import PassContext, Target
from passes.onnx.attention import PASS

ALONE = {"disable": ["*"], "enable": ["onnx.attention", "onnx.lift_constants"]}
"""Without what other passes make of attention before."""
SETTINGS: dict[str, object] = {"options": {"opset": 23, "passes": ALONE}}
LOWEST = torch.finfo(torch.float32).min
B, H, S, T, D = 2, 4, 5, 7, 8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """More threads than heads keep the pass from firing."""
    torch.set_num_threads(1)


def fired() -> int:
    return counted("pass onnx.attention")


def check(
    function: Callable[..., object], *args: object, times: int = 1, settings: Mapping[str, object] = SETTINGS
) -> None:
    """Asserts how often the pass fires, and that the results are eager's."""
    with torch.no_grad():
        assert_same_as_eager(function, *args, settings=settings)
    assert fired() == times


def heads(batch: int = B, number: int = H, length: int = T, features: int = D) -> torch.Tensor:
    return torch.randn(batch, number, length, features)


def queries_keys_values() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return heads(length=S), heads(), heads()


class SelfAttention(torch.nn.Module):
    """The usual form: three projections, split into heads, attention, heads joined."""

    def __init__(self, attend: Callable[..., torch.Tensor] = scaled_dot_product_attention, groups: int = 1) -> None:
        super().__init__()
        self.attend = attend
        self.groups = groups
        self.q = torch.nn.Linear(H * D, H * D)
        self.k = torch.nn.Linear(H * D, H * D // groups)
        self.v = torch.nn.Linear(H * D, H * D // groups)

    def forward(self, x: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, D)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.groups > 1:
            k, v = (
                item[:, :, None].expand(-1, -1, self.groups, -1, -1).reshape(len(x), H, x.shape[1], D)
                for item in (k, v)
            )
        return self.attend(q, k, v, *mask).transpose(1, 2).flatten(2)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None):
    """As it is written by hand."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1) @ v


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """What PyTorch makes of it where it has no kernel: a softmax that is 0 for rows of -inf."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, mask)


def masks() -> dict[str, torch.Tensor]:
    """Additive masks of each kind; in the second batch the third row is fully masked."""
    hidden = torch.rand(B, 1, S, T) < 0.4
    hidden[..., 0] = False
    some = torch.zeros(B, 1, S, T).masked_fill(hidden, -math.inf)
    all_infinite, all_lowest, mixed = some.clone(), some.clamp(min=LOWEST), some.clone()
    all_infinite[1, 0, 2] = -math.inf
    all_lowest[1, 0, 2] = LOWEST
    mixed[1, 0, 2], mixed[0, 0, 1] = -math.inf, LOWEST
    undefined = all_infinite.clone()
    undefined[1, 0, 2, 1], undefined[0, 0, 1, 0], undefined[0, 0, 0] = math.nan, math.nan, math.nan
    kinds = {"some": some, "row of -inf": all_infinite, "row of lowest": all_lowest, "rows of both": mixed}
    return {**kinds, "NaN": undefined}


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, eager_attention])
def test_projections_and_heads_go_into_the_operator(attend: Callable[..., torch.Tensor]) -> None:
    check(SelfAttention(attend), torch.randn(B, S, H * D))


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("attend", [scaled_dot_product_attention, eager_attention])
def test_masks_from_outside(attend: Callable[..., torch.Tensor], kind: str) -> None:
    torch.manual_seed(0)
    check(attend, *queries_keys_values(), masks()[kind])


@pytest.mark.parametrize("kind", masks())
@pytest.mark.parametrize("attend", [scaled_dot_product_attention, eager_attention])
def test_masks_where_heads_are_put_together(attend: Callable[..., torch.Tensor], kind: str) -> None:
    torch.manual_seed(0)
    mask = masks()[kind][..., :S]
    check(SelfAttention(attend), torch.randn(B, S, H * D), mask)


@pytest.mark.parametrize("shape", [(S, T), (1, S, T), (H, S, T), (B, H, S, T), (1, 1, S, T), (B, 1, 1, T), (1, T)])
def test_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    mask = torch.randn(shape)
    mask[..., 1] = -math.inf
    check(eager_attention, *queries_keys_values(), mask)


@pytest.mark.parametrize("shape", [(S, T), (B, 1, S, T), (B, H, S, T), (B, 1, 1, T)])
def test_boolean_masks(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.6
    mask[(0,) * (len(shape) - 1)] = False  # a row hidden altogether
    check(lambda q, k, v, m: scaled_dot_product_attention(q, k, v, attn_mask=m), *queries_keys_values(), mask)


@pytest.mark.parametrize("low", [-math.inf, LOWEST, -1e30])
@pytest.mark.parametrize("where", [True, False])
def test_scores_hidden_by_masked_fill(low: float, where: bool) -> None:
    hidden = torch.rand(B, 1, S, T) < 0.5
    hidden[0, 0, 1] = True

    def attend(q, k, v, hidden):
        scores = q @ k.transpose(-1, -2) * 0.3
        scores = torch.where(~hidden, scores, low) if where else scores.masked_fill(hidden, low)
        return scores.softmax(-1) @ v

    check(attend, *queries_keys_values(), hidden)


@pytest.mark.parametrize("length", [S, T])
def test_causal(length: int) -> None:
    q, k, v = queries_keys_values()
    check(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), heads(length=length), k, v)


def test_scales_of_queries_keys_and_products() -> None:
    def attend(q, k, v):
        return (((0.5 * q) @ (k * 3.0).transpose(-1, -2)) / 2.0).softmax(-1) @ v

    check(attend, *queries_keys_values())


def test_values_with_other_features_than_keys() -> None:
    q, k, _ = queries_keys_values()
    check(eager_attention, q, k, heads(features=3))


def test_keys_transposed_as_one_permutation() -> None:
    def attend(x, y, v):
        q, k = x.permute(0, 2, 1, 3), y.permute(0, 2, 3, 1)
        return (q @ k).softmax(-1) @ v

    check(attend, torch.randn(B, S, H, D), torch.randn(B, T, H, D), heads())


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, eager_attention])
def test_keys_and_values_shared_by_groups_of_queries(attend: Callable[..., torch.Tensor]) -> None:
    check(SelfAttention(attend, groups=2), torch.randn(B, S, H * D))


def grouped(q, k, v, mask=None, **settings):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **settings)


def repeated(q, k, v, mask=None):
    """As Transformers does where there is a mask."""
    k, v = (item[:, :, None].expand(-1, -1, q.shape[1] // k.shape[1], -1, -1).flatten(1, 2) for item in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_nodes(function: Callable[..., object], *args: object) -> list[ir.Node]:
    """What the pass makes of a function."""
    model = translated(function, *args)
    PASS.run(model, PassContext(PASS.name))
    return [node for node in model.graph if node.op_type == "Attention"]


@pytest.mark.parametrize("attend", [grouped, lambda q, k, v, mask=None: grouped(q, k, v, mask, is_causal=mask is None)])
@pytest.mark.parametrize("kind", [None, "some", "row of -inf"])
def test_heads_that_are_rows_of_one_product(attend: Callable[..., torch.Tensor], kind: str | None) -> None:
    mask = () if kind is None else (masks()[kind],)
    check(attend, heads(length=S), heads(number=2), heads(number=2), *mask, settings=SETTINGS)


def test_heads_that_are_rows_are_read_by_position() -> None:
    """Several positions, a mask: no head of the query is moved for it."""
    module = SelfAttention(lambda q, k, v: grouped(q, k, v, is_causal=True), groups=1)
    module.k, module.v = (torch.nn.Linear(H * D, 2 * D) for _ in range(2))
    check(module, torch.randn(B, S, H * D), settings=SETTINGS)
    [node] = attention_nodes(module, torch.randn(B, S, H * D))
    assert [node.attributes[name].as_int() for name in ("q_num_heads", "kv_num_heads")] == [H, 2]


@pytest.mark.parametrize("attend", [grouped, repeated])
@pytest.mark.parametrize("shape", [None, (1, T), (B, 1, 1, T), (1, 1, 1, T), (B, 2, 1, T), (B, H, 1, T)])
def test_heads_are_rows_for_one_position(attend: Callable[..., torch.Tensor], shape: tuple[int, ...] | None) -> None:
    """Unless the mask tells heads apart; in the first batch all is hidden."""
    if shape == (B, 2, 1, T):
        query, keys = heads(number=2, length=1), [heads(number=1), heads(number=1)]
    else:
        query, keys = heads(length=1), [heads(number=2), heads(number=2)]
    mask = () if shape is None else (torch.rand(shape) < 0.5,)
    for item in mask:
        item[(0,) * (len(item.shape) - 1)] = False
    check(attend, query, *keys, *mask, settings=SETTINGS)
    if shape is None or 1 in shape[-3:-2] or len(shape) == 2:
        [node] = attention_nodes(attend, query, *keys, *mask)
        assert node.inputs[0] is not None and list(node.inputs[0].shape) == [B, 2, 2, D]


def test_the_causal_mask_of_one_position_is_not_that_of_rows() -> None:
    """From the top left: all heads see the first key, and no other."""
    keys, values = heads(number=2), heads(number=2)
    check(lambda q, k, v: grouped(q, k, v, is_causal=True), heads(length=1), keys, values, settings=SETTINGS)


def test_a_cache_of_any_length() -> None:
    """The lengths of keys and values are two symbols: that they are equal is what the product says."""

    def attend(q, k, v, past_k, past_v):
        return grouped(q, torch.cat([past_k, k], 2), torch.cat([past_v, v], 2))

    function = torch.compile(attend, backend="onnxrt", **SETTINGS)
    with torch.no_grad():
        for length in (T, T + 2):
            past = [heads(number=2, length=length) for _ in range(2)]
            for item in past:
                torch._dynamo.mark_dynamic(item, 2)
            inputs = [heads(length=1), heads(number=2, length=1), heads(number=2, length=1), *past]
            torch.testing.assert_close(function(*inputs), attend(*inputs))
    assert fired() == 1 and counted("recompiles") == 0


ROWS = """<ir_version: 10, opset_import: ["" : 23]>
agraph (float[2,4,5,8] q, float[2,2,7,8] k, float[2,2,7,8] v, float[2,1,10,7] m, float[2,1,5,7] n)
    => (float[2,4,5,8] y) {
    rows = Constant <value_ints = [2, 2, 10, 8]> () g = Reshape(q, rows)
    u = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(g, u)
    BEFORE
    all = Constant <value_ints = [2, 4, 5, 7]> () a = Reshape(b, all)
    AFTER
    p = Softmax(c)
    both = Constant <value_ints = [2, 2, 10, 7]> () r = Reshape(p, both)
    t = MatMul(r, v)
    apart = Constant <value_ints = [2, 4, 5, 8]> () y = Reshape(t, apart)
}"""


@pytest.mark.parametrize(
    ("before", "after", "fires"),
    [("b = Identity(s)", "c = Add(a, n)", True), ("b = Add(s, m)", "c = Identity(a)", False)],
)
def test_where_a_mask_is_added_to_heads_that_are_rows(before: str, after: str, fires: bool) -> None:
    text = ROWS.replace("BEFORE", before).replace("AFTER", after)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))
    common.IdentityEliminationPass()(model)
    context = PassContext(PASS.name, explain=True)
    assert PASS.run(model, context) == fires
    assert ["scores" in miss.reason for miss in context.near_misses] == ([] if fires else [True])


def test_dynamic_batch_and_length() -> None:
    model = SelfAttention(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True))
    with torch.no_grad():
        compiled = assert_same_as_eager(model, torch.randn(2, 5, H * D), settings={**SETTINGS, "dynamic": True})
        assert fired() == 1
        for batch, length in ((3, 6), (5, 9)):
            x = torch.randn(batch, length, H * D)
            torch.testing.assert_close(compiled(x), model(x))
    assert counted("graphs") == 1


def test_dynamic_mask() -> None:
    torch.manual_seed(0)
    model, mask = SelfAttention(), masks()["row of -inf"][..., :S]
    check(model, torch.randn(B, S, H * D), mask, settings={**SETTINGS, "dynamic": True})
    assert counted("nodes_in_pytorch") == 0


def test_one_query_and_a_cache() -> None:
    def attend(q, k, v, past_k, past_v):
        return scaled_dot_product_attention(q, torch.cat([past_k, k], 2), torch.cat([past_v, v], 2))

    check(attend, heads(length=1), heads(length=1), heads(length=1), heads(), heads())


def test_a_mask_shared_by_layers_is_made_ready_once() -> None:
    layers = [SelfAttention() for _ in range(3)]

    def stack(x, mask):
        for layer in layers:
            x = layer(x, mask)
        return x

    model = translated(stack, torch.randn(B, S, H * D), masks()["row of -inf"][..., :S])
    assert PASS.run(model, PassContext(PASS.name)) == 3
    operators = [node.op_type for node in model.graph]
    assert operators.count("Attention") == 3 and operators.count("Max") == operators.count("ReduceMax") == 1
    assert "Softmax" not in operators


def translated(function: Callable[..., object], *args: object) -> ir.Model:
    """The ONNX model of a function before any pass except the merging of equal nodes."""
    records: list[Any] = []
    fw_compiler = onnx_compiler(opset=23, record=records, passes={"disable": ["*"]})
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=fw_compiler, decompositions=decomposition_table()))(
            *args
        )
    model = ir.from_proto(records[0].onnx_model)
    common.CommonSubexpressionEliminationPass()(model)
    return model


@pytest.mark.parametrize("kind", [None, *masks()])
def test_what_pytorch_writes_out_is_fused_for_a_gpu(kind: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = queries_keys_values()
    given = (q, k, v) if kind is None else (q, k, v, masks()[kind])
    model = translated(written_out, *given)
    assert PASS.run(model.clone(), PassContext(PASS.name)) == 0, "on the CPU it stays as it is"
    assert PASS.run(model, PassContext(PASS.name, target=Target(providers=("CUDAExecutionProvider",), threads=1))) == 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    names = sorted(item.name for item in session.get_inputs())  # of the arguments, in order
    [result] = session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})
    torch.testing.assert_close(torch.from_numpy(result), written_out(*given), equal_nan=True)


@pytest.mark.parametrize("passes", [ALONE, {"disable": ["onnx.attention"]}])
def test_nan_in_hidden_rows_stays(passes: dict[str, list[str]]) -> None:
    q, k, v = queries_keys_values()
    mask, undefined = masks()["row of -inf"], v.clone()
    undefined[:, :, 0, 1], undefined[:, :, 1, 2] = math.nan, math.inf
    unknown = torch.where(torch.arange(S)[:, None] == 2, math.nan, q)
    for given in ((q, k, undefined, mask), (unknown, k, v, mask)):
        with torch.no_grad():
            assert_same_as_eager(
                scaled_dot_product_attention, *given, settings={"options": {"opset": 23, "passes": passes}}
            )


def test_what_pytorch_writes_out_keeps_nan_and_infinity() -> None:
    q, k, v = queries_keys_values()
    mask = masks()["row of -inf"]
    hidden = v.clone()
    hidden[:, :, 0] = math.nan
    for given in ((q, k, hidden, mask), (q.abs() + 1, -(k.abs() + 1) * 3e38, v, None)):
        check(written_out, *given, times=0)


def test_names_metadata_and_near_misses() -> None:
    model = translated(SelfAttention(), torch.randn(B, S, H * D))
    names = {value.name for node in model.graph for value in node.outputs}
    assert PASS.run(model, PassContext(PASS.name)) == 1
    [node] = [node for node in model.graph if node.op_type == "Attention"]
    assert node.outputs[0].name in names and "test_onnx_attention.py" in node.metadata_props["source"]
    asked = PassContext(PASS.name, explain=True)
    PASS.run(translated(lambda q, k, v: (q @ k.mT).exp().softmax(-1) @ v, *queries_keys_values()), asked)
    [miss] = asked.near_misses
    assert miss.reason.startswith("Exp ") and (miss.matched, miss.of) == (1, 4)


def test_infinities_and_nans_stay() -> None:
    q, k, v = queries_keys_values()
    q[0, 0, 0, 0], k[0, 1, 2, 3], v[1, 2, 3, 4] = math.inf, math.nan, -math.inf
    check(eager_attention, q, k, v)


# Where it must not fire


def test_not_in_training_where_the_backward_needs_the_probabilities() -> None:
    model = SelfAttention(eager_attention)
    assert_same_as_eager(model, torch.randn(B, S, H * D, requires_grad=True), settings=SETTINGS)
    assert fired() == 0


def test_not_where_probabilities_are_returned() -> None:
    def attend(q, k, v):
        probabilities = (q @ k.transpose(-1, -2)).softmax(-1)
        return probabilities @ v, probabilities

    check(attend, *queries_keys_values(), times=0)


def test_not_where_scores_are_returned() -> None:
    def attend(q, k, v):
        scores = q @ k.transpose(-1, -2)
        return scores.softmax(-1) @ v, scores

    check(attend, *queries_keys_values(), times=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_not_in_other_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (item.to(dtype) for item in queries_keys_values())
    with torch.no_grad():
        close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else None  # eager's own rounding of scores
        assert_same_as_eager(eager_attention, q, k, v, settings=SETTINGS, tolerance=close)
    assert fired() == 0


def test_not_over_another_dimension() -> None:
    check(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(2) @ v, *queries_keys_values(), times=0)


def test_not_with_a_moderate_number_in_place_of_scores() -> None:
    """A row of -1e4 plus scores is no row of -1e4."""
    hidden = torch.rand(B, 1, S, T) < 0.5
    hidden[0, 0, 1] = True

    def attend(q, k, v, hidden):
        return (q @ k.transpose(-1, -2)).masked_fill(hidden, -1e4).softmax(-1) @ v

    check(attend, *queries_keys_values(), hidden, times=0)


@pytest.mark.parametrize("scale", [-0.5, math.inf])
def test_not_where_the_scale_is_not_positive_and_finite(scale: float) -> None:
    check(lambda q, k, v: (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v, *queries_keys_values(), times=0)


def test_not_where_the_scale_is_no_constant() -> None:
    def attend(q, k, v, scale):
        return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v

    check(attend, *queries_keys_values(), torch.tensor(0.5), times=0)


def test_not_with_two_masks_or_a_scaled_one() -> None:
    def two(q, k, v, first, second):
        return (q @ k.transpose(-1, -2) + first + second).softmax(-1) @ v

    def scaled(q, k, v, mask):
        return ((q @ k.transpose(-1, -2) + mask) * 0.5).softmax(-1) @ v

    mask = torch.randn(S, T)
    check(two, *queries_keys_values(), mask, mask, times=0)
    check(scaled, *queries_keys_values(), mask, times=0)


def test_not_with_fewer_heads_than_threads() -> None:
    torch.set_num_threads(2)
    check(eager_attention, heads(1, 1), heads(1, 1), heads(1, 1), times=0)


@pytest.mark.parametrize(("pytorch", "option", "times"), [(1, 2, 0), (2, 1, 1)])
def test_the_threads_that_count_are_the_sessions(pytorch: int, option: int, times: int) -> None:
    torch.set_num_threads(pytorch)
    settings = {"options": {"threads": option, "passes": ALONE}}
    check(eager_attention, heads(1, 1), heads(1, 1), heads(1, 1), times=times, settings=settings)


def test_not_before_opset_23() -> None:
    check(eager_attention, *queries_keys_values(), times=0, settings={"options": {"opset": 22, "passes": ALONE}})
