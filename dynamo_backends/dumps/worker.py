"""The process that runs candidates for ``candidates.Runner``, so that one that crashes ends only this process.

It reads a request a line, JSON, from standard input, and answers with a line of JSON: see ``Runner``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from .repro import run, session_of


def main() -> None:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        session = session_of(request["model"], request["settings"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base; what it said is the answer
        return {"kind": "refused", "message": str(error) or type(error).__name__}
    if request["feeds"] is None:
        return {"kind": "built", "message": ""}
    with np.load(request["feeds"]) as arrays:
        feeds = {name: (arrays[str(i)], number) for i, (name, number) in enumerate(request["types"])}
    try:
        outputs = run(session, feeds)
    except Exception as error:
        return {"kind": "failed", "message": str(error) or type(error).__name__}
    by_position: dict[str, Any] = {str(i): array for i, (array, _) in enumerate(outputs.values())}
    np.savez(request["outputs"], **by_position)
    return {"kind": "ran", "message": "", "types": [(name, number) for name, (_, number) in outputs.items()]}


if __name__ == "__main__":
    main()
