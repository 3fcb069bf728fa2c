"""``OpFallback`` and ``OpDtypeCast``: run chosen operators on another device or in another dtype."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..common.autocast import autocast_dtypes
from ..common.operator_watchers import watchers_disabled
from ..common.random_state import unchanged_random_state
from ..errors import first_line
from ..graphs.operators import is_collective
from ..numerics.function_runs import is_strided, storage_of, version_of
from ..partition.runnable_region import RunnableRegion
from .call import Call, are_readable
from .names import is_of_pytorch, may_write
from .tool import OpTool, logger


class _Copy:
    """A converted argument: its name, the user's tensor and the converted one. Created before the call."""

    def __init__(self, name: str, original: torch.Tensor, converted: torch.Tensor) -> None:
        self.name, self.original, self.converted = name, original, converted
        self._version, self._layout = version_of(converted), self._layout_now()

    def is_written(self, call: Call) -> bool:
        return version_of(self.converted) != self._version or self.name in call.written

    def is_reshaped(self) -> bool:
        return self._layout_now() != self._layout

    def _layout_now(self) -> object:
        return self.converted.shape, self.converted.stride() if is_strided(self.converted) else None


class _Conversion(OpTool):
    """Runs a chosen call on converted arguments, and converts its results back.

    The conversions are operators, so gradients flow through them. What the call writes into its arguments is copied to
    the user's tensors. Operators that return a view are not converted: the result would be a copy.
    """

    _computes = False

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None, arguments: Mapping[str, Any]) -> None:
        super().__init__(**arguments)
        self._device, self._dtype = device, dtype
        self._converted: Counter[str] = Counter()
        self._dtypes: dict[object, list[torch.dtype | None]] = {}

    @property
    def converted(self) -> dict[str, int]:
        """How many calls of each operator were converted."""
        return dict(self._converted)

    @property
    def skipped(self) -> dict[str, str]:
        """The operators with calls that were not converted, and the reason."""
        return dict(self._skipped)

    def _convert(self, leaf: Any) -> Any:
        """The converted argument; the same object if nothing changes."""
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self._device or leaf.device, self._dtype if leaf.is_floating_point() else None)
        return self._device if isinstance(leaf, torch.device) and self._device is not None else leaf

    def _execute(self, call: Call, before: object) -> Any:
        reason = self._why_not(call)
        if reason:
            return self._unconverted(call, reason)
        copies: list[_Copy] = []
        is_copied = False
        try:
            own = self._own_dtypes(call)
            made = {id(value): self._convert(value) for value in call.tensors.values()}
            first = {id(value): (name, value) for name, value in reversed(call.tensors.items())}
            copies = [_Copy(*first[key], copy) for key, copy in made.items() if copy is not first[key][1]]
            is_copied = call.written <= {copy.name for copy in copies}
            args, kwargs = pytree.tree_map(
                lambda leaf: made[id(leaf)] if isinstance(leaf, torch.Tensor) else self._convert(leaf),
                (call.args, call.kwargs),
            )
            leaves, spec = pytree.tree_flatten(call.in_pytorch(*args, **kwargs))
        except Exception as error:
            if may_write(call.function, call.kwargs) and not is_copied:
                raise  # an argument may be half written
            return self._unconverted(call, f"the converted call fails: {first_line(str(error))}")
        written = [copy for copy in copies if copy.is_written(call) or self._is_updated(call, copy)]
        memories = {storage_of(copy.converted) for copy in copies if copy not in written}
        if any(isinstance(leaf, torch.Tensor) and storage_of(leaf) in memories for leaf in leaves):
            return self._unconverted(call, "it returns a view of its argument")
        if any(copy.is_reshaped() and copy.name != "kwargs[out]" for copy in written):
            return self._unconverted(call, "it changes the shape of its argument")
        for copy in written:
            if copy.original.shape != copy.converted.shape:  # ``out=`` of another size
                copy.original.resize_(copy.converted.shape)
            copy.original.copy_(copy.converted)
        with self._lock:
            self._converted[call.name] += 1
        users = {id(copy.converted): copy.original for copy in copies}
        dtypes = own if len(own) == len(leaves) else [_promoted(call)] * len(leaves)
        for i, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
            if isinstance(leaf, torch.Tensor):
                back = leaf.to(_devices(call)[0], dtype if leaf.is_floating_point() else None)
                leaves[i] = users.get(id(leaf), back)
        return pytree.tree_unflatten(leaves, spec)

    def _unconverted(self, call: Call, reason: str) -> Any:
        self._skip(call.name, reason, call)
        return call.function(*call.args, **call.kwargs)

    def _own_dtypes(self, call: Call) -> list[torch.dtype | None]:
        """The dtypes of the results without conversion; ``[]`` if they are not known.

        The unconverted call is run once for each signature, because autocast may change its dtypes. A user's operator
        is not run, because it may have side effects.
        """
        if call.written or not is_of_pytorch(call.function):
            return []
        key = (str(call), str(autocast_dtypes()))
        if key not in self._dtypes:
            self._dtypes[key] = []
            try:
                with watchers_disabled(), torch.no_grad(), unchanged_random_state():  # it may write: copies
                    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
                    leaves = pytree.tree_leaves(call.function(*args, **kwargs))
            except Exception as error:  # maybe the reason for the conversion
                logger.debug("%s fails without conversion: %s", call, error)
            else:
                self._dtypes[key] = [getattr(leaf, "dtype", None) for leaf in leaves]
        return self._dtypes[key]

    def _is_updated(self, call: Call, copy: _Copy) -> bool:
        """Whether a tensor is a running statistic of a normalization that the call changed. PyTorch updates them, but
        neither the schema nor the version counter shows it."""
        may_be = "_norm" in call.name and copy.converted.dim() == 1 and not copy.converted.requires_grad
        return may_be and not torch.equal(copy.converted, self._convert(copy.original))

    def _why_not(self, call: Call) -> str:
        if is_collective(call.function):
            return "a collective must run once in all processes"
        return "" if are_readable((call.args, call.kwargs)) else "not all arguments are plain tensors"

    def _summary(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        rows = [(name, count, "") for name, count in self._converted.most_common()]
        rows += [(name, 0, why) for name, why in self._skipped.items() if name not in self._converted]
        return ["operator", "converted", "why not"], rows


class OpFallback(_Conversion):
    """Runs chosen operators on another device, or there in another dtype. Regions on ONNX Runtime run in PyTorch.

    Args:
        device: where to run.
        dtype: the dtype for floating-point arguments, such as ``torch.float64``; ``None`` to keep theirs.
        arguments: see ``OpTool``.
    """

    def __init__(
        self, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, **arguments: Any
    ) -> None:
        super().__init__(torch.device(device), dtype, arguments)

    def _why_not(self, call: Call) -> str:
        reason = super()._why_not(call)
        is_same = self._dtype is None or _float_dtypes(call) <= {self._dtype}
        if reason or isinstance(call.function, RunnableRegion) or set(_devices(call)) != {self._device} or not is_same:
            return reason
        return f"it is on {self._device} already"


class OpDtypeCast(_Conversion):
    """Runs chosen operators in another dtype, and casts results back:
    ``OpDtypeCast(include=["*matmul*"], dtype=torch.bfloat16)``.

    Args:
        dtype: the dtype for floating-point arguments. The default, ``torch.float32``, shows which operators of a
            float16 or bfloat16 model need more precision.
        arguments: see ``OpTool``.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32, **arguments: Any) -> None:
        super().__init__(None, dtype, arguments)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype such as torch.bfloat16, not {dtype!r}")

    def _why_not(self, call: Call) -> str:
        if isinstance(call.function, RunnableRegion):
            return "the dtypes of an ONNX Runtime region are fixed"
        dtypes = _float_dtypes(call)
        if not dtypes:
            return "it has no floating-point arguments"
        if dtypes == {self._dtype}:
            return f"its arguments are {str(self._dtype).removeprefix('torch.')}"
        if _first(call, torch.dtype) is not None:
            return "it has a dtype argument"
        return super()._why_not(call)


def _float_dtypes(call: Call) -> set[torch.dtype]:
    """The dtypes of the floating-point arguments."""
    return {value.dtype for value in call.tensors.values() if value.is_floating_point()}


def _first(call: Call, kind: type) -> Any:
    """The first argument of a type; ``None`` if there is none."""
    return next((leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, kind)), None)


def _promoted(call: Call) -> torch.dtype | None:
    """The promoted dtype of the floating-point arguments; ``None`` if there are none."""
    dtypes = _float_dtypes(call)
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _devices(call: Call) -> list[torch.device]:
    """The devices of the tensor arguments; without any, the device argument or the CPU."""
    return [value.device for value in call.tensors.values()] or [_first(call, torch.device) or torch.device("cpu")]
