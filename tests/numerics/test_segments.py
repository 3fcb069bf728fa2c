"""The values of a run, each judged on what it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from dynamo_backends.numerics.segments import Judged, RecordedValues, SegmentCheck

aten = torch.ops.aten


def judged(
    target: Callable[..., object], arguments: tuple[object, ...], actual: object, **kwargs: object
) -> tuple[Judged | None, Mapping[str, str]]:
    """What is found of the result of one node, and what could not be judged."""
    graph = fx.Graph()
    given: dict[fx.Node, object] = {}

    def node_of(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(given)}")
        given[node] = value
        return node

    args = pytree.tree_map(node_of, arguments)
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = actual
    check = SegmentCheck([*given, node], given, RecordedValues({(node, None): actual}))
    found = [item for item in check.judge() if item.node is node]
    return (found[0] if found else None), check.unchecked


def test_a_users_operator_with_the_name_of_a_sum() -> None:
    """Nothing is known of it: it is not called with magnitudes, and its result is not believed to be a sum."""
    negative: list[bool] = []

    @torch.library.custom_op("test_segments::linear", mutates_args=())
    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        negative.append(bool((x < 0).any()))
        return torch.exp(x)

    x = torch.linspace(-20, -15, 8)
    for actual, is_wrong in ((torch.zeros(8), True), (x.exp() * (1 + 1e-5), True), (x.exp(), False)):
        found, _ = judged(torch.ops.test_segments.linear.default, (x, torch.ones(8)), actual)
        assert found is not None and found.is_wrong is is_wrong
    assert all(negative), "called with other numbers than the run's"


class RejectedError(Exception):
    """Of a user's own."""


@pytest.mark.parametrize("error", [RejectedError, KeyError, TypeError])
def test_a_users_operator_that_rejects_float64(error: type[Exception]) -> None:
    @torch.library.custom_op(f"test_segments::{error.__name__.lower()}", mutates_args=())
    def only_single(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise error("float32 only")
        return x * 2

    x = torch.rand(4)
    target = getattr(torch.ops.test_segments, error.__name__.lower()).default
    found, unchecked = judged(target, (x,), x * 2)
    assert found is not None and not found.is_wrong and not unchecked
    found, unchecked = judged(target, (x,), x * 3)
    assert found is None
    assert error.__name__ in next(iter(unchecked.values()))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_each_floating_point_dtype_has_a_tolerance(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    for factor, is_wrong in ((1, False), (8, True)):
        found, _ = judged(aten._to_copy.default, (x,), (x * factor).to(dtype), dtype=dtype)
        assert found is not None and found.is_wrong is is_wrong


def test_packed_numbers_are_compared_by_their_bits() -> None:
    x = torch.arange(4, dtype=torch.uint8)
    for other, is_wrong in ((0, False), (1, True)):
        found, _ = judged(aten.view.dtype, (x,), (x + other).view(torch.float4_e2m1fn_x2), dtype=torch.float4_e2m1fn_x2)
        assert found is not None and found.is_wrong is is_wrong


def is_wrong(target: Callable[..., object], arguments: tuple[object, ...], actual: torch.Tensor) -> bool:
    found, unchecked = judged(target, arguments, actual)
    assert found is not None and not unchecked
    return found.is_wrong


def test_what_is_rounded_once_is_not_excused_by_its_arguments() -> None:
    x, y = torch.randn(16) + 1e3, torch.randn(16) + 1e3
    assert not is_wrong(aten.sub.Tensor, (x, y), x - y)
    assert is_wrong(aten.sub.Tensor, (x, y), (x - y) * 1.0001)


def test_of_several_writes_to_one_place_any_may_stay_and_nothing_else() -> None:
    x, index, source = torch.zeros(3), torch.tensor([1, 1, 1, 0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
    for number in (5.0, 6.0, 7.0, 18.0, 0.0, float("nan")):
        actual = torch.tensor([8.0, number, 0.0])
        assert is_wrong(aten.index_put.default, (x, [index], source), actual) == (number not in source)
        assert is_wrong(aten.scatter.src, (x, 0, index, source), actual) == (number not in source)
