"""Runs an ONNX file in ONNX Runtime with default settings, and compares its results with eager and float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import ExportError
from ..numerics.function_runs import UnstableError
from ..numerics.whole_graph import FunctionCheck
from ..runtime.messages import ORT_ERRORS, without_code
from ..runtime.ort_internals import CALLS
from ..runtime.providers import CPU, SILENT
from ..runtime.tensors import memory_from_ort, number_to_ort, to_ort
from .arguments import Call
from .capture import Captured


class FileSession:
    """A session of an ONNX file on the CPU provider, with ONNX Runtime's default settings.

    Raises:
        ExportError: ONNX Runtime rejects the file.
    """

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = SILENT
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
        except ORT_ERRORS as error:
            raise ExportError(f"ONNX Runtime rejects the model: {without_code(str(error))}") from error

    def run(self, inputs: Mapping[str, torch.Tensor | int]) -> list[torch.Tensor]:
        """The results of a call, in order.

        Raises:
            ExportError: ONNX Runtime failed.
        """
        feeds = {
            name: to_ort(item.detach()) if isinstance(item, torch.Tensor) else number_to_ort(item)
            for name, item in inputs.items()
        }
        outputs = self._session.get_outputs()
        devices = [CALLS.device("cpu", 0)] * len(outputs)
        names = [item.name for item in outputs]
        try:
            values = CALLS.run(
                self._session, onnxruntime.RunOptions(), list(feeds), list(feeds.values()), [], names, devices
            )
        except ORT_ERRORS as error:
            raise ExportError(f"ONNX Runtime fails: {without_code(str(error))}") from error
        results = map(memory_from_ort, values)
        return [
            result.view(torch.bool) if item.type == "tensor(bool)" else result
            for result, item in zip(results, outputs, strict=True)
        ]


def difference(
    captured: Captured, module: torch.nn.Module, call: Call, actual: Mapping[str, torch.Tensor]
) -> tuple[str, str, Mapping[str, str]]:
    """How results differ from those of the module by more than rounding; empty if they do not.

    The float64 results are those of the captured program. The module in eager must be as near to them as the program
    is, in two calls, or ``torch.export`` captured something else.

    Args:
        captured: what was exported.
        module, call: what eager runs, on copies of the arguments.
        actual: the results to judge, by name.

    Returns:
        The difference; why a result is not judged, or ``""``; and the operators whose reference is not float64, with
        the reason.
    """
    graph, weights = captured.reference
    interpreter = fx.Interpreter(graph)

    def run(*values: object) -> list[object]:
        results = interpreter.run(*values, enable_io_processing=False)
        return [results[i] for i in captured.returned]

    with torch.no_grad():
        check = FunctionCheck(run, [*weights, *pytree.tree_leaves(call)], torch.get_rng_state())

    def in_eager() -> Sequence[object]:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, call)
        with torch.no_grad():
            eager = pytree.tree_leaves(module(*args, **kwargs))
        return [eager[i] for i in captured.returned]

    names, unstable = list(actual), ""
    other = "torch.export captured something else than the model computes in this call; "
    # twice in eager: a number that the module counts differs in one of them
    for what, results in ((other, in_eager), (other, in_eager), ("", actual.values)):
        try:
            for i, found in check.judge_all(dict(enumerate(results()))):
                if found.is_wrong:
                    return f"{what}result {names[i]}: {found}", "", check.inexact
        except UnstableError as error:
            unstable = str(error)
    return "", unstable, check.inexact
