"""A process of the bench: reads a request in JSON from each line of standard input and writes the answer.

::

    {"do": "load", "case": {...}, "backend": "onnxrt"}  ->  {"ok": {"fingerprint": "6e0d...", ...}}
    {"do": "first", "results": "/tmp/a.pt"}             ->  {"ok": {"first_seconds": 3.1, "peak_bytes": 181000000}}
    {"do": "turn"}                                      ->  {"ok": {"milliseconds": 12.3}}
    {"do": "finish", "results": "/tmp/b.pt"}            ->  {"ok": {"steady_bytes": 95000000, ...}}

and in the reference process, after ``load``::

    {"do": "expect", "backends": ["onnxrt"]}            ->  {"ok": {}}
    {"do": "judge", "results": "/tmp/a.pt"}             ->  {"ok": {"wrong": "", "unchecked": ""}}

An error is ``{"error": {"kind": "failed", "message": "..."}}``. What the model prints goes to standard error.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..common.python_process import answer_requests
from ..errors import first_line
from . import machine, timing
from .case import EAGER, EXPORT, OURS, PROVIDER, Case, UsageError, split_mode
from .loading import check_registered, compile_backend, load, quantize
from .processes import WorkerError
from .steps import Steps

_MAX_CALLS_TO_TUNE = 400
"""After so many calls, timing starts even if the autotuner has not finished."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RequestHandler:
    """A method for each request, in the order of the module's docstring. No compiler is imported before ``first``."""

    def load(self, case: Mapping[str, Any], backend: str) -> dict[str, object]:
        """Builds the model, and quantizes it. Weights, their number and the fingerprint are those before."""
        self.case, self.backend = Case(**case), backend
        if self.case.threads is not None:
            torch.set_num_threads(self.case.threads)
        loaded = self.loaded = load(self.case)
        torch.set_grad_enabled(self.case.mode == "train")
        first = loaded.inputs[0].tensors
        facts: dict[str, object] = {
            "fingerprint": loaded.fingerprint(),
            "parameters": sum(tensor.numel() for tensor in loaded.model.parameters()),
            "batch": int(first[0].shape[0]) if first and first[0].dim() else 1,
            "prompt_tokens": first[0].numel() if self.case.mode == "decode" and first else None,
            "sizes": [
                " ".join("x".join(map(str, tensor.shape)) or "1" for tensor in inputs.tensors)
                for inputs in loaded.inputs
            ],
            "threads": torch.get_num_threads(),
        }
        if self.case.quantize:
            quantize(loaded.model, self.case.quantize)
        self.steps = Steps(self.case, loaded)
        return facts

    def expect(self, backends: list[str]) -> dict[str, object]:
        """Checks that the backends exist, and runs the model in eager and float64."""
        from .reference import CaseJudge

        check_registered(backends)
        _options_of_ours(self.case)
        self.reference = CaseJudge(self.steps)
        return {}

    def judge(self, results: str) -> dict[str, object]:
        """Compares the results that another process wrote to a file."""
        wrong = self.reference.difference(torch.load(results, weights_only=True))
        return {"wrong": wrong, "unchecked": self.reference.unchecked}

    def first(self, results: str) -> dict[str, object]:
        """Compiles and calls the model once for each size, then writes the results to judge."""
        gc.collect()
        self._bytes_before = machine.resident()
        self._is_peak_reset = machine.reset_peak()
        on_gpu = machine.used_on(self.case.device)
        start = time.perf_counter()
        self._forward = self._compiled()
        first, *others = self.steps.calls(self._forward)
        first()
        machine.used_on(self.case.device)  # waits for it
        seconds = time.perf_counter() - start
        for call in others:
            call()
        torch.save(self.steps.results(self._forward), results)
        used = machine.used_on(self.case.device)
        gpu_bytes = None if on_gpu is None or used is None else used - on_gpu
        return {"first_seconds": seconds, "peak_bytes": self._peak(), "gpu_bytes": gpu_bytes}

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

    def turn(self) -> dict[str, object]:
        """Runs one turn of a round."""
        timed, prompts = self._timed, self.steps.prefill.milliseconds
        prompts.clear()
        answer: dict[str, object] = {"milliseconds": timing.milliseconds(timed) / len(self.loaded.inputs)}
        return {**answer, "prefill_milliseconds": statistics.median(prompts)} if prompts else answer

    def finish(self, results: str) -> dict[str, object]:
        """Measures memory after all rounds, and writes the results to judge."""
        for tensor in self.steps.trained:
            tensor.grad = None
        gc.collect()
        memories = {"steady_bytes": self._above_before(machine.resident()), "peak_bytes": self._peak()}
        torch.save(self.steps.results(self._forward), results)
        return {**memories, **_counters()}

    def _compiled(self) -> Callable[..., Any]:
        model = self.loaded.model
        if self.backend == EAGER:
            return model
        if self.backend == EXPORT:
            if self.case.mode != "inference":
                raise WorkerError("not supported", "inference only")
            from .exported import Exported

            return Exported(self.loaded)
        name, mode = split_mode(self.backend)
        settings: dict[str, Any] = {"backend": compile_backend(name), "dynamic": self.case.dynamic or None}
        if name in OURS:  # what is timed is what the search chooses, however long that takes
            os.environ.setdefault("DYNAMO_BACKENDS_AUTOTUNE_BUDGET", "100")
        options = _options_of_ours(self.case) if name in OURS else {}
        if mode.endswith(PROVIDER):
            options = _on_provider(mode, options)
        elif mode:
            settings["mode"] = mode
        if options:  # PyTorch takes either a mode or options
            settings["options"] = options
        if self.case.mode == "decode":  # ``generate`` is a method of the model
            model.forward = torch.compile(model.forward, **settings)
            return model
        compiled: Callable[..., Any] = torch.compile(model, **settings)
        return compiled

    def _peak(self) -> int | None:
        return self._above_before(machine.peak()) if self._is_peak_reset else None

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


def _on_provider(name: str, options: dict[str, object]) -> dict[str, object]:
    """The options with one provider, and its options if it is among their providers; then the CPU's."""
    given: Any = options.get("providers", ())
    provider = next((item for item in given if not isinstance(item, str) and item[0] == name), name)
    return {**options, "providers": [provider, "CPUExecutionProvider"]}


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
    line = f"{type(error).__name__}: {first_line(_COLOURS.sub('', str(error)).strip())[:200]}".removesuffix(": ")
    if type(error).__name__ in ("InvalidCxxCompiler", "CppCompileError"):
        return f"inductor needs a working C++ compiler (g++ or clang++, or CXX=...); {line}"
    return line if error.__cause__ is None else f"{line} Caused by {error_line(error.__cause__)}"


def main() -> None:
    """Answers requests until standard input is closed."""
    worker = RequestHandler()

    def answer(request: dict[str, Any]) -> dict[str, object]:
        try:
            return {"ok": getattr(worker, request.pop("do"))(**request)}
        except (UsageError, WorkerError) as error:
            kind, message = error.kind, str(error)
        except Exception as error:  # whatever a model or a backend raises is a row of the table
            traceback.print_exc()
            kind, message = "failed", error_line(error)
        return {"error": {"kind": kind, "message": message}}

    answer_requests(answer)
