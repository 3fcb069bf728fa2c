"""PyTorch's ``CompilerBisector`` drives our passes: which backend's, which stage's, and up to which match.

Our backends stand before Inductor in the bisector's list, so that a fault of ours is found without Inductor running::

    python -m passes.bisecting python train.py     # the script's exit code says whether the run was right

The script compiles with ``backend=os.environ["TORCH_COMPILE_BACKEND"]``, or with any backend: ``torch.compile`` takes
the one under test. The bisector's subsystems of our backends are the stages: ``joint_passes``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch._inductor import compiler_bisector
from torch._inductor.compiler_bisector import BisectSubsystem, CompilerBisector

STAGES = ("pre_grad", "joint", "post_grad", "onnx")
"""The stages in the order a compile meets them."""

BACKEND = "onnxrt"


def register_backend(name: str = BACKEND) -> None:
    """Makes a backend known to the bisector, before Inductor, with one subsystem for each stage of passes."""
    backends = compiler_bisector.BACKENDS
    if name in backends:
        return
    later = {key: backends.pop(key) for key in list(backends)[list(backends).index("inductor") :]}
    backends[name] = [BisectSubsystem(_subsystem(stage)) for stage in STAGES]
    backends.update(later)


def is_disabled(backend: str, stage: str, describe: Callable[[], str]) -> bool:
    """Whether the bisector, if it is at work, wants this pass or match left out.

    Args:
        backend: the backend that compiles.
        stage: the pass's stage.
        describe: names the pass and the match; the bisector reports it when it has found the culprit.
    """
    return CompilerBisector.disable_subsystem(backend, _subsystem(stage), describe)


def _subsystem(stage: str) -> str:
    return f"{stage}_passes"


def main() -> None:
    """The bisector's own command line, with our backend in its list."""
    register_backend()
    sys.argv = ["bisect", "run", *sys.argv[1:]]
    compiler_bisector.command_line_usage()


if __name__ == "__main__":
    main()
