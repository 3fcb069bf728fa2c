"""PyTorch's operator database through the backend: samples, and the comparison with eager.

The tests in ``test_operators.py`` use the first sample of each entry, ``operators_sweep.py`` all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from dynamo_backends.weights import region_session

Compare: TypeAlias = "Callable[[object, object], str | None]"
"""How a first result differs from a second one, ``None`` if it does not."""


def entry_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def entries() -> dict[str, OpInfo]:
    """The database's entries by name."""
    return {entry_name(op): op for op in op_db}


def first_dtype(op: OpInfo) -> torch.dtype:
    """float32, or for an entry without it, its first dtype in the order of their names."""
    supported = op.supported_dtypes("cpu")
    return torch.float32 if torch.float32 in supported else min(supported, key=str)


def seed(number: int = 0) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def samples(
    op: OpInfo, dtype: torch.dtype, number: int | None = 1, *, gradients: bool = False
) -> Iterator[SampleInput]:
    """The first ``number`` samples of an entry (``None``: all), the same at each call."""
    seed()
    return itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), number)


def copy_of(value: object) -> object:
    """Arguments with their tensors copied: strides kept, gradients asked for where the original does."""

    def copy(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        return _clone(leaf.detach()).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, value)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, offset, and negative and conjugate bits."""
    if tensor.is_neg() or tensor.is_conj():
        plain = tensor._neg_view() if tensor.is_neg() else tensor.conj()
        return _clone(plain)._neg_view() if tensor.is_neg() else _clone(plain).conj()
    if tensor.numel() == 0:
        return tensor.clone()
    size = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = torch.as_strided(tensor, (size,), (1,), 0).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def is_random(op: OpInfo, sample: SampleInput) -> bool:
    """Whether the result is random or uninitialized memory: eager differs from itself with another seed."""
    if "empty" in op.name:
        return True
    results = []
    for number in (1, 2):
        seed(number)
        results.append(call(op, copy_of((sample.input, sample.args, sample.kwargs))))
    return difference(results[0], results[1], exact=True) is not None


def call(op: OpInfo, arguments: object) -> object:
    input, args, kwargs = arguments  # type: ignore[misc]
    return op.op(input, *args, **kwargs)


def difference(actual: object, expected: object, *, exact: bool = False) -> str | None:
    """How a result differs from eager's in structure, type, dtype, shape, strides or values; ``None`` if it
    does not.

    Values are compared with the default tolerances of ``torch.testing.assert_close`` for their dtype, NaN
    equal to NaN.
    """
    if type(actual) is not type(expected):
        return f"type {type(actual).__name__} instead of {type(expected).__name__}"
    if isinstance(expected, (tuple, list)):
        if len(actual) != len(expected):  # type: ignore[arg-type]
            return f"{len(actual)} results instead of {len(expected)}"  # type: ignore[arg-type]
        pairs = zip(actual, expected, strict=True)  # type: ignore[call-overload]
        found = (difference(a, e, exact=exact) for a, e in pairs)
        return next((f"result {i}: {text}" for i, text in enumerate(found) if text is not None), None)
    if isinstance(expected, dict):
        items = list(actual.items())  # type: ignore[attr-defined]
        return difference(items, list(expected.items()), exact=exact)
    if not isinstance(expected, torch.Tensor):
        equal = actual == expected or (actual != actual and expected != expected)
        return None if equal else f"{actual!r} instead of {expected!r}"
    assert isinstance(actual, torch.Tensor)
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype} instead of {expected.dtype}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if actual.layout != expected.layout:
        return f"layout {actual.layout} instead of {expected.layout}"
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    try:
        torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=False, **tolerance)
    except AssertionError as error:
        return "values: " + " ".join(str(error).split())
    if expected.layout is torch.strided and strides(actual) != strides(expected):
        return f"strides {actual.stride()} instead of {expected.stride()}"
    return None


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of dimensions with more than one element; none of an empty tensor."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def compiled_difference(
    op: OpInfo,
    sample: SampleInput,
    *,
    backend: str = "onnxrt",
    dynamic: bool | None = False,
    gradients: bool = False,
    compare: Compare = difference,
) -> str | None:
    """How ``op`` on ``sample`` through a backend differs from eager, see ``difference_from_eager``."""
    return difference_from_eager(
        lambda arguments: call(op, arguments),
        (sample.input, sample.args, sample.kwargs),
        backend=backend,
        dynamic=dynamic,
        gradients=gradients,
        compare=compare,
    )


def difference_together(pairs: Sequence[tuple[OpInfo, SampleInput]]) -> str | None:
    """How operators that are compiled as one function differ from eager, see ``difference_from_eager``."""
    return difference_from_eager(
        lambda many: [call(op, arguments) for (op, _), arguments in zip(pairs, many, strict=True)],
        [(sample.input, sample.args, sample.kwargs) for _, sample in pairs],
    )


def difference_from_eager(
    run: Callable[[Any], object],
    arguments: object,
    *,
    backend: str = "onnxrt",
    dynamic: bool | None = False,
    gradients: bool = False,
    compare: Compare = difference,
) -> str | None:
    """How a function of its arguments through a backend differs from eager: results, shared memory, changed arguments,
    gradients.

    Raises:
        Whatever the backend raises where eager does not.
    """
    ours, theirs = copy_of(arguments), copy_of(arguments)
    seed()
    expected = run(theirs)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, dynamic=dynamic)
    seed()
    actual = compiled(ours)
    found = compare(actual, expected)
    if found is None and _shared(actual, ours) != _shared(expected, theirs):
        found = f"results share memory {_shared(actual, ours)} instead of {_shared(expected, theirs)}"
    if found is None:
        found = difference(pytree.tree_leaves(ours), pytree.tree_leaves(theirs))
        found = f"arguments after the call: {found}" if found is not None else None
    if found is None and gradients:
        loss(expected).backward()
        loss(actual).backward()
        found = difference(*(_gradients(item) for item in (ours, theirs)))
        found = f"gradients: {found}" if found is not None else None
    return found


def _shared(results: object, arguments: object) -> list[list[int]]:
    """For each tensor of the results, the positions of the arguments whose memory it shares."""
    given = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    owners = [_owner(leaf) for leaf in given]
    return [
        [i for i, owner in enumerate(owners) if owner is not None and owner == _owner(leaf)]
        for leaf in pytree.tree_leaves(results)
        if isinstance(leaf, torch.Tensor)
    ]


def _owner(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage().data_ptr()


class _Holder(torch.nn.Module):
    """An operator whose tensors except the first are held by a module, so that they are constants of the session."""

    def __init__(self, op: OpInfo, arguments: object) -> None:
        super().__init__()
        self._op = op
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._first = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)), len(leaves))
        self._names = [f"leaf_{i}" for i in range(len(leaves))]
        for name, leaf in zip(self._names, leaves, strict=True):
            setattr(self, name, leaf)

    def forward(self, first: object) -> object:
        return call(self._op, self.arguments(first))

    def arguments(self, first: object) -> object:
        """What the entry is called with: its input, arguments and keywords."""
        leaves = [first if i == self._first else getattr(self, name) for i, name in enumerate(self._names)]
        return pytree.tree_unflatten(leaves, self._structure)


def difference_with_weights(
    op: OpInfo,
    sample: SampleInput,
    *,
    backend: str = "onnxrt",
    compare: Callable[[object, object, object], str | None] = lambda actual, expected, arguments: difference(
        actual, expected
    ),
) -> str | None:
    """How ``op`` differs from eager if all tensors but the first are weights, before and after they change.

    ``compare`` gets our results, eager's, and the entry's arguments.
    """
    arguments = (sample.input, sample.args, sample.kwargs)
    ours, theirs = _Holder(op, copy_of(arguments)), _Holder(op, copy_of(arguments))
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, dynamic=False)
    first = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    rebuilt_at_once = mock.patch.object(region_session, "clock", lambda: 0.0)
    with torch.no_grad(), rebuilt_at_once:
        for change in (None, _flip):
            if change is not None:
                change(ours)
                change(theirs)
            seed()
            expected = theirs(copy_of(first))
            seed()
            found = compare(compiled(copy_of(first)), expected, theirs.arguments(first))
            if found is not None:
                return found if change is None else f"after the weights changed: {found}"
    return None


def _flip(holder: _Holder) -> None:
    """Other numbers: the same in reverse order."""
    for name in holder._names:
        leaf = getattr(holder, name)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided and leaf.ndim:
            leaf.copy_(leaf.flip(0))


def loss(results: object) -> torch.Tensor:
    """The sum of all differentiable results."""
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    total = torch.zeros(())
    for item in tensors:
        total = total + (item.abs() if item.is_complex() else item).sum()
    return total


def _gradients(arguments: object) -> list[object]:
    return [
        leaf.grad for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
