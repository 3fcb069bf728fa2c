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
        self._device = next((tensor.device for tensor in loaded.tensors), torch.device("cpu"))
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
        on_gpu = [("CUDAExecutionProvider", {"device_id": str(self._device.index), "use_tf32": "0"})]
        providers = [*(on_gpu if self._device.type == "cuda" else []), "CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(model, options, providers=providers)
        return self._session

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The leaves of the model's result."""
        return list(self._program(*args, **kwargs))

    def bound(self, inputs: Inputs) -> Callable[[], None]:
        """A run of the session with inputs bound once by ``IOBinding``, the fastest way; results are not fetched."""
        binding = self._session.io_binding()
        device = self._device.type, self._device.index or 0
        for item, tensor in zip(self._session.get_inputs(), inputs.tensors, strict=True):
            value = tensor.detach().contiguous().numpy(force=True)
            binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(value, *device))
        for item in self._session.get_outputs():
            binding.bind_output(item.name, *device)
        return functools.partial(self._session.run_with_iobinding, binding)
