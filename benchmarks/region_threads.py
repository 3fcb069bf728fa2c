"""Measures graphs of many regions whose sessions have fewer threads where they have little work.

::

    python benchmarks/region_threads.py 8 2     # eight regions, two threads

Regions are a product of 256 x 512 and 512 x 512, and a layer norm with GELU, in turn; between two PyTorch runs a small
product along a dimension. Three kinds of sessions are called in turn, and the smallest times of a call are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder, whose passes.py would hide the package passes

from dynamo_backends.pipeline import emission  # noqa: E402
from dynamo_backends.runtime.providers import Provider  # noqa: E402
from dynamo_backends.runtime.settings import SessionSettings  # noqa: E402

PRODUCTS = ("MatMul", "Gemm")


class Model(nn.Module):
    """Linear layers and norms in turn."""

    def __init__(self, regions: int) -> None:
        super().__init__()
        kinds = [nn.Linear(512, 512), nn.Sequential(nn.LayerNorm(512), nn.GELU())]
        self.parts = nn.ModuleList(kinds[i % 2] for i in range(regions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
            x = x + x[:4].cumprod(0).sum() * 1e-3
        return x


def compiled(name: str, regions: int, threads: int, rule: Callable[[bool], int]) -> Callable[..., torch.Tensor]:
    """A model whose sessions have as many threads as ``rule`` returns, which gets whether there is a product."""
    optimizers = emission.optimizers_to_disable
    has_product: list[bool] = []

    def note(model: ir.Model, providers: Sequence[Provider]) -> tuple[str, ...]:
        has_product.append(any(node.op_type in PRODUCTS for node in model.graph))
        return optimizers(model, providers)

    def settings(*args: object, **kwargs: object) -> SessionSettings:
        return dataclasses.replace(SessionSettings(*args, **kwargs), threads=rule(has_product[-1]))  # type: ignore

    code = Model.forward.__code__.replace(co_name=name)  # Dynamo keeps the graphs of each code apart
    forward = types.FunctionType(code, globals(), name)
    model = type(name, (Model,), {"forward": forward})(regions).eval()
    emission.optimizers_to_disable, emission.SessionSettings = note, settings  # type: ignore
    try:
        options = {"cache": False, "placement": "onnx", "threads": threads}
        function = torch.compile(model, backend="onnxrt", options=options)
        function(torch.randn(256, 512))
    finally:
        emission.optimizers_to_disable, emission.SessionSettings = optimizers, SessionSettings  # type: ignore
    return function


def threads_of_process() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Threads:")).split()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regions", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rules: dict[str, Callable[[bool], int]] = {
        "one_thread_in_all": lambda has_product: 1,
        "threads_for_products": lambda has_product: chosen.threads if has_product else 1,
        "threads_in_all": lambda has_product: chosen.threads,
    }
    x = torch.randn(256, 512)
    with torch.no_grad():
        functions, added = {}, {}
        for name, rule in rules.items():
            before = threads_of_process()
            functions[name] = compiled(name, chosen.regions, chosen.threads, rule)
            added[name] = threads_of_process() - before
        best = {name: [float("inf"), float("inf")] for name in rules}
        end = time.monotonic() + chosen.seconds
        while time.monotonic() < end:
            for name, function in functions.items():
                for _ in range(5):
                    wall, processor = time.perf_counter(), time.process_time()
                    function(x)
                    taken = time.perf_counter() - wall, time.process_time() - processor
                    best[name] = list(map(min, best[name], taken))
    for name, (wall, processor) in best.items():
        print(f"{name:21} {added[name]:4} threads, {1e3 * wall:6.2f} ms, {1e3 * processor:6.2f} ms of processors")


if __name__ == "__main__":
    main()
