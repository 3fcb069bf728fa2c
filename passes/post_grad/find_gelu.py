"""Finds GELU that is written out, and writes it as one operator.

Rule::

    0.5 * x * (1 + erf(x / sqrt(2)))                                ->  aten.gelu(x)
    0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))    ->  aten.gelu(x, approximate="tanh")

in the ways the models of ``transformers`` write it: the factors in any order, ``x / 1.41421`` for ``x * 0.70710``, ``x
* x * x`` for ``x ** 3``.

Not if a constant is another one (to float32's precision), nor if a value in between has another user. The halves are
computed with more roundings than a kernel's; half precisions are left as they are, where each step rounds to its own.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from ..patterns import Pattern, pattern_pass

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match

_ERF = {"half": 0.51234, "scale": 0.71234, "one": 1.1234}
_TANH = {"half": 0.51234, "outer": 0.79234, "inner": 0.0441234, "one": 1.1234}


def _erf_product(x: torch.Tensor, half: float, scale: float, one: float) -> torch.Tensor:
    return x * half * (torch.erf(x * scale) + one)


def _erf_quotient(x: torch.Tensor, half: float, scale: float, one: float) -> torch.Tensor:
    return x * half * (torch.erf(x / scale) + one)


def _erf_half_last(x: torch.Tensor, half: float, scale: float, one: float) -> torch.Tensor:
    return x * ((torch.erf(x / scale) + one) * half)


def _erf_half_at_the_end(x: torch.Tensor, half: float, scale: float, one: float) -> torch.Tensor:
    return x * (torch.erf(x / scale) + one) * half


def _tanh_power(x: torch.Tensor, half: float, outer: float, inner: float, one: float) -> torch.Tensor:
    return x * half * (torch.tanh((x + x.pow(3) * inner) * outer) + one)


def _tanh_products(x: torch.Tensor, half: float, outer: float, inner: float, one: float) -> torch.Tensor:
    return x * half * (torch.tanh(x * outer * (x * inner * x + 1.0)) + one)


def _gelu_erf(x: torch.Tensor, half: float, scale: float, one: float) -> torch.Tensor:
    return torch.ops.aten.gelu.default(x)


def _gelu_tanh(x: torch.Tensor, half: float, outer: float, inner: float, one: float) -> torch.Tensor:
    return torch.ops.aten.gelu.default(x, approximate="tanh")


def _refusal(expected: dict[str, tuple[float, ...]], match: Match) -> str | None:
    if match.kwargs["x"].meta["val"].dtype not in (torch.float32, torch.float64):
        return f"it is computed in {match.kwargs['x'].meta['val'].dtype}, where each step rounds"
    for name, allowed in expected.items():
        number = match.kwargs[name]
        if not isinstance(number, (int, float)) or not any(
            math.isclose(number, value, rel_tol=1e-6) for value in allowed
        ):
            return f"its constant {number!r} is none of {', '.join(map(str, allowed))}"
    return None


def _refusal_erf_product(match: Match) -> str | None:
    return _refusal({"half": (0.5,), "scale": (math.sqrt(0.5),), "one": (1.0,)}, match)


def _refusal_erf_quotient(match: Match) -> str | None:
    return _refusal({"half": (0.5,), "scale": (math.sqrt(2.0),), "one": (1.0,)}, match)


def _refusal_tanh(match: Match) -> str | None:
    return _refusal({"half": (0.5,), "outer": (math.sqrt(2.0 / math.pi),), "inner": (0.044715,), "one": (1.0,)}, match)


def _patterns() -> list[Pattern]:
    x = [torch.empty(2, 3)]
    product = functools.partial(Pattern, check=_refusal_erf_product, scalars=_ERF, is_stored=True)
    quotient = functools.partial(Pattern, check=_refusal_erf_quotient, scalars=_ERF, is_stored=True)
    tanh = functools.partial(Pattern, check=_refusal_tanh, scalars=_TANH, is_stored=True)
    return [
        product("erf_product", _erf_product, _gelu_erf, x),
        quotient("erf_quotient", _erf_quotient, _gelu_erf, x),
        quotient("erf_half_last", _erf_half_last, _gelu_erf, x),
        quotient("erf_half_at_the_end", _erf_half_at_the_end, _gelu_erf, x),
        tanh("tanh_power", _tanh_power, _gelu_tanh, x),
        tanh("tanh_products", _tanh_products, _gelu_tanh, x),
    ]


PASS = pattern_pass(
    "post_grad.find_gelu", "Writes GELU that is written out, by erf or tanh, as one operator.", _patterns
)
