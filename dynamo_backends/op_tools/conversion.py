"""``OpFallback`` and ``OpDtypeCast``: run chosen operators on another device or in another dtype."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..common.operator_watchers import watchers_disabled
from ..errors import first_line
from ..graphs.operators import is_collective
from ..numerics.function_runs import version_of
from ..partition.runnable_region import RunnableRegion
from .call import Call, are_readable, signature
from .names import changes_shape, is_of_pytorch, may_write, returns_view
from .tool import OpTool, dtype_name, logger


class _Conversion(OpTool):
    """Runs a chosen call on converted arguments, and converts its results back.

    The conversions are operators, so gradients flow through them. What the call writes into its arguments is copied to
    the user's tensors. Operators that may return a view are not converted: the result would be a copy.
    """

    _computes = False

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None, arguments: Mapping[str, Any]) -> None:
        super().__init__(**arguments)
        self._device, self._dtype = device, dtype
        self._converted: Counter[str] = Counter()
        self._dtypes: dict[object, list[torch.dtype]] = {}

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
            self._skip(call.name, reason, call)
            return call.function(*call.args, **call.kwargs)
        is_copied = False
        try:
            own = self._own_dtypes(call)
            (args, kwargs), converted = self._arguments(call)
            versions = [version_of(copy) for _, _, copy in converted]
            statistics = _statistics(call, converted)
            is_copied = call.written <= {name for name, _, _ in converted}
            result = call.in_pytorch(*args, **kwargs)
        except Exception as error:
            if may_write(call.function, call.kwargs) and not is_copied:
                raise  # an argument may be half written
            self._skip(call.name, f"the converted call fails: {first_line(str(error))}", call)
            return call.function(*call.args, **call.kwargs)
        for (name, original, copy), version in zip(converted, versions, strict=True):
            is_updated = id(copy) in statistics and not torch.equal(copy, statistics[id(copy)])
            if version_of(copy) != version or name in call.written or is_updated:
                if original.shape != copy.shape:  # ``out=`` of another size
                    original.resize_(copy.shape)
                original.copy_(copy)
        with self._lock:
            self._converted[call.name] += 1
        originals = {id(copy): original for _, original, copy in converted}
        leaves, spec = pytree.tree_flatten(result)
        dtypes = own if len(own) == len(leaves) else [_promoted(call, _dtype(leaf)) for leaf in leaves]
        device = _devices(call)[0]
        returned = [
            originals.get(id(leaf), leaf.to(device, dtype if leaf.is_floating_point() else None))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        return pytree.tree_unflatten(returned, spec)

    def _own_dtypes(self, call: Call) -> list[torch.dtype]:
        """The dtypes of the results without conversion; ``[]`` if they are not known.

        The unconverted call is run once for each signature, because autocast may change its dtypes. A user's operator
        is not run, because it may have side effects.
        """
        if call.written or not is_of_pytorch(call.function):
            return []
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        key = (call.name, signature(call.args), signature(call.kwargs), *autocast)
        if key not in self._dtypes:
            self._dtypes[key] = []
            try:
                with watchers_disabled(), torch.no_grad(), torch.random.fork_rng(devices=[]):  # it may write: copies
                    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
                    result = call.function(*args, **kwargs)
            except Exception as error:  # maybe the reason for the conversion
                logger.debug("%s fails without conversion: %s", call, error)
            else:
                self._dtypes[key] = [_dtype(leaf) for leaf in pytree.tree_leaves(result)]
        return self._dtypes[key]

    def _arguments(self, call: Call) -> tuple[Any, list[tuple[str, torch.Tensor, torch.Tensor]]]:
        """The converted arguments, and for each converted tensor its name, the user's tensor and the converted one."""
        made = {id(value): self._convert(value) for value in call.tensors.values()}
        first = {id(value): (name, value) for name, value in reversed(call.tensors.items())}
        converted = [(*first[key], copy) for key, copy in made.items() if copy is not first[key][1]]
        arguments = pytree.tree_map(
            lambda leaf: made[id(leaf)] if isinstance(leaf, torch.Tensor) else self._convert(leaf),
            (call.args, call.kwargs),
        )
        return arguments, converted

    def _why_not(self, call: Call) -> str:
        if is_collective(call.function):
            return "a collective must run once in all processes"
        if not are_readable((call.args, call.kwargs)):
            return "not all arguments are plain tensors"
        if not isinstance(call.function, RunnableRegion) and returns_view(call.function):
            return "it may return a view"
        if changes_shape(call.function):
            return "it changes the shape of its argument"
        return ""

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
            return f"its arguments are {dtype_name(*dtypes)}"
        if _first(call, torch.dtype) is not None:
            return "it has a dtype argument"
        return super()._why_not(call)


def _float_dtypes(call: Call) -> set[torch.dtype]:
    """The dtypes of the floating-point arguments."""
    return {value.dtype for value in call.tensors.values() if value.is_floating_point()}


def _dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32


def _statistics(call: Call, converted: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Copies of tensors that may be the running statistics of a normalization, by ``id``. PyTorch updates them, but
    neither the schema nor the version counter shows it."""
    if "_norm" not in call.name:
        return {}
    return {id(copy): copy.detach().clone() for _, _, copy in converted if copy.dim() == 1 and not copy.requires_grad}


def _first(call: Call, kind: type) -> Any:
    """The first argument of a type; ``None`` if there is none."""
    return next((leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, kind)), None)


def _promoted(call: Call, made: torch.dtype) -> torch.dtype:
    """The promoted dtype of the floating-point arguments; ``made`` if there are none."""
    requested = _first(call, torch.dtype)
    if requested is not None:
        return requested if requested.is_floating_point else made
    dtypes = _float_dtypes(call)
    return functools.reduce(torch.promote_types, dtypes) if dtypes else made


def _devices(call: Call) -> list[torch.device]:
    """The devices of the tensor arguments; without any, the device argument or the CPU."""
    return [value.device for value in call.tensors.values()] or [_first(call, torch.device) or torch.device("cpu")]
