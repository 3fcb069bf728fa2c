"""What is measured, as the command line says it and as it goes to the processes. Imports no PyTorch."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.suggestions import unknown_name
from .models import MODELS

MODES = ("inference", "train", "decode")
CACHES = ("dynamic", "static")

EAGER = "eager"
DYNAMO_EAGER = "dynamo_eager"
EXPORT = "onnx_export"
OWN_NAMES = {
    EAGER: "PyTorch, not compiled",
    DYNAMO_EAGER: 'torch.compile(backend="eager"): Dynamo alone',
    EXPORT: "torch.onnx.export(dynamo=True) and an ONNX Runtime session; inference only",
}
"""What ``--backends`` takes besides the backends that are registered with PyTorch."""

TORCH_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""What may follow the name of a registered backend, as in ``onnxrt:max-autotune``."""

OPTIMIZERS = ("sgd", "adamw")

OURS = ("onnxrt", "onnx_debug", "fx_debug")
"""The backends that take our options."""


class UsageError(ValueError):
    """The command was asked for something that is not there; the message says what there is."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, and what is done with it.

    Attributes:
        model: a name of ``MODELS``, ``file.py:function`` or ``package.module:function``.
        mode: of ``MODES``.
        dynamic: whether several sizes take turns, compiled with ``dynamic=True``.
        cache: of ``CACHES``, with mode ``decode``.
        optimizer: of ``OPTIMIZERS``, with mode ``train``: its step follows, compiled too; ``""`` if none.
        beams: of a beam search, with mode ``decode``; 1 takes the likeliest token.
        tokens: how many are generated, with mode ``decode``.
        threads: of PyTorch, and by it of each session; ``None``: PyTorch's own choice.
        options: of our backends, as text by name.
        after: a MODEL whose file or module is loaded before, as it may register backends; ``""`` if none is.
    """

    model: str
    mode: str = "inference"
    dynamic: bool = False
    cache: str = ""
    optimizer: str = ""
    beams: int = 1
    tokens: int = 32
    threads: int | None = None
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    after: str = ""

    @property
    def label(self) -> str:
        """The case in words."""
        words = {"train": ["training step"], "decode": [f"decode, {self.cache} cache"]}.get(self.mode, [self.mode])
        words += [self.optimizer] * bool(self.optimizer)
        words += [f"{self.beams} beams"] * (self.beams > 1) + ["dynamic"] * self.dynamic
        return f"{self.model}: {', '.join(words)}"


def check_model(name: str) -> None:
    """Checks a MODEL as far as that can be done without running it.

    Raises:
        UsageError: no such name (with those that are alike), no such file, or a package that is missing.
    """
    if ":" in name:
        check_place(name, "MODEL")
        return
    if name not in MODELS:
        hint = " Or file.py:function, or package.module:function."
        raise UsageError(unknown_name("model", name, list(MODELS)) + hint)
    if MODELS[name].needs_transformers and importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"model {name!r} needs transformers, which is not installed: pip install 'transformers>=5'. Without it: "
            + ", ".join(other for other, entry in MODELS.items() if not entry.needs_transformers)
        )


def check_place(text: str, what: str) -> tuple[str, str]:
    """The file or module, and the function in it, of ``file.py:function`` or ``package.module:function``.

    Raises:
        UsageError: it is neither, or the file is not there.
    """
    place, _, function = text.rpartition(":")
    if not place or not function.isidentifier():
        raise UsageError(f"{what} {text!r}: expected file.py:function or package.module:function")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"{what} {text!r}: there is no file {place}")
    elif not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{what} {text!r}: {place!r} is neither a file that ends in .py nor the name of a module")
    return place, function


def parted(backend: str) -> tuple[str, str]:
    """The name of a backend, and the mode that follows it, if one does."""
    name, _, mode = backend.rpartition(":")
    return (name, mode) if name and mode in TORCH_MODES else (backend, "")


def check_backends(names: Sequence[str]) -> None:
    """Checks what of ``--backends`` can be checked without PyTorch: that there are some, and each once.

    Raises:
        UsageError: none, one twice, or a place that is none.
    """
    if not names or not all(names):
        raise UsageError("--backends takes names with commas between them: eager,inductor,onnxrt")
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise UsageError(f"--backends has {twice[0]!r} twice")
    for name in names:
        if ":" in parted(name)[0]:
            check_place(name, "backend")
