"""
A Llama, compared
=================

A Llama: forward, backward and mixed precision on ONNX Runtime; the record of a compile; a comparison of two ONNX
models; and a comparison of ONNX's reference runtime with ONNX Runtime.
"""

import tempfile
from pathlib import Path

import onnx
import torch
from torch._dynamo.backends.common import aot_autograd
from transformers import LlamaConfig, LlamaModel

from dynamo_backends import decomposition_table, onnx_compiler

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=64,
)
model = LlamaModel(config)
ids = torch.randint(0, 512, (2, 32))


def loss(model):
    return model(ids, use_cache=False).last_hidden_state.square().mean()


# %%
# Forward and backward
# --------------------
#
# AOTAutograd passes a forward and a backward graph to a compiler, here ``onnx_compiler``. ``record`` collects what it
# did with each.

records = []
folder = Path(tempfile.mkdtemp())
compiler = onnx_compiler(debug=True, dump_dir=str(folder / "dump"), record=records)
backend = aot_autograd(
    fw_compiler=compiler,
    partition_fn=compiler.partition_fn,
    decompositions=decomposition_table(),
    keep_inference_input_mutations=True,  # writes to arguments stay in the graph
)
compiled = torch.compile(model, backend=backend)
loss(compiled).backward()
ours = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
loss(model).backward()
for mine, parameter in zip(ours, model.parameters(), strict=True):
    torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6)
for record in records:
    print(record.direction, record.comparison.verdict)
assert [record.comparison.verdict for record in records] == ["ok", "ok"]

# %%
# A record has the graph, its split, the models, and the inputs and outputs of the compared run.

forward = records[0]
print([name for name in dir(forward) if not name.startswith("_")])
(model_proto, *_) = forward.onnx_models
print(len(model_proto.graph.node), "ONNX nodes:", sorted({node.op_type for node in model_proto.graph.node}))

# %%
# Mixed precision
# ---------------
#
# Under autocast parts of the graph are bfloat16, with the tolerance of bfloat16.

records.clear()
torch._dynamo.reset()
with torch.autocast("cpu", dtype=torch.bfloat16):
    value = loss(torch.compile(model, backend=backend))
value.backward()
for record in records:
    print(record.direction, record.comparison.verdict)
assert [record.comparison.verdict for record in records] == ["ok", "ok"]

# %%
# Two ONNX models side by side
# ----------------------------
#
# Our exporter and ``torch.onnx.export`` make models with different nodes and names. ``compare`` aligns the nodes by
# their values, and compares them up to rounding.

import subprocess  # noqa: E402
import sys  # noqa: E402

import dynamo_backends  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = model.layers[0].mlp

    def forward(self, x):
        return self.layer(x) + x


block, x = Block().eval(), torch.randn(2, 8, 64)
torch.onnx.export(block, (x,), folder / "export.onnx", dynamo=True, verbose=False)
dynamo_backends.export(block, x, path=folder / "ours.onnx")
command = [sys.executable, "-m", "dynamo_backends", "compare", "ours.onnx", "export.onnx"]
done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
print(done.stdout)
assert done.returncode == 0, done.stderr

# %%
# Another runtime
# ---------------
#
# ONNX's reference runtime computes each operator in NumPy. If it differs from ONNX Runtime, a kernel is wrong; if both
# agree and PyTorch differs, the translation is.

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
from onnx_array_api.reference import ExtendedReferenceEvaluator  # noqa: E402

proto = onnx.load(folder / "export.onnx")
feeds = {proto.graph.input[0].name: x.numpy()}
(by_reference,) = ExtendedReferenceEvaluator(proto).run(None, feeds)
session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
(by_runtime,) = session.run(None, feeds)
print("largest difference:", np.abs(by_reference - by_runtime).max())
np.testing.assert_allclose(by_reference, by_runtime, rtol=1e-4, atol=1e-5)
