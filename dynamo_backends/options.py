"""Every option of the backends: its name, type, default, group, meaning and check.

::

    torch.compile(model, backend="onnxrt", options={"fallback": "error", "opset": 18})

The environment variable ``DYNAMO_BACKENDS_<OPTION>`` (upper case) sets a default for an option:
``DYNAMO_BACKENDS_OPSET=18``, ``DYNAMO_BACKENDS_PROVIDERS=CUDAExecutionProvider,CPUExecutionProvider``.
``options`` takes precedence over the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from passes.engine.registry import Switches

from .common.suggestions import unknown_name
from .runtime.custom_operators import check_libraries, libraries_from_text
from .runtime.opsets import ALWAYS_LOADED, MINIMUM_OPSET, maximum_opset
from .runtime.providers import Provider, check_providers, default_providers

ENVIRONMENT_PREFIX = "DYNAMO_BACKENDS_"
FALLBACKS = ("pytorch", "error")
WEIGHTS = ("constants", "checked", "inputs")
PLACEMENTS = ("measured", "onnx", "fastest")
COMPARISONS = ("first", "every", "never")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


_OF_MODES: dict[str, dict[str, object]] = {
    "reduce-overhead": {"spin": 20},
    "max-autotune": {"placement": "fastest"},
    "max-autotune-no-cudagraphs": {"placement": "fastest"},
}
"""The options that the modes of ``torch.compile`` set."""


@dataclasses.dataclass(frozen=True)
class OptionFormat:
    """How the value of an option is checked and parsed.

    Attributes:
        check: raises ``TypeError`` or ``ValueError``, with the valid values, if a value is invalid.
        from_text: parses the text of an environment variable.
        from_user: normalizes what a user passed.
    """

    check: Callable[[object], None]
    from_text: Callable[[str], object] = str
    from_user: Callable[[object], object] = lambda value: value  # noqa: E731


def _is(expected: str, is_valid: Callable[[Any], object]) -> Callable[[object], None]:
    """A check of values that are valid; ``expected`` says which are."""

    def check(value: object) -> None:
        if not is_valid(value):
            raise ValueError(f"expected {expected}, got {value!r} ({type(value).__name__})")

    return check


def _between(least: float, most: float, expected: str, *valid: object) -> Callable[[object], None]:
    """A check of integers; other ``valid`` values are allowed too."""
    return _is(expected, lambda value: value in valid or (type(value) is int and least <= value <= most))


def _one_of(valid: Sequence[str]) -> Callable[[object], None]:
    return _is(f"one of {', '.join(map(repr, valid))}", lambda value: value in valid)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _check_opset(value: object) -> None:
    if type(value) is not int or not MINIMUM_OPSET <= value <= ALWAYS_LOADED:  # the newest takes a while to find out
        opsets = f"an integer from {MINIMUM_OPSET} to {maximum_opset()}, the opsets of the installed ONNX Runtime"
        _between(MINIMUM_OPSET, maximum_opset(), opsets)(value)


def most_threads() -> int:
    """The largest value of the option ``threads``: four per processor, at least 64. More threads only cost memory."""
    return max(64, 4 * (os.cpu_count() or 1))


_THREADS = f"None or an integer from 1 to {most_threads()} (four for each processor, at least 64)"


def _check_passes(value: object) -> None:
    if not isinstance(value, Switches):
        raise TypeError(f"expected the switches of the pass manager, got {value!r}")
    value.check()


def _integer_from_text(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected an integer, got {text!r}") from None


def _bool_from_text(text: str) -> bool:
    words = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in words:
        raise ValueError("expected 1, 0, true or false")
    return words[text.lower()]


def _providers_from_text(text: str) -> object:
    if text.lstrip().startswith("["):
        parsed = json.loads(text)  # its error is a ValueError that says where
        return [tuple(item) if isinstance(item, list) else item for item in parsed]
    return [part.strip() for part in text.split(",") if part.strip()]


def _providers_from_user(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _path_from_user(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _paths_from_user(value: object) -> object:
    return tuple(map(_path_from_user, value)) if isinstance(value, (list, tuple)) else value


def _switches_from_text(text: str) -> object:
    """Parses the option ``passes``: JSON, or ``-onnx.*,+onnx.linear``."""
    if text.lstrip().startswith("{"):
        return json.loads(text)
    lists: dict[str, list[str]] = {"disable": [], "enable": []}
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part[0] not in "+-":
            raise ValueError(f"expected a list such as '-onnx.*,+onnx.linear', got {part!r} without a sign")
        lists["disable" if part[0] == "-" else "enable"].append(part[1:].strip())
    return lists


def _switches_from_user(value: object) -> Switches:
    """Converts the option ``passes`` to the pass manager's switches.

    Raises:
        ValueError: not a dict of the lists ``disable`` and ``enable``.
    """
    if isinstance(value, Switches):
        return value
    if not isinstance(value, Mapping) or not all(map(_is_list_of_names, value.values())):
        raise ValueError(f"expected {{'disable': [...], 'enable': [...]}} with names of passes, got {value!r}")
    for key in value:
        if key not in ("disable", "enable"):
            raise ValueError(unknown_name("key", key, ("disable", "enable")))
    return Switches(**{key: tuple(names) for key, names in value.items()})


def _is_list_of_names(names: object) -> bool:
    return isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)


_BOOLEAN = OptionFormat(_is("True or False", lambda value: isinstance(value, bool)), _bool_from_text)

GROUPS = {
    "run": "How graphs run",
    "debug": "What is dumped and checked",
    "cache": "What is kept on disk",
}
"""The groups that the documentation shows the options in."""


def option(group: str, default: Any, form: OptionFormat, help: str, *, changes_graphs: bool = True) -> Any:
    """A field of ``Options``: everything about one option.

    Args:
        group, form, help: see ``OptionFormat`` and ``GROUPS``.
        default: the value, or a function that makes it.
        changes_graphs: whether compiled graphs depend on it. If not, graphs in the cache serve for all its values, and
            it must not act while a graph is compiled.
    """
    metadata = {"group": group, "help": help, "form": form, "changes_graphs": changes_graphs}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options of one backend, one field for each option."""

    fallback: str = option(
        "run",
        "pytorch",
        OptionFormat(_one_of(FALLBACKS)),
        "What happens to an operator that ONNX Runtime cannot run. 'pytorch': PyTorch runs it. 'error': "
        "UnsupportedOperatorError with the node and the user's source line.",
    )
    placement: str = option(
        "run",
        "measured",
        OptionFormat(_one_of(PLACEMENTS)),
        "Which engine runs a graph. 'measured': inference runs on ONNX Runtime; a training graph is timed with PyTorch "
        "and with ONNX Runtime on some steps, and the fastest is kept. 'fastest' or mode='max-autotune': all "
        "graphs are timed, with Inductor too. 'onnx': ONNX Runtime runs everything it can.",
    )
    autotune_budget: int = option(
        "run",
        5,
        OptionFormat(_between(1, 100, "a percentage from 1 to 100"), _integer_from_text),
        "With placement='measured': the largest part of a process's time that may be spent on finding the fastest "
        "engine, in percent (1 to 100). Until it allows more, PyTorch runs training. 100: the search begins at once.",
        changes_graphs=False,
    )
    providers: tuple[Provider, ...] = option(
        "run",
        ("CPUExecutionProvider",),
        OptionFormat(check_providers, _providers_from_text, _providers_from_user),
        "Execution providers in order of preference; each a name or a (name, options) pair. The default for tensors on "
        "a GPU is CUDAExecutionProvider and then the CPU's, if the installed ONNX Runtime has it.",
    )
    weights: str = option(
        "run",
        "constants",
        OptionFormat(_one_of(WEIGHTS)),
        "How an inference session holds parameters and buffers. 'constants': as initializers; the session is rebuilt "
        "when one changes. 'checked': the same, and every byte is compared on each call. 'inputs': passed each call; "
        "the default for tensors on a GPU.",
    )
    threads: int | None = option(
        "run",
        None,
        OptionFormat(_between(1, most_threads(), _THREADS, None), _integer_from_text),
        "Threads of a session, at most four per processor or 64. The default is torch.get_num_threads() at each call.",
    )
    spin: int = option(
        "run",
        1,
        OptionFormat(_between(0, 1000, "a number of milliseconds from 0 to 1000"), _integer_from_text),
        "How long idle session threads busy-wait for the next call, in milliseconds (0 to 1000). "
        "mode='reduce-overhead' sets 20.",
    )
    idle_seconds: int = option(
        "run",
        60,
        OptionFormat(_between(1, 86_400, "a number of seconds from 1 to 86,400"), _integer_from_text),
        "How long memory for intermediate results is kept after a call, in seconds (1 to 86,400). Then it is returned "
        "to the system, and the next call is slower.",
    )
    opset: int = option(
        "run",
        23,
        OptionFormat(_check_opset, _integer_from_text),
        "ONNX opset of the models; at least 18, at most what the installed ONNX Runtime loads.",
    )
    passes: Switches = option(
        "run",
        Switches,
        OptionFormat(_check_passes, _switches_from_text, _switches_from_user),
        "Which passes run: {'disable': [...], 'enable': [...]}, each a list of names or patterns such as 'joint.*'; "
        "the most specific wins. In the environment also '-onnx.*,+onnx.linear'.",
    )
    custom_op_libraries: tuple[str, ...] = option(
        "run",
        (),
        OptionFormat(check_libraries, libraries_from_text, _paths_from_user),
        "Paths of shared libraries with custom ONNX Runtime operators for your converters. Their code runs in this "
        "process. In the environment, separated as in PATH.",
    )
    check_providers: bool = option(
        "run",
        True,
        _BOOLEAN,
        "Whether the first results of a region on a provider other than the CPU's are compared with PyTorch's; if they "
        "are wrong, the next provider runs the region. Set False to ask a provider for less than float32.",
    )
    dump_dir: str = option(
        "debug",
        "onnx_debug",
        OptionFormat(_is("a path", _is_path), from_user=_path_from_user),
        "Folder of the dumps of onnx_debug and fx_debug; each process writes its own run folder in it.",
        changes_graphs=False,
    )
    compare: str = option(
        "debug",
        "first",
        OptionFormat(_one_of(COMPARISONS)),
        "Which runs onnx_debug compares with eager and float64: 'first' (of each graph and each new set of sizes), "
        "'every' or 'never'.",
        changes_graphs=False,
    )
    tensor_limit: int = option(
        "debug",
        16 * 2**20,
        OptionFormat(_between(-1, math.inf, "a size in bytes, or -1 for no limit"), _integer_from_text),
        "Size in bytes above which a dumped tensor that is no weight is summarized instead of stored; -1 stores all.",
        changes_graphs=False,
    )
    verify_passes: bool = option(
        "debug",
        False,
        _BOOLEAN,
        "Whether the result of each pass that fired is compared with float64 on the real inputs; a pass that changes "
        "results by more than rounding is undone.",
    )
    cache: bool = option(
        "cache",
        True,
        _BOOLEAN,
        "Whether compiled graphs are kept on disk for other processes.",
        changes_graphs=False,
    )
    cache_dir: str | None = option(
        "cache",
        None,
        OptionFormat(_is("a path or None", lambda x: x is None or _is_path(x)), from_user=_path_from_user),
        "Folder of the compiled graphs; the default is dynamo_backends in $XDG_CACHE_HOME or ~/.cache.",
        changes_graphs=False,
    )
    cache_size: int = option(
        "cache",
        2**30,
        OptionFormat(_between(0, math.inf, "a size in bytes"), _integer_from_text),
        "Maximum size of the folder in bytes; the least recently used graphs are evicted.",
        changes_graphs=False,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            with _naming(f"option {field.name!r}"):
                field.metadata["form"].check(getattr(self, field.name))


def parse_options(
    options: Mapping[str, object] | None = None, mode: str | None = None, *, device: str = "cpu"
) -> Options:
    """Returns the checked options of one ``torch.compile`` call, with defaults from the environment.

    Args:
        options: what the user passed as ``torch.compile(options=...)``.
        mode: what the user passed as ``torch.compile(mode=...)``; it sets the options of ``_OF_MODES``.
        device: the type of device of the graph's tensors, on which the default of ``providers`` depends.

    Raises:
        ValueError: unknown option (with close matches), wrong type or impossible value (with the valid ones).
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; valid modes: {', '.join(MODES)}")
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options must be a dict of option names to values, not {type(options).__name__}")
    values = {**_environment(), **_OF_MODES.get(mode or "", {})}
    for name, value in (options or {}).items():
        form = _form(name)
        with _naming(f"option {name!r}"):
            values[name] = form.from_user(value)
    if device != "cpu":
        values.setdefault("weights", "inputs")
        if "providers" not in values:
            values["providers"] = default_providers(device)
    return Options(**values)  # type: ignore[arg-type]


def options_from_text(texts: Mapping[str, str]) -> dict[str, object]:
    """Parses options from text, as in the environment, for ``torch.compile(options=...)``.

    Args:
        texts: by the option's name, ``{"opset": "18"}``.

    Raises:
        ValueError: as ``parse_options``.
    """
    values: dict[str, object] = {}
    for name, text in texts.items():
        form = _form(name)
        with _naming(f"option {name!r}: {text!r}"):
            values[name] = form.from_text(text)
    parse_options(values)
    return values


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Prefixes the message of an error with what the value belongs to."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from None


def _form(name: str) -> OptionFormat:
    forms = _forms()
    if name not in forms:
        raise ValueError(unknown_name("option", name, list(forms)))
    return forms[name]


def _forms() -> dict[str, OptionFormat]:
    """The form of each option, by its name."""
    return {field.name: field.metadata["form"] for field in dataclasses.fields(Options)}


def _environment() -> dict[str, object]:
    """Parses and checks the options in the environment; an error names the variable."""
    variables = {ENVIRONMENT_PREFIX + name.upper(): (name, form) for name, form in _forms().items()}
    values: dict[str, object] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if variable not in variables:
            raise ValueError(unknown_name("environment variable", variable, list(variables)))
        name, form = variables[variable]
        with _naming(f"environment variable {variable}={text!r}"):
            values[name] = form.from_user(form.from_text(text))
            form.check(values[name])
    return values
