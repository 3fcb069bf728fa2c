"""The models that ``dynamo-backends bench`` knows by name: ``transformers`` configurations and plain PyTorch.

Random weights, nothing is downloaded. Head sizes, sequence lengths and image sizes are real; depth, width and
vocabulary are cut so that a call takes some tens of milliseconds. ``bert-base`` and ``resnet50`` are whole.

Importing this module imports neither PyTorch nor ``transformers``; building a model does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Size: TypeAlias = "tuple[int, int]"
Inputs: TypeAlias = "dict[str, torch.Tensor]"

VOCABULARY = 4096
PROMPT: Size = (1, 16)
"""Rows and tokens of what ``--decode`` continues."""

_TEXTS: Sequence[Size] = ((2, 128), (3, 96), (4, 64))
_IMAGES: Sequence[Size] = ((2, 224), (3, 224), (4, 224))
_SOUNDS: Sequence[Size] = ((2, 32_000), (3, 24_000), (4, 16_000))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the list.

    Attributes:
        summary: what it is, in a few words.
        build: makes it, with random weights.
        inputs: makes the keyword arguments of a call of a size.
        sizes: of which the first is measured, and all with ``--dynamic``: rows, and tokens, pixels or samples in each.
        needs_transformers: whether it is one of that package.
        prompt: for a model with ``generate``, the keyword arguments of it; ``None`` without.
    """

    summary: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[Size], Inputs]
    sizes: Sequence[Size]
    needs_transformers: bool = True
    prompt: Callable[[], Inputs] | None = None


def _text(size: Size) -> Inputs:
    """Token numbers, and a mask that pads the end of the last row."""
    import torch

    rows, tokens = size
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    mask[-1, -tokens // 8 :] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, size), "attention_mask": mask}


def _prompt() -> Inputs:
    import torch

    return {"input_ids": torch.randint(3, VOCABULARY, PROMPT), "attention_mask": torch.ones(PROMPT, dtype=torch.int64)}


def _text_to_text(size: Size) -> Inputs:
    import torch

    rows, tokens = size
    return {**_text(size), "decoder_input_ids": torch.randint(3, VOCABULARY, (rows, tokens // 2))}


def _image(size: Size) -> Inputs:
    import torch

    rows, pixels = size
    return {"pixel_values": torch.randn(rows, 3, pixels, pixels)}


def _sound(size: Size) -> Inputs:
    import torch

    return {"input_values": torch.randn(size)}


def _whisper_inputs(size: Size) -> Inputs:
    import torch

    rows, tokens = size
    return {
        "input_features": torch.randn(rows, 80, 500),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (rows, tokens // 4)),
    }


def _clip_inputs(size: Size) -> Inputs:
    return {**_text((size[0], 77)), **_image(size)}


def _vectors(size: Size) -> Inputs:
    import torch

    return {"input": torch.randn(size)}


def _transformer(model: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    """Builds a model of ``transformers`` from the name of its class and settings of its configuration.

    Without dropout: what it draws differs between compilers, and then nothing can be said of their gradients.
    """

    def build() -> torch.nn.Module:
        import transformers

        kind = getattr(transformers, model)
        config = kind.config_class(**settings)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        made: torch.nn.Module = kind(config)
        return made

    return build


def _sizes(layers: int, width: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    """The names most configurations have for their sizes."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        **more,
    }


_WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _llama_of_the_seed() -> torch.nn.Module:
    from . import llama

    return llama.build("model")


def _tokens_of_the_seed(size: Size) -> Inputs:
    from . import llama

    tokens, mask = llama.inputs("model", *size)
    return {"input_ids": tokens, "attention_mask": mask}


def _mlp() -> torch.nn.Module:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def _text_entry(summary: str, model: str, **settings: Any) -> Entry:
    return Entry(summary, _transformer(model, **settings), _text, _TEXTS)


def _decoder_entry(summary: str, model: str, **settings: Any) -> Entry:
    return Entry(summary, _transformer(model, **settings), _text, _TEXTS, prompt=_prompt)


def _image_entry(summary: str, model: str, **settings: Any) -> Entry:
    return Entry(summary, _transformer(model, **settings), _image, _IMAGES)


_BART_LIKE = {
    "vocab_size": VOCABULARY,
    "d_model": 256,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
}

MODELS: dict[str, Entry] = {
    "mlp": Entry("two linear layers of 64", _mlp, _vectors, ((8, 64), (16, 64), (32, 64)), needs_transformers=False),
    "llama-seed": Entry(
        "Llama of the demo, 1 layer of 512", _llama_of_the_seed, _tokens_of_the_seed, ((2, 1024), (3, 512), (4, 256))
    ),
    "llama": _decoder_entry(
        "Llama, 4 layers of 256, grouped heads",
        "LlamaForCausalLM",
        **_WORDS,
        **_sizes(4, 256, 8, 704, num_key_value_heads=2),
    ),
    "llama-ungrouped": _decoder_entry("Llama, 4 layers of 256", "LlamaForCausalLM", **_WORDS, **_sizes(4, 256, 4, 704)),
    "qwen2": _decoder_entry(
        "Qwen2, 6 layers of 384, grouped heads",
        "Qwen2ForCausalLM",
        **_WORDS,
        **_sizes(6, 384, 6, 1024, num_key_value_heads=2),
    ),
    "mixtral": _decoder_entry(
        "Mixtral, 2 layers of 256, 4 experts",
        "MixtralForCausalLM",
        **_WORDS,
        **_sizes(2, 256, 8, 512, num_key_value_heads=2, num_local_experts=4),
    ),
    "gpt2": _decoder_entry(
        "GPT-2, 4 layers of 256", "GPT2LMHeadModel", **_WORDS, n_layer=4, n_embd=256, n_head=4, n_positions=512
    ),
    "gpt-neox": _decoder_entry("GPT-NeoX, 6 layers of 256", "GPTNeoXForCausalLM", **_WORDS, **_sizes(6, 256, 4, 1024)),
    "t5": Entry(
        "T5, 3 + 3 layers of 256",
        _transformer(
            "T5ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=256,
            d_kv=64,
            d_ff=1024,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        _text_to_text,
        _TEXTS,
        prompt=_prompt,
    ),
    "bart": Entry(
        "BART, 3 + 3 layers of 256",
        _transformer("BartForConditionalGeneration", **_BART_LIKE),
        _text_to_text,
        _TEXTS,
        prompt=_prompt,
    ),
    "bert": _text_entry("BERT, 4 layers of 256", "BertForMaskedLM", **_WORDS, **_sizes(4, 256, 4, 1024)),
    "bert-base": _text_entry("BERT base, whole", "BertForMaskedLM"),
    "roberta": _text_entry("RoBERTa, 6 layers of 384", "RobertaForMaskedLM", **_WORDS, **_sizes(6, 384, 6, 1536)),
    "electra": _text_entry("ELECTRA, 4 layers of 256", "ElectraForMaskedLM", **_WORDS, **_sizes(4, 256, 4, 1024)),
    "vit": _image_entry("ViT, 4 layers of 256", "ViTForImageClassification", **_sizes(4, 256, 4, 1024)),
    "deit": _image_entry("DeiT, 8 layers of 192", "DeiTForImageClassification", **_sizes(8, 192, 3, 768)),
    "swin": _image_entry(
        "Swin, 2 + 2 + 2 + 2 layers from 64",
        "SwinForImageClassification",
        image_size=224,
        embed_dim=64,
        depths=[2, 2, 2, 2],
        num_heads=[2, 4, 8, 16],
    ),
    "convnext": _image_entry(
        "ConvNeXt, 2 + 2 + 2 + 2 layers from 48",
        "ConvNextForImageClassification",
        hidden_sizes=[48, 96, 192, 384],
        depths=[2, 2, 2, 2],
    ),
    "mobilenetv2": _image_entry("MobileNetV2, whole", "MobileNetV2ForImageClassification"),
    "regnet": _image_entry(
        "RegNet, 1 + 2 + 4 + 1 layers from 32",
        "RegNetForImageClassification",
        embedding_size=32,
        hidden_sizes=[32, 64, 160, 384],
        depths=[1, 2, 4, 1],
        groups_width=16,
    ),
    "resnet50": _image_entry("ResNet-50, whole", "ResNetForImageClassification"),
    "clip": Entry(
        "CLIP, 4 + 4 layers of 256",
        _transformer(
            "CLIPModel",
            text_config=dict(_sizes(4, 256, 4, 1024), vocab_size=VOCABULARY, eos_token_id=2, projection_dim=256),
            vision_config=dict(_sizes(4, 256, 4, 1024), patch_size=32, projection_dim=256),
            projection_dim=256,
        ),
        _clip_inputs,
        _IMAGES,
    ),
    "wav2vec2": Entry(
        "Wav2Vec2, 4 layers of 256, two seconds",
        _transformer(
            "Wav2Vec2ForCTC", vocab_size=32, conv_dim=(128,) * 7, mask_time_prob=0.0, **_sizes(4, 256, 4, 1024)
        ),
        _sound,
        _SOUNDS,
    ),
    "whisper": Entry(
        "Whisper, 3 + 3 layers of 256, five seconds",
        _transformer(
            "WhisperForConditionalGeneration",
            num_mel_bins=80,
            max_source_positions=250,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            **_BART_LIKE,
        ),
        _whisper_inputs,
        _TEXTS,
    ),
}
"""By name, in the order in which they are listed."""
