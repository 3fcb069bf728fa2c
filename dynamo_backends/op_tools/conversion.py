"""``OpFallback`` and ``OpDtypeCast``: chosen operators run elsewhere, or in another dtype, and return as they would."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..common.operator_watchers import unseen
from ..errors import first_line
from ..graphs.artifacts import RunnableRegion
from ..graphs.operators import is_collective
from ..numerics.program_execution import version_of
from ..report.table_page import TablePage
from .call import Call, are_plain, signature
from .names import changes_shape, is_of_pytorch, may_write, returns_view
from .tool import OpTool, dtype_name, logger


class _Conversion(OpTool):
    """Makes a chosen call on converted arguments, and gives its results back as they would have been.

    Gradients flow through, as the conversions are operators too. What the call writes into its arguments is written
    into the user's. An operator that may return a view of its argument is left alone: a copy would not be a view.
    """

    _computes = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._converted: Counter[str] = Counter()
        self._dtypes: dict[object, list[torch.dtype]] = {}

    @property
    def converted(self) -> dict[str, int]:
        """How often each operator was converted."""
        return dict(self._converted)

    @property
    def left_alone(self) -> dict[str, str]:
        """For each chosen operator that was not converted, once at least, why."""
        return dict(self._skipped)

    def _convert(self, leaf: Any) -> Any:
        """What the converted call gets for a tensor or another argument; the same object where nothing changes."""
        raise NotImplementedError

    def _back(self, value: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        """A result of the converted call as it would have been."""
        return value.to(dtype)

    def _execute(self, call: Call, before: object) -> Any:
        why = self._why_not(call)
        if why:
            self._skip(call.name, why)
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
                raise  # it may have done half of its work
            self._skip(call.name, f"it fails so: {first_line(str(error))}")
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
        returned = [
            originals.get(id(leaf), self._back(leaf, call, dtype if leaf.is_floating_point() else leaf.dtype))
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf, dtype in zip(leaves, dtypes, strict=True)
        ]
        return pytree.tree_unflatten(returned, spec)

    def _own_dtypes(self, call: Call) -> list[torch.dtype]:
        """The dtypes of a call's results, were they not converted; ``[]`` where that cannot be found out.

        They are those of a call as it is, made once for each signature: under autocast it may cast by itself. An
        operator of the user's is not called once more, as it may do more than compute.
        """
        if call.written or not is_of_pytorch(call.function):
            return []
        autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        key = (call.name, signature(call.args), signature(call.kwargs), *autocast)
        if key not in self._dtypes:
            self._dtypes[key] = []
            try:
                with unseen(), torch.no_grad(), torch.random.fork_rng(devices=[]):  # on copies, it may write
                    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (call.args, call.kwargs))
                    result = call.function(*args, **kwargs)
            except Exception as error:  # it is perhaps why the operator is to run elsewhere
                logger.debug("%s does not run where it is: %s", call, error)
            else:
                self._dtypes[key] = [_dtype(leaf) for leaf in pytree.tree_leaves(result)]
        return self._dtypes[key]

    def _arguments(self, call: Call) -> tuple[Any, list[tuple[str, torch.Tensor, torch.Tensor]]]:
        """The arguments for the converted call, and of each that is another tensor its name, the user's and that."""
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
            return "it runs once, in all processes"
        if not are_plain((call.args, call.kwargs)):
            return "its arguments are no plain tensors"
        if not isinstance(call.function, RunnableRegion) and returns_view(call.function):
            return "it may return a view"
        if changes_shape(call.function):
            return "it changes the shape of its argument"
        return ""

    def _page(self) -> TablePage:
        rows = [(name, count, "") for name, count in self._converted.most_common()]
        rows += [(name, 0, why) for name, why in self._skipped.items() if name not in self._converted]
        title = f"{type(self).__name__}: {sum(self._converted.values())} calls"
        return TablePage(title, ["operator", "converted", "why not"], rows)


class OpFallback(_Conversion):
    """Chosen operators run on another device, or in another dtype there; all else stays where it is.

    A region on ONNX Runtime (``onnxruntime.*``) runs in PyTorch.

    Args:
        device: where they run.
        dtype: in what they run, for the floating-point arguments of lower precision: ``torch.float64`` for the
            reference; ``None`` for their own.
        arguments: of ``OpTool``.
    """

    def __init__(
        self, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._device = torch.device(device)
        self._dtype = dtype

    def _convert(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(self._device, self._dtype if leaf.is_floating_point() else None)
        return self._device if isinstance(leaf, torch.device) else leaf

    def _back(self, value: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        return value.to(_devices(call)[0], dtype)

    def _why_not(self, call: Call) -> str:
        why = super()._why_not(call)
        if why or isinstance(call.function, RunnableRegion):
            return why
        is_there = set(_devices(call)) == {self._device}
        dtypes = {value.dtype for value in call.tensors.values() if value.is_floating_point()}
        is_same = self._dtype is None or dtypes <= {self._dtype}
        return f"it is on {self._device} already" if is_there and is_same else ""


class OpDtypeCast(_Conversion):
    """Chosen operators run in another dtype and return in their own: ``OpDtypeCast(include=["*matmul*"],
    dtype=torch.bfloat16)``.

    Args:
        dtype: in what they run: their floating-point arguments are cast. The default, ``torch.float32``, shows which
            operators of a float16 or bfloat16 model need more precision; those of a float32 model stay as they are.
        arguments: of ``OpTool``.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32, **arguments: Any) -> None:
        super().__init__(**arguments)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype is a floating-point dtype such as torch.bfloat16, not {dtype!r}")
        self._dtype = dtype

    def _convert(self, leaf: Any) -> Any:
        return leaf.to(self._dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    def _why_not(self, call: Call) -> str:
        if isinstance(call.function, RunnableRegion):
            return "a model of ONNX Runtime has its dtypes"
        dtypes = {value.dtype for value in call.tensors.values() if value.is_floating_point()}
        if not dtypes:
            return "it has no floating-point arguments"
        if dtypes == {self._dtype}:
            return f"its arguments are {dtype_name(self._dtype)}"
        if _told(call, torch.dtype) is not None:
            return "it is told its dtype"
        return super()._why_not(call)


def _dtype(value: object) -> torch.dtype:
    return value.dtype if isinstance(value, torch.Tensor) else torch.float32


def _statistics(call: Call, converted: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Copies of what may be the running statistics of a normalization, by the identity of the tensor: PyTorch updates
    them without a word in the schema, and counts no change."""
    if "_norm" not in call.name:
        return {}
    return {id(copy): copy.detach().clone() for _, _, copy in converted if copy.dim() == 1 and not copy.requires_grad}


def _told(call: Call, kind: type) -> Any:
    """The first argument of a kind; ``None`` if there is none."""
    return next((leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, kind)), None)


def _promoted(call: Call, made: torch.dtype) -> torch.dtype:
    """The dtype that the floating-point arguments of a call have together; ``made`` if there are none."""
    told = _told(call, torch.dtype)
    if told is not None:
        return told if told.is_floating_point else made
    dtypes = [value.dtype for value in call.tensors.values() if value.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else made


def _devices(call: Call) -> list[torch.device]:
    """The devices of a call's tensors; without any, that of its results."""
    return [value.device for value in call.tensors.values()] or [_told(call, torch.device) or torch.device("cpu")]
