"""The Llama of the demo and the bench, or a part of it: one layer with random weights, from ``transformers``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRotaryEmbedding

BATCH = 2
LENGTH = 1024
SEED = 0

_HIDDEN_SIZE = 512
_VOCABULARY = 4000


class Layer(torch.nn.Module):
    """The decoder layer, or its attention only."""

    def __init__(self, config: LlamaConfig, layer: type[torch.nn.Module]) -> None:
        super().__init__()
        self.rotary = LlamaRotaryEmbedding(config)
        self.layer = layer(config, 0)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        positions = self.rotary(hidden_states, position_ids)
        result = self.layer(hidden_states=hidden_states, attention_mask=attention_mask, position_embeddings=positions)
        return result[0] if isinstance(result, tuple) else result


class Model(torch.nn.Module):
    """The whole model: embedding, decoder layer, final normalization."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def build(part: str, seed: int = SEED) -> torch.nn.Module:
    """A part (attention, decoder, model) with random weights, float32, in training mode, no dropout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=_HIDDEN_SIZE,
        num_hidden_layers=1,
        vocab_size=_VOCABULARY,
        intermediate_size=2000,
        max_position_embeddings=2048,
        num_attention_heads=8,
        use_cache=False,
        attn_implementation="eager",
    )
    if part == "model":
        return Model(config)
    return Layer(config, LlamaAttention if part == "attention" else LlamaDecoderLayer)


def inputs(part: str, batch: int = BATCH, length: int = LENGTH, seed: int = SEED) -> tuple[torch.Tensor, ...]:
    """Arguments for ``build(part)``.

    ``model`` takes tokens and a padding mask, both int64 (batch, length). The others take hidden states
    (batch, length, 512), an additive causal mask (batch, 1, length, length) and positions (batch, length).
    """
    generator = torch.Generator().manual_seed(seed)
    if part == "model":
        tokens = torch.randint(0, _VOCABULARY, (batch, length), generator=generator)
        padding = torch.ones(batch, length, dtype=torch.int64)
        padding[-1, length - length // 8 :] = 0
        return tokens, padding
    hidden_states = torch.randn(batch, length, _HIDDEN_SIZE, generator=generator)
    blocked = torch.full((length, length), torch.finfo(torch.float32).min).triu(diagonal=1)
    positions = torch.arange(length).expand(batch, length).contiguous()
    return hidden_states, blocked.expand(batch, 1, length, length).contiguous(), positions


def step(
    module: torch.nn.Module,
    call: Callable[..., torch.Tensor],
    args: tuple[torch.Tensor, ...],
    *,
    backward: bool,
    mixed: bool,
) -> dict[str, torch.Tensor]:
    """Runs a forward, and with ``backward`` a backward from a random gradient of the output.

    ``call`` is ``module``, compiled or not; ``mixed`` runs the forward under autocast to bfloat16.

    Returns:
        The output, and the gradient of each parameter, by name.
    """
    module.zero_grad(set_to_none=True)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext()
    with autocast, torch.set_grad_enabled(backward):
        output = call(*args)
    if not backward:
        return {"the output": output}
    tangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(SEED)).to(output.dtype)
    output.backward(tangent)
    gradients = {
        f"the gradient of {name}": value.grad for name, value in module.named_parameters() if value.grad is not None
    }
    return {"the output": output.detach(), **gradients}
