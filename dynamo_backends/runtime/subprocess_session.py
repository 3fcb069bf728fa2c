"""Makes a session, and runs it, in a process of its own first, where it may crash: an execution provider that cannot
run a model does not always say so.

OpenVINO's (1.24) ends the process for some models in which a result depends on no argument (``zeros_like`` of a
scalar), for ``log1p`` and for some means, and computes some gradients of GELU from memory that nobody wrote: another
result each time, or the process ends. What does that must not run here. A process that is asked costs half a second,
once, and each question two sessions and a few runs. The CPU provider is not asked so.
"""

from __future__ import annotations

import atexit
import base64
import logging
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..common.fork_safety import renew_in_children
from ..common.python_process import Ended, Worker, WorkerStartError
from .messages import session_error
from .settings import SessionSettings

logger = logging.getLogger(__name__)

_WORKER = f"{__package__}.subprocess_worker"

LONGEST = 120.0
"""Seconds after which a session that is not made counts as refused."""


class _Apart:
    """The process, made when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker = Worker(_WORKER)
        self._does_not_start: str | None = None
        renew_in_children(self)
        atexit.register(self._worker.stop)

    def renew_in_child(self) -> None:
        """See ``forks.Renewable``: the process answers the parent."""
        self._lock = threading.Lock()
        self._worker.forget()

    def ask(self, request: Mapping[str, object]) -> str | None:
        """What speaks against making a session; ``None`` if nothing does."""
        with self._lock:
            if self._does_not_start is not None:
                return self._does_not_start
            try:
                answer: str | Ended | None = self._worker.ask(request, LONGEST)
            except WorkerStartError as error:
                self._does_not_start = str(error)
                logger.warning("no execution provider but the CPU's is used, as it cannot be checked: %s", error)
                return self._does_not_start
        if not isinstance(answer, Ended):
            return answer
        if answer.timed_out:
            return f"no session was made in {LONGEST:.0f} s"
        return f"the process in which it was tried crashed, exit code {answer.code}"


_APART = _Apart()


def check_apart(
    model: bytes,
    settings: SessionSettings,
    sizes: Mapping[str, Sequence[int]] | None = None,
    config: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Makes a session in another process, runs it on made-up arguments a few times, and drops it.

    Args:
        model: serialized, whole: no constants of this process.
        settings: of the session.
        sizes: of its inputs, by name; ``None``: it is not run.
        config: further configuration entries.

    Raises:
        SessionError: ONNX Runtime refused the model, the process crashed, or the results were far from those of the
            CPU provider. What the run raises is no matter: the arguments may be to blame.
    """
    request = {**settings.as_json(), "config": {**settings.config, **config}}
    request["model"] = base64.b64encode(model).decode()
    request["sizes"] = None if sizes is None else {name: list(given) for name, given in sizes.items()}
    refused = _APART.ask(request)
    if refused is not None:
        logger.info("%s: %s", settings.providers, refused)
        raise session_error(RuntimeError(refused), model)
