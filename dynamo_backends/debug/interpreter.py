"""Running an FX graph node by node."""

from __future__ import annotations

from typing import Any

from torch import fx


class Interpreter(fx.Interpreter):
    """``fx.Interpreter`` that another thread's compile does not see.

    PyTorch's tells ``torch.fx.traceback`` which node runs. That is kept for the process: a graph that AOTAutograd
    traces in another thread at the same time gets the wrong metadata, or ends with an ``AssertionError``.
    """

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)
