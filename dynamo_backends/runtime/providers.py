"""Execution providers: which there are, and what the user may ask for."""

from __future__ import annotations

import difflib
from typing import TypeAlias

import onnxruntime

Provider: TypeAlias = "str | tuple[str, dict[str, str]]"


def provider_name(provider: Provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def check_providers(providers: object) -> None:
    """Checks the ``providers`` option.

    Raises:
        TypeError: not a sequence of names or (name, options) pairs.
        ValueError: none given, or a provider this ONNX Runtime was not built with.
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
            close = difflib.get_close_matches(name, available, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"execution provider {name!r} is not in the installed ONNX Runtime.{hint} "
                f"Available: {', '.join(available)}. Other providers come with other builds of onnxruntime "
                "(onnxruntime-gpu, onnxruntime-openvino, ...)"
            )
