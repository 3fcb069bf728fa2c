"""Reads a dump: its runs, graphs, regions, models, recorded tensors and compared values.

::

    run = find_run()                    # the latest run under ./onnx_debug
    for graph in run.graphs:
        print(graph.name, graph.verdict)
    region = run.graphs_of("0/backward")[0].regions[0]
    session = onnxruntime.InferenceSession(region.model)
    session.run(None, region.recorded("input"))

Files other than the manifest are read lazily. ``DumpError`` says what is wrong with a dump, and what to do.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from passes.engine.results import PassResult

from ..errors import first_line, writing
from .schema import ComparisonEntry, DynamoGraphEntry, GraphEntry, RegionEntry, RowEntry, RunEntry, stage_named

if TYPE_CHECKING:
    import numpy as np
    import onnx

SCHEMA_VERSION = 9  # of all files; increased when the meaning of something that is read here changes

MANIFEST = "manifest.json"
LATEST = "latest"
DEFAULT_FOLDER = "onnx_debug"
DATA_SET = "test_data_set_0"

_NO_MANIFEST = f"no {MANIFEST}: its process has compiled no graph, or ended before that"

PROTOBUF_LIMIT = 2**31 - 2**24
"""A protobuf message is smaller than 2 GiB; larger data goes to a file that the message names."""

T = TypeVar("T")

_REFERENCE = re.compile(r"(?:graph_)?(\d+)(?:/(inference|forward|backward))?(?:/region_(\d+))?/?")


class DumpError(ValueError):
    """A dump or a part of it is missing or cannot be read. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class DumpedRegion:
    """A region of a graph: its models and recorded tensors."""

    index: int
    folder: Path
    entry: RegionEntry  # in the manifest
    inherited: Path | None = None  # its folder in the run of the parent process, if that compiled it before a fork

    @property
    def model(self) -> Path:
        """The exported model. Its values have the names of FX nodes."""
        return self._file("model.onnx")

    @property
    def optimized_model(self) -> Path:
        """The model after our passes, which ONNX Runtime loads. The same as ``model`` if they changed nothing."""
        stage = stage_named(self.entry.stages, "onnx_optimized")
        return self.model if stage is not None and stage.same_as else self._file("model.optimized.onnx")

    @property
    def session_model(self) -> Path:
        """The model as ONNX Runtime optimized it; ``optimized_model`` if a provider compiled it."""
        stage = stage_named(self.entry.stages, "session")
        return self.optimized_model if stage is not None and stage.same_as else self._file("model.session.onnx")

    def model_of(self, stage: str) -> Path:
        """The model of a stage: ``onnx``, ``onnx_optimized`` or ``session``."""
        if stage == "session":
            return self.session_model
        return self.model if stage == "onnx" else self.optimized_model

    def recorded(self, kind: str) -> dict[str, np.ndarray]:
        """The inputs or outputs (``kind`` is ``input`` or ``output``) of the compared run by name, in order.

        Raises ``DumpError`` if nothing was recorded, a tensor exceeds ``tensor_limit``, or a file is damaged.
        """
        folder = self._inherited(DATA_SET)
        found = dict(read_data_set(folder, kind))
        if not found and kind == "input" and not folder.is_dir():
            raise DumpError(f"{folder} is missing: no run of this graph was compared, so no data was recorded")
        return found

    def _inherited(self, name: str) -> Path:
        return _existing(self.folder / name, self.inherited and self.inherited / name)

    def _file(self, name: str) -> Path:
        path = self._inherited(name)
        if not path.exists():
            raise DumpError(f"{path} is missing: the dump is incomplete")
        return path


@dataclasses.dataclass(frozen=True)
class DumpedGraph:
    """A graph of a run."""

    index: int  # of Dynamo's graph
    direction: str
    folder: Path
    regions: Sequence[DumpedRegion]  # in execution order
    entry: GraphEntry  # in the manifest
    inherited: Path | None = None  # the run folder of the parent process, if that compiled it before a fork

    @property
    def name(self) -> str:
        """``graph 0 backward``."""
        return f"graph {self.index} {self.direction}"

    @property
    def reference(self) -> str:
        """Its name on the command line: ``graph_000/backward``."""
        return f"graph_{self.index:03d}/{self.direction}"

    @property
    def short_reference(self) -> str:
        """The short form: ``0/backward``."""
        return f"{self.index}/{self.direction}"

    @property
    def verdict(self) -> str | None:
        """``ok``, ``diverges at …``, ``not comparable: …``; ``None`` if no run was compared."""
        return self.entry.verdict

    @property
    def diverges(self) -> bool:
        return self.verdict is not None and self.verdict.startswith("diverges")

    @property
    def is_wrong(self) -> bool:
        """Whether it diverges, or ONNX Runtime failed to run a part of it."""
        return self.diverges or bool(self.entry.rescued)

    @property
    def remarks(self) -> list[str]:
        """What the verdict does not say: its note, NaN and infinity in the results, and dropout."""
        entry = self.entry
        counts = ", ".join(f"{number} in {name}" for name, number in entry.nonfinite.items())
        also = "; PyTorch has the same" if self.verdict == "ok" else ""
        texts = [entry.note, counts and f"NaN or infinite elements in the results: {counts}{also}"]
        texts += [f"dropout is active at {line}; model.eval() turns it off" for line in entry.dropout]
        return [text for text in texts if text]

    @property
    def share_that_ran(self) -> float:
        """The share of its operators that ran on ONNX Runtime in the compared run, 0 to 1."""
        failed = sum(region.entry.nodes for region in self.regions if region.index in self.entry.rescued)
        return self.entry.share_on_onnx - failed / max(self.entry.nodes, 1)

    def rows(self) -> Sequence[RowEntry]:
        """The rows of ``side_by_side.json``, in execution order; ``DumpError`` if it is missing or damaged."""
        path = self.folder / "side_by_side.json"
        if not path.exists():
            raise DumpError(f"no run of {self.name} was compared: run it with options={{'compare': 'first'}}")
        return read_json(path, ComparisonEntry).rows


@dataclasses.dataclass(frozen=True)
class DumpedPass:
    """What a pass did to a graph or a region."""

    result: PassResult
    index: int  # of Dynamo's graph
    folder: Path
    direction: str = ""  # empty in the stages of Dynamo's graph
    region: int | None = None

    @property
    def place(self) -> str:
        """``graph 0``, ``graph 0 backward`` or ``graph 0 backward region 1``."""
        region = "" if self.region is None else f"region {self.region}"
        return " ".join(filter(None, (f"graph {self.index}", self.direction, region)))

    @property
    def diff(self) -> Path | None:
        """The file with what it changed, if it is in the dump."""
        path = self.folder / "passes" / f"{self.result.name}.diff"
        return path if path.is_file() else None


@dataclasses.dataclass(frozen=True)
class DumpedRun:
    """The dump of one process."""

    folder: Path
    manifest: RunEntry

    @property
    def path(self) -> Path:
        """The path of the manifest."""
        return self.folder / MANIFEST

    @functools.cached_property
    def graphs(self) -> list[DumpedGraph]:
        """All graphs by number, forward before backward; ``DumpError`` if an entry is damaged."""
        return [self.graph(i) for i in range(len(self.manifest.graphs))]

    @functools.cached_property
    def dynamo_graphs(self) -> list[DynamoGraphEntry]:
        """Dynamo's graphs in the order of compilation; ``DumpError`` if an entry is damaged."""
        entries = enumerate(self.manifest.dynamo_graphs)
        return [checked(self.path, entry, DynamoGraphEntry, f"dynamo_graphs[{i}]") for i, entry in entries]

    def passes(self, graph: DumpedGraph | None = None) -> list[DumpedPass]:
        """What each pass did to one graph, by default to all; ``DumpError`` if an entry is damaged."""
        found = []
        for item in self.dynamo_graphs:
            if graph is None or graph.index == item.index:
                folder = self.folder / f"graph_{item.index:03d}"
                found += [DumpedPass(result, item.index, folder) for result in item.passes]
        for one in self.graphs if graph is None else [graph]:
            found += [DumpedPass(result, one.index, one.folder, one.direction) for result in one.entry.passes]
            for region in one.regions:
                names = one.index, region.folder, one.direction, region.index
                found += [DumpedPass(result, *names) for result in region.entry.passes]
        return found

    def file_of(self, graph: DumpedGraph, relative: str) -> Path:
        """A file written when the graph was compiled: in this run, or in that of the parent process."""
        return _existing(self.inside(relative), graph.inherited and graph.inherited / relative)

    def graph(self, position: int) -> DumpedGraph:
        """The graph at a position of the manifest's ``graphs``; ``DumpError`` if the entry is damaged."""
        entry = checked(self.path, self.manifest.graphs[position], GraphEntry, f"graphs[{position}]")
        parent = entry.files_in
        if parent is not None and (not parent.startswith("run_") or parent != Path(parent).name):
            raise DumpError(f"{self.path} is damaged: {parent!r} is not a run folder; dump again")
        inherited = self.folder.resolve().with_name(parent) if parent else None
        regions = [
            DumpedRegion(item.index, self.inside(item.folder), item, inherited and inherited / item.folder)
            for item in entry.regions
        ]
        return DumpedGraph(entry.index, entry.direction, self.inside(entry.folder), regions, entry, inherited)

    def inside(self, relative: str) -> Path:
        """The path of a file that the manifest names; ``DumpError`` if it is outside the run folder."""
        path = (self.folder / relative).resolve() if "\0" not in relative else Path("/")
        if not path.is_relative_to(self.folder.resolve()):
            raise DumpError(f"{self.path} is damaged: {relative!r} is outside the run folder; dump again")
        return path

    def graphs_of(self, reference: str) -> list[DumpedGraph]:
        """The graphs that a reference names: one direction, or all of a graph of Dynamo; ``DumpError`` if none.

        A reference is ``0``, ``graph_000``, ``graph_000/backward``, ``0/backward``, or the path of such a folder. That
        of a region names its graph.
        """
        index, direction, _ = self._parts(reference)
        found = [graph for graph in self.graphs if graph.index == index and direction in (None, graph.direction)]
        if found:
            return found
        own = [graph.direction for graph in self.graphs if graph.index == index]
        if direction is not None and own:
            raise DumpError(f"graph {index} has no {direction}, only {' and '.join(own)}")
        for item in self.dynamo_graphs:
            if item.index == index and item.given_up:
                where = f" ({item.begins.function}, {item.begins.place})" if item.begins.place else ""
                raise DumpError(f"Dynamo gave up graph {index}{where}: {item.given_up}")
        known = [graph.reference for graph in self.graphs]
        near = difflib.get_close_matches(reference, known, n=3, cutoff=0.5) or known[:5]
        listed = f"; there are {', '.join(near)}{' …' if len(known) > len(near) else ''}" if known else ""
        form = "A graph is a number or its folder; show, compare and bisect take ONNX files, too"
        raise DumpError(f"no graph {reference!r} in {self.folder}{listed}. {form}.")

    def regions_of(self, reference: str) -> list[tuple[DumpedGraph, DumpedRegion]]:
        """The regions that a reference names: ``0/forward/region_1``, or all regions of its graphs."""
        graphs = self.graphs_of(reference)
        _, _, wanted = self._parts(reference)
        found = [(graph, region) for graph in graphs for region in graph.regions if wanted in (None, region.index)]
        if found:
            return found
        where = graphs[0].reference if len(graphs) == 1 else f"graph {graphs[0].index}"
        if wanted is not None:
            known = ", ".join(f"region_{region.index}" for graph in graphs for region in graph.regions) or "none"
            raise DumpError(f"{where} has no region {wanted}, only {known}")
        raise DumpError(f"nothing of {where} ran on ONNX Runtime: {graphs[0].entry.why_in_pytorch}")

    def region_named(self, reference: str) -> int | None:
        """The region that a reference names; ``None`` for a whole graph."""
        return self._parts(reference)[2]

    def _parts(self, reference: str) -> tuple[int | None, str | None, int | None]:
        """The index, direction and region that a reference, or the path of a folder in the run, names."""
        path, root = Path(reference).resolve(), self.folder.resolve()
        relative = path.relative_to(root).as_posix() if path.exists() and path.is_relative_to(root) else reference
        match = _REFERENCE.fullmatch(reference) or _REFERENCE.fullmatch(relative)
        if match is None:
            return None, None, None
        return int(match[1]), match[2], int(match[3]) if match[3] else None


def _existing(own: Path, inherited: Path | None) -> Path:
    return inherited if inherited is not None and not own.exists() else own


def find_run(folder: str | Path | None = None) -> DumpedRun:
    """Finds a run; ``DumpError`` if there is none, or its manifest cannot be read.

    ``folder`` is a run folder, anything in it, or a dump folder (by default ``default_folder()``), whose latest run is
    returned.
    """
    path = Path(folder) if folder is not None else default_folder()
    if not path.exists():
        raise DumpError(f"{path} does not exist; torch.compile(model, backend='onnx_debug') writes a dump")
    for place in (path, *path.resolve().parents):
        if (place / MANIFEST).is_file():
            return read_run(place)
        if place.name.startswith("run_"):
            raise DumpError(f"{place} has {_NO_MANIFEST}")
        if (place / LATEST).exists() or (place / LATEST).is_symlink():
            return read_run(latest_run(place))
    raise DumpError(f"{path} is not a dump: it has neither {MANIFEST} nor {LATEST!r}")


def latest_run(root: str | Path) -> Path:
    """The run folder that ``<root>/latest`` links to or names; ``DumpError`` if there is none."""
    pointer = Path(root) / LATEST
    if pointer.is_dir():
        return pointer.resolve()
    if pointer.is_file():
        location = pointer.with_name(pointer.read_text().strip())
        if location.is_dir():
            return location
    raise DumpError(f"no run folder under {root}; torch.compile(..., backend='onnx_debug') makes one")


def read_run(folder: Path) -> DumpedRun:
    """Reads a run folder; ``DumpError`` if its manifest is missing, damaged, not ours, or of another version."""
    path = folder / MANIFEST
    if not path.exists():
        raise DumpError(f"{folder} has {_NO_MANIFEST}; ls lists the other runs, and -d names one")
    manifest = read_json(path, object)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema_version"), int):
        raise DumpError(f"{path} was not written by dynamo-backends")
    version = manifest["schema_version"]
    if version != SCHEMA_VERSION:
        older = "an older" if version < SCHEMA_VERSION else "a newer"
        said = f"{path} was written by {older} version of dynamo-backends"
        raise DumpError(f"{said} (schema {version}, this one reads {SCHEMA_VERSION}); dump again")
    _check_no_links(folder)
    return DumpedRun(folder, checked(path, manifest, RunEntry))


def runs_in(folder: Path) -> list[tuple[Path, DumpedRun | DumpError]]:
    """The folders of the runs in a dump folder, the oldest first, each with its run or why it cannot be read."""
    found = sorted(folder.glob("run_*"), key=lambda path: (path.stat().st_mtime, path.name))
    runs: list[tuple[Path, DumpedRun | DumpError]] = []
    for path in found:
        if path.is_dir():
            try:
                run = read_run(path)
                _ = run.graphs, run.dynamo_graphs
                runs.append((path, run))
            except DumpError as error:
                runs.append((path, error))
    return runs


def _check_no_links(folder: Path) -> None:
    """Raises ``DumpError`` if a run folder has a symbolic link, which could make us read or overwrite other files."""
    for place, folders, files in os.walk(folder):
        link = next((name for name in (*folders, *files) if os.path.islink(os.path.join(place, name))), None)
        if link is not None:
            raise DumpError(
                f"{Path(place) / link} is a symbolic link, which dumps never have; remove it, or dump again"
            )


def read_json(path: Path, form: type[T]) -> T:
    """Reads a JSON file as the type ``form``; ``DumpError`` if it cannot be read, or has another form."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path} is damaged, not JSON: {error}; dump again") from None
    return checked(path, value, form)


def checked(path: Path, value: object, form: Any, where: str = "") -> Any:
    """Converts a JSON value to the type ``form``; ``DumpError`` if that fails. ``where`` is its key in the file."""
    try:
        return msgspec.convert(value, form, str_keys=True)
    except msgspec.ValidationError as error:
        raise DumpError(f"{path} is damaged: {where and f'{where}: '}{error}; dump again") from None


def read_tensor(path: Path) -> tuple[str, np.ndarray]:
    """Reads a ``TensorProto``: its name and value; ``DumpError`` if it is damaged."""
    import onnx  # lazily: most commands read no tensors
    from google.protobuf.message import DecodeError

    proto = onnx.TensorProto()
    try:
        proto.ParseFromString(path.read_bytes())
        return proto.name, onnx.numpy_helper.to_array(proto, base_dir=str(path.parent))
    except (
        *(DecodeError, ValueError, TypeError, KeyError, OSError, ArithmeticError, MemoryError),
        onnx.checker.ValidationError,
    ) as error:
        raise DumpError(f"{path} is damaged: {first_line(str(error)) or type(error).__name__}; dump again") from None


def write_data_set(folder: Path, kind: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors in ONNX's test layout, see ``read_data_set``."""
    import onnx

    folder.mkdir(exist_ok=True)
    for i, (name, array) in enumerate(tensors.items()):
        if array.nbytes <= PROTOBUF_LIMIT:
            proto = onnx.numpy_helper.from_array(array, name)
        else:
            dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            proto = onnx.TensorProto(data_type=dtype, dims=array.shape, name=name)
            with writing(folder / f"{kind}_{i}.bin"):
                array.tofile(folder / f"{kind}_{i}.bin")
            make_external(proto, f"{kind}_{i}.bin", array.nbytes)
        with writing(folder / f"{kind}_{i}.pb"):
            (folder / f"{kind}_{i}.pb").write_bytes(proto.SerializeToString())


def make_external(tensor: onnx.TensorProto, file: str, size: int) -> None:
    """The data of a tensor is a whole file of ``size`` bytes, in the same folder."""
    tensor.data_location = tensor.EXTERNAL
    for key, text in {"location": file, "offset": "0", "length": str(size)}.items():
        tensor.external_data.add(key=key, value=text)


def read_data_set(folder: Path, kind: str) -> list[tuple[str, np.ndarray]]:
    """Reads ``<kind>_0.pb`` and so on (ONNX's test layout): names and values; empty if there are none.

    Raises ``DumpError`` if a tensor exceeds the option ``tensor_limit``, or a file is damaged.
    """
    found = []
    for i in range(len({path.stem for path in folder.glob(f"{kind}_*") if path.suffix in (".pb", ".json")})):
        path = folder / f"{kind}_{i}.pb"
        if not path.exists():
            raise DumpError(f"{path} is too large and was not stored: dump again with options={{'tensor_limit': -1}}")
        found.append(read_tensor(path))
    return found


def default_folder() -> Path:
    """The default dump folder: ``onnx_debug``, or the only dump here; ``DumpError`` if there are none or several."""
    if Path(DEFAULT_FOLDER).is_dir():
        return Path(DEFAULT_FOLDER)
    found = sorted(path.parent for path in Path().glob(f"*/{LATEST}"))
    if len(found) == 1:
        return found[0]
    if found:
        raise DumpError(f"there are several dumps: {', '.join(map(str, found))}. Name one with -d")
    how = "torch.compile(model, backend='onnx_debug') writes one when Dynamo captures a graph, -d FOLDER names another"
    why = "dynamo-backends explain MODEL says what Dynamo captures"
    raise DumpError(f"no dump here: there is no {DEFAULT_FOLDER}; {how}; {why}")
