"""Every option of the backends, once: name, type, default, what it does, how it is checked.

::

    torch.compile(model, backend="onnxrt", options={"fallback": "error", "opset": 18})

The environment variable ``DYNAMO_BACKENDS_<OPTION>`` (upper case) sets a default for an option:
``DYNAMO_BACKENDS_OPSET=18``, ``DYNAMO_BACKENDS_PROVIDERS=CUDAExecutionProvider,CPUExecutionProvider``.
What a user writes in ``options`` wins over the environment.
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
from .runtime.providers import Provider, check_providers
from .runtime.versions import ALWAYS_LOADED, MINIMUM_OPSET, maximum_opset

ENVIRONMENT_PREFIX = "DYNAMO_BACKENDS_"
FALLBACKS = ("pytorch", "inductor", "error")
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
class Form:
    """How an option is checked and read.

    Attributes:
        check: raises ``TypeError`` or ``ValueError`` for what is no value of the option, with the valid ones.
        from_text: the value that is written in the environment.
        from_user: the value in the form in which it is kept, of what a user wrote.
    """

    check: Callable[[object], None]
    from_text: Callable[[str], object] = str
    from_user: Callable[[object], object] = lambda value: value  # noqa: E731


def _check_bool(value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"expected True or False, got {value!r} ({type(value).__name__})")


def _check_integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, got {value!r} ({type(value).__name__})")
    return value


def _check_opset(value: object) -> None:
    opset = _check_integer(value)
    if not MINIMUM_OPSET <= opset <= ALWAYS_LOADED and not MINIMUM_OPSET <= opset <= maximum_opset():
        raise ValueError(f"opset {opset} is out of range: it is {MINIMUM_OPSET} to {maximum_opset()} here")


def most_threads() -> int:
    """The largest number that the option ``threads`` takes: four for each processor, but at least 64.

    More would only wait for each other. Each has a stack of its own, and tens of thousands use up the memory.
    """
    return max(64, 4 * (os.cpu_count() or 1))


_THREADS = f"None or an integer from 1 to {most_threads()} (four for each processor, at least 64)"


def _between(least: float, most: float, expected: str) -> Callable[[object], None]:
    def check(value: object) -> None:
        if not least <= _check_integer(value) <= most:
            raise ValueError(f"expected {expected}, got {value}")

    return check


def _check_dump_dir(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"expected a path, got {value!r} ({type(value).__name__})")
    if not value:
        raise ValueError("expected a path, got an empty string")


def _or_none(check: Callable[[object], object]) -> Callable[[object], None]:
    def check_unless_none(value: object) -> None:
        if value is not None:
            check(value)

    return check_unless_none


def _one_of(valid: Sequence[str]) -> Callable[[object], None]:
    def check(value: object) -> None:
        if value not in valid:
            raise ValueError(f"expected one of {', '.join(map(repr, valid))}, got {value!r}")

    return check


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
    """The option ``passes``, as JSON or as ``-onnx.*,+onnx.linear``."""
    if text.lstrip().startswith("{"):
        return json.loads(text)
    lists: dict[str, list[str]] = {"disable": [], "enable": []}
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part[0] not in "+-":
            raise ValueError(f"expected a list such as '-onnx.*,+onnx.linear', got {part!r} without a sign")
        lists["disable" if part[0] == "-" else "enable"].append(part[1:].strip())
    return lists


def _switches_from_user(value: object) -> Switches:
    """The option ``passes`` as the manager takes it.

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


def option(default: Any, form: Form, help: str) -> Any:
    """A field of ``Options``: all there is to say of an option; ``default`` may be a function that makes it."""
    metadata = {"help": help, "form": form}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options of one backend. Each field is one option, and says all of it."""

    providers: tuple[Provider, ...] = option(
        ("CPUExecutionProvider",),
        Form(check_providers, _providers_from_text, _providers_from_user),
        "Execution providers in order of preference; each a name or a (name, options) pair.",
    )
    custom_op_libraries: tuple[str, ...] = option(
        (),
        Form(check_libraries, libraries_from_text, _paths_from_user),
        "Paths of libraries with custom operators of ONNX Runtime, for the converters that call these; code in them "
        "runs in this process. In the environment separated as in PATH.",
    )
    opset: int = option(
        23,
        Form(_check_opset, _integer_from_text),
        "ONNX opset of the models; at least 18, at most what this ONNX Runtime loads.",
    )
    fallback: str = option(
        "pytorch",
        Form(_one_of(FALLBACKS)),
        "What happens to an operator ONNX Runtime cannot run: 'pytorch' runs it in PyTorch, 'inductor' compiles those "
        "that follow each other with Inductor, 'error' raises UnsupportedOperatorError with the node and the user's "
        "source line.",
    )
    placement: str = option(
        "measured",
        Form(_one_of(PLACEMENTS)),
        "Which engine runs a graph: 'measured' runs inference on ONNX Runtime, and times the first training steps with "
        "PyTorch and with ONNX Runtime, to keep the faster; 'fastest', or mode='max-autotune', times all graphs, with "
        "Inductor too; 'onnx' runs on ONNX Runtime all that can run there.",
    )
    weights: str = option(
        "constants",
        Form(_one_of(WEIGHTS)),
        "What parameters and buffers are in inference: 'constants' of the session, which are watched and renewed when "
        "they change; 'checked', the same, and every byte is looked at in each call; 'inputs', which are read in each "
        "call.",
    )
    threads: int | None = option(
        None,
        Form(_or_none(_between(1, most_threads(), _THREADS)), _integer_from_text),
        "Threads of a session, at most four for each processor or 64; by default torch.get_num_threads() at each call.",
    )
    spin: int = option(
        1,
        Form(_between(0, 1000, "a number of milliseconds from 0 to 1000"), _integer_from_text),
        "Milliseconds, 0 to 1000, for which the threads of a session that has its graph to itself look for more work "
        "when a call is over; mode='reduce-overhead' sets 20.",
    )
    dump_dir: str = option(
        "onnx_debug",
        Form(_check_dump_dir, from_user=_path_from_user),
        "Folder of the dumps of onnx_debug and fx_debug; each process writes its own run folder in it.",
    )
    compare: str = option(
        "first",
        Form(_one_of(COMPARISONS)),
        "Which runs onnx_debug compares with eager and float64: 'first' of each graph and each new set of its sizes, "
        "'every' or 'never'.",
    )
    tensor_limit: int = option(
        16 * 2**20,
        Form(_between(-1, math.inf, "a size in bytes, or -1 for no limit"), _integer_from_text),
        "Size in bytes above which a dumped tensor is summarized instead of stored; -1 stores all.",
    )
    passes: Switches = option(
        Switches,
        Form(_check_passes, _switches_from_text, _switches_from_user),
        "Which passes run: {'disable': [...], 'enable': [...]}, each a list of names or patterns such as "
        "'joint.*'; the most specific decides. In the environment also '-onnx.*,+onnx.linear'.",
    )
    cache: bool = option(
        True,
        Form(_check_bool, _bool_from_text),
        "Whether compiled graphs are kept on disk, so that the next process need not compile them.",
    )
    cache_dir: str | None = option(
        None,
        Form(_or_none(_check_dump_dir), from_user=_path_from_user),
        "Folder of the compiled graphs; by default dynamo_backends in $XDG_CACHE_HOME or ~/.cache.",
    )
    cache_size: int = option(
        2**30,
        Form(_between(0, math.inf, "a size in bytes"), _integer_from_text),
        "Most bytes of the folder; what was not used longest goes first.",
    )
    check_providers: bool = option(
        True,
        Form(_check_bool, _bool_from_text),
        "Whether a region's first results on another execution provider than the CPU's are compared with PyTorch's; "
        "where they are wrong, the next provider runs it. False where less than float32 is asked of a provider.",
    )
    verify_passes: bool = option(
        False,
        Form(_check_bool, _bool_from_text),
        "Whether each pass that fired is checked on the real inputs, against float64, and undone if it "
        "changes the results beyond rounding.",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            with _naming(f"option {field.name!r}"):
                field.metadata["form"].check(getattr(self, field.name))


def parse_options(options: Mapping[str, object] | None = None, mode: str | None = None) -> Options:
    """The options of one ``torch.compile`` call, checked, over the environment's defaults.

    Args:
        options: what the user passed as ``torch.compile(options=...)``.
        mode: what the user passed as ``torch.compile(mode=...)``; it sets the options of ``_OF_MODES``.

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
    return Options(**values)  # type: ignore[arg-type]


def options_from_text(texts: Mapping[str, str]) -> dict[str, object]:
    """Options that were written as in the environment, as ``torch.compile(options=...)`` takes them.

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
    """An error of a value says what it is the value of."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from None


def _form(name: str) -> Form:
    forms = _forms()
    if name not in forms:
        raise ValueError(unknown_name("option", name, list(forms)))
    return forms[name]


def _forms() -> dict[str, Form]:
    """How each option is written, by its name."""
    return {field.name: field.metadata["form"] for field in dataclasses.fields(Options)}


def _environment() -> dict[str, object]:
    """The options the environment sets, each checked so that the message names its variable."""
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
