"""Our converters against eager: values, gradients, dtypes, and that no node runs in PyTorch."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.onnx._internal.exporter import _registration

from dynamo_backends import decomposition_table, onnx_compiler
from dynamo_backends.exporter import torch_internals


def assert_equals_eager(function: Callable[..., object], *args: object, **tolerance: float) -> None:
    """Asserts that results and gradients are eager's, and only views run in PyTorch."""
    assert_same_as_eager(function, *args, tolerance=tolerance or None, settings={"options": {"fallback": "error"}})
    assert counted("nodes_on_onnx") > 0
    assert counted("runtime_failures") == 0


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def symbolic(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
    """Marks sizes as dynamic; the compiled function must not specialize on them."""
    for dim in dims:
        torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


# Attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention(dtype: torch.dtype, is_causal: bool) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.3)

    query, key, value = (
        randn(2, 3, 5, 8, dtype=dtype),
        randn(2, 3, 7, 8, dtype=dtype),
        randn(2, 3, 7, 8, dtype=dtype),
    )
    half = {"rtol": 1e-2, "atol": 1e-3} if dtype is torch.float16 else {}  # eager rounds the probabilities to half
    assert_equals_eager(attention, query, key, value, **half)


@pytest.mark.parametrize("kind", ["bool", "float", "rows"])
def test_attention_with_a_mask_that_hides_a_row(kind: str) -> None:
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    mask[1, :, :, :2] = False  # the first two rows of the second sequence see nothing
    if kind == "rows":
        mask = mask[1, 0]
    if kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    query, key, value = randn(2, 3, 5, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 8)

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    assert_equals_eager(attention, query, key, value)


def test_logsumexp_of_attention() -> None:
    mask = torch.zeros(5, 5)
    mask[2] = -torch.inf
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    tensors = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    assert_equals_eager(lambda q, k, v: flash(q, k, v, attn_mask=mask), *tensors)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_of_symbolic_length(is_causal: bool) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    tensors = [symbolic(randn(2, 3, 5, 8), 0, 2) for _ in range(3)]
    assert_equals_eager(attention, *tensors)


# Convolution


@pytest.mark.parametrize("has_symbolic_sizes", [False, True])
@pytest.mark.parametrize(
    ("dims", "transposed", "settings"),
    [
        (1, False, {}),
        (1, False, {"stride": 3, "padding": 2, "dilation": 2}),
        (1, True, {"stride": 2, "output_padding": 1}),
        (2, False, {"padding": 1}),
        (2, False, {"padding": 4}),
        (2, False, {"stride": (2, 1), "padding": (0, 3), "dilation": (1, 2)}),
        (2, False, {"groups": 2, "stride": 2}),
        (2, False, {"groups": 4, "padding": 1, "stride": 2}),
        (2, True, {"groups": 2, "stride": 2, "padding": 1}),
        (3, False, {"stride": 2, "padding": 1}),
    ],
)
def test_convolution_backward(dims: int, transposed: bool, settings: dict[str, int], has_symbolic_sizes: bool) -> None:
    module = getattr(torch.nn, f"Conv{'Transpose' if transposed else ''}{dims}d")(4, 8, (3, 2, 3)[:dims], **settings)
    input = randn(2, 4, *(8, 9, 7)[:dims])
    tolerance = {"rtol": 1e-4, "atol": 1e-4}  # weight gradients are float32 sums over all positions, in another order
    if has_symbolic_sizes:  # an output padding must be known: strided ones run in PyTorch
        assert_same_as_eager(module, symbolic(input, 0, *range(2, 2 + dims)), tolerance=tolerance)
        in_pytorch = counted("fallback aten.convolution_backward.default") > 0
        assert in_pytorch == (not transposed and ("stride" in settings or settings.get("padding") == 4))
    else:
        assert_equals_eager(module, input, **tolerance)


def test_convolution_backward_with_a_large_kernel() -> None:
    # As above: sums over all positions in another order.
    assert_equals_eager(torch.nn.Conv2d(4, 6, 7, padding=3, stride=2), randn(2, 4, 17, 16), rtol=1e-4, atol=1e-4)
    assert_equals_eager(torch.nn.Conv2d(4, 6, 6, groups=2, dilation=2), randn(2, 4, 17, 16), rtol=1e-4, atol=1e-4)


# Pooling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "pool",
    [
        torch.nn.AvgPool1d(3, 2, 1),
        torch.nn.AvgPool2d(3, 2, 1),
        torch.nn.AvgPool2d((3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
        torch.nn.AvgPool2d(3, 2, ceil_mode=True),
        torch.nn.AvgPool3d(2, 1, 1, ceil_mode=True),
        torch.nn.AdaptiveAvgPool1d(4),
        torch.nn.AdaptiveAvgPool2d((3, 2)),
        torch.nn.AdaptiveAvgPool3d((2, 5, 1)),
    ],
    ids=str,
)
def test_average_pooling(pool: torch.nn.Module, dtype: torch.dtype) -> None:
    dims = int(type(pool).__name__[-2])
    assert_equals_eager(pool, randn(2, 3, *(7, 5, 6)[:dims], dtype=dtype))


@pytest.mark.parametrize(
    "pool",
    [
        torch.nn.MaxPool1d(3, 2, 1),
        torch.nn.MaxPool2d(3, 1, 1),
        torch.nn.MaxPool2d((3, 2), 2, 1, ceil_mode=True, dilation=2, return_indices=True),
        torch.nn.MaxPool3d(2),
    ],
    ids=str,
)
def test_max_pooling(pool: torch.nn.Module) -> None:
    dims = int(type(pool).__name__[-2])
    assert_equals_eager(pool, randn(2, 3, *(8, 6, 4)[:dims]))


def test_max_pooling_of_symbolic_size() -> None:
    assert_equals_eager(torch.nn.MaxPool2d(3, 2), symbolic(randn(2, 3, 9, 8), 0, 2, 3))


@pytest.mark.parametrize("size", [(3, 2), (0, 2), (1, 1)])
def test_adaptive_max_pooling_has_eagers_strides(size: tuple[int, int]) -> None:
    for x in (randn(2, 3, 6, 4), randn(2, 3, 6, 4).to(memory_format=torch.channels_last)):
        pool = torch.nn.AdaptiveMaxPool2d(size, return_indices=True)
        for found, eager in zip(compiled(pool)(x), pool(x), strict=True):
            torch.testing.assert_close(found, eager, check_stride=True)


@pytest.mark.parametrize("offset", [0, -2, 3])
def test_diagonals_of_symbolic_sizes(offset: int) -> None:
    """PyTorch assumes that the diagonal has one element, if it has in the first call."""
    function = compiled(lambda x: x.diagonal(offset) + 0, dynamic=True)
    for shape in ((3, 4), (4, 5), (6, 9)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(function(x), x.diagonal(offset))
    assert not any(event.startswith("undone pass") for event in counters["dynamo_backends"])
    assert_on_onnx()


def test_a_diagonal_of_the_last_dimensions_needs_no_transpose() -> None:
    with torch.no_grad():
        assert "Transpose" not in operators_in(lambda x: x.diagonal(dim1=1, dim2=2) * 2, torch.ones(2, 4, 3))


# Losses


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none", "ignore_index": 2},
        {"ignore_index": 2, "label_smoothing": 0.1},
        {"weight": torch.arange(1.0, 6.0), "ignore_index": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 2)])
def test_cross_entropy(shape: tuple[int, ...], settings: dict[str, object]) -> None:
    target = torch.randint(0, 5, (shape[0], *shape[2:]))
    assert_equals_eager(lambda x: F.cross_entropy(x, target, **settings), randn(*shape))  # type: ignore[arg-type]


def test_cross_entropy_of_ignored_targets_alone() -> None:
    target = torch.full((4,), -100)
    assert_equals_eager(lambda x: F.cross_entropy(x, target, reduction="sum"), randn(4, 5))
    assert_equals_eager(lambda x: F.cross_entropy(x, target), randn(4, 5))  # NaN


def test_negative_log_likelihood_of_one_sample() -> None:
    target = torch.tensor(2)
    assert_equals_eager(lambda x: F.nll_loss(x.log_softmax(0), target), randn(5, dtype=torch.float64))


def test_cross_entropy_of_symbolic_length() -> None:
    target = torch.randint(0, 5, (6,))
    assert_equals_eager(lambda x, t: F.cross_entropy(x, t), symbolic(randn(6, 5), 0), symbolic(target, 0))


# Parts


@pytest.mark.parametrize("sizes", [2, 3, 7, [3, 0, 4], [7]], ids=str)
def test_split(sizes: int | list[int]) -> None:
    assert_equals_eager(lambda x: [part * 2 for part in x.split(sizes, -1)], randn(2, 7))


def test_split_into_symbolic_sizes() -> None:
    def split(x: torch.Tensor) -> list[torch.Tensor]:
        length = x.shape[0]
        return [part * 2 for part in x.split([2, length - 2], 0)]

    assert_equals_eager(split, symbolic(randn(7, 3), 0))


def test_weight_normalization() -> None:
    assert_equals_eager(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3)), randn(2, 4))


# Normalization


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(6),
        torch.nn.LayerNorm((5, 6), bias=False),
        torch.nn.LayerNorm(6, elementwise_affine=False),
        torch.nn.BatchNorm2d(3),
        torch.nn.BatchNorm2d(3, affine=False, momentum=0.3),
    ],
    ids=str,
)
def test_normalization(norm: torch.nn.Module, dtype: torch.dtype) -> None:
    half = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {}  # results are rounded at other places
    if dtype is torch.float32:
        half = {"rtol": 1e-4, "atol": 1e-5}  # sums of float32 in another order
    assert_equals_eager(copy.deepcopy(norm).to(dtype), randn(2, 3, 5, 6, dtype=dtype), **half)


def test_normalization_of_symbolic_sizes() -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert_equals_eager(torch.nn.LayerNorm(6), symbolic(randn(4, 5, 6), 0, 1), **tolerance)
    for norm, x in ((torch.nn.BatchNorm2d(3), randn(4, 3, 5, 6)), (torch.nn.BatchNorm1d(3), randn(4, 3))):
        # The backward divides by a symbolic float, in PyTorch.
        assert_same_as_eager(norm, symbolic(x, *(dim for dim in range(x.ndim) if dim != 1)), tolerance=tolerance)
        assert counted("nodes_on_onnx") > counted("nodes_in_pytorch")


# Embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_embedding(padding_idx: int | None, dtype: torch.dtype) -> None:
    embedding = torch.nn.Embedding(5, 4, padding_idx=padding_idx, dtype=dtype)
    half = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {}  # eager adds up in half precision
    assert_equals_eager(embedding, torch.randint(0, 5, (3, 7)), **half)
    assert_equals_eager(embedding, symbolic(torch.randint(0, 5, (3, 7)), 0, 1), **half)


def test_embedding_bag_runs_in_pytorch() -> None:
    """Torchlib translates only its first result, to a loop."""
    bag = torch.nn.EmbeddingBag(5, 4, mode="mean")
    for has_gradients in (True, False):
        counters.clear()
        assert_same_as_eager(bag.requires_grad_(has_gradients), torch.randint(0, 5, (7,)), torch.tensor([0, 3]))
        assert counters["dynamo_backends"]["nodes_in_pytorch"] > 0


@pytest.mark.parametrize(("divided", "expected"), [(0, {"Div"}), (7, {"Div", "Mod"})])
def test_only_a_size_that_may_be_negative_needs_its_remainder(divided: int, expected: set[str]) -> None:
    """``-(-x.shape[0] // 2)`` and the like; ONNX's ``Div`` truncates."""
    found = operators_in(lambda x: x * ((x.shape[0] - divided) // 2), symbolic(torch.ones(4, 2), 0))
    assert found & {"Div", "Mod"} == expected


# Indices


def write(cache: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Writes into a cache of fixed length."""
    result = cache.clone()
    result[:, :, positions] = values
    return result


def operators_in(function: Callable[..., object], *args: object) -> set[str]:
    """The operators of a function's ONNX model as it is translated."""
    records: list[Any] = []
    backend = aot_autograd(fw_compiler=onnx_compiler(record=records), decompositions=decomposition_table())
    torch.compile(function, backend=backend)(*args)
    return {node.op_type for node in records[0].onnx_model.graph.node}


@pytest.mark.parametrize("values", [(2, 3, 2, 4), (2, 4), (3, 1, 4), (1,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_rows_of_an_inner_dimension_are_written_where_they_stand(values: tuple[int, ...], dtype: torch.dtype) -> None:
    cache, rows, positions = torch.randn(2, 3, 16, 4).to(dtype), torch.randn(values).to(dtype), torch.tensor([11, -1])
    assert_equals_eager(write, cache, positions, rows)
    assert_equals_eager(write, cache, positions.int(), rows)
    found = operators_in(write, cache, positions, rows)
    assert "ScatterND" in found and "Transpose" not in found


def test_positions_outside_of_an_inner_dimension_are_an_error() -> None:
    """Where all rows are counted, they are rows of the next head."""
    function = compiled(write)
    for outside in (16, -17):
        with pytest.raises(IndexError, match="out of bounds"):
            function(torch.zeros(2, 3, 16, 4), torch.tensor([0, outside]), torch.zeros(2, 4))


def copied(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.index_copy(0, index, rows) * 2


def copied_in_place(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    x.index_copy_(0, index, rows)
    return x * 2


def copied_in_a_column(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    x[:, 1].index_copy_(0, index, rows[:, 1])
    return x * 2


def unpooled(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return F.max_unpool2d(rows[:, None, :1, None], index.reshape(-1, 1, 1, 1), 2)


@pytest.mark.parametrize("write", [copied, copied_in_place, copied_in_a_column, unpooled])
def test_indices_that_eager_rejects_are_errors(write: Callable[..., torch.Tensor]) -> None:
    """ONNX and ``index_put``, to which PyTorch decomposes both, count from the end."""
    for inside in (0, 1):
        assert_same_as_eager(write, torch.randn(4, 3), torch.tensor([2 * inside, 1]), torch.randn(2, 3))
    function = compiled(write)
    for outside in (-1, 4):
        arguments = torch.zeros(4, 3), torch.tensor([0, outside]), torch.ones(2, 3)
        with pytest.raises((IndexError, RuntimeError)) as eager:
            write(*arguments)
        with pytest.raises(eager.type):
            function(*arguments)


def test_rows_are_copied_by_one_operator() -> None:
    x, rows = torch.randn(4, 3), torch.randn(2, 3)
    for index in (torch.tensor([3, 0]), torch.tensor(3)):
        assert_equals_eager(copied, x, index, rows[: index.numel()])
    assert "ScatterND" in operators_in(copied, x, torch.tensor([3, 0]), rows)
    assert_equals_eager(lambda x, index: x.index_copy(0, index, torch.tensor(5.0)) * 2, x[0], torch.tensor(1))
    assert_equals_eager(copied, torch.tensor(1.0), torch.tensor(0), torch.tensor([2.0]))
    for fill in (2.5, torch.tensor(3)):
        for number in (-1, 2):
            assert_equals_eager(lambda x, index, fill: x.index_fill(1, index, fill), x, torch.tensor(number), fill)
            assert_equals_eager(lambda x, index, fill: x.index_fill(0, index, fill), x, torch.tensor([number, 1]), fill)
    assert_same_as_eager(lambda x, index: x.index_fill(0, index, 2), torch.tensor(1.0), torch.tensor(-1))


@pytest.mark.parametrize("positions", [torch.arange(16).repeat(3), torch.rand(16) > 0.5, torch.zeros(0, dtype=int)])
def test_rows_for_which_torchlibs_translation_stays(positions: torch.Tensor) -> None:
    """More indices than numbers, a mask, and no index."""
    assert_same_as_eager(write, torch.randn(2, 3, 16, 1), positions, torch.randn(1))


@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_of_symbolic_sizes(accumulate: bool) -> None:
    def put(cache: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.index_put(cache, [None, positions], values, accumulate)

    cache, positions, values = torch.randn(3, 16, 4), torch.tensor([11, 2]), torch.randn(3, 2, 4)
    for known in ([1, 2], [0, 1]):
        torch._dynamo.reset()
        inputs = [item.clone() for item in (cache, positions, values)]
        for item, dims in zip(inputs, ([0, 1, 2], [0], [0, 1, 2]), strict=True):
            symbolic(item, *(dim for dim in dims if dim not in known))
        assert_same_as_eager(put, *inputs)


# Constants


def test_constants_of_float64_are_not_rounded_to_float32() -> None:
    """A Python number that a translation casts to float64 keeps its digits."""

    def constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = torch.full((2, 3), 0.1, dtype=torch.float64)
        return full + x, torch.where(x > 0, x, 0.1), torch.sub(x, x, alpha=0.1)

    assert_equals_eager(constants, torch.randn(2, 3, dtype=torch.float64), rtol=1e-14, atol=0.0)


def test_scale_of_attention_in_float64_is_not_rounded_to_float32() -> None:
    """ONNX Runtime's ``FusedMatMul`` would take a scalar as its ``alpha``, a float32."""
    tensors = [torch.randn(2, 3, 5, 6, dtype=torch.float64) for _ in range(3)]
    assert_equals_eager(F.scaled_dot_product_attention, *tensors, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("opset", [18, 23])
def test_torchlib_is_read_as_pytorchs_registry_reads_it(opset: int) -> None:
    registry = _registration.ONNXRegistry.from_torchlib(opset)
    for name, entries in registry.functions.items():
        wanted = [item.onnx_function for item in entries if not item.is_complex]
        found = torch_internals.torchlib_function(entries[0].fx_target, opset)
        assert found is (wanted[0] if wanted and not torch_internals.needs_the_exporter(wanted[0]) else None), name


@pytest.mark.parametrize(
    "function",
    [
        lambda c, x, y: torch.where(c, x, y),
        lambda c, x, y: torch.where(~c, x, y[0]),
        lambda c, x, y: torch.where(c, x, 0.0),
        lambda c, x, y: torch.where(c[:, None], x, torch.ones_like(y)),
        lambda c, x, y: torch.where(c, x.half(), y),
        lambda c, x, y: torch.where(c, x.bfloat16(), y.bfloat16()),
        lambda c, x, y: x.masked_fill(c, -0.0),
        lambda c, x, y: x.masked_fill(c, y[0]),
        lambda c, x, y: torch.where(c, torch.full((4,), -1e-10).half(), x.half()),
    ],
)
def test_a_choice_keeps_the_sign_of_a_zero(function: Callable[..., torch.Tensor]) -> None:
    x, y = torch.tensor([-0.0, 0.0, -0.0, 2.0]), torch.tensor([-0.0, -0.0, 3.0, -0.0])
    for condition in (torch.tensor([True, False, True, False]), torch.tensor([False, True, False, True])):
        found, eager = compiled(function)(condition, x, y), function(condition, x, y)
        assert torch.equal(found, eager) and found.dtype == eager.dtype
        assert torch.equal(found.signbit(), eager.signbit())


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda c, x: x.masked_fill(c, -1e9), torch.float16),
        (lambda c, x: x.clone().masked_fill_(c, 1e60), torch.float32),
        (lambda c, x: x.masked_fill(c, torch.full((), 1e60, dtype=torch.float64)), torch.float32),
        (lambda c, x: x.masked_fill(c, torch.full((), torch.nan)), torch.int64),
        (lambda c, x: x.masked_fill(c, -1e-60), torch.uint8),
        (lambda c, x: torch.where(c, x, 1e60), torch.float32),
        (lambda c, x: torch.where(c, x, 300), torch.uint8),
        (lambda c, x: torch.full_like(x, 1e60) + x, torch.float32),
        (lambda c, x: torch.nn.functional.pad(x, (1, 1), value=1e9), torch.float16),
        (lambda c, x: x.scatter(0, c.long(), 1e9), torch.float16),
    ],
)
def test_a_number_that_does_not_fit_is_eagers_error(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    arguments = torch.tensor([True, False]), torch.tensor([1, 2]).to(dtype)
    with pytest.raises(RuntimeError) as eager:
        function(*arguments)
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        compiled(function)(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, v: x.scatter(0, i, v),
        lambda x, i, v: x.scatter(1, i, v[:, :3]),
        lambda x, i, v: x.scatter_add(0, i, v),
        lambda x, i, v: x.detach().scatter_reduce(0, i, v, "prod", include_self=False),
        lambda x, i, v: x.gather(0, i),
    ],
)
def test_a_source_larger_than_the_index(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """PyTorch reads its first elements; sums in half precision, also of the gradient, are added in float32."""
    x = torch.randn(5, 4).to(dtype).requires_grad_()
    index, source = torch.tensor([[1, 2], [2, 0], [0, 1]]), torch.randn(3, 4).to(dtype)
    assert_same_as_eager(function, x, index, source)
    assert counted("runtime_failures") == 0
    assert_on_onnx()


def test_the_number_in_the_place_of_nan_may_be_any() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert torch.equal(compiled(lambda x: torch.nan_to_num(x, nan=1e60))(x), torch.nan_to_num(x, nan=1e60))


def test_a_number_below_float32s_is_true() -> None:
    def function(c: torch.Tensor) -> torch.Tensor:
        return c.masked_fill(c, 1e-50) & (torch.full((2,), 1e-50, dtype=torch.bool) | c)

    mask = torch.tensor([True, False])
    assert torch.equal(compiled(function)(mask), function(mask))


def test_the_gradient_of_a_small_soft_margin_loss() -> None:
    """PyTorch's decomposition subtracts 1 from a number that float32 rounds to 1."""
    x = torch.linspace(-30, 30, 100, requires_grad=True)

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (found,) = torch.autograd.grad(function(x), x)
        return found

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.soft_margin_loss(x, torch.ones_like(x))

    torch.testing.assert_close(gradient(compiled(loss)), gradient(loss), rtol=1e-5, atol=0.0)


# Quantization

BY_TENSOR = torch.ops.quantized_decomposed.dequantize_per_tensor.default
BY_CHANNEL = torch.ops.quantized_decomposed.dequantize_per_channel.default
BYTES = torch.arange(255, dtype=torch.uint8).view(3, 85)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_difference_of_integers_wraps(dtype: torch.dtype) -> None:
    """``x - zero_points`` in the integers' own dtype."""
    zeros = torch.tensor([5, 120, 100], dtype=dtype)
    limits, scales = torch.iinfo(dtype), torch.tensor([0.1, 0.3, 0.7])
    for zero_points in (zeros, zeros.int()):
        assert_same_as_eager(
            lambda x, z: BY_CHANNEL(x, scales, z, 0, limits.min, limits.max, dtype), BYTES.view(dtype), zero_points
        )


@pytest.mark.parametrize("out", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_numbers_are_dequantized_in_eagers_precision(dtype: torch.dtype, out: torch.dtype) -> None:
    """Of a tensor in that of the result, of a channel in that of the scales."""
    limits, scales = torch.iinfo(dtype), (torch.rand(3) + 0.1).to(out)
    x = torch.randint(limits.min, limits.max, (3, 85), dtype=dtype)
    zeros, exact = torch.tensor([5, -7, 100]), {"rtol": 0.0, "atol": 0.0}
    for function in (
        lambda x: BY_TENSOR(x, 0.1, 3, limits.min, limits.max, dtype, out_dtype=out),
        lambda x: BY_CHANNEL(x, scales, zeros, 0, limits.min, limits.max, dtype, out_dtype=torch.float32),
    ):
        assert_same_as_eager(function, x, tolerance=exact)


# Variance


VARIANCES = torch.var, torch.std, torch.var_mean, torch.std_mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_variance(dtype: torch.dtype, is_symbolic: bool) -> None:
    """All forms of dimensions, corrections up to more than the number of elements, and special values."""

    def statistics(x: torch.Tensor) -> list[Any]:
        settings: list[dict[str, Any]] = [
            {},
            {"dim": (), "keepdim": True},
            {"dim": -1, "correction": 0},
            {"dim": (2, 0), "keepdim": True, "correction": 0.5},
            *({"dim": 1, "correction": number} for number in (4, 7)),
        ]
        return [function(x, **item) for function in (torch.std, torch.var_mean) for item in settings]

    x = torch.randn(2, 4, 3).to(dtype)
    special = x.clone()
    special[0, :, 0] = 0.3  # equal numbers: infinity, or NaN with a correction of 4
    special[0, 1, 1], special[1, 0, 0] = torch.nan, torch.inf
    values = torch.stack([x, special])
    values = symbolic(values, 1, 2, 3) if is_symbolic else values
    check = assert_same_as_eager if dtype is torch.bfloat16 else assert_equals_eager
    check(lambda values: [statistics(x) for x in values], values)


@pytest.mark.parametrize("function", VARIANCES)
def test_variance_of_equal_and_of_large_numbers(function: Callable[..., Any]) -> None:
    for value in (torch.full((3, 1000), 0.3), torch.tensor([[3e38, 3e38, 2e38], [3e30, 1.0, -3e30]])):
        assert_equals_eager(lambda x: function(x, 1), value)
    assert_same_as_eager(lambda x: function(x), torch.tensor(2.0))
    assert_same_as_eager(lambda x: function(x, 1), torch.zeros(2, 0))
    assert_same_as_eager(lambda x: function(x), torch.tensor([1 + 2j, 3 - 1j]))


@pytest.mark.parametrize("is_symbolic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_mean_with_infinities_is_that_of_a_running_mean(dtype: torch.dtype, is_symbolic: bool) -> None:
    rows = [[1.0, 2.0, torch.inf], [torch.inf, 1.0, 2.0], [-torch.inf, 1.0, torch.inf], [torch.nan, 1.0, -torch.inf]]
    x = torch.tensor(rows + [[1.0, 2.0, -torch.inf], [torch.inf] * 3], dtype=dtype)
    x = torch.stack([x, x.roll(1, 0)])
    x = symbolic(x, 1, 2) if is_symbolic else x
    for dim in (2, 1, (0, 2)):
        assert_equals_eager(lambda x, dim=dim: (*torch.var_mean(x, dim), *torch.std_mean(x, dim, keepdim=True)), x)
    assert_on_onnx()


def test_instance_norm_of_symbolic_size_does_not_split_the_graph() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.InstanceNorm2d(4, affine=True), torch.nn.ReLU())
    assert_equals_eager(module, symbolic(torch.randn(2, 3, 6, 7), 0, 2, 3), rtol=1e-4, atol=1e-5)
    assert counted("regions") == 2  # forward and backward


@pytest.mark.parametrize("mode", ["floor", "trunc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounded_quotients(mode: str, dtype: torch.dtype) -> None:
    numbers = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        3.5,
        0.1,
        -0.1,
        7.0,
        0.9999999,
        -2.0,
        1e-40,
        1e30,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    x, y = torch.tensor(numbers, dtype=dtype), torch.cat([torch.tensor(numbers), torch.randn(200)]).to(dtype)

    def quotients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        quotient = torch.div(x[:, None], y, rounding_mode=mode)
        return torch.stack([quotient, quotient.reciprocal()])  # infinities show the signs of zeros

    assert_same_as_eager(quotients, x, y, tolerance={"rtol": 0, "atol": 0})


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_factor_is_not_rounded_to_float16(dynamic: bool) -> None:
    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * (x.shape[0] / 3), x / (x.shape[0] / 3)

    exact = {"rtol": 0, "atol": 0}
    assert_same_as_eager(scaled, torch.randn(1000).half(), settings={"dynamic": dynamic}, tolerance=exact)
    assert_on_onnx()
