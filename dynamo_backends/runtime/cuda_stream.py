"""Orders runs of the CUDA provider among PyTorch's work on a GPU, without blocking the CPU.

A GPU runs what was launched on one stream in that order. A session launches on one stream for its whole life, which is
PyTorch's default stream. So on that stream a run needs nothing: PyTorch's kernels before it have computed its
arguments, and those after it read its results. On another stream, events let the session's stream wait for the caller's
before the run, and the caller's for the session's after it. Thus the memory of arguments and results may be freed or
overwritten right after the call, as in eager, and calls of several threads share one stream.

A call waits for the GPU only if it has results on the CPU. Otherwise the program launches ahead, and an error of a
kernel is raised where the program waits next, as in PyTorch. A session must not be freed before the GPU has done what
it launched: ONNX Runtime 1.31 would end the process, as it frees its memory in a callback of the GPU's stream.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from .provider_options import CUDA
from .providers import Provider, provider_name

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LEGACY_STREAM = 1
"""``cudaStreamLegacy``, a handle of the default stream. With 0, ONNX Runtime would create a stream of its own."""


class SessionStream:
    """The stream of a session on one GPU. It is thread-safe.

    Args:
        device: the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, device.index or 0)
        self._has_several = torch.cuda.device_count() > 1
        self._stream = torch.cuda.default_stream(device)
        self._process = os.getpid()

    @classmethod
    def of(cls, providers: Sequence[Provider], devices: Iterable[torch.device]) -> SessionStream | None:
        """The stream of a session; ``None`` if its first provider is not CUDA's, or no argument or result is on a GPU.

        Args:
            providers: of the session.
            devices: of its arguments and results.
        """
        if provider_name(providers[0]) != CUDA:
            return None
        return next((cls(device) for device in devices if device.type == "cuda"), None)

    def provider_options(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """The options of ONNX Runtime's CUDA provider; ``given`` are the user's."""
        options = {**given, "device_id": str(self.device.index), "user_compute_stream": str(_LEGACY_STREAM)}
        if not self.device.index:  # the default; ONNX Runtime 1.31 warns of it
            del options["device_id"]
        return options

    def wait(self) -> None:
        """Waits until the GPU has done all that was launched on the stream; for a finalizer, it raises nothing."""
        if os.getpid() != self._process:  # a forked child has no GPU
            return
        try:
            if not torch.cuda.is_current_stream_capturing():
                self._stream.synchronize()
        except RuntimeError as error:  # of a kernel, before; PyTorch raises it at each further call
            logger.info("a session is freed after an error of the GPU: %s", error)

    def copy(self, results: Callable[[], Result]) -> Result:
        """The result of ``results``, which copies from ONNX Runtime's memory on the caller's stream. A later run, which
        may use that memory again, waits for it."""
        copies = results()
        if not self._is_current:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return copies

    @property
    def _is_current(self) -> bool:
        return bool(torch._C._cuda_getCurrentRawStream(self.device.index) == self._stream.cuda_stream)

    def run(self, launch: Callable[[], Result]) -> Result:
        """The result of ``launch``, which runs the session."""
        if not self._has_several:
            return self._run(launch)
        with torch.cuda.device(self.device):  # ONNX Runtime makes it the thread's current one
            return self._run(launch)

    def _run(self, launch: Callable[[], Result]) -> Result:
        if self._is_current:
            return launch()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            return launch()
        finally:
            current.wait_stream(self._stream)
