"""Every layer of ``torch.nn`` at a real size, and functions whose gradients add at repeated indices.

An entry's name begins with its class, ``Conv2d depthwise``; ``missing`` returns the classes without an entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

NOT_LAYERS = {
    "Container": "holds others",
    "LinearCrossEntropyOptions": "holds settings",
    "Module": "the base class",
    "ModuleDict": "holds others",
    "ModuleList": "holds others",
    "ParameterDict": "holds parameters",
    "ParameterList": "holds parameters",
    "RNNBase": "the base class of RNN, LSTM and GRU",
    "RNNCellBase": "the base class of the cells",
    "Sequential": "holds others",
    "SyncBatchNorm": "needs CUDA and a process group",
}
"""Public classes of ``torch.nn.modules`` without an entry, and why."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is compiled, and its inputs. The first ``differentiable`` of them that are floating-point (``None``: all)
    are asked for gradients."""

    function: Callable[..., object]
    inputs: tuple[object, ...]
    differentiable: int | None = None


def missing() -> list[str]:
    """The layers of ``torch.nn.modules`` that have no entry in the table."""
    classes = {name for name in dir(nn.modules) if isinstance(getattr(nn.modules, name), type)}
    return sorted(classes - set(NOT_LAYERS) - {name.split()[0] for name in LAYERS})


Build = Callable[[], Layer]
LAYERS: dict[str, Build] = {}

SEQUENCE = (4, 2048, 128)  # batch, length, features: 1,048,576 elements, as all of these
LINE = (8, 32, 4096)
IMAGE = (4, 16, 128, 128)
VOLUME = (2, 8, 32, 64, 32)
ROWS = (4096, 256)


def _layer(name: str, make: Callable[[], nn.Module], *shape: int) -> None:
    """An entry for a layer that takes one tensor of random numbers."""
    LAYERS[name] = lambda: Layer(make(), (torch.randn(shape),))


def _entry(name: str, make: Callable[[], tuple]) -> None:
    """An entry for a layer and its inputs."""
    LAYERS[name] = lambda: Layer(*make())


_layer("Identity", nn.Identity, *ROWS)
_layer("Linear", lambda: nn.Linear(256, 256), *ROWS)
_layer("Linear without bias", lambda: nn.Linear(128, 256, bias=False), *SEQUENCE)
_layer("LazyLinear", lambda: _materialized(nn.LazyLinear(128), ROWS), *ROWS)
_entry("Bilinear", lambda: (nn.Bilinear(32, 32, 16), (torch.randn(32768, 32), torch.randn(32768, 32))))


def _materialized(layer: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    layer(torch.zeros(shape))
    return layer


for _dims, _shape in ((1, LINE), (2, IMAGE), (3, VOLUME)):
    _channels = _shape[1]
    _conv, _transposed = getattr(nn, f"Conv{_dims}d"), getattr(nn, f"ConvTranspose{_dims}d")
    for _name, _make in {
        "": lambda c=_channels, conv=_conv: conv(c, c, 3, padding=1),
        " strided dilated": lambda c=_channels, conv=_conv: conv(c, c, 3, stride=2, dilation=2, bias=False),
        " depthwise": lambda c=_channels, conv=_conv: conv(c, c, 3, padding=1, groups=c),
        " grouped": lambda c=_channels, conv=_conv: conv(c, 2 * c, 3, groups=4),
        " pointwise": lambda c=_channels, conv=_conv: conv(c, 2 * c, 1),
        " padding same reflect": lambda c=_channels, conv=_conv: conv(
            c, c, 3, padding="same", padding_mode="reflect" if conv is not nn.Conv3d else "circular"
        ),
    }.items():
        _layer(f"Conv{_dims}d{_name}", _make, *_shape)
    for _name, _make in {
        "": lambda c=_channels, conv=_transposed: conv(c, c, 3, padding=1),
        " strided": lambda c=_channels, conv=_transposed: conv(c, c // 2, 4, stride=2, padding=1, output_padding=1),
        " depthwise": lambda c=_channels, conv=_transposed: conv(c, c, 3, stride=2, groups=c),
    }.items():
        _layer(f"ConvTranspose{_dims}d{_name}", _make, *_shape)
    for _name in (f"LazyConv{_dims}d", f"LazyConvTranspose{_dims}d"):
        _layer(_name, lambda n=_name, c=_channels, s=_shape: _materialized(getattr(nn, n)(c, 3), s), *_shape)
    for _name, _make in {
        f"MaxPool{_dims}d": lambda d=_dims: getattr(nn, f"MaxPool{d}d")(2),
        f"MaxPool{_dims}d overlapping": lambda d=_dims: getattr(nn, f"MaxPool{d}d")(3, stride=1, padding=1),
        f"MaxPool{_dims}d dilated": lambda d=_dims: getattr(nn, f"MaxPool{d}d")(
            3, stride=2, dilation=2, ceil_mode=True
        ),
        f"AvgPool{_dims}d": lambda d=_dims: getattr(nn, f"AvgPool{d}d")(2),
        f"AvgPool{_dims}d overlapping": lambda d=_dims: getattr(nn, f"AvgPool{d}d")(3, stride=2, padding=1),
        f"LPPool{_dims}d": lambda d=_dims: getattr(nn, f"LPPool{d}d")(2, 3, stride=2),
        f"AdaptiveAvgPool{_dims}d": lambda d=_dims: getattr(nn, f"AdaptiveAvgPool{d}d")(7),
        f"AdaptiveAvgPool{_dims}d to one": lambda d=_dims: getattr(nn, f"AdaptiveAvgPool{d}d")(1),
        f"AdaptiveMaxPool{_dims}d": lambda d=_dims: getattr(nn, f"AdaptiveMaxPool{d}d")(7),
        f"BatchNorm{_dims}d": lambda d=_dims, c=_channels: getattr(nn, f"BatchNorm{d}d")(c),
        f"BatchNorm{_dims}d eval": lambda d=_dims, c=_channels: getattr(nn, f"BatchNorm{d}d")(c).eval(),
        f"InstanceNorm{_dims}d": lambda d=_dims, c=_channels: getattr(nn, f"InstanceNorm{d}d")(c, affine=True),
        f"LazyBatchNorm{_dims}d": lambda d=_dims, s=_shape: _materialized(getattr(nn, f"LazyBatchNorm{d}d")(), s),
        f"LazyInstanceNorm{_dims}d": lambda d=_dims, s=_shape: _materialized(
            getattr(nn, f"LazyInstanceNorm{d}d")(affine=True), s
        ),
        f"ConstantPad{_dims}d": lambda d=_dims: getattr(nn, f"ConstantPad{d}d")(2, 0.5),
        f"ZeroPad{_dims}d": lambda d=_dims: getattr(nn, f"ZeroPad{d}d")(3),
        f"ReflectionPad{_dims}d": lambda d=_dims: getattr(nn, f"ReflectionPad{d}d")(3),
        f"ReplicationPad{_dims}d": lambda d=_dims: getattr(nn, f"ReplicationPad{d}d")(3),
        f"CircularPad{_dims}d": lambda d=_dims: getattr(nn, f"CircularPad{d}d")(3),
        f"Dropout{_dims}d eval": lambda d=_dims: getattr(nn, f"Dropout{d}d")(0.5).eval(),
        f"Dropout{_dims}d p=0": lambda d=_dims: getattr(nn, f"Dropout{d}d")(0.0),
    }.items():
        _layer(_name, _make, *_shape)
    _entry(
        f"MaxUnpool{_dims}d",
        lambda d=_dims, s=_shape: (
            getattr(nn, f"MaxUnpool{d}d")(2),
            getattr(F, f"max_pool{d}d")(torch.randn(s), 2, return_indices=True),
        ),
    )

_layer("MaxPool2d resnet", lambda: nn.MaxPool2d(3, stride=2, padding=1), 8, 64, 56, 56)
_layer("MaxPool2d with indices", lambda: nn.MaxPool2d(3, stride=2, padding=1, return_indices=True), *IMAGE)
_entry(
    "FractionalMaxPool2d",
    lambda: (nn.FractionalMaxPool2d(3, output_size=64, _random_samples=torch.rand(4, 16, 2)), (torch.randn(IMAGE),)),
)
_entry(
    "FractionalMaxPool3d",
    lambda: (nn.FractionalMaxPool3d(3, output_size=16, _random_samples=torch.rand(2, 8, 3)), (torch.randn(VOLUME),)),
)

for _name, _make in {
    "CELU": nn.CELU,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "GELU tanh": lambda: nn.GELU("tanh"),
    "GLU": nn.GLU,
    "Hardshrink": nn.Hardshrink,
    "Hardsigmoid": nn.Hardsigmoid,
    "Hardswish": nn.Hardswish,
    "Hardtanh": nn.Hardtanh,
    "LeakyReLU": nn.LeakyReLU,
    "LogSigmoid": nn.LogSigmoid,
    "LogSoftmax": lambda: nn.LogSoftmax(-1),
    "LogSoftmax first": lambda: nn.LogSoftmax(0),
    "Mish": nn.Mish,
    "PReLU": nn.PReLU,
    "PReLU channels": lambda: nn.PReLU(ROWS[1]),
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "RReLU eval": lambda: nn.RReLU().eval(),
    "SELU": nn.SELU,
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Softmax": lambda: nn.Softmax(-1),
    "Softmax first": lambda: nn.Softmax(0),
    "Softmin": lambda: nn.Softmin(-1),
    "Softplus": nn.Softplus,
    "Softshrink": nn.Softshrink,
    "Softsign": nn.Softsign,
    "Tanh": nn.Tanh,
    "Tanhshrink": nn.Tanhshrink,
    "Threshold": lambda: nn.Threshold(0.1, 2.0),
    "Dropout eval": lambda: nn.Dropout(0.5).eval(),
    "Dropout p=0": lambda: nn.Dropout(0.0),
    "AlphaDropout eval": lambda: nn.AlphaDropout(0.5).eval(),
    "FeatureAlphaDropout eval": lambda: nn.FeatureAlphaDropout(0.5).eval(),
    "LayerNorm": lambda: nn.LayerNorm(ROWS[1]),
    "RMSNorm": lambda: nn.RMSNorm(ROWS[1]),
    "Unflatten": lambda: nn.Unflatten(1, (16, 16)),
}.items():
    _layer(_name, _make, *ROWS)
for _name, _make in {
    "Softmax2d": nn.Softmax2d,
    "GroupNorm": lambda: nn.GroupNorm(4, 16),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(5),
    "CrossMapLRN2d": lambda: nn.CrossMapLRN2d(5),
    "LayerNorm of images": lambda: nn.LayerNorm(IMAGE[1:]),
    "ChannelShuffle": lambda: nn.ChannelShuffle(4),
    "PixelShuffle": lambda: nn.PixelShuffle(2),
    "PixelUnshuffle": lambda: nn.PixelUnshuffle(2),
    "Flatten": nn.Flatten,
    "Unfold": lambda: nn.Unfold(3, padding=1, stride=2),
    "Unfold overlapping": lambda: nn.Unfold(3),
    "UpsamplingBilinear2d": lambda: nn.UpsamplingBilinear2d(scale_factor=2),
    "UpsamplingNearest2d": lambda: nn.UpsamplingNearest2d(scale_factor=2),
    "Upsample bilinear": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "Upsample bicubic": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "Upsample bicubic aligned": lambda: nn.Upsample(size=(200, 150), mode="bicubic", align_corners=True),
    "Upsample nearest": lambda: nn.Upsample(scale_factor=1.5),
    "Upsample nearest-exact": lambda: nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
}.items():
    _layer(_name, _make, *IMAGE)
_layer("Upsample linear", lambda: nn.Upsample(scale_factor=2, mode="linear"), *LINE)
_layer("Upsample trilinear", lambda: nn.Upsample(scale_factor=1.5, mode="trilinear"), *VOLUME)
_layer("Upsample nearest 3d", lambda: nn.Upsample(scale_factor=2), *VOLUME)
_layer("Upsample smaller", lambda: nn.Upsample(size=50, mode="bilinear"), *IMAGE)
_layer("Fold", lambda: nn.Fold((64, 64), 3, padding=1), 4, 9 * 8, 64 * 64)
_layer("Fold strided", lambda: nn.Fold((128, 128), 2, stride=2), 4, 4 * 16, 64 * 64)

for _name in ("RNN", "LSTM", "GRU"):
    _layer(_name, lambda n=_name: getattr(nn, n)(128, 128, batch_first=True), 1024, 8, 128)
    _layer(f"{_name} bidirectional", lambda n=_name: getattr(nn, n)(64, 64, 2, bidirectional=True), 8, 2048, 64)
_entry("RNNCell", lambda: (nn.RNNCell(256, 256), (torch.randn(ROWS), torch.randn(ROWS))))
_entry("GRUCell", lambda: (nn.GRUCell(256, 256), (torch.randn(ROWS), torch.randn(ROWS))))
_entry("LSTMCell", lambda: (nn.LSTMCell(256, 256), (torch.randn(ROWS), (torch.randn(ROWS), torch.randn(ROWS)))))

# GELU: the gradient of ReLU jumps at zero, and of two million numbers one rounds to its other side now and then.
_TRANSFORMER = {"nhead": 4, "dim_feedforward": 256, "dropout": 0.0, "batch_first": True, "activation": "gelu"}
_TOKENS = (64, 128, 128)
_layer("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(128, **_TRANSFORMER), *_TOKENS)
_layer(
    "TransformerEncoder",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(128, norm_first=True, **_TRANSFORMER), 2),
    *_TOKENS,
)
_entry(
    "TransformerDecoderLayer",
    lambda: (nn.TransformerDecoderLayer(128, **_TRANSFORMER), (torch.randn(_TOKENS), torch.randn(_TOKENS))),
)
_entry(
    "TransformerDecoder",
    lambda: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(128, **_TRANSFORMER), 2),
        (torch.randn(_TOKENS), torch.randn(_TOKENS)),
    ),
)
_entry(
    "Transformer",
    lambda: (
        nn.Transformer(128, num_encoder_layers=1, num_decoder_layers=1, **_TRANSFORMER),
        (torch.randn(_TOKENS), torch.randn(_TOKENS)),
    ),
)
_entry(
    "MultiheadAttention",
    lambda: (nn.MultiheadAttention(128, 4, batch_first=True), (torch.randn(_TOKENS),) * 3),
)


def _ids(*shape: int, high: int = 97) -> torch.Tensor:
    return torch.randint(0, high, shape)


_entry("Embedding", lambda: (nn.Embedding(97, 128), (_ids(16, 512),)))
_entry("Embedding large table", lambda: (nn.Embedding(50_000, 128), (_ids(16, 512, high=50_000),)))
_entry("Embedding padding", lambda: (nn.Embedding(97, 128, padding_idx=0), (_ids(16, 512),)))
_entry(
    "Embedding scaled by frequency",
    lambda: (nn.Embedding(97, 128, scale_grad_by_freq=True), (_ids(16, 512),)),
)
for _mode in ("sum", "mean", "max"):
    _entry(f"EmbeddingBag {_mode}", lambda m=_mode: (nn.EmbeddingBag(97, 128, mode=m), (_ids(512, 32),)))
_entry(
    "EmbeddingBag offsets",
    lambda: (nn.EmbeddingBag(97, 128, mode="sum"), (_ids(16384), torch.arange(0, 16384, 16))),
)

_rows = lambda: torch.randn(ROWS)  # noqa: E731
_signs = lambda *shape: torch.randint(0, 2, shape) * 2.0 - 1  # noqa: E731
for _name, _loss in {
    "L1Loss": lambda: (nn.L1Loss(), (_rows(), _rows())),
    "MSELoss": lambda: (nn.MSELoss(), (_rows(), _rows())),
    "SmoothL1Loss": lambda: (nn.SmoothL1Loss(), (_rows(), _rows())),
    "HuberLoss": lambda: (nn.HuberLoss(), (_rows(), _rows())),
    "BCELoss": lambda: (nn.BCELoss(), (torch.rand(ROWS) * 0.98 + 0.01, torch.rand(ROWS))),
    "BCEWithLogitsLoss": lambda: (nn.BCEWithLogitsLoss(), (_rows(), torch.rand(ROWS))),
    "KLDivLoss": lambda: (nn.KLDivLoss(reduction="batchmean"), (_rows().log_softmax(-1), _rows().softmax(-1))),
    "PoissonNLLLoss": lambda: (nn.PoissonNLLLoss(), (_rows(), torch.rand(ROWS))),
    "GaussianNLLLoss": lambda: (nn.GaussianNLLLoss(), (_rows(), _rows(), torch.rand(ROWS) + 0.1)),
    "SoftMarginLoss": lambda: (nn.SoftMarginLoss(), (_rows(), _signs(*ROWS)), 1),
    "HingeEmbeddingLoss": lambda: (nn.HingeEmbeddingLoss(), (_rows(), _signs(*ROWS))),
    "CosineEmbeddingLoss": lambda: (nn.CosineEmbeddingLoss(), (_rows(), _rows(), _signs(ROWS[0]))),
    "MarginRankingLoss": lambda: (nn.MarginRankingLoss(0.1), (_rows(), _rows(), _signs(*ROWS))),
    "TripletMarginLoss": lambda: (nn.TripletMarginLoss(), (_rows(), _rows(), _rows())),
    "TripletMarginWithDistanceLoss": lambda: (nn.TripletMarginWithDistanceLoss(), (_rows(), _rows(), _rows())),
    "MultiLabelSoftMarginLoss": lambda: (
        nn.MultiLabelSoftMarginLoss(),
        (_rows(), torch.randint(0, 2, ROWS).float()),
    ),
    "MultiLabelMarginLoss": lambda: (
        nn.MultiLabelMarginLoss(),
        # It compares each class with each other: 16,777,216 numbers.
        (torch.randn(256, 256), torch.cat([_ids(256, 3), torch.full((256, 253), -1)], 1)),
    ),
    "MultiMarginLoss": lambda: (nn.MultiMarginLoss(), (_rows(), _ids(ROWS[0]))),
    "CrossEntropyLoss": lambda: (nn.CrossEntropyLoss(), (_rows(), _ids(ROWS[0]))),
    "CrossEntropyLoss weighted": lambda: (
        nn.CrossEntropyLoss(torch.rand(256), ignore_index=3, label_smoothing=0.1),
        (_rows(), _ids(ROWS[0])),
    ),
    "CrossEntropyLoss of images": lambda: (nn.CrossEntropyLoss(), (torch.randn(IMAGE), _ids(4, 128, 128, high=16))),
    "CrossEntropyLoss probabilities": lambda: (nn.CrossEntropyLoss(), (_rows(), _rows().softmax(-1))),
    "NLLLoss": lambda: (nn.NLLLoss(), (_rows().log_softmax(-1), _ids(ROWS[0]))),
    "NLLLoss2d": lambda: (nn.NLLLoss2d(), (torch.randn(IMAGE).log_softmax(1), _ids(4, 128, 128, high=16))),
    "CTCLoss": lambda: (
        nn.CTCLoss(),
        (
            torch.randn(128, 64, 128).log_softmax(-1),
            torch.randint(1, 97, (64, 20)),
            torch.full((64,), 128),
            torch.full((64,), 20),
        ),
    ),
    "AdaptiveLogSoftmaxWithLoss": lambda: (nn.AdaptiveLogSoftmaxWithLoss(256, 1000, [100, 500]), (_rows(), _ids(4096))),
    "LinearCrossEntropyLoss": lambda: (nn.LinearCrossEntropyLoss(256, 500), (_rows(), _ids(4096))),
    "CosineSimilarity": lambda: (nn.CosineSimilarity(), (_rows(), _rows())),
    "PairwiseDistance": lambda: (nn.PairwiseDistance(), (_rows(), _rows())),
}.items():
    _entry(_name, _loss)


def _by_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, x, x.mean(0)) * mask.sum(0)


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    both = torch.cat((angles, angles), -1)
    cos, sin = both.cos().unsqueeze(1), both.sin().unsqueeze(1)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


FUNCTIONS: dict[str, Build] = {
    "bias gelu": lambda: Layer(lambda x, b: F.gelu(x + b), (torch.randn(ROWS), torch.randn(ROWS[1]))),
    "quick gelu": lambda: Layer(lambda x: x * torch.sigmoid(1.702 * x), (torch.randn(ROWS),)),
    "residual layer norm": lambda: Layer(
        lambda x, y, w: F.layer_norm(x + y, ROWS[1:], w, w),
        (torch.randn(ROWS), torch.randn(ROWS), torch.randn(ROWS[1])),
    ),
    "residual rms norm": lambda: Layer(
        lambda x, y, w: F.rms_norm(x + y, ROWS[1:], w), (torch.randn(ROWS), torch.randn(ROWS), torch.randn(ROWS[1]))
    ),
    "rotary embedding": lambda: Layer(_rotated, (torch.randn(4, 8, 512, 64), torch.rand(4, 512, 32)), 1),
    "index": lambda: Layer(lambda x, i: x[i], (torch.randn(97, 256), _ids(8192))),
    "index of two dimensions": lambda: Layer(
        lambda x, i, j: x[i, j], (torch.randn(97, 97, 64), _ids(16384), _ids(16384))
    ),
    "index_put accumulate": lambda: Layer(
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        (torch.zeros(97, 256), _ids(8192), torch.randn(8192, 256)),
    ),
    "index_put accumulate of two dimensions": lambda: Layer(
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True),
        (torch.zeros(97, 97, 64), _ids(16384), _ids(16384), torch.randn(16384, 64)),
    ),
    "index_add": lambda: Layer(
        lambda x, i, v: x.index_add(0, i, v), (torch.zeros(97, 256), _ids(8192), torch.randn(8192, 256))
    ),
    "index_select": lambda: Layer(lambda x, i: x.index_select(0, i), (torch.randn(97, 256), _ids(8192))),
    "gather": lambda: Layer(lambda x, i: x.gather(0, i), (torch.randn(97, 256), _ids(8192, 256))),
    "take": lambda: Layer(torch.take, (torch.randn(97, 256), _ids(2_000_000))),
    "take_along_dim": lambda: Layer(
        lambda x, i: torch.take_along_dim(x, i, 1), (torch.randn(256, 97), _ids(256, 8192))
    ),
    "scatter_add": lambda: Layer(
        lambda x, i, v: x.scatter_add(0, i, v), (torch.zeros(97, 256), _ids(8192, 256), torch.randn(8192, 256))
    ),
    "repeat_interleave": lambda: Layer(
        lambda x, n: x.repeat_interleave(n, 0, output_size=8192),
        (torch.randn(1024, 256), torch.full((1024,), 8)),
    ),
    "unfold overlapping": lambda: Layer(lambda x: x.unfold(1, 64, 8), (torch.randn(256, 4096),)),
    "diagonal": lambda: Layer(lambda x: x.diagonal(0, 1, 2) * 2, (torch.randn(16, 256, 256),)),
    "as_strided overlapping": lambda: Layer(
        lambda x: x.as_strided((4096, 256), (64, 1)) * 2, (torch.randn(4096 * 64 + 256),)
    ),
    "cumsum": lambda: Layer(lambda x: x.cumsum(1), (torch.randn(ROWS),)),
    "cumsum first": lambda: Layer(lambda x: x.cumsum(0), (torch.randn(ROWS),)),
    "sort": lambda: Layer(lambda x: x.sort(1).values, (torch.randn(ROWS),)),
    "topk": lambda: Layer(lambda x: x.topk(8, 1).values, (torch.randn(ROWS),)),
    "max": lambda: Layer(lambda x: x.max(1).values, (torch.randn(ROWS),)),
    "amax": lambda: Layer(lambda x: x.amax(1), (torch.randn(ROWS),)),
    "sum of all": lambda: Layer(torch.sum, (torch.randn(ROWS),)),
    "mean of the first": lambda: Layer(lambda x: x.mean(0), (torch.randn(ROWS),)),
    "norm": lambda: Layer(torch.linalg.vector_norm, (torch.randn(ROWS),)),
    "var": lambda: Layer(lambda x: x.var(0), (torch.randn(ROWS),)),
    "logsumexp": lambda: Layer(lambda x: x.logsumexp(0), (torch.randn(ROWS),)),
    "mask": lambda: Layer(_by_mask, (torch.randn(ROWS), torch.rand(ROWS) > 0.5)),
    "einsum": lambda: Layer(
        lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), (torch.randn(8, 4, 256, 64), torch.randn(8, 4, 256, 64))
    ),
    "attention": lambda: Layer(
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (torch.randn(8, 4, 512, 64),)
    ),
    "attention with mask": lambda: Layer(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (*(torch.randn(8, 4, 512, 64) for _ in range(3)), torch.randn(512, 512)),
    ),
    "grid_sample": lambda: Layer(
        lambda x, g: F.grid_sample(x, g, align_corners=False), (torch.randn(IMAGE), torch.rand(4, 128, 128, 2) * 2 - 1)
    ),
    "embedding of many rows": lambda: Layer(F.embedding, (_ids(64, 512), torch.randn(512, 64))),
    "roll": lambda: Layer(lambda x: x.roll((3, 5), (0, 1)), (torch.randn(ROWS),)),
    "pad and crop": lambda: Layer(lambda x: F.pad(x, (3, -2, 1, 4)), (torch.randn(IMAGE),)),
    "one_hot": lambda: Layer(lambda x, i: x @ F.one_hot(i, 97).float(), (torch.randn(128, 16384), _ids(16384))),
}
"""Functions whose gradients or results are sums over many elements or at repeated indices."""
