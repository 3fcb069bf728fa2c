"""``report.html``: a run of ``onnx_debug`` to look at, in one file that needs no network.

::

    from dynamo_backends.dumps.reading import find_run
    from dynamo_backends.report import gather, write_page

    run = find_run("onnx_debug")
    write_page(gather(run), run.folder / "report.html")

``gathering`` reads a dump into plain values, with ``differences`` for what changed between two stages; ``rendering``
puts them into the template in ``page/`` with its style and its script. Nothing is read but the dump, and PyTorch is not
imported.
"""

from __future__ import annotations

from .gathering import Report, gather
from .rendering import render, write_page

__all__ = ["Report", "gather", "render", "write_page"]
