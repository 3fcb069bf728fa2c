"""Where the memory of a compiled model goes, in new processes; Linux only.

    python benchmarks/memory.py

Each process makes a model of 512 MB of weights and calls it. ``private`` is what the system cannot share with another
process: memory of its own, without mapped files such as libraries. The last rows call a model with a second batch size,
and a second model with the same weights.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

import torch  # noqa: E402

from dynamo_backends.common.text_table import text_table  # noqa: E402

RUNS = 3
LAYERS, WIDTH = 8, 4096
KINDS = ("eager", "aot_eager", "onnxrt", "onnxrt, weights=inputs")
STEPS = ("imports", "tiny model", "the model", "first call", "two sizes", "two models")


def private_and_shared() -> tuple[float, float]:
    """The resident memory of this process in MB."""
    text = Path("/proc/self/smaps_rollup").read_text()
    sizes = {name: int(kilobytes) / 1e3 for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return private, sizes["Rss"] - private


def layers(number: int, width: int) -> torch.nn.Sequential:
    modules = (module for _ in range(number) for module in (torch.nn.Linear(width, width), torch.nn.GELU()))
    return torch.nn.Sequential(*modules).eval()


def measure(kind: str) -> None:
    """Prints the memory after each step."""
    backend, *inputs = kind.split(", ")
    options = {"options": {"weights": "inputs", "cache": False}} if inputs else {}

    def compiled(model: torch.nn.Module) -> Callable[..., object]:
        return model if kind == "eager" else torch.compile(model, backend=backend, **options)

    def step(*calls: tuple[Callable[..., object], int]) -> None:
        for function, size in calls:
            for _ in range(3):
                function(torch.ones(size, WIDTH))
        time.sleep(1)  # the arena shrinks
        print(*private_and_shared())

    step()
    compiled(layers(1, 8))(torch.ones(2, 8))
    step()
    model = layers(LAYERS, WIDTH)
    step()
    function = compiled(model)
    function(torch.ones(4, WIDTH))
    step()
    step((function, 5))
    step((compiled(torch.nn.Sequential(*model)), 5))


def main() -> None:
    rows = []
    for kind in KINDS:
        command = [sys.executable, __file__, kind]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(RUNS)]
        numbers = [[float(word) for word in run.split()] for run in runs]
        medians = [round(statistics.median(values)) for values in zip(*numbers, strict=True)]
        rows.append((f"{kind}: private", *medians[::2]))
        rows.append((f"{kind}: shared", *medians[1::2]))
    print(text_table(rows, ("MB", *STEPS)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        with torch.no_grad():
            measure(sys.argv[1])
    else:
        main()
