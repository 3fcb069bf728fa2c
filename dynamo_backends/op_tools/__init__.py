"""Tools that look at, or change, every operator while a model runs: in eager mode, and in what our backends run.

::

    from dynamo_backends import op_tools

    with op_tools.OpAutoCompare():
        loss = model(x).sum()
        loss.backward()

Each tool is a context manager, and has ``start()`` and ``stop()``. They nest, and nothing of them remains after the
block. They are built on PyTorch's own modes and hooks; no function is replaced.
"""

from .capture import OpCapture
from .compare import OpAutoCompare
from .conversion import OpDtypeCast, OpFallback
from .observe import OpObserve
from .overflow import OpOverflowCheck
from .time_measure import OpTimeMeasure
from .tool import OpTool

__all__ = [
    "OpAutoCompare",
    "OpCapture",
    "OpDtypeCast",
    "OpFallback",
    "OpObserve",
    "OpOverflowCheck",
    "OpTimeMeasure",
    "OpTool",
]
