"""``export``: writes a model to an ONNX file, and compares what the file computes with eager.

::

    exported = dynamo_backends.export(model, x, path="model.onnx", dynamic_shapes={"x": {0: "batch"}})
    exported.difference(other_x)        # "" if ONNX Runtime's results are right
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch._dynamo import OptimizedModule
from torch.utils import _pytree as pytree

from ..errors import ExportError, first_line, writing
from ..exporter.upstream_faults import tolerated_in_a_file
from ..graphs.locations import where
from ..graphs.size_assumptions import size_conditions
from ..options import parse_options
from ..runtime.integer_kernels import for_any_processor
from .arguments import Call, like
from .capture import Captured, capture
from .checking import FileSession, difference
from .model import onnx_model
from .sizes import narrowed

LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights above which they are written to a file beside the model: protobuf's limit, less the graph."""


@dataclasses.dataclass(frozen=True)
class ExportedFile:
    """An ONNX file that ``export`` wrote.

    Attributes:
        path: of the file, absolute. Weights of more than 2 GB are beside it, in ``model.onnx.<8 digits>.data`` for
            ``model.onnx``.
        inputs, outputs: the names of the model's inputs and results in order, each with its dtype and sizes as text,
            ``INT64[batch, sequence]``.
        sizes: the names of dynamic sizes with the limits within which the file computes what the model does, as text,
            ``from 1`` or ``2 to 512``. PyTorch found them out; outside, the model may compute something else. Of a
            size that is derived from another, ``2 * Dim("h")``, the other one is here.
        conditions: what must hold for these sizes too and is no limit of one, ``batch % 2 == 0``. ONNX Runtime does
            not check it.
        checked: the calls whose results were compared, by the shapes of their tensors as text.
        unchecked: operators that may differ from eager for some inputs, and what ``check`` could not compare, with the
            reasons.
        model: what was exported.
    """

    path: Path
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    sizes: Mapping[str, str]
    conditions: Sequence[str]
    checked: Sequence[str]
    unchecked: Sequence[str]
    model: torch.nn.Module
    _captured: Captured = dataclasses.field(repr=False)

    def run(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """The results of the file in ONNX Runtime, by name.

        Args:
            args, kwargs: arguments as in the export. Those that are no tensors are constants of the file.

        Raises:
            TypeError: the arguments have another structure than in the export, or an input has another type.
            ValueError: a constant has another value or type.
            ExportError: ONNX Runtime fails.
        """
        return self._run(self._session, self._like((args, kwargs)))

    def difference(self, *args: Any, **kwargs: Any) -> str:
        """How a result, or a value inside the file, differs from eager's by more than rounding; empty if none does.

        Rounding is judged by the errors against float64; where an operator has no float64 kernel, by eager's. A result
        that is not the same in each run differs.

        Raises:
            TypeError, ValueError, ExportError: see ``run``.
        """
        message, unstable, _ = self._difference(self._session, self._like((args, kwargs)))
        return message or unstable

    @functools.cached_property
    def _session(self) -> FileSession:
        return FileSession(self.path)

    def _like(self, call: Call) -> Call:
        return like(self.model, call, self._captured.call, self._captured.leaves)

    def _run(self, session: FileSession, call: Call) -> dict[str, torch.Tensor]:
        leaves = pytree.tree_leaves(call)
        inputs = {name: leaves[i] for name, i in zip(self.inputs, self._captured.leaves, strict=True)}
        return dict(zip(self.outputs, session.run(inputs), strict=True))

    def _difference(self, session: FileSession, call: Call) -> tuple[str, str, list[str]]:
        results = self._run(session, call)
        try:
            return difference(self._captured, self.model, call, session, results)
        except Exception as error:  # the model and PyTorch raise any type
            text = first_line(str(error))
            raise ExportError(f"the model cannot be compared: {type(error).__name__}: {text}") from error


def export(
    model: torch.nn.Module,
    *inputs: Any,
    path: str | os.PathLike[str],
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
        inputs: its positional arguments.
        path: the file.
        kwargs: its keyword arguments.
        dynamic_shapes: as in ``torch.export.export``, with the names of sizes; a name instead of a ``Dim`` is
            ``Dim.DYNAMIC``, whose limits PyTorch finds out. Other sizes are fixed.
        input_names, output_names: other names for inputs and results, in order.
        opset_version: the ONNX opset; by default that of the option ``opset``.
        check: whether the results, and the values inside the file, are compared with eager's before it is written: for
            these arguments, and for other sizes if some are dynamic. Instead of ``True``, other calls to compare too:
            pairs of a tuple of positional arguments, and a dict of others. It takes some four times the memory of the
            weights.

    Raises:
        ExportError: ``torch.export`` cannot capture the model, a part of it must run in PyTorch, it changes its state,
            or with ``check``, a result or a node is wrong. No file is written then.
        TypeError: ``model`` is no ``torch.nn.Module``, or a traced one; ``check`` has something else than pairs; or a
            name is no text.
        ValueError: the opset is not supported, there are more names than inputs or results, two names are equal, or a
            tensor has no dimension that ``dynamic_shapes`` names.
        OSError: the file cannot be written.
    """
    model = _module(model)
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} exists, and is no file")
    if not isinstance(check, bool) and not (isinstance(check, Sequence) and all(map(_is_call, check))):
        raise TypeError("check is a bool, or a list of pairs: a tuple of arguments, and a dict of keyword arguments")
    for argument, names in (("input_names", input_names), ("output_names", output_names)):
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise TypeError(f"{argument} is a list of names, not {names!r}")
    call: Call = (inputs, dict(kwargs or {}))
    options = parse_options({} if opset_version is None else {"opset": opset_version})
    options = dataclasses.replace(options, providers=("CPUExecutionProvider",), verify_passes=False)
    with for_any_processor():
        captured = capture(model, *call, dynamic_shapes, options.opset)
        captured = captured.renamed(input_names or (), output_names or ())
        with torch._C._DisableAutocast():  # the program has its casts already
            written = onnx_model(captured, options, type(model).__name__, is_training=model.training)
    taken, given = (
        {str(item.name): _type(item) for item in items} for items in (written.graph.inputs, written.graph.outputs)
    )
    narrow, conditions = narrowed(captured.sizes, size_conditions(captured.graph, captured.sizes))
    captured = dataclasses.replace(captured, sizes=narrow)
    sizes = {size.name: size.limits for size in narrow.values()}
    if sizes:
        written.metadata_props["sizes"] = ", ".join(f"{name} {limits}" for name, limits in sizes.items())
    if conditions:
        written.metadata_props["conditions"] = ", ".join(conditions)
    nodes = captured.graph.graph.nodes
    unchecked = [f"{node.name} ({where(node)}): {text}" for node in nodes for text in tolerated_in_a_file(node)]
    exported = ExportedFile(path, taken, given, sizes, conditions, (), unchecked, model, captured)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        with writing(path):
            made = _write(written, Path(folder) / path.name)
        if check is not False:
            exported = _check(exported, FileSession(made), None if check is True else check)
        else:
            FileSession(made)
        old = [file for file in path.parent.iterdir() if _is_data_of(file, path)]
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the model last: a killed process leaves the old one
            file.replace(path.parent / file.name)
        for file in old:
            file.unlink()
    return exported


def _module(model: object) -> torch.nn.Module:
    """The module that is exported: of a compiled one, the original."""
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"export takes a torch.nn.Module that is written in Python, not {type(model).__name__}")
    return model


def _is_call(item: object) -> bool:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    return isinstance(item[0], (tuple, list)) and isinstance(item[1], Mapping)


def _type(value: ir.Value) -> str:
    assert value.dtype is not None and value.shape is not None
    sizes = (size if isinstance(size, int) else size.value or "?" for size in value.shape)
    return f"{value.dtype.name}[{', '.join(map(str, sizes))}]"


def _write(model: ir.Model, path: Path) -> Path:
    """Writes a model and checks it by ``onnx.checker``."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    is_large = sum(tensor.nbytes for tensor in tensors if tensor is not None) > LARGEST_FILE
    ir.save(model, path, external_data=f"{path.name}.{secrets.token_hex(4)}.data" if is_large else None)
    onnx.checker.check_model(path, full_check=True)
    return path


def _is_data_of(file: Path, model: Path) -> bool:
    """Whether a file has the weights of this model file, see ``_write``."""
    return re.fullmatch(rf"{re.escape(model.name)}\.[0-9a-f]{{8}}\.data", file.name) is not None


def _check(exported: ExportedFile, session: FileSession, others: Sequence[Call] | None) -> ExportedFile:
    """Compares results with eager's, and says which; raises ``ExportError``. If ``others`` are ``None``, other sizes
    are made up."""
    captured, unchecked, checked = exported._captured, dict.fromkeys(exported.unchecked), []
    calls = [exported._like(call) for call in others or ()]
    if others is None and captured.sizes:
        calls, raised = captured.calls_with_other_sizes(exported.model)
        if not calls:
            text = "other sizes than the example's: the model takes none of those that were tried"
            unchecked[f"{text} ({raised})" if raised else text] = None
    for i, call in enumerate((captured.call, *calls)):
        message, unstable, not_compared = exported._difference(session, call)
        if message:
            known = f". It may be what is known: {'; '.join(exported.unchecked)}" if exported.unchecked else ""
            raise ExportError(f"the file is wrong{f' for {_shapes(exported, call)}' if i else ''}: {message}{known}")
        checked.append(_shapes(exported, call))
        unchecked |= dict.fromkeys([f"a result: {unstable}"] * bool(unstable) + not_compared)
    return dataclasses.replace(exported, checked=checked, unchecked=list(unchecked))


def _shapes(exported: ExportedFile, call: Call) -> str:
    """``input_ids[2, 7], attention_mask[2, 7]``."""
    leaves = pytree.tree_leaves(call)
    values = {name: leaves[i] for name, i in zip(exported.inputs, exported._captured.leaves, strict=True)}
    texts = (
        f"{name}{list(item.shape) if isinstance(item, torch.Tensor) else f'={item}'}" for name, item in values.items()
    )
    return ", ".join(texts)
