"""
Passes, each with its graph before and after
============================================

A *stage* is a graph on its way from Dynamo to ONNX Runtime: ``pre_grad``, ``joint``, ``post_grad``, ``onnx``. The
passes of a stage rewrite its graph. The dump has the graph of each stage. Here passes fire, and are turned
off.
"""

import tempfile
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from dynamo_backends.dumps.reading import find_run


def fired():
    """How often each pass fired since the last call."""
    found = {
        event.removeprefix("pass "): times
        for event, times in counters["dynamo_backends"].items()
        if event.startswith("pass ")
    }
    counters.clear()
    return found


def compiled(function, *inputs, **options):
    """Runs a function compiled, in inference, and compares with eager."""
    torch._dynamo.reset()
    fired()
    with torch.no_grad():
        result = torch.compile(function, backend="onnxrt", options={"cache": False, **options})(*inputs)
        torch.testing.assert_close(result, function(*inputs), rtol=1e-4, atol=1e-5)
    return fired()


torch.manual_seed(0)
x = torch.randn(4, 8, 64)

# %%
# Attention
# ---------
#
# Two products, a scale and a softmax become one ``Attention``, for which ONNX Runtime has a kernel.

query, key, value = (torch.randn(2, 4, 16, 8) for _ in range(3))


def attention(query, key, value):
    scores = query @ key.transpose(-1, -2) / 8**0.5
    return scores.softmax(-1) @ value


found = compiled(attention, query, key, value)
print(found)
assert any("attention" in name for name in found)
print("without:", compiled(attention, query, key, value, passes={"disable": ["*attention*"]}))

# %%
# No-ops
# ------
#
# A product with one, a reversed transposition and a cast to the same dtype are removed before the export.


def idle(x):
    y = (x * 1.0).to(torch.float32).transpose(1, 2).transpose(1, 2)
    return torch.relu(y) + 0


print(compiled(idle, x))

# %%
# Common subexpressions
# ---------------------


def twice(x):
    return torch.exp(x).sum() * torch.exp(x)


found = compiled(twice, x)
print(found)
assert any("common_subexpressions" in name for name in found)

# %%
# On the ONNX model
# -----------------
#
# A GELU that is written out becomes one ONNX operator.


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


found = compiled(gelu, x, passes={"disable": ["pre_grad.*"]})
print(found)
assert "onnx.gelu" in found

# %%
# Before and after
# ----------------
#
# The dump has each stage's graph, and a diff for each pass that fired.

import subprocess  # noqa: E402
import sys  # noqa: E402


def changes(function, *inputs):
    torch._dynamo.reset()
    folder = tempfile.mkdtemp()
    with torch.no_grad():
        torch.compile(function, backend="onnx_debug", options={"dump_dir": folder})(*inputs)
    (run,) = {graph.folder.parent.parent for graph in find_run(Path(folder)).graphs}
    return sorted(run.rglob("*.diff"))


for function, inputs in ((twice, (x,)), (attention, (query, key, value)), (gelu, (x,))):
    for path in changes(function, *inputs):
        print(f"---- {path.stem} of {function.__name__}")
        print(path.read_text())

# %%
# All passes
# ----------

command = [sys.executable, "-m", "dynamo_backends", "passes"]
print(subprocess.run(command, capture_output=True, text=True).stdout)
