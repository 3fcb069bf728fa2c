"""Shows a fault of ONNX Runtime: runs ``model.onnx`` beside this file on the inputs of ``test_data_set_0``.

    python repro.py

It needs onnxruntime and numpy, nothing else. The right outputs are the ``output_<i>.pb`` of the data set. It prints
what ONNX Runtime makes of them; exit code 0 if that is right, 1 if it is wrong or the session cannot be made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

SETTINGS: dict = {}

_DTYPES = {
    1: "f4", 2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 9: "?", 10: "f2", 11: "f8", 12: "u4", 13: "u8",
    14: "c8", 15: "c16", 16: "u2", 17: "u1", 18: "u1", 19: "u1", 20: "u1",
}  # fmt: skip
"""numpy's dtype for each of ONNX's; those numpy does not have (bfloat16 is 16, float8 17 to 20) are their bits."""

BFLOAT16 = 16

_HUGE = 1e30
"""Values from here on (masks filled with the smallest float) are judged by their relative error."""


def session_of(model: Any, settings: Any = None) -> Any:
    """An ``InferenceSession``.

    Args:
        model: the path of a model, or the serialized model.
        settings: ``providers``, ``provider_options``, ``graph_optimization_level``, ``disabled_optimizers``,
            ``threads`` and ``config`` (entries of the session's configuration); what is not given is ONNX Runtime's
            default.

    Raises:
        Exception: whatever ONNX Runtime raises.
    """
    settings = settings or {}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = settings.get("threads") or 0
    level = settings.get("graph_optimization_level") or "ORT_ENABLE_ALL"
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    for key, value in (settings.get("config") or {}).items():
        options.add_session_config_entry(key, str(value))
    if settings.get("optimized_model"):
        options.optimized_model_filepath = settings["optimized_model"]
    return onnxruntime.InferenceSession(
        model,
        options,
        providers=settings.get("providers") or ["CPUExecutionProvider"],
        provider_options=settings.get("provider_options") or None,
        disabled_optimizers=settings.get("disabled_optimizers") or None,
    )


def run(session: Any, inputs: Any) -> dict[str, Any]:
    """Runs a session.

    Args:
        session: the session.
        inputs: by name, an array and ONNX's number of its dtype.

    Returns:
        The outputs in the same form, in the session's order.

    Raises:
        Exception: whatever ONNX Runtime raises.
    """
    binding = session.io_binding()
    kept = []  # the memory of an input must live until the run is over
    for item in session.get_inputs():
        array, number = inputs[item.name]
        array = np.require(array, requirements=["C_CONTIGUOUS"])
        if str(array.dtype.str[1:]) == _DTYPES[number] and number < BFLOAT16:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        else:
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)
        kept.append((array, value))
        binding.bind_ortvalue_input(item.name, value)
    for item in session.get_outputs():
        binding.bind_output(item.name)
    session.run_with_iobinding(binding)
    names = [item.name for item in session.get_outputs()]
    return {name: _array(value) for name, value in zip(names, binding.get_outputs())}  # noqa: B905, as old as 3.8


def _array(value: Any) -> tuple[np.ndarray, int]:
    number = value.element_type()
    if number not in _DTYPES:
        return np.zeros(0), number
    if number < BFLOAT16:
        return value.numpy(), number
    import ctypes

    dtype = np.dtype(_DTYPES[number])
    shape = value.shape()
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(data, dtype).reshape(shape), number


def read_tensor(path: Path) -> tuple[str, np.ndarray, int]:
    """The name of a stored ``TensorProto``, its array, and ONNX's number of its dtype.

    Only what is written here is read: the sizes, the dtype, the name, and the bytes, in the file or in one beside it.
    """
    sizes: list[int] = []
    where: dict[str, str] = {}
    number, name, raw = 0, "", b""
    for field, value in _fields(path.read_bytes()):
        if field == 1:
            sizes.extend(_varints(value) if isinstance(value, bytes) else [value])
        elif field == 2:
            number = value
        elif field == 8:
            name = value.decode()
        elif field == 9:
            raw = value
        elif field == 13:
            entry = dict(_fields(value))
            where[entry[1].decode()] = entry[2].decode()
    if where:
        with open(path.parent / where["location"], "rb") as file:
            file.seek(int(where.get("offset", 0)))
            raw = file.read(int(where["length"]))
    return name, np.frombuffer(raw, _DTYPES[number]).reshape(sizes), number


def _fields(message: bytes) -> Any:
    """The numbers and contents of a protobuf message's fields."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        value: Any
        if key & 7 == 0:
            value, position = _varint(message, position)
        elif key & 7 == 2:
            length, position = _varint(message, position)
            value, position = message[position : position + length], position + length
        else:
            value, position = None, position + (8 if key & 7 == 1 else 4)
        yield key >> 3, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    result, shift = 0, 0
    while True:
        byte = message[position]
        result |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return result, position


def _varints(message: bytes) -> Any:
    position = 0
    while position < len(message):
        value, position = _varint(message, position)
        yield value


def plain(array: np.ndarray, number: int) -> np.ndarray:
    """An array as float64, complex numbers as pairs; what has more than 53 bits, and float8, as it is."""
    if number == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if number in (14, 15):
        return np.ascontiguousarray(array).view("f4" if number == 14 else "f8").astype(np.float64)
    return array.astype(np.float64) if number in (1, 10, 11) else array


def error_of(value: np.ndarray, right: np.ndarray) -> tuple[float, int, float]:
    """How far an array is from the right one of the same shape.

    Args:
        value: of ``plain``.
        right: the same.

    Returns:
        The largest absolute error; the number of elements that are NaN or infinite on one side only; the largest
        magnitude of the right values. Of integers and booleans the error is the number of elements that differ.
    """
    if value.size == 0:
        return 0.0, 0, 0.0
    if value.dtype.kind != "f":
        return float((value != right).sum()), 0, 1.0
    finite = np.isfinite(value) & np.isfinite(right)
    same = (value == right) | (np.isnan(value) & np.isnan(right))
    nonfinite = int((~finite & ~same).sum())
    value, right = value[finite], right[finite]
    size = np.abs(right)
    ordinary = size < _HUGE
    scale = float(size[ordinary].max()) if ordinary.any() else 0.0
    error = float(np.abs(value - right)[ordinary].max()) if ordinary.any() else 0.0
    if not ordinary.all():
        relative = np.abs(value[~ordinary] / right[~ordinary] - 1.0)
        error = max(error, float(relative.max()) * max(scale, 1.0))
    return error, nonfinite, scale


def main() -> int:
    """Runs the model, prints what comes of it, and returns the exit code."""
    folder = Path(__file__).resolve().parent
    print("onnxruntime", onnxruntime.__version__, "session:", json.dumps(SETTINGS.get("session", {})))
    try:
        session = session_of(str(folder / "model.onnx"), SETTINGS.get("session"))
    except Exception as raised:  # ONNX Runtime's exceptions have no common base
        print(f"refused: {raised}")
        return 1
    data = {
        kind: [read_tensor(path) for path in sorted((folder / "test_data_set_0").glob(f"{kind}_*.pb"), key=_number)]
        for kind in ("input", "output")
    }
    if not data["output"]:
        print("the session is made")
        return 0
    try:
        outputs = run(session, {name: (array, number) for name, array, number in data["input"]})
    except Exception as raised:
        print(f"failed: {raised}")
        return 1
    wrong = []
    for name, right, number in data["output"]:
        array, its_number = outputs[name]
        if number != its_number or array.shape != right.shape:
            print(f"{name}: type {its_number} {array.shape} instead of {number} {right.shape}")
            wrong.append(name)
            continue
        error, nonfinite, scale = error_of(plain(array, number), plain(right, number))
        allowed = SETTINGS.get("allowed", {}).get(name, 0.0)
        print(f"{name}: off by {error:.3g} at values up to {scale:.3g}, NaN or infinite on one side {nonfinite}")
        if nonfinite or error > allowed:
            wrong.append(name)
    print(f"differs: {', '.join(wrong)}" if wrong else "right")
    return 1 if wrong else 0


def _number(path: Path) -> int:
    return int(path.stem.rsplit("_", 1)[1])


if __name__ == "__main__":
    sys.exit(main())
