"""The names of ONNX Runtime's graph optimizers, which can be disabled one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_NAMES = """
    AttentionFusion BiasDropoutFusion BiasGeluFusion BiasSkipLayerNormFusion BiasSoftmaxFusion
    CastChainElimination CastElimination ClipQuantRewrite CommonSubexpressionElimination ConstantFolding
    ConstantSharing ConvActivationFusion ConvAddActivationFusion ConvAddFusion ConvBNFusion ConvMulFusion
    DQMatMulNBitsFusion DivMulFusion DoubleQDQPairsRemover DynamicQuantizeMatMulFusion EliminateDropout
    EliminateIdentity EliminateSlice EmbedLayerNormFusion EnsureUniqueDQForNodeUnit ExpandElimination
    FastGeluFusion FuseFp16InitializerToFp32NodeTransformer FuseReluClip GatherSliceToSplitFusion
    GatherToSliceFusion GeluApproximation GeluFusionL1 GeluFusionL2 GemmActivationFusion GemmSumFusion
    GemmTransposeFusion GroupQueryAttentionFusion GroupQueryAttentionPreNormFusion LabelEncoderFusion
    LayerNormFusionL1 LayerNormFusionL2 MatMulActivationFusion MatMulAddFusion MatMulIntegerToFloatFusion
    MatMulNBitsFusion MatMulNBitsMlpFusion MatMulNBitsQLoRAFusion MatMulNBitsQkvFusion MatMulScaleFusion
    MatMul_BatchNormalization_Fusion MatmulTransposeFusion NchwcTransformer NhwcTransformer NoopElimination
    NotWhereFusion Pad_Fusion PreShapeNodeElimination QDQFinalCleanupTransformer QDQPropagationTransformer
    QDQS8ToU8Transformer QDQSelectorActionTransformer QuickGeluFusion ReluQuantRewrite ReshapeFusion
    SimplifiedLayerNormFusion SkipLayerNormFusion SliceConcatToSpaceToDepthFusion SwiGluFusion
    TransposeOptimizer TransposeOptimizer_CPUExecutionProvider UnsqueezeElimination WeightBiasQuantization
    WhereDummyDq
"""

OPTIMIZERS = tuple(_NAMES.split())
"""Names for ``InferenceSession(disabled_optimizers=...)``, of ONNX Runtime 1.31 and 1.32 (which added ``SwiGluFusion``
and ``MatMulNBitsQLoRAFusion``). ONNX Runtime ignores names it does not know."""


def wrong_optimizer(is_right: Callable[[Sequence[str]], bool | None]) -> str:
    """The name of the optimizer that makes a session wrong, found by halving; ``""`` if no single one does.

    ``is_right`` says whether the session is right with some optimizers disabled.
    """
    if not is_right(OPTIMIZERS):
        return ""
    suspects = OPTIMIZERS
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if is_right(half) else suspects[len(half) :]
    return suspects[0] if is_right(suspects) else ""
