"""``torch.onnx.export(dynamo=True)`` and an ONNX Runtime session: what there is without ``torch.compile``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import onnxruntime
import torch

from .loading import Inputs, Loaded


class Exported:
    """An exported model.

    The session has the settings ONNX Runtime has by default, and as many threads as PyTorch.

    Args:
        loaded: the model and its inputs; with several sizes, what differs between them is dynamic.
    """

    def __init__(self, loaded: Loaded) -> None:
        first, *others = loaded.inputs
        shapes = torch.export.AdditionalInputs()
        for inputs in others:
            shapes.add(inputs.args, inputs.kwargs)
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            loaded.model,
            first.args,
            kwargs=first.kwargs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=shapes.dynamic_shapes(loaded.model, first.args, first.kwargs) if others else None,
        )
        assert program is not None
        program.initialize_inference_session(self._session_of)
        self._program = program

    def _session_of(self, model: str | bytes) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return self._session

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The results of a run, as the export has them: the leaves of the model's."""
        return list(self._program(*args, **kwargs))

    def bound(self, inputs: Inputs) -> Callable[[], None]:
        """What runs the session on some inputs, which are bound once: the fastest way there is (``IOBinding``).

        The results stay in the binding; nothing fetches them.
        """
        binding = self._session.io_binding()
        for item, tensor in zip(self._session.get_inputs(), inputs.tensors, strict=True):
            value = tensor.contiguous().numpy(force=True)
            binding.bind_ortvalue_input(item.name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
        for item in self._session.get_outputs():
            binding.bind_output(item.name, "cpu")
        return functools.partial(self._session.run_with_iobinding, binding)
