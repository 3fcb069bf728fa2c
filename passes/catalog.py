"""The built-in passes, in the order they run within their stage. Importing this module registers them.

``engine/registry.py`` imports it before it lists or registers passes. Each pass is a module or folder
``passes/<stage>/<name>`` with a ``PASS``.
"""

from __future__ import annotations

import importlib

from .engine.registry import Pass, register
from .order import ORDER

OURS: tuple[Pass, ...] = tuple(importlib.import_module(f".{name}", __package__).PASS for name in ORDER)

for item in OURS:
    register(item)
