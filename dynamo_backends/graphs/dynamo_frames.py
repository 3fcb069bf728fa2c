"""What Dynamo is compiling in this thread: the frame, the user's line that called it, and how often."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import linecache
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo import external_utils
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext

from ..errors import first_line
from .locations import Frame, function_name, is_user_file, prepend_call, short_file


def translator() -> InstructionTranslator | None:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # a thread-local that is set while Dynamo compiles
        return None


def is_dynamo_compiling() -> bool:
    """Whether Dynamo is compiling a frame in this thread, and has not yet written its guards."""
    return translator() is not None


_first_compiles: weakref.WeakKeyDictionary[object, dict[int, int]] = weakref.WeakKeyDictionary()
"""For the backend of each result of ``torch.compile``, by frame: Dynamo's number of its first compile of it."""

_next_frame_number = itertools.count()
_frame_numbers: weakref.WeakKeyDictionary[object, dict[int, int]] = weakref.WeakKeyDictionary()
"""For the backend of each result of ``torch.compile``, by Dynamo's number of the frame: ours."""


def _frame_and_compile() -> tuple[object, int, int] | None:
    """For which backend Dynamo is compiling, and its numbers of the frame's code, which models of one class share, and
    of this compile of it."""
    frame, compile_id = translator(), CompileContext.current_compile_id()
    if frame is None or compile_id is None or compile_id.frame_id is None or compile_id.frame_compile_id is None:
        return None
    return frame.output.compiler_fn, compile_id.frame_id, compile_id.frame_compile_id


def is_recompile() -> bool:
    """Whether the called result of ``torch.compile`` had compiled the same frame before, so that a guard failed."""
    if (current := _frame_and_compile()) is None:
        return False
    backend, frame, number = current
    return number > _first_compiles.setdefault(backend, {}).setdefault(frame, number)


def frame_number() -> int | None:
    """A number of the frame that Dynamo is compiling for one result of ``torch.compile``; ``None`` outside of Dynamo.
    It is the same when the frame is compiled again."""
    if (current := _frame_and_compile()) is None:
        return None
    backend, frame, _ = current
    numbers = _frame_numbers.setdefault(backend, collections.defaultdict(_next_frame_number.__next__))
    return numbers[frame]


@dataclasses.dataclass(frozen=True)
class CompiledFrame:
    """The function that a Dynamo graph is a part of, and why the graph ends.

    Attributes:
        function, file, line: the function; after a graph break, the line where it resumes.
        reason: why the graph ends, in a line: ``the end of the function``, or ``graph break: `` and the reason.
        details: Dynamo's full message about a graph break; else ``""``.
        end_file, end_line: where the graph ends; line 0 if unknown.
    """

    function: str
    file: str
    line: int
    reason: str
    details: str
    end_file: str
    end_line: int


def frame_being_compiled() -> CompiledFrame | None:
    """The frame that Dynamo is compiling in this thread; ``None`` outside of Dynamo."""
    frame = translator()
    if frame is None:
        return None
    code = getattr(wrapped_function(frame), "__code__", frame.f_code)
    reason = frame.output.compile_subgraph_reason
    details = reason.reason.strip() if reason.graph_break else ""
    lines = [line.strip().removeprefix("Explanation: ") for line in details.splitlines()[:2]]
    summary = f"graph break: {': '.join(lines)}" if lines else "the end of the function"
    end = reason.user_stack[-1] if reason.user_stack else None
    return CompiledFrame(
        function_name(code.co_name),
        code.co_filename,
        code.co_firstlineno,
        summary,
        details,
        end.filename if end is not None else code.co_filename,
        (end.lineno or 0) if end is not None else 0,
    )


def wrapped_function(frame: InstructionTranslator) -> Callable[..., Any] | None:
    """The function that Dynamo's own wrapper calls, such as ``forward`` of a compiled ``torch.nn`` module; ``None`` if
    the frame is the user's."""
    function = frame.f_locals.get("fn") if frame.f_code.co_filename == external_utils.__file__ else None
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if isinstance(function, functools.partial) and isinstance(function.func, torch.nn.Module):
        function = functools.partial(function.func.forward, *function.args, **function.keywords)
    return function if callable(function) else None


def call_being_compiled() -> Frame | None:
    """The user's line that called what Dynamo is compiling in this thread, or ``None``.

    It is the innermost frame outside of Dynamo that is in a user's file and not in this package; ``None`` if the
    command line called it.
    """
    pytorch, is_dynamo = os.path.join(os.path.dirname(torch.__file__), ""), False
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    if translator() is None:
        return None
    for frame, line in traceback.walk_stack(sys._getframe()):
        file = frame.f_code.co_filename
        is_dynamo = is_dynamo or file.startswith(pytorch)
        if file.startswith(os.path.join(ours, "cli", "")):
            return None
        if is_dynamo and is_user_file(file) and not file.startswith(ours):
            return Frame(file, line, function_name(frame.f_code.co_name), linecache.getline(file, line).strip())
    return None


def place_being_compiled() -> str:
    """The function that Dynamo is compiling in this thread, and the user's line that called one of a library; ``""``
    outside of Dynamo. It is the same when the function is compiled again."""
    frame = frame_being_compiled()
    if frame is None:
        return ""
    call = None if is_user_file(frame.file) else call_being_compiled()
    line = f"{short_file(frame.file)}:{frame.line}"
    return line if call is None else f"{line}, called from {call}"


def name_call(module: fx.GraphModule) -> None:
    """Adds ``call_being_compiled`` to the nodes of a Dynamo graph whose function is in a library.

    The lines of code that ``exec`` runs are not in the stack traces of Dynamo; that of the function is added.
    """
    frame = translator()
    if frame is None:
        return
    code = frame.f_code
    if code.co_filename == "<string>":
        prepend_call(module, Frame(code.co_filename, code.co_firstlineno, function_name(code.co_name), ""))
    elif not is_user_file(code.co_filename) and (call := call_being_compiled()) is not None:
        prepend_call(module, call)


def why_given_up(error: Exception) -> str:
    """Why a graph is discarded: Dynamo restarts the trace, or the compile failed."""
    if isinstance(error, TensorifyScalarRestartAnalysis):
        return "Dynamo restarts the trace, with a symbolic number specialized to a constant"
    if isinstance(error, RestartAnalysis):
        return f"Dynamo restarts the trace: {error.restart_reason or type(error).__name__}"
    return f"the compile failed: {type(error).__name__}: {first_line(str(error))}"


def skipped_functions() -> dict[str, str]:
    """The functions of this process that Dynamo does not compile, with their lines: Dynamo's reason and first hint."""
    found = {}
    for item in get_compilation_metrics():
        if item.fail_type != "Unsupported" or item.co_filename is None:  # others were raised
            continue
        lines = [line.strip() for line in (item.fail_reason or item.fail_type).splitlines()]
        texts = [next((line for line in lines if line.startswith(start)), "") for start in ("Developer", "Hint: ")]
        context, hint = (text.partition(": ")[2] for text in texts)
        is_wrapper = item.co_filename == external_utils.__file__  # of a module that is compiled itself
        name = context if is_wrapper else function_name(item.co_name or "")
        place = f"{short_file(item.fail_user_frame_filename or item.co_filename)}:{item.fail_user_frame_lineno}"
        found[name if is_wrapper else f"{name} ({place})"] = ". ".join(filter(None, (lines[0], hint)))
    return found
