"""What the operator tools cost, in microseconds for each operator that is called and as a multiple of eager's time.

::

    python benchmarks/op_tools.py               # a training step of BERT-base, batch 4, 128 tokens
    python benchmarks/op_tools.py --small       # one so small that all time is overhead
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

from dynamo_backends import op_tools  # noqa: E402

STEPS = 5

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}


def training_step(*, small: bool) -> Callable[[], None]:
    """A forward and backward of BERT."""
    torch.manual_seed(0)
    config = BertConfig(**(SMALL if small else {}))
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(0, config.vocab_size, (2, 8) if small else (4, 128))
    labels = torch.zeros(len(ids), dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        model(ids, labels=labels).loss.backward()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """The median of some steps."""
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    logging.disable(logging.WARNING)  # of names that no operator has
    step = training_step(small=small)
    step()
    counted = op_tools.OpObserve(quiet=True)
    with counted:
        step()
    operators = sum(signature.count for signature in counted.signatures)
    eager = seconds(step, STEPS)
    print(f"{operators} operators; eager {eager * 1e3:.1f} ms; {torch.get_num_threads()} threads")
    folder = tempfile.mkdtemp()
    tools: dict[str, Callable[..., op_tools.OpTool]] = {
        "OpObserve": op_tools.OpObserve,
        "OpTimeMeasure": op_tools.OpTimeMeasure,
        "OpOverflowCheck": op_tools.OpOverflowCheck,
        "OpAutoCompare": lambda **arguments: op_tools.OpAutoCompare(capture=None, **arguments),
        "OpCapture": lambda **arguments: op_tools.OpCapture(folder, **arguments),
        "OpFallback": op_tools.OpFallback,
        "OpDtypeCast": lambda **arguments: op_tools.OpDtypeCast(dtype=torch.float64, **arguments),
    }
    try:
        for name, make in tools.items():
            with make(quiet=True, include=["no.such.operator"]):
                none = seconds(step, STEPS)
            with make(quiet=True):
                step()  # what is printed or compiled once
                every = seconds(step, STEPS)
            each = [(found - eager) / operators * 1e6 for found in (none, every)]
            print(f"{name:16} no operator {each[0]:8.1f} us  every {each[1]:8.1f} us  {every / eager:6.2f} x eager")
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
