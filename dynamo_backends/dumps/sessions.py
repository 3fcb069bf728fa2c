"""Makes sessions of dumped models again, as the run had them, and runs them on what was recorded.

::

    session = Session(region)                        # as the run had it: its optimizers, providers, constants
    session = Session(region, threads=1)             # but with one thread
    outputs = session(region.recorded("input"))

Tensors are numpy arrays; bfloat16 and the 8-bit floats have the dtypes of ``ml_dtypes``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..errors import first_line
from .differences import OnnxValue
from .models import OnnxModel, load_model
from .reading import DumpedRegion, DumpError
from .replaying import session_settings
from .running import as_array, make_session, ort_value, run_session

if TYPE_CHECKING:
    import onnxruntime

Configure: TypeAlias = "Callable[[onnxruntime.SessionOptions], None]"

_EXTERNAL = "session.optimized_model_external_initializers_"


class Session:
    """A session of a dumped model.

    What were constants of the session in the run are constants here too, so that ONNX Runtime does the same with them.

    Args:
        region: whose recorded inputs give the constants, and whose entry in the manifest the settings.
        model: another model than what the run's session was made of, with the region's constants among its inputs.
        threads: another number than in the run.
        optimize: whether ONNX Runtime's graph optimizations run as in the run, or none.
        configure: changes the options before the session is made.

    Attributes:
        outputs: the names of what it returns, in order.
        threads: of its pool.

    Raises:
        DumpError: ONNX Runtime cannot make the session, or what it needs is not in the dump.
    """

    def __init__(
        self,
        region: DumpedRegion,
        model: OnnxModel | None = None,
        *,
        threads: int | None = None,
        optimize: bool = True,
        configure: Configure | None = None,
    ) -> None:
        settings = session_settings(region.entry.get("session", {}))
        self.threads = threads or settings.threads or 1
        settings = dataclasses.replace(settings if optimize else settings.unoptimized, threads=self.threads)
        content, self._constants = _with_constants(model or load_model(region.optimized_model), region)

        def give(options: onnxruntime.SessionOptions) -> None:
            if self._constants:
                options.add_external_initializers(list(self._constants), list(self._constants.values()))
            if configure is not None:
                configure(options)

        self._name = content.name
        self._session = make_session(content, settings, give)
        self.outputs = content.outputs

    def __call__(self, inputs: Mapping[str, OnnxValue]) -> dict[str, OnnxValue]:
        """The outputs by name; of the inputs those are taken that the session has.

        Raises:
            DumpError: an input is not there, or ONNX Runtime fails.
        """
        self._taken(inputs)
        return run_session(self._session, self._name, inputs, self.outputs)

    def repeated(self, inputs: Mapping[str, OnnxValue], times: int) -> list[dict[str, OnnxValue]]:
        """The outputs of several runs, one right after the other: the threads of one are still awake at the next.

        Args:
            inputs: tensors, by name.
            times: how many runs.

        Raises:
            DumpError: as a call.
        """
        from ..runtime.messages import ORT_ERRORS

        feeds = {item.name: ort_value(inputs[item.name]) for item in self._taken(inputs)}
        try:
            runs = [self._session.run_with_ort_values(self.outputs, feeds) for _ in range(times)]
        except ORT_ERRORS as error:
            raise DumpError(f"{self._name}: ONNX Runtime fails: {first_line(str(error))}") from error
        return [dict(zip(self.outputs, map(as_array, results), strict=True)) for results in runs]

    def _taken(self, inputs: Mapping[str, OnnxValue]) -> list[onnxruntime.NodeArg]:
        taken: list[onnxruntime.NodeArg] = self._session.get_inputs()
        missing = [item.name for item in taken if item.name not in inputs]
        if missing:
            raise DumpError(f"nothing was recorded for the input {missing[0]}: the dump is incomplete")
        return taken

    def end_profiling(self) -> Path:
        """The file with the times of the runs."""
        return Path(self._session.end_profiling())


def as_it_runs(folder: Path, configure: Configure | None = None) -> Configure:
    """Options that make a session write the model it runs to ``folder / "model.onnx"``, its constants beside it."""

    def write(options: onnxruntime.SessionOptions) -> None:
        options.optimized_model_filepath = str(folder / "model.onnx")
        options.add_session_config_entry(f"{_EXTERNAL}file_name", "constants.data")
        options.add_session_config_entry(f"{_EXTERNAL}min_size_in_bytes", "1024")
        if configure is not None:
            configure(options)

    return write


def _with_constants(model: OnnxModel, region: DumpedRegion) -> tuple[OnnxModel, dict[str, onnxruntime.OrtValue]]:
    """The model with initializers in the place of inputs that were constants of the run's session, and their values.

    The values do not pass through protobuf, nor through a file: ONNX Runtime is given the memory.
    """
    names = set(region.entry.get("constants", ()))
    declared = [item for item in model.proto.graph.input if item.name in names]
    if not declared:
        return model, {}
    model, recorded, values = model.copy(), region.recorded("input"), {}
    for item in declared:
        if item.name not in recorded:
            raise DumpError(f"nothing was recorded for the weight {item.name}: the dump is incomplete")
        array = recorded[item.name]
        tensor = model.proto.graph.initializer.add(
            name=item.name, dims=array.shape, data_type=item.type.tensor_type.elem_type
        )
        tensor.data_location = tensor.EXTERNAL
        for key, value in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=value)
        model.proto.graph.input.remove(item)
        values[item.name] = ort_value(array)
    return model, values
