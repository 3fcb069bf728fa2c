"""Checks once, at import, that the installed packages fit together.

Modules that need PyTorch import this one first. An untested, newer PyTorch is a warning. Another package named
``passes`` that hides ours is an error.
"""

from __future__ import annotations

import importlib
import warnings

import torch
from packaging.version import Version

from ..versions import TESTED


def warn_if_untested(version: str = torch.__version__) -> None:
    """Warns if a version of PyTorch is newer than all tested ones. Patches, builds and prereleases do not matter."""
    if Version(version).release[:2] > Version(TESTED[-1]).release:
        warnings.warn(
            f"dynamo-backends was tested with PyTorch {', '.join(TESTED)}, not with the installed {version}. If it "
            f"fails, install an older one: pip install 'torch=={TESTED[-1]}.*'",
            stacklevel=3,  # the import of the package, not its __init__.py
        )


def check_passes_package() -> None:
    """Imports ``passes`` and checks that it belongs to this distribution.

    Raises:
        ImportError: it does not; the message names the file that hides it.
    """
    module = importlib.import_module("passes")
    if getattr(module, "__dynamo_backends_passes__", False):
        return
    where = getattr(module, "__file__", None) or list(getattr(module, "__path__", ["an unknown place"]))[0]
    raise ImportError(
        f"dynamo-backends needs its package 'passes', but {where} comes before it on sys.path. "
        "Rename that file, or start Python from another folder."
    )


check_passes_package()
warn_if_untested()
