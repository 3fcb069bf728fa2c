"""Checks, once when it is imported, that what is installed fits together.

Whatever needs PyTorch imports this module first. An untested, newer PyTorch is a warning; another package called
``passes`` in front of ours is an error.
"""

from __future__ import annotations

import importlib
import warnings

import torch
from packaging.version import Version

from ..versions import TESTED


def warn_if_untested(version: str = torch.__version__) -> None:
    """Warns, with the tested versions, if a version of PyTorch is newer than all of them.

    Args:
        version: such as ``2.15.0+cpu``; another patch, build or prerelease of a tested version counts as tested.
    """
    if Version(version).release[:2] > Version(TESTED[-1]).release:
        warnings.warn(
            f"dynamo-backends was tested with PyTorch {', '.join(TESTED)}, not with the installed {version}. Should it "
            f"fail, install an older one: pip install 'torch=={TESTED[-1]}.*'",
            stacklevel=3,  # the import of the package, not its __init__.py
        )


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


check_passes_package()
warn_if_untested()
