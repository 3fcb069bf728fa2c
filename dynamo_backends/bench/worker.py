"""A process of the bench: reads a request in JSON from each line of standard input and writes the answer.

::

    {"do": "load", "case": {...}, "backend": "onnxrt"}  ->  {"ok": {"fingerprint": "6e0d...", ...}}
    {"do": "first", "results": "/tmp/a.pt"}             ->  {"ok": {"seconds": 3.1, "peak_bytes": 181000000, ...}}
    {"do": "turn"}                                      ->  {"ok": {"milliseconds": 12.3}}
    {"do": "finish", "results": "/tmp/b.pt"}            ->  {"ok": {"steady_bytes": 95000000, ...}}
    {"do": "save", "path": "/tmp/saved"}                ->  {"ok": {}}
    {"do": "first", "results": "/tmp/c.pt", "saved": "/tmp/saved"}  ->  {"ok": {"seconds": 0.6, ...}}

and in the reference process, after ``load``::

    {"do": "expect", "backends": ["onnxrt"]}            ->  {"ok": {}}
    {"do": "judge", "results": "/tmp/a.pt", "backend": "onnxrt"}    ->  {"ok": {"wrong": "", "unchecked": "", ...}}

An error is ``{"error": {"kind": "failed", "message": "..."}}``. What the model prints goes to standard error.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..common.python_process import answer_requests
from . import memory, timing
from .case import DYNAMO_EAGER, EAGER, EXPORT, FLOAT, INDUCTOR_FREEZING, OURS, Case, UsageError, split_mode
from .loading import check_registered, compile_backend, load
from .processes import WorkerError
from .steps import Steps

_MAX_CALLS_TO_TUNE = 400
"""After so many calls, timing starts even if the autotuner has not finished."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RequestHandler:
    """A method for each request, in the order of the module's docstring. No compiler is imported before ``first``."""

    def load(self, case: Mapping[str, Any], backend: str) -> dict[str, object]:
        """Builds the model, and quantizes it. Weights, their number and the fingerprint are those before."""
        self.case, self.backend = Case(**case), backend.removesuffix(FLOAT)
        if backend.endswith(FLOAT):
            self.case = dataclasses.replace(self.case, quantize="")
        if self.case.threads is not None:
            torch.set_num_threads(self.case.threads)
        self.loaded = load(self.case)
        torch.set_grad_enabled(self.case.mode == "train")
        parameters = list(self.loaded.model.parameters())
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in parameters}  # tied weights count once
        first = self.loaded.inputs[0].tensors
        facts: dict[str, object] = {
            "fingerprint": self.loaded.fingerprint(),
            "parameters": sum(tensor.numel() for tensor in parameters),
            "bytes_of_weights": sum(tensor.numel() * tensor.element_size() for tensor in storages.values()),
            "batch": int(first[0].shape[0]) if first and first[0].dim() else 1,
            "sizes": [
                " ".join("x".join(map(str, tensor.shape)) or "1" for tensor in inputs.tensors)
                for inputs in self.loaded.inputs
            ],
            "threads": torch.get_num_threads(),
        }
        if self.case.quantize:
            from .quantizing import quantized

            del parameters, storages  # the float weights
            self.loaded, facts["bytes_quantized"] = quantized(self.loaded, self.case)
        self.steps = Steps(self.case, self.loaded)
        return facts

    def expect(self, backends: list[str]) -> dict[str, object]:
        """Checks that the backends exist, and runs the model, also that before ``quantize``, in eager and float64."""
        from .reference import CaseJudge

        check_registered(backends)
        _options_of_ours(self.case)
        self.reference = self.before = CaseJudge(self.steps)
        if self.case.quantize:
            before = dataclasses.replace(self.case, quantize="")
            self.before = CaseJudge(Steps(before, load(before)))
        return {}

    def judge(self, results: str, backend: str) -> dict[str, object]:
        """Compares the results that another process wrote to a file."""
        found = torch.load(results, weights_only=True)
        reference = self.before if backend.endswith(FLOAT) else self.reference
        answer: dict[str, object] = {"wrong": reference.difference(found), "unchecked": reference.unchecked}
        return answer | ({"relative_error": self.before.relative_error(found)} if self.case.quantize else {})

    def first(self, results: str, saved: str = "") -> dict[str, object]:
        """Compiles and calls the model once for each size, then writes the results to judge.

        Args:
            results: the file to write.
            saved: the file of ``save``; the function in it is loaded, and nothing is compiled.
        """
        gc.collect()
        self._bytes_before = memory.resident()
        self._is_peak_reset = memory.reset_peak()
        seconds = []
        start = time.perf_counter()
        self._forward = self._loaded(saved) if saved else self._compiled()
        for call in self.steps.calls(self._forward):
            call()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
        torch.save(self.steps.results(self._forward), results)
        return {"seconds": seconds[0], "other_sizes_seconds": seconds[1:], "peak_bytes": self._peak()}

    def save(self, path: str) -> dict[str, object]:
        """Compiles the model for its first size and writes it to a file, for another process."""
        from .ahead_of_time import save

        if self.backend in (EAGER, EXPORT, DYNAMO_EAGER) or self.case.mode == "decode" or self.case.optimizer:
            raise WorkerError("not supported", "only a forward or a training step that a backend compiled")
        if split_mode(self.backend)[1]:
            raise WorkerError("not supported", "torch.compile takes a mode or a filter of guards, not both")
        save(self.loaded.model, self.loaded.inputs[0], self._settings(), Path(path))
        return {}

    def _loaded(self, path: str) -> Callable[..., Any]:
        from .ahead_of_time import load

        return load(self.loaded.model, Path(path))

    @functools.cached_property
    def _timed(self) -> Callable[[], object]:
        """The function to time, after the autotuner has chosen an engine."""
        timed = self.steps.timed(self._forward)
        dynamo: Any = sys.modules.get("torch._dynamo.utils")
        for _ in range(_MAX_CALLS_TO_TUNE if dynamo is not None else 0):
            before = dynamo.counters["dynamo_backends"]["autotuning_calls"]
            timed()
            if dynamo.counters["dynamo_backends"]["autotuning_calls"] == before:
                break
        return timed

    @functools.cached_property
    def _turn(self) -> timing.Turn:
        return timing.turn_of(self._timed)

    def turn(self) -> dict[str, object]:
        """Runs one turn of a round."""
        milliseconds = self._turn.milliseconds(self._timed) / len(self.loaded.inputs)
        timing.wait_until_quiet()
        return {"milliseconds": milliseconds}

    def finish(self, results: str) -> dict[str, object]:
        """Measures memory and the time outside sessions after all rounds, and writes the results to judge."""
        from .sessions import microseconds_outside

        for tensor in self.steps.trained:
            tensor.grad = None
        gc.collect()
        steady = self._above_before(memory.resident())
        peak = self._peak()
        outside = microseconds_outside(self._timed)
        calls = len(self.loaded.inputs) * (self.case.tokens if self.case.mode == "decode" else 1)
        torch.save(self.steps.results(self._forward), results)
        return {
            "steady_bytes": steady,
            "peak_bytes": peak,
            "microseconds_outside_sessions": None if outside is None else outside / calls,
            **_counters(),
        }

    def _compiled(self) -> Callable[..., Any]:
        model, case = self.loaded.model, self.case
        if self.backend == EAGER:
            return model
        if self.backend == EXPORT:
            if case.mode != "inference":
                raise WorkerError("not supported", "inference only")
            from .exported import Exported

            return Exported(self.loaded)
        if INDUCTOR_FREEZING in self.backend and case.mode == "train":
            raise WorkerError("not supported", "inference only")
        settings = self._settings()
        self.steps.compile_optimizer(settings)
        if case.mode != "decode":
            compiled: Callable[..., Any] = torch.compile(model, **settings)
            return compiled
        model.forward = torch.compile(model.forward, **settings)
        return model

    def _settings(self) -> dict[str, Any]:
        """The arguments of ``torch.compile``."""
        name, mode = split_mode(self.backend)
        settings: dict[str, Any] = {"backend": compile_backend(name), "dynamic": self.case.dynamic or None}
        if mode:
            settings["mode"] = mode
        if name == INDUCTOR_FREEZING:
            import torch._inductor.config

            torch._inductor.config.freezing = True  # as an option of one compile, Dynamo would not see it
        if name in OURS and self.case.options:
            settings["options"] = _options_of_ours(self.case)
        return settings

    def _peak(self) -> int | None:
        return self._above_before(memory.peak()) if self._is_peak_reset else None

    def _above_before(self, value: int | None) -> int | None:
        """Bytes above the memory before compilation; ``None`` if the system does not report memory."""
        return None if value is None or self._bytes_before is None else value - self._bytes_before


def _options_of_ours(case: Case) -> dict[str, object]:
    """The parsed options; ``UsageError`` for an unknown one or an invalid value."""
    if not case.options:
        return {}
    from ..common import installation as installation
    from ..options import options_from_text

    try:
        return options_from_text(case.options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _counters() -> dict[str, object]:
    """The counters of Dynamo and of our backends in this process."""
    if "torch._dynamo" not in sys.modules:
        return {}
    from torch._dynamo.utils import counters

    return {
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "events": dict(counters["dynamo_backends"]),
    }


def error_line(error: BaseException) -> str:
    """An error and its root cause in one line; of an error that Dynamo wraps, the backend's."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return error_line(inner)
    line = _line(error)
    if type(error).__name__ in ("InvalidCxxCompiler", "CppCompileError"):
        return f"inductor needs a working C++ compiler (g++ or clang++, or CXX=...); {line}"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return line if cause is error else f"{line} Caused by {_line(cause)}"


def _line(error: BaseException) -> str:
    """The type of an error and the first non-empty line of its message, without colours."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def main() -> None:
    """Answers requests until standard input is closed."""
    worker = RequestHandler()

    def answer(request: dict[str, Any]) -> dict[str, object]:
        try:
            return {"ok": getattr(worker, request.pop("do"))(**request)}
        except UsageError as error:
            kind, message = error.kind, str(error)
        except WorkerError as error:
            kind, message = error.kind, str(error)
        except Exception as error:  # whatever a model or a backend raises is a row of the table
            traceback.print_exc()
            kind, message = "failed", error_line(error)
        return {"error": {"kind": kind, "message": message}}

    answer_requests(answer)
