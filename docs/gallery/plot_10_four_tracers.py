"""
One model, four tracers
=======================

``dynamo-backends trace`` takes a model through TorchScript's tracing and scripting, ``torch.export`` and Dynamo, and
prints the graph of each. If a tracer fails, it shows PyTorch's error, and which tracer works.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "models.py").write_text("""
import torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x):
        return torch.relu(self.linear(x)).mean(-1)


class Branch(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1


def small():
    return Small(), torch.randn(2, 8)


def branch():
    return Branch(), torch.randn(2, 8)
""")


def trace(*words):
    command = [sys.executable, "-m", "dynamo_backends", "trace", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    print("$ dynamo-backends trace", *words)
    print(done.stdout + done.stderr)
    return done.returncode


# %%
# A model that all four trace
# ---------------------------
#
# In bfloat16; the last line is the dtype of the result.

for method in ("trace", "script", "export", "compile"):
    assert trace("models.py:small", "--method", method, "--precision", "bfloat16") == 0

# %%
# A model with a branch on a value
# --------------------------------
#
# ``torch.export`` cannot trace it; Dynamo makes two graphs of it.

assert trace("models.py:branch", "--method", "export") == 1
assert trace("models.py:branch", "--method", "compile") == 0

# %%
# A file
# ------
#
# ``--onnx`` also writes an ONNX file, as ``dynamo-backends export`` does.

assert trace("models.py:small", "--method", "export", "--onnx", "small.onnx") == 0

import onnx  # noqa: E402

model = onnx.load(folder / "small.onnx")
print([node.op_type for node in model.graph.node])
onnx.checker.check_model(model, full_check=True)
