"""More than a hundred architectures of ``transformers``, tiny and with random weights, for ``models_sweep.py``.

A model is built from the class of its configuration: fields with standard names get small values, the others keep their
defaults or are given with the entry. ``ARCHITECTURES["llama"].build()`` is a model; ``.inputs(2, 12)`` are keyword
inputs for it with a batch of 2 and a length of 12 (tokens, audio samples). Other inputs, such as images, have a fixed
length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Inputs = dict[str, torch.Tensor]
VOCABULARY = 99

_SMALL: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "block_ff_dim"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "global_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx"), 64),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "state_size": 8,
    "time_step_rank": 4,
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model.

    Attributes:
        kind: what it is an example of.
        build: builds it, with random numbers of PyTorch's global generator.
        inputs: its keyword inputs for a batch and a length.
        generates: whether it is a decoder that ``generate`` can run on its ``input_ids`` or main input.
    """

    kind: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    generates: bool = False


ARCHITECTURES: dict[str, Architecture] = {}


def small(model_type: str, **given: object) -> tf.PreTrainedConfig:
    """The configuration of a model type with small values in all fields with standard names; ``given`` overrides.

    Raises:
        KeyError: ``transformers`` has no such type.
    """
    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    named_otherwise = set(config_class.attribute_map)
    values = {name: value for name, value in _SMALL.items() if name in fields and name not in named_otherwise}
    config = config_class(**{**values, **given})
    config.architectures = (
        config.architectures or []
    )  # ``from_config`` goes through it where a type has several classes
    return config


def tokens(batch: int, length: int) -> Inputs:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, : length // 4] = 0  # on the left, where ``generate`` wants it
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length)), "attention_mask": mask}


def tokens_with_labels(batch: int, length: int) -> Inputs:
    feeds = tokens(batch, length)
    return {**feeds, "labels": feeds["input_ids"].clone()}


def tokens_and_targets(batch: int, length: int) -> Inputs:
    return {**tokens(batch, length), "labels": torch.randint(3, VOCABULARY, (batch, length // 2))}


def pixels(size: int = 32, channels: int = 3) -> Callable[[int, int], Inputs]:
    return lambda batch, length: {"pixel_values": torch.randn(batch, channels, size, size)}


def _add(kind: str, name: str, auto: type, inputs: Callable[[int, int], Inputs], **given: object) -> None:
    generates = bool(given.pop("generates", False))
    model_type = str(given.pop("model_type", name))

    def build() -> nn.Module:
        values = {key: value() if callable(value) else value for key, value in given.items()}
        return auto.from_config(small(model_type, **values))  # type: ignore[attr-defined]

    ARCHITECTURES[name] = Architecture(kind, build, inputs, generates)


def _decoder(name: str, kind: str = "decoder", **given: object) -> None:
    _add(kind, name, tf.AutoModelForCausalLM, tokens_with_labels, generates=True, **given)


_LLAMA_LIKE = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox gptj gpt_bigcode opt bloom falcon "
    "codegen stablelm starcoder2 olmo olmo2 cohere cohere2 granite persimmon nemotron biogpt ernie4_5 smollm3 "
    "glm glm4 helium "
    "arcee apertus hunyuan_v1_dense seed_oss exaone4 diffllama bitnet vaultgemma modernbert-decoder"
)
_SPECIAL: dict[str, dict[str, object]] = {
    "phi3": {"pad_token_id": 0},
    "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "persimmon": {"num_key_value_heads": 4},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}
for _name in _LLAMA_LIKE.split():
    _decoder(_name, **_SPECIAL.get(_name, {}))
_decoder("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=8)
_decoder("mpt")
_decoder("xglm", attention_heads=4)
_decoder("ctrl")
_decoder("openai-gpt")

for _name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "minimax"):
    _decoder(_name, "mixture of experts")
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_decoder("deepseek_v2", "mixture of experts", **_LATENT)
_decoder("deepseek_v3", "mixture of experts", **_LATENT)

_decoder("mamba", "state space")
_decoder("mamba2", "state space", num_heads=8, head_dim=8, n_groups=1, chunk_size=4)
_decoder("falcon_mamba", "state space")
_decoder("rwkv", "state space", attention_hidden_size=32)
_decoder("recurrent_gemma", "state space", lru_width=32, attention_window_size=8, num_hidden_layers=3)
_decoder(
    "jamba",
    "state space",
    mamba_d_state=8,
    mamba_dt_rank=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    use_mamba_kernels=False,
)
_decoder("lfm2", "state space", layer_types=["conv", "full_attention"])
_decoder(
    "qwen3_next",
    "state space",
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)

_MASKED = (
    "bert roberta albert distilbert electra deberta deberta-v2 mpnet camembert xlm-roberta modernbert roformer "
    "fnet squeezebert mobilebert convbert layoutlm megatron-bert rembert nystromformer esm ernie data2vec-text "
    "eurobert xlnet"
)
for _name in _MASKED.split():
    _more: dict[str, object] = {
        "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "esm": {"mask_token_id": 4, "position_embedding_type": "rotary"},
        "mobilebert": {"intra_bottleneck_size": 32, "embedding_size": 32},
        "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "global_attn_every_n_layers": 2},
        "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64, "conv_kernel_size": 5},
        "squeezebert": {"embedding_size": 32},
    }.get(_name, {})
    _is_xlnet = _name == "xlnet"
    _add(
        "encoder",
        _name,
        tf.AutoModelForCausalLM if _is_xlnet else tf.AutoModelForMaskedLM,
        tokens if _is_xlnet or _name == "nystromformer" else tokens_with_labels,
        **_more,
    )

for _name in [
    "t5",
    "mt5",
    "umt5",
    "bart",
    "mbart",
    "pegasus",
    "marian",
    "blenderbot",
    "blenderbot-small",
    "m2m_100",
    "plbart",
    "longt5",
    "switch_transformers",
    "prophetnet",
]:
    _more = {
        "t5": {"decoder_start_token_id": 0},
        "longt5": {"local_radius": 4, "decoder_start_token_id": 0},
        "switch_transformers": {
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 24,
            "decoder_start_token_id": 0,
        },
        "prophetnet": {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2},
    }.get(_name, {})
    _add("encoder-decoder", _name, tf.AutoModelForSeq2SeqLM, tokens_and_targets, generates=True, **_more)

_CLASSIFIER = tf.AutoModelForImageClassification
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


def _vision(name: str, **given: object) -> None:
    inputs = pixels(int(given.get("image_size", 32)))  # type: ignore[call-overload]
    _add("vision", name, _CLASSIFIER, inputs, **given)


for _name in ("vit", "deit", "beit", "dinov2", "dinov2_with_registers", "data2vec-vision", "vit_msn", "ijepa"):
    _vision(_name)
_vision("swin", patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
_vision("swinv2", patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
_vision("convnext", **_STAGES, patch_size=4)
_vision("convnextv2", **_STAGES, patch_size=4)
_vision("resnet", **_STAGES, embedding_size=8, layer_type="basic")
_vision("regnet", **_STAGES, embedding_size=8, groups_width=8)
_vision("bit", **_STAGES, embedding_size=8, num_groups=4)
_vision("mobilenet_v1", depth_multiplier=0.25)
_vision("mobilenet_v2", depth_multiplier=0.25)
_vision("poolformer", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], patch_size=7)
_vision("pvt", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], image_size=64)
_vision("pvt_v2", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], image_size=32)
_vision(
    "segformer",
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
    patch_sizes=[7, 3, 3, 3],
    decoder_hidden_size=32,
)
_vision(
    "focalnet",
    embed_dim=8,
    depths=[1, 1],
    hidden_sizes=[8, 16],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
    patch_size=4,
)
_vision(
    "cvt",
    embed_dim=[8, 16, 24],
    num_heads=[1, 2, 3],
    depth=[1, 2, 3],
    patch_sizes=[7, 3, 3],
    drop_path_rate=[0.0, 0.0, 0.0],
)
_vision(
    "mobilevit", image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32], patch_size=2
)
_vision("mobilevitv2", image_size=64, patch_size=2, width_multiplier=0.25)
_vision(
    "levit",
    image_size=64,
    patch_size=16,
    hidden_sizes=[16, 24, 32],
    num_attention_heads=[1, 2, 2],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
    down_ops=lambda: [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
)
_vision("swiftformer", depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32])
_vision(
    "hgnet_v2",
    embedding_size=8,
    hidden_sizes=[16, 24, 32, 40],
    stage_in_channels=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    stem_channels=[3, 8, 8],
    stage_mid_channels=[8, 8, 8, 8],
    stage_out_channels=[16, 24, 32, 40],
    stage_num_blocks=[1, 1, 1, 1],
)
_add(
    "vision",
    "vit_mae",
    tf.AutoModel,
    lambda batch, length: {**pixels()(batch, length), "noise": torch.rand(batch, 16)},
)
_add(
    "segmentation",
    "segformer segmentation",
    tf.AutoModelForSemanticSegmentation,
    pixels(),
    model_type="segformer",
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
    decoder_hidden_size=32,
)
_add(
    "segmentation",
    "upernet",
    tf.AutoModelForSemanticSegmentation,
    pixels(64),
    hidden_size=16,
    auxiliary_channels=16,
    auxiliary_in_channels=24,
    backbone_config=lambda: small(
        "convnext", **_STAGES, patch_size=4, out_features=["stage1", "stage2", "stage3", "stage4"]
    ),
)
_add(
    "segmentation",
    "dpt",
    tf.AutoModelForDepthEstimation,
    pixels(),
    num_hidden_layers=4,
    backbone_out_indices=[0, 1, 2, 3],
    neck_hidden_sizes=[8, 8, 16, 16],
    fusion_hidden_size=16,
    is_hybrid=False,
)
_add(
    "segmentation",
    "glpn",
    tf.AutoModelForDepthEstimation,
    pixels(64),
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 2, 4],
    decoder_hidden_size=16,
)
_add(
    "segmentation",
    "depth_anything",
    tf.AutoModelForDepthEstimation,
    pixels(),
    backbone_config=lambda: small(
        "dinov2",
        num_hidden_layers=4,
        reshape_hidden_states=False,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    ),
    reassemble_hidden_size=32,
    patch_size=8,
    neck_hidden_sizes=[8, 8, 16, 16],
    fusion_hidden_size=16,
)
_add(
    "detection",
    "yolos",
    tf.AutoModelForObjectDetection,
    pixels(),
    image_size=[32, 32],
    num_detection_tokens=6,
)


def _resnet_backbone() -> tf.PreTrainedConfig:
    return small("resnet", **_STAGES, embedding_size=8, layer_type="basic", out_features=["stage2", "stage3", "stage4"])


for _name in ("detr", "conditional_detr", "table-transformer", "deformable_detr"):
    _add(
        "detection",
        _name,
        tf.AutoModelForObjectDetection,
        pixels(64),
        num_queries=6,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=_resnet_backbone,
    )


def sound(batch: int, length: int) -> Inputs:
    return {"input_values": torch.randn(batch, 100 * length)}


def sound_with_labels(batch: int, length: int) -> Inputs:
    return {**sound(batch, length), "labels": torch.randint(3, VOCABULARY, (batch, 3))}


for _name in ("wav2vec2", "hubert", "wavlm", "unispeech-sat", "sew", "data2vec-audio"):
    _more = {
        "conv_dim": [8, 8, 8],
        "conv_stride": [5, 2, 2],
        "conv_kernel": [10, 3, 3],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0,
        "apply_spec_augment": False,
        "layerdrop": 0.0,
        "ctc_loss_reduction": "mean",
    }
    if _name == "data2vec-audio":
        _more.update(num_conv_pos_embeddings=2, conv_pos_kernel_size=3)
    _add("speech", _name, tf.AutoModelForCTC, sound_with_labels, **_more)
_add(
    "speech",
    "whisper",
    tf.AutoModelForSpeechSeq2Seq,
    lambda batch, length: {
        "input_features": torch.randn(batch, 16, 40),
        "labels": torch.randint(3, VOCABULARY, (batch, 7)),
    },
    num_mel_bins=16,
    max_source_positions=20,
    max_target_positions=32,
)
_add(
    "speech",
    "speech_to_text",
    tf.AutoModelForSpeechSeq2Seq,
    lambda batch, length: {
        "input_features": torch.randn(batch, 4 * length, 8),
        "labels": torch.randint(3, VOCABULARY, (batch, 7)),
    },
    input_feat_per_channel=8,
    conv_channels=16,
    max_source_positions=64,
    max_target_positions=32,
)
_add(
    "speech",
    "audio-spectrogram-transformer",
    tf.AutoModelForAudioClassification,
    lambda batch, length: {"input_values": torch.randn(batch, 32, 16)},
    max_length=32,
    num_mel_bins=16,
    frequency_stride=8,
    time_stride=8,
)
_add(
    "speech",
    "encodec",
    tf.AutoModel,
    lambda batch, length: {"input_values": torch.randn(batch, 1, 40 * length)},
    num_filters=4,
    hidden_size=16,
    upsampling_ratios=[4, 2],
    codebook_size=32,
    target_bandwidths=[30.0],
)

_add(
    "time series",
    "patchtst",
    tf.AutoModel,
    lambda batch, length: {"past_values": torch.randn(batch, 32, 2)},
    num_input_channels=2,
    context_length=32,
    patch_length=4,
    patch_stride=4,
    do_mask_input=False,
)
_add(
    "time series",
    "patchtsmixer",
    tf.AutoModel,
    lambda batch, length: {"past_values": torch.randn(batch, 32, 2)},
    num_input_channels=2,
    context_length=32,
    patch_length=4,
    patch_stride=4,
)

_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "projection_dim": 16,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
    "projection_dim": 16,
}


def text_and_image(batch: int, length: int) -> Inputs:
    return {**tokens(batch, length), **pixels()(batch, length)}


for _name in ("clip", "siglip", "blip", "altclip", "chinese_clip", "clipseg", "owlvit"):
    _is_bert = _name in ("altclip", "chinese_clip")
    _text = {key: value for key, value in _TEXT.items() if not (_is_bert and key == "projection_dim")}
    _add(
        "multimodal",
        _name,
        tf.AutoModel,
        text_and_image,
        text_config={**_text, **({"project_dim": 16} if _name == "altclip" else {})},
        vision_config=_VISION,
        **({} if _name == "siglip" else {"projection_dim": 16}),
    )
_add(
    "multimodal",
    "vilt",
    tf.AutoModel,
    lambda batch, length: {**text_and_image(batch, length), "pixel_mask": torch.ones(batch, 32, 32, dtype=torch.int64)},
    max_image_length=-1,
)


def image_in_text(count: int, image_token: int) -> Callable[[int, int], Inputs]:
    """Text with ``count`` placeholder tokens for the image patches."""

    def inputs(batch: int, length: int) -> Inputs:
        text = tokens(batch, length + count)
        ids = text["input_ids"].clamp(max=image_token - 1)
        text["attention_mask"][:] = 1
        ids[:, 1 : 1 + count] = image_token
        return {**text, "input_ids": ids, **pixels()(batch, length), "labels": ids.clone()}

    return inputs


_add(
    "multimodal",
    "llava",
    tf.AutoModelForImageTextToText,
    image_in_text(16, 98),
    image_token_index=98,
    vision_config=lambda: small("clip_vision_model"),
    text_config=lambda: small("llama"),
    vision_feature_layer=-1,
)
_add(
    "multimodal",
    "paligemma",
    tf.AutoModelForImageTextToText,
    lambda batch, length: {
        **image_in_text(16, 98)(batch, length),
        "token_type_ids": torch.ones(batch, length + 16, dtype=torch.int64),
    },
    image_token_index=98,
    image_token_id=98,
    vision_config=lambda: small("siglip_vision_model"),
    text_config=lambda: small("gemma"),
    projection_dim=32,
)
_add(
    "multimodal",
    "git",
    tf.AutoModelForCausalLM,
    lambda batch, length: {**tokens(batch, length), **pixels()(batch, length)},
    vision_config=_VISION,
)
for _name in ("timesformer", "vivit", "videomae"):
    _add(
        "video",
        _name,
        tf.AutoModelForVideoClassification,
        lambda batch, length: {"pixel_values": torch.randn(batch, 4, 3, 32, 32)},
        num_frames=4,
        **({"tubelet_size": [2, 8, 8]} if _name == "vivit" else {}),
    )


class _Block(nn.Module):
    """A residual block: two convolutions, with the time embedding added between them."""

    def __init__(self, channels_in: int, channels: int, time_channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels_in), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(time_channels, channels)
        self.around = nn.Conv2d(channels_in, channels, 1) if channels_in != channels else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.around(x) + self.conv2(F.silu(self.norm2(h)))


class _Attention(nn.Module):
    """Self-attention over the pixels, then cross-attention to a text, as in latent diffusion."""

    def __init__(self, channels: int, context: int) -> None:
        super().__init__()
        self.norm, self.norm_cross = nn.GroupNorm(4, channels), nn.LayerNorm(channels)
        self.own = nn.MultiheadAttention(channels, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(channels, 4, kdim=context, vdim=context, batch_first=True)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(2).transpose(1, 2)
        rows = rows + self.own(rows, rows, rows, need_weights=False)[0]
        rows = rows + self.cross(self.norm_cross(rows), context, context, need_weights=False)[0]
        return x + rows.transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    """A denoising network: ``sample`` [batch, 4, height, width], ``timestep`` [batch], ``context`` [batch, length,
    16], all float32 but the time (int64); the result has the shape of the sample. ``conditional`` adds the attention to
    the context. Follows Ho et al. 2020 and Rombach et al. 2022."""

    def __init__(self, conditional: bool) -> None:
        super().__init__()
        self.conditional = conditional
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.start = nn.Conv2d(4, 16, 3, padding=1)
        self.down1, self.down2 = _Block(16, 16, 32), _Block(16, 32, 32)
        self.shrink = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.attention = _Attention(32, 16)
        self.middle = _Block(32, 32, 32)
        self.up2, self.up1 = _Block(64, 16, 32), _Block(32, 16, 32)
        self.end = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        rates = torch.exp(-torch.arange(8, device=sample.device, dtype=sample.dtype))
        angles = timestep[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        first = self.down1(self.start(sample), time)
        second = self.down2(self.shrink(first), time)
        middle = second
        if self.conditional and context is not None:
            middle = self.attention(middle, context)
        middle = self.middle(middle, time)
        h = self.up2(torch.cat([middle, second], dim=1), time)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return {"sample": self.end(self.up1(torch.cat([h, first], dim=1), time))}


def _noise(batch: int, length: int) -> Inputs:
    return {"sample": torch.randn(batch, 4, 16, 16), "timestep": torch.randint(1000, (batch,))}


ARCHITECTURES["unet"] = Architecture("diffusion", lambda: UNet(False), _noise)
ARCHITECTURES["unet with text"] = Architecture(
    "diffusion",
    lambda: UNet(True),
    lambda batch, length: {**_noise(batch, length), "context": torch.randn(batch, length, 16)},
)
