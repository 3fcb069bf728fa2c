"""Runs an ONNX file in ONNX Runtime with default settings, and compares its results, and the values inside, with eager
and float64."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..common.random_state import RandomState
from ..common.safety_net import caught
from ..dumps.model_values import Runtime
from ..dumps.models import OnnxModel, load_model
from ..dumps.program_comparison import ProgramReference, compare_with_reference
from ..dumps.reading import DumpError
from ..errors import ExportError, first_line
from ..exporter.upstream_faults import tolerated_in_a_file
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
        self._path = path
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
        except ORT_ERRORS as error:
            raise ExportError(f"ONNX Runtime rejects the model: {without_code(str(error))}") from error

    @functools.cached_property
    def model(self) -> OnnxModel:
        """The file as data."""
        return load_model(self._path, self._path.name)

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
    captured: Captured, module: torch.nn.Module, call: Call, session: FileSession, actual: Mapping[str, torch.Tensor]
) -> tuple[str, str, list[str]]:
    """How results, or values inside the file, differ from those of the module by more than rounding; empty if none do.

    The results are compared with those of the captured program in float64. The module in eager must be as near to them
    as the program is, in two calls, or ``torch.export`` captured something else. Each value inside the file is compared
    with what the program computes from the values before it, which finds a wrong node that the results do not show.

    Args:
        captured: what was exported.
        module, call: what eager runs, on copies of the arguments.
        session: of the file.
        actual: the results to judge, by name.

    Returns:
        The difference; why a result is not judged, or ``""``; and what else could not be compared, with the reason.
    """
    graph, weights = captured.reference
    interpreter = fx.Interpreter(graph)

    def run(*values: object) -> list[object]:
        results = interpreter.run(*values, enable_io_processing=False)
        return [results[i] for i in captured.returned]

    with torch.no_grad():
        check = FunctionCheck(run, [*weights, *pytree.tree_leaves(call)], RandomState.now())

    def in_eager() -> Sequence[object]:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, call)
        with torch.no_grad():
            eager = pytree.tree_leaves(module(*args, **kwargs))
        return [eager[i] for i in captured.returned]

    names, unstable, wrong = list(actual), "", ""
    other = "torch.export captured something else than the model computes in this call; "
    # twice in eager: a number that the module counts differs in one of them
    for what, results in ((other, in_eager), (other, in_eager), ("", actual.values)):
        try:
            for i, found in check.judge_all(dict(enumerate(results()))):
                if found.is_wrong:
                    wrong = f"{what}result {names[i]}: {found}"
                    break
        except UnstableError as error:
            unstable = str(error)
        if what and wrong:
            return wrong, unstable, []
    unchecked = [f"eager is the reference of {name}, not float64: {why}" for name, why in check.inexact.items()]
    try:
        wrong = _wrong_node(captured, call, session, results_differ=bool(wrong)) or wrong
    except Exception as error:  # the results were compared
        if not isinstance(error, DumpError):
            caught("the comparison of the values inside the file", error, "Its results were compared")
        unchecked.append(f"the values inside the file: {first_line(str(error))}")
    return wrong, unstable, unchecked


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _wrong_node(captured: Captured, call: Call, session: FileSession, *, results_differ: bool) -> str:
    """The first wrong value inside the file, with its line and module; ``""`` if all are right.

    What may differ in a file, such as the order of equal values, is not judged, see ``ExportedFile.unchecked``. If the
    results differ, the file as ONNX Runtime optimizes it is compared too.
    """
    leaves = pytree.tree_leaves(call)
    given = {node.name: weight.tensor for node, weight in captured.weights.items()}
    given |= {node.name: leaves[i] for node, i in zip(captured.inputs, captured.leaves, strict=True)}
    stored = {node.name: weight.name for node, weight in captured.weights.items()}
    graph = captured.decomposed.graph
    if any(_is_half(node) for node in graph.nodes):
        raise DumpError("between nodes in half precision ONNX Runtime keeps the digits of float32, which are not seen")
    tolerated = {node for node in graph.nodes if any(tolerated_in_a_file(node))}
    tolerated |= {item for node in tolerated for item in node.users if item.target is operator.getitem}
    arguments = [given[node.name] for node in graph.find_nodes(op="placeholder")]
    reference = ProgramReference(captured.decomposed, arguments, stored, {node.name for node in tolerated})
    names = {name: node.name for node, name in captured.inputs.items()}
    for optimize in (False, True)[: 1 + results_differ]:
        found = compare_with_reference("the model", reference, session.model, Runtime(optimize=optimize), names)
        if found.first_different is not None:
            by = ", by ONNX Runtime's optimizers" if optimize else ""
            return f"{found.verdict.removeprefix('diverges ')}{by}"
    return ""
