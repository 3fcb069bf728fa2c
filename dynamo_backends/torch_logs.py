"""Our name in PyTorch's logs: ``TORCH_LOGS="+dynamo_backends"``, and ``TORCH_LOGS=help`` lists it.

PyTorch calls ``register`` when it is imported, before it reads ``TORCH_LOGS``: an entry point in the group
``torch.backends``. Where that is turned off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``dynamo_backends`` still works in
``TORCH_LOGS``, as the name of a package; ``passes`` is then another.
"""

from __future__ import annotations


def register() -> None:
    """Makes ``dynamo_backends`` a name of PyTorch's logs, which stands for our passes, too."""
    try:
        from torch._logging._internal import register_log
    except ImportError:  # private, and a PyTorch that has it elsewhere must not fail to be imported because of us
        return
    register_log("dynamo_backends", ["dynamo_backends", "passes"])
