"""Collectives such as ``all_reduce`` run once for each call, in the order of the program: other ranks wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from conftest import assert_same_values, compiled, counted
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.partition.pass_verification import GraphChecker, can_be_verified

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def reduced_shapes(function: object, *args: torch.Tensor) -> tuple[object, list[tuple[int, ...]]]:
    """The results of a function, and the shape of each tensor that it reduced over the group, in order."""
    with torch.profiler.profile(record_shapes=True) as profile:
        results = function(*args)  # type: ignore[operator]
    events = [event for event in profile.events() if event.name == "_c10d_functional::all_reduce"]
    events.sort(key=lambda event: event.time_range.start)
    return results, [tuple(event.input_shapes[0]) for event in events]


def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = collectives.all_reduce(x.sin(), "sum", dist.group.WORLD)
    second = collectives.all_reduce(y.cos(), "sum", dist.group.WORLD)
    third = collectives.all_reduce(z, "sum", dist.group.WORLD)
    return first * 2, second.exp(), third.sin()


ARGUMENTS = torch.randn(2), torch.randn(3), torch.randn(4)
IN_ORDER = [(2,), (3,), (4,)]


@pytest.mark.parametrize("backend", ["onnxrt", "onnx_debug", "fx_debug", "verified"])
def test_each_runs_once_and_in_order(backend: str, group: dist.ProcessGroup, tmp_path: Path) -> None:
    """A compared run is one, too: the comparison takes what the collectives returned. Passes are not verified."""
    options = {} if backend == "onnxrt" else {"dump_dir": str(tmp_path / "dump"), "compare": "every"}
    if backend == "verified":
        backend, options = "onnxrt", {"verify_passes": True}
    function = compiled(step, backend=backend, options=options)
    expected = step(*ARGUMENTS)
    assert_same_values(function(*ARGUMENTS), expected)
    results, shapes = reduced_shapes(function, *ARGUMENTS)
    assert_same_values(results, expected)
    assert shapes == IN_ORDER


def test_a_graph_that_has_them_is_not_run_again_to_verify_its_passes(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    def reduced(function: Callable[[torch.Tensor], torch.Tensor]) -> fx.GraphModule:
        return make_fx(lambda x: collectives.all_reduce(function(x), "sum", dist.group.WORLD) + 1)(ARGUMENTS[0])

    before, after = reduced(torch.sin), reduced(torch.cos)
    with torch.profiler.profile() as profile:
        assert GraphChecker(ARGUMENTS[:1]).problem(before, after) is None
    assert not [event for event in profile.events() if "all_reduce" in event.name]
    assert counted("graphs_not_verified") == 1
    assert "collectives" in caplog.text
    assert can_be_verified(make_fx(torch.sin)(ARGUMENTS[0]))
    assert counted("graphs_not_verified") == 1


def crossing(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``sin`` and ``add``, one region, wait for the sort in PyTorch, and the first collective for them."""
    s = x.sin()
    first = collectives.all_reduce(s, "sum", dist.group.WORLD)
    second = collectives.all_reduce(y, "sum", dist.group.WORLD)
    return first, second, s + x.sort().values


def test_a_region_does_not_change_their_order(group: dist.ProcessGroup) -> None:
    """Ranks that reduce in another order, as those on another processor may, wait for each other for ever."""
    function = compiled(crossing)
    x, y = ARGUMENTS[:2]
    function(x, y)
    results, shapes = reduced_shapes(function, x, y)
    torch.testing.assert_close(results, (x.sin(), y, x.sin() + x.sort().values))
    assert shapes == IN_ORDER[:2]
