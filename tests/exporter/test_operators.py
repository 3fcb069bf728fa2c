"""Every operator of PyTorch's database through ``onnxrt`` equals eager: values, dtype, shape, strides and types.

Some dozens are compiled as one function, which takes a quarter of the time; ``operators_sweep.py`` compiles each alone.
The sample is the first of each entry, in float32, or in its first dtype if it has no float32. Left out are entries
without a result to compare:

- ``empty`` and the like, which return uninitialized memory (other random entries seed the generator themselves and are
  included);
- Jiterator and a few attention kernels, which are for CUDA only: eager raises on the CPU, or has no dtype there.
"""

from __future__ import annotations

import pytest
import torch
from operators import (
    call,
    compiled_difference,
    copy_of,
    difference_together,
    entries,
    first_dtype,
    is_random,
    samples,
)

ENTRIES = entries()
UNINITIALIZED = {name for name in ENTRIES if "empty" in name}
CUDA_ONLY = {name for name, op in ENTRIES.items() if "jiterator" in name or not op.supported_dtypes("cpu")}
COVERED = sorted(set(ENTRIES) - UNINITIALIZED - CUDA_ONLY)

TOGETHER = 24
"""Operators in one function."""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


NUMBER_OF_ENTRIES = {"2.13": 702, "2.14": 703, "2.15": 703}


def test_no_operator_is_left_out() -> None:
    """Those that are left out can be counted by hand."""
    version = ".".join(torch.__version__.split(".")[:2])
    assert len(ENTRIES) == NUMBER_OF_ENTRIES[version]
    assert len(UNINITIALIZED) == 6
    assert len(CUDA_ONLY) == 8
    assert len(COVERED) == len(ENTRIES) - 14


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, len(COVERED), TOGETHER), ids=lambda first: f"from {COVERED[first]}")
def test_operators(first: int) -> None:
    together = {name: ENTRIES[name] for name in COVERED[first : first + TOGETHER]}
    pairs = {name: (op, next(samples(op, first_dtype(op)))) for name, op in together.items()}
    found = difference_together(list(pairs.values()))
    if found is not None:
        alone = {name: compiled_difference(*pair) for name, pair in pairs.items()}
        pytest.fail(f"{found}; alone: { ({name: said for name, said in alone.items() if said is not None}) }")


@pytest.mark.parametrize("name", sorted(UNINITIALIZED))
def test_uninitialized_memory(name: str) -> None:
    """What can be compared of these: dtype, shape and strides."""
    op = ENTRIES[name]
    sample = next(samples(op, torch.float32))
    arguments = copy_of((sample.input, sample.args, sample.kwargs))
    assert is_random(op, sample)
    expected = call(op, arguments)
    actual = torch.compile(lambda: call(op, arguments), backend="onnxrt", dynamic=False)()
    assert isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.stride() == expected.stride()


@pytest.mark.parametrize("name", sorted(name for name in CUDA_ONLY if "jiterator" in name))
def test_eager_raises_on_the_cpu(name: str) -> None:
    """The reason these are left out still holds."""
    op = ENTRIES[name]
    sample = next(samples(op, torch.float32))
    with pytest.raises(AssertionError, match="only supported on CUDA"):
        call(op, (sample.input, sample.args, sample.kwargs))
