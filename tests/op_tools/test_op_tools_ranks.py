"""The operator tools in a distributed run: one folder for each rank, and each collective runs once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynamo_backends import op_tools

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")


def work(rank: int, folder: str) -> None:
    """The work of one process: three steps without a tool and with each tool."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def steps(tool: op_tools.OpTool | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for i in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2 * i + rank))
            if tool is not None:
                tool.start()
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            if tool is not None:
                tool.stop()
            losses.append(loss.detach())
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    def tools() -> Iterator[op_tools.OpTool]:
        for level in ("torch", "aten"):
            yield op_tools.OpCapture(f"{folder}/captured", level=level, quiet=True)
            yield op_tools.OpAutoCompare(capture=None, level=level, quiet=True)
            yield op_tools.OpFallback(level=level, quiet=True)
            yield op_tools.OpTimeMeasure(level=level, quiet=True)

    expected = steps()
    for tool in tools():
        assert all(map(torch.equal, expected, steps(tool))), f"{type(tool).__name__} {tool.level}"
        assert not getattr(tool, "failed", [])
    dist.destroy_process_group()


def test_two_processes_with_ddp(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, args=(str(tmp_path),), nprocs=2)
    assert sorted(path.name for path in (tmp_path / "captured").iterdir()) == ["0", "1"]
    for rank in ("0", "1"):
        assert list((tmp_path / "captured" / rank).rglob("torch.nn.functional.linear/0/grad_inputs.pth"))
