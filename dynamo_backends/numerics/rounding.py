"""How much rounding explains, in units of a dtype: the numbers behind each verdict. Needs no PyTorch."""

from __future__ import annotations

FACTOR = 10.0
"""How much larger than the error that rounding is known to make another may be: another order of summation, another
approximation."""

_UNITS = {"float16": 4.0, "bfloat16": 4.0}
_UNITS_DEFAULT = 64.0


def rounding_units(dtype: str) -> float:
    """Error in units of the dtype's epsilon times the largest value that needs no explanation.

    Where a reference is exactly right by luck, rounding elsewhere must not read as a fault. 64 units of float32 are
    8e-6; a wrong operator is far.

    Args:
        dtype: its name, ``float32``.
    """
    if dtype.startswith(("float8", "float4")):
        return 1.0  # a unit is up to a quarter of the value
    return _UNITS.get(dtype, _UNITS_DEFAULT)


HUGE = 1e30
"""Values from here on (masks filled with the smallest float) are judged by their relative error, or their size would
excuse every error beside them."""
