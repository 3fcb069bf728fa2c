"""Renders a report as one HTML file: template, style, script and data.

Names and strings of the user's model must not become markup. The template escapes its values; the other values are
JSON in ``<script type="application/json">``, with ``<`` escaped, and the page's script writes them as text nodes. The
content security policy allows only our style and script, by their digests, and no connections.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from .gathering import ReportData

_SCRIPTS = ("elements.js", "grid.js", "plot.js", "lines.js", "overview.js", "graph.js", "main.js")
"""In the order they are in the page."""

_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def render(report: ReportData) -> str:
    """The HTML of a report."""
    style = _file("report.css")
    script = "\n".join(map(_file, _SCRIPTS))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_file("report.html.jinja")).render(
        title=report.overview["run"],
        policy=_policy(style, script),
        style=Markup(style),  # trusted, like the script; the policy has their digests
        script=Markup(script),
        overview=as_json(report.overview),
        parts=[(name, as_json(value)) for name, value in report.parts.items()],
    )


def write_page(report: ReportData, path: Path) -> Path:
    """Writes the page atomically; returns its path."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(render(report), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def as_json(value: object) -> Markup:
    """JSON for a ``<script>``, with the characters of markup escaped.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.translate(_ESCAPED))


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("page").joinpath(name).read_text(encoding="utf-8").rstrip()
