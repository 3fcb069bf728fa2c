"""What ``dynamo_backends.metrics`` costs in each call of a compiled function.

    python benchmarks/metrics.py

Processor time of one thread for the smallest of graphs, with and without counting in turn; the fastest of all turns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

import torch  # noqa: E402

import dynamo_backends  # noqa: E402
from dynamo_backends.serving.metrics import call_hooks  # noqa: E402

TURNS, CALLS = 200, 200


def main() -> None:
    torch.set_num_threads(1)
    x, weight = torch.randn(2, 8), torch.randn(8, 8)
    compiled = torch.compile(lambda x: (x @ weight).relu(), backend="onnxrt")
    compiled(x)
    dynamo_backends.metrics(compiled)
    hooks = call_hooks(compiled)
    counting, fastest = list(hooks), [float("inf")] * 2
    for turn in range(2 * TURNS):
        hooks[:] = counting if turn % 2 else []
        compiled(x)
        started = time.process_time()
        for _ in range(CALLS):
            compiled(x)
        fastest[turn % 2] = min(fastest[turn % 2], (time.process_time() - started) / CALLS)
    print("microseconds a call: {:.1f} without metrics, {:.1f} with".format(*(1e6 * seconds for seconds in fastest)))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
