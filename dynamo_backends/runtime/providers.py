"""Execution providers: checks of the option ``providers``, fallbacks, and the options that each session sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
from .provider_options import PACKAGES, PLUGIN_OPTIONS, precision_options, thread_options, with_defaults

Provider: TypeAlias = "str | tuple[str, dict[str, str]]"

CPU = "CPUExecutionProvider"

SILENT = 4
"""ONNX Runtime's log level for fatal errors alone: other errors are exceptions, and we report them."""

_started: set[str] = set()
"""Providers, with their options, that started in this process."""


def provider_name(provider: Provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def options_of(provider: Provider) -> dict[str, str]:
    return {} if isinstance(provider, str) else dict(provider[1])


def only_cpu(providers: Sequence[Provider]) -> bool:
    """Whether the CPU provider comes first. It runs every node that has a kernel, so the others are not used."""
    return provider_name(providers[0]) == CPU


def fallbacks(providers: Sequence[Provider]) -> Iterator[tuple[Provider, ...]]:
    """The providers in order of preference, then without the first, and so on.

    The CPU provider comes last even if it is not named, as in ONNX Runtime: ``fallback="error"`` is about PyTorch.
    """
    left = tuple(providers)
    while left:
        yield left
        if only_cpu(left):
            return
        left = left[1:] or (CPU,)


def as_precise_as_pytorch(providers: Sequence[Provider]) -> tuple[Provider, ...]:
    """The providers with options for the float32 precision of ``torch.set_float32_matmul_precision``, which is full
    precision by default. A user's options of precision are kept."""
    precision = torch.get_float32_matmul_precision()
    result: list[Provider] = []
    for provider in providers:
        name = provider_name(provider)
        ours = precision_options(name, precision)
        result.append((name, with_defaults(name, options_of(provider), ours)) if ours else provider)
    return tuple(result)


def options_for_float32(provider: Provider) -> dict[str, str]:
    """The options for full float32 precision; empty if not known."""
    return dict(precision_options(provider_name(provider), "highest"))


def float32_precision() -> torch.dtype:
    """The dtype to which products of float32 may be rounded by ``torch.set_float32_matmul_precision``: float32,
    ``torch.float16`` (as many digits as TF32) or ``torch.bfloat16``."""
    return {"high": torch.float16, "medium": torch.bfloat16}.get(torch.get_float32_matmul_precision(), torch.float32)


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
        by_device = add_providers(options, [(name, given)])
        session = onnxruntime.InferenceSession(
            IDENTITY, options, providers=None if by_device else [(name, given), CPU], enable_fallback=0
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
    """Raises ``ProviderError`` if a plugin would ignore an option."""
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
