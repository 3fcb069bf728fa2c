"""
Distributed
===========

Two processes train one model with ``DistributedDataParallel``, compiled by ``onnxrt``, with gloo. After three steps
their weights are the same, and equal those of one process that trains on all the data in eager mode.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

program = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))


def train(model, parts):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(2, 4, 8, generator=generator)  # a batch for each process
        optimizer.zero_grad()
        model(data[parts].flatten(0, 1)).square().mean().backward()
        optimizer.step()


dist.init_process_group("gloo")
model = DistributedDataParallel(make())
train(torch.compile(model, backend="onnxrt"), [dist.get_rank()])

alone = make()
train(alone, [0, 1])
for ours, theirs in zip(model.module.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
print(f"rank {dist.get_rank()}: the weights are those of one process")
dist.destroy_process_group()
"""
path = Path(tempfile.mkdtemp()) / "train.py"
path.write_text(program)
print(program)

# %%
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
done = subprocess.run(command, capture_output=True, text=True, timeout=300)
print(done.stdout)
assert done.returncode == 0, done.stderr
assert done.stdout.count("those of one process") == 2
