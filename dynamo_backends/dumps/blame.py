"""The causes of a wrong result, as ``blame`` in the manifest names them."""

from __future__ import annotations

import dataclasses
import enum


class CauseKind(enum.StrEnum):
    """The kind of a cause. ``name`` is that of the ``Cause``."""

    NODE = "node"  # a node on ONNX Runtime: its translation or its kernel, ``bisect`` finds which
    PYTORCH = "PyTorch"  # a node that ran in PyTorch
    PASS = "pass"  # the pass ``name``; ``""`` for an unknown one of the stage ``onnx``
    DECOMPOSITION = "decomposition"  # the decomposition of the operator ``name``
    TRACE = "trace"  # AOTAutograd's trace of Dynamo's graph, and no single decomposition
    STAGE = "stage"  # the stage ``name``, and none of our passes in it
    OPTIMIZER = "optimizer"  # ONNX Runtime's optimizer ``name``; ``""`` for an unknown one
    SESSION = "session"  # the session of the run; a new session of the same model is right
    STALE_WEIGHT = "stale weight"  # the session that ran has an old value of the weight ``name``
    UNSTABLE = "unstable"  # results differ between runs; ``name`` is ``runs``
    RESULT = "result"  # a result is wrong, and no node explains it


_STAGES = {
    CauseKind.NODE: "onnx",
    CauseKind.PYTORCH: "run",
    CauseKind.DECOMPOSITION: "joint",
    CauseKind.TRACE: "joint",
    CauseKind.OPTIMIZER: "session",
    CauseKind.SESSION: "run",
    CauseKind.STALE_WEIGHT: "run",
    CauseKind.UNSTABLE: "run",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """A cause: its kind, and the name of the pass, operator, optimizer, stage or weight."""

    kind: CauseKind
    name: str = ""

    @property
    def stage(self) -> str:
        """The first stage with a wrong result; ``""`` if unknown."""
        if self.kind == CauseKind.PASS:
            return self.name.partition(".")[0] or "onnx"
        return self.name if self.kind == CauseKind.STAGE else _STAGES.get(self.kind, "")

    @property
    def is_before_translation(self) -> bool:
        """Whether the graph was wrong before its translation to ONNX."""
        return self.stage in ("pre_grad", "joint", "aten", "post_grad")

    @property
    def blames_no_node(self) -> bool:
        """Whether every node of ``model.onnx`` is right by itself."""
        return self.kind in (CauseKind.PASS, CauseKind.OPTIMIZER, CauseKind.SESSION)

    @property
    def next_step(self) -> str:
        """What to do next; ``""`` if ``bisect`` finds more."""
        return _NEXT.get(self.kind, "")

    def __str__(self) -> str:
        if self.kind == CauseKind.UNSTABLE:
            return "not deterministic"
        with_name, without = _TEXTS.get(self.kind, ("", ""))
        return with_name.format(self.name) if self.name else without


_TEXTS = {
    CauseKind.PASS: ("pass {}", "the passes of the stage onnx"),
    CauseKind.DECOMPOSITION: ("decomposition of {}", "a decomposition"),
    CauseKind.TRACE: ("", "AOTAutograd's trace"),
    CauseKind.STAGE: ("stage {}", "a stage"),
    CauseKind.OPTIMIZER: ("ONNX Runtime optimizer {}", "ONNX Runtime's optimizers"),
    CauseKind.SESSION: ("", "wrong in this run; the same model with the same inputs is right in a new session"),
    CauseKind.STALE_WEIGHT: ("ONNX Runtime used an old value of {}", "ONNX Runtime used an old value of a weight"),
}
"""The text of a cause with a name, and without. Nodes and results have none."""

_NEXT = {
    CauseKind.SESSION: "options={'compare': 'every'} shows whether it happens again, 'threads': 1 whether threads "
    "matter",
    CauseKind.STALE_WEIGHT: "options={'weights': 'checked'} compares the weights at each call",
    CauseKind.UNSTABLE: "options={'threads': 1} shows whether threads matter",
}
"""What to do next, where ``bisect`` finds no more."""
