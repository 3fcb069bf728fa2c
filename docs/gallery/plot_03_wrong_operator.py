"""
A wrong operator, from the symptom to the bug report
====================================================

A compiled model gives other results than eager. Which operator is wrong, and what belongs in a bug report?

Here a converter is wrong on purpose: a softplus that ignores its ``beta``.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from onnxscript import opset18 as op

from dynamo_backends import register_converter, unregister_converter
from dynamo_backends.dumps.reading import find_run


@register_converter(torch.ops.aten.softplus.default)
def wrong_softplus(x, beta=1.0, threshold=20.0):
    return op.Softplus(x)  # it should be softplus(beta * x) / beta


# %%
# The symptom
# -----------

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.nn.functional.softplus(h, beta=3.0)
        return self.last(h).softmax(-1)


model, x = Model().eval(), torch.randn(8, 16)
with torch.no_grad():
    difference = (torch.compile(model, backend="onnxrt")(x) - model(x)).abs().max()
print(f"largest difference from eager: {difference:.3f}")
assert difference > 0.01

# %%
# Which operator?
# ---------------
#
# Only the name of the backend changes:

torch._dynamo.reset()
folder = tempfile.mkdtemp()
with torch.no_grad():
    torch.compile(model, backend="onnx_debug", options={"dump_dir": folder})(x)


def command(*words):
    """What ``dynamo-backends`` prints."""
    done = subprocess.run([sys.executable, "-m", "dynamo_backends", *words], capture_output=True, text=True)
    print("$ dynamo-backends", *words, "\n" + done.stdout)
    return done


assert command("ls", folder).returncode == 1  # a graph diverges

# %%
# The verdict names the first node that is wrong alone, its source line, and the cause.

(graph,) = find_run(Path(folder)).graphs
print(graph.entry.verdict)
assert graph.entry.verdict.startswith("diverges at softplus")
print((graph.folder / "side_by_side.txt").read_text())

# %%
# One node, alone
# ---------------
#
# ``bisect`` cuts the ONNX model down to the smallest one that is still wrong, and writes it with its inputs, a program
# that runs it, and a text for a bug report.

done = command("bisect", f"{graph.index}/{graph.direction}", "-d", folder)
assert done.returncode == 1
cut = graph.folder / "bisect"
print(*sorted(str(path.relative_to(cut)) for path in cut.rglob("*")), sep="\n")
print((cut / "README.txt").read_text())

# %%
# The program needs only ONNX Runtime, onnx and numpy. It confirms that the model's results differ from PyTorch's.

done = subprocess.run([sys.executable, cut / "repro.py"], capture_output=True, text=True)
print(done.stdout)
assert done.returncode == 1

# %%
# Remove the wrong converter, and results are right again.

unregister_converter(torch.ops.aten.softplus.default)
torch._dynamo.reset()
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="onnxrt")(x), model(x))
