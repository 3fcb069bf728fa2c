"""How much error needs no explanation: the one owner of these numbers, for PyTorch's tensors and for numpy's arrays."""

from __future__ import annotations

FACTOR = 10.0
"""How much larger than eager's own error the runtime's may be: another order of summation, another approximation."""

ROUNDING_UNITS = {"float16": 4.0, "bfloat16": 4.0}
ROUNDING_UNITS_DEFAULT = 64.0
"""Error in units of the dtype's epsilon times the largest value that needs no explanation: where eager is exactly
right by luck, rounding elsewhere must not read as a fault. 64 units of float32 are 8e-6; a wrong operator is far."""
