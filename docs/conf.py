"""Sphinx: ``sphinx-build -W docs docs/_build``. The pages are Markdown (MyST); tables come from the code."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))

import tables  # noqa: E402

project = "dynamo-backends"
author = "the dynamo-backends contributors"
release = metadata.version("dynamo-backends")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_use_ivar = True  # of attributes, which are described in the class's docstring
exclude_patterns = ["_build", "_generated", "examples", "gallery"]
myst_heading_anchors = 3
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"plot_.*\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,  # a tutorial that fails fails the build
    "image_scrapers": (),
    "reset_modules": ("tables.reset_compiler",),
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
}
html_theme = "furo"
html_title = f"{project} {release}"

_GENERATED = _HERE / "_generated"
_GENERATED.mkdir(exist_ok=True)
(_GENERATED / "options.md").write_text(tables.all_options(), encoding="utf-8")
(_GENERATED / "counters.md").write_text(tables.counters_table(), encoding="utf-8")
(_GENERATED / "commands.md").write_text(tables.commands_reference(), encoding="utf-8")
(_GENERATED / "passes.md").write_text(tables.passes_table(), encoding="utf-8")
(_GENERATED / "kept_passes.md").write_text(tables.kept_passes_table(), encoding="utf-8")
for name, table in tables.measured_tables().items():
    (_GENERATED / f"{name}.md").write_text(table, encoding="utf-8")
