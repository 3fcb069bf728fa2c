"""Right models and training steps for ``verification_sweep.py``: none may be accused.

They are built from ``transformers`` configurations with random weights, or written here: small, but not tiny, so that
sums are long enough for their rounding to matter. ``MODELS["llama"].build()`` is a program; ``program.step(function)``
runs it once with the model itself (eager) or with what ``torch.compile`` makes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as tf
from architectures import UNet
from torch import nn
from torch.nn import functional as F
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo import scalar

VOCABULARY = 2000
BATCH, LENGTH = 2, 96
Inputs = dict[str, torch.Tensor]

_MEDIUM: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim"), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "n_inner"), 1024),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 1024),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("head_dim", "d_kv"), 64),
    **dict.fromkeys(("num_local_experts",), 4),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "sliding_window": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "image_size": 96,
    "patch_size": 8,
    "num_labels": 16,
    "use_cache": False,
}


@dataclasses.dataclass
class Program:
    """A model or function, and what a step does with it.

    Attributes:
        target: what is compiled.
        step: runs one step, with ``target`` or what is compiled from it.
        dynamic: the argument of ``torch.compile``.
        options: more options of the backend.
    """

    target: Callable[..., object]
    step: Callable[[Callable[..., object]], object]
    dynamic: bool | None = None
    options: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A program.

    Attributes:
        kind: what it is an example of.
        build: builds it, with random numbers of PyTorch's global generator.
        has_units: whether the processor is taken for one with bfloat16 units, where PyTorch runs bfloat16.
    """

    kind: str
    build: Callable[[], Program]
    has_units: bool = False


MODELS: dict[str, Entry] = {}


def _add(name: str, kind: str, build: Callable[[], Program], *, has_units: bool = False) -> None:
    assert name not in MODELS, name
    MODELS[name] = Entry(kind, build, has_units)


def configured(model_type: str, **given: object) -> tf.PreTrainedConfig:
    """The configuration of a type with ``_MEDIUM`` in its fields; ``given`` overrides."""
    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)} - set(config_class.attribute_map)
    config = config_class(**{**{name: value for name, value in _MEDIUM.items() if name in fields}, **given})
    config.architectures = config.architectures or []
    return config


def tokens(batch: int = BATCH, length: int = LENGTH) -> Inputs:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, : length // 4] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length)), "attention_mask": mask}


def labelled(batch: int = BATCH, length: int = LENGTH) -> Inputs:
    feeds = tokens(batch, length)
    return {**feeds, "labels": feeds["input_ids"].clone()}


def targeted(batch: int = BATCH, length: int = LENGTH) -> Inputs:
    return {**tokens(batch, length), "labels": torch.randint(3, VOCABULARY, (batch, length // 2))}


def pixels(size: int = 96) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def inference(
    model: nn.Module, *feeds: Inputs, dtype: torch.dtype | None = None, autocast: torch.dtype | None = None
) -> Program:
    """Each step runs the model on all feeds; ``dtype`` is the model's, ``autocast`` that of a context."""
    model = model.eval() if dtype is None else model.eval().to(dtype)
    inputs = [_cast(item, dtype) for item in feeds]

    def step(function: Callable[..., object]) -> object:
        with torch.no_grad(), _autocast(autocast):
            return [function(**item) for item in inputs]

    return Program(model, step)


def training(
    model: nn.Module, feeds: Inputs, *, dtype: torch.dtype | None = None, autocast: torch.dtype | None = None
) -> Program:
    """Each step computes a loss and all gradients, with dropout if the model has it."""
    model = model.train() if dtype is None else model.train().to(dtype)
    inputs = _cast(feeds, dtype)

    def step(function: Callable[..., object]) -> object:
        model.zero_grad()
        with _autocast(autocast):
            loss = scalar(_as_mapping(function(**inputs)))
        loss.backward()
        return loss

    return Program(model, step)


def _as_mapping(output: object) -> object:
    return {"result": output} if isinstance(output, torch.Tensor) else output


def _cast(feeds: Inputs, dtype: torch.dtype | None) -> Inputs:
    if dtype is None:
        return feeds
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in feeds.items()}


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext():
        yield


# ----------------------------------------------------------------------------------------------- transformers' models

_STAGES = {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1]}
_SEGFORMER = {
    "hidden_sizes": [16, 32, 64, 96],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 4, 4],
    "patch_sizes": [7, 3, 3, 3],
    "decoder_hidden_size": 64,
}
_TEXT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 96,
    "projection_dim": 64,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 96,
    "patch_size": 8,
    "projection_dim": 64,
}
_SPEECH = {
    "conv_dim": [64, 64, 64],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "ctc_loss_reduction": "mean",
}


def _model(auto: Any, model_type: str, **given: object) -> Callable[[], nn.Module]:
    return lambda: auto.from_config(configured(model_type, **given))


def _whisper_inputs() -> Inputs:
    return {"input_features": torch.randn(BATCH, 40, 80), "labels": torch.randint(3, VOCABULARY, (BATCH, 16))}


def _speech_inputs() -> Inputs:
    return {"input_values": torch.randn(BATCH, 2000), "labels": torch.randint(3, VOCABULARY, (BATCH, 5))}


_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_EAGER = {"attn_implementation": "eager"}

TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    **{
        name: (_model(tf.AutoModelForMaskedLM, name), labelled)
        for name in ("bert", "roberta", "distilbert", "electra", "albert")
    },
    "deberta": (_model(tf.AutoModelForMaskedLM, "deberta", **_DISENTANGLED), labelled),
    "deberta-v2": (_model(tf.AutoModelForMaskedLM, "deberta-v2", **_DISENTANGLED), labelled),
    **{
        name: (_model(tf.AutoModelForCausalLM, name), labelled)
        for name in ("llama", "mistral", "qwen2", "gemma", "gpt2", "gpt_neox", "opt", "bloom", "mixtral")
    },
    "mamba": (_model(tf.AutoModelForCausalLM, "mamba", state_size=8), lambda: labelled(1, 24)),
    "t5": (_model(tf.AutoModelForSeq2SeqLM, "t5", decoder_start_token_id=0), targeted),
    "bart": (_model(tf.AutoModelForSeq2SeqLM, "bart"), targeted),
    "vit": (_model(tf.AutoModelForImageClassification, "vit"), pixels),
    "deit": (_model(tf.AutoModelForImageClassification, "deit"), pixels),
    "swin": (
        _model(
            tf.AutoModelForImageClassification,
            "swin",
            patch_size=4,
            embed_dim=48,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        pixels,
    ),
    "convnext": (_model(tf.AutoModelForImageClassification, "convnext", **_STAGES, patch_size=4), pixels),
    "resnet-50": (_model(tf.AutoModelForImageClassification, "resnet"), pixels),
    "resnet-18": (
        _model(
            tf.AutoModelForImageClassification,
            "resnet",
            hidden_sizes=[32, 64, 96, 128],
            depths=[2, 2, 2, 2],
            embedding_size=32,
            layer_type="basic",
        ),
        pixels,
    ),
    "mobilenet_v1": (_model(tf.AutoModelForImageClassification, "mobilenet_v1", depth_multiplier=0.5), pixels),
    "mobilenet_v2": (_model(tf.AutoModelForImageClassification, "mobilenet_v2", depth_multiplier=0.5), pixels),
    "segformer": (
        _model(tf.AutoModelForSemanticSegmentation, "segformer", **_SEGFORMER),
        pixels,
    ),
    "efficientnet": (
        _model(
            tf.AutoModelForImageClassification,
            "efficientnet",
            width_coefficient=0.5,
            depth_coefficient=0.5,
            hidden_dim=640,
        ),
        pixels,
    ),
    "regnet": (
        _model(
            tf.AutoModelForImageClassification,
            "regnet",
            hidden_sizes=[32, 64, 96, 128],
            depths=[1, 1, 2, 1],
            embedding_size=32,
            groups_width=16,
        ),
        pixels,
    ),
    "poolformer": (
        _model(
            tf.AutoModelForImageClassification,
            "poolformer",
            hidden_sizes=[32, 64, 96, 128],
            depths=[1, 1, 2, 1],
            patch_size=7,
        ),
        pixels,
    ),
    "whisper": (
        _model(
            tf.AutoModelForSpeechSeq2Seq,
            "whisper",
            num_mel_bins=40,
            max_source_positions=40,
            max_target_positions=32,
        ),
        _whisper_inputs,
    ),
    "wav2vec2": (_model(tf.AutoModelForCTC, "wav2vec2", **_SPEECH), _speech_inputs),
    "clip": (
        _model(tf.AutoModel, "clip", text_config=_TEXT, vision_config=_VISION, projection_dim=64),
        lambda: {**tokens(BATCH, 32), **pixels()},
    ),
    "bert, eager attention": (_model(tf.AutoModelForMaskedLM, "bert", **_EAGER), labelled),
    "gpt2, eager attention": (_model(tf.AutoModelForCausalLM, "gpt2", **_EAGER), labelled),
}
"""Models and their inputs."""


def _transformer(name: str, way: Callable[..., Program], **settings: object) -> Callable[[], Program]:
    def build() -> Program:
        make, inputs = TRANSFORMERS[name]
        return way(make(), inputs(), **settings)

    return build


for _name in TRANSFORMERS:
    _add(_name, "inference", _transformer(_name, inference))
for _name in (
    *("bert", "llama", "gpt2", "vit", "resnet-18", "t5", "convnext", "whisper", "mixtral", "mamba"),
    *("clip", "segformer", "deberta", "bloom"),
):
    _add(f"{_name}, training", "training", _transformer(_name, training))

_HALF, _BRAIN = torch.float16, torch.bfloat16


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


for _name, _dtype in (
    *(("bert", _HALF), ("llama", _BRAIN), ("llama", _HALF), ("gpt2", _HALF), ("vit", _BRAIN), ("t5", _BRAIN)),
    *(("whisper", _HALF), ("mixtral", _BRAIN), ("resnet-18", _HALF), ("resnet-18", _BRAIN), ("swin", _BRAIN)),
):
    _add(f"{_name}, {_short(_dtype)}", "half precision", _transformer(_name, inference, dtype=_dtype))
for _name, _dtype in (
    ("bert", _BRAIN),
    ("gpt2", _HALF),
    ("segformer", _BRAIN),
    ("convnext", _BRAIN),
    ("llama", _BRAIN),
):
    _add(f"{_name}, autocast {_short(_dtype)}", "half precision", _transformer(_name, inference, autocast=_dtype))
for _name, _dtype in (("llama", _BRAIN), ("vit", _HALF)):
    _add(
        f"{_name}, training, {_short(_dtype)}", "half precision, training", _transformer(_name, training, dtype=_dtype)
    )
for _name in ("bert", "gpt2", "resnet-18"):
    _add(f"{_name}, training, autocast", "half precision, training", _transformer(_name, training, autocast=_BRAIN))
for _name, _way in (("llama", inference), ("bert", training)):
    _add(
        f"{_name}, bfloat16 units",
        "half precision",
        _transformer(_name, _way, autocast=_BRAIN),
        has_units=True,
    )


# --------------------------------------------------------------------------------------------- outliers and overflows


def with_outliers(model: nn.Module, factor: float = 300.0) -> nn.Module:
    """A few channels of each normalization and rows of each embedding that are much larger than the others."""
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.Tensor):
                continue
            if "norm" in type(module).__name__.lower():
                weight[5::50] *= factor
            elif isinstance(module, nn.Embedding):
                weight[::97] *= 30
    return model


def with_large_queries(model: nn.Module, factor: float, names: tuple[str, ...]) -> nn.Module:
    """Products of queries and keys that are ``factor ** 2`` times as large."""
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(name in path for name in names):
                parameter *= factor
    return model


def _outliers(name: str, way: Callable[..., Program], **settings: object) -> Callable[[], Program]:
    def build() -> Program:
        make, inputs = TRANSFORMERS[name]
        return way(with_outliers(make()), inputs(), **settings)

    return build


for _name in ("bert", "llama", "gpt2", "vit"):
    _add(f"{_name}, outliers", "outliers", _outliers(_name, inference))
_add("gpt2, outliers, training", "outliers, training", _outliers("gpt2", training))
_add("llama, outliers, bfloat16", "outliers, half precision", _outliers("llama", inference, dtype=_BRAIN))


class Attention(nn.Module):
    """Attention written out; ``mask`` is what is added to the scores of later positions."""

    def __init__(self, mask: float = -1e9, width: int = 128, heads: int = 4, factor: float = 1.0) -> None:
        super().__init__()
        self.heads, self.mask, self.factor = heads, mask, factor
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm(x)
        query, key, value = (
            layer(h).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = (query * self.factor) @ (key * self.factor).transpose(-1, -2)
        scores = scores / (math.sqrt(width // self.heads) * self.factor**2)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores + torch.zeros_like(scores).masked_fill(later, self.mask)
        rows = scores.softmax(-1) @ value
        return x + self.out(rows.transpose(1, 2).reshape(batch, length, width))


def _attention(way: Callable[..., Program], *masks: float, dtype: torch.dtype | None = None) -> Callable[[], Program]:
    def build() -> Program:
        layers = [Attention(mask) for mask in masks]
        return way(_Keyword(nn.Sequential(*layers)), {"x": torch.randn(BATCH, LENGTH, 128)}, dtype=dtype)

    return build


class _Keyword(nn.Module):
    """A module whose only argument is named ``x``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


_LEAST = torch.finfo(torch.float32).min
_add("masks of -1e9", "masks", _attention(inference, -1e9, -1e9, -1e4))
_add("masks of finfo.min", "masks", _attention(inference, _LEAST, _LEAST))
_add("masks of -inf", "masks", _attention(inference, -math.inf, -math.inf))
_add("masks of -1e9, training", "masks, training", _attention(training, -1e9, -1e9))
_add("masks of -1e4, float16", "masks, half precision", _attention(inference, -1e4, -65504.0, dtype=_HALF))
_add("masks of -1e9, bfloat16", "masks, half precision", _attention(inference, -1e9, -1e9, dtype=_BRAIN))


class FullyMasked(nn.Module):
    """Rows without a key: 0 / 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(1, 2)
        allowed = torch.arange(x.shape[1], device=x.device)[:, None] > torch.arange(x.shape[1], device=x.device)
        return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ x


_add("rows without a key", "masks", lambda: inference(FullyMasked(), {"x": torch.randn(BATCH, LENGTH, 32)}))


def _overflowing(factor: float, dtype: torch.dtype = _HALF) -> Callable[[], Program]:
    """Eager's products of queries and keys overflow, and its softmax is NaN; ONNX Runtime computes in float32."""

    def build() -> Program:
        layers = [Attention(-1e4, factor=factor) for _ in range(2)]
        return inference(_Keyword(nn.Sequential(*layers)), {"x": torch.randn(BATCH, LENGTH, 128)}, dtype=dtype)

    return build


_add("queries that overflow", "overflow, half precision", _overflowing(300.0))
_add("queries that nearly overflow", "overflow, half precision", _overflowing(60.0))
for _name, _names in (
    ("bert, eager attention", ("query", "key")),
    ("gpt2, eager attention", ("c_attn",)),
    ("llama", ("q_proj", "k_proj")),
):

    def _large(name: str = _name, names: tuple[str, ...] = _names) -> Program:
        make, inputs = TRANSFORMERS[name]
        return inference(with_large_queries(make(), 3e3, names), inputs(), dtype=_HALF)

    _add(f"{_name}, queries that overflow", "overflow, half precision", _large)


# -------------------------------------------------------------------------------------------------------- own modules


class Steps(nn.Module):
    """A recurrent network written out: 200 steps of tanh."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(32, width), nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for i in range(x.shape[1]):
            h = self.cell(x[:, i], h)
        return self.head(h)


class Recurrent(nn.Module):
    """An embedding, a recurrent layer, and a head."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(VOCABULARY, 32), layer(32, 64, batch_first=True)
        self.head = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(x))[0][:, -1])


_add("rnn, 200 steps", "recurrent", lambda: inference(Steps(), {"x": torch.randn(4, 200, 32)}))
_add("rnn, 200 steps, training", "recurrent, training", lambda: training(Steps(), {"x": torch.randn(4, 200, 32)}))


def _tracing_layers(program: Program) -> Program:
    """Dynamo breaks the graph at recurrent layers, unless it is told not to."""

    def step(function: Callable[..., object]) -> object:
        with torch._dynamo.config.patch(allow_rnn=True):
            return program.step(function)

    return dataclasses.replace(program, step=step)


for _name, _layer in (("lstm", nn.LSTM), ("gru", nn.GRU)):

    def _recurrent(layer: Callable[..., nn.Module] = _layer, way: Callable[..., Program] = inference) -> Program:
        length = 200 if (layer, way) == (nn.LSTM, inference) else 50
        return _tracing_layers(way(Recurrent(layer), {"x": torch.randint(VOCABULARY, (4, length))}))

    _add(f"{_name}", "recurrent", _recurrent)
_add("lstm, training", "recurrent, training", lambda: _recurrent(nn.LSTM, training))


class ConvUNet(nn.Module):
    """A segmentation network with two levels; ``norm`` makes its normalizations."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 24) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                norm(after),
                nn.LeakyReLU(0.1),
                nn.Conv2d(after, after, 3, padding=1),
            )

        self.down1, self.down2, self.middle = block(3, width), block(width, 2 * width), block(2 * width, 2 * width)
        self.up2, self.up1 = block(4 * width, width), block(2 * width, width)
        self.end = nn.Conv2d(width, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        h = self.middle(F.avg_pool2d(second, 2))
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2.0, mode="bilinear"), second], 1))
        return self.end(self.up1(torch.cat([F.interpolate(h, scale_factor=2.0), first], 1)))


_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "GroupNorm": lambda n: nn.GroupNorm(4, n),
    "InstanceNorm": lambda n: nn.InstanceNorm2d(n, affine=True),
    "BatchNorm": nn.BatchNorm2d,
}
for _name, _norm in _NORMS.items():

    def _unet(
        norm: Callable[[int], nn.Module] = _norm, way: Callable[..., Program] = inference, **settings: object
    ) -> Program:
        return way(ConvUNet(norm), {"x": torch.randn(BATCH, 3, 48, 48)}, **settings)

    _add(f"unet, {_name}", "convolutional", _unet)
_add("unet, GroupNorm, training", "convolutional, training", lambda: _unet(_NORMS["GroupNorm"], training))
_add("unet, BatchNorm, training", "convolutional, training", lambda: _unet(_NORMS["BatchNorm"], training))
_add("unet, float16", "half precision", lambda: _unet(_NORMS["GroupNorm"], dtype=_HALF))


def _noise(way: Callable[..., Program], **settings: object) -> Program:
    feeds = {
        "sample": torch.randn(BATCH, 4, 32, 32),
        "timestep": torch.randint(1000, (BATCH,)),
        "context": torch.randn(BATCH, 16, 16),
    }
    return way(UNet(True), feeds, **settings)


_add("diffusion", "convolutional", lambda: _noise(inference))
_add("diffusion, training", "convolutional, training", lambda: _noise(training))
_add("diffusion, autocast", "half precision", lambda: _noise(inference, autocast=_BRAIN))


class Recommender(nn.Module):
    """Tables of categories, sums over histories, products of all pairs, and a perceptron, as in DLRM."""

    def __init__(self, tables: int = 8, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5000, width) for _ in range(tables))
        self.history = nn.EmbeddingBag(5000, width, mode="mean")
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width))
        pairs = (tables + 2) * (tables + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        rows = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, self.history(seen), *rows], 1)
        products = features @ features.transpose(1, 2)
        first, second = torch.triu_indices(features.shape[1], features.shape[1], 1)
        return torch.sigmoid(self.top(torch.cat([bottom, products[:, first, second]], 1)))


def _recommendation(way: Callable[..., Program]) -> Program:
    feeds = {
        "dense": torch.rand(256, 13).log1p(),
        "sparse": torch.randint(5000, (256, 8)),
        "seen": torch.randint(5000, (256, 20)),
    }
    return way(Recommender(), feeds)


_add("recommendation", "embeddings", lambda: _recommendation(inference))
_add("recommendation, training", "embeddings, training", lambda: _recommendation(training))


class Routed(nn.Module):
    """Sums at repeated indices, a sort, and a choice of the largest: message passing on a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(64, 64), nn.GRUCell(64, 64)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            sums = torch.zeros_like(x).index_add(0, edges[1], F.gelu(self.message(x[edges[0]])))
            x = self.update(sums, x)
        scores, order = x.norm(dim=1).topk(20)
        return (x[order] * scores[:, None]).logsumexp(0)


def _graph(way: Callable[..., Program]) -> Program:
    return way(Routed(), {"x": torch.randn(200, 64), "edges": torch.randint(200, (2, 1500))})


_add("message passing", "embeddings", lambda: _graph(inference))
_add("message passing, training", "embeddings, training", lambda: _graph(training))


class Broken(nn.Module):
    """Graph breaks between blocks, with a view that crosses one and is changed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Attention(), Attention(), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        h = self.second(h)
        if h.sum() > -1e9:  # data decides
            h = h * 1.5
        view = h[:, :4]
        torch._dynamo.graph_break()
        view.mul_(0.5)
        return self.third(h)


_add("graph breaks", "control flow", lambda: inference(Broken(), {"x": torch.randn(BATCH, 32, 128)}))
_add("graph breaks, training", "control flow, training", lambda: training(Broken(), {"x": torch.randn(BATCH, 32, 128)}))


def _dynamic(program: Program) -> Program:
    return dataclasses.replace(program, dynamic=True)


def _sizes(name: str) -> Callable[[], Program]:
    def build() -> Program:
        feeds = [tokens(2, 40), tokens(3, 56)]
        return _dynamic(inference(TRANSFORMERS[name][0](), *feeds))

    return build


for _name in ("bert", "llama"):
    _add(f"{_name}, dynamic sizes", "dynamic", _sizes(_name))
_add(
    "unet, dynamic sizes",
    "dynamic",
    lambda: _dynamic(
        inference(ConvUNet(_NORMS["GroupNorm"]), {"x": torch.randn(1, 3, 32, 48)}, {"x": torch.randn(2, 3, 48, 40)})
    ),
)


def _decoding() -> Program:
    """Prompts, then tokens one by one, with a static cache."""
    config = configured("llama", use_cache=True)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    prompt = torch.randint(3, VOCABULARY, (1, 24))

    def step(function: Callable[..., object]) -> object:
        cache = tf.StaticCache(config=config, max_cache_len=64)
        ids, positions = prompt, torch.arange(24)
        with torch.no_grad():
            for i in range(3):
                out: Any = function(input_ids=ids, past_key_values=cache, cache_position=positions, use_cache=True)
                ids, positions = out.logits[:, -1:].argmax(-1), torch.tensor([24 + i])
        return ids

    return Program(model, step)


_add("llama, static cache", "decoding", _decoding)


def _optimizer() -> Program:
    """A step of AdamW on the gradients of a small model; the parameters change in place."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)

    def step(function: Callable[..., object]) -> object:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        return function()

    return Program(lambda: optimizer.step(), step)


_add("AdamW", "training", _optimizer)


# --------------------------------------------------------------------------------------------------- quantized models


class GatedBlock(nn.Module):
    """The feed-forward block of Llama."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(width), nn.Linear(width, 256), nn.Linear(width, 256)
        self.down = nn.Linear(256, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class SmallConvolutional(nn.Module):
    """Convolutions with residual additions, for static quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.depthwise, self.pointwise = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.start(x))
        h = h + torch.relu(self.pointwise(torch.relu(self.depthwise(h))))
        return self.head(h.mean((2, 3)))


def _rows() -> torch.Tensor:
    return torch.randn(64, 128)


def by_torchao(config: Callable[[], Any]) -> Callable[[], Program]:
    def build() -> Program:
        import torchao.quantization as ao  # slow to import

        model = nn.Sequential(*[GatedBlock() for _ in range(3)]).eval()
        ao.quantize_(model, config())
        return inference(_Keyword(model), {"x": _rows()})

    return build


def by_pt2e(make: Callable[[], nn.Module], example: Callable[[], torch.Tensor], is_dynamic: bool = False) -> Program:
    """With the operators ``quantized_decomposed``."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    x = example()
    model = prepare_pt2e(
        torch.export.export(make().eval(), (x,)).module(), x86.X86InductorQuantizer().set_global(config)
    )
    model(x)
    module = convert_pt2e(model)

    def step(function: Callable[..., object]) -> object:
        with torch.no_grad():
            return function(x)

    return Program(module, step)


class FakeQuantized(nn.Module):
    """Quantizes and dequantizes activations and weights, as QDQ models and quantization-aware training do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.03, 3, -128, 127)
        scales = self.up.weight.detach().abs().amax(1) / 127
        zeros = torch.zeros(256, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.up.weight, scales, zeros, 0, -128, 127)
        h = torch.relu(F.linear(x, weight, self.up.bias))
        return self.down(torch.fake_quantize_per_tensor_affine(h, 0.02, 0, 0, 255))


class WrittenOut(nn.Module):
    """A QDQ model of rounding, clamping and casts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(128, 128), nn.LayerNorm(128)
        self.register_buffer("weight", torch.randint(-128, 128, (128, 128), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(128) * 0.01 + 0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layer(x))
        scale = h.abs().amax(-1, keepdim=True) / 127
        whole = (h / scale).round().clamp(-128, 127).to(torch.int8)
        return (whole.float() * scale) @ (self.weight.float() * self.scales).t()


def _ao() -> Any:
    import torchao.quantization as ao

    return ao


def _per_group() -> Any:
    from torchao.quantization.granularity import PerGroup

    return PerGroup(32)


_TORCHAO: dict[str, Callable[[], Any]] = {
    "int8 weights": lambda: _ao().Int8WeightOnlyConfig(),
    "int4 weights": lambda: _ao().IntxWeightOnlyConfig(torch.int4, _per_group()),
    "int8": lambda: _ao().Int8DynamicActivationInt8WeightConfig(),
    "int4": lambda: _ao().Int8DynamicActivationIntxWeightConfig(torch.int4, _per_group()),
}
for _name, _config in _TORCHAO.items():
    _add(f"torchao, {_name}", "quantized", by_torchao(_config))
_add("pt2e, int8", "quantized", lambda: by_pt2e(lambda: nn.Sequential(GatedBlock(), GatedBlock()), _rows))
_add("pt2e, dynamic", "quantized", lambda: by_pt2e(lambda: nn.Sequential(GatedBlock(), GatedBlock()), _rows, True))
_add("pt2e, convolutions", "quantized", lambda: by_pt2e(SmallConvolutional, lambda: torch.randn(4, 3, 32, 32)))
_add("QDQ", "quantized", lambda: inference(FakeQuantized(), {"x": _rows()}))
_add("QDQ, training", "quantized, training", lambda: training(FakeQuantized(), {"x": _rows()}))
_add("QDQ, written out", "quantized", lambda: inference(WrittenOut(), {"x": _rows()}))
