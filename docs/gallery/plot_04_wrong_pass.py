"""
A wrong pass
============

A *pass* rewrites a graph, to make it faster or to make it fit ONNX. This one is wrong on purpose: it
replaces a division by the square root of 2 by one by 1.4. ``onnx_debug`` compares each stage of a graph with the one
before, and names the pass.
"""

import math
import tempfile
from pathlib import Path

import torch

from dynamo_backends.dumps.reading import find_run
from passes import fx_editing, register_pass, unregister


@register_pass("post_grad.mine.cheaper_root", "Divides by 1.4 instead of the square root of 2.")
def cheaper_root(module, context):
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor):
        if isinstance(node.args[1], float) and math.isclose(node.args[1], math.sqrt(2), rel_tol=0.02):
            new = fx_editing.call(node, torch.ops.aten.div.Tensor, (node.args[0], 1.4))
            fired += fx_editing.replace(node, new, context)
    return fired


torch.manual_seed(0)
layer = torch.nn.Linear(16, 16).eval()


def model(x):
    h = torch.relu(layer(x))
    return torch.tanh(h / math.sqrt(2))


# %%
# Which pass?
# -----------

folder, other_folder = tempfile.mkdtemp(), tempfile.mkdtemp()
x = torch.randn(4, 16)
with torch.no_grad():
    torch.compile(model, backend="onnx_debug", options={"dump_dir": folder})(x)
(graph,) = find_run(Path(folder)).graphs
print(graph.entry.verdict)
assert "pass post_grad.mine.cheaper_root" in graph.entry.verdict

# %%
# Without the pass the verdict is ``ok``:

torch._dynamo.reset()
options = {"dump_dir": other_folder, "passes": {"disable": ["post_grad.mine.*"]}}
with torch.no_grad():
    torch.compile(model, backend="onnx_debug", options=options)(x)
(graph,) = find_run(Path(other_folder)).graphs
print(graph.entry.verdict)
assert graph.entry.verdict == "ok"

# %%
# ``options={"verify_passes": True}`` compares the graph before and after each pass during the compile, and undoes a
# pass that changes results. A warning names it.

torch._dynamo.reset()
options = {"verify_passes": True, "cache": False}
with torch.no_grad():
    result = torch.compile(model, backend="onnxrt", options=options)(x)
    torch.testing.assert_close(result, model(x))
unregister("post_grad.mine.cheaper_root")
