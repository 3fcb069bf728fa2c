"""Checks once, when it is imported, that what is installed fits together; whatever needs PyTorch imports it first."""

from .shadowing import check_passes_package
from .torch_versions import warn_if_untested

check_passes_package()
warn_if_untested()
