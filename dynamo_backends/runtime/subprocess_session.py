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

from ..common.fork_safety import Lock, renew_in_children
from ..common.python_process import Worker, WorkerExit, WorkerStartError
from .messages import session_error
from .settings import SessionSettings

logger = logging.getLogger(__name__)

_WORKER = f"{__package__}.subprocess_worker"

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

    def ask(self, request: Mapping[str, object]) -> str | None:
        """Why a session fails; ``None`` if it does not."""
        with self._lock:
            if self._start_error is not None:
                return self._start_error
            try:
                answer: str | WorkerExit | None = self._worker.ask(request, LONGEST)
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
    request = {**settings.as_json(), "config": {**settings.config, **config}}
    request["model"] = base64.b64encode(model).decode()
    request["sizes"] = None if sizes is None else {name: list(shape) for name, shape in sizes.items()}
    why = _CHECKER.ask(request)
    if why is not None:
        logger.info("%s: %s", settings.providers, why)
        raise session_error(RuntimeError(why), model)
