"""Our ONNX files beside those of ``torch.onnx.export(dynamo=True)``: right results, size, speed, time to export.

::

    python benchmarks/export.py                 # the models of dynamo-backends bench, each in a process of its own
    python benchmarks/export.py bert mlp --rounds 15

Both files run in plain sessions with ONNX Runtime's default settings and PyTorch's number of threads, called by turns.
Results are judged by the rule of ``onnx_debug``, those of ours before the file is written.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

from dynamo_backends.bench.models import MODELS  # noqa: E402

HEADERS = ("model", "ours", "s", "MB", "ms", "torch.onnx.export", "s", "MB", "ms")


def measure(name: str, rounds: int) -> list[str]:
    """A row of the table."""
    import onnxruntime
    import torch
    from torch.utils import _pytree as pytree

    from dynamo_backends import ExportError, export
    from dynamo_backends.bench.case import Case
    from dynamo_backends.bench.loading import load
    from dynamo_backends.onnx_files.checking import FileSession, difference

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    loaded = load(Case(name))
    for module in loaded.model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # torch.export does not know the caches of transformers
    inputs = loaded.inputs[0]
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = torch.get_num_threads(), 3
    runs: list[Callable[[], Any] | None] = []
    cells: list[list[str]] = []
    exported = None
    with tempfile.TemporaryDirectory() as folder:

        def session_of(path: Path, feeds: dict[str, Any]) -> Callable[[], Any]:
            session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
            names = [item.name for item in session.get_inputs()]
            return lambda: session.run(None, {item: feeds[item] for item in names})

        leaves = pytree.tree_leaves((inputs.args, inputs.kwargs))
        for way in ("ours", "theirs"):
            path, start = Path(folder, f"{way}.onnx"), time.perf_counter()
            try:
                if way == "ours":
                    exported = export(loaded.model, *inputs.args, path=path, kwargs=inputs.kwargs)
                    seconds = time.perf_counter() - start
                    call = exported._captured.call
                    leaves = pytree.tree_leaves(call)
                    named = zip(exported.inputs, exported._captured.leaves, strict=True)
                    feeds = {item: leaves[i].numpy() for item, i in named}
                    message = exported._difference(exported._session, call)[0]
                else:
                    with torch.no_grad():
                        program = torch.onnx.export(
                            loaded.model, inputs.args, kwargs=inputs.kwargs, dynamo=True, verbose=False
                        )
                    assert program is not None
                    program.save(path)
                    seconds = time.perf_counter() - start
                    tensors = [leaf.numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]
                    feeds = dict(zip([item.name for item in program.model.graph.inputs], tensors, strict=True))
                run = session_of(path, feeds)
                if way == "theirs" and exported is not None:
                    results = dict(zip(exported.outputs, map(torch.from_numpy, run()), strict=True))
                    message = difference(
                        exported._captured, loaded.model, exported._captured.call, FileSession(path), results
                    )[0]
                runs.append(run)
                size = sum(file.stat().st_size for file in Path(folder).glob(f"{way}.onnx*")) / 1e6
                cells.append([f"wrong: {message}" if message else "right", f"{seconds:.1f}", f"{size:.1f}"])
            except Exception as error:  # exporters and models raise any type
                runs.append(None)
                reason = error if isinstance(error, ExportError) else type(error).__name__
                cells.append([str(reason)[:60], "", ""])
        times: list[list[float]] = [[], []]
        for _ in range(rounds + 1):
            for i, each in enumerate(runs):
                if each is not None:
                    start = time.perf_counter()
                    each()
                    times[i].append(time.perf_counter() - start)
    medians = [f"{1e3 * statistics.median(found[1:]):.1f}" if found else "" for found in times]
    return [name, *cells[0], medians[0], *cells[1], medians[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="as for dynamo-backends bench (default: its list)")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each file (default: %(default)s)")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        print(" | ".join(measure(arguments.row, arguments.rounds)))
        return
    print(f"| {' | '.join(HEADERS)} |\n|{' --- |' * len(HEADERS)}", flush=True)
    for name in arguments.models or MODELS:
        command = [sys.executable, __file__, "--row", name, "--rounds", str(arguments.rounds)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"| {done.stdout.strip() or name + ' | ' + (done.stderr.strip().splitlines() or [''])[-1]} |", flush=True)


if __name__ == "__main__":
    main()
