"""Every option of the backends, once: name, type, default, what it does, how it is checked.

::

    torch.compile(model, backend="onnxrt", options={"fallback": "error", "opset": 18})

The environment variable ``DYNAMO_BACKENDS_<OPTION>`` (upper case) sets a default for an option:
``DYNAMO_BACKENDS_OPSET=18``, ``DYNAMO_BACKENDS_PROVIDERS=CUDAExecutionProvider,CPUExecutionProvider``.
What a user writes in ``options`` wins over the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from passes.engine.manager import Switches

from .runtime.providers import Provider, check_providers
from .runtime.versions import MINIMUM_OPSET, maximum_opset

ENVIRONMENT_PREFIX = "DYNAMO_BACKENDS_"
FALLBACKS = ("pytorch", "error")
COMPARISONS = ("first", "every", "never")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

OptionValue: TypeAlias = "str | int | bool | None | Sequence[Provider] | Switches"


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options of one backend. Each field is one option; its metadata documents it."""

    providers: tuple[Provider, ...] = dataclasses.field(
        default=("CPUExecutionProvider",),
        metadata={
            "help": "Execution providers in order of preference; each a name or a (name, options) pair.",
        },
    )
    opset: int = dataclasses.field(
        default=23,
        metadata={"help": "ONNX opset of the models; at least 18, at most what this ONNX Runtime loads."},
    )
    fallback: str = dataclasses.field(
        default="pytorch",
        metadata={
            "help": "What happens to an operator ONNX Runtime cannot run: 'pytorch' runs it in PyTorch, "
            "'error' raises UnsupportedOperatorError with the node and the user's source line.",
        },
    )
    threads: int | None = dataclasses.field(
        default=None,
        metadata={"help": "Threads of a session; by default torch.get_num_threads() at each call."},
    )
    dump_dir: str = dataclasses.field(
        default="onnx_debug",
        metadata={
            "help": "Folder of the dumps of onnx_debug and fx_debug; each process writes its own run folder in it."
        },
    )
    compare: str = dataclasses.field(
        default="first",
        metadata={
            "help": "Which runs onnx_debug compares with eager and float64: 'first' of each graph, 'every' or 'never'."
        },
    )
    tensor_limit: int = dataclasses.field(
        default=16 * 2**20,
        metadata={"help": "Size in bytes above which a dumped tensor is summarized instead of stored; -1 stores all."},
    )

    passes: Switches = dataclasses.field(
        default_factory=Switches,
        metadata={
            "help": "Which passes run: {'disable': [...], 'enable': [...]}, each a list of names or patterns such as "
            "'joint.*'; the most specific decides. In the environment also '-joint.*,+joint.pad_matmul'.",
        },
    )
    verify_passes: bool = dataclasses.field(
        default=False,
        metadata={
            "help": "Whether each pass that fired is checked on the real inputs, against float64, and undone if it "
            "changes the results beyond rounding.",
        },
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            try:
                _CHECKS[field.name](getattr(self, field.name))
            except (TypeError, ValueError) as error:
                raise ValueError(f"option {field.name!r}: {error}") from None


def parse_options(options: Mapping[str, object] | None = None, mode: str | None = None) -> Options:
    """The options of one ``torch.compile`` call, checked, over the environment's defaults.

    Args:
        options: what the user passed as ``torch.compile(options=...)``.
        mode: what the user passed as ``torch.compile(mode=...)``. The modes tune Inductor; they are
            accepted so that code written for it runs, and change nothing here.

    Raises:
        ValueError: unknown option (with close matches), wrong type or impossible value (with the valid ones).
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; valid modes: {', '.join(MODES)}")
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options must be a dict of option names to values, not {type(options).__name__}")
    names = [field.name for field in dataclasses.fields(Options)]
    values = _environment(names)
    for name, value in (options or {}).items():
        if name not in names:
            raise ValueError(unknown_name("option", name, names))
        values[name] = value
    if isinstance(values.get("providers"), (list, tuple)):
        values["providers"] = tuple(values["providers"])  # type: ignore[arg-type]
    if "passes" in values:
        values["passes"] = _switches(values["passes"])
    dump_dir = values.get("dump_dir")
    if isinstance(dump_dir, os.PathLike):
        values["dump_dir"] = os.fspath(dump_dir)
    return Options(**values)  # type: ignore[arg-type]


def _switches(value: object) -> Switches:
    """The option ``passes`` as the manager takes it.

    Raises:
        ValueError: not a dict of the lists ``disable`` and ``enable``.
    """
    if isinstance(value, Switches):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"option 'passes': expected {{'disable': [...], 'enable': [...]}}, got {value!r}")
    lists: dict[str, tuple[str, ...]] = {}
    for key, names in value.items():
        if key not in ("disable", "enable"):
            raise ValueError("option 'passes': " + unknown_name("key", key, ("disable", "enable")))
        if isinstance(names, str) or not isinstance(names, (list, tuple)):
            raise ValueError(f"option 'passes': {key!r} takes a list of names of passes, got {names!r}")
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"option 'passes': {key!r} takes names of passes, got {name!r}")
        lists[key] = tuple(names)
    return Switches(**lists)


def unknown_name(kind: str, name: object, valid: Sequence[str]) -> str:
    """The message for a misspelt name: the name, the close matches, all that is valid."""
    close = difflib.get_close_matches(str(name), valid, n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    plural = kind + ("es" if kind.endswith("s") else "s")
    return f"unknown {kind} {name!r}.{hint} Valid {plural}: {', '.join(valid)}"


def _environment(names: Sequence[str]) -> dict[str, object]:
    """The options the environment sets, each checked so that the message names its variable."""
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in names}
    values: dict[str, object] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable not in variables:
            raise ValueError(unknown_name("environment variable", variable, list(variables)))
        name = variables[variable]
        try:
            values[name] = _parse(name, text)
            if name == "passes":
                values[name] = _switches(values[name])
            _CHECKS[name](values[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"environment variable {variable}={text!r}: {error}") from None
    return values


def _parse(name: str, text: str) -> object:
    """The value of an option as it is written in the environment."""
    if name == "providers":
        if text.lstrip().startswith("["):
            parsed = json.loads(text)  # its error is a ValueError that says where
            return tuple(tuple(item) if isinstance(item, list) else item for item in parsed)
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "passes":
        return json.loads(text) if text.lstrip().startswith("{") else _signed_names(text)
    if name == "verify_passes":
        words = {"1": True, "true": True, "0": False, "false": False}
        if text.lower() not in words:
            raise ValueError("expected 1, 0, true or false")
        return words[text.lower()]
    if name in ("opset", "threads", "tensor_limit"):
        try:
            return int(text)
        except ValueError:
            raise ValueError("expected an integer") from None
    return text


def _signed_names(text: str) -> dict[str, list[str]]:
    """``-joint.*,+joint.pad_matmul`` as the dict it stands for."""
    lists: dict[str, list[str]] = {"disable": [], "enable": []}
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part[0] not in "+-":
            raise ValueError(f"expected a list such as '-joint.*,+joint.pad_matmul', got {part!r} without a sign")
        lists["disable" if part[0] == "-" else "enable"].append(part[1:].strip())
    return lists


def _check_passes(value: object) -> None:
    if not isinstance(value, Switches):
        raise TypeError(f"expected the switches of the pass manager, got {value!r}")
    value.check()


def _check_bool(value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"expected True or False, got {value!r} ({type(value).__name__})")


def _check_integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, got {value!r} ({type(value).__name__})")
    return value


def _check_opset(value: object) -> None:
    opset, newest = _check_integer(value), maximum_opset()
    if not MINIMUM_OPSET <= opset <= newest:
        raise ValueError(
            f"opset {opset} is out of range; the translations and the installed ONNX Runtime allow "
            f"{MINIMUM_OPSET} to {newest}"
        )


def _check_threads(value: object) -> None:
    if value is not None and _check_integer(value) < 1:
        raise ValueError(f"expected None or a positive integer, got {value}")


def _check_tensor_limit(value: object) -> None:
    if _check_integer(value) < -1:
        raise ValueError(f"expected a size in bytes, or -1 for no limit, got {value}")


def _check_dump_dir(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"expected a path, got {value!r} ({type(value).__name__})")
    if not value:
        raise ValueError("expected a path, got an empty string")


def _one_of(valid: Sequence[str]) -> Callable[[object], None]:
    def check(value: object) -> None:
        if value not in valid:
            raise ValueError(f"expected one of {', '.join(map(repr, valid))}, got {value!r}")

    return check


_CHECKS: dict[str, Callable[[object], None]] = {
    "providers": check_providers,
    "opset": _check_opset,
    "fallback": _one_of(FALLBACKS),
    "threads": _check_threads,
    "dump_dir": _check_dump_dir,
    "compare": _one_of(COMPARISONS),
    "tensor_limit": _check_tensor_limit,
    "passes": _check_passes,
    "verify_passes": _check_bool,
}
