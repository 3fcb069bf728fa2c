"""Seconds from the call of ``torch.compile``, or from loading a saved compile, to the first result, in new processes.

    python benchmarks/first_result.py

Imports of PyTorch, transformers and dynamo_backends are not counted. The model is a BERT of 4 layers, hidden size 768,
with 2x64 tokens.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

import torch  # noqa: E402
import transformers  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

RUNS = 3
KINDS = ("loaded function", "precompile cache", "onnxrt, its cache", "onnxrt, no cache", "aot_eager")


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12}
        self.model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens).last_hidden_state


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("save function", "save artifacts", "onnxrt, its cache"):
            seconds(kind, folder)
        for kind in KINDS:
            found = [seconds(kind, folder) for _ in range(RUNS)]
            print(f"{kind:20} {statistics.median(found):5.2f}  ({min(found):.2f} to {max(found):.2f})", flush=True)


def seconds(kind: str, folder: str) -> float:
    """Runs one kind in a new process."""
    caches = {"DYNAMO_BACKENDS_CACHE_DIR": f"{folder}/ours", "TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=folder)}
    caches["DYNAMO_BACKENDS_CACHE"] = str(int(kind == "onnxrt, its cache"))
    command = [sys.executable, __file__, "--one", kind, folder]
    return float(subprocess.run(command, env={**os.environ, **caches}, check=True, stdout=subprocess.PIPE).stdout)


def run(kind: str, folder: Path) -> float:
    from dynamo_backends import keep_value_guards_unsafe  # its import is not counted

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    model, tokens = Embedding(), torch.randint(0, 1000, (2, 64))
    torch._dynamo.config.caching_precompile = kind in ("save artifacts", "precompile cache")
    start = time.perf_counter()
    if kind == "save function":
        options = {"guard_filter_fn": keep_value_guards_unsafe}
        function = torch.compile(model.forward, backend="onnxrt", fullgraph=True, options=options)
        function.aot_compile(((tokens,), {})).save_compiled_function(str(folder / "function"))
    elif kind == "loaded function":
        with (folder / "function").open("rb") as file:
            torch.compiler.load_compiled_function(file)(model, tokens)
    else:
        if kind == "precompile cache":
            torch.compiler.load_cache_artifacts((folder / "artifacts").read_bytes())
        torch.compile(model, backend="aot_eager" if kind == "aot_eager" else "onnxrt")(tokens)
    taken = time.perf_counter() - start
    if kind in ("loaded function", "precompile cache"):
        assert counters["dynamo_backends"]["graphs_loaded"] == 1 and not counters["stats"]["unique_graphs"]
    if kind == "save artifacts":
        (folder / "artifacts").write_bytes(torch.compiler.save_cache_artifacts()[0])
    return taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "FOLDER"), help="measure here, print the seconds")
    one = parser.parse_args().one
    if one is None:
        main()
    else:
        with torch.no_grad():
            print(run(one[0], Path(one[1])))
