"""The backend ``onnx_export``: ``torch.onnx.export(dynamo=True)`` and an ONNX Runtime session."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import onnxruntime
import torch
from torch.utils import _pytree as pytree

from .loading import Inputs, LoadedCase


def dynamic_shapes(loaded: LoadedCase) -> Any:
    """The argument of ``torch.export``: dimensions that differ between the sizes are dynamic."""
    first, *others = loaded.inputs
    shapes = torch.export.AdditionalInputs()
    for inputs in others:
        shapes.add(inputs.args, inputs.kwargs)
    if not others:
        return None
    dims = shapes.dynamic_shapes(loaded.model, first.args, first.kwargs)
    return pytree.tree_map(lambda dim: torch.export.Dim.STATIC if dim is None else dim, dims)


class Exported:
    """An exported model in a session with ONNX Runtime's default settings and PyTorch's number of threads.

    Args:
        loaded: the model and its inputs; dimensions that differ between its sizes are dynamic.
    """

    def __init__(self, loaded: LoadedCase) -> None:
        first = loaded.inputs[0]
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            loaded.model,
            first.args,
            kwargs=first.kwargs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=dynamic_shapes(loaded),
        )
        assert program is not None
        program.initialize_inference_session(self._make_session)
        self._program = program

    def _make_session(self, model: str | bytes) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return self._session

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The leaves of the model's result."""
        return list(self._program(*args, **kwargs))

    def bound(self, inputs: Inputs) -> Callable[[], None]:
        """A run of the session with inputs bound once by ``IOBinding``, the fastest way; results are not fetched."""
        binding = self._session.io_binding()
        for item, tensor in zip(self._session.get_inputs(), inputs.tensors, strict=True):
            value = tensor.contiguous().numpy(force=True)
            binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
        for item in self._session.get_outputs():
            binding.bind_output(item.name, "cpu")
        return functools.partial(self._session.run_with_iobinding, binding)
