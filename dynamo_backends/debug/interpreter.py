"""An ``fx.Interpreter`` for graphs of any stage, and the flat list of a graph's results."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import _pytree as pytree


class Interpreter(fx.Interpreter):
    """``fx.Interpreter`` that leaves ``torch.fx.traceback`` alone.

    PyTorch's sets the current node there for the whole process: a graph that AOTAutograd traces in another thread then
    gets the wrong metadata, or raises an ``AssertionError``. It also adds the node to the message of an exception, and
    makes a ``KeyError`` a ``RuntimeError``; a user's call must raise what eager raises.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)


def flat(values: object) -> list[Any]:
    """The leaves of nested results, ``None`` among them."""
    return pytree.tree_leaves(values, is_leaf=lambda value: value is None)
