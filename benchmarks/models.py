"""The models the passes are measured on: ``transformers`` configurations with random weights, and inputs for them.

Head sizes, sequence lengths and image sizes are real; depth, width and vocabulary are cut so that a call takes some
tens of milliseconds: what passes change must not drown in matrix products. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
import transformers as tf

BATCH = 2
TOKENS = 128
VOCABULARY = 4096
WIDTH = 256
LAYERS = 4
HEADS = 4
INNER = 1024

Inputs = dict[str, torch.Tensor]

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
}
_DECODER = {**_TEXT, "use_cache": False}
_IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "image_size": 224,
}
_BART_LIKE = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "use_cache": False,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        build: makes it.
        inputs: makes the keyword arguments of a call.
        trains: whether a training step is measured too.
    """

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], Inputs]
    trains: bool = False


def _text(length: int = TOKENS) -> Inputs:
    """Token numbers and a mask that pads the end of the last row."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[-1, -length // 8 :] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, length)), "attention_mask": mask}


def _text_to_text() -> Inputs:
    return {**_text(), "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, TOKENS // 2))}


def _image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 224, 224)}


def _five_seconds_of_spectrogram() -> Inputs:
    return {
        "input_features": torch.randn(BATCH, 80, 500),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, 32)),
    }


def _five_seconds_of_sound() -> Inputs:
    return {"input_values": torch.randn(BATCH, 5 * 16_000)}


def _config(kind: type, settings: Mapping[str, object], **more: object) -> tf.PreTrainedConfig:
    return kind(**{**settings, **more})


def _bert(**more: object) -> torch.nn.Module:
    return tf.BertForMaskedLM(_config(tf.BertConfig, _TEXT, **more))


def _llama(**more: object) -> torch.nn.Module:
    """Grouped-query attention: two query heads share a key and value head."""
    return tf.LlamaForCausalLM(_config(tf.LlamaConfig, _DECODER, num_key_value_heads=HEADS // 2, **more))


def _gpt2() -> torch.nn.Module:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=512, use_cache=False
    )
    return tf.GPT2LMHeadModel(config)


def _t5() -> torch.nn.Module:
    config = tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return tf.T5ForConditionalGeneration(config)


def _whisper() -> torch.nn.Module:
    config = _config(
        tf.WhisperConfig,
        _BART_LIKE,
        num_mel_bins=80,
        max_source_positions=250,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return tf.WhisperForConditionalGeneration(config)


def _clip() -> torch.nn.Module:
    text = {**_TEXT, "max_position_embeddings": 77, "eos_token_id": 2, "projection_dim": WIDTH}
    vision = {**_IMAGE, "patch_size": 32, "projection_dim": WIDTH}
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))


def _wav2vec2() -> torch.nn.Module:
    config = tf.Wav2Vec2Config(**{**_TEXT, "vocab_size": 32}, conv_dim=(128,) * 7)
    return tf.Wav2Vec2ForCTC(config)


MODELS: dict[str, Entry] = {
    "bert": Entry(_bert, _text, trains=True),
    "bert-eager": Entry(lambda: _bert(attn_implementation="eager"), _text),
    "electra": Entry(lambda: tf.ElectraForMaskedLM(_config(tf.ElectraConfig, _TEXT, embedding_size=128)), _text),
    "deberta-v2": Entry(
        lambda: tf.DebertaV2ForMaskedLM(
            _config(tf.DebertaV2Config, _TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
        ),
        _text,
    ),
    "gpt2": Entry(_gpt2, _text, trains=True),
    "llama": Entry(_llama, _text, trains=True),
    "llama-eager": Entry(lambda: _llama(attn_implementation="eager"), _text),
    "qwen2": Entry(
        lambda: tf.Qwen2ForCausalLM(_config(tf.Qwen2Config, _DECODER, num_key_value_heads=HEADS // 2)), _text
    ),
    "mistral": Entry(
        lambda: tf.MistralForCausalLM(
            _config(tf.MistralConfig, _DECODER, num_key_value_heads=HEADS // 2, sliding_window=64)
        ),
        _text,
    ),
    "t5": Entry(_t5, _text_to_text),
    "bart": Entry(lambda: tf.BartForConditionalGeneration(_config(tf.BartConfig, _BART_LIKE)), _text_to_text),
    "vit": Entry(lambda: tf.ViTForImageClassification(_config(tf.ViTConfig, _IMAGE)), _image, trains=True),
    "swin": Entry(
        lambda: tf.SwinForImageClassification(
            tf.SwinConfig(image_size=224, embed_dim=64, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16])
        ),
        _image,
    ),
    "convnext": Entry(
        lambda: tf.ConvNextForImageClassification(
            tf.ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 2, 2], image_size=224)
        ),
        _image,
    ),
    "resnet": Entry(
        lambda: tf.ResNetForImageClassification(
            tf.ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
        ),
        _image,
        trains=True,
    ),
    "segformer": Entry(
        lambda: tf.SegformerForSemanticSegmentation(
            tf.SegformerConfig(hidden_sizes=[32, 64, 128, 256], decoder_hidden_size=128)
        ),
        _image,
    ),
    "whisper": Entry(_whisper, _five_seconds_of_spectrogram),
    "wav2vec2": Entry(_wav2vec2, _five_seconds_of_sound),
    "clip": Entry(_clip, lambda: {**_text(77), **_image()}),
}
"""By name, in the order of the tables; ``-eager`` is attention written out, ``attn_implementation="eager"``."""
