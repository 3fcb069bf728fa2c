"""What to measure (``Case``), and the checks of its arguments that need no PyTorch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.suggestions import unknown_name
from .models import MODELS, PUBLISHED, entry

CACHES = ("dynamic", "static")

EAGER = "eager"
DYNAMO_EAGER = "dynamo_eager"
EXPORT = "onnx_export"
OWN_NAMES = {
    EAGER: "PyTorch, not compiled",
    DYNAMO_EAGER: 'torch.compile(backend="eager"): Dynamo alone',
    EXPORT: "torch.onnx.export(dynamo=True) and an ONNX Runtime session; inference only",
}
"""The names ``--backends`` takes besides those of backends registered with PyTorch."""

TORCH_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of ``torch.compile`` that may follow a backend's name, as in ``onnxrt:max-autotune``."""

SCHEMES = {
    "int8-weights": "Int8WeightOnlyConfig",
    "int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
    "int4-weights": "IntxWeightOnlyConfig",
    "int4-dynamic": "Int8DynamicActivationIntxWeightConfig",
}
"""What ``--quantize`` takes, and the configuration of torchao; those of 4 bits have groups of 32."""

DTYPES = ("float32", "float16", "bfloat16")

OURS = ("onnxrt", "onnx_debug", "fx_debug")
"""The backends that take our options."""


class UsageError(ValueError):
    """The user named a model, backend or option that does not exist, or a combination that is not possible."""

    kind = "usage"  # of the ``WorkerError``


class ModelError(UsageError):
    """The user's module or model raised; the message has the exception and the user's line."""

    kind = "failed"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how to run it."""

    model: str  # a name in ``MODELS``, ``file.py:function`` or ``package.module:function``
    mode: str = "inference"  # or ``train`` or ``decode``
    dynamic: bool = False  # whether to compile with ``dynamic=True`` and run several sizes
    cache: str = ""  # for ``decode``, one of ``CACHES``
    tokens: int = 32  # for ``decode``, how many to generate
    quantize: str = ""  # one of ``SCHEMES`` or none
    published: bool = False  # whether a model of the list has the sizes of a published checkpoint
    device: str = "cpu"  # of the model and its inputs, as PyTorch names it
    dtype: str = DTYPES[0]  # of their floating-point tensors
    threads: int | None = None  # of PyTorch and of each session; ``None`` for PyTorch's default
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of our backends, as text

    @property
    def label(self) -> str:
        mode = {"train": "training step", "decode": f"decode, {self.cache} cache"}.get(self.mode, self.mode)
        place = "" if self.device == "cpu" else f"on {self.device}", "" if self.dtype == DTYPES[0] else self.dtype
        words = "published" * self.published, mode, "dynamic" * self.dynamic, self.quantize, *place
        return f"{self.model}: {', '.join(filter(None, words))}"


def check_model(name: str, *, published: bool = False) -> None:
    """Checks a MODEL without running it.

    Raises:
        UsageError: unknown name (with near matches), no such file, a missing package, or with ``published`` a model
            for which the list has no checkpoint.
    """
    if published and name not in PUBLISHED and (":" in name or name in MODELS):
        raise UsageError(f"--published: {name!r} has one size; expected one of {', '.join(PUBLISHED)}")
    if ":" in name:
        check_place(name, "MODEL")
        return
    if name not in MODELS:
        if name.endswith(".py"):
            raise UsageError(f"MODEL {name!r}: expected file.py:function, which returns (model, inputs)")
        hint = " Or file.py:function, or package.module:function."
        raise UsageError(unknown_name("model", name, list(MODELS)) + hint)
    if entry(name, published=published).needs_transformers and importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"model {name!r} needs transformers, which is not installed: pip install 'transformers>=5'. Without it: "
            + ", ".join(other for other, model in MODELS.items() if not model.needs_transformers)
        )


def check_place(text: str, what: str) -> tuple[str, str]:
    """Splits ``file.py:function`` or ``package.module:function`` at the colon.

    Raises:
        UsageError: it has another form, or the file does not exist. ``what`` names the argument in the message.
    """
    place, _, function = text.rpartition(":")
    if not place or not function.isidentifier():
        raise UsageError(f"{what} {text!r}: expected file.py:function or package.module:function")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"{what} {text!r}: there is no file {place}")
    elif not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{what} {text!r}: {place!r} is neither a .py file nor a module name")
    return place, function


PROVIDER = "ExecutionProvider"
"""What the name of a provider ends with; it may follow the name of one of our backends."""


def split_mode(backend: str) -> tuple[str, str]:
    """A backend's name, and its mode of ``torch.compile`` or its execution provider; ``""`` if it has none."""
    name, _, mode = backend.rpartition(":")
    is_known = mode in TORCH_MODES or (name in OURS and mode.endswith(PROVIDER))
    return (name, mode) if name and is_known else (backend, "")


def check_backends(names: Sequence[str]) -> None:
    """Checks ``--backends`` without PyTorch.

    Raises:
        UsageError: an empty or repeated name, or a file that does not exist.
    """
    if not names or not all(names):
        raise UsageError("--backends takes comma-separated names: eager,inductor,onnxrt")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--backends has {name!r} twice")
        if ":" in split_mode(name)[0]:
            check_place(name, "backend")
