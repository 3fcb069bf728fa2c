"""The one module that touches private parts of Dynamo and AOTAutograd.

Written against ``torch/_functorch`` of the versions in ``versions.py``, which do not differ in what is used here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dynamo import external_utils
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator
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
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext, TracingContext
from torch.compiler import _compile_session_context
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import first_line
from .artifacts import Runner
from .example_values import synthetic
from .fake_tensors import tell_statistics
from .locations import Frame, UserName, function_name, is_user_file, set_call, set_user_name, user_name

_GRAPH_NAME = re.compile(r"(?:^|__)(?P<id>\d+)_(?P<direction>forward|backward|inference|joint)")


@dataclasses.dataclass(frozen=True)
class GraphBeingCompiled:
    """What AOTAutograd tells of the graph it is compiling.

    Attributes:
        context: the tracing context of the frame, the same object for a forward, its backward and the joint graph of
            both; ``None`` outside of Dynamo.
        aot_id: AOTAutograd's number, the same for these; that of another thread's graph, where two compile at once
            (PyTorch 2.13 hands it over in a variable of the process); ``None`` if there is none.
        direction: ``forward``, ``backward``, ``joint`` or ``inference``.
    """

    context: TracingContext | None
    aot_id: str | None
    direction: str


def graph_being_compiled(module: fx.GraphModule, *, is_joint: bool = False) -> GraphBeingCompiled:
    """What AOTAutograd tells of ``module``, which it is compiling in this thread."""
    context = TracingContext.try_get()
    names = context.aot_graph_name if context is not None else None
    match = _GRAPH_NAME.search(names[0] if names else get_aot_graph_name())
    aot_id, direction = (match["id"], match["direction"]) if match else (None, "inference")
    return GraphBeingCompiled(context, aot_id, "joint" if is_joint else _direction(module, direction))


def _direction(module: fx.GraphModule, named: str) -> str:
    """The direction of a graph: as its arguments and results say, else as it is named."""
    if any(isinstance(key, tuple) and key[0] == "tangent" for key in keys_of_arguments(module)):
        return "backward"
    if "saved" in keys_of_results(module):
        return "forward"
    return named if named in ("forward", "backward") else "inference"


@contextlib.contextmanager
def as_dynamo_compiles() -> Iterator[None]:
    """What is compiled inside, at a call, is compiled as Dynamo compiles: in one thread at a time, since FX traces with
    variables of the process."""
    with compile_lock, _compile_session_context():
        yield


def is_recompile() -> bool:
    """Whether Dynamo is compiling a frame again because a guard of an earlier compile failed."""
    compile_id = CompileContext.current_compile_id()
    return bool(compile_id is not None and compile_id.frame_compile_id)


def lifted_attributes(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The parameters and buffers of one of Dynamo's graphs, by name: AOTAutograd makes them its first arguments.

    Dynamo gives most as arguments, but not those that an optimizer's step changes, nor constants.
    """
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@dataclasses.dataclass(frozen=True)
class StaticInput:
    """An argument that PyTorch expects to be the same tensor in each call.

    It is a parameter, a buffer, or another tensor that a module holds.

    Attributes:
        name: as the user calls it, ``encoder.layer.0.weight``.
        value: what it is; ``None`` if that is not known before the call.
    """

    name: str
    value: object = None


NO_WEIGHTS: Mapping[int, StaticInput] = MappingProxyType({})
"""Of graphs whose arguments are no weights."""


def weights(module: fx.GraphModule, arguments: Sequence[object]) -> dict[int, StaticInput]:
    """The static inputs of one of Dynamo's graphs, by position among ``arguments``.

    Args:
        module: the graph.
        arguments: its lifted attributes, and what it is called with.
    """
    lifted = list(lifted_attributes(module))
    found = {i: StaticInput(name, arguments[i]) for i, name in enumerate(lifted)}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder"), start=len(lifted)):
        if _STATIC in node.meta.get("tensor_dict", {}):
            found[i] = StaticInput(user_name(node) or node.name, arguments[i])
    return found


_STATIC = "_dynamo_static_input_type"
"""Dynamo's mark of a tensor that a module holds."""


def argument_names(module: fx.GraphModule) -> list[UserName]:
    """What the user calls what one of Dynamo's graphs is called with. Its lifted attributes are not among them: they
    come first, and AOTAutograd's descriptors do not count them. The placeholders are told their names, too."""
    placeholders = module.graph.find_nodes(op="placeholder")
    names = _names(placeholders, lifted_attributes(module))
    for node, name in zip(placeholders, names, strict=True):
        set_user_name(node, name)
    return names


def argument_names_of_frame() -> list[UserName]:
    """The same of the graph that Dynamo is compiling in this thread, where AOTAutograd's graphs are all one sees; empty
    outside of Dynamo."""
    frame = _translator()
    return _names(frame.output.graph.find_nodes(op="placeholder")) if frame is not None else []


def _names(placeholders: Iterable[fx.Node], others: Iterable[str] = ()) -> list[UserName]:
    """The names, each but once: an input may be called as a parameter of the model is."""
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


_WAYS = (
    (r"dict\(type\((.*?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2"),  # an attribute of a class
    (r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1"),
    (r"\.__(?:dict|kwdefaults)__\['(\w+)'\]", r".\1"),
    (r"\.__(?:self|func)__\b|\.__closure__\[\d+\]\.cell_contents", ""),
    (r"^G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", ".")),
    (r"^[LG]\['([^']*)'\]", r"\1"),
    (r"^kwargs\['(\w+)'\]", r"\1"),
    (r"^(?:__main__|self)\.", ""),
)
"""What is left out, or said otherwise, of Dynamo's way from the variables of a frame to a value."""


def _source_of(placeholder: fx.Node) -> str:
    """What the user calls what Dynamo calls by its way from the variables ``L`` and ``G`` of the frame::

        L['self']._modules['fc']._parameters['weight']    fc.weight
        L['model'].scale                                  model.scale
        G['batch']['ids']                                 batch['ids']
        G['__import_package_dot_module'].scale            package.module.scale

    What came in ``*args`` of a module of ``torch.nn``, or in ``**kwargs``, has the name of the parameter.
    """
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    text = str(source.name) if source is not None else ""
    for pattern, said in _WAYS:
        text = re.sub(pattern, said, text)
    frame = _translator()
    wrapped = _wrapped(frame) if frame is not None else None
    if wrapped is None:
        return text
    if by_position := re.match(r"args\[(\d+)\]", text):
        positional = dict(enumerate(_positional_parameters(wrapped)))
        return positional.get(int(by_position[1]), by_position[0]) + text[by_position.end() :]
    return re.sub(r"^fn\.(?:func\.|keywords\['(\w+)'\])?", r"\1", text)


def _wrapped(frame: InstructionTranslator) -> Callable[..., Any] | None:
    """The function that a frame of Dynamo's own only calls, such as the ``forward`` of a module of ``torch.nn`` that is
    compiled by itself; ``None`` if the frame is the user's."""
    function = frame.f_locals.get("fn") if frame.f_code.co_filename == external_utils.__file__ else None
    if isinstance(function, torch.nn.Module):
        function = function.forward
    if isinstance(function, functools.partial) and isinstance(function.func, torch.nn.Module):
        function = functools.partial(function.func.forward, *function.args, **function.keywords)
    return function if callable(function) else None


def _positional_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters that may come by position; none of a function that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function that is not written in Python
        return []
    return [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]


_RESULT_NAMES = "dynamo_backends_result_names"
_DESCRIBED = "dynamo_backends_described"


def name_values(module: fx.GraphModule, names: Sequence[UserName]) -> None:
    """Tells one of AOTAutograd's graphs what the user calls its arguments and results.

    Args:
        module: the graph.
        names: of the arguments of Dynamo's graph, from ``argument_names``.
    """
    placeholders, output = module.graph.find_nodes(op="placeholder"), module.graph.output_node()
    arguments, results = [node.meta.get("desc") for node in placeholders], output.meta.get("desc") or []
    module.meta[_DESCRIBED] = {str(item): _name_of(item, names) for item in (*arguments, *results)}
    for node, item in zip(placeholders, arguments, strict=True):
        is_plain = isinstance(item, PlainAOTInput) and item.idx < len(names)
        is_static = names[item.idx].is_static if is_plain else isinstance(item, (ParamAOTInput, BufferAOTInput))
        set_user_name(node, UserName(_name_of(item, names), is_static))
    named = (GradAOTOutput, InputMutationAOTOutput)
    output.meta[_RESULT_NAMES] = [_name_of(item, names) if isinstance(item, named) else "" for item in results]


def _name_of(descriptor: object, names: Sequence[UserName]) -> str:
    """What the user calls what AOTAutograd describes so; ``""`` if it has no name."""
    match descriptor:
        case PlainAOTInput(idx=i):
            return names[i].text if i < len(names) else ""
        case ParamAOTInput(target=name) | BufferAOTInput(target=name):
            return name
        case PlainAOTOutput(idx=i):
            return f"result {i}"
        case SavedForBackwardsAOTOutput():
            return "for the backward"
        case ViewBaseAOTInput(base_of=of):
            what = "base"
        case TangentAOTInput(output=PlainAOTOutput() as of) | GradAOTOutput(grad_of=of):
            what = "grad"
        case InputMutationAOTOutput(mutated_input=of):
            what = "new value"
        case _:
            return ""
    name = _name_of(of, names)
    return f"{what} of {name}" if name else ""


def with_user_names(module: fx.GraphModule, line: str) -> str:
    """A line of a graph's code, with the user's name of an argument or result in the place of AOTAutograd's
    description of it: ``# fc.weight`` instead of ``# PlainAOTInput(idx=0)``."""
    start, mark, text = line.rpartition("# ")
    return f"{start}{mark}{module.meta.get(_DESCRIBED, {}).get(text) or text}"


def result_names(module: fx.GraphModule) -> dict[fx.Node, str]:
    """What the user calls the results of one of AOTAutograd's graphs, ``grad of fc.weight``; those that have a name."""
    output = module.graph.output_node()
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    names = output.meta.get(_RESULT_NAMES, [])
    return {leaf: name for leaf, name in zip(leaves, names, strict=False) if isinstance(leaf, fx.Node) and name}


@dataclasses.dataclass(frozen=True)
class CompiledFrame:
    """The function that one of Dynamo's graphs is a part of, and why the graph ends.

    Attributes:
        function, file, line: the function, and where the graph begins in it: with it, or after a graph break.
        reason: why the graph ends there, in a line: ``the end of the function``, or ``graph break: `` and why.
        details: all that Dynamo says of a graph break, in lines; else ``""``.
        end_file, end_line: where.
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
    code = getattr(_wrapped(frame), "__code__", frame.f_code)
    reason = frame.output.compile_subgraph_reason
    details = reason.reason.strip() if reason.graph_break else ""
    lines = [line.strip().removeprefix("Explanation: ") for line in details.splitlines()[:2]]
    said = f"graph break: {': '.join(lines)}" if lines else "the end of the function"
    end = reason.user_stack[-1] if reason.user_stack else None
    return CompiledFrame(
        function_name(code.co_name),
        code.co_filename,
        code.co_firstlineno,
        said,
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
    """``torch.compile`` by a backend; the guards of each function that is compiled are shown."""
    return torch._dynamo.optimize(backend, guard_export_fn=listen, dynamic=dynamic)(function)


def call_being_compiled() -> Frame | None:
    """The user's line that called what Dynamo is compiling in this thread: the innermost frame in the user's own files
    on the way from Dynamo outwards, past this package's (``explain``); ``None`` outside of Dynamo, or where no user's
    file called it."""
    pytorch, is_dynamo = os.path.join(os.path.dirname(torch.__file__), ""), False
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    if _translator() is None:
        return None
    for frame, line in traceback.walk_stack(sys._getframe()):
        file = frame.f_code.co_filename
        is_dynamo = is_dynamo or file.startswith(pytorch)
        if is_dynamo and is_user_file(file) and not file.startswith(ours):
            return Frame(file, line, function_name(frame.f_code.co_name), linecache.getline(file, line).strip())
    return None


def name_call(module: fx.GraphModule) -> None:
    """Tells the nodes of the graph that Dynamo is compiling the user's line that called it, if their own lines are all
    of libraries: the function that it is a part of is a library's."""
    frame = _translator()
    if frame is None or is_user_file(frame.f_code.co_filename):
        return
    call = call_being_compiled()
    if call is not None:
        set_call(module, call)


def why_given_up(error: Exception) -> str:
    """Why a graph that was handed over is not used: Dynamo traces the function anew, or the compile failed."""
    if isinstance(error, TensorifyScalarRestartAnalysis):
        return "Dynamo traces the function again, with a number that it had taken for an input made a constant"
    if isinstance(error, RestartAnalysis):
        return f"Dynamo traces the function again: {error.restart_reason or type(error).__name__}"
    return f"the compile failed: {type(error).__name__}: {first_line(str(error))}"


def is_dynamo_compiling() -> bool:
    """Whether Dynamo is compiling a frame in this thread: its guards can still be added to."""
    return _translator() is not None


def _translator() -> InstructionTranslator | None:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # a variable of the thread that is set while Dynamo compiles
        return None


def at_placeholders(module: fx.GraphModule, weights: Mapping[int, StaticInput]) -> dict[int, StaticInput]:
    """The ``weights`` of Dynamo's graph by position among the placeholders of one of AOTAutograd's.

    Left out are those that the graph writes to: AOTAutograd gets their new values as results.
    """
    written = _written_arguments(module)
    found = {}
    for i, key in enumerate(keys_of_arguments(module)):
        if isinstance(key, tuple) and key[0] == "argument" and key[1] in weights and key[1] not in written:
            found[i] = weights[key[1]]
    return found


def _written_arguments(module: fx.GraphModule) -> set[object]:
    """The positions of the arguments of Dynamo's graph that one of AOTAutograd's graphs returns new values of."""
    return {key[1] for key in keys_of_results(module) if isinstance(key, tuple) and key[0] == "input"}


def static_arguments(module: fx.GraphModule) -> dict[int, StaticInput]:
    """The same where Dynamo's graph is not at hand: values are not known, the names are those that the placeholders
    were told."""
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


def real_arguments(module: fx.GraphModule, arguments: Sequence[object] | None) -> list[object]:
    """Real values for the placeholders of one of AOTAutograd's graphs, from those of Dynamo's graph.

    Args:
        module: the joint graph.
        arguments: what Dynamo's graph is called with; ``None`` if that is not known.

    Returns:
        One value for each placeholder. What Dynamo's graph does not take, such as the gradients of the results, is made
        up: random numbers of the right shape, dtype and strides.
    """
    with _disable_current_modes():  # AOTAutograd's fake mode
        return [_real_argument(node, arguments) for node in module.graph.find_nodes(op="placeholder")]


def _real_argument(node: fx.Node, arguments: Sequence[object] | None) -> object:
    if arguments is None:
        return synthetic(node.meta["val"])
    descriptor = node.meta.get("desc")
    if isinstance(descriptor, PlainAOTInput):
        return arguments[_position(descriptor)]
    if isinstance(descriptor, ViewBaseAOTInput) and isinstance(descriptor.base_of, PlainAOTInput):
        view = arguments[_position(descriptor.base_of)]
        if isinstance(view, torch.Tensor) and view._base is not None:
            return view._base
    return synthetic(node.meta["val"])


def _position(descriptor: PlainAOTInput) -> int:
    """The position of an argument of Dynamo's graph where its lifted attributes come first, which the descriptor does
    not count."""
    context = TracingContext.try_get()
    return descriptor.idx + (len(context.params_flat or ()) if context is not None else 0)


def keys_of_results(module: fx.GraphModule) -> list[object]:
    """What each result of one of AOTAutograd's graphs is to Dynamo's graph.

    Returns:
        ``i`` for its result i, ``("input", j)`` for the new value of its argument j, ``("gradient", j)`` for the
        gradient of that, ``("base", i)`` for the tensor that result i is a view of, ``"saved"`` for the backward's,
        ``None`` for what has no name of its own there.
    """
    output = module.graph.output_node()
    keys = [_key_of_result(descriptor) for descriptor in output.meta.get("desc") or []]
    count = len(pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None))
    # the partitioner adds states of random numbers to what is saved, and does not describe them
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


def keys_of_arguments(module: fx.GraphModule) -> list[object]:
    """What each placeholder of one of AOTAutograd's graphs is to Dynamo's graph.

    Returns:
        ``("argument", j)`` for its argument j; ``("tangent", key)`` for the gradient of a result, with the key of
        ``keys_of_results``; ``None`` for anything else, such as what a forward hands to its backward.
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
    """Positions of the arguments of a backward graph that are the gradients of the forward's results."""
    keys = enumerate(keys_of_arguments(module))
    return [i for i, key in keys if isinstance(key, tuple) and key[0] == "tangent"]


def min_cut_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's min-cut partitioner: the forward and the backward graph of a joint graph.

    Views are recomputed in the backward rather than handed over: there they cost nothing, and the runtime folds a
    transposition into the product that reads it.

    Equal subexpressions are the pass ``joint.common_subexpressions``'s to merge: the partitioner of PyTorch 2.13 merges
    two equal ``randn_like``, ``randint_like`` or ``exponential`` too (its list of random operators lacks them; mended
    in 2.14).
    """
    tell_statistics(joint)
    _save_copies_of_changed_arguments(joint)
    with functorch_config.patch(recompute_views=True, cse=False):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def plain_partition(joint: fx.GraphModule, inputs: object, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's min-cut partitioner without anything of ours, for a graph on which ``min_cut_partition`` failed."""
    with functorch_config.patch(cse=False):  # see ``min_cut_partition``
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def is_ahead_of_time() -> bool:
    """Whether ``torch.compile(...).aot_compile(...)`` calls the backend: not from Dynamo's frame, and for a result that
    can be saved (``torch/_dynamo/aot_compile.py``)."""
    is_saved = functorch_config.force_autograd_cache and functorch_config.bundled_autograd_cache
    return bool(is_saved and _translator() is None)


def _save_copies_of_changed_arguments(joint: fx.GraphModule) -> None:
    """Lets the backward have a copy of an argument that the function changes in place.

    AOTAutograd writes the new value into the argument between forward and backward. The min-cut partitioner of PyTorch
    2.13 does not know that, and hands the argument itself over, of which autograd then says that it was modified.
    """
    descriptors = joint.graph.output_node().meta.get("desc") or []
    changed = [item.mutated_input for item in descriptors if isinstance(item, InputMutationAOTOutput)]
    for node in joint.graph.find_nodes(op="placeholder") if changed else []:
        if node.meta.get("desc") not in changed or not node.users:
            continue
        users = list(node.users)
        with joint.graph.inserting_after(node):
            copy = joint.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta["val"] = node.meta["val"]
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for user in users:
            user.replace_input_with(node, copy)
    if changed:
        joint.recompile()


def boxed(runner: Runner) -> Runner:
    """Marks a callable as taking its arguments in one list, which AOTAutograd then does not keep alive."""

    def run(args: list[object]) -> object:
        return runner(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
