"""Ten training steps in each process of a group, compiled and in eager, which must be equal; for ``torchrun``.

``python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed_steps.py FOLDER`` runs each backend
with ``DistributedDataParallel`` and ``fully_shard``, each both around and inside the compiled module. The dumps are
written to FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import conftest  # noqa: F401  the settings of the tests
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 10
Compile = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    """A layer outside PyTorch's own modules, so that Dynamo compiles its frame."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(nn.functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def sharded(compile: Compile = lambda module: module) -> nn.Module:
    """A model whose blocks are optionally compiled, then sharded, then the whole."""
    model = Model()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = fully_shard(compile(block))
    return fully_shard(model)


WAYS: dict[str, Callable[[Compile], nn.Module]] = {
    "DDP around what is compiled": lambda compile: DistributedDataParallel(compile(Model())),
    "DDP within what is compiled": lambda compile: compile(DistributedDataParallel(Model())),
    "fully_shard around what is compiled": sharded,
    "fully_shard within what is compiled": lambda compile: compile(sharded()),
}


def steps(module: nn.Module) -> Iterator[torch.Tensor]:
    """The loss of each step, and all unsharded parameters after the last one."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for i in range(STEPS):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2 * i + dist.get_rank()))
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        yield loss.detach()
    for parameter in module.parameters():
        value = parameter.detach()
        yield value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = sys.argv[1]
    for way, make in WAYS.items():
        expected = list(steps(make(lambda module: module)))
        for backend in ("onnxrt", "onnx_debug"):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            options = {"dump_dir": folder, "compare": "first"} if backend == "onnx_debug" else {}
            actual = list(steps(make(lambda module, o=options, b=backend: torch.compile(module, backend=b, options=o))))
            torch.testing.assert_close(actual, expected)
            counts = torch._dynamo.utils.counters["dynamo_backends"]
            assert counts["nodes_on_onnx"] > 0, (way, backend)
            assert counts["runtime_failures"] == counts["wrong_results"] == 0, (way, backend)
    if dist.get_rank() == 0:
        print("equal to eager:", ", ".join(WAYS))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
