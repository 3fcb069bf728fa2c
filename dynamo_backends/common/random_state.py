"""The states of PyTorch's random generators, which must be restored before a run is repeated.

::

    state = RandomState.now()
    run()
    state.restore()
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class RandomState:
    """The states of the generators of the CPU and, once one is used, of each GPU.

    Attributes:
        cpu: as ``torch.get_rng_state`` returns it.
        gpus: by the index of the GPU; empty while this process uses none.
    """

    cpu: torch.Tensor
    gpus: tuple[torch.Tensor, ...] = ()

    @classmethod
    def now(cls) -> RandomState:
        """The current states."""
        return cls(torch.get_rng_state(), tuple(torch.cuda.get_rng_state_all()) if _gpus_in_use() else ())

    @classmethod
    def of_seed(cls, seed: int) -> RandomState:
        """The states after ``torch.manual_seed(seed)``."""
        gpus = range(torch.cuda.device_count()) if _gpus_in_use() else ()
        cpu, *others = (torch.Generator(device).manual_seed(seed) for device in ("cpu", *(f"cuda:{i}" for i in gpus)))
        return cls(cpu.get_state(), tuple(generator.get_state() for generator in others))

    @classmethod
    def from_dict(cls, states: Mapping[str, Any]) -> RandomState:
        """The states that ``to_dict`` returned, without those of GPUs that this machine lacks."""
        return cls(
            states["cpu"], tuple(states[f"cuda:{i}"] for i in range(min(len(states) - 1, torch.cuda.device_count())))
        )

    def to_dict(self) -> dict[str, object]:
        """The states by the device's name, for a file."""
        return {"cpu": self.cpu, **{f"cuda:{i}": state for i, state in enumerate(self.gpus)}}

    def restore(self) -> None:
        """Makes them the current states."""
        torch.set_rng_state(self.cpu)
        if self.gpus:
            torch.cuda.set_rng_state_all(self.gpus)

    def equals(self, other: RandomState) -> bool:
        """Whether both are the same; not, if a GPU was first used in between."""
        if len(self.gpus) != len(other.gpus):
            return False
        pairs = zip((self.cpu, *self.gpus), (other.cpu, *other.gpus), strict=True)
        return all(torch.equal(first, second) for first, second in pairs)

    def generators(self) -> dict[torch.device, torch.Generator]:
        """New generators in these states, by device."""
        devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(len(self.gpus)))]
        result = {device: torch.Generator(device) for device in devices}
        for generator, state in zip(result.values(), (self.cpu, *self.gpus), strict=True):
            generator.set_state(state)
        return result


def _gpus_in_use() -> bool:
    return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def unchanged_random_state() -> Iterator[None]:
    """A context that restores the current states at its end."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.restore()
