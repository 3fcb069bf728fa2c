"""onnx's reference evaluator, which is written in Python, with the operators that onnx-array-api adds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from .execution import operator_of


def reference_evaluator(model: onnx.ModelProto) -> onnx.reference.ReferenceEvaluator:
    """onnx-array-api's evaluator, without two operators that do not do what ONNX says.

    onnx-array-api 0.3's ``ScatterElements`` takes the reduction ``mul`` for none: onnx's own is used. onnx 1.23's
    ``GatherElements`` fails on more than 64 rows, and where there are fewer indices along another axis.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    class GatherElements(OpRun):
        """``data`` may be larger than ``indices`` along the other axes."""

        def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
            axis %= data.ndim
            within = tuple(slice(None if i == axis else size) for i, size in enumerate(indices.shape))
            return (np.take_along_axis(data[within], indices.astype(np.int64), axis),)

    known = [item for item in ExtendedReferenceEvaluator.default_ops if item.__name__ != "ScatterElements"]
    known.append(GatherElements)
    return ReferenceEvaluator(model, new_ops=ExtendedReferenceEvaluator.filter_ops(model, known, opsets=None))


def unknown_to_reference(nodes: Sequence[onnx.NodeProto]) -> str:
    """The operators of nodes that the reference evaluator does not have, or ``""``."""
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    added = {(item.op_domain, item.__name__.split("_")[0]) for item in ExtendedReferenceEvaluator.default_ops}
    unknown = {
        operator_of(node)
        for node in nodes
        if not onnx.defs.has(node.op_type, node.domain) and (node.domain, node.op_type) not in added
    }
    return ", ".join(sorted(unknown))
