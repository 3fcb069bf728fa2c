"""Graph passes for a compiler whose target is ONNX: the public names for an author of passes.

A pass is a function that changes a graph in place; ``register_pass`` gives it a name and a stage::

    from passes import fx_editing, register_pass

    @register_pass("post_grad.someone.unnegate", "Replaces neg(neg(x)) by x.")
    def unnegate(module, context):
        ...

- ``register_pass``, ``register``, ``unregister``, ``Pass``: passes and their order;
- ``PassContext``, ``Target``, ``NearMiss``: what a pass knows of the compile, and the reasons it reports;
- ``fx_editing``, ``onnx_editing``: checked changes of FX graphs and ONNX models;
- ``Pattern``, ``pattern_pass``: a search and a replacement function as a pass on FX graphs;
- ``OnnxPattern``, ``onnx_pattern_pass``: the same on ONNX models, also with rewrite rules of onnxscript.

``passes/engine`` runs passes, ``passes/order.py`` lists the built-in ones. Nothing here knows the backends. Names are
imported at first use: a process that reads its compiled graphs from a cache imports no pass.
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
    from .engine.results import NearMiss

__dynamo_backends_passes__ = True

__all__ = [
    "NearMiss",
    "OnnxPattern",
    "Pass",
    "PassContext",
    "Pattern",
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

_MODULES = {
    **dict.fromkeys(("PassContext", "Target"), ".engine.context"),
    "NearMiss": ".engine.results",
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
    module = importlib.import_module(_MODULES[name], __name__)
    value = globals()[name] = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
