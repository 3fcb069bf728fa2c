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
        path: of the file. Weights of more than 2 GB are beside it, in ``<name>.data``.
        inputs, outputs: the names of the model's inputs and results, in order.
        model: what was exported.
    """

    path: Path
    inputs: Sequence[str]
    outputs: Sequence[str]
    model: torch.nn.Module
    _captured: Captured = dataclasses.field(repr=False)

    def difference(self, *args: Any, **kwargs: Any) -> str:
        """Runs the file in ONNX Runtime, and the model in PyTorch, with some arguments.

        Returns:
            How a result differs from eager's by more than rounding explains; empty if none does. Rounding is judged by
            the errors against float64, or for a model that does not run in float64, by half of eager's digits.

        Raises:
            ExportError: ONNX Runtime fails.
        """
        return self._difference(self._session, (args, kwargs))

    @functools.cached_property
    def _session(self) -> FileSession:
        return FileSession(self.path)

    def _difference(self, session: FileSession, call: Call) -> str:
        leaves = pytree.tree_leaves(call)
        inputs = dict(zip(self.inputs, (leaves[i] for i in self._captured.leaves), strict=True))
        return difference(self.model, call, session.run(inputs), self._captured.returned, self.outputs)


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
    check: bool = False,
) -> ExportedFile:
    """Exports a model to an ONNX file that ONNX Runtime runs without PyTorch, optimized as by ``torch.compile``.

    The arguments are those of ``torch.onnx.export``. The file has weights as initializers, and inputs and results under
    the user's names, in the user's order. Arguments that are no tensors become constants, and ``None`` is omitted.

    Args:
        model: exported in its mode; call ``model.eval()`` first.
        args: its positional arguments, a tensor or a tuple.
        f: the file.
        kwargs: its keyword arguments.
        dynamic_shapes: as in ``torch.export.export``; a name instead of a ``Dim`` is ``Dim.DYNAMIC`` with this name. The
            names are those of the sizes in the file. Other sizes are fixed.
        input_names, output_names: other names for inputs and results, in order.
        opset_version: the ONNX opset; by default that of the option ``opset``.
        check: whether the results are compared with eager's before the file is written: with these arguments, and
            with other sizes if some are dynamic. It takes three times the memory of the model.

    Raises:
        ExportError: ``torch.export`` cannot capture the model, a part of it must run in PyTorch, it changes its state,
            or with ``check``, a result is wrong. No file is written then.
        ValueError: the opset is not supported, or there are more names than inputs or results.
        OSError: the file cannot be written.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"export takes a torch.nn.Module, not {type(model).__name__}")
    path = Path(f)
    call: Call = ((args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs or {}))
    options = parse_options({} if opset_version is None else {"opset": opset_version})
    options = dataclasses.replace(options, providers=("CPUExecutionProvider",), verify_passes=False)
    with for_any_processor():
        captured = capture(model, *call, dynamic_shapes, options.opset)
        captured = captured.renamed(input_names or (), output_names or ())
        written = onnx_model(captured, options, type(model).__name__)
    exported = ExportedFile(path, list(captured.inputs.values()), captured.outputs, model, captured)
    with tempfile.TemporaryDirectory(dir=path.resolve().parent, prefix=f".{path.name}.") as folder:
        made = _write(written, Path(folder) / path.name)
        session = FileSession(made)
        if check:
            _check(exported, session, call)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the model last
            file.replace(path.parent / file.name)
    return exported


def _write(model: ir.Model, path: Path) -> Path:
    """Writes a model and checks it by ``onnx.checker``."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    is_large = sum(tensor.nbytes for tensor in tensors if tensor is not None) > LARGEST_FILE
    ir.save(model, path, external_data=f"{path.name}.data" if is_large else None)
    onnx.checker.check_model(path, full_check=True)
    return path


def _check(exported: ExportedFile, session: FileSession, call: Call) -> None:
    other = exported._captured.with_other_sizes(*call)
    for item, what in ((call, "its results are wrong"), (other, "its results for other sizes are wrong")):
        if item is not None and (message := exported._difference(session, item)):
            raise ExportError(f"{what}: {message}")
