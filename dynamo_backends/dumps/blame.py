"""What made a graph compute something else, in the fields that ``blame`` has in the manifest."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.StrEnum):
    """Which kind of thing a verdict blames.

    ``name`` below is that of the cause.
    """

    NODE = "node"  # a node on ONNX Runtime by itself: its translation or its kernel, ``bisect`` tells which
    PYTORCH = "PyTorch"  # a node that ran in PyTorch
    PASS = "pass"  # the pass ``name``; ``""`` where it is one of the stage ``onnx``, and no single one can be told
    DECOMPOSITION = "decomposition"  # the decomposition of the operator ``name``
    TRACE = "trace"  # what AOTAutograd made of Dynamo's graph, and no single decomposition
    STAGE = "stage"  # the stage ``name``, and no pass of ours in it
    OPTIMIZER = "optimizer"  # ONNX Runtime's optimizer ``name``; ``""`` where no single one can be told
    SESSION = "session"  # the session that ran; another one of the same model is right
    STALE_WEIGHT = "stale weight"  # the session that ran has an old value of the weight ``name``
    UNSTABLE = "unstable"  # results that differ from run to run, or by threads: ``name`` is ``runs`` or ``threads``
    UNEXPLAINED = "unexplained"  # every node by itself is right, and rounding does not explain the error
    RESULT = "result"  # a result is wrong, and nothing by itself explains it


_STAGES = {
    Kind.NODE: "onnx",
    Kind.PYTORCH: "run",
    Kind.DECOMPOSITION: "joint",
    Kind.TRACE: "joint",
    Kind.OPTIMIZER: "session",
    Kind.SESSION: "run",
    Kind.STALE_WEIGHT: "run",
    Kind.UNSTABLE: "run",
    Kind.UNEXPLAINED: "run",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause: its kind, and the pass, operator, optimizer, stage or weight."""

    kind: Kind
    name: str = ""

    @property
    def stage(self) -> str:
        """The stage whose result is the first that is wrong; ``""`` where that is not known."""
        if self.kind == Kind.PASS:
            return self.name.partition(".")[0] or "onnx"
        return self.name if self.kind == Kind.STAGE else _STAGES.get(self.kind, "")

    @property
    def is_before_translation(self) -> bool:
        """Whether PyTorch alone shows it: what was translated was wrong already."""
        return self.stage in ("pre_grad", "joint", "aten", "post_grad")

    @property
    def blames_no_node(self) -> bool:
        """Whether every node of ``model.onnx`` was found right by itself."""
        return self.kind in (Kind.PASS, Kind.OPTIMIZER, Kind.SESSION, Kind.UNEXPLAINED)

    def __str__(self) -> str:
        if self.kind == Kind.UNSTABLE:
            return "depends on the number of threads" if self.name == "threads" else "not deterministic"
        with_name, without = _TEXTS.get(self.kind, ("", ""))
        return with_name.format(self.name) if self.name else without


_TEXTS = {
    Kind.PASS: ("pass {}", "the passes of the stage onnx"),
    Kind.DECOMPOSITION: ("decomposition of {}", "a decomposition"),
    Kind.TRACE: ("", "AOTAutograd's trace"),
    Kind.STAGE: ("stage {}", "a stage"),
    Kind.OPTIMIZER: ("ONNX Runtime optimizer {}", "ONNX Runtime's optimizers"),
    Kind.SESSION: ("", "the session that ran; another session of the same model is right"),
    Kind.STALE_WEIGHT: ("the session that ran has an old value of {}", "the session that ran has an old weight"),
    Kind.UNEXPLAINED: ("", "no node by itself explains it"),
}
"""How a cause is said, with its name and without; a node and a result have no text."""
