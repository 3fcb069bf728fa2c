"""How long the sessions of ONNX Runtime have run in the current thread.

It imports nothing: the runtime counts here, and ``call_recorder`` reads it, which counts events of PyTorch too.
"""

from __future__ import annotations

import threading


class _Clock(threading.local):
    seconds = 0.0


SESSION_CLOCK = _Clock()
"""``seconds`` is the time of all runs so far in this thread."""
