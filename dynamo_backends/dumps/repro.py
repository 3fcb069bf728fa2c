"""Runs the model next to this file on the inputs of ``test_data_set_0``, and compares with the outputs there.

    python repro.py                     # the model of SETTINGS
    python repro.py another.onnx        # another model with the same inputs
    python repro.py --no-optimize       # also --provider cuda, --threads 4, --runs 20

It needs onnxruntime, onnx and numpy. It prints the largest differences, the wrong ones first. Exit codes: 0 if all
outputs are within the tolerance, or the session is created and no outputs were stored; 1 if not, or if the session
cannot be created or run; 2 if the inputs were not stored.

The folder of each region in a dump, and each folder that ``bisect`` writes, has a ``repro.py``: the text of this
module, with ``numerics/rule.py`` and the session's settings inserted (``cut_folder.repro_text``). The commands that
run models of dumps create their sessions with the functions here, too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from dynamo_backends.numerics.rule import SPREAD, judge
from dynamo_backends.runtime.provider_libraries import add_providers, installed_plugins

SETTINGS: dict = {}

Tensors = Mapping[str, np.ndarray]  # by name; those of bfloat16 and the like have the dtypes of ml_dtypes

_NUMPYS = frozenset(range(1, 16))
"""ONNX's numbers of the dtypes that numpy has: from float32 (1) to complex128 (15)."""


def session_of(model: Any, settings: Any = None, constants: Tensors | None = None) -> Any:
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
        options.add_external_initializers(list(constants), list(map(ort_value, constants.values())))
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


def run(session: Any, inputs: Tensors) -> dict[str, np.ndarray]:
    """Runs a session."""
    values = {item.name: ort_value(inputs[item.name]) for item in session.get_inputs()}
    names = [item.name for item in session.get_outputs()]
    results = session.run_with_ort_values(names, values)
    return {name: ort_array(value) for name, value in zip(names, results)}  # noqa: B905, as old as 3.8


def ort_value(array: np.ndarray) -> Any:
    array = np.require(array, requirements=["C_CONTIGUOUS"])
    number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    if number in _NUMPYS:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.dtype.itemsize}"), number)


def ort_array(value: Any) -> np.ndarray:
    """A tensor of ONNX Runtime as an array, also if numpy lacks its dtype."""
    number = value.element_type()
    if number in _NUMPYS:
        array: np.ndarray = value.numpy()
        return array
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return onnx.numpy_helper.to_array(onnx.TensorProto(dims=value.shape(), data_type=number, raw_data=content))


def _with_constants(model: bytes, constants: Tensors) -> bytes:
    """A serialized model in which some inputs are external initializers."""
    proto = onnx.load_model_from_string(model)
    kept = [item for item in proto.graph.input if item.name not in constants]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    for name, array in constants.items():
        number = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = proto.graph.initializer.add(name=name, dims=array.shape, data_type=number, data_location=1)
        for key, text in {"location": "memory", "offset": "0", "length": str(array.nbytes)}.items():
            tensor.external_data.add(key=key, value=text)
    return proto.SerializeToString()


def known_to_numpy(array: np.ndarray) -> np.ndarray:
    """The array; one of ``ml_dtypes`` in a wider dtype of numpy."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.astype(np.int64 if "int" in array.dtype.name else np.float32)


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
    data: dict[str, dict[str, np.ndarray]] = {}
    for kind in ("input", "output"):
        paths = sorted(stored.glob(f"{kind}_*.pb"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
        tensors = [(onnx.load_tensor(path), path.parent) for path in paths]
        data[kind] = {tensor.name: onnx.numpy_helper.to_array(tensor, str(folder)) for tensor, folder in tensors}
    held = set(SETTINGS.get("constants", ()))

    def session_on(inputs: Tensors) -> Any:
        constants = {name: array for name, array in inputs.items() if name in held}
        return session_of(str(arguments.model), settings, constants)

    try:
        session = session_on(data["input"])
    except Exception as raised:  # ONNX Runtime's exceptions have no common base
        print(f"rejected: {raised}")
        return 1
    if not data["output"]:
        print("the session was created")
        return 0
    worst: dict[str, tuple[bool, float, str, str]] = {}
    allowed: dict[str, np.ndarray] = {}
    for _ in range(arguments.runs):
        try:
            outputs = run(session, data["input"])
        except Exception as raised:
            print(f"failed: {raised}")
            return 1
        if not allowed and any(_comparison(*item, outputs)[0] for item in data["output"].items()):
            changed = _off_by_a_rounding(data["input"])
            allowed = _changes(outputs, run(session_on(changed), changed))
        for name, right in data["output"].items():
            found = _comparison(name, right, outputs, allowed.get(name))
            worst[name] = max(worst.get(name, found), found, key=lambda row: row[:2])
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


def _off_by_a_rounding(inputs: Tensors) -> dict[str, np.ndarray]:
    generator, changed = np.random.default_rng(0), dict(inputs)
    for name, array in inputs.items():
        if array.dtype.kind == "f":
            signs = generator.integers(0, 2, array.shape) * 2 - 1
            changed[name] = (array * (1 + np.finfo(array.dtype).eps * signs)).astype(array.dtype)
    return changed


def _changes(outputs: Tensors, changed: Tensors) -> dict[str, np.ndarray]:
    """What inputs that are off by a rounding may change of each output: the tolerance of another order of sums."""
    found = {}
    for name, value in outputs.items():
        new, old = known_to_numpy(changed[name]), known_to_numpy(value)
        with np.errstate(all="ignore"):
            if old.dtype.kind in "fc" and new.shape == old.shape:
                found[name] = SPREAD[1] * np.abs(new.astype(np.result_type(new, np.float64)) - old)
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


def _comparison(name: str, right: np.ndarray, outputs: Tensors, more: Any = None) -> tuple[bool, float, str, str]:
    """Whether an output is wrong, its error, its name, and a line of text."""
    if name not in outputs:
        return True, float("inf"), name, f"{name}: the model does not return it"
    array = outputs[name]
    if array.dtype != right.dtype or array.shape != right.shape:
        said = f"{array.dtype} {array.shape} instead of {right.dtype} {right.shape}"
        return True, float("inf"), name, f"{name}: {said}"
    found, _ = judge(known_to_numpy(array), known_to_numpy(right), right.dtype.name, more)
    line = f"{name}: error {found.max_abs:.3g}, {found.share:.3g} times the tolerance, largest value "
    line += f"{found.scale:.3g}, NaN or infinite in one only: {found.nonfinite}"
    return not found.is_rounding, float("inf") if found.nonfinite else found.max_abs, name, line


if __name__ == "__main__":
    sys.exit(main())
