"""What the passes are measured against: ``torch.onnx.export`` and all the optimization onnxscript has."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch
from onnxscript import optimizer
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from benchmarks.counting import count_attentions, count_operators
from dynamo_backends.runtime.session import SessionSettings


def export(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], Callable[[], list[torch.Tensor]] | None]:
    """Exports a model, optimizes it with ``onnxscript.optimizer`` and ``ort_fusions``, and loads it.

    Where a step fails, what came out of the last one that ONNX Runtime loads is measured, and ``failed`` says which
    step failed and why. The session has the settings of our own.

    Args:
        model: in evaluation mode.
        inputs: its keyword arguments.

    Returns:
        The model's size, and what runs it on the inputs; ``None`` if there is nothing to run.
    """
    summary: dict[str, Any] = {}
    run = None
    start = time.perf_counter()
    step = "torch.onnx.export"
    try:
        program = torch.onnx.export(copy.deepcopy(model), (), kwargs=dict(inputs), dynamo=True, verbose=False)
        assert program is not None
        step = "onnxscript.optimizer"
        optimized = optimizer.optimize(program.model)
        step = "session"
        run = _load(optimized, inputs, summary)
        step = "ort_fusions"
        fused, _ = optimize_for_ort(optimized.clone())
        step = "session after ort_fusions"
        run = _load(fused, inputs, summary)
        summary["seconds"] = time.perf_counter() - start
    except Exception as error:  # whatever fails in others' code, the rest is measured
        summary["failed"] = f"{step}: {type(error).__name__}: {_first_line(str(error))}"
    return summary, run


def _load(
    model: ir.Model, inputs: Mapping[str, torch.Tensor], summary: dict[str, Any]
) -> Callable[[], list[torch.Tensor]]:
    """A session's call, tried once; the size of its model goes into the summary."""
    settings = SessionSettings(("CPUExecutionProvider",))
    options = settings.options(settings.current_threads)
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(optimized)
        session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=list(settings.providers)
        )
        session_nodes = sum(count_operators([ir.load(optimized)]).values())
    feeds = {item.name: inputs[item.name].numpy() for item in session.get_inputs()}

    def run() -> list[torch.Tensor]:
        return [torch.from_numpy(value) for value in session.run(None, feeds)]

    run()
    operators = count_operators([model])
    summary |= {
        "nodes": sum(operators.values()),
        "session_nodes": session_nodes,
        "attentions": count_attentions(operators),
        "operators": dict(operators.most_common()),
    }
    return run


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""
