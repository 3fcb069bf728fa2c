"""Loads the model and inputs of a case, and finds the backends by name."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..common.strides import element_bytes
from ..common.suggestions import unknown_name
from ..errors import first_line
from ..graphs.locations import is_user_file, short_file
from .case import (
    DYNAMO_EAGER,
    OWN_NAMES,
    SCHEMES,
    Case,
    ModelError,
    UsageError,
    check_place,
    split_mode,
)
from .models import MODELS, entry

SEED = 0


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class LoadedCase:
    """A model, and inputs of one or several sizes."""

    model: torch.nn.Module
    inputs: Sequence[Inputs]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers and inputs."""
        inputs = [tensor for inputs in self.inputs for tensor in inputs.tensors]
        return [*self.model.parameters(), *self.model.buffers(), *inputs]

    def fingerprint(self) -> str:
        """A hash of all weights and inputs. Processes whose results are compared must have the same."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.tensors:
            plain = tensor.detach()
            digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
            if plain.layout is torch.strided and plain.numel():
                digest.update(element_bytes(plain).cpu().numpy())
        return digest.hexdigest()


def seed_everything() -> None:
    """Seeds PyTorch, Python and NumPy, so that each process builds the same model."""
    import numpy

    torch.manual_seed(SEED)
    random.seed(SEED)
    numpy.random.seed(SEED)


@contextlib.contextmanager
def errors_of_user(what: str) -> Iterator[None]:
    """Raises whatever the user's code inside the block raises as a ``ModelError``.

    Args:
        what: the start of the message, ``MODEL 'model.py:make' raised``; the exception and the user's line follow.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script without ``if __name__ == "__main__"`` may call sys.exit
        ours = os.path.dirname(os.path.dirname(__file__))
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
        theirs = [frame for frame in frames if is_user_file(frame.filename)]
        theirs = theirs or [frame for frame in frames[-1:] if not frame.filename.startswith("<")]
        place = f" ({short_file(theirs[-1].filename)}:{theirs[-1].lineno})" if theirs else ""
        text = ": ".join(filter(None, (type(error).__name__, first_line(str(error)))))
        raise ModelError(f"{what} {text}{place}") from error


def load(case: Case) -> LoadedCase:
    """Builds the model and inputs of a case.

    Raises:
        UsageError: the function does not exist or returns something other than a model and inputs, or the model does
            not support the case.
        ModelError: the function, or the module that it is in, raised.
    """
    seed_everything()
    loaded = _from_list(case) if case.model in MODELS else _from_function(case)
    try:
        loaded.model.train(case.mode == "train")
    except NotImplementedError as error:  # torch.export's models have one mode
        if case.mode == "train":
            raise UsageError(f"{case.model!r} cannot be trained: {first_line(str(error).strip())}") from error
    if case.mode == "decode" and not callable(getattr(loaded.model, "generate", None)):
        raise UsageError(f"--decode needs a model with generate(); that of {case.model!r} has none")
    if case.mode != "decode" and not case.dynamic:
        loaded = dataclasses.replace(loaded, inputs=loaded.inputs[:1])
    return loaded if (case.device, case.dtype) == (Case.device, Case.dtype) else _moved(loaded, case)


def _moved(loaded: LoadedCase, case: Case) -> LoadedCase:
    """The model and inputs on the device of a case, and in its dtype."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    try:
        device = torch.empty(0, device=case.device).device
    except (RuntimeError, AssertionError) as error:  # PyTorch was built without it, or it is not there
        raise UsageError(f"--device {case.device}: {first_line(str(error))}") from error
    with errors_of_user(f"MODEL {case.model!r} on {case.device} in {case.dtype}: it raised"):
        model = loaded.model.to(device, dtype)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
        return result.requires_grad_(tensor.requires_grad)

    inputs = [Inputs(*pytree.tree_map_only(torch.Tensor, moved, (item.args, item.kwargs))) for item in loaded.inputs]
    return LoadedCase(model, inputs)


def _from_list(case: Case) -> LoadedCase:
    listed = entry(case.model, published=case.published)
    if case.mode == "decode":
        if not listed.generates:
            names = ", ".join(name for name, other in MODELS.items() if other.generates)
            raise UsageError(f"--decode needs a model with generate(); {case.model!r} has none, these have: {names}")
        return LoadedCase(listed.build(), [Inputs((), listed.prompt())])
    model = listed.build()
    if not listed.needs_transformers:
        return LoadedCase(model, [Inputs(tuple(listed.inputs(size).values()), {}) for size in listed.sizes])
    for module in model.modules():  # T5's decoder has a configuration of its own
        if hasattr(module, "config"):
            module.config.use_cache = False  # as in training and scoring: the results have no cache
    return LoadedCase(model, [Inputs((), listed.inputs(size)) for size in listed.sizes])


def _from_function(case: Case) -> LoadedCase:
    function = from_place(case.model, "MODEL")
    with errors_of_user(f"MODEL {case.model!r} raised"):
        returned = function()
    model, *sizes = returned if isinstance(returned, tuple) else (returned,)
    kinds = torch.Tensor | Mapping | tuple | list
    if not isinstance(model, torch.nn.Module) or not sizes or not all(isinstance(size, kinds) for size in sizes):
        types = ", ".join(type(item).__name__ for item in (model, *sizes))
        raise UsageError(
            f"MODEL {case.model!r} returned ({types}); expected (model, inputs): a torch.nn.Module, and a tensor, a "
            "tuple of positional or a dict of keyword arguments; with --dynamic (model, inputs, inputs, ...), one for "
            "each size"
        )
    if case.dynamic and len(sizes) < 2:
        raise UsageError(f"--dynamic needs several sizes: let {case.model!r} return (model, inputs, inputs, ...)")
    return LoadedCase(model, [_as_inputs(size) for size in sizes])


def _as_inputs(value: Any) -> Inputs:
    if isinstance(value, Mapping):
        return Inputs((), dict(value))
    return Inputs((value,) if isinstance(value, torch.Tensor) else tuple(value), {})


def from_place(text: str, what: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        UsageError: the module has no such function. ``what`` names the argument in the message.
        ModelError: the module cannot be imported.
    """
    place, name = check_place(text, what)
    folder = str(Path(place).resolve().parent) if place.endswith(".py") else os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that no file there hides a package
    with errors_of_user(f"{what} {text!r}: {place} cannot be imported:"):
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        names = [key for key in own if isinstance(getattr(module, key), FunctionType) and not key.startswith("_")]
        raise UsageError(f"{what} {text!r}: {place}: {unknown_name('function', name, names)}")
    return function


def _module_of_file(path: Path) -> ModuleType:
    """Imports a file once per process."""
    name = f"_bench_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_registered(names: Iterable[str]) -> None:
    """Checks that each backend exists, after the model's module has been imported, as it may register some.

    Raises:
        UsageError: one does not exist; the message has near matches.
    """
    from torch._dynamo import list_backends

    known = [*OWN_NAMES, *list_backends(exclude_tags=())]
    for name in (split_mode(backend)[0] for backend in names):
        if ":" in name:
            from_place(name, "backend")
        elif name not in known:
            raise UsageError(unknown_name("backend", name, known))


def compile_backend(name: str) -> str | Callable[..., Any]:
    """The argument ``backend`` of ``torch.compile`` for a name."""
    return from_place(name, "backend") if ":" in name else "eager" if name == DYNAMO_EAGER else name


@torch.no_grad()
def quantize(model: torch.nn.Module, scheme: str) -> None:
    """Quantizes a model with torchao, as ``SCHEMES`` says.

    Raises:
        UsageError: torchao is not installed, or cannot quantize the model.
    """
    try:
        from torchao import quantization
        from torchao.quantization.granularity import PerGroup
    except ImportError:
        raise UsageError("--quantize needs torchao: pip install 'torchao>=0.18'") from None
    before = [type(weight) for weight in model.parameters()]
    try:
        arguments = (torch.int4, PerGroup(32)) if scheme.startswith("int4") else ()
        quantization.quantize_(model, getattr(quantization, SCHEMES[scheme])(*arguments))
    except Exception as error:
        raise UsageError(f"--quantize {scheme}: {first_line(str(error))}") from error
    if [type(weight) for weight in model.parameters()] == before:
        raise UsageError(f"--quantize {scheme}: the model has nothing to quantize, no torch.nn.Linear")
