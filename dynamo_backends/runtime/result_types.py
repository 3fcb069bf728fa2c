"""What ONNX Runtime says that a node returns, for passes that put new nodes in a model."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ..errors import SessionError
from ..reasons import Reason
from .one_node import model_of, signature
from .oracle import Oracle
from .providers import Provider
from .session import Session
from .settings import SessionSettings

_DTYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    **{f"tensor({item.name.lower()})": item for item in ir.DataType},
}
"""ONNX Runtime's names of types."""

ResultType = tuple[ir.DataType, Sequence["int | str | None"] | None]
"""A result's dtype and shape; ``None`` for what is not known."""

_ORACLE: Oracle[dict[str, ResultType] | Reason] = Oracle(4096)


def result_types(node: ir.Node, providers: Sequence[Provider], opset: int) -> list[ResultType | None] | None:
    """The types of a node's results, from a session of it alone; ``None`` if the runtime does not run it.

    Args:
        node: its inputs have types and shapes, as far as they are known.
        providers: in the order of preference.
        opset: of the model that it is for.
    """
    shapes = tuple(None if value is None else str(value.shape) for value in node.inputs)
    question = (repr(providers), opset, signature(node), shapes)
    found = _ORACLE.ask(question, lambda: _find_out(model_of(node, opset, with_sizes=True), providers))
    return None if isinstance(found, Reason) else [found.get(f"output_{i}") for i in range(len(node.outputs))]


def _find_out(model: ir.Model, providers: Sequence[Provider]) -> dict[str, ResultType] | Reason:
    try:
        session = Session(model, SessionSettings(tuple(providers), threads=1, shares_graph=True, optimize=False))
    except SessionError as error:
        return error.reason
    return {
        item.name: (_DTYPES[item.type], _sizes(item.shape)) for item in session(1).get_outputs() if item.type in _DTYPES
    }


def _sizes(shape: Sequence[int | str | None]) -> Sequence[int | str | None] | None:
    """A shape as ONNX Runtime tells it, for which one that is not known is like that of a number: empty."""
    return [size if isinstance(size, (int, str)) else None for size in shape] if shape else None
