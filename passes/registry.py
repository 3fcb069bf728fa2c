"""The passes there are, in the order they run, and which of them are on.

A pass of ours is a module ``passes/<stage>/<name>.py`` with a ``PASS``; ``ORDER`` lists them. Another package brings
its own by an entry point in the group ``dynamo_backends_passes`` that names a module, whose import registers::

    # setup.cfg of the other package:  [options.entry_points]
    #                                  dynamo_backends_passes =
    #                                      mine = my_package.my_passes
    from passes import register_pass

    @register_pass("post_grad.fold_twice_negated", "Replaces neg(neg(x)) by x.")
    def fold_twice_negated(module, context):
        ...
        return fired
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any

from .bisecting import STAGES
from .context import PassContext

logger = logging.getLogger(__name__)

ENTRY_POINTS = "dynamo_backends_passes"

ORDER = (
    "joint.remove_noops",
    "joint.fold_uniform_constants",
    "joint.canonical_aten",
    "joint.common_subexpressions",
    "joint.attention",
    "joint.attention_in_training",
    "joint.pad_matmul",
    "post_grad.remove_noops",
    "post_grad.bfloat16_in_float32",
    "post_grad.merge_views",
    "post_grad.common_subexpressions",
    "post_grad.remove_unused",
    "onnx.lift_constants",
    "onnx.fold_constants",
    "onnx.remove_noops",
    "onnx.gathers",
    "onnx.common_subexpressions",
    "onnx.rotary_embedding",
    "onnx.attention",
    "onnx.merge_views",
    "onnx.linear",
    "onnx.layer_norm",
    "onnx.gelu",
    "onnx.transposed_products",
    "onnx.remove_unused",
)
"""Our passes in the order they run within their stage; those of other packages follow."""

_NAME = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+(\.[a-z0-9_]+)*")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: its stage and what it does: ``joint.remove_noops``.
        sentence: what it does, for the list of passes.
        run: changes a graph in place and returns how many times it fired. The graph is an ``fx.GraphModule``, in the
            stage ``onnx`` an ``onnx_ir.Model``.
        default: whether it is on unless the option ``passes`` says otherwise.
        visits_subgraphs: whether the manager also calls it for each subgraph of a higher-order operator.
    """

    name: str
    sentence: str
    run: Callable[[Any, PassContext], int]
    default: bool = True
    visits_subgraphs: bool = True

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.stage not in STAGES:
            raise ValueError(
                f"pass name {self.name!r}: expected a stage, a point and a name in lower case, such as "
                f"'post_grad.my_pass'. Stages: {', '.join(STAGES)}"
            )
        if not callable(self.run):
            raise TypeError(f"pass {self.name!r}: expected a function of a graph and a context, got {self.run!r}")

    @property
    def stage(self) -> str:
        return self.name.split(".", 1)[0]


_registered: dict[str, Pass] = {}


def register(item: Pass) -> Pass:
    """Adds a pass of another package behind ours of the same stage.

    Raises:
        ValueError: there is another pass of that name.
    """
    known = _registered.get(item.name)
    if item.name in ORDER or (known is not None and _origin(known) != _origin(item)):
        raise ValueError(f"there is already a pass named {item.name!r}; give yours another name")
    _registered[item.name] = item
    return item


def unregister(name: str) -> None:
    """Takes back a registration. Unknown names are not an error."""
    _registered.pop(name, None)


def register_pass(
    name: str, sentence: str, *, default: bool = True
) -> Callable[[Callable[[Any, PassContext], int]], Callable[[Any, PassContext], int]]:
    """Registers the decorated function as a pass; see ``Pass`` for its arguments and result.

    Raises:
        ValueError: the name has no stage in front, or is taken.
    """

    def decorate(function: Callable[[Any, PassContext], int]) -> Callable[[Any, PassContext], int]:
        register(Pass(name, sentence, function, default))
        return function

    return decorate


def _origin(item: Pass) -> tuple[object, object]:
    """Where a pass's function was written, so that a module that is imported again may register again."""
    return getattr(item.run, "__module__", None), getattr(item.run, "__qualname__", None)


@functools.cache
def _ours() -> tuple[Pass, ...]:
    package = __package__ or "passes"
    return tuple(importlib.import_module(f"{package}.{name}").PASS for name in ORDER)


@functools.cache
def _load_entry_points() -> None:
    """Imports the modules other packages name, once. One that cannot be imported is left out, with a warning."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            for item in [loaded] if isinstance(loaded, Pass) else []:
                register(item)
        except Exception:  # any package may be broken in any way; the user's model still runs
            logger.warning("the passes of entry point %s = %s are left out", entry.name, entry.value, exc_info=True)


def all_passes() -> tuple[Pass, ...]:
    """Every pass, ours and those of other packages, by stage, in the order they run."""
    _load_entry_points()
    passes = [*_ours(), *_registered.values()]
    return tuple(sorted(passes, key=lambda item: STAGES.index(item.stage)))


@dataclasses.dataclass(frozen=True)
class Switches:
    """Which passes are on: names, or patterns such as ``joint.*``.

    Where several apply to a pass, the most specific decides: a name before a pattern, a longer pattern before a
    shorter one.
    """

    disable: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks the names against the passes there are.

        Raises:
            ValueError: a name or pattern fits no pass (the message has the close ones), or is in both lists.
        """
        names = [item.name for item in all_passes()]
        for wanted in (*self.disable, *self.enable):
            if not fnmatch.filter(names, wanted):
                raise ValueError(_unknown(wanted, names))
        for wanted in set(self.disable) & set(self.enable):
            raise ValueError(f"{wanted!r} is both disabled and enabled")

    def is_on(self, item: Pass) -> bool:
        """Whether a pass runs."""
        choices = [(_specificity(wanted), False) for wanted in self.disable if fnmatch.fnmatch(item.name, wanted)]
        choices += [(_specificity(wanted), True) for wanted in self.enable if fnmatch.fnmatch(item.name, wanted)]
        return max(choices)[1] if choices else item.default


def _specificity(wanted: str) -> tuple[bool, int]:
    is_name = not set("*?[") & set(wanted)
    return is_name, sum(character not in "*?" for character in wanted)


def _unknown(wanted: str, names: Iterable[str]) -> str:
    names = list(names)
    by_last_part = {name.split(".", 1)[1]: name for name in names}
    close: Sequence[str] = difflib.get_close_matches(wanted, names, n=3)
    close = close or [by_last_part[part] for part in difflib.get_close_matches(wanted, list(by_last_part), n=3)]
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no pass fits {wanted!r}.{hint} Passes: {', '.join(names)}"
