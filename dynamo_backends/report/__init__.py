"""``report.html``: a run of ``onnx_debug`` in one file, which needs no network. It does not import PyTorch.

``gathering`` reads a dump; ``rendering`` puts the values into the template in ``page/``.
"""

from __future__ import annotations

from .gathering import ReportData, gather
from .rendering import render, write_page

__all__ = ["ReportData", "gather", "render", "write_page"]
