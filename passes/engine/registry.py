"""The registered passes in the order they run, and the switches that turn them on and off.

``passes.catalog`` registers the built-in passes. Another package registers its passes in a module that an entry point
of the group ``dynamo_backends_passes`` names. Order within a stage: built-in passes, other passes in the order of
registration, passes that clean up. ``before`` and ``after`` move a pass.
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
"""The stages of passes, in the order of a compile:

1. ``pre_grad``   Dynamo's graph, torch IR;
2. ``joint``      forward and backward together, before the partitioner, or the inference graph;
3. ``post_grad``  the forward, backward or inference graph, ATen;
4. ``onnx``       one region's ONNX model.
"""

ENTRY_POINTS = "dynamo_backends_passes"

_NAME = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+(\.[a-z0-9_]+)*")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass.

    Attributes:
        name: stage and name: ``joint.remove_noops``.
        sentence: what it does, for the list of passes.
        run: changes a graph in place and returns how many times it fired. The graph is an ``fx.GraphModule``, in the
            stage ``onnx`` an ``onnx_ir.Model``.
        default: whether it is on by default.
        before: names of passes that run after it; the name of its stage means all of them.
        after: names of passes that run before it; the name of its stage means all but those that clean up.
        cleans_up: whether it runs after all passes that do not.
        is_needed: whether results would be wrong without it. It runs last, cannot be turned off, also not by
            ``CompilerBisector``, and a graph on which it fails does not run on ONNX Runtime.
        made_of: the definition of the pass if it is not ``run``, such as patterns; see ``engine/origins.py``.
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
                f"pass name {self.name!r}: expected a stage, a dot and a name in lower case, such as "
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
        """What its author wrote: compared when a pass of the same name is registered."""
        return self.run if self.made_of is None else self.made_of


_registered: dict[str, Pass] = {}
"""Passes by name, in the order they run within their stage. Replaced, never changed: a compile may read it."""

_registering = Lock()

_announced: list[str] = []
"""Modules whose import registers their passes, ``OURS``."""


def announce(module: str) -> None:
    """Names a module to import at first use of the registry; its import registers passes."""
    _announced.append(module)


def _load_announced() -> None:
    for module in _announced:
        importlib.import_module(module)  # waits for the import of another thread


def register(item: Pass) -> Pass:
    """Adds a pass.

    A new definition of the same pass, by a reloaded module or a notebook cell that runs again, replaces the first with
    a warning. To replace a pass by a different one, ``unregister`` it first.

    Raises:
        ValueError: a different pass has that name; the message says where both were written. Or ``before`` or
            ``after`` name an unknown pass, the pass itself, or contradict the order of the others.
    """
    global _registered
    _load_announced()
    with _registering:
        known = _registered.get(item.name)
        if known is not None and not is_defined_again(known.written, item.written):
            raise ValueError(
                f"there is already a pass named {item.name!r}: {described(known.written)}; "
                f"{described(item.written)} would replace it. Use another name, or call "
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
    """The index at which to insert a pass among the others."""
    of_stage = [i for i, other in enumerate(others) if other.stage == item.stage]
    earlier = [i for i in of_stage if item.cleans_up or not others[i].cleans_up]
    default = max(earlier) + 1 if earlier else min(of_stage, default=len(others))
    earliest = max((_named(name, item, others, "after") for name in item.after), default=-1) + 1
    latest = min((_named(name, item, others, "before") for name in item.before), default=len(others))
    if earliest > latest:
        first, second = others[latest].name, others[earliest - 1].name
        raise ValueError(f"pass {item.name!r} cannot run after {second!r} and before {first!r}, which runs first")
    return min(max(default, earliest), latest)


def _named(name: str, item: Pass, others: Sequence[Pass], argument: str) -> int:
    """The index of the pass that an item of ``before`` or ``after`` names; of a stage, its first or last pass."""
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
        index = names.index(name)
        if is_after and others[index].cleans_up and not item.cleans_up:
            raise ValueError(f"pass {item.name!r} cannot run after {name!r}, which cleans up after all others")
        return index
    of_stage = [i for i, other in enumerate(others) if other.stage == stage]
    if not is_after:
        return min(of_stage, default=len(others))
    return max((i for i in of_stage if item.cleans_up or not others[i].cleans_up), default=-1)


def unregister(name: str) -> None:
    """Removes a pass. Unknown names are not an error."""
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
    """Registers the decorated function as a pass; see ``Pass`` for the arguments.

    Raises:
        ValueError: the name does not begin with a stage, or as ``register``.
    """

    def decorate(function: Callable[[Any, PassContext], int]) -> Callable[[Any, PassContext], int]:
        register(Pass(name, sentence, function, default, before=before, after=after))
        return function

    return decorate


@functools.cache
def _load_entry_points() -> None:
    """Imports the modules that entry points name. One that cannot be imported is left out with a warning."""
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            if isinstance(loaded, Pass) and loaded.name not in _registered:
                register(loaded)
        except Exception:  # another package's code; the user's model still runs
            logger.warning("the passes of entry point %s = %s are left out", entry.name, entry.value, exc_info=True)


def all_passes() -> tuple[Pass, ...]:
    """All registered passes, by stage, in the order they run."""
    _load_announced()
    _load_entry_points()
    return tuple(sorted(_registered.values(), key=lambda item: (STAGES.index(item.stage), item.is_needed)))


def are_only_built_in() -> bool:
    """Whether exactly the built-in passes are registered, unchanged. Does not import them."""
    _load_entry_points()
    return list(_registered.values()) == _built_in()


def added_passes() -> list[Pass]:
    """The registered passes that are not built in."""
    _load_entry_points()
    ours = _built_in()
    return [item for item in _registered.values() if item not in ours]


def _built_in() -> list[Pass]:
    """The built-in passes, if they were imported."""
    imported = [importlib.import_module(module) for module in _announced if module in sys.modules]
    return [item for module in imported for item in module.OURS]


@dataclasses.dataclass(frozen=True)
class Switches:
    """Which passes are on, by name or by pattern such as ``joint.*``.

    The most specific one decides: a name before a pattern, a longer pattern before a shorter one. Needed passes are
    always on.
    """

    disable: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks the names against the registered passes.

        Raises:
            ValueError: a name or pattern fits no pass (the message has close ones), is in both lists, or would disable
                needed passes only.
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
