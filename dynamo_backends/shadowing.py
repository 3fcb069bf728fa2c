"""Notices another module called ``passes`` in front of ours."""

from __future__ import annotations

import importlib


def check_passes_package() -> None:
    """Imports ``passes`` and checks that it is this distribution's.

    Raises:
        ImportError: it is another one; the message names the file in the way and the remedy.
    """
    module = importlib.import_module("passes")
    if getattr(module, "__dynamo_backends_passes__", False):
        return
    where = getattr(module, "__file__", None) or list(getattr(module, "__path__", ["an unknown place"]))[0]
    raise ImportError(
        f"dynamo-backends needs its package 'passes', but {where} is in front of it on sys.path. "
        "Rename that file, or start Python from another folder."
    )
