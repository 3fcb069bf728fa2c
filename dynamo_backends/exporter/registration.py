"""``register_converter``: users register converters of operators, in their program or in an installed package.

::

    import torch
    from onnxscript import opset18 as op
    from dynamo_backends import register_converter

    @register_converter(torch.ops.my_package.swish)
    def swish(x, beta=1.0):
        return op.Mul(x, op.Sigmoid(op.Mul(x, beta)))

A package names modules that register converters in the entry-point group ``dynamo_backends_converters``; they are
imported at first use::

    # setup.cfg of the package:  [options.entry_points]
    #                            dynamo_backends_converters =
    #                                mine = my_package.converters
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

import torch

from passes.engine.origins import described, is_defined_again

from ..common.fork_safety import Lock

logger = logging.getLogger(__name__)

ENTRY_POINTS = "dynamo_backends_converters"

Converter = TypeVar("Converter", bound=Callable[..., object])

_converters: dict[object, Callable[..., object]] = {}
"""By ATen overload. Replaced instead of mutated, as other threads may read it."""

_names: tuple[object, frozenset[str]] = (_converters, frozenset())
"""``_converters``, and the names of its operators."""

_registering = Lock()


def register_converter(
    *targets: torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.library.CustomOpDef,
) -> Callable[[Converter], Converter]:
    """A decorator that registers a function as the converter of operators; it precedes torchlib's converter and ours.

    The function takes the operator's arguments:

    - a tensor as an ``onnx_ir.Value`` with known ``dtype`` and ``shape``, in which symbolic sizes are expressions;
    - a symbolic integer as an ``onnx_ir.Value``, a scalar of int64;
    - a ``torch.dtype`` as an ``onnx_ir.DataType``;
    - any other argument unchanged.

    It emits ONNX nodes by calling operators of an ``onnxscript`` opset (``from onnxscript import opset18 as op``),
    operators of another domain (``operator_set``), or onnxscript functions, which become functions of the model. It may
    be an onnxscript function itself. It returns a value, or a tuple of values if the operator returns several, with
    ``None`` for a result that the operator does not compute. For arguments that it does not support, it raises
    ``NotTranslatable(reason)``.

    Each result must have the dtype and shape of the operator's fake (or ``meta``) implementation. If ONNX's inference
    does not know them, the node is run once and its results are compared with PyTorch's. If a result differs or the
    function raises, the node runs in PyTorch, and a warning names the operator, the user's line and the error. With
    ``options={"fallback": "error"}`` this is an error. ``op_tools.OpAutoCompare(reference="onnx")`` tests a converter's
    values on sample calls.

    AOTAutograd does not decompose an operator with a registered converter, and no pass rewrites its nodes, except the
    passes without which results would be wrong (``onnx.long_sums``, ``onnx.kept_casts``). If a function is defined
    again, in a reloaded module or notebook cell, it replaces the previous one with a warning. Compiled graphs keep
    their converter.

    Args:
        *targets: operators: an overload (``torch.ops.aten.relu.default``), all overloads of one
            (``torch.ops.my_package.swish``), or the result of ``torch.library.custom_op``.

    Raises:
        TypeError: a target is not an operator, or the decorated object is not callable.
        ValueError: there is no target, or an operator already has another converter.
    """
    overloads = [overload for target in targets for overload in _overloads(target)]
    if not overloads:
        raise ValueError("register_converter takes at least one operator, such as torch.ops.my_package.my_operator")

    def register(function: Converter) -> Converter:
        if not callable(function):
            raise TypeError(f"expected a function that emits ONNX operators, got {function!r}")
        global _converters
        with _registering:
            for overload in overloads:
                registered = _converters.get(overload)
                # A converter may be an onnxscript function.
                old, new = (getattr(item, "function", item) for item in (registered, function))
                if registered is None or is_defined_again(old, new):
                    continue
                raise ValueError(
                    f"{overload} already has the converter {described(registered)}; to register "
                    f"{described(function)}, call unregister_converter(torch.ops.{overload}) first"
                )
            replaced = [item for item in overloads if _converters.get(item, function) is not function]
            _converters = {**_converters, **dict.fromkeys(overloads, function)}
        for overload in replaced:
            logger.warning("the converter of %s is replaced by %s", overload, described(function))
        if all(map(_is_composite, overloads)):
            logger.warning(
                "%s is composite: AOTAutograd decomposes it before the translation, so its converter is rarely called. "
                "Register converters for the operators that it decomposes to, or write a pass.",
                overloads[0],
            )
        return function

    return register


def unregister_converter(*targets: object) -> None:
    """Removes the registered converters of operators, which then have torchlib's converter or ours, if there is one.

    Compiled graphs keep their converter. Operators without a registered converter are ignored.

    Args:
        *targets: as in ``register_converter``.

    Raises:
        TypeError: a target is not an operator.
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
        # Overloads without a kernel are TorchScript's, for Python numbers; they do not occur in graphs.
        return [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    raise TypeError(f"expected an operator such as torch.ops.my_package.my_operator, got {target!r}")


def _is_composite(overload: torch._ops.OpOverload) -> bool:
    return bool(overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def registered_converter(target: object) -> Callable[..., object] | None:
    """The registered converter of an operator, or ``None``."""
    _load_entry_points()
    return _converters.get(target)


def registered_targets() -> frozenset[object]:
    """The operators with a registered converter."""
    _load_entry_points()
    return frozenset(_converters)


def registered_names() -> frozenset[str]:
    """The names (``aten.add.Tensor``) of the operators with a registered converter."""
    global _names
    _load_entry_points()
    if _names[0] is not _converters:
        _names = _converters, frozenset(map(str, _converters))
    return _names[1]


@functools.cache
def _load_entry_points() -> None:
    """Imports the modules of all entry points, once. Warns of a module that cannot be imported."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception:  # a broken package must not break the user's model
            logger.warning(
                "the converters of entry point %s = %s cannot be imported", entry.name, entry.value, exc_info=True
            )
