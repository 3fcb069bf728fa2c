"""The serialized form of a compiled graph in PyTorch's files, which is checked when it is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import onnxruntime
import torch

from ..cache.program_record import from_record, to_record
from ..cache.store import DamagedError, StoredRecord, decoded, encoded
from ..common.call_statistics import reporting
from ..errors import AheadOfTimeError, first_line
from ..events import FallbackCount, count, warn
from ..graphs.artifacts import GraphName, Runner
from ..graphs.graph_json import CannotStoreError
from ..graphs.traced_sources import TracedModule, changed_function
from ..options import Options
from ..partition.program import Program, RegionCode, load, warn_of_rejections
from ..runtime.custom_operators import load_libraries
from ..runtime.providers import check_providers, provider_name
from ..weights.region_session import Weight
from ..weights.watchable import can_be_watched

logger = logging.getLogger(__name__)

FORMAT = "a saved graph, format 5"
_DIRECTIONS = ("inference", "forward", "backward")


@dataclasses.dataclass(frozen=True)
class ProgramPayload:
    """A compiled graph as it is saved.

    Attributes:
        content: with a checksum; see ``read_content``.
        options: of the backend.
    """

    content: bytes
    options: Options

    @classmethod
    def of(
        cls,
        name: GraphName,
        program: Program,
        weights: Mapping[int, tuple[str, bool]],
        options: Options,
        sources: Sequence[TracedModule],
    ) -> ProgramPayload:
        """The content of a compiled graph.

        Args:
            name: of the graph in this process.
            program: what runs.
            weights: the user's name, and whether it is a statistic of a batch norm, of each argument that may be a
                constant, by position.
            options: of the backend.
            sources: the modules whose traced functions must not have changed when it is loaded.

        Raises:
            CannotStoreError: a part of it cannot be saved.
        """
        if program.varies:
            raise CannotStoreError(program.varies)
        constants = {argument for i, _ in enumerate(program.regions) for argument in program.weights_of(i).values()}
        record = to_record(program, {})
        header = {
            "graph": [name.index, name.direction],
            "program": record.header,
            "weights": [[i, *weight] for i, weight in weights.items() if i in constants],
            "versions": versions(),
            "sources": sources,
        }
        return cls(encoded(FORMAT, StoredRecord(header, record.blobs)), options)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        content = self.read()
        changed = changed_function(content.sources)
        if changed is not None:
            raise AheadOfTimeError(f"{changed} has changed since a graph of it was saved; compile and save it again")
        try:
            load_libraries(self.options.custom_op_libraries)
        except ValueError as error:
            raise AheadOfTimeError(f"a saved graph cannot run here: {error}") from error
        for provider in self.options.providers:
            try:
                check_providers([provider])
            except ValueError as error:
                text = f"the next provider runs a saved graph, the last one is the CPU provider: {error}"
                warn(logger, "", {("not here", provider_name(provider)): text})

    def read(self) -> PayloadContent:
        """What ``content`` holds.

        Raises:
            AheadOfTimeError: it was damaged, or saved by other versions.
        """
        return read_content(self.content, is_to_run=True)

    def load(self, arguments: Sequence[object]) -> Runner:
        """A runner, with the weights among the arguments of a call. What ONNX Runtime rejects runs in PyTorch."""
        content = self.read()
        program = from_record(content.record, None, self.options)
        weights = {}
        for position, (name, is_statistic) in content.weights.items():
            tensor = arguments[position]
            if isinstance(tensor, torch.Tensor) and can_be_watched(tensor):
                weights[position] = Weight(name, tensor, is_statistic)
        loaded = load(program, content.name, weights, self.options)
        warn_of_rejections(program, content.name, loaded)
        error = loaded.rejection
        if error is None:
            count("graphs_loaded")
            return reporting(loaded.run, program.coverage.of_calls(content.name))
        if self.options.fallback == "error":
            raise error
        logger.warning("%s cannot be loaded, PyTorch runs what is rejected: %s", content.name, error)
        count("not_loaded")
        of_calls = program.coverage.of_calls(content.name)
        parts = zip(program.regions, loaded.regions, strict=True)
        rejected = [part.in_pytorch for part, made in parts if made.session is None]
        number = sum(code.operators for code in rejected if isinstance(code, RegionCode))
        whole = "the graph" if len(rejected) == len(program.regions) else "a region"
        fallback = FallbackCount("all operators", f"{whole} cannot be loaded: {first_line(str(error))}", number)
        summary = dataclasses.replace(
            of_calls,
            on_onnx=of_calls.on_onnx - number,
            in_pytorch=of_calls.in_pytorch + number,
            fallbacks=[*of_calls.fallbacks, fallback],
        )
        return reporting(loaded.run, summary)


@dataclasses.dataclass(frozen=True)
class PayloadContent:
    """What was saved of a graph: its Program, and the rest as in ``ProgramPayload.of``, with versions of libraries."""

    name: GraphName
    record: StoredRecord
    weights: Mapping[int, tuple[str, bool]]
    versions: Mapping[str, str]
    sources: Sequence[TracedModule]


def read_content(content: bytes, *, is_to_run: bool = False) -> PayloadContent:
    """What ``ProgramPayload.content`` holds.

    Raises:
        AheadOfTimeError: it was damaged; or it is to run, and was saved by other versions, or for another processor.
    """
    try:
        read = decoded(content, FORMAT)
    except DamagedError as error:
        raise AheadOfTimeError(f"a saved graph is damaged: {error}") from error
    header, now = read.header, versions()
    for library, version in header["versions"].items() if is_to_run else ():
        if now[library] != version:
            raise AheadOfTimeError(f"a graph was saved with {library} {version}, and this is {now[library]}")
    if is_to_run and header["program"]["mixed_signs"]:
        from ..runtime.integer_kernels import mixed_signs_are_exact  # imports libraries that create models

        if not mixed_signs_are_exact():
            raise AheadOfTimeError(
                "a graph was saved with products of uint8 with int8, which saturate on this processor; compile it here"
            )
    weights = {i: (name, is_statistic) for i, name, is_statistic in header["weights"]}
    sources = [TracedModule(*item) for item in header["sources"]]
    index, direction = header["graph"]
    if direction not in _DIRECTIONS:
        raise AheadOfTimeError(f"a saved graph is damaged: {direction!r} is no direction of a graph")
    name, record = GraphName(int(index), direction), StoredRecord(header["program"], read.blobs)
    return PayloadContent(name, record, weights, header["versions"], sources)


def versions() -> dict[str, str]:
    """The libraries that make and run a Program; PyTorch compares its own version."""
    return {"dynamo-backends": metadata.version("dynamo-backends"), "onnxruntime": onnxruntime.__version__}
