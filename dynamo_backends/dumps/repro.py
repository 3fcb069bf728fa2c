"""Runs the model next to this file on the inputs of ``test_data_set_0``, and compares with the outputs there.

    python repro.py                     # the model of SETTINGS
    python repro.py another.onnx        # another model with the same inputs
    python repro.py --no-optimize       # also --provider cuda, --threads 4, --runs 20

It needs only onnxruntime and numpy. It prints the largest differences, the wrong ones first. Exit codes: 0 if all
outputs are within the tolerance, or the session is created and no outputs were stored; 1 if not, or if the session
cannot be created or run; 2 if the inputs were not stored.

The folder of each region in a dump, and each folder that ``bisect`` writes, has a ``repro.py``: the text of this
module, with ``numerics/rule.py`` and the session's settings inserted (``cut_folder.repro_text``). The commands that
run models of dumps create their sessions with the functions here, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from dynamo_backends.numerics.rule import SPREAD, judge
from dynamo_backends.runtime.provider_libraries import add_providers, installed_plugins

SETTINGS: dict = {}

Tensor = tuple[str, np.ndarray, int]  # a tensor's name, its array, and ONNX's number of its dtype

_DTYPES = {
    1: "f4", 2: "u1", 3: "i1", 4: "u2", 5: "i2", 6: "i4", 7: "i8", 9: "?", 10: "f2", 11: "f8", 12: "u4", 13: "u8",
    14: "c8", 15: "c16", 16: "u2", 17: "u1", 18: "u1", 19: "u1", 20: "u1",
}  # fmt: skip
"""numpy's dtypes by ONNX's numbers. Those that numpy lacks (bfloat16 is 16, float8 17 to 20) are read as bits."""

_BFLOAT16 = 16

_NAMES = {1: "float32", 10: "float16", 11: "float64", 14: "float32", 15: "float64", 16: "bfloat16"}
"""The dtypes whose rounding errors are allowed; complex ones have those of their parts."""


def session_of(model: Any, settings: Any = None, constants: Sequence[Tensor] = ()) -> Any:
    """An ``InferenceSession``.

    Args:
        model: the path of a model, or the serialized model.
        settings: ``providers``, ``provider_options`` (a dict for each), ``graph_optimization_level``,
            ``disabled_optimizers``, ``threads``, ``config`` (session configuration entries), ``custom_op_libraries``
            (paths), ``optimized_model`` (the path to which the optimized model is written) and ``profile`` (the prefix
            of the profile's path). The defaults are ONNX Runtime's.
        constants: inputs that become constants, so that ONNX Runtime folds and packs them.
    """
    settings = settings or {}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = settings.get("threads") or 0
    level = settings.get("graph_optimization_level") or "ORT_ENABLE_ALL"
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    config = dict(settings.get("config") or {})
    if settings.get("optimized_model"):
        options.optimized_model_filepath = settings["optimized_model"]
    for path in settings.get("custom_op_libraries") or ():
        options.register_custom_ops_library(path)
    if settings.get("profile"):
        options.enable_profiling, options.profile_file_prefix = True, settings["profile"]
    if constants:
        if not isinstance(model, bytes):
            config.setdefault(EXTERNAL_DATA, str(Path(model).resolve().parent))
            model = Path(model).read_bytes()
        model = _with_constants(model, constants)
        values = [ort_value(array, number) for _, array, number in constants]
        options.add_external_initializers([name for name, _, _ in constants], values)
    for key, value in config.items():
        options.add_session_config_entry(key, str(value))
    names = settings.get("providers") or ["CPUExecutionProvider"]
    providers = list(zip(names, settings.get("provider_options") or [{} for _ in names]))  # noqa: B905, as old as 3.8
    return onnxruntime.InferenceSession(
        model,
        options,
        providers=None if add_providers(options, providers) else providers,
        disabled_optimizers=settings.get("disabled_optimizers") or None,
    )


EXTERNAL_DATA = "session.model_external_initializers_file_folder_path"
"""The configuration entry with the folder of a serialized model's external data."""


def run(session: Any, inputs: Any) -> dict[str, Any]:
    """Runs a session. Inputs and outputs are by name, each an array and ONNX's number of its dtype."""
    given = {item.name: inputs[item.name] for item in session.get_inputs()}
    values = {name: ort_value(array, number) for name, (array, number) in given.items()}
    names = [item.name for item in session.get_outputs()]
    results = session.run_with_ort_values(names, values)
    return {name: _array(value) for name, value in zip(names, results)}  # noqa: B905, as old as 3.8


def ort_value(array: np.ndarray, number: int) -> Any:
    if number < _BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)


def _with_constants(model: bytes, constants: Sequence[Tensor]) -> bytes:
    """A serialized model in which some inputs are external initializers."""
    names = {name.encode() for name, _, _ in constants}
    merged = b""
    for field, value, whole in _spans(model):
        if field == 7:  # ModelProto.graph; of that input 11, and of an input name 1
            kept = [part for number, entry, part in _spans(value) if number != 11 or _fields(entry)[1][0] not in names]
            whole = _message(7, b"".join(kept) + b"".join(_message(5, _declared(*item)) for item in constants))
        merged += whole
    return merged


def _declared(name: str, array: np.ndarray, number: int) -> bytes:
    """An external ``TensorProto``: dims 1, data_type 2, name 8, external_data 13, data_location 14."""
    where = {"location": "memory", "offset": "0", "length": str(array.nbytes)}
    sizes = b"".join(b"\x08" + _as_varint(size) for size in array.shape)
    entries = b"".join(_message(13, _message(1, k.encode()) + _message(2, v.encode())) for k, v in where.items())
    return sizes + b"\x10" + _as_varint(number) + _message(8, name.encode()) + entries + b"\x70\x01"


def _message(field: int, content: bytes) -> bytes:
    return _as_varint(field << 3 | 2) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    groups = b""
    while value > 0x7F:
        groups, value = groups + bytes([value & 0x7F | 0x80]), value >> 7
    return groups + bytes([value])


def _array(value: Any) -> tuple[np.ndarray, int]:
    number = value.element_type()
    if number not in _DTYPES:
        return np.zeros(0), number
    if number < _BFLOAT16:
        return value.numpy(), number
    import ctypes

    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(content, _DTYPES[number]).reshape(value.shape()), number


def read_tensor(path: Path) -> tuple[str, np.ndarray, int]:
    """Reads a ``TensorProto`` whose values are raw bytes, in the file or in another one."""
    fields = _fields(path.read_bytes())
    number, name = fields[2][0], fields[8][0].decode()
    raw = fields.get(9, [b""])[0]
    where = {entry[1][0].decode(): entry[2][0].decode() for entry in map(_fields, fields.get(13, []))}
    if where:
        with open(path.parent / where["location"], "rb") as file:
            file.seek(int(where.get("offset", 0)))
            raw = file.read(int(where["length"]))
    return name, np.frombuffer(raw, _DTYPES[number]).reshape(fields.get(1, [])), number


def _fields(message: bytes) -> dict[int, Any]:
    """The contents of a protobuf message's fields, by number."""
    found: dict[int, list[Any]] = {}
    for field, value, _ in _spans(message):
        found.setdefault(field, []).append(value)
    return found


def _spans(message: bytes) -> Any:
    """The number, content and bytes of each field of a protobuf message."""
    position = 0
    while position < len(message):
        start = position
        key, position = _varint(message, position)
        value: Any
        if key & 7 == 0:
            value, position = _varint(message, position)
        elif key & 7 == 2:
            length, position = _varint(message, position)
            value, position = message[position : position + length], position + length
        else:
            value, position = None, position + (8 if key & 7 == 1 else 4)
        yield key >> 3, value, message[start:position]


def _varint(message: bytes, position: int) -> tuple[int, int]:
    result, shift = 0, 0
    while True:
        byte = message[position]
        result |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return result, position


def plain(array: np.ndarray, number: int) -> np.ndarray:
    """A floating-point array in float64, complex numbers as pairs. Integers and float8 are not converted."""
    if number == _BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if number in (14, 15):
        return np.ascontiguousarray(array).view("f4" if number == 14 else "f8").astype(np.float64)
    return array.astype(np.float64) if number in (1, 10, 11) else array


def main() -> int:
    """Runs the model, prints the differences, and returns the exit code."""
    folder = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Runs the model on the inputs of test_data_set_0.")
    parser.add_argument("model", nargs="?", default=folder / SETTINGS.get("model", "model.onnx"))
    parser.add_argument("--provider", help="execution provider, as CUDAExecutionProvider or cuda")
    parser.add_argument("--threads", type=int, help="threads of the session")
    parser.add_argument("--no-optimize", action="store_true", help="without graph optimizations")
    parser.add_argument("--runs", type=int, default=1, help="how often it runs")
    arguments = parser.parse_args()
    settings = dict(SETTINGS.get("session", {}))
    if arguments.provider is not None:
        plugins = [name for plugin in installed_plugins() for name in plugin.names]
        names = {name.lower(): name for name in [*onnxruntime.get_available_providers(), *plugins]}
        given = arguments.provider.lower().replace("executionprovider", "") + "executionprovider"
        if given not in names:
            parser.error(f"--provider {arguments.provider}: there are {', '.join(names.values())}")
        known = dict(zip(settings.get("providers") or (), settings.get("provider_options") or ()))  # noqa: B905
        settings.update(providers=[names[given]], provider_options=[known.get(names[given], {})])
    if arguments.threads is not None:
        settings["threads"] = arguments.threads
    if arguments.no_optimize:
        settings["graph_optimization_level"] = "ORT_DISABLE_ALL"
    print(f"onnxruntime {onnxruntime.__version__} model: {Path(arguments.model).name} session: {json.dumps(settings)}")
    stored = folder / "test_data_set_0"
    for absent in sorted(stored.glob("input_*.json"))[:1]:
        print(f"{absent.stem} was not stored: it exceeds the option tensor_limit; dump again with tensor_limit -1")
        return 2
    data = {}
    for kind in ("input", "output"):
        paths = sorted(stored.glob(f"{kind}_*.pb"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
        data[kind] = [read_tensor(path) for path in paths]
    inputs = {name: (array, number) for name, array, number in data["input"]}
    held = set(SETTINGS.get("constants", ()))
    try:
        model = str(arguments.model)
        session = session_of(model, settings, [item for item in data["input"] if item[0] in held])
    except Exception as raised:  # ONNX Runtime's exceptions have no common base
        print(f"rejected: {raised}")
        return 1
    if not data["output"]:
        print("the session was created")
        return 0

    def results(items: Sequence[Tensor]) -> dict[str, Any]:
        """The outputs for other values of the inputs."""
        given = {name: (array, number) for name, array, number in items}
        return run(session_of(model, settings, [item for item in items if item[0] in held]), given)

    worst: dict[str, tuple[bool, float, str, str]] = {}
    allowed: dict[str, np.ndarray] = {}
    for _ in range(arguments.runs):
        try:
            outputs = run(session, inputs)
        except Exception as raised:
            print(f"failed: {raised}")
            return 1
        if not allowed and any(_comparison(item, outputs)[0] for item in data["output"]):
            allowed = _changes(data["input"], outputs, results)
        for item in data["output"]:
            found = _comparison(item, outputs, allowed.get(item[0]))
            worst[item[0]] = max(worst.get(item[0], found), found, key=lambda row: row[:2])
    compared = sorted(worst.values(), key=lambda item: item[:2], reverse=True)
    for _, _, _, line in compared[:_SHOWN]:
        print(line)
    if compared[_SHOWN:]:
        more_wrong = sum(is_wrong for is_wrong, _, _, _ in compared[_SHOWN:])
        print(f"and {len(compared) - _SHOWN} more outputs with smaller differences, {more_wrong} of them wrong")
    for absent in sorted(stored.glob("output_*.json")):
        print(f"{absent.stem} was not stored, as it exceeds the option tensor_limit, and is not compared")
    wrong = [name for is_wrong, _, name, _ in compared if is_wrong]
    _, most, where, _ = max(compared, key=lambda item: item[1])
    print(*[f"the largest difference: {most:.3g} at {where}\n"] * bool(most), end="")
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    print(f"differs: {', '.join(wrong[:_SHOWN])}{more}" if wrong else _right(folder))
    return 1 if wrong else 0


def _changes(inputs: Sequence[Tensor], outputs: dict[str, Any], results: Any) -> dict[str, np.ndarray]:
    """What inputs that are off by a rounding may change of each output: the tolerance of another order of sums."""
    generator, items = np.random.default_rng(0), []
    for name, array, number in inputs:
        if number in (1, 10, 11):
            signs = generator.integers(0, 2, array.shape) * 2 - 1
            array = (array * (1 + np.finfo(array.dtype).eps * signs)).astype(array.dtype)
        items.append((name, array, number))
    changed, found = results(items), {}
    for name, value in outputs.items():
        new, old = plain(*changed[name]), plain(*value)
        with np.errstate(all="ignore"):
            if old.dtype.kind == "f" and new.shape == old.shape:
                found[name] = SPREAD[1] * np.abs(new - old)
    return found


def _right(folder: Path) -> str:
    """What is said if all outputs are within their tolerance; those of a region are the run's, right or wrong."""
    verdict = _verdict(folder) if SETTINGS.get("is_region") else "ok"
    if verdict == "ok":
        return "right"
    said = f"but the graph is not right: {verdict}" if verdict else "but the run was not compared with PyTorch"
    cannot = "neither the values inside the session nor the stages before it were checked"
    return f"as recorded, {said}\nThe outputs of this region were compared with those of the run; {cannot}"


def _verdict(folder: Path) -> str:
    """The verdict on the graph of a region in a dump."""
    for root in folder.parents[:3]:
        if (root / "manifest.json").is_file():
            for graph in json.loads((root / "manifest.json").read_text(encoding="utf-8"))["graphs"]:
                if (root / graph["folder"]).resolve() == folder.parent:
                    return graph.get("verdict") or ""
    return ""


_SHOWN = 10  # outputs with a line of their own


def _comparison(expected: Tensor, outputs: Any, more: Any = None) -> tuple[bool, float, str, str]:
    """Whether an output is wrong, its error, its name, and a line of text."""
    name, right, number = expected
    if name not in outputs:
        return True, float("inf"), name, f"{name}: the model does not return it"
    array, its_number = outputs[name]
    if number != its_number or array.shape != right.shape:
        said = f"type {its_number} {array.shape} instead of {number} {right.shape}"
        return True, float("inf"), name, f"{name}: {said}"
    found, _ = judge(plain(array, number), plain(right, number), _NAMES.get(number, ""), more)
    line = f"{name}: error {found.max_abs:.3g}, {found.share:.3g} times the tolerance, largest value "
    line += f"{found.scale:.3g}, NaN or infinite in one only: {found.nonfinite}"
    return not found.is_rounding, float("inf") if found.nonfinite else found.max_abs, name, line


if __name__ == "__main__":
    sys.exit(main())
