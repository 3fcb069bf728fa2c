"""One memory arena for the intermediate values of all sessions; it is shrunk after a time without runs.

Without an arena, the system takes large memory back after each use and maps new pages in the next call: a fifth of the
time of a SegFormer (AMD EPYC). An arena for each session would keep each session's peak for ever.

Each session says how long the arena keeps its memory after a run (option ``idle_seconds``); the longest counts.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time

import numpy as np
import onnxruntime

from ..common.fork_safety import Lock, renew_in_children
from ..common.session_events import count
from ..errors import first_line
from .messages import ORT_ERRORS
from .ort_internals import IDENTITY
from .system_memory import give_back, holders

logger = logging.getLogger(__name__)


class Arena:
    """ONNX Runtime's arena of the process, which its environment owns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._session: onnxruntime.InferenceSession | None = None
        self._watcher: threading.Thread | None = None
        self._end = threading.Event()
        self._idle_from = 0.0  # by ``time.monotonic``
        holders.append(self.shrink)
        renew_in_children(self)
        atexit.register(self._stop)

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``: the watcher thread is not in the child."""
        self._watcher = None
        self._end = threading.Event()

    def use(self, options: onnxruntime.SessionOptions) -> None:
        """Makes a session with these options allocate from the arena, except its weights.

        If that fails, for instance because there is no memory for the session that shrinks the arena, the session does
        not use the arena.
        """
        try:
            with self._lock:
                if self._session is None:
                    self._session = _session_that_shrinks()
            _use(options)
        except ORT_ERRORS as error:
            logger.info("a session is made without an arena: %s", error)
            count("sessions_without_arena", first_line(str(error)))
            options.enable_cpu_mem_arena = False

    def used(self, seconds: int) -> None:
        """Must be called after each run of a session: its memory is kept for so many ``seconds``."""
        self._idle_from = max(self._idle_from, time.monotonic() + seconds)
        if self._watcher is None:
            with self._lock:
                if self._watcher is None and not self._end.is_set():
                    watcher = threading.Thread(target=self._watch, name="dynamo_backends_arena", daemon=True)
                    try:
                        watcher.start()
                    except RuntimeError as error:  # no memory for its stack, or too many threads: the next run retries
                        _kept(error)
                    else:
                        self._watcher = watcher

    def shrink(self) -> None:
        """Frees what no session uses; ``system_memory.give_back`` calls it."""
        if self._session is not None:
            run = onnxruntime.RunOptions()
            run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            self._session.run(None, {"x": np.zeros(0, np.float32)}, run)

    def _watch(self) -> None:
        """Waits until no session needs the memory any more, then frees it. ``_stop`` waits for that too."""
        try:
            while not self._end.wait(max(0.0, self._idle_from - time.monotonic())):
                if time.monotonic() < self._idle_from:
                    continue
                give_back()
                with self._lock:
                    if time.monotonic() >= self._idle_from:
                        self._watcher = None
                        return
        except Exception as error:  # what a thread raises reaches nobody
            with self._lock:
                self._watcher = None  # the next run starts another
            _kept(error)

    def _stop(self) -> None:
        """At exit: no thread may be inside ONNX Runtime."""
        self._end.set()
        watcher = self._watcher
        if watcher is not None:
            watcher.join()


def _kept(error: Exception) -> None:
    logger.info("the arena is not shrunk: %s", error)
    count("memory_kept", f"{type(error).__name__}: {first_line(str(error))}")


def _session_that_shrinks() -> onnxruntime.InferenceSession:
    memory = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    settings = {
        "max_mem": 0,
        "arena_extend_strategy": 1,  # by the size of the request
        "initial_chunk_size_bytes": -1,
        "max_dead_bytes_per_chunk": -1,
    }
    try:
        onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg(settings))
    except ORT_ERRORS as error:  # another library of this process made it
        logger.info("ONNX Runtime's arena exists already: %s", error)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    _use(options)
    return onnxruntime.InferenceSession(IDENTITY, options, providers=["CPUExecutionProvider"])


def _use(options: onnxruntime.SessionOptions) -> None:
    options.enable_cpu_mem_arena = True
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


ARENA = Arena()
