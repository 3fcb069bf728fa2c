"""Run and debug PyTorch models on ONNX Runtime through ``torch.compile``.

Nothing needs to be imported for ``torch.compile(model, backend="onnxrt")``. What is here serves those who call
AOTAutograd themselves::

    from torch._dynamo.backends.common import aot_autograd
    from dynamo_backends import decomposition_table, onnx_compiler

    records = []
    compiler = onnx_compiler(debug=True, dump_dir="dump", record=records)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=decomposition_table(),
    )
"""

from .shadowing import check_passes_package

check_passes_package()

from .torch_versions import warn_if_untested  # noqa: E402

warn_if_untested()

from .backends import onnx_compiler  # noqa: E402
from .errors import SessionError, TranslationError, UnsupportedOperatorError  # noqa: E402
from .exporter.decompositions import decomposition_table  # noqa: E402

__all__ = [
    "SessionError",
    "TranslationError",
    "UnsupportedOperatorError",
    "decomposition_table",
    "onnx_compiler",
]
