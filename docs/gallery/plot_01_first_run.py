"""
The first run
=============

Runs a small model on ONNX Runtime, shows what ran where, and checks whether it is right.

Nothing of this project is imported: ``torch.compile`` finds a backend by its name.
"""

import tempfile

import torch
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)).eval()
x = torch.randn(8, 64)

# %%
# Run it
# ------
#
# The first call compiles: PyTorch's Dynamo captures the function as a *graph* of operators, which becomes an ONNX
# model. Later calls run that model.

compiled = torch.compile(model, backend="onnxrt")
with torch.no_grad():
    result = compiled(x)
    expected = model(x)
print(f"largest difference from eager: {(result - expected).abs().max():.1e}")
torch.testing.assert_close(result, expected)

# %%
# What ran where
# --------------
#
# Events are counted. A *region* is a part of the graph that runs as one ONNX model. Operators that ONNX Runtime cannot
# run, or computes wrongly, run in PyTorch.

for event in ("graphs", "nodes_on_onnx", "nodes_in_pytorch", "regions"):
    print(event, counters["dynamo_backends"][event])
assert counters["dynamo_backends"]["nodes_in_pytorch"] == 0

# %%
# An operator without a translation splits the graph in two, and a warning names it:

torch._dynamo.reset()
counters.clear()


def spectrum(x):
    return torch.linalg.svdvals(x.relu()).log()


with torch.no_grad():
    torch.testing.assert_close(torch.compile(spectrum, backend="onnxrt")(x), spectrum(x))
fallbacks = [event for event in counters["dynamo_backends"] if event.startswith("fallback ")]
print(fallbacks, counters["dynamo_backends"]["regions"])
assert fallbacks == ["fallback aten._linalg_svd.default"]

# %%
# Is it right?
# ------------
#
# ``onnx_debug`` is the same backend with an observer. It compares each operator on ONNX Runtime with eager PyTorch and
# float64, and writes the results to a folder.

from dynamo_backends.dumps.reading import find_run  # noqa: E402  (needed to read the folder in Python)

torch._dynamo.reset()
folder = tempfile.mkdtemp()
compiled = torch.compile(model, backend="onnx_debug", options={"dump_dir": folder})
with torch.no_grad():
    compiled(x)
for graph in find_run(folder).graphs:
    print(graph.name, graph.entry.verdict)
assert [graph.entry.verdict for graph in find_run(folder).graphs] == ["ok"]

# %%
# The command line reads the same folder, without importing PyTorch.

import subprocess  # noqa: E402
import sys  # noqa: E402

print(
    subprocess.run(
        [sys.executable, "-m", "dynamo_backends", "ls", folder], check=True, capture_output=True, text=True
    ).stdout
)
