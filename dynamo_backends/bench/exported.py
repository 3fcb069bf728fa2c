"""``torch.onnx.export(dynamo=True)`` and an ONNX Runtime session: what there is without ``torch.compile``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy
import onnxruntime
import torch
from torch.utils import _pytree as pytree

from .loading import Inputs, Loaded


class Exported:
    """An exported model.

    The session has the settings ONNX Runtime has by default, and as many threads as PyTorch.

    Args:
        loaded: the model and its inputs; with several sizes, what differs between them is dynamic.
    """

    def __init__(self, loaded: Loaded) -> None:
        first = loaded.inputs[0]
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            loaded.model,
            first.args,
            kwargs=first.kwargs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=_dynamic_shapes(loaded) if len(loaded.inputs) > 1 else None,
        )
        assert program is not None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        model = program.model_proto.SerializeToString()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def bound(self, inputs: Inputs) -> Callable[[], None]:
        """What runs the session on some inputs, which are bound once: the fastest way there is (``IOBinding``).

        The results stay in the binding; nothing fetches them.
        """
        return functools.partial(self._session.run_with_iobinding, self._binding(inputs))

    def __call__(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """The results of a run, as the export has them: the leaves of the model's."""
        binding = self._binding(Inputs(args, kwargs))
        self._session.run_with_iobinding(binding)
        return [torch.from_numpy(numpy.array(value)) for value in binding.copy_outputs_to_cpu()]

    def _binding(self, inputs: Inputs) -> onnxruntime.IOBinding:
        names = [item.name for item in self._session.get_inputs()]
        by_name = inputs.kwargs if set(names) <= set(inputs.kwargs) else dict(zip(names, inputs.tensors, strict=False))
        binding = self._session.io_binding()
        for name in names:
            value = numpy.ascontiguousarray(by_name[name].detach().numpy())
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
        for item in self._session.get_outputs():
            binding.bind_output(item.name, "cpu")
        return binding


def _dynamic_shapes(loaded: Loaded) -> Any:
    """For each tensor, the dimensions that differ between the sizes, in the structure ``torch.onnx.export`` takes."""
    first, *others = [pytree.tree_flatten((item.args, item.kwargs)) for item in loaded.inputs]
    leaves, tree = first

    def dynamic(position: int) -> dict[int, Any] | None:
        tensor = leaves[position]
        if not isinstance(tensor, torch.Tensor):
            return None
        shapes = [other[position].shape for other, _ in others]
        differing = [i for i, size in enumerate(tensor.shape) if any(shape[i] != size for shape in shapes)]
        return dict.fromkeys(differing, torch.export.Dim.DYNAMIC)

    args, kwargs = pytree.tree_unflatten([dynamic(i) for i in range(len(leaves))], tree)
    return args or kwargs
