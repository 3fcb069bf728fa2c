"""Which versions of PyTorch the package was tested with, and a warning on newer ones.

Private parts of PyTorch are used in ``aot.py`` and ``exporter/torch_internals.py``, and they change between versions.
``python tests/with_torch.py VERSION`` runs the tests with another version; one that passes is put into ``TESTED``.
"""

from __future__ import annotations

import warnings

import torch
from packaging.version import Version

TESTED = ("2.13", "2.14", "2.15")
"""Oldest first. The requirements of the package refuse what is older."""


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
