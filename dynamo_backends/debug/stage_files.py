"""Writes the FX graph of a stage as readable Python and as JSON, and what each pass changed as a unified diff.

A stage that changed nothing has no files; the others have ``dynamo.py`` and ``dynamo.json`` to ``post_grad``.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

import msgspec
import onnx_ir as ir
import torch
from torch import fx
from torch.fx.node import _get_qualified_name
from torch.utils._dtype_abbrs import dtype_abbrs

from passes.engine.manager import Listener
from passes.engine.results import PassResult

from ..dumps.schema import StageEntry
from ..graphs import descriptors
from ..graphs.artifacts import GraphName
from ..graphs.graph_text import GraphNode, Kind, model_text, without_freeing
from ..graphs.locations import Frame, short_file, source_frame, stack, user_name
from .dump_folder import DumpFolder, graph_folder
from .interpreter import flat

_BEFORE = {"pre_grad": "dynamo", "post_grad": "aten"}
"""The previous stage of the same graph."""

_KINDS: dict[str, Kind] = {"placeholder": "input", "output": "output"}

_ASSIGNED = re.compile(r"(?P<indent>\s+)(?P<name>\w+)(?:: \"[^\"]*\")? = ")
_FILE = re.compile(r"(?P<start>\s*# File: )(?P<file>.+?)(?P<rest>:\d+ in .*)")
_ARGUMENT = re.compile(r"\s+(?P<name>\w+)(?:: \"[^\"]*\")?,")


def stage_text(module: fx.GraphModule) -> str:
    """A graph as readable Python: each value with dtype, shape and strides, the user's names and lines.

    ::

        primals_1: "f32[3, 3][3, 1]",  # fc.weight
        ...
        # File: library/blocks.py:10 in forward, code: return self.act(x)
        # called from model.py:12 in forward, code: x = self.block(x)
        gelu: "f32[2, 3][3, 1]" = torch.ops.aten.gelu.default(addmm)
    """
    text = module.print_readable(print_output=False, include_stride=True, expanded_def=True).rstrip() + "\n"
    arguments = {str(node.target): name for node in module.graph.nodes if (name := user_name(node))}
    nodes = {node.name: node for node in module.graph.nodes}
    lines: list[str] = []
    last_caller: Frame | None = None
    is_definition = True
    for line in text.splitlines():
        line = descriptors.with_user_names(module, line)
        if match := _FILE.match(line):
            last_caller = None
            line = f"{match['start']}{short_file(match['file'])}{match['rest']}"
        elif line.strip() in ("):", ") -> tuple:"):
            is_definition = False
        elif is_definition and (match := _ARGUMENT.match(line)) and "#" not in line and match["name"] in arguments:
            line = f"{line}  # {arguments[match['name']]}"
        elif (match := _ASSIGNED.match(line)) and match["name"] in nodes:
            node = nodes[match["name"]]
            frame, frames = source_frame(node), stack(node)
            if frame is not None and frame != frames[-1] and frame != last_caller:
                lines.append(f"{match['indent']}# called from {frame} in {frame.function}, code: {frame.code}".rstrip())
                last_caller = frame
        lines.append(line)
    return "\n".join(lines) + "\n"


def stage_json(module: fx.GraphModule) -> str:
    """The nodes of a graph, each a ``GraphNode``, subgraphs after their graph."""
    return msgspec.json.encode(list(_nodes(module, ""))).decode()


def _nodes(module: fx.GraphModule, prefix: str) -> Iterator[GraphNode]:
    for node in module.graph.nodes:
        kind = _KINDS.get(node.op, "node")
        frame = source_frame(node) if kind == "node" else None
        operator, arguments = _call(node)
        name = prefix + ("return" if kind == "output" else node.name)
        value_type = _type(node.meta.get("val", node.meta.get("example_value")))
        source, code = (str(frame), frame.code) if frame is not None else ("", "")
        texts = tuple(arguments), (value_type,), source, code
        yield GraphNode(kind, (name,), operator, *texts, user_name=user_name(node))
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule):
            yield from _nodes(part, f"{prefix}{name}.")


def _call(node: fx.Node) -> tuple[str, list[str]]:
    """The operator and the arguments as source text."""
    if node.op in ("placeholder", "output"):
        return "", [repr(item) for item in flat(node.args)]
    if node.op == "get_attr":
        return "get_attr", [str(node.target)]
    name = f".{node.target}" if isinstance(node.target, str) else _get_qualified_name(node.target)
    arguments = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
    return name.removeprefix("torch.ops.").removeprefix("_operator."), arguments


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        strides = list(value.stride()) if value.layout == torch.strided else ""
        return f"{dtype_abbrs[value.dtype]}{list(value.shape)}{strides}"
    return f"Sym({value})" if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ""


@dataclasses.dataclass(eq=False)
class StageFiles:
    """Writes the FX graphs of all stages of a process."""

    folder: DumpFolder
    _written: dict[tuple[GraphName, str], tuple[str, str]] = dataclasses.field(default_factory=dict)

    def write(self, stage: str, graph: GraphName, module: fx.GraphModule) -> StageEntry:
        """Writes ``<graph>/<stage>.py`` and ``<stage>.json``, unless the previous stage has the same text."""
        text = stage_text(module)
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = f"{graph_folder(graph)}/{stage}"
        previous = (graph, _BEFORE.get(stage, ""))
        if stage == "aten" and graph.direction == "inference":  # AOTAutograd does not partition an inference graph
            previous = (GraphName(graph.index), "joint")
        previous_digest, same_as = self._written.get(previous, (None, stage))
        nodes = sum(node.op in ("call_function", "call_method", "call_module") for node in module.graph.nodes)
        if previous_digest == digest:
            for ending in ("py", "json"):  # a graph that is compiled twice may have files of the first time
                self.folder.remove(f"{path}.{ending}")
            self._written[graph, stage] = (digest, same_as)
            return StageEntry(stage, nodes, same_as=same_as)
        self._written[graph, stage] = (digest, stage)
        self.folder.write_text(f"{path}.py", text)
        self.folder.write_text(f"{path}.json", stage_json(module))
        return StageEntry(stage, nodes, f"{path}.py")


@dataclasses.dataclass(eq=False)
class PassDiffs:
    """A listener of the pass manager that writes what each pass changed: ``passes/joint.remove_noops.diff``.

    It forwards to the listener that ``listener_of`` returns for the stage. A diff is

    ::

        --- before onnx.someone.remove_unused
        +++ after onnx.someone.remove_unused: fired 1, nodes 3 -> 2
         relu: f32[2, 3] = Relu(x)  # model.py:17
        -dead: f32[2, 3] = Neg(relu)  # model.py:18
         tanh: f32[2, 3] = Tanh(relu)  # model.py:19
    """

    folder: DumpFolder
    relative: str
    listener_of: Callable[[str], Listener | None]
    _listener: Listener | None = None
    _before: Sequence[str] = ()

    def start(self, stage: str, graph: object) -> None:
        self._before = _lines(graph)
        self._listener = self.listener_of(stage)
        if self._listener is not None:
            self._listener.start(stage, graph)

    def fired(self, result: PassResult, graph: object) -> None:
        after = _lines(graph)
        title = f"after {result.name}: fired {result.fired}, nodes {result.nodes_before} -> {result.nodes_after}"
        if result.undone:
            title += f"; undone: {result.undone}"
        lines = difflib.unified_diff(self._before, after, f"before {result.name}", title, n=3, lineterm="")
        self.folder.write_text(f"{self.relative}/passes/{result.name}.diff", "\n".join(lines) + "\n")
        if not result.undone:
            self._before = after
        if self._listener is not None:
            self._listener.fired(result, graph)


def _lines(graph: object) -> list[str]:
    if isinstance(graph, fx.GraphModule):
        return without_freeing(stage_text(graph)).splitlines()
    assert isinstance(graph, ir.Model)
    return model_text(graph).splitlines()
