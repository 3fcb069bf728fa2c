"""When every node is right by itself and the session is not: which rewrite of the model makes the fault.

Two kinds of rewrites lie between the exported model and the session: our passes of the stage ``onnx``, and ONNX
Runtime's graph optimizers. The first is tried by running the models before and after it with ONNX Runtime's optimizers
off; the second by switching its optimizers off, half of the list at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx

from ..artifacts import CompiledRegion
from ..numerics.distance import Distance, distance
from ..runtime.binding import BoundSession
from .repeat import repeat_node

OPTIMIZERS = (
    "BiasDropoutFusion",
    "BiasGeluFusion",
    "BiasSkipLayerNormFusion",
    "BiasSoftmaxFusion",
    "CastChainElimination",
    "CastElimination",
    "CommonSubexpressionElimination",
    "ConcatSliceElimination",
    "ConstantFolding",
    "ConstantSharing",
    "ConvActivationFusion",
    "ConvAddActivationFusion",
    "ConvAddFusion",
    "ConvBNFusion",
    "ConvMulFusion",
    "DivMulFusion",
    "EliminateDropout",
    "EliminateIdentity",
    "EliminateSlice",
    "EmbedLayerNormFusion",
    "ExpandElimination",
    "FastGeluFusion",
    "FuseReluClip",
    "GatherSliceToSplitFusion",
    "GatherToSliceFusion",
    "GeluFusionL1",
    "GeluFusionL2",
    "GemmActivationFusion",
    "GemmSumFusion",
    "GemmTransposeFusion",
    "GroupQueryAttentionFusion",
    "GroupQueryAttentionPreNormFusion",
    "IsInfReduceSumFusion",
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "MatMulActivationFusion",
    "MatMulAddFusion",
    "MatMulBNFusion",
    "MatMulScaleFusion",
    "MatmulTransposeFusion",
    "NchwcTransformer",
    "NhwcTransformer",
    "NoopElimination",
    "NotWhereFusion",
    "PadFusion",
    "PreShapeNodeElimination",
    "QuickGeluFusion",
    "ReshapeFusion",
    "ShapeInputMerge",
    "SimplifiedLayerNormFusion",
    "SkipLayerNormFusion",
    "SliceConcatToSpaceToDepthFusion",
    "TransposeOptimizer",
    "UnsqueezeElimination",
)
"""Names for ``InferenceSession(disabled_optimizers=...)``; ONNX Runtime ignores those it does not have."""


def find_rewrite(compiled: CompiledRegion, actual: Mapping[fx.Node, object], value: str, observed: Distance) -> str:
    """Names the rewrite that makes ``value`` wrong.

    Args:
        compiled: the region.
        actual: the values of the run, by node.
        value: name of a region output that is wrong in the real session.
        observed: the distance of that value when the nodes are observed, which is right, as what comes near it.

    Returns:
        ``pass of the stage onnx``, ``ONNX Runtime optimizer NAME``, or ``ONNX Runtime's optimizers``.
    """
    search = _Search(compiled, actual, value)
    if search.is_right(compiled.model, optimize=False) and not search.is_right(
        compiled.optimized_model, optimize=False
    ):
        return "a pass of the stage onnx"
    if not search.is_right(compiled.optimized_model, disabled=OPTIMIZERS):
        return "ONNX Runtime's optimizers"
    suspects = list(OPTIMIZERS)
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if search.is_right(compiled.optimized_model, disabled=half) else suspects[len(half) :]
    if search.is_right(compiled.optimized_model, disabled=suspects):
        return f"ONNX Runtime optimizer {suspects[0]}"
    return "ONNX Runtime's optimizers"


def find_unstable_rewrite(compiled: CompiledRegion, actual: Mapping[fx.Node, object]) -> str:
    """Says where a region's results become others from run to run or with other threads, though those of its nodes do
    not.

    Args:
        compiled: the region.
        actual: the values of the run, by node.
    """
    arguments = [actual[item.node] for item in compiled.region.inputs]
    for model, culprit in (
        (compiled.model, "the exported model as a whole"),
        (compiled.optimized_model, "a pass of the stage onnx"),
    ):
        session = compiled.bound.session.variant(model, optimize=False)
        bound = BoundSession(session, compiled.bound.inputs, compiled.bound.outputs)
        if any(not found.is_rounding(None) for found in repeat_node(bound, arguments).values()):
            return culprit
    return "ONNX Runtime's optimizers, or a race that did not show again"


class _Search:
    """Runs variants of one region's session and says whether a value comes out as the observed model computes it."""

    def __init__(self, compiled: CompiledRegion, actual: Mapping[fx.Node, object], value: str) -> None:
        self._bound = compiled.bound
        self._arguments = [actual[item.node] for item in compiled.region.inputs]
        self._position = [spec.name.removesuffix("__memory") for spec in self._bound.outputs].index(value)
        plain = self._run(compiled.model, optimize=False)
        self._wrong_by = distance(self._run(compiled.optimized_model), plain.double()).max_abs
        self._plain = plain

    def is_right(self, model: ir.Model | None, *, optimize: bool = True, disabled: Sequence[str] = ()) -> bool:
        error = distance(self._run(model, optimize=optimize, disabled=disabled), self._plain.double())
        return error.nonfinite == 0 and error.max_abs < self._wrong_by / 2

    def _run(self, model: ir.Model | None, *, optimize: bool = True, disabled: Sequence[str] = ()) -> torch.Tensor:
        assert model is not None
        session = self._bound.session.variant(model, optimize=optimize, also_disabled=disabled)
        bound = BoundSession(session, self._bound.inputs, self._bound.outputs)
        result = bound(self._arguments)[self._position]
        assert isinstance(result, torch.Tensor)
        return result
