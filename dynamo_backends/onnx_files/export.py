"""``export``: writes a model to an ONNX file, and compares what the file computes with eager.

::

    exported = dynamo_backends.export(model, (x,), "model.onnx", dynamic_shapes={"x": {0: "batch"}})
    exported.difference(other_x)        # "" if ONNX Runtime's results are right
"""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from ..errors import ExportError
from ..options import parse_options
from ..runtime.integer_kernels import for_any_processor
from .capture import Call, Captured, capture
from .checking import FileSession, difference
from .model import onnx_model

LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights above which they are written to a file beside the model: protobuf's limit, less the graph."""


@dataclasses.dataclass(frozen=True)
class ExportedFile:
    """An ONNX file that ``export`` wrote.

    Attributes:
        path: of the file. Weights of more than 2 GB are beside it, in ``model.onnx.data`` for ``model.onnx``.
        inputs, outputs: the names of the model's inputs and results in order, each with its dtype and sizes as text,
            ``INT64[batch, sequence]``.
        model: what was exported.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    model: torch.nn.Module
    _captured: Captured = dataclasses.field(repr=False)

    def run(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """The results of the file in ONNX Runtime, by name.

        Args:
            args, kwargs: arguments as in the export. Those that are no tensors have no effect: the file has them as
                constants.

        Raises:
            ExportError: ONNX Runtime fails.
        """
        return self._run(self._session, (args, kwargs))

    def difference(self, *args: Any, **kwargs: Any) -> str:
        """How a result differs from eager's by more than rounding; empty if none does.

        Arguments that are no tensors are constants of the file: pass them as in the export.

        Rounding is judged by the errors against float64. If the model does not run in float64, results are right that
        agree with eager's in half of the digits.

        Raises:
            ExportError: ONNX Runtime fails.
        """
        return self._difference(self._session, (args, kwargs))

    @functools.cached_property
    def _session(self) -> FileSession:
        return FileSession(self.path)

    def _run(self, session: FileSession, call: Call) -> dict[str, torch.Tensor]:
        leaves = pytree.tree_leaves(call)
        inputs = {name: leaves[i] for name, i in zip(self.inputs, self._captured.leaves, strict=True)}
        return dict(zip(self.outputs, session.run(inputs), strict=True))

    def _difference(self, session: FileSession, call: Call) -> str:
        return difference(self.model, call, self._run(session, call), self._captured.returned)


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...] | torch.Tensor,
    f: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    check: bool | Sequence[Call] = False,
) -> ExportedFile:
    """Exports a model to an ONNX file that ONNX Runtime runs without PyTorch, optimized as by ``torch.compile``.

    Arguments are named as in ``torch.onnx.export``. The file has weights as initializers, and inputs and results under
    the user's names, in the user's order. Arguments that are no tensors become constants, and ``None`` is omitted.

    Args:
        model: exported in its mode; call ``model.eval()`` first.
        args: its positional arguments, a tensor or a tuple.
        f: the file.
        kwargs: its keyword arguments.
        dynamic_shapes: as in ``torch.export.export``, with the names of sizes; a name instead of a ``Dim`` is
            ``Dim.DYNAMIC``, whose limits PyTorch finds out. Other sizes are fixed.
        input_names, output_names: other names for inputs and results, in order.
        opset_version: the ONNX opset; by default that of the option ``opset``.
        check: whether the results are compared with eager's before the file is written: for these arguments, and
            for other sizes if some are dynamic. Instead of ``True``, pairs of other ``args`` and ``kwargs`` to compare
            too. It takes three times the memory of the model.

    Raises:
        ExportError: ``torch.export`` cannot capture the model, a part of it must run in PyTorch, it changes its state,
            or with ``check``, a result is wrong. No file is written then.
        TypeError: ``model`` is no ``torch.nn.Module``.
        ValueError: the opset is not supported, there are more names than inputs or results, or two names are equal.
        OSError: the file cannot be written.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"export takes a torch.nn.Module, not {type(model).__name__}")
    path = Path(f)
    call: Call = ((args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {}))
    options = parse_options({} if opset_version is None else {"opset": opset_version})
    options = dataclasses.replace(options, providers=("CPUExecutionProvider",), verify_passes=False)
    try:
        with for_any_processor():
            captured = capture(model, *call, dynamic_shapes, options.opset)
            captured = captured.renamed(input_names or (), output_names or ())
            written = onnx_model(captured, options, type(model).__name__)
    except ExportError as error:
        hint = ". The model is in training mode: model.eval() turns off dropout and updates of batch norm"
        raise ExportError(f"{error}{hint if model.training else ''}") from error
    inputs, outputs = (
        {str(item.name): _type(item) for item in items} for items in (written.graph.inputs, written.graph.outputs)
    )
    exported = ExportedFile(path, inputs, outputs, model, captured)
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as folder:
        made = _write(written, Path(folder) / path.name)
        session = FileSession(made)
        if check:
            _check(exported, session, call, None if check is True else check)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the model last
            file.replace(path.parent / file.name)
    return exported


def _type(value: ir.Value) -> str:
    assert value.dtype is not None and value.shape is not None
    return f"{value.dtype.name}[{', '.join(str(getattr(size, 'value', size)) for size in value.shape)}]"


def _write(model: ir.Model, path: Path) -> Path:
    """Writes a model and checks it by ``onnx.checker``."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    is_large = sum(tensor.nbytes for tensor in tensors if tensor is not None) > LARGEST_FILE
    ir.save(model, path, external_data=f"{path.name}.data" if is_large else None)
    onnx.checker.check_model(path, full_check=True)
    return path


def _check(exported: ExportedFile, session: FileSession, call: Call, others: Sequence[Call] | None) -> None:
    """Compares results with eager's; raises ``ExportError``. If ``others`` are ``None``, other sizes are made up."""
    if others is None:
        other = exported._captured.with_other_sizes(*call)
        others = [] if other is None else [other]
    for i, item in enumerate((call, *others)):
        if message := exported._difference(session, item):
            raise ExportError(f"the file is wrong{' for other sizes' if i else ''}: {message}")
