"""Processor time and threads of layers that are compiled one by one.

``python benchmarks/layers.py --threads 2 --rows 128`` prints a line. ``--spin 0`` and ``--weights inputs`` show other
choices.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder, whose passes.py would hide the package passes

LAYERS, WIDTH, CALLS = 32, 256, 30


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of each session")
    parser.add_argument("--rows", type=int, default=1, help="rows of the argument")
    parser.add_argument("--spin", type=int, default=1, help="the option spin")
    parser.add_argument("--weights", default="constants", help="the option weights")
    chosen = parser.parse_args()
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)]).eval()
    options = {"threads": chosen.threads, "spin": chosen.spin, "weights": chosen.weights}
    for layer in model:
        layer.compile(backend="onnxrt", dynamic=False, options=options)
    x = torch.randn(chosen.rows, WIDTH)
    processor, elapsed = [], []
    with torch.no_grad():
        for _ in range(3):  # compiling, the session of each layer, and a call with all
            model(x)
        for _ in range(CALLS):
            started, used = time.perf_counter(), time.process_time()
            model(x)
            elapsed.append(time.perf_counter() - started)
            processor.append(time.process_time() - used)
    print(
        f"processor {1e3 * min(processor):.1f} ms, elapsed {1e3 * min(elapsed):.1f} ms, "
        f"{len(os.listdir('/proc/self/task'))} threads"
    )


if __name__ == "__main__":
    main()
