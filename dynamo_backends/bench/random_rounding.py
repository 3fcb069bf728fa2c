"""The reference of a quantized model that does not run in float64: eager, and eager with random rounding.

If an element divided by its scale is on a tie such as 127.5, earlier rounding decides to which integer it is rounded,
and results of a deep model change by some percent. ``RandomRoundingRuns`` measures by how much: that is the tolerance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics.exact import widened
from ..numerics.randomness import computes, perturbed
from ..numerics.reference_runs import FunctionRun, Recording, Results, copies, is_strided


class RandomRounding(TorchDispatchMode):
    """Perturbs the inputs of each ATen operator by up to a unit in the last place.

    Whole numbers stay: they are the integers of a quantization, masks or counts, which no rounding changes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if computes(func):
            args, kwargs = pytree.tree_map(self._perturbed, (args, kwargs))
        return func(*args, **kwargs)

    def _perturbed(self, value: object) -> object:
        if not is_strided(value) or not value.is_floating_point():
            return value
        return perturbed(value, self._generator, whole_stay=True).to(value.dtype)


class RandomRoundingRuns:
    """Runs a function in eager on copies of its arguments; see ``ReferenceRuns``.

    Attributes:
        outputs: ``exact`` is eager's result in float64, ``perturbed`` runs eager with random rounding.
        draws: how many operators drew random numbers.
    """

    def __init__(
        self, function: Callable[..., Sequence[object]], arguments: Sequence[object], generator_state: torch.Tensor
    ) -> None:
        def run(mode: TorchDispatchMode) -> dict[object, object]:
            leaves = [True] * len(arguments)
            return dict(enumerate(FunctionRun(function, copies(arguments), leaves, generator_state, mode).returned))

        recording = Recording(raises=False)
        eager = run(recording)
        self.draws = recording.draws
        once = functools.cache(lambda seed: run(RandomRounding(seed)))
        self.outputs = Results(eager, widened(eager), lambda times, keys: [once(seed) for seed in range(times)])
