"""Checks the translation of one node by running it on example arguments, if ONNX cannot infer its result shapes.

It tests the translation, not a kernel: it always runs on the CPU provider.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import Kind, Reason, SessionError, WrongResultError
from ..exporter.results import number_dtype
from ..exporter.signature import used_results
from ..graphs.example_values import synthetic, valid_indices
from ..graphs.layout import hint_of
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.providers import CPU
from ..runtime.session import Session
from ..runtime.settings import SessionSettings

_MAX_ELEMENTS = 2**20
"""Elements of the largest example tensor."""


def wrong_result(node: fx.Node, model: ir.Model) -> Reason | None:
    """How a result of a node's model differs from eager's in shape or dtype; ``None`` if it does not, or is not known.

    Args:
        node: the node, with ``meta["val"]`` on itself and its arguments. Symbolic sizes have the values from the
            capture of the graph.
        model: takes ``node.all_input_nodes``, and returns the node's results that are read and not ``None``.
    """
    value = node.meta["val"]
    results = [value[i] for i in used_results(node)] if isinstance(value, (tuple, list)) else [value]
    results = [item for item in results if item is not None]
    arguments = [arg.meta["val"] for arg in node.all_input_nodes]
    if not all(map(_has_example, (*arguments, *results))) or not all(isinstance(r, torch.Tensor) for r in results):
        return None
    indices = valid_indices(node)
    if indices is None:
        return None
    inputs = [
        InputSpec(str(value.name), item.dtype if isinstance(item, torch.Tensor) else None)
        for value, item in zip(model.graph.inputs, arguments, strict=True)
    ]
    outputs = [
        OutputSpec(str(value.name), item.dtype, sizes=_sizes(item))
        for value, item in zip(model.graph.outputs, results, strict=True)
    ]
    try:
        session = Session(model, SessionSettings((CPU,), threads=1, optimize=False), inputs, outputs)
        with _disable_current_modes(), torch.no_grad():
            # Not 0, by which an integer division would end the process, if it is not an index.
            given = zip(node.all_input_nodes, arguments, strict=True)
            session([synthetic(item, indices.get(arg, 1)) for arg, item in given])
    except WrongResultError as error:
        return Reason(Kind.NO_TRANSLATION, f"on example arguments, its translation's result {error.what}")
    except SessionError:  # the arguments may be invalid for it
        return None
    return None


def example_sizes(node: fx.Node, model: ir.Model) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a node's arguments by input name of its model, ``()`` for numbers; ``None`` if a size is not known,
    or too large."""
    arguments = [arg.meta["val"] for arg in node.all_input_nodes]
    if not all(map(_has_example, arguments)):
        return None
    sizes = [_sizes(item) if isinstance(item, torch.Tensor) else () for item in arguments]
    return {str(value.name): given for value, given in zip(model.graph.inputs, sizes, strict=True)}


def _has_example(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return number_dtype(value) is not None and hint_of(value) is not None
    if value.device.type != "cpu" or any(hint_of(size) is None for size in value.shape):
        return False
    return math.prod(_sizes(value)) <= _MAX_ELEMENTS


def _sizes(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(hint_of, value.shape))
