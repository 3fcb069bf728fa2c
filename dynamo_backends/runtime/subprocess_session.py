"""Makes and runs a session in a subprocess first, because an execution provider may crash instead of raising.

OpenVINO (1.24) crashes for some models in which a result depends on no argument (``zeros_like`` of a scalar), for
``log1p`` and for some means. It computes some gradients of GELU from uninitialized memory, with other results in each
run, or crashes. Starting the subprocess takes half a second, once; each check takes two sessions and a few runs. The
CPU provider is not checked.
"""

from __future__ import annotations

import atexit
import base64
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..common.fork_safety import Lock, renew_in_children
from ..common.python_process import Worker, WorkerExit, WorkerStartError
from .messages import session_error
from .precision_probe import is_enough
from .providers import (
    CPU,
    Provider,
    as_precise_as_pytorch,
    float32_precision,
    needs_subprocess,
    options_of,
    provider_name,
)
from .settings import SessionSettings

logger = logging.getLogger(__name__)

_WORKER = f"{__package__}.subprocess_worker"

_DIGITS: dict[str, Any] = {}
"""The digits to which a provider with these options computes float32, by operator."""

_warned: set[str] = set()

WITHOUT_CPU = {"session.disable_cpu_ep_fallback": "1"}
"""The configuration of a session in which the CPU provider runs nothing. It must not be among its providers."""

LONGEST = 120.0
"""Seconds after which a check fails."""


class _Checker:
    """The subprocess, started at first use."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker = Worker(_WORKER)
        self._start_error: str | None = None
        renew_in_children(self)
        atexit.register(self._worker.stop)

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``: the subprocess answers the parent."""
        self._worker.forget()

    def ask(self, request: Mapping[str, object]) -> Any:
        """The answer, see ``subprocess_worker``; a text if there is none."""
        with self._lock:
            if self._start_error is not None:
                return self._start_error
            try:
                answer: Any = self._worker.ask(request, LONGEST)
            except WorkerStartError as error:
                self._start_error = str(error)
                logger.warning("only the CPU provider is used, because others cannot be checked: %s", error)
                return self._start_error
        if not isinstance(answer, WorkerExit):
            return answer
        if answer.timed_out:
            return f"no session was made in {LONGEST:.0f} s"
        return f"the subprocess that checks it crashed, exit code {answer.code}"


_CHECKER = _Checker()


def check_in_subprocess(
    model: bytes,
    settings: SessionSettings,
    sizes: Mapping[str, Sequence[int]] | None = None,
    config: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Makes a session in a subprocess, and runs it a few times on made-up arguments.

    Args:
        model: serialized, with all inputs: the subprocess has no constants.
        settings: of the session.
        sizes: the shapes of its inputs, by name; ``None`` to not run it.
        config: more configuration entries.

    Raises:
        SessionError: ONNX Runtime rejected the model, the subprocess crashed, or the results are far from the CPU
            provider's. Exceptions of the run are ignored, because the arguments may cause them.
    """
    request = _request(settings, base64.b64encode(model).decode(), config)
    request["sizes"] = None if sizes is None else {name: list(shape) for name, shape in sizes.items()}
    why = _CHECKER.ask(request)
    if why is not None:
        logger.info("%s: %s", settings.providers, why)
        raise session_error(RuntimeError(why), model)


def _request(settings: SessionSettings, model: str | None, config: Mapping[str, str]) -> dict[str, object]:
    return {**settings.as_json(), "config": {**settings.config, **config}, "model": model}


def precise_enough(providers: Sequence[Provider]) -> tuple[Provider, ...]:
    """The providers that compute float32 with the digits that ``torch.set_float32_matmul_precision`` asks for, as a
    probe shows. The others are warned of, and the CPU provider is left if no other is.

    Raises:
        ValueError: a provider computes fewer digits, and is the only one that is listed.
    """
    enough: list[Provider] = []
    for provider in providers:
        why = None if not needs_subprocess([provider]) else _too_few_digits(provider)
        if why is None:
            enough.append(provider)
        elif len(providers) == 1:
            raise ValueError(why)
        else:
            if why not in _warned:
                logger.warning("%s. The next provider is used", why)
            _warned.add(why)
    return tuple(enough) or (CPU,)


def _too_few_digits(provider: Provider) -> str | None:
    """Why a provider is not precise enough; ``None`` if it is, or does not run the operators of the probe."""
    asked = str(float32_precision()).removeprefix("torch.")
    settings = SessionSettings(as_precise_as_pytorch([provider]), threads=1)
    key = repr(settings.providers)
    if key not in _DIGITS:
        _DIGITS[key] = _CHECKER.ask(_request(settings, None, WITHOUT_CPU))
    answer = _DIGITS[key]
    if not isinstance(answer, dict):
        logger.info("the precision of %s is not known: %s", provider_name(provider), answer)
        return None
    for operator, digits in answer.items():
        if digits is not None and not is_enough(digits, asked):
            return (
                f"execution provider {provider_name(provider)!r} computes {operator} of float32 with the digits of "
                f"{digits}, and {asked} is asked for; its options are {options_of(settings.providers[0])}. "
                "torch.set_float32_matmul_precision('medium') allows bfloat16, options={'check_providers': False} any"
            )
    return None
