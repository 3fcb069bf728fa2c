"""Execution providers: checks of the option ``providers``, fallbacks, and the options that each session sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import onnxruntime
import torch

from ..common.suggestions import did_you_mean
from .messages import ORT_ERRORS, without_code
from .ort_internals import IDENTITY
from .provider_options import PRECISIONS, THREADS

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
        name, given = provider_name(provider), options_of(provider)
        ours = PRECISIONS.get(name, {}).get(precision, {})
        deciding = {"device_type", *(option for options in PRECISIONS.get(name, {}).values() for option in options)}
        if not ours or deciding & given.keys():
            result.append(provider)
        else:
            result.append((name, {**ours, **given}))
    return tuple(result)


def options_for_float32(provider: Provider) -> dict[str, str]:
    """The options for full float32 precision; empty if not known."""
    return dict(PRECISIONS.get(provider_name(provider), {}).get("highest", {}))


def float32_precision() -> torch.dtype:
    """The dtype to which products of float32 may be rounded by ``torch.set_float32_matmul_precision``: float32,
    ``torch.float16`` (as many digits as TF32) or ``torch.bfloat16``."""
    return {"high": torch.float16, "medium": torch.bfloat16}.get(torch.get_float32_matmul_precision(), torch.float32)


def with_threads(providers: Sequence[Provider], threads: int) -> list[tuple[str, dict[str, str]]]:
    """The providers as pairs; a provider with its own threads gets this number of them."""
    pairs = [(provider_name(provider), options_of(provider)) for provider in providers]
    return [(name, {**({THREADS[name]: str(threads)} if name in THREADS else {}), **given}) for name, given in pairs]


def check_providers(providers: object) -> None:
    """Checks the ``providers`` option.

    Raises:
        TypeError: not a sequence of names or (name, options) pairs.
        ValueError: it is empty; a provider is not in the installed ONNX Runtime, or does not start with its options.
    """
    if isinstance(providers, str) or not isinstance(providers, (list, tuple)):
        raise TypeError(f"expected a list such as ['CPUExecutionProvider'], got {providers!r}")
    if not providers:
        raise ValueError("expected at least one execution provider, got none")
    available = onnxruntime.get_available_providers()
    for provider in providers:
        is_pair = isinstance(provider, (list, tuple)) and len(provider) == 2 and isinstance(provider[1], dict)
        if not isinstance(provider, str) and not (is_pair and isinstance(provider[0], str)):
            raise TypeError(f"expected a provider name or a (name, options) pair, got {provider!r}")
        name = provider_name(provider)
        if name not in available:
            raise ValueError(
                f"execution provider {name!r} is not in the installed ONNX Runtime {onnxruntime.__version__}."
                f"{did_you_mean(name, available)} Available: {', '.join(available)}. Others come with packages that "
                "replace onnxruntime, such as onnxruntime-gpu and onnxruntime-openvino"
            )
        if name != CPU:
            _check_start(provider, available)


def _check_start(provider: Provider, available: Sequence[str]) -> None:
    """Starts a provider, once for each of its options: ONNX Runtime silently replaces one that fails by the CPU's.

    Raises:
        ValueError: it does not start.
    """
    name, key = provider_name(provider), repr(provider)
    if key in _started:
        return
    why, started = "see what ONNX Runtime wrote to standard error", list[str]()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    try:
        session = onnxruntime.InferenceSession(
            IDENTITY, options, providers=[(name, options_of(provider)), CPU], enable_fallback=0
        )
    except ValueError as error:  # an option is not a string
        why = str(error)
    except ORT_ERRORS as error:
        why = without_code(str(error))
    else:
        started = session.get_providers()
    if name not in started:
        raise ValueError(
            f"execution provider {name!r} does not start with the options {options_of(provider)}: {why}. "
            f"Available: {', '.join(available)}"
        )
    _started.add(key)
