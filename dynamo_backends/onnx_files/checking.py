"""Runs an ONNX file in ONNX Runtime with default settings, and compares its results with eager and float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime
import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..errors import ExportError
from ..numerics.reference_runs import ReferenceRuns, SharedCopies, copies
from ..numerics.same_results import difference_of_results
from ..runtime.messages import ORT_ERRORS, without_code
from ..runtime.ort_internals import CALLS
from ..runtime.providers import CPU, SILENT
from ..runtime.tensors import memory_from_ort, number_to_ort, to_ort
from .capture import Call


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
            values = CALLS.run(self._session, onnxruntime.RunOptions(), feeds, [], names, devices)
        except ORT_ERRORS as error:
            raise ExportError(f"ONNX Runtime fails: {without_code(str(error))}") from error
        results = map(memory_from_ort, values)
        return [
            result.view(torch.bool) if item.type == "tensor(bool)" else result
            for result, item in zip(results, outputs, strict=True)
        ]


def difference(module: torch.nn.Module, call: Call, actual: Mapping[str, torch.Tensor], returned: Sequence[int]) -> str:
    """How results differ from those of the module by more than rounding; empty if they do not.

    A module that does not run in float64 is compared with eager alone, of which half of the digits must agree.

    Args:
        module, call: what eager runs, on copies of its state and its arguments.
        actual: the results to judge, by name.
        returned: for each result, its position among the leaves of what the module returns.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    leaves, structure = pytree.tree_flatten(call)

    def run(*values: object) -> list[object]:
        given = dict(zip(state, values, strict=False))
        args, kwargs = pytree.tree_unflatten(list(values[len(state) :]), structure)
        results = pytree.tree_leaves(functional_call(module, given, args, kwargs))
        return [results[i] for i in returned]

    arguments = [*state.values(), *leaves]
    with torch.no_grad():
        try:
            runs = ReferenceRuns(run, SharedCopies(arguments), torch.get_rng_state())
        except Exception:  # whatever the model raises in float64
            expected = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, run(*copies(arguments)))
            return difference_of_results(expected, list(actual.values()))
    for i, (name, value) in enumerate(actual.items()):
        eager = runs.outputs.eager[i]
        if isinstance(eager, torch.Tensor) and value.dtype != eager.dtype:
            return f"result {name}: dtype {value.dtype} instead of {eager.dtype}"
        if message := str(runs.outputs.verdict(value, i)):
            return f"result {name}: {message}"
    return ""
