"""The models that ``dynamo-backends bench`` has by name: ``transformers`` configurations and an MLP.

Weights are random; nothing is downloaded. In ``MODELS``, head sizes, sequence lengths and image sizes are real; depth,
width and vocabulary are reduced so that a call takes some tens of milliseconds (``bert-base`` and ``resnet50`` are
complete). In ``PUBLISHED``, the same models have all sizes of a published checkpoint.

This module imports PyTorch and ``transformers`` only when it builds a model, so that ``--help`` is fast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Size: TypeAlias = "tuple[int, int]"
Inputs: TypeAlias = "dict[str, torch.Tensor]"
Draw: TypeAlias = "Callable[[Any, int, int], Inputs]"
"""Draws the keyword arguments of a call: from the module ``torch``, for rows and tokens, pixels or samples of each."""

VOCABULARY = 4096
PROMPT: Size = (1, 16)
"""Rows and tokens of the prompt for ``--decode``."""

_TEXTS: Sequence[Size] = ((2, 128), (3, 96), (4, 64))
_IMAGES: Sequence[Size] = ((2, 224), (3, 224), (4, 224))
_SOUNDS: Sequence[Size] = ((2, 32_000), (3, 24_000), (4, 16_000))


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A model of the list."""

    summary: str  # a few words for ``--help``
    model: str | Callable[[], torch.nn.Module]  # the name of a class of ``transformers``, or what builds the model
    draw: Draw
    sizes: Sequence[Size]  # without ``--dynamic`` only the first is used
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the configuration
    generates: bool = False  # whether the model has ``generate``
    needs_transformers: bool = True

    def build(self) -> torch.nn.Module:
        """The model with random weights.

        Without dropout: each compiler draws other random numbers, and gradients could not be compared.
        """
        if not isinstance(self.model, str):
            return self.model()
        import transformers

        model_class = getattr(transformers, self.model)
        config = model_class.config_class(**self.settings)
        for name, value in vars(config).items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        module: torch.nn.Module = model_class(config)
        return module

    def inputs(self, size: Size) -> Inputs:
        """The keyword arguments of a call."""
        import torch

        return self.draw(torch, *size)

    def prompt(self) -> Inputs:
        """The keyword arguments of ``generate``."""
        import torch

        return {"input_ids": _tokens(torch, *PROMPT), "attention_mask": torch.ones(PROMPT, dtype=torch.int64)}


def _tokens(torch: Any, *shape: int) -> torch.Tensor:
    drawn: torch.Tensor = torch.randint(3, VOCABULARY, shape)
    return drawn


def _text(torch: Any, rows: int, length: int) -> Inputs:
    """Tokens, and a mask that pads the end of the last row."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, -length // 8 :] = 0
    return {"input_ids": _tokens(torch, rows, length), "attention_mask": mask}


def _text_to_text(torch: Any, rows: int, length: int) -> Inputs:
    return {**_text(torch, rows, length), "decoder_input_ids": _tokens(torch, rows, length // 2)}


def _image(torch: Any, rows: int, pixels: int) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, pixels, pixels)}


def _sound(torch: Any, rows: int, samples: int) -> Inputs:
    return {"input_values": torch.randn(rows, samples)}


def _text_and_image(torch: Any, rows: int, pixels: int) -> Inputs:
    return {**_text(torch, rows, 77), **_image(torch, rows, pixels)}


def _whisper(torch: Any, rows: int, length: int, *, frames: int = 500) -> Inputs:
    return {"input_features": torch.randn(rows, 80, frames), "decoder_input_ids": _tokens(torch, rows, length // 4)}


def _encoder(summary: str, model: str, **settings: Any) -> ModelEntry:
    return ModelEntry(summary, model, _text, _TEXTS, settings)


def _generating(summary: str, model: str, **settings: Any) -> ModelEntry:
    draw = _text_to_text if model.endswith("ConditionalGeneration") else _text
    return ModelEntry(summary, model, draw, _TEXTS, settings, generates=True)


def _vision(summary: str, model: str, **settings: Any) -> ModelEntry:
    return ModelEntry(summary, model, _image, _IMAGES, settings)


def _sizes(layers: int, width: int, heads: int, feed_forward: int) -> dict[str, int]:
    """The sizes, by the names that most configurations have for them."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
    }


def _mlp() -> torch.nn.Module:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 256,
    **{f"{part}_layers": 3 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 1024 for part in ("encoder", "decoder")},
}
_T5_SIZES = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 4}
_CLIP_TEXT = {**_sizes(4, 256, 4, 1024), "vocab_size": VOCABULARY, "eos_token_id": 2, "projection_dim": 256}
_CLIP_VISION = {**_sizes(4, 256, 4, 1024), "patch_size": 32, "projection_dim": 256}
_CLIP = {"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": 256}
_WAV2VEC2 = {"vocab_size": 32, "conv_dim": (128,) * 7, "mask_time_prob": 0.0, **_sizes(4, 256, 4, 1024)}
_WHISPER = {
    "num_mel_bins": 80,
    "max_source_positions": 250,
    "max_target_positions": 64,
    "decoder_start_token_id": 1,
    **_TOKENS,
    **_BART_SIZES,
}
_GROUPED = {"num_key_value_heads": 2}
_SWIN = {"image_size": 224, "embed_dim": 64, "depths": [2, 2, 2, 2], "num_heads": [2, 4, 8, 16]}
_REGNET = {"embedding_size": 32, "hidden_sizes": [32, 64, 160, 384], "depths": [1, 2, 4, 1], "groups_width": 16}
_CONVNEXT = {"hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 2, 2]}

# fmt: off
MODELS: dict[str, ModelEntry] = {
    "mlp": ModelEntry(
        "two linear layers of 64", _mlp, lambda torch, *size: {"input": torch.randn(size)},
        ((8, 64), (16, 64), (32, 64)), needs_transformers=False,
    ),
    "llama-seed": ModelEntry(
        "Llama of the demo, 1 layer of 512", "LlamaModel", _text, ((2, 1024), (3, 512), (4, 256)),
        {**_TOKENS, **_sizes(1, 512, 8, 2000), "attn_implementation": "eager"},
    ),
    "llama": _generating(
        "Llama, 4 layers of 256, grouped heads", "LlamaForCausalLM", **_TOKENS, **_sizes(4, 256, 8, 704), **_GROUPED
    ),
    "llama-ungrouped": _generating("Llama, 4 layers of 256", "LlamaForCausalLM", **_TOKENS, **_sizes(4, 256, 4, 704)),
    "qwen2": _generating(
        "Qwen2, 6 layers of 384, grouped heads", "Qwen2ForCausalLM", **_TOKENS, **_sizes(6, 384, 6, 1024), **_GROUPED
    ),
    "mixtral": _generating(
        "Mixtral, 2 layers of 256, 4 experts", "MixtralForCausalLM", **_TOKENS, **_sizes(2, 256, 8, 512), **_GROUPED,
        num_local_experts=4,
    ),
    "gpt2": _generating(
        "GPT-2, 4 layers of 256", "GPT2LMHeadModel", **_TOKENS, n_layer=4, n_embd=256, n_head=4, n_positions=512
    ),
    "gpt-neox": _generating("GPT-NeoX, 6 layers of 256", "GPTNeoXForCausalLM", **_TOKENS, **_sizes(6, 256, 4, 1024)),
    "t5": _generating(
        "T5, 3 + 3 layers of 256", "T5ForConditionalGeneration", vocab_size=VOCABULARY, **_T5_SIZES,
        decoder_start_token_id=0,
    ),
    "bart": _generating(
        "BART, 3 + 3 layers of 256", "BartForConditionalGeneration", **_BART_SIZES),
    "bert": _encoder("BERT, 4 layers of 256", "BertForMaskedLM", **_TOKENS, **_sizes(4, 256, 4, 1024)),
    "bert-base": _encoder("BERT base, complete", "BertForMaskedLM"),
    "roberta": _encoder("RoBERTa, 6 layers of 384", "RobertaForMaskedLM", **_TOKENS, **_sizes(6, 384, 6, 1536)),
    "electra": _encoder("ELECTRA, 4 layers of 256", "ElectraForMaskedLM", **_TOKENS, **_sizes(4, 256, 4, 1024)),
    "vit": _vision("ViT, 4 layers of 256", "ViTForImageClassification", **_sizes(4, 256, 4, 1024)),
    "deit": _vision("DeiT, 8 layers of 192", "DeiTForImageClassification", **_sizes(8, 192, 3, 768)),
    "swin": _vision("Swin, 2 + 2 + 2 + 2 layers from 64", "SwinForImageClassification", **_SWIN),
    "convnext": _vision("ConvNeXt, 2 + 2 + 2 + 2 layers from 48", "ConvNextForImageClassification", **_CONVNEXT),
    "mobilenetv2": _vision("MobileNetV2, complete", "MobileNetV2ForImageClassification"),
    "regnet": _vision("RegNet, 1 + 2 + 4 + 1 layers from 32", "RegNetForImageClassification", **_REGNET),
    "resnet50": _vision("ResNet-50, complete", "ResNetForImageClassification"),
    "clip": ModelEntry("CLIP, 4 + 4 layers of 256", "CLIPModel", _text_and_image, _IMAGES, _CLIP),
    "wav2vec2": ModelEntry("Wav2Vec2, 4 layers of 256, two seconds", "Wav2Vec2ForCTC", _sound, _SOUNDS, _WAV2VEC2),
    "whisper": ModelEntry(
        "Whisper, 3 + 3 layers of 256, five seconds", "WhisperForConditionalGeneration", _whisper, _TEXTS, _WHISPER
    ),
}
# fmt: on
"""By name, in the order in which they are listed."""


def _published(name: str, checkpoint: str, **settings: Any) -> ModelEntry:
    """A model of the list with the configuration of a checkpoint; settings that are the configuration's default are
    left out."""
    return dataclasses.replace(MODELS[name], summary=checkpoint, settings=settings)


_CLASSES = {"num_labels": 1000}  # of ImageNet

# fmt: off
PUBLISHED: dict[str, ModelEntry] = {
    "llama": _published(
        "llama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", **_sizes(22, 2048, 32, 5632), num_key_value_heads=4
    ),
    "llama-ungrouped": _published("llama-ungrouped", "JackFram/llama-160m", **_sizes(12, 768, 12, 3072)),
    "qwen2": _published(
        "qwen2", "Qwen/Qwen2-0.5B", **_sizes(24, 896, 14, 4864), **_GROUPED, tie_word_embeddings=True,
        max_position_embeddings=131_072, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "mixtral": _published("mixtral", "mistralai/Mixtral-8x7B-v0.1"),
    "gpt2": _published("gpt2", "openai-community/gpt2"),
    "gpt-neox": _published("gpt-neox", "EleutherAI/pythia-410m", **_sizes(24, 1024, 16, 4096), vocab_size=50_304),
    "t5": _published("t5", "google-t5/t5-small", decoder_start_token_id=0),
    "bart": _published("bart", "facebook/bart-large"),
    "bert": _published("bert", "google-bert/bert-base-uncased"),
    "bert-base": _published("bert-base", "google-bert/bert-base-uncased"),
    "roberta": _published(
        "roberta", "FacebookAI/roberta-base", max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
    ),
    "electra": _published("electra", "google/electra-small-generator"),
    "vit": _published("vit", "google/vit-base-patch16-224", **_CLASSES),
    "deit": _published("deit", "facebook/deit-base-distilled-patch16-224", **_CLASSES),
    "swin": _published("swin", "microsoft/swin-tiny-patch4-window7-224", **_CLASSES),
    "convnext": _published("convnext", "facebook/convnext-tiny-224", **_CLASSES),
    "mobilenetv2": _published("mobilenetv2", "google/mobilenet_v2_1.0_224", num_labels=1001),
    "regnet": _published("regnet", "facebook/regnet-y-040", **_CLASSES),
    "resnet50": _published("resnet50", "microsoft/resnet-50", **_CLASSES),
    "clip": _published("clip", "openai/clip-vit-base-patch32"),
    "wav2vec2": _published("wav2vec2", "facebook/wav2vec2-base-960h", mask_time_prob=0.0),
    "whisper": dataclasses.replace(
        _published("whisper", "openai/whisper-tiny"), draw=functools.partial(_whisper, frames=3000)
    ),
}
# fmt: on
"""The models of ``MODELS`` that have one, with the configuration of a published checkpoint, which the summary names."""


def entry(name: str, *, published: bool) -> ModelEntry:
    """A model of the list."""
    return (PUBLISHED if published else MODELS)[name]
