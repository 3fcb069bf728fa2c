"""Run and debug PyTorch models on ONNX Runtime through ``torch.compile``.

Nothing needs to be imported for ``torch.compile(model, backend="onnxrt")``. What is here serves those who call
AOTAutograd themselves::

    from torch._dynamo.backends.common import aot_autograd
    from dynamo_backends import decomposition_table, onnx_compiler, partition_joint_graph

    records = []
    backend = aot_autograd(
        fw_compiler=onnx_compiler(debug=True, dump_dir="dump", record=records),
        partition_fn=partition_joint_graph,
        decompositions=decomposition_table(),
    )
"""

from .shadowing import check_passes_package

check_passes_package()

from .aot import partition_joint_graph  # noqa: E402
from .backends import onnx_compiler  # noqa: E402
from .errors import SessionError, TranslationError, UnsupportedOperatorError  # noqa: E402
from .exporter.decompositions import decomposition_table  # noqa: E402

__all__ = [
    "SessionError",
    "TranslationError",
    "UnsupportedOperatorError",
    "decomposition_table",
    "onnx_compiler",
    "partition_joint_graph",
]
