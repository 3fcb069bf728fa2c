"""
A NaN in float16
================

The loss is NaN. Which operator makes the first NaN or infinity, from which inputs, and where does it go?
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from dynamo_backends.dumps.nonfinite import find_nonfinite
from dynamo_backends.dumps.reading import find_run

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)

    def forward(self, x):
        h = self.inner(x)
        energy = (h * 300).square()  # float16 ends at 65504
        h = h * (energy / energy.amax(-1, keepdim=True))
        return self.outer(h).log_softmax(-1)


model = Model().half().eval()
x = torch.randn(4, 32, dtype=torch.float16)
with torch.no_grad():
    print(model(x)[0])
    assert model(x).isnan().any()

# %%
# ``onnx_debug`` records the range of each value; ``nan`` follows them from node to node.

folder = tempfile.mkdtemp()
with torch.no_grad():
    torch.compile(model, backend="onnx_debug", options={"dump_dir": folder})(x)
(graph,) = find_run(Path(folder)).graphs
command = [sys.executable, "-m", "dynamo_backends", "nan", str(graph.index), "-d", folder]
print(subprocess.run(command, capture_output=True, text=True).stdout)

# %%
# The same as data: the square is too large for float16, and the quotient turns it into NaN.

origins = find_nonfinite(graph).origins
for origin in origins:
    print(origin.kind, origin.row.operator, origin.row.source, origin.row.dtype, sep=" | ")
assert origins[0].kind == "infinity" and origins[0].row.dtype == "float16"

# %%
# In eager mode, an operator tool finds the same:

from dynamo_backends import op_tools  # noqa: E402

with torch.no_grad(), op_tools.OpOverflowCheck(quiet=True) as check:
    model(x)
for found in check.found[:2]:
    print(found)
