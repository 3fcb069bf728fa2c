"""Reads what Dynamo and AOTAutograd know about the graph they compile, and calls AOTAutograd's partitioner.

It gives a graph's number and direction, its weights, the user's names of its arguments and results, and its Python
frame. AOTAutograd describes each argument and result of its graphs in ``meta["desc"]``; *keys* are our short form of
these descriptors. The private parts used here are the same in all versions in ``versions.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import linecache
import os
import random
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dynamo import bytecode_transformation, external_utils
from torch._dynamo import config as dynamo_config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_compilation_metrics
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    IntermediateBaseAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._guards import CompileContext, TracingContext
from torch.compiler import _compile_session_context
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.fx.editing import call, is_gradient, is_input, owner

from ..common.safety_net import never_fails
from ..errors import first_line
from .artifacts import Runner
from .example_values import synthetic, valid_indices
from .fake_tensors import correct_statistics
from .in_place import write_backs
from .locations import Frame, UserName, function_name, is_user_file, prepend_call, set_user_name, short_file, user_name

_GRAPH_NAME = re.compile(r"(?:^|__)(?P<id>\d+)_(?P<direction>forward|backward|inference|joint)")


@dataclasses.dataclass(frozen=True)
class GraphBeingCompiled:
    """What AOTAutograd knows about the graph it is compiling.

    Attributes:
        context: the frame's tracing context, the same for a joint graph, its forward and its backward; ``None``
            outside of Dynamo.
        aot_id: AOTAutograd's number, the same for these; or ``None``. PyTorch 2.13 keeps it in a global variable, so it
            may be another thread's.
        direction: ``forward``, ``backward``, ``joint`` or ``inference``.
    """

    context: TracingContext | None
    aot_id: str | None
    direction: str


def graph_being_compiled(module: fx.GraphModule, *, is_joint: bool = False) -> GraphBeingCompiled:
    """See ``GraphBeingCompiled``; ``module`` is the graph."""
    context = TracingContext.try_get()
    names = context.aot_graph_name if context is not None else None
    match = _GRAPH_NAME.search(names[0] if names else get_aot_graph_name())
    aot_id, direction = (match["id"], match["direction"]) if match else (None, "inference")
    return GraphBeingCompiled(context, aot_id, "joint" if is_joint else _direction(module, direction))


def _direction(module: fx.GraphModule, from_name: str) -> str:
    """The direction of a graph from its arguments and results, else from its name."""
    if gradients_of_results(module):
        return "backward"
    if "saved" in keys_of_results(module):
        return "forward"
    return from_name if from_name in ("forward", "backward") else "inference"


@contextlib.contextmanager
def dynamo_compile_lock() -> Iterator[None]:
    """A context for a compile during a call: one thread at a time, because FX traces with global variables."""
    with compile_lock, _compile_session_context():
        yield


_first_compiles: weakref.WeakKeyDictionary[object, dict[int, int]] = weakref.WeakKeyDictionary()
"""For the backend of each result of ``torch.compile``, by frame: Dynamo's number of its first compile of it."""


def is_recompile() -> bool:
    """Whether the called result of ``torch.compile`` had compiled the same frame before, so that a guard failed.

    Dynamo numbers the compiles of a frame's code, which models of one class share.
    """
    frame, compile_id = _translator(), CompileContext.current_compile_id()
    if frame is None or compile_id is None or compile_id.frame_id is None or compile_id.frame_compile_id is None:
        return False
    numbers = _first_compiles.setdefault(frame.output.compiler_fn, {})
    return compile_id.frame_compile_id > numbers.setdefault(compile_id.frame_id, compile_id.frame_compile_id)


_frame_numbers: weakref.WeakKeyDictionary[object, dict[int, int]] = weakref.WeakKeyDictionary()
"""For the backend of each result of ``torch.compile``, by Dynamo's number of the frame: ours."""

_next_frame_number = itertools.count()


def frame_number() -> int | None:
    """A number of the frame that Dynamo is compiling for one result of ``torch.compile``; ``None`` outside of Dynamo.
    It is the same when the frame is compiled again."""
    frame, compile_id = _translator(), CompileContext.current_compile_id()
    if frame is None or compile_id is None or compile_id.frame_id is None:
        return None
    numbers = _frame_numbers.setdefault(frame.output.compiler_fn, {})
    if compile_id.frame_id not in numbers:
        numbers[compile_id.frame_id] = next(_next_frame_number)
    return numbers[compile_id.frame_id]


def lifted_attributes(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The parameters and buffers that are attributes of a Dynamo graph: AOTAutograd's first arguments.

    They are constants, and parameters that an optimizer's step changes. Other parameters are arguments already.
    """
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@dataclasses.dataclass(frozen=True)
class StaticInput:
    """An argument that PyTorch expects to be the same tensor in each call: a parameter, buffer or other attribute.

    Attributes:
        name: the user's name, ``encoder.layer.0.weight``.
        value: the tensor; ``None`` if it is unknown before the call.
    """

    name: str
    value: object = None


NO_WEIGHTS: Mapping[int, StaticInput] = MappingProxyType({})
"""For graphs without weights."""


def weights(module: fx.GraphModule, arguments: Sequence[object]) -> dict[int, StaticInput]:
    """The static inputs of a Dynamo graph by position in ``arguments``: its lifted attributes, then its arguments."""
    lifted = list(lifted_attributes(module))
    found = {i: StaticInput(name, arguments[i]) for i, name in enumerate(lifted)}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder"), start=len(lifted)):
        if _STATIC in node.meta.get("tensor_dict", {}):
            found[i] = StaticInput(user_name(node) or node.name, arguments[i])
    return found


_STATIC = "_dynamo_static_input_type"
"""Dynamo's key for tensors that a module holds, in ``meta["tensor_dict"]``."""


def argument_names(module: fx.GraphModule) -> list[UserName]:
    """The user's names of a Dynamo graph's arguments, without lifted attributes; also sets them on its placeholders."""
    placeholders = module.graph.find_nodes(op="placeholder")
    names = _names(placeholders, lifted_attributes(module))
    for node, name in zip(placeholders, names, strict=True):
        set_user_name(node, name)
    return names


def argument_names_of_frame() -> list[UserName]:
    """``argument_names`` of the graph that Dynamo is compiling in this thread; empty outside of Dynamo."""
    frame = _translator()
    return _names(frame.output.graph.find_nodes(op="placeholder")) if frame is not None else []


def _names(placeholders: Iterable[fx.Node], others: Iterable[str] = ()) -> list[UserName]:
    """The names of placeholders, made unique: an input may have the name of a parameter."""
    taken = set(others)
    found = []
    for i, node in enumerate(placeholders):
        text = _source_of(node)
        for other in (f"self.{text}", f"{text} ({i})"):
            if text and text in taken:
                text = other
        taken.add(text)
        found.append(UserName(text, _STATIC in node.meta.get("tensor_dict", {})))
    return found


_SOURCE_REWRITES = (
    (r"dict\(type\((.*?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2"),  # an attribute of a class
    (r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1"),
    (r"\.__(?:dict|kwdefaults)__\['(\w+)'\]", r".\1"),
    (r"\.__(?:self|func)__\b|\.__closure__\[\d+\]\.cell_contents", ""),
    (r"^G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", ".")),
    (r"^[LG]\['([^']*)'\]", r"\1"),
    (r"^kwargs\['(\w+)'\]", r"\1"),
    (r"^(?:__main__|self)\.", ""),
)
"""Regular expressions and replacements that make the user's name from Dynamo's, in this order."""


def _source_of(placeholder: fx.Node) -> str:
    """The user's name of an argument, from Dynamo's: a path from ``L`` or ``G``, the frame's locals and globals::

        L['self']._modules['fc']._parameters['weight']    fc.weight
        L['model'].scale                                  model.scale
        G['batch']['ids']                                 batch['ids']
        G['__import_package_dot_module'].scale            package.module.scale

    An item of ``*args`` or ``**kwargs`` of Dynamo's own wrapper has the wrapped function's name of the parameter.
    """
    source = getattr(placeholder, "_dynamo_source", None)  # set last; the other is gone for ``aot_compile``
    source = source or getattr(placeholder.meta.get("grapharg"), "source", None)
    text = str(source.name) if source is not None else ""
    for pattern, replacement in _SOURCE_REWRITES:
        text = re.sub(pattern, replacement, text)
    frame = _translator()
    wrapped = _wrapped_function(frame) if frame is not None else None
    if wrapped is None:
        return text
    if by_position := re.match(r"args\[(\d+)\]", text):
        positional = dict(enumerate(_positional_parameters(wrapped)))
        return positional.get(int(by_position[1]), by_position[0]) + text[by_position.end() :]
    return re.sub(r"^fn\.(?:func\.|keywords\['(\w+)'\])?", r"\1", text)


def _wrapped_function(frame: InstructionTranslator) -> Callable[..., Any] | None:
    """The function that Dynamo's own wrapper calls, such as ``forward`` of a compiled ``torch.nn`` module; ``None`` if
    the frame is the user's."""
    function = frame.f_locals.get("fn") if frame.f_code.co_filename == external_utils.__file__ else None
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if isinstance(function, functools.partial) and isinstance(function.func, torch.nn.Module):
        function = functools.partial(function.func.forward, *function.args, **function.keywords)
    return function if callable(function) else None


def _positional_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of positional parameters; empty if the function has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return []
    return [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]


_RESULT_NAMES = "dynamo_backends_result_names"
_DESCRIPTOR_NAMES = "dynamo_backends_descriptor_names"


def name_values(module: fx.GraphModule, names: Sequence[UserName]) -> None:
    """Sets the user's names on an AOTAutograd graph, from ``argument_names`` of Dynamo's graph."""
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    arguments, results = [node.meta.get("desc") for node in placeholders], output.meta.get("desc") or []
    module.meta[_DESCRIPTOR_NAMES] = {str(item): _descriptor_name(item, names) for item in (*arguments, *results)}
    for node, item in zip(placeholders, arguments, strict=True):
        whole, _ = _outer(item)
        is_static = isinstance(whole, (ParamAOTInput, BufferAOTInput))
        if isinstance(whole, PlainAOTInput) and whole.idx < len(names):
            is_static = names[whole.idx].is_static
        set_user_name(node, UserName(_descriptor_name(item, names), is_static))
    named = (GradAOTOutput, InputMutationAOTOutput)
    output.meta[_RESULT_NAMES] = [_descriptor_name(item, names) if isinstance(item, named) else "" for item in results]


def _descriptor_name(descriptor: object, names: Sequence[UserName]) -> str:
    """The user's name of what a descriptor describes; ``""`` if there is none."""
    match descriptor:
        case PlainAOTInput(idx=i):
            return names[i].text if i < len(names) else ""
        case ParamAOTInput(target=name) | BufferAOTInput(target=name):
            return name
        case PlainAOTOutput(idx=i):
            return f"result {i}"
        case SavedForBackwardsAOTOutput():
            return "for the backward"
        case SubclassGetAttrAOTInput(base=of, attr=attribute):
            name = _descriptor_name(of, names)
            return f"{name}.{attribute}" if name else ""
        case ViewBaseAOTInput(base_of=of):
            what = "base"
        case TangentAOTInput(output=PlainAOTOutput() as of) | GradAOTOutput(grad_of=of):
            what = "grad"
        case InputMutationAOTOutput(mutated_input=of):
            what = "new value"
        case _:
            return ""
    name = _descriptor_name(of, names)
    return f"{what} of {name}" if name else ""


def with_user_names(module: fx.GraphModule, line: str) -> str:
    """A line of code with ``# fc.weight`` instead of ``# PlainAOTInput(idx=0)``."""
    start, mark, text = line.rpartition("# ")
    return f"{start}{mark}{module.meta.get(_DESCRIPTOR_NAMES, {}).get(text) or text}"


def result_names(module: fx.GraphModule) -> dict[fx.Node, str]:
    """The results of an AOTAutograd graph that have a user's name, such as ``grad of fc.weight``."""
    output = module.graph.output_node()
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    names = output.meta.get(_RESULT_NAMES, [])
    return {leaf: name for leaf, name in zip(leaves, names, strict=False) if isinstance(leaf, fx.Node) and name}


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
    frame = _translator()
    if frame is None:
        return None
    code = getattr(_wrapped_function(frame), "__code__", frame.f_code)
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


def compiled_with_guards(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    dynamic: bool | None,
    listen: Callable[[Any], None],
) -> Callable[..., Any]:
    """``torch.compile`` with a backend; ``listen`` is called with the guards of each compiled frame."""
    return torch._dynamo.optimize(backend, guard_export_fn=listen, dynamic=dynamic)(function)


def call_being_compiled() -> Frame | None:
    """The user's line that called what Dynamo is compiling in this thread, or ``None``.

    It is the innermost frame outside of Dynamo that is in a user's file and not in this package; ``None`` if the
    command line called it.
    """
    pytorch, is_dynamo = os.path.join(os.path.dirname(torch.__file__), ""), False
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    if _translator() is None:
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
    frame = _translator()
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


def is_dynamo_compiling() -> bool:
    """Whether Dynamo is compiling a frame in this thread, and has not yet written its guards."""
    return _translator() is not None


def _translator() -> InstructionTranslator | None:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # a thread-local that is set while Dynamo compiles
        return None


def at_placeholders(module: fx.GraphModule, weights: Mapping[int, StaticInput]) -> dict[int, StaticInput]:
    """The ``weights`` of Dynamo's graph by position in an AOTAutograd graph, without those that it changes."""
    lifted = _number_of_lifted()
    by_place: dict[object, StaticInput] = {weight.name if i < lifted else i: weight for i, weight in weights.items()}
    written = _written_arguments(module)
    found = {}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        descriptor, path = _outer(node.meta.get("desc"))
        place = _place(descriptor)
        weight = by_place.get(place)
        if weight is not None and place not in written:
            found[i] = StaticInput(".".join((weight.name, *path)), _part(weight.value, path))
    return found


def _place(descriptor: object) -> int | str | None:
    """The position of an argument of Dynamo's graph, or the name of a lifted attribute."""
    if isinstance(descriptor, ParamAOTInput | BufferAOTInput):
        return descriptor.target
    return _position(descriptor) if isinstance(descriptor, PlainAOTInput) else None


def _outer(descriptor: object) -> tuple[object, list[str]]:
    """The descriptor of an argument, and the path of attributes to the part that a placeholder is.

    AOTAutograd passes the parts of a tensor subclass, such as the integers and scales of a quantized weight.
    """
    path: list[str] = []
    while isinstance(descriptor, SubclassGetAttrAOTInput):
        path.insert(0, descriptor.attr)
        descriptor = descriptor.base
    return descriptor, path


def _part(value: object, path: Sequence[str]) -> object:
    return functools.reduce(lambda outer, name: getattr(outer, name, None), path, value)


def _written_arguments(module: fx.GraphModule) -> set[int | str | None]:
    """The ``_place`` of each argument of Dynamo's graph that an AOTAutograd graph changes."""
    descriptors = module.graph.output_node().meta.get("desc") or []
    changed = [_outer(item.mutated_input)[0] for item in descriptors if isinstance(item, InputMutationAOTOutput)]
    return {_place(item) for item in changed} - {None}


def static_arguments(module: fx.GraphModule) -> dict[int, StaticInput]:
    """The weights of an AOTAutograd graph by position, without values, if Dynamo's graph is not at hand."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    positions = metadata.static_input_indices if metadata is not None else []
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    keys = keys_of_arguments(module)
    written = _written_arguments(module)
    found = {}
    for i in positions:
        key = keys[i] if i < len(keys) else None
        if isinstance(key, tuple) and key[1] not in written:
            found[i] = StaticInput(user_name(placeholders[i]) or placeholders[i].name)
    return found


def real_arguments(module: fx.GraphModule, arguments: Sequence[object] | None) -> list[object] | None:
    """Real values for the placeholders of a joint graph, from the ``arguments`` of Dynamo's graph.

    Other values, such as gradients of results, are ``synthetic``; all are if ``arguments`` is ``None``. The result is
    ``None`` if no synthetic integers are valid for an operator that reads them.
    """
    with _disable_current_modes():  # AOTAutograd's fake mode
        values = [_real_argument(node, arguments) for node in module.graph.find_nodes(op="placeholder")]
    return None if any(value is _INVALID for value in values) else values


_INVALID = object()


def _real_argument(node: fx.Node, arguments: Sequence[object] | None) -> object:
    if arguments is None:
        return _synthetic_argument(node)
    descriptor, path = _outer(node.meta.get("desc"))
    if isinstance(descriptor, PlainAOTInput):
        return _part(arguments[_position(descriptor)], path)
    if isinstance(descriptor, ViewBaseAOTInput) and isinstance(descriptor.base_of, PlainAOTInput):
        view = arguments[_position(descriptor.base_of)]
        if isinstance(view, torch.Tensor) and view._base is not None:
            return view._base
    return _synthetic_argument(node)


def _synthetic_argument(node: fx.Node) -> object:
    indices = [valid_indices(user) for user in node.users]
    if None in indices:
        return _INVALID
    return synthetic(node.meta["val"], max((found.get(node, 0) for found in indices if found), default=0))


def _position(descriptor: PlainAOTInput) -> int:
    """The position of an argument of Dynamo's graph after the lifted attributes, which descriptors do not count."""
    return descriptor.idx + _number_of_lifted()


def _number_of_lifted() -> int:
    context = TracingContext.try_get()
    return len(context.params_flat or ()) if context is not None else 0


def keys_of_results(module: fx.GraphModule) -> list[object]:
    """The key of each result of an AOTAutograd graph.

    It is ``i`` for result i of Dynamo's graph, ``("input", j)`` for a new value of its argument j, ``("gradient", j)``
    for the gradient of argument j, ``("base", i)`` for the tensor that result i is a view of, ``"saved"`` for a value
    saved for the backward, and ``None`` for others.
    """
    output = module.graph.output_node()
    keys = [_key_of_result(descriptor) for descriptor in output.meta.get("desc") or []]
    count = len(pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None))
    # the partitioner also saves states of random generators, without descriptors
    return keys + ["saved"] * (count - len(keys)) if "saved" in keys else keys + [None] * (count - len(keys))


def _key_of_result(descriptor: object) -> object:
    if isinstance(descriptor, PlainAOTOutput):
        return descriptor.idx
    if isinstance(descriptor, InputMutationAOTOutput) and isinstance(descriptor.mutated_input, PlainAOTInput):
        return ("input", _position(descriptor.mutated_input))
    if isinstance(descriptor, GradAOTOutput) and isinstance(descriptor.grad_of, PlainAOTInput):
        return ("gradient", _position(descriptor.grad_of))
    if isinstance(descriptor, IntermediateBaseAOTOutput) and isinstance(descriptor.base_of, PlainAOTOutput):
        return ("base", descriptor.base_of.idx)
    return "saved" if isinstance(descriptor, SavedForBackwardsAOTOutput) else None


def keys_of_writes(module: fx.GraphModule) -> dict[fx.Node, object]:
    """The new values that a forward, or the forward part of a joint graph, copies into its arguments, with keys as in
    ``keys_of_results``."""
    keys: dict[fx.Node, object] = {}
    for argument, new, _ in forward_writes(module):
        descriptor = argument.meta.get("desc")
        keys[new] = ("input", _position(descriptor)) if isinstance(descriptor, PlainAOTInput) else None
    return keys


def forward_writes(module: fx.GraphModule) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """``write_backs`` without those of a backward. PyTorch 2.13 tags those of inference graphs as a backward's too."""
    may_be_backward = bool(gradients_of_results(module))
    return [item for item in write_backs(module) if not (may_be_backward and is_gradient(item[2]))]


def keys_of_arguments(module: fx.GraphModule) -> list[object]:
    """The key of each placeholder of an AOTAutograd graph.

    It is ``("argument", j)`` for argument j of Dynamo's graph, ``("tangent", key)`` for the gradient of the result with
    this key, and ``None`` for others, such as values that the forward saved.
    """
    keys: list[object] = []
    for node in module.graph.find_nodes(op="placeholder"):
        descriptor = node.meta.get("desc")
        if isinstance(descriptor, PlainAOTInput):
            keys.append(("argument", _position(descriptor)))
        elif isinstance(descriptor, TangentAOTInput):
            keys.append(("tangent", _key_of_result(descriptor.output)))
        else:
            keys.append(None)
    return keys


def gradients_of_results(module: fx.GraphModule) -> list[int]:
    """The positions of a backward graph's arguments that are gradients of the forward's results."""
    keys = enumerate(keys_of_arguments(module))
    return [i for i, key in keys if isinstance(key, tuple) and key[0] == "tangent"]


def min_cut_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph into forward and backward with PyTorch's min-cut partitioner.

    Views are recomputed in the backward instead of saved: they cost nothing there, and ONNX Runtime fuses a
    transposition into the matrix product that reads it.

    Its common-subexpression elimination is off, because in PyTorch 2.13 it merges two equal ``randn_like``,
    ``randint_like`` or ``exponential`` (fixed in 2.14). The pass ``joint.common_subexpressions`` does it instead.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # see ``plain_partition``

    correct_statistics(joint)
    with functorch_config.patch(recompute_views=True, cse=False):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def backward_may_run_twice() -> contextlib.AbstractContextManager[object]:
    """Until the context ends, AOTAutograd does not refuse a backward that keeps what it read: with dynamic sizes it was
    compiled before, to run once. No graph of ours writes into what it reads."""
    context: contextlib.AbstractContextManager[object] = functorch_config.patch(donated_buffer=False)
    return context


def plain_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's min-cut partitioner alone, for use if ``min_cut_partition`` failed."""
    # Imported lazily: a process that loads a saved graph partitions none, and it imports networkx.
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with functorch_config.patch(cse=False):  # see ``min_cut_partition``
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def is_ahead_of_time() -> bool:
    """Whether ``torch.compile(...).aot_compile(...)`` calls the backend (``torch/_dynamo/aot_compile.py``)."""
    return bool(functorch_config.bypass_autograd_cache_key and functorch_config.bundled_autograd_cache)


def is_precompiling() -> bool:
    """Whether PyTorch saves all that it compiles, with Dynamo's guards."""
    return bool(dynamo_config.caching_precompile)


def is_saving() -> bool:
    """Whether PyTorch saves the results of compilers: for ``aot_compile``, or in AOTAutograd's cache."""
    return bool(functorch_config.bundled_autograd_cache) or is_precompiling()


@never_fails("saving copies of changed arguments", "A backward may read their new values", lambda: None)
def save_copies_of_changed_arguments(forward: fx.GraphModule) -> None:
    """Makes a forward graph save a copy of each argument that the function changes in place; changes the graph.

    The new value is written into the argument at the end of the forward, or after it. The min-cut partitioner of
    PyTorch 2.13 ignores that and saves the argument itself, or a view of it. The backward then reads the new value, and
    gradients are silently wrong, also with Inductor; or autograd raises that a saved tensor was modified.
    """
    output = forward.graph.output_node()
    descriptors = output.meta.get("desc") or []
    later = [item.mutated_input for item in descriptors if isinstance(item, InputMutationAOTOutput)]
    changed = {node for node in forward.graph.find_nodes(op="placeholder") if node.meta.get("desc") in later}
    changed |= {argument for argument, _, _ in write_backs(forward)}
    saved = [node for node in output.all_input_nodes if owner(node) in changed]
    for node in saved:
        after = next(item for item in forward.graph.nodes if item.op != "placeholder") if is_input(node) else node.next
        output.replace_input_with(node, call(after, torch.ops.aten.clone.default, (node,)))
    if saved:
        forward.recompile()


def boxed(runner: Runner) -> Runner:
    """The runner, marked as boxed, so that AOTAutograd does not keep arguments alive."""
    if getattr(runner, "_boxed_call", False):
        return runner

    def run(args: list[object]) -> object:
        return runner(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def number_apart() -> None:
    """Makes Dynamo number what it creates from a random number on, if PyTorch saves compiles.

    In PyTorch 2.13 the numbers begin at 0 in each process. So a function that is traced beside one that was loaded
    fails with ``Name '__builtins_dict___0' already exists in scope``.
    """
    if is_precompiling():
        bytecode_transformation._unique_id_counter = itertools.count(random.SystemRandom().randrange(2**40))


def call_hooks(compiled: object) -> list[Callable[[], Callable[[], None]]]:
    """The functions that PyTorch calls at the start of each call of a compiled function or module, and whose result it
    calls at the end; a list that may be extended.

    Args:
        compiled: the result of ``torch.compile``; or a module of which ``forward`` or all was compiled in place.

    Raises:
        TypeError: it is not compiled, or not for itself alone.
    """
    function = compiled
    if isinstance(compiled, torch.nn.Module):  # ``model.compile()`` sets the attribute
        function = getattr(compiled, "_compiled_call_impl", None) or compiled.forward
    if inspect.isfunction(function):
        context = inspect.getclosurevars(function).nonlocals.get("self")
        if isinstance(context, OptimizeContext):
            return context.enter_exit_hooks
    if inspect.ismethod(function) and hasattr(function, "get_compiler_config"):
        raise TypeError(
            f"{function.__qualname__} is compiled once for all objects of its class, so their calls cannot be told "
            "apart; call torch.compile(module), or compile() of the module, instead"
        )
    raise TypeError(
        f"expected the result of torch.compile, or a module with a compiled forward, not {type(compiled).__name__}. "
        "A function that calls a compiled model, or one that was loaded from a file, has no metrics"
    )
