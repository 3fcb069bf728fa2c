"""Execution providers: checks of the option ``providers``, fallbacks, and the options that each session sets."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import onnxruntime
import torch

from ..common.suggestions import did_you_mean
from .messages import ORT_ERRORS, of_library
from .ort_internals import IDENTITY
from .provider_libraries import (
    OWN_OPTIONS,
    ProviderError,
    add_providers,
    device_of,
    device_text,
    installed_plugins,
    version_text,
)
from .provider_options import (
    CUDA,
    DEVICE_TYPES,
    FORBIDDEN_CUDA_OPTIONS,
    PACKAGES,
    PLUGIN_OPTIONS,
    PROBED_IN_PROCESS,
    precision_options,
    thread_options,
    with_defaults,
)

logger = logging.getLogger(__name__)

Provider: TypeAlias = "str | tuple[str, dict[str, str]]"

CPU = "CPUExecutionProvider"

SILENT = 4
"""ONNX Runtime's log level for fatal errors alone: other errors are exceptions, and we report them."""

_told: set[str] = set()
"""Device types for which a missing provider was reported."""

_started: set[str] = set()
"""Providers, with their options, that started in this process."""


def provider_name(provider: Provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def options_of(provider: Provider) -> dict[str, str]:
    return {} if isinstance(provider, str) else dict(provider[1])


def only_cpu(providers: Sequence[Provider]) -> bool:
    """Whether the CPU provider comes first. It runs every node that has a kernel, so the others are not used."""
    return provider_name(providers[0]) == CPU


def device_types(providers: Iterable[Provider]) -> set[str]:
    """PyTorch's types of the devices whose memory providers read and write: ``cpu``, and maybe ``cuda``."""
    return {"cpu", *(DEVICE_TYPES.get(provider_name(provider), "cpu") for provider in providers)}


def runs_on_gpu(providers: Sequence[Provider]) -> bool:
    """Whether the first provider runs on a GPU that PyTorch's tensors can be on."""
    return provider_name(providers[0]) in DEVICE_TYPES


def on_current_gpu(providers: Sequence[Provider]) -> tuple[Provider, ...]:
    """Sets ``device_id`` of CUDA's provider to PyTorch's current GPU, unless that is the first or the user set it: a
    session for another GPU would take memory there."""
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return tuple(
        (CUDA, {"device_id": str(index), **options_of(item)}) if index and provider_name(item) == CUDA else item
        for item in providers
    )


@contextlib.contextmanager
def unchanged_gpu() -> Iterator[None]:
    """A context that keeps PyTorch's current GPU: ONNX Runtime makes that of a session the current one."""
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        if current is not None:
            torch.cuda.set_device(current)


def needs_subprocess(providers: Sequence[Provider]) -> bool:
    """Whether a session of these providers is probed in a subprocess first."""
    return not only_cpu(providers) and any(provider_name(item) not in PROBED_IN_PROCESS for item in providers)


def fallbacks(providers: Sequence[Provider], devices: Collection[str] = ("cpu",)) -> Iterator[tuple[Provider, ...]]:
    """The providers in order of preference, then without the first, and so on.

    The CPU provider comes last even if it is not named, as in ONNX Runtime: ``fallback="error"`` is about PyTorch.

    Args:
        providers: in order of preference.
        devices: the types of devices whose memory must be read and written: the CPU provider reads no GPU's.
    """
    left = tuple(providers)
    while left and device_types(left) >= set(devices):
        yield left
        if only_cpu(left):
            return
        left = left[1:] or (CPU,)


def as_precise_as_pytorch(providers: Sequence[Provider], operators: Collection[str] = ()) -> tuple[Provider, ...]:
    """The providers with options for PyTorch's float32 precision: ``torch.set_float32_matmul_precision``, or for CUDA
    the settings for convolutions and matrix products. A user's own options of precision are kept.

    Args:
        providers: of a session.
        operators: the operators of its model, if they are known.
    """
    precision = float32_matmul_precision()
    result: list[Provider] = []
    for provider in providers:
        name = provider_name(provider)
        ours = precision_options(name, precision) if name != CUDA else {"use_tf32": str(int(_allows_tf32(operators)))}
        result.append((name, with_defaults(name, options_of(provider), ours)) if ours else provider)
    return tuple(result)


_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Attention", "Einsum"})
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})


def _allows_tf32(operators: Collection[str]) -> bool:
    """Whether PyTorch may compute all operators of a model with TF32. The provider has one switch for them all."""
    backends = (
        (_CONVOLUTIONS, torch.backends.cudnn.conv),
        (_PRODUCTS, torch.backends.cuda.matmul),
        (_RECURRENT, torch.backends.cudnn.rnn),
    )
    precisions = {backend.fp32_precision for kinds, backend in backends if not kinds.isdisjoint(operators)}
    return precisions == {"tf32"}


def options_for_float32(provider: Provider) -> dict[str, str]:
    """The options for full float32 precision; empty if not known."""
    return dict(precision_options(provider_name(provider), "highest"))


def float32_precision(providers: Sequence[Provider] = ()) -> torch.dtype:
    """The dtype to which a session may round products of float32: float32, ``torch.float16`` (as many digits as TF32)
    or ``torch.bfloat16``; by ``torch.set_float32_matmul_precision``, or the option of CUDA's provider."""
    if any(provider_name(item) == CUDA and options_of(item).get("use_tf32") == "1" for item in providers):
        return torch.float16
    return {"high": torch.float16, "medium": torch.bfloat16}.get(float32_matmul_precision(), torch.float32)


def float32_matmul_precision() -> str:
    """As ``torch.get_float32_matmul_precision()``, which raises if ``torch.backends.….fp32_precision`` was set."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return {"tf32": "high", "bf16": "medium"}.get(torch.backends.mkldnn.matmul.fp32_precision, "highest")


def with_threads(providers: Sequence[Provider], threads: int) -> list[tuple[str, dict[str, str]]]:
    """The providers of a session as pairs, up to the CPU provider, which runs all that is left; a provider with its own
    threads gets this number of them."""
    pairs: list[tuple[str, dict[str, str]]] = []
    for provider in providers:
        name = provider_name(provider)
        pairs.append((name, with_defaults(name, options_of(provider), thread_options(name, threads))))
        if name == CPU:
            break
    return pairs


def default_providers(device: str) -> tuple[Provider, ...]:
    """The providers of a graph whose tensors are on a type of device, if the user names none: that of the device, if
    the installed ONNX Runtime has it, and the CPU's."""
    names = [name for name, type_ in DEVICE_TYPES.items() if type_ == device]
    available = onnxruntime.get_available_providers()
    why = f"the installed onnxruntime has no execution provider for it. Install {PACKAGES[names[0]]}" if names else ""
    if CUDA in names and CUDA in available:
        try:
            check_providers([CUDA])
        except ValueError as error:
            why = str(error)
        else:
            return CUDA, CPU
    if names and device not in _told:
        _told.add(device)
        logger.warning("PyTorch runs graphs with tensors on %s: %s", device, why)
    return (CPU,)


def check_providers(providers: object) -> None:
    """Checks the ``providers`` option.

    Raises:
        TypeError: not a sequence of names or (name, options) pairs.
        ValueError: it is empty; a provider is neither built into ONNX Runtime nor installed, or does not start.
    """
    if isinstance(providers, str) or not isinstance(providers, (list, tuple)):
        raise TypeError(f"expected a list such as ['CPUExecutionProvider'], got {providers!r}")
    if not providers:
        raise ValueError("expected at least one execution provider, got none")
    for provider in providers:
        is_pair = isinstance(provider, (list, tuple)) and len(provider) == 2 and isinstance(provider[1], dict)
        if not isinstance(provider, str) and not (is_pair and isinstance(provider[0], str)):
            raise TypeError(f"expected a provider name or a (name, options) pair, got {provider!r}")
        if provider != CPU:
            _check_start(provider)


def described(providers: Sequence[Provider]) -> list[list[str]]:
    """What identifies the providers besides their options: the package or library of each plugin, and the device."""
    result = []
    for provider in providers:
        name, given = provider_name(provider), options_of(provider)
        device = device_of(name, given)
        version = "" if device is None else device.ep_metadata.get("version", "")
        file = os.stat(given["library"]) if "library" in given else None
        content = "" if file is None else f"{file.st_size} {file.st_mtime_ns}"
        text = "" if device is None else device_text(device)
        result.append([name, version_text(name, given), version, content, text])
    return result


def usable(providers: Sequence[Provider]) -> tuple[Provider, ...]:
    """The providers without those, after the first, that do not start here, for a saved graph."""
    return tuple(provider for i, provider in enumerate(providers) if i == 0 or _starts(provider))


def _starts(provider: Provider) -> bool:
    try:
        check_providers([provider])
    except ValueError:
        return False
    return True


def _check_start(provider: Provider) -> None:
    """Starts a provider, once for each of its options: ONNX Runtime silently replaces one that fails by the CPU's.

    Raises:
        ValueError: it is not there, does not know an option, or does not start.
    """
    name, given, key = provider_name(provider), options_of(provider), repr(provider)
    if key in _started:
        return
    why, started = "see what ONNX Runtime wrote to standard error", list[str]()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    try:
        _check_options(name, given, device_of(name, given))
        pairs = [(name, options_of(item)) for item in on_current_gpu([provider])]
        by_device = add_providers(options, pairs)
        with unchanged_gpu():
            session = onnxruntime.InferenceSession(
                IDENTITY, options, providers=None if by_device else [*pairs, CPU], enable_fallback=0
            )
    except ProviderError as error:
        raise ValueError(f"{error}{_what_there_is(name)}") from error
    except ValueError as error:  # an option is not a string
        why = str(error)
    except ORT_ERRORS as error:
        why = of_library(str(error))
    else:
        started = session.get_providers()
    if name not in started:
        raise ValueError(f"execution provider {name!r} does not start with the options {given}: {why}")
    _started.add(key)


def _check_options(name: str, given: Mapping[str, str], device: object | None) -> None:
    """Raises ``ProviderError`` if a plugin would ignore an option, or an option does not work with new tensors in each
    call."""
    for option, why in FORBIDDEN_CUDA_OPTIONS.items() if name == CUDA else ():
        if given.get(option, "0") not in ("0", "False", "false"):
            raise ProviderError(f"the option {option!r} of {name!r} is not supported: {why}")
    known = {**OWN_OPTIONS, **PLUGIN_OPTIONS.get(name, {})}
    for option in given if device is not None and name in PLUGIN_OPTIONS else ():
        if option not in known:
            texts = "; ".join(f"{key}: {text}" if text else key for key, text in known.items())
            raise ProviderError(
                f"execution provider {name!r} ignores the option {option!r}.{did_you_mean(option, known)} "
                f"Its options are: {texts}"
            )


def _what_there_is(name: str) -> str:
    """The providers that there are, and the package of one that is missing; empty if it is not missing."""
    plugins = installed_plugins()
    names = [*onnxruntime.get_available_providers(), *(each for plugin in plugins for each in plugin.names)]
    if name in names:
        return ""
    texts = [
        f".{did_you_mean(name, names)} Available: {', '.join(dict.fromkeys(names))}",
        *([f"It comes with the package {PACKAGES[name]}"] if name in PACKAGES else []),
        *(f"{item.package} {item.version} cannot be imported: {item.error}" for item in plugins if item.error),
        "The command dynamo-backends providers lists providers and devices",
    ]
    return ". ".join(texts)
