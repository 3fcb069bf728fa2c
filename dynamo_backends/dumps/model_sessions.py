"""Creates and runs ONNX Runtime sessions of the models of a dump, of parts of them, and of files.

::

    session = ModelSession(load_model("model.onnx"), Settings())
    session({"x": x})["y"]

Sessions are created by ``repro.session_of``: a ``repro.py`` runs what the commands run. Tensors are numpy arrays; those
of bfloat16, float8 and the like have the dtypes of ``ml_dtypes``.

A dump is untrusted input. Libraries of custom operators are loaded only if the user names them
(``runtime/custom_operators.py``). Provider options may name libraries, files or addresses: a dump may set those that
this package sets by itself, and those that the environment sets to the same value. Entries of the session's
configuration may name files: a dump may set only those that this package sets.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from google.protobuf.message import EncodeError

from ..common.suggestions import unknown_name
from ..errors import first_line
from ..runtime.custom_operators import VARIABLE, libraries_of_environment
from ..runtime.messages import ORT_ERRORS
from ..runtime.provider_libraries import ProviderError, installed_plugins
from ..runtime.provider_options import is_own
from . import repro
from .models import OnnxModel, OnnxValue, external_folder, kind_of
from .reading import DumpedRegion, DumpError
from .schema import Settings

_EXTERNAL = "session.optimized_model_external_initializers_"

_PROVIDERS = "DYNAMO_BACKENDS_PROVIDERS"  # the environment variable of the option ``providers``

_CONFIG = frozenset(
    {"session.disable_quant_qdq", "session.intra_op.allow_spinning", "session.intra_op.spin_duration_us"}
)
"""The configuration entries that this package sets, see ``SessionSettings.config``."""


class ExecutionError(DumpError):
    """ONNX Runtime rejects a model (``kind`` is ``rejected``) or fails to run it (``failed``).

    ``said`` is ONNX Runtime's whole message.
    """

    def __init__(self, model: str, kind: str, error: BaseException, hint: str = "") -> None:
        self.kind, self.said = kind, str(error) or type(error).__name__
        what = "ONNX Runtime rejects the model" if kind == "rejected" else "ONNX Runtime fails"
        super().__init__(f"{model}: {what}: {first_line(self.said)}{hint}")


PLAIN = Settings(graph_optimization_level="ORT_DISABLE_ALL", threads=1)  # a session without optimizations


class ModelSession:
    """A session of a model.

    Args:
        model: the model, or a file that ONNX Runtime reads itself.
        settings: of the session.
        constants: values of inputs that become constants, so that ONNX Runtime folds and packs them. Names that are no
            inputs of the model are ignored.
        write: a folder for the optimized model: ``model.onnx``, and a file with its constants.
        profile: the prefix of the profile's path.

    Raises:
        ExecutionError: ONNX Runtime rejects the model.
        DumpError: the model is too large for one file, or the first provider cannot be used.
    """

    def __init__(
        self,
        model: OnnxModel | Path,
        settings: Settings,
        constants: Mapping[str, OnnxValue] | None = None,
        *,
        write: Path | None = None,
        profile: Path | None = None,
    ) -> None:
        self._name = str(model) if isinstance(model, Path) else model.name
        given = settings.as_json() | {"custom_op_libraries": libraries_of_environment()}
        content: str | bytes = str(model)
        held: dict[str, np.ndarray] = {}
        if isinstance(model, OnnxModel):
            try:
                content = ir.to_proto(model.model).SerializeToString()
            except ir.serde.SerdeError as error:
                raise DumpError(f"{model.name} is damaged: {first_line(str(error.__cause__ or error))}") from None
            except (EncodeError, ValueError) as error:
                raise DumpError(
                    f"{model.name} is too large for one file; save its weights as external data: {error}"
                ) from None
            given["config"] |= {repro.EXTERNAL_DATA: os.path.abspath(external_folder(model.model))}
            declared = {item.name for item in model.inputs}
            held = {n: item for n, item in (constants or {}).items() if n in declared and isinstance(item, np.ndarray)}
        if write is not None:
            given["optimized_model"] = str(write / "model.onnx")
            given["config"] |= {f"{_EXTERNAL}file_name": "constants.data", f"{_EXTERNAL}min_size_in_bytes": "1024"}
        if profile is not None:
            given["profile"] = str(profile)
        try:
            self._session = repro.session_of(content, given, held)
        except ProviderError as error:
            raise DumpError(str(error)) from None
        except ORT_ERRORS as error:
            raise ExecutionError(self._name, "rejected", error, _hint(settings)) from error
        if settings.providers[0] not in self._session.get_providers():
            raise DumpError(f"{settings.providers[0]} does not start, ONNX Runtime would use another provider")
        self._inputs = [item.name for item in self._session.get_inputs()]
        # Python has no OrtValue of sequences, maps and optionals; bfloat16 exists only as OrtValue.
        self._is_tensor = {item.name: item.type.startswith("tensor(") for item in self._session.get_outputs()}

    def __call__(self, inputs: Mapping[str, OnnxValue]) -> dict[str, OnnxValue]:
        """The outputs by name. Values that are no inputs of the session are ignored.

        Raises ``DumpError`` if an input is missing, or ONNX Runtime fails.
        """
        missing = [name for name in self._inputs if name not in inputs]
        if missing:
            raise DumpError(f"{self._name}: no value for the input {missing[0]}")
        feeds = {name: inputs[name] for name in self._inputs}
        # Python has no OrtValue of strings either.
        has_strings = any(isinstance(item, np.ndarray) and kind_of(item.dtype) == "string" for item in feeds.values())
        bound = [name for name, is_tensor in self._is_tensor.items() if is_tensor and not has_strings]
        plain = [name for name in self._is_tensor if name not in set(bound)]
        try:
            tensors = {name: item for name, item in feeds.items() if isinstance(item, np.ndarray)} if bound else {}
            values = {name: repro.ort_value(item) for name, item in tensors.items()}
            found = list(map(repro.ort_array, self._session.run_with_ort_values(bound, values))) if bound else []
            found += self._session.run(plain, feeds) if plain else []
        except ORT_ERRORS as error:
            raise ExecutionError(self._name, "failed", error) from error
        by_name = dict(zip([*bound, *plain], found, strict=True))
        return {name: by_name[name] for name in self._is_tensor}

    def end_profiling(self) -> Path:
        """The path of the profile."""
        return Path(self._session.end_profiling())


def _hint(settings: Settings) -> str:
    """How to load the libraries that the run had and this session lacks."""
    loaded = set(map(os.path.abspath, libraries_of_environment()))
    missing = [path for path in settings.custom_op_libraries if path not in loaded]
    if not missing:
        return ""
    variable = f"{VARIABLE}={os.pathsep.join(missing)}"
    return f"\nThe run used libraries of custom operators that are not loaded; if you trust them: {variable}"


def region_settings(region: DumpedRegion, threads: int | None = None) -> Settings:
    """The settings of the session that ran, with another number of threads if given.

    Raises ``DumpError`` if the dump has settings that it may not set.
    """
    settings = region.entry.session
    check_provider_options(settings.providers, settings.provider_options)
    check_config(settings.config)
    return dataclasses.replace(settings, threads=threads or settings.threads or 1)


def check_provider_options(providers: Sequence[str], options: Sequence[Mapping[str, str]]) -> None:
    """Checks the provider options of a dump. ``options`` may be shorter than ``providers``.

    Raises ``DumpError`` if an option is neither ours nor set by the environment.
    """
    from ..options import parse_options  # not at the top: the worker of candidates starts quickly

    allowed = {pair[0]: pair[1] for pair in parse_options().providers if not isinstance(pair, str)}
    for name, given in zip(providers, options, strict=False):
        foreign = {
            option: value
            for option, value in given.items()
            if not is_own(name, option, value) and str(allowed.get(name, {}).get(option)) != value
        }
        if foreign:
            pairs = [[name, dict(more)] if more else name for name, more in zip(providers, options, strict=False)]
            what = f"the dump sets options of {name} that may load libraries or use files: {_written(foreign)}"
            raise DumpError(f"{what}. If you trust them, set {_PROVIDERS}='{json.dumps(pairs)}'")


def check_config(config: Mapping[str, str]) -> None:
    """Raises ``DumpError`` if a dump sets configuration entries that this package does not set."""
    foreign = {key: value for key, value in config.items() if key not in _CONFIG}
    if foreign:
        what = f"the dump sets configuration entries that may read or write files: {_written(foreign)}"
        raise DumpError(f"{what}. Remove them from its manifest.json")


def _written(options: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def available_provider(name: str) -> str:
    """The full name of an execution provider, given as ``CPUExecutionProvider`` or ``cpu``.

    Raises ``DumpError`` if it is neither built into ONNX Runtime nor installed.
    """
    plugins = [name for plugin in installed_plugins() for name in plugin.names]
    available = list(dict.fromkeys([*onnxruntime.get_available_providers(), *plugins]))
    by_short_name = {item.removesuffix("ExecutionProvider").lower(): item for item in available}
    found = by_short_name.get(name.removesuffix("ExecutionProvider").lower())
    if found is None:
        raise DumpError(f"{unknown_name('execution provider', name, available)}. Others come with packages")
    return found


def operator_of(node: onnx.NodeProto | ir.Node) -> str:
    """The operator of a node, with the domain unless it is ONNX's own: ``com.microsoft.FusedMatMul``."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}


def random_operators(*models: OnnxModel) -> list[str]:
    """A note that names the operators whose results are random; empty if there are none."""
    names = sorted({node.op_type for model in models for node in model.model.graph} & RANDOM)
    return [f"{', '.join(names)} returns random numbers: the values that depend on it differ"] if names else []
