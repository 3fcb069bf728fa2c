"""Our own passes, in the order they run within their stage. Importing it registers them, before those of others.

It is imported when passes are first asked for, or another is registered (``engine/registry.py``).

A pass is a module ``passes/<stage>/<name>.py``, or a folder of that name, with a ``PASS``.
"""

from __future__ import annotations

import importlib

from .engine.registry import Pass, register
from .order import ORDER

OURS: tuple[Pass, ...] = tuple(importlib.import_module(f".{name}", __package__).PASS for name in ORDER)

for item in OURS:
    register(item)
