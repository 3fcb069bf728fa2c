"""What it costs to notice changed weights: microseconds of a call, and its share of the call.

::

    python benchmarks/watch.py                  # all models
    python benchmarks/watch.py bert             # one of them

*watch* is all that a call does before its session runs to know that the weights are what they were; *addresses alone*
is the part of it that reads no memory of a weight, *checked* the whole with ``options={"weights": "checked"}``. Each
time is that of the fastest tenth of the calls.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tabulate
import torch
from torch import nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

from dynamo_backends.weights.changes import Watch  # noqa: E402
from dynamo_backends.weights.region_session import RegionSession  # noqa: E402

Case = tuple[nn.Module, tuple[torch.Tensor, ...]]


def _layers(width: int, count: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))


def _bert(**sizes: int) -> Case:
    config = BertConfig(**sizes)
    return BertModel(config), (torch.randint(0, config.vocab_size, (1, 32)),)


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: (_layers(64, 2), (torch.randn(1, 64),)),
    "deep": lambda: (_layers(32, 200), (torch.randn(1, 32),)),
    "small_bert": lambda: _bert(num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024),
    "bert": _bert,
    "resnet50": lambda: (ResNetModel(ResNetConfig()), (torch.randn(1, 3, 224, 224),)),
    "mlp_500mb": lambda: (_layers(3953, 8), (torch.randn(1, 3953),)),
}
"""By name: a model and arguments of a call."""


class NoWatch(Watch):
    """Notices nothing."""

    def is_unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        return True


Make = Callable[[Sequence[torch.Tensor]], Watch]

KINDS: dict[str, Make] = {
    "addresses": NoWatch,
    "constants": Watch,
    "checked": lambda tensors: Watch(tensors, complete=True),
}
"""What makes a watch, by the name of the column."""

ROUND = 8
"""Calls in a row with the same watch."""


class _Timed:
    """Takes the place of the function that chooses a session, and keeps how long it took last."""

    def __init__(self, chosen: Callable[..., Any]) -> None:
        self.chosen = chosen
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = self.chosen(*args, **kwargs)
        self.seconds = time.perf_counter() - start
        return found


def measure(case: Case, kinds: dict[str, Make], seconds: float) -> tuple[list[int], dict[str, tuple[float, float]]]:
    """Microseconds of a call, and of its part before the session runs, for each kind of watch.

    Args:
        case: a model, and arguments of a call.
        kinds: what makes watches.
        seconds: how long each is measured.

    Returns:
        The sizes of the weights in bytes, and the times.
    """
    model, args = case
    compiled = torch.compile(model.eval().requires_grad_(False), backend="onnxrt", options={"fallback": "error"})
    compiled(*args)
    (session,) = (item for item in gc.get_objects() if type(item) is RegionSession)
    (state,) = session.sets.values()
    by_address = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    tensors = [by_address[address] for address in state.watch.addresses]
    watches = {kind: make(tensors) for kind, make in kinds.items()}
    calls: dict[str, list[float]] = {kind: [] for kind in kinds}
    parts: dict[str, list[float]] = {kind: [] for kind in kinds}
    timed = _Timed(session._chosen_state)
    setattr(session, "_chosen_state", timed)  # noqa: B010 - mypy: a method
    end = time.perf_counter() + seconds * len(kinds)
    while time.perf_counter() < end:
        for kind, state.watch in watches.items():
            for _ in range(ROUND):
                start = time.perf_counter()
                compiled(*args)
                calls[kind].append(time.perf_counter() - start)
                parts[kind].append(timed.seconds)
    return [tensor.nbytes for tensor in tensors], {kind: (_quiet(calls[kind]), _quiet(parts[kind])) for kind in kinds}


def _quiet(seconds: Sequence[float]) -> float:
    """Microseconds that the fastest tenth took at most: others use the machine, too."""
    return 1e6 * statistics.quantiles(seconds, n=10)[0]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which each watch is measured")
    options = parser.parse_args()
    rows = []
    for name in options.models or MODELS:
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        with torch.no_grad():
            sizes, found = measure(MODELS[name](), KINDS, options.seconds)
        call, part = found["constants"]
        others = [found[kind][1] for kind in ("addresses", "checked")]
        rows.append([name, len(sizes), sum(sizes) / 1e6, call, part, 100 * part / call, *others])
    headers = ["model", "weights", "MB", "call", "watch", "%", "addresses alone", "checked"]
    print(tabulate.tabulate(rows, headers=headers, floatfmt=("", "", ",.1f", ",.0f", ",.1f", ".1f", ",.1f", ",.0f")))


if __name__ == "__main__":
    main()
