"""Our name in PyTorch's logs: ``TORCH_LOGS="+dynamo_backends"``, and ``TORCH_LOGS=help`` lists it.

PyTorch calls ``register`` when it is imported, before it reads ``TORCH_LOGS``: an entry point in the group
``torch.backends``. It does so in every process of the environment that imports PyTorch, also in those that do not use
this package, and an exception in it ends the import of PyTorch: ``RuntimeError: Failed to load the backend extension``.
So this module and ``dynamo_backends/__init__.py``, which is imported for it, import nothing themselves, and
``register`` raises nothing.

Where entry points are turned off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``dynamo_backends`` still works in
``TORCH_LOGS``, as the name of a package; ``passes`` is then another.
"""


def register() -> None:
    """Makes ``dynamo_backends`` a name of PyTorch's logs, which stands for our passes, too."""
    try:
        from torch._logging._internal import register_log

        register_log("dynamo_backends", ["dynamo_backends", "passes"])
    except Exception:
        # Any exception, on purpose, and only here. The interface is private: a later PyTorch may move it, change its
        # arguments, or fail in it. Then a name in TORCH_LOGS is missing; without this line, ``import torch`` would fail
        # in programs that never use this package. For their sake nothing is logged either.
        return
