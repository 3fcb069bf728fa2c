"""The passes there are, in the order they run, and which of them are on.

Our own are registered by ``passes.catalog``; another package brings its own by an entry point in the group
``dynamo_backends_passes`` that names a module, whose import registers. The order within a stage: our passes, those of
others as they are registered, and last those that clean up. ``before`` and ``after`` move a pass among them.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import importlib
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .locks import Lock
from .origins import described, is_defined_again

if TYPE_CHECKING:
    from .context import PassContext

logger = logging.getLogger(__name__)

STAGES = ("pre_grad", "joint", "post_grad", "onnx")
"""The stages of passes, in the order a compile meets them:

1. ``pre_grad``   Dynamo's graph, torch IR.
2. ``joint``      forward and backward together, before the partitioner; or the inference graph.
3. ``post_grad``  the forward, backward or inference graph on its own, ATen.
4. ``onnx``       one region's ONNX model.
"""

ENTRY_POINTS = "dynamo_backends_passes"

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
        before: names of passes that run after it; the name of its stage stands for all of them.
        after: names of passes that run before it; the name of its stage stands for all but those that clean up.
        cleans_up: whether it runs after all that do not.
        is_needed: whether results would be wrong without it: it runs last, whatever the option ``passes`` and
            ``CompilerBisector`` say, and a graph on which it fails does not run on ONNX Runtime.
        made_of: the functions that somebody wrote, where ``run`` is made of these, as of patterns.
    """

    name: str
    sentence: str
    run: Callable[[Any, PassContext], int]
    default: bool = True
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    cleans_up: bool = False
    is_needed: bool = False
    made_of: object = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.stage not in STAGES:
            raise ValueError(
                f"pass name {self.name!r}: expected a stage, a point and a name in lower case, such as "
                f"'post_grad.my_pass'. Stages: {', '.join(STAGES)}"
            )
        if not callable(self.run):
            raise TypeError(f"pass {self.name!r}: expected a function of a graph and a context, got {self.run!r}")
        for argument in ("before", "after"):
            names = getattr(self, argument)
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise TypeError(f"pass {self.name!r}: {argument} takes a list of names, got {names!r}")

    @property
    def stage(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def written(self) -> object:
        """What somebody wrote of it."""
        return self.run if self.made_of is None else self.made_of


_registered: dict[str, Pass] = {}
"""The passes by name, in the order they run within their stage. Replaced, never changed: a compile may read it."""

_registering = Lock()

_announced: list[str] = []
"""Modules whose import registers their passes, ``OURS``."""


def announce(module: str) -> None:
    """Names a module whose import registers passes before all others; it is imported when passes are first needed."""
    _announced.append(module)


def _load_announced() -> None:
    for module in _announced:
        importlib.import_module(module)  # another thread's import is waited for


def register(item: Pass) -> Pass:
    """Adds a pass, at its place among those that are registered.

    A pass whose function is defined again, as by a module that is reloaded or a cell of a notebook that runs again,
    replaces the former one, with a warning, at its place or the one it names now. To replace a pass by another one on
    purpose, ``unregister`` it first.

    Args:
        item: the pass.

    Raises:
        ValueError: another pass has that name; the message says where both were written. Or ``before`` or ``after``
            name a pass that is not registered, the pass itself, or passes between which there is no place.
    """
    global _registered
    _load_announced()
    with _registering:
        known = _registered.get(item.name)
        if known is not None and not is_defined_again(known.written, item.written):
            raise ValueError(
                f"there is already a pass named {item.name!r}: {described(known.written)}; "
                f"{described(item.written)} would replace it. Give yours another name, or call "
                f"passes.unregister({item.name!r}) first"
            )
        others = [other for other in _registered.values() if other.name != item.name]
        place = _place(item, others)
        ordered = [*others[:place], item, *others[place:]]
        _registered = {other.name: other for other in ordered}
    if known is not None and known.run is not item.run:
        logger.warning("pass %s is defined again: %s replaces it", item.name, described(item.written))
    return item


def _place(item: Pass, others: Sequence[Pass]) -> int:
    """Where in the list of the other passes a pass belongs; only places within a stage mean anything."""
    of_stage = [i for i, other in enumerate(others) if other.stage == item.stage]
    in_front = [i for i in of_stage if item.cleans_up or not others[i].cleans_up]
    usual = max(in_front) + 1 if in_front else min(of_stage, default=len(others))
    earliest = max((_named(name, item, others, "after") for name in item.after), default=-1) + 1
    latest = min((_named(name, item, others, "before") for name in item.before), default=len(others))
    if earliest > latest:
        behind, ahead = others[earliest - 1].name, others[latest].name
        raise ValueError(f"pass {item.name!r} cannot run after {behind!r} and before {ahead!r}: they run in that order")
    return min(max(usual, earliest), latest)


def _named(name: str, item: Pass, others: Sequence[Pass], argument: str) -> int:
    """The place of the pass, the last or the first of them, that ``before`` or ``after`` means."""
    stage, is_after = name.split(".", 1)[0], argument == "after"
    if name == item.name:
        raise ValueError(f"pass {name!r} cannot run {argument} itself")
    names = [other.name for other in others]
    if name not in names and name not in STAGES:
        raise ValueError(f"pass {item.name!r}, {argument}={name!r}: {_unknown(name, names)}")
    if stage != item.stage:
        if (STAGES.index(stage) < STAGES.index(item.stage)) != is_after:
            raise ValueError(f"pass {item.name!r} cannot run {argument} {name!r}: the stages run in another order")
        return -1 if is_after else len(others)
    if name != stage:
        place = names.index(name)
        if is_after and others[place].cleans_up and not item.cleans_up:
            raise ValueError(f"pass {item.name!r} cannot run after {name!r}, which cleans up after all others")
        return place
    kept = [i for i, other in enumerate(others) if other.stage == stage]
    if not is_after:
        return min(kept, default=len(others))
    return max((i for i in kept if item.cleans_up or not others[i].cleans_up), default=-1)


def unregister(name: str) -> None:
    """Takes back a registration. Unknown names are not an error."""
    global _registered
    _load_announced()
    with _registering:
        _registered = {other: item for other, item in _registered.items() if other != name}


def register_pass(
    name: str,
    sentence: str,
    *,
    default: bool = True,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Callable[[Callable[[Any, PassContext], int]], Callable[[Any, PassContext], int]]:
    """Registers the decorated function as a pass; see ``Pass`` for its arguments and result.

    Raises:
        ValueError: the name has no stage in front, or as ``register``.
    """

    def decorate(function: Callable[[Any, PassContext], int]) -> Callable[[Any, PassContext], int]:
        register(Pass(name, sentence, function, default, before=before, after=after))
        return function

    return decorate


@functools.cache
def _load_entry_points() -> None:
    """Imports the modules other packages name, once. One that cannot be imported is left out, with a warning."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            if isinstance(loaded, Pass) and loaded.name not in _registered:
                register(loaded)
        except Exception:  # any package may be broken in any way; the user's model still runs
            logger.warning("the passes of entry point %s = %s are left out", entry.name, entry.value, exc_info=True)


def all_passes() -> tuple[Pass, ...]:
    """Every pass, ours and those of other packages, by stage, in the order they run."""
    _load_announced()
    _load_entry_points()
    return tuple(sorted(_registered.values(), key=lambda item: (STAGES.index(item.stage), item.is_needed)))


def are_only_built_in() -> bool:
    """Whether no passes are registered but the built-in ones, all and unchanged.

    It does not import these: what is not imported was not changed.
    """
    _load_entry_points()
    imported = [importlib.import_module(module) for module in _announced if module in sys.modules]
    return list(_registered.values()) == [item for module in imported for item in module.OURS]


@dataclasses.dataclass(frozen=True)
class Switches:
    """Which passes are on: names, or patterns such as ``joint.*``.

    Where several apply to a pass, the most specific decides: a name before a pattern, a longer pattern before a
    shorter one. Passes that are needed are on.
    """

    disable: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks the names against the passes there are.

        Raises:
            ValueError: a name or pattern fits no pass (the message has the close ones), is in both lists, or would turn
                off nothing but what is needed.
        """
        if not self.disable and not self.enable:
            return
        names = [item.name for item in all_passes()]
        needed = {item.name for item in all_passes() if item.is_needed}
        for wanted in (*self.disable, *self.enable):
            if not fnmatch.filter(names, wanted):
                raise ValueError(_unknown(wanted, names))
        for wanted in self.disable:
            if needed.issuperset(fnmatch.filter(names, wanted)):
                raise ValueError(f"{wanted!r} cannot be disabled: results would be wrong")
        for wanted in set(self.disable) & set(self.enable):
            raise ValueError(f"{wanted!r} is both disabled and enabled")

    def is_on(self, item: Pass) -> bool:
        """Whether a pass runs."""
        lists = ((self.disable, False), (self.enable, True))
        choices = [
            (not set("*?[") & set(wanted), sum(character not in "*?" for character in wanted), is_on)
            for names, is_on in lists
            for wanted in names
            if fnmatch.fnmatch(item.name, wanted)
        ]
        return item.is_needed or (max(choices)[2] if choices else item.default)


def _unknown(wanted: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(wanted, names, n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"no pass fits {wanted!r}.{hint} Passes: {', '.join(names)}"
