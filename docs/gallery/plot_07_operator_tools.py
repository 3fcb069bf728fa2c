"""
The operator tools on a real model
==================================

Seven tools observe every operator while a model runs, or change its device or dtype. Here a small BERT takes a training
step with each of them.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification

from dynamo_backends import op_tools

torch.manual_seed(0)
config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertForSequenceClassification(config)
ids, labels = torch.randint(0, 1000, (4, 16)), torch.tensor([0, 1, 0, 1])


def step():
    model.zero_grad()
    loss = model(ids, labels=labels).loss
    loss.backward()
    return loss.detach()


# %%
# Which operators are there?

with op_tools.OpObserve(quiet=True) as observe:
    step()
for signature in observe.signatures[:5]:
    print(signature.count, signature.call)

# %%
# How long does each take, forward and backward?

with op_tools.OpTimeMeasure(quiet=True) as timed:
    step()
for operator in sorted(timed.operators, key=lambda operator: -operator.forward)[:5]:
    milliseconds = f"{operator.forward * 1e3:6.2f} ms {operator.backward * 1e3:6.2f} ms"
    print(f"{operator.name:45} {operator.calls:4} calls {milliseconds}")

# %%
# Are results and gradients right? The reference is the same call in float64.

with op_tools.OpAutoCompare(quiet=True, capture=None) as compare:
    step()
print(len(compare.comparisons), "compared,", len(compare.failed), "wrong")
assert compare.comparisons and not compare.failed

# %%
# Write the calls of one operator to files, and run them again, here compared with ONNX Runtime through our exporter.

import subprocess  # noqa: E402
import sys  # noqa: E402

folder = tempfile.mkdtemp()
with op_tools.OpCapture(folder, include="*gelu*", quiet=True):
    step()
for words in (["ls", folder], ["run", folder, "--reference", "onnx"]):
    done = subprocess.run([sys.executable, "-m", "dynamo_backends", "op", *words], capture_output=True, text=True)
    print(done.stdout.replace(folder, "captured"))
    assert done.returncode == 0

# %%
# Run some operators in float64, or in another dtype, to see whether they cause a problem.

torch.manual_seed(1)
before = step()
torch.manual_seed(1)
with op_tools.OpFallback(include="*layer_norm*", dtype=torch.float64, quiet=True) as fallback:
    after = step()
print(fallback.converted, f"loss {before:.6f} -> {after:.6f}")
torch.testing.assert_close(before, after)
