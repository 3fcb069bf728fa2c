"""How long the sessions of ONNX Runtime have run in the current thread.

The runtime adds to it and ``call_statistics`` reads it. It is a module of its own, so that the runtime need not
import ``events``.
"""

from __future__ import annotations

import threading


class _Clock(threading.local):
    seconds = 0.0


SESSION_CLOCK = _Clock()
"""``seconds`` is the time of all runs so far in this thread."""
