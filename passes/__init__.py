"""Graph passes for a compiler whose target is ONNX: what an author of passes imports.

A pass is a function that changes a graph in place; ``register_pass`` gives it a name and a place::

    from passes import fx_editing, register_pass

    @register_pass("post_grad.someone.unnegate", "Replaces neg(neg(x)) by x.")
    def unnegate(module, context):
        ...

What is here:

- ``register_pass``, ``register``, ``unregister``, ``Pass``: passes and their place among the others;
- ``PassContext``, ``Target``, ``Refusal``: what a pass is told, and whom it asks;
- ``fx_editing``: functions that change FX graphs, and refuse what would not be the same;
- ``Pattern``, ``pattern_pass``: two functions as a pass on FX graphs;
- ``onnx_editing``: functions that change ONNX models, and refuse what would not be the same;
- ``OnnxPattern``, ``onnx_pattern_pass``: two functions, or a rewrite rule of onnxscript, as a pass on ONNX models.

``passes/engine`` has the machinery, ``passes/catalog.py`` the list of our own passes, ``passes/operators.py`` the
operators these put into graphs. Nothing here knows the backends that use it.

Each name is imported when it is first asked for, and our own passes when passes are: what finds its compiled graphs in
a cache starts without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .engine import registry

if TYPE_CHECKING:
    from . import catalog
    from .engine.context import PassContext, Target
    from .engine.fx import editing as fx_editing
    from .engine.fx.patterns import Pattern, pattern_pass
    from .engine.onnx import editing as onnx_editing
    from .engine.onnx.patterns import OnnxPattern, onnx_pattern_pass
    from .engine.registry import Pass, register, register_pass, unregister
    from .engine.results import Refusal

__dynamo_backends_passes__ = True

__all__ = [
    "OnnxPattern",
    "Pass",
    "PassContext",
    "Pattern",
    "Refusal",
    "Target",
    "catalog",
    "fx_editing",
    "onnx_editing",
    "onnx_pattern_pass",
    "pattern_pass",
    "register",
    "register_pass",
    "unregister",
]

_WHERE = {
    **dict.fromkeys(("PassContext", "Target"), ".engine.context"),
    "Refusal": ".engine.results",
    **dict.fromkeys(("Pattern", "pattern_pass"), ".engine.fx.patterns"),
    **dict.fromkeys(("OnnxPattern", "onnx_pattern_pass"), ".engine.onnx.patterns"),
    **dict.fromkeys(("Pass", "register", "register_pass", "unregister"), ".engine.registry"),
    "catalog": ".catalog",
    "fx_editing": ".engine.fx.editing",
    "onnx_editing": ".engine.onnx.editing",
}

registry.announce(f"{__name__}.catalog")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(".catalog", __name__)
    module = importlib.import_module(_WHERE[name], __name__)
    value = globals()[name] = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
