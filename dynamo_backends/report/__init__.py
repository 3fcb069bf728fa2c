"""``report.html``: a run of ``onnx_debug`` to look at, in one file that needs no network; PyTorch is not imported.

``gathering`` reads a dump into plain values; ``rendering`` puts them into the template in ``page/``.
"""

from __future__ import annotations

from .gathering import Report, gather
from .rendering import render, write_page

__all__ = ["Report", "gather", "render", "write_page"]
