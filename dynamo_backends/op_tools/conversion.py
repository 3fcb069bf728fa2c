"""``OpFallback`` and ``OpDtypeCast``: chosen operators run elsewhere, or in another dtype, and return as they would."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..artifacts import RunnableRegion
from ..collectives import is_collective
from ..errors import first_line
from ..tables import fit_table
from ..watchers import unseen
from .call import Call, are_plain, named_tensors, signature, version_of
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
        self._left: dict[str, str] = {}
        self._dtypes: dict[object, list[torch.dtype]] = {}

    @property
    def converted(self) -> dict[str, int]:
        """How often each operator was converted."""
        return dict(self._converted)

    @property
    def left_alone(self) -> dict[str, str]:
        """For each chosen operator that was not converted, once at least, why."""
        return dict(self._left)

    def _convert(self, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _back(self, value: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def _other_argument(self, value: object) -> object:
        """An argument that is no tensor: a dtype, a device."""
        return value

    def _execute(self, call: Call, before: object) -> Any:
        why = self._why_not(call)
        if why:
            self._leave(call.name, why)
            return call.function(*call.args, **call.kwargs)
        is_copied = False
        try:
            own = self._own_dtypes(call)
            (args, kwargs), converted = self._arguments(call)
            versions = {id(copy): version_of(copy) for _, _, copy in converted}
            statistics = _statistics(call, converted)
            is_copied = call.written <= {name for name, _, _ in converted}
            result = self._function(call)(*args, **kwargs)
        except Exception as error:
            if may_write(call.function, call.kwargs) and not is_copied:
                raise  # it may have done half of its work
            self._leave(call.name, f"it fails so: {first_line(str(error))}")
            return call.function(*call.args, **call.kwargs)
        originals = {}
        for name, original, copy in converted:
            is_updated = id(copy) in statistics and not torch.equal(copy, statistics[id(copy)])
            if version_of(copy) != versions[id(copy)] or name in call.written or is_updated:
                if original.shape != copy.shape:  # ``out=`` of another size
                    original.resize_(copy.shape)
                original.copy_(copy)
            originals[id(copy)] = original
        with self._lock:
            self._converted[call.name] += 1
        leaves, spec = pytree.tree_flatten(result)
        dtypes = own if len(own) == len(leaves) else [_promoted(call, _dtype(leaf)) for leaf in leaves]
        returned = [self._returned(leaf, originals, call, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
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
            self._dtypes[key] = _dtypes_of(call)
        return self._dtypes[key]

    def _function(self, call: Call) -> Callable[..., Any]:
        return call.function

    def _returned(self, leaf: object, originals: dict[int, torch.Tensor], call: Call, dtype: torch.dtype) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in originals:
            return originals[id(leaf)]
        return self._back(leaf, call, dtype if leaf.is_floating_point() else leaf.dtype)

    def _arguments(self, call: Call) -> tuple[Any, list[tuple[str, torch.Tensor, torch.Tensor]]]:
        """The arguments for the converted call, and of each that is another tensor its name, the user's and that."""
        made: dict[int, torch.Tensor] = {}
        converted = []
        for name, value in call.tensors.items():
            if id(value) not in made:
                made[id(value)] = self._convert(value)
                if made[id(value)] is not value:
                    converted.append((name, value, made[id(value)]))
        return pytree.tree_map(
            lambda leaf: made[id(leaf)] if isinstance(leaf, torch.Tensor) else self._other_argument(leaf),
            (call.args, call.kwargs),
        ), converted

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

    def _leave(self, name: str, why: str) -> None:
        if name not in self._left:
            self._left[name] = why
            logger.info("%s leaves %s as it is: %s", type(self).__name__, name, why)

    def _end(self) -> None:
        rows: list[tuple[object, ...]] = [(name, count, "") for name, count in self._converted.most_common()]
        rows += [(name, 0, why) for name, why in self._left.items() if name not in self._converted]
        if rows:
            self._print(fit_table(rows, ["operator", self._title, "why not"]))

    _title = "converted"


class OpFallback(_Conversion):
    """Chosen operators run on another device, or in another dtype there; all else stays where it is.

    A region on ONNX Runtime (``onnxruntime.*``) runs in PyTorch.

    Args:
        device: where they run.
        dtype: in what they run, for the floating-point arguments of lower precision: ``torch.float64`` for the
            reference; ``None`` for their own.
        arguments: of ``OpTool``.
    """

    _title = "fell back"

    def __init__(
        self, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._device = torch.device(device)
        self._dtype = dtype

    def _convert(self, value: torch.Tensor) -> torch.Tensor:
        is_float = value.is_floating_point()
        return value.to(self._device, self._dtype if self._dtype is not None and is_float else value.dtype)

    def _back(self, value: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        tensors = list(call.tensors.values())
        device = tensors[0].device if tensors else _asked_device(call)
        return value.to(device, dtype)

    def _why_not(self, call: Call) -> str:
        why = super()._why_not(call)
        if why or isinstance(call.function, RunnableRegion):
            return why
        tensors = list(call.tensors.values())
        devices = {value.device for value in tensors} or {_asked_device(call)}
        widens = self._dtype is not None and any(
            value.is_floating_point() and value.dtype != self._dtype for value in tensors
        )
        return f"it is on {self._device} already" if devices == {self._device} and not widens else ""

    def _other_argument(self, value: object) -> object:
        return self._device if isinstance(value, torch.device) else value

    def _function(self, call: Call) -> Callable[..., Any]:
        return call.in_pytorch


class OpDtypeCast(_Conversion):
    """Chosen operators run in another dtype and return in their own: ``OpDtypeCast(include=["*matmul*"],
    dtype=torch.bfloat16)``.

    Args:
        dtype: in what they run: their floating-point arguments are cast. The default, ``torch.float32``, shows which
            operators of a float16 or bfloat16 model need more precision; those of a float32 model stay as they are.
        arguments: of ``OpTool``.
    """

    _title = "cast"

    def __init__(self, *, dtype: torch.dtype = torch.float32, **arguments: Any) -> None:
        super().__init__(**arguments)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype is a floating-point dtype such as torch.bfloat16, not {dtype!r}")
        self._dtype = dtype

    def _convert(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value

    def _back(self, value: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        return value.to(dtype)

    def _why_not(self, call: Call) -> str:
        if isinstance(call.function, RunnableRegion):
            return "a model of ONNX Runtime has its dtypes"
        dtypes = {value.dtype for value in call.tensors.values() if value.is_floating_point()}
        if not dtypes:
            return "it has no floating-point arguments"
        if dtypes == {self._dtype}:
            return f"its arguments are {dtype_name(self._dtype)}"
        if isinstance(_dtype_argument(call), torch.dtype):
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


def _own_copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _dtypes_of(call: Call) -> list[torch.dtype]:
    """The dtypes of a call's results, which is made for that."""
    try:
        with unseen(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            args, kwargs = pytree.tree_map(_own_copy, (call.args, call.kwargs))  # running statistics are written to
            return [_dtype(leaf) for leaf in pytree.tree_leaves(call.function(*args, **kwargs))]
    except Exception as error:  # it is perhaps why the operator is to run elsewhere
        logger.debug("%s does not run where it is: %s", call, error)
        return []


def _dtype_argument(call: Call) -> object:
    return next((leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.dtype)), None)


def _promoted(call: Call, made: torch.dtype) -> torch.dtype:
    """The dtype that the floating-point arguments of a call have together; ``made`` if there are none."""
    told = _dtype_argument(call)
    if isinstance(told, torch.dtype):
        return told if told.is_floating_point else made
    dtypes = [value.dtype for _, value in named_tensors([call.args, call.kwargs], "") if value.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else made


def _asked_device(call: Call) -> torch.device:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, torch.device)), torch.device("cpu"))
