"""Python's garbage collector during a compile."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dynamo_backends.common.garbage_collection import no_collection, only_new
from dynamo_backends.pipeline import stages


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_compile_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []
    compile_aten = stages.compile_graph

    def observed(*args: Any, **kwargs: Any) -> Any:
        inside.append(gc.get_freeze_count() > 0)
        return compile_aten(*args, **kwargs)

    monkeypatch.setattr(stages, "compile_graph", observed)
    torch.compile(lambda x: x.sin() + 1, backend="onnxrt")(torch.ones(2))
    assert inside == [True] and gc.get_freeze_count() == 0 and gc.isenabled()


def test_old_objects_are_left_alone_inside_only() -> None:
    with pytest.raises(ZeroDivisionError), only_new():
        assert gc.get_freeze_count() > 0
        with only_new():
            pass
        assert gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_an_interrupt_before_the_block() -> None:
    """Nothing calls ``__exit__`` then."""
    only_new().__enter__()
    assert gc.get_freeze_count() == 0


def test_what_somebody_froze_stays_frozen() -> None:
    gc.freeze()
    with only_new():
        pass
    assert gc.get_freeze_count() > 0


def test_the_last_thread_lets_the_collector_look_again() -> None:
    entered, leave = threading.Event(), threading.Event()

    def compile_for_long() -> None:
        with only_new():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=compile_for_long)
    with only_new():
        thread.start()
        entered.wait(60)
    assert gc.get_freeze_count() > 0
    leave.set()
    thread.join()
    assert gc.get_freeze_count() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_looks_at_all() -> None:
    with only_new():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.get_freeze_count() == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_imports(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError), no_collection():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
