"""Tools that observe or change every operator while a model runs, in eager mode and in graphs of our backends.

::

    from dynamo_backends import op_tools

    with op_tools.OpAutoCompare():
        loss = model(x).sum()
        loss.backward()

Each tool is a context manager with ``start()`` and ``stop()``. Tools can be nested, and leave nothing behind after the
block. They use PyTorch's modes and hooks, and replace no function.
"""

from .capture import OpCapture
from .compare import OpAutoCompare
from .conversion import OpDtypeCast, OpFallback
from .observers import OpObserve, OpOverflowCheck, OpTimeMeasure
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
