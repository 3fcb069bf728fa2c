"""
Training, dynamic shapes, generation
====================================

A training loop with an optimizer; one compiled model for all batch sizes; text generated with a cache.
"""

import copy

import torch
from torch._dynamo.utils import counters
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=64)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)

# %%
# Training
# --------
#
# Twelve steps, each with the gradients of two batches, compiled and in eager from the same weights: the losses agree.


def train(model, forward, steps=12):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2):
            ids = torch.randint(0, 256, (4, 16))
            loss = forward(input_ids=ids, labels=ids).loss / 2
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


in_eager = copy.deepcopy(model)
ours = train(model, torch.compile(model, backend="onnxrt"))
theirs = train(in_eager, in_eager)
print("first", f"{ours[0]:.5f} {theirs[0]:.5f}", "last", f"{ours[-1]:.5f} {theirs[-1]:.5f}")
torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)

# %%
# All sizes
# ---------
#
# ``dynamic=True`` makes sizes symbolic: other batch sizes and lengths run on the same models.

torch._dynamo.reset()
counters.clear()
model.eval()
compiled = torch.compile(model, backend="onnxrt", dynamic=True)
with torch.no_grad():
    for batch, length in ((2, 8), (3, 13), (5, 21)):
        ids = torch.randint(0, 256, (batch, length))
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
print("graphs:", counters["dynamo_backends"]["graphs"])

# %%
# Generation
# ----------
#
# ``generate`` calls the compiled model once for each token, with the keys and values of earlier tokens in a cache.

torch._dynamo.reset()
prompt = torch.randint(0, 256, (2, 5))
settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
expected = model.generate(prompt, **settings)
model.forward = torch.compile(model.forward, backend="onnxrt", dynamic=True)
tokens = model.generate(prompt, **settings)
print(tokens[:, 5:].tolist())
assert torch.equal(tokens, expected)
