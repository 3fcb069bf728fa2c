"""Makes sessions of dumped models again, as the run had them, and runs them on what was recorded.

::

    session = Session(region)                        # as the run had it: its optimizers, providers, constants
    session = Session(region, threads=1)             # but with one thread
    outputs = session(region.recorded("input"))

Tensors are numpy arrays; bfloat16 and the 8-bit floats have the dtypes of ``ml_dtypes``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .reading import DumpedRegion, DumpError

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime

_SILENT = 4
"""Of ONNX Runtime's levels of logging: what it refuses is an exception."""

_FOLDER_OF_DATA = "session.model_external_initializers_file_folder_path"


class Session:
    """A session of a dumped model.

    What were constants of the session in the run are constants here too, so that ONNX Runtime does the same with them.

    Args:
        region: whose recorded inputs give the constants, and whose entry in the manifest the settings.
        model: another model than what the run's session was made of, with the region's constants among its inputs.
        threads: another number than in the run.
        optimize: whether ONNX Runtime's graph optimizations run; as in the run by default.
        configure: changes the options before the session is made.

    Attributes:
        inputs, outputs: the names of what it takes and returns, in order.
        threads: of its pool.

    Raises:
        DumpError: ONNX Runtime cannot make the session, or what it needs is not in the dump.
    """

    def __init__(
        self,
        region: DumpedRegion,
        model: onnx.ModelProto | None = None,
        *,
        threads: int | None = None,
        optimize: bool | None = None,
        configure: Callable[[onnxruntime.SessionOptions], None] | None = None,
    ) -> None:
        import onnxruntime

        from ..runtime.messages import ORT_ERRORS

        settings = region.entry.get("session", {})
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _SILENT
        self.threads = threads or settings.get("threads") or 1
        options.intra_op_num_threads = self.threads
        for key, value in settings.get("config", {}).items():
            options.add_session_config_entry(key, str(value))
        level = (
            settings.get("graph_optimization_level", "ORT_ENABLE_ALL") if optimize is not False else "ORT_DISABLE_ALL"
        )
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        if configure is not None:
            configure(options)
        content = load(region.optimized_model) if model is None else copy.deepcopy(model)
        self._constants = _declare_constants(content, region)
        if self._constants:
            options.add_external_initializers(list(self._constants), list(self._constants.values()))
        options.add_session_config_entry(_FOLDER_OF_DATA, str(region.folder))
        try:
            self._session = onnxruntime.InferenceSession(
                content.SerializeToString(),
                options,
                providers=settings.get("providers", ["CPUExecutionProvider"]),
                provider_options=settings.get("provider_options"),
                disabled_optimizers=settings.get("disabled_optimizers") or None,
            )
        except ORT_ERRORS as error:
            raise DumpError(f"ONNX Runtime cannot make a session of {region.folder}: {error}") from None
        self.inputs = [item.name for item in self._session.get_inputs()]
        self.outputs = [item.name for item in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs by name; of the inputs those are taken that the session has.

        Raises:
            DumpError: ONNX Runtime fails.
        """
        return self.feed(inputs)()

    def feed(self, inputs: Mapping[str, np.ndarray]) -> Callable[[], dict[str, np.ndarray]]:
        """A call on these inputs, which may be made again and again.

        Raises:
            DumpError: an input is not there; the call: ONNX Runtime fails.
        """
        missing = [name for name in self.inputs if name not in inputs]
        if missing:
            raise DumpError(f"nothing was recorded for the input {missing[0]}: the dump is incomplete")
        feeds = {name: as_ort(inputs[name]) for name in self.inputs}

        from ..runtime.messages import ORT_ERRORS

        def run() -> dict[str, np.ndarray]:
            try:
                results = self._session.run_with_ort_values(None, feeds)
            except ORT_ERRORS as error:
                raise DumpError(f"ONNX Runtime fails: {error}") from None
            return {name: result.numpy() for name, result in zip(self.outputs, results, strict=True)}

        return run

    def end_profiling(self) -> Path:
        """The file with the times of the runs."""
        return Path(self._session.end_profiling())


def load(path: Path) -> onnx.ModelProto:
    """A model, without the external data it names.

    Raises:
        DumpError: the file is damaged.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise DumpError(f"{path} is damaged: {error}; dump again") from None


def as_ort(array: np.ndarray) -> onnxruntime.OrtValue:
    """An array in ONNX Runtime's form, of any dtype that ONNX has."""
    import numpy as np
    import onnx
    import onnxruntime

    if array.dtype.kind in "biufc" or array.dtype.kind in "OUS":
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
    number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number)


def _declare_constants(model: onnx.ModelProto, region: DumpedRegion) -> dict[str, Any]:
    """Makes initializers of those inputs that were constants of the run's session, and returns their values."""
    import onnx

    names = set(region.entry.get("constants", ()))
    declared = [item for item in model.graph.input if item.name in names]
    if not declared:
        return {}
    recorded = region.recorded("input")
    values = {}
    for item in declared:
        array = recorded[item.name]
        tensor = model.graph.initializer.add(
            name=item.name,
            dims=array.shape,
            data_type=item.type.tensor_type.elem_type,
            data_location=onnx.TensorProto.EXTERNAL,
        )
        for key, value in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        model.graph.input.remove(item)
        values[item.name] = as_ort(array)
    return values
