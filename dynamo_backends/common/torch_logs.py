"""Registers our name in PyTorch's logs, for ``TORCH_LOGS="+dynamo_backends"`` and ``TORCH_LOGS=help``.

PyTorch calls ``register`` when it is imported, before it reads ``TORCH_LOGS``: an entry point in the group
``torch.backends``. This happens in every process of the environment, also in programs that do not use this package, and
an exception would make ``import torch`` fail. So this module and ``dynamo_backends/__init__.py`` import nothing, and
``register`` never raises.

Without entry points (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``dynamo_backends`` still works in ``TORCH_LOGS`` as the
name of a package, but does not include ``passes``.
"""


def register() -> None:
    """Registers ``dynamo_backends`` as a log name that includes ``passes``."""
    try:
        from torch._logging._internal import register_log

        register_log("dynamo_backends", ["dynamo_backends", "passes"])
    except Exception:  # the interface is private; without the name, at least ``import torch`` works
        return
