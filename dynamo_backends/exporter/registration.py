"""Translations that other people write: ``register_converter``, and the entry points of packages that bring some.

::

    import torch
    from onnxscript import opset18 as op
    from dynamo_backends import register_converter

    @register_converter(torch.ops.my_package.swish)
    def swish(x, beta=1.0):
        return op.Mul(x, op.Sigmoid(op.Mul(x, beta)))

A package names a module in the entry-point group ``dynamo_backends_converters``; its import registers::

    # setup.cfg of the other package:  [options.entry_points]
    #                                  dynamo_backends_converters =
    #                                      mine = my_package.converters
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

import torch

from passes.engine import origins
from passes.engine.locks import Lock

logger = logging.getLogger(__name__)

ENTRY_POINTS = "dynamo_backends_converters"

Converter = TypeVar("Converter", bound=Callable[..., object])

_converters: dict[object, Callable[..., object]] = {}
"""By ATen overload. Replaced, never changed: a compile may read it."""

_registering = Lock()


def register_converter(
    *targets: torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.library.CustomOpDef,
) -> Callable[[Converter], Converter]:
    """A decorator that makes a function the translation of one or several operators to ONNX, before any other's.

    The function takes the operator's arguments: a tensor as an ``onnx_ir.Value`` with known ``dtype`` and ``shape``
    (symbolic sizes are expressions), a symbolic integer as a scalar ``onnx_ir.Value`` of int64, a ``torch.dtype`` as an
    ``onnx_ir.DataType``, other arguments as they are. It returns one value, or a tuple of as many as the operator
    returns, ``None`` in the place of a result that is not there. It writes ONNX nodes by calling the operators of an
    ``onnxscript`` opset (``from onnxscript import opset18 as op``), of another domain (``operator_set``), or an
    onnxscript function, which stays a function of the model; it may be an onnxscript function itself.

    Each result is checked: its dtype and shape must be those of the operator's fake (or ``meta``) implementation, and a
    result whose shape ONNX's inference does not know is computed once and compared with PyTorch's. If it differs, or if
    the function raises, the node runs in PyTorch, and a warning names the operator, the user's line and the fault; with
    ``options={"fallback": "error"}`` it is an error. For arguments that it does not take it raises
    ``NotTranslatable(reason)``.

    A function that is defined again, by a module that is reloaded or a cell of a notebook that runs again, takes the
    place of the former one, with a warning. What was compiled before keeps its translation. An operator that PyTorch
    would decompose stays whole from now on.

    Args:
        *targets: operators: an overload (``torch.ops.aten.relu.default``), all overloads of one
            (``torch.ops.my_package.swish``), or what ``torch.library.custom_op`` returned.

    Raises:
        TypeError: a target is no operator, or what is decorated is no function.
        ValueError: no target; another function is registered for the operator already.
    """
    overloads = [overload for target in targets for overload in _overloads(target)]
    if not overloads:
        raise ValueError("register_converter takes at least one operator, such as torch.ops.my_package.my_operator")

    def register(function: Converter) -> Converter:
        if not callable(function):
            raise TypeError(f"expected a function that writes ONNX operators, got {function!r}")
        global _converters
        with _registering:
            for overload in overloads:
                registered = _converters.get(overload)
                if registered is not None and not origins.is_defined_again(_written(registered), _written(function)):
                    raise ValueError(
                        f"{overload} has the converter {described(registered)} already; "
                        f"{described(function)} would replace it. Call unregister_converter(torch.ops.{overload}) first"
                    )
            replaced = [item for item in overloads if _converters.get(item, function) is not function]
            _converters = {**_converters, **dict.fromkeys(overloads, function)}
        for overload in replaced:
            logger.warning("the converter of %s is defined again: %s replaces it", overload, described(function))
        for overload in overloads:
            _warn_of_composite(overload)
        return function

    return register


def unregister_converter(*targets: object) -> None:
    """Takes registrations back: an operator has torchlib's or our translation again, if there is one.

    What was compiled before keeps the one it was compiled with. An operator without a registration is not an error.

    Args:
        *targets: as of ``register_converter``.

    Raises:
        TypeError: a target is no operator.
    """
    global _converters
    overloads = {overload for target in targets for overload in _overloads(target)}
    with _registering:
        _converters = {target: function for target, function in _converters.items() if target not in overloads}


def _overloads(target: object) -> list[torch._ops.OpOverload]:
    if isinstance(target, torch.library.CustomOpDef):
        target = getattr(getattr(torch.ops, target._namespace), target._name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        # Those of Python's numbers, which TorchScript has, are no operators of a graph.
        return [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    raise TypeError(f"expected an operator such as torch.ops.my_package.my_operator, got {target!r}")


def _warn_of_composite(overload: torch._ops.OpOverload) -> None:
    if overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        logger.warning(
            "%s is made of other operators, and AOTAutograd takes it apart before anything is translated: its "
            "converter is hardly ever called. Register one for the operators it is made of, or write a pass.",
            overload,
        )


def registered_converter(target: object) -> Callable[..., object] | None:
    """The translation that somebody registered for an operator, or ``None``."""
    _load_entry_points()
    return _converters.get(target)


def registered_targets() -> frozenset[object]:
    """The operators with a registered translation; AOTAutograd must not decompose them."""
    _load_entry_points()
    return frozenset(_converters)


def described(function: Callable[..., object]) -> str:
    """A converter's name and where it was written: ``swish (converters.py:12)``."""
    return origins.described(_written(function))


def written_at(function: Callable[..., object]) -> str:
    """Where a converter was written: ``converters.py:12``."""
    return origins.written_at(_written(function))


def _written(function: Callable[..., object]) -> object:
    """What somebody wrote of a converter: of an onnxscript function the Python function."""
    return getattr(function, "function", function)


@functools.cache
def _load_entry_points() -> None:
    """Imports the modules that packages name, once. One that cannot be imported is left out, with a warning."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception:  # any package may be broken in any way; the user's model still runs
            logger.warning("the converters of entry point %s = %s are left out", entry.name, entry.value, exc_info=True)
