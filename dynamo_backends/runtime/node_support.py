"""Whether ONNX Runtime can run a node: a model of the node alone, a key for equal nodes, and a cache of the answers.

The answer comes from making a session of the model (``kernel_faults``, ``partition.regions``). The list of registered
kernels is not enough: operators that are ONNX functions are not in it, and run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import onnx_ir as ir

from ..common.fork_safety import Lock
from ..common.session_events import count
from ..errors import Kind, Reason
from ..versions import IR_VERSION
from .custom_operators import loaded_libraries

Answer = TypeVar("Answer")


class AnswerCache:
    """A thread-safe cache of ``most`` answers about nodes; a model of a hundred layers has some two hundred questions.

    Answers of the kind ``OUT_OF_MEMORY`` are not kept.
    """

    def __init__(self, most: int = 16_384) -> None:
        self._most = most
        self.lock = Lock()
        self.known: dict[Hashable, Any] = {}

    def get(self, question: Hashable, find_out: Callable[[], Answer]) -> Answer | Reason:
        """The answer to a question; a Reason if there was no memory to find it.

        Args:
            question: all that the answer depends on, besides the libraries that are loaded.
            find_out: asks ONNX Runtime. It runs without the lock: two threads may ask the same question at once.
        """
        question = (question, loaded_libraries())
        with self.lock:
            if question in self.known:
                known: Answer = self.known[question]
                return known
        try:
            answer: Answer | Reason = find_out()
        except MemoryError as error:
            answer = Reason(Kind.OUT_OF_MEMORY, f"out of memory while it was tested on ONNX Runtime: {error}")
        if isinstance(answer, Reason) and answer.kind is Kind.OUT_OF_MEMORY:
            count("answers_out_of_memory", answer.text)
            return answer
        with self.lock:
            self.known[question] = answer
            if len(self.known) > self._most:
                del self.known[next(iter(self.known))]
        return answer

    def __len__(self) -> int:
        return len(self.known)


ANSWERS = AnswerCache()
"""The answers of this process."""


def signature(node: ir.Node) -> Hashable:
    """All of a node that ONNX Runtime's answer depends on; of inputs, dtype and rank."""
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    inputs = tuple(None if value is None else (str(value.dtype), _rank(value)) for value in node.inputs)
    outputs = tuple(value.name != "" for value in node.outputs)
    return node.domain, node.op_type, attributes, inputs, outputs


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def model_of(node: ir.Node, opset: int, *, with_sizes: bool = False) -> ir.Model:
    """A model of one node. Its inputs have the node's types, and any sizes or the node's sizes."""
    inputs = [None if value is None else _input(f"input_{i}", value, with_sizes) for i, value in enumerate(node.inputs)]
    outputs = [ir.Value(name="" if value.name == "" else f"output_{i}") for i, value in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    graph = ir.Graph(
        [value for value in inputs if value is not None],
        [value for value in outputs if value.name],
        nodes=[copy],
        opset_imports={node.domain: 1, "": opset},
        name="one_node",
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def _input(name: str, value: ir.Value, with_sizes: bool) -> ir.Value:
    rank = _rank(value)
    any_size = None if rank is None else ir.Shape([None] * rank)
    return ir.Value(name=name, type=value.type, shape=value.shape if with_sizes else any_size)
