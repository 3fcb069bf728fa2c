"""Large hand-written samples, for entries of the operator database that ``large_samples`` cannot enlarge well.

Examples are repeated indices and invertible matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.testing._internal.opinfo.core import SampleInput

INDEX_VALUES = 97
"""How many different values the indices have that are made to repeat themselves."""

HandWritten = Callable[[Callable[..., torch.Tensor]], list[SampleInput]]


def _indices(*shape: int, high: int = INDEX_VALUES) -> torch.Tensor:
    return torch.randint(0, high, shape)


def _pooled(values: torch.Tensor, dims: int) -> SampleInput:
    """The arguments of max_unpool: maxima and where they were."""
    maxima, indices = getattr(torch.nn.functional, f"max_pool{dims}d")(values.detach(), 2, return_indices=True)
    kwargs = {"kernel_size": 2, "stride": 2, "padding": 0}
    return SampleInput(maxima.requires_grad_(values.requires_grad), args=(indices,), kwargs=kwargs)


def _regular(matrices: torch.Tensor) -> torch.Tensor:
    """The matrices with a large diagonal: their inverses are well conditioned."""
    result = matrices.detach() + 8 * torch.eye(matrices.shape[-1])
    return result.requires_grad_(matrices.requires_grad)


def _factored(matrices: torch.Tensor) -> SampleInput:
    """The arguments of lu_unpack."""
    factors, pivots = torch.linalg.lu_factor(matrices.detach())
    return SampleInput(factors.requires_grad_(matrices.requires_grad), args=(pivots,))


HAND_WRITTEN: dict[str, HandWritten] = {
    "nn.functional.embedding": lambda make: [SampleInput(make(97, 128), args=(_indices(16, 1024),))],
    "nn.functional.embedding_bag": lambda make: [
        SampleInput(make(97, 128), args=(_indices(512, 32),), kwargs={"mode": "sum"}),
        SampleInput(make(10_000, 128), args=(_indices(512, 32),), kwargs={"mode": "mean"}),
    ],
    "index_add": lambda make: [
        SampleInput(make(97, 256), args=(0, _indices(8192), make(8192, 256))),
        SampleInput(make(256, 97), args=(1, _indices(8192), make(256, 8192)), kwargs={"alpha": -1}),
    ],
    "index_put": lambda make: [
        SampleInput(make(97, 256), args=((_indices(8192),), make(8192, 256)), kwargs={"accumulate": True}),
        SampleInput(make(8192, 256), args=((torch.randperm(8192),), make(8192, 256)), kwargs={"accumulate": False}),
    ],
    "scatter_add": lambda make: [SampleInput(make(97, 256), args=(0, _indices(8192, 256), make(8192, 256)))],
    "scatter": lambda make: [
        SampleInput(make(256, 8192), args=(1, torch.rand(256, 8192).argsort(1), make(256, 8192))),
        SampleInput(make(97, 256), args=(0, _indices(8192, 256), make(8192, 256)), kwargs={"reduce": "add"}),
        SampleInput(make(97, 256), args=(0, _indices(8192, 256), make(8192, 256)), kwargs={"reduce": "multiply"}),
    ],
    "gather": lambda make: [SampleInput(make(97, 256), args=(0, _indices(8192, 256)))],
    "take": lambda make: [SampleInput(make(97, 256), args=(_indices(2_000_000),))],
    "put": lambda make: [
        SampleInput(make(97, 256), args=(_indices(2_000_000), make(2_000_000)), kwargs={"accumulate": True})
    ],
    "arange": lambda make: [SampleInput(-3, args=(1_500_000, 1), kwargs={"dtype": torch.float32})],
    "bmm.triton_optimized": lambda make: [SampleInput(make(64, 128, 128), args=(make(64, 128, 128),))],
    "broadcast_tensors": lambda make: [SampleInput(make(1, 1024), args=(make(1024, 1), make(2, 1, 1)))],
    "linalg.lu": lambda make: [SampleInput(make(256, 64, 64))],
    "linalg.svd": lambda make: [SampleInput(make(256, 64, 64))],
    "linspace": lambda make: [SampleInput(-3.0, args=(4.0, 1_500_000))],
    "linspace.tensor_overload": lambda make: [SampleInput(torch.tensor(-3.0), args=(4.0, 1_500_000))],
    "logspace": lambda make: [SampleInput(-3.0, args=(4.0, 1_500_000, 2.0))],
    "logspace.tensor_overload": lambda make: [SampleInput(torch.tensor(-3.0), args=(4.0, 1_500_000, 2.0))],
    "linalg.lu_factor": lambda make: [SampleInput(make(256, 64, 64))],
    "linalg.lu_factor_ex": lambda make: [SampleInput(make(256, 64, 64))],
    "linalg.vector_norm": lambda make: [
        SampleInput(make(4096, 256), args=(2,), kwargs={"dim": 1}),
        SampleInput(make(4096, 256)),
    ],
    "nn.functional.multilabel_margin_loss": lambda make: [  # compares each class with each other
        SampleInput(make(256, 256), args=(torch.cat([_indices(256, 3), torch.full((256, 253), -1)], 1),))
    ],
    "nn.functional.unfold": lambda make: [SampleInput(make(4, 8, 128, 128), args=(3,))],
    "lu_unpack": lambda make: [_factored(make(256, 64, 64))],
    "lu": lambda make: [SampleInput(make(256, 64, 64), args=(True, False))],
    "index_select": lambda make: [SampleInput(make(97, 256), args=(0, _indices(8192)))],
    "searchsorted": lambda make: [SampleInput(make(1000).detach().sort().values, args=(make(1_500_000),))],
    "svd": lambda make: [SampleInput(make(256, 64, 64))],
    "unique": lambda make: [SampleInput((make(1_500_000).detach() * 100).round())],
}
"""Samples for entries that do not grow by themselves, or whose own samples repeat no index."""
for _name in ("inv", "inv_ex", "det", "slogdet", "pinv", "cond"):
    HAND_WRITTEN[f"linalg.{_name}"] = lambda make: [SampleInput(_regular(make(256, 64, 64)))]
for _name in ("logdet", "pinverse"):
    HAND_WRITTEN[_name] = lambda make: [SampleInput(_regular(make(256, 64, 64)))]
for _name in ("solve", "solve_ex"):
    HAND_WRITTEN[f"linalg.{_name}"] = lambda make: [SampleInput(_regular(make(256, 64, 64)), args=(make(256, 64, 32),))]
for _dims, _shape in ((1, (64, 32, 2048)), (2, (4, 64, 128, 128)), (3, (4, 8, 32, 64, 64))):
    for _variant in ("", ".grad"):
        HAND_WRITTEN[f"nn.functional.max_unpool{_dims}d{_variant}"] = lambda make, dims=_dims, shape=_shape: [  # type: ignore[misc]
            _pooled(make(*shape), dims)
        ]
for _reduce in ("sum", "mean", "amax", "amin", "prod"):
    HAND_WRITTEN[f"scatter_reduce.{_reduce}"] = lambda make, reduce=_reduce: [  # type: ignore[misc]
        SampleInput(make(97, 256), args=(0, _indices(8192, 256), make(8192, 256), reduce)),
        SampleInput(
            make(97, 256), args=(0, _indices(8192, 256), make(8192, 256), reduce), kwargs={"include_self": False}
        ),
    ]
for _reduce in ("mean", "amax", "amin", "prod"):
    HAND_WRITTEN[f"index_reduce.{_reduce}"] = lambda make, reduce=_reduce: [  # type: ignore[misc]
        SampleInput(make(97, 256), args=(0, _indices(8192), make(8192, 256), reduce))
    ]
