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
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ..forks import renew_in_children
from .messages import session_error
from .settings import SessionSettings

logger = logging.getLogger(__name__)

_PACKAGE = "dynamo_backends"

LONGEST = 120.0
"""Seconds after which a session that is not made counts as refused."""


class _Apart:
    """The process, made when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        renew_in_children(self)
        atexit.register(self._stop)

    def renew_in_child(self) -> None:
        """See ``forks.Renewable``: the process answers the parent."""
        self._lock = threading.Lock()
        self._process = None

    def ask(self, request: Mapping[str, object]) -> str | None:
        """What speaks against making a session; ``None`` if nothing does."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            took_too_long = threading.Event()

            def end() -> None:
                took_too_long.set()
                process.kill()

            timer = threading.Timer(LONGEST, end)
            timer.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            finally:
                timer.cancel()
            if line:
                answer: str | None = json.loads(line)
                return answer
            self._process = None
            code = process.wait()
            if took_too_long.is_set():
                return f"no session was made in {LONGEST:.0f} s"
            return f"the process in which it was tried crashed, exit code {code}"

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            ours = str(Path(__file__).parents[2])
            path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH", "")]))
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{_PACKAGE}.runtime.apart_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what a provider logs it logs here too, or says in its answer
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()  # it ends
            process.wait()


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
