"""What ONNX Runtime answered about nodes, on disk: a new graph of known kinds of nodes is compiled without asking.

A session of one node takes 1 to 3 ms, and a graph has some fifty to a hundred kinds of nodes. All answers are one entry
of the cache, for these versions, sources and this processor.
"""

from __future__ import annotations

from typing import Any

from ..reasons import Kind, Reason
from ..runtime.oracle import ORACLE
from .store import Record, Store

_MOST = 16_384
"""Answers on disk; 40 to 200 bytes each."""


def recall(store: Store, key: str) -> None:
    """Tells the oracle of this process what is known on disk, in the entry of a name."""
    ORACLE.learn(store.read(key, _answers) or {})


def keep(store: Store, key: str) -> None:
    """Puts on disk what was found out since ``recall``, beside what is there."""
    new = ORACLE.found_out()
    if new:
        answers = {**(store.read(key, _answers) or {}), **new}
        store.put(key, Record([[name, _to_json(answers[name])] for name in list(answers)[-_MOST:]]))


def _answers(record: Record) -> dict[str, Reason | None]:
    return {str(name): _from_json(answer) for name, answer in record.header}


def _to_json(answer: Reason | None) -> list[str] | None:
    return None if answer is None else [answer.kind.name, answer.text]


def _from_json(written: Any) -> Reason | None:
    if written is None:
        return None
    kind, text = written
    return Reason(Kind[kind], str(text))
