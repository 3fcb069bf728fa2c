"""Small real models from ``transformers`` configurations, with random weights, and inputs for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import transformers as tf

VOCABULARY = 99
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model: how to build it, and its keyword inputs. ``loss`` reduces its output to a scalar to train on."""

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]


def tokens(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (batch, length))
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokens_with_labels() -> dict[str, torch.Tensor]:
    feeds = tokens()
    return {**feeds, "labels": feeds["input_ids"].clone()}


def pixels(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def sequence_to_sequence() -> dict[str, torch.Tensor]:
    return {**tokens(), "labels": torch.randint(3, VOCABULARY, (2, 7))}


def _causal(config_class: type, model_class: type, **extra: object) -> Entry:
    return Entry(lambda: model_class(config_class(**{**SMALL, **extra}, use_cache=False)), tokens_with_labels)


ZOO: dict[str, Entry] = {
    "bert": Entry(lambda: tf.BertForMaskedLM(tf.BertConfig(**SMALL, max_position_embeddings=64)), tokens_with_labels),
    "gpt2": Entry(
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False)
        ),
        tokens_with_labels,
    ),
    "llama": _causal(tf.LlamaConfig, tf.LlamaForCausalLM, num_key_value_heads=2),
    "mistral": _causal(tf.MistralConfig, tf.MistralForCausalLM, num_key_value_heads=2, sliding_window=8),
    "qwen": _causal(tf.Qwen2Config, tf.Qwen2ForCausalLM, num_key_value_heads=2),
    "t5": Entry(
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        sequence_to_sequence,
    ),
    "vit": Entry(
        lambda: tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
            )
        ),
        pixels,
    ),
    "resnet": Entry(
        lambda: tf.ResNetForImageClassification(
            tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], layer_type="basic")
        ),
        pixels,
    ),
    "convnext": Entry(
        lambda: tf.ConvNextForImageClassification(
            tf.ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=32)
        ),
        pixels,
    ),
    "swin": Entry(
        lambda: tf.SwinForImageClassification(
            tf.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        pixels,
    ),
    "whisper": Entry(
        lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                vocab_size=VOCABULARY,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                num_mel_bins=16,
                max_source_positions=20,
                max_target_positions=32,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
                use_cache=False,
            )
        ),
        lambda: {"input_features": torch.randn(2, 16, 40), "labels": torch.randint(3, VOCABULARY, (2, 7))},
    ),
    "clip": Entry(
        lambda: tf.CLIPModel(
            tf.CLIPConfig(
                text_config={**SMALL, "max_position_embeddings": 32, "eos_token_id": 2, "projection_dim": 16},
                vision_config={
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                    "intermediate_size": 48,
                    "image_size": 32,
                    "patch_size": 8,
                    "projection_dim": 16,
                },
                projection_dim=16,
            )
        ),
        lambda: {**tokens(), **pixels()},
    ),
}


def scalar(output: object) -> torch.Tensor:
    """A loss to train on: the model's own, or the mean square of its first floating-point result."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    for value in output.values():  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.float().square().mean()
    raise AssertionError("the model has no floating-point result")
