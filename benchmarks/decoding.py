"""Processor time a token of a Llama that decodes with a static cache, by the number of slots of the cache.

``python benchmarks/decoding.py`` prints a line for each backend and number of slots. One thread, because processor time
is measured: with more, idle threads that busy-wait would count.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

sys.path[0] = str(Path(__file__).parents[1])  # instead of this folder, whose passes.py would hide the package passes

VOCABULARY, PROMPT, WARM_UP = 8000, 16, 6


def milliseconds_of_tokens(model: LlamaForCausalLM, backend: str, slots: int, tokens: int) -> list[float]:
    """The processor time of each token after a prompt and some tokens, which compile."""
    torch._dynamo.reset()
    cache = StaticCache(config=model.config, max_cache_len=slots)
    step = model if backend == "eager" else torch.compile(model, backend=backend)
    times = []
    with torch.no_grad():
        model(torch.randint(0, VOCABULARY, (1, PROMPT)), past_key_values=cache, use_cache=True)
        for _ in range(tokens + WARM_UP):
            token = torch.randint(0, VOCABULARY, (1, 1))
            started = time.process_time()
            step(token, past_key_values=cache, use_cache=True)
            times.append(1e3 * (time.process_time() - started))
    return times[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor", "onnxrt"])
    parser.add_argument("--tokens", type=int, default=20, help="tokens that are timed; at most the slots allow")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=chosen.layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=VOCABULARY,
            max_position_embeddings=max(chosen.slots),
        )
    ).eval()
    for backend in chosen.backends:
        for slots in chosen.slots:
            times = sorted(milliseconds_of_tokens(model, backend, slots, chosen.tokens))
            print(f"{backend:10} {slots:6} slots: {times[0]:.1f} ms, median {times[len(times) // 2]:.1f}", flush=True)


if __name__ == "__main__":
    main()
