"""``dynamo-backends show``: the graph of a stage, with the lines of the user's code, or what a file holds."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.text_table import fit_table
from ..dumps.schema import StageEntry
from ..dumps.stage_graphs import FX_STAGES, STAGES, stage_graphs, stages_of
from ..errors import writing
from .common import GRAPH, add_graph_arguments, coloured, count_text, print_json, run_of_graph, try_next

if TYPE_CHECKING:
    from ..partition.program import Program
    from ..pipeline.program_payload import PayloadContent

DETAILS = (
    "FX graphs are printed as Python and ONNX models as text, with types and the lines of the user's code. Without "
    "--stage, lists the stages and prints the last FX graph. GRAPH may also be an ONNX file, or a file of "
    "save_compiled_function or save_cache_artifacts: its graphs are listed, and nothing in it is executed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    parser.add_argument("-s", "--stage", choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}")
    parser.add_argument(
        "--onnx",
        type=Path,
        metavar="FOLDER",
        help="write the ONNX models of a saved file to FOLDER; weights are inputs",
    )


def run(arguments: argparse.Namespace) -> int:
    path = Path(arguments.graph)
    if path.suffix and not path.exists():
        raise ValueError(f"{path} does not exist; expected a graph of a dump, such as 0/forward, or a file")
    if path.is_file() and not GRAPH.fullmatch(arguments.graph):
        if arguments.stage is not None or arguments.dump is not None:
            raise ValueError(f"--stage and --dump are for graphs of a dump; {arguments.graph} is a file")
        return _show_model(path, arguments) if path.suffix == ".onnx" else _show_saved(path, arguments)
    if arguments.onnx is not None:
        raise ValueError(f"--onnx is for files of saved graphs; {arguments.graph} is no file")
    run = run_of_graph(arguments, arguments.graph)
    as_json: list[dict[str, object]] = []
    texts: dict[str, str] = {}  # by file: a forward and its backward share Dynamo's graph
    hints: list[str] = []
    for graph in run.graphs_of(arguments.graph):
        stages = stages_of(run, graph)
        stage = arguments.stage or [item.name for item in stages if item.name in FX_STAGES][-1]
        shown = stage_graphs(run, graph, stage)
        graphs = [{"file": item.file, "region": item.region, "nodes": list(item.nodes)} for item in shown]
        as_json.append({"graph": graph.reference, "stages": list(stages), "stage": stage, "graphs": graphs})
        if arguments.stage is None:
            rows = [(item.name, item.nodes, item.file or f"as {item.same_as}") for item in stages]
            texts[graph.reference] = f"{graph.reference}\n{fit_table(rows, ('stage', 'nodes', 'file'))}\n"
        for item in shown:
            region = f", region {item.region}" if item.region is not None else ""
            heading = f"{stage}{region}: {count_text(item.operators, 'node')}  {item.file}"
            texts.setdefault(item.file, f"{heading}\n{coloured(item.text, 'python')}")
        if pair := _pair_to_diff(stages, stage):
            hints.append(try_next(arguments, "diff", graph.short_reference, *pair))
    if arguments.json:
        print_json(as_json)
    else:
        print("\n".join([*texts.values(), *hints[:1]]))
    return 0


def _pair_to_diff(stages: Sequence[StageEntry], stage: str) -> Sequence[str]:
    """A stage and the changed stage before it; for the first stage, the one after it."""
    (same_as,) = [item.same_as or item.name for item in stages if item.name == stage]
    names = [item.name for item in stages if item.file is not None]
    last = max(names.index(same_as), 1)
    return names[last - 1 : last + 1] if len(names) > 1 else []


def _show_model(path: Path, arguments: argparse.Namespace) -> int:
    from ..dumps.models import load_ir
    from ..graphs.graph_text import model_text, onnx_nodes

    model = load_ir(path)
    if arguments.json:
        print_json({"file": path, "nodes": onnx_nodes(model)})
    else:
        print(coloured(model_text(model), "python"), end="")
    return 0


def _show_saved(path: Path, arguments: argparse.Namespace) -> int:
    """Prints the graphs of a file, and writes their models to the folder ``arguments.onnx``."""
    from ..common import installation as installation

    stems: Counter[str] = Counter()  # graphs of several processes may have one name
    as_json, texts = [], []
    for saved, program in saved_programs(path):
        coverage = program.coverage
        stem = f"{saved.name.index}_{saved.name.direction or 'graph'}"
        stems[stem] += 1
        stem += f"_{stems[stem]}" if stems[stem] > 1 else ""
        models = [item.executable for item in program.regions]
        regions = list(_models(models, stem, arguments.onnx))
        names = [name for name, _ in saved.weights.values()]
        fallbacks = [
            {"operator": target, "number": times, "reason": str(reason)} for target, reason, times in coverage.fallbacks
        ]
        found = {"graph": str(saved.name), "operators_on_onnx": coverage.on_onnx, "operators_in_pytorch": fallbacks}
        as_json.append({**found, "regions": regions, "weights": names, "versions": dict(saved.versions)})
        weights = f"; {count_text(len(names), 'weight')} as constants" if names else ""
        versions = ", ".join(f"{name} {version}" for name, version in saved.versions.items())
        texts.append(f"{saved.name}: {coverage.on_onnx} operators on ONNX Runtime{weights}; saved with {versions}")
        if regions:
            texts.append(fit_table([list(region.values()) for region in regions], list(regions[0])))
        texts += [f"in PyTorch: {item['operator']} x{item['number']} ({item['reason']})" for item in fallbacks]
    if arguments.json:
        print_json(as_json)
    else:
        print("\n".join(texts))
    return 0


def _models(executables: Sequence[Any], stem: str, folder: Path | None) -> Iterator[dict[str, object]]:
    """What a table has of the models of a graph, which are written to a folder."""
    import onnx

    for region, executable in enumerate(executables):
        model, name = executable.model_without_constants, f"{stem}.region_{region}.onnx"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with writing(folder / name):
                (folder / name).write_bytes(model)
        nodes = len(onnx.load_from_string(model).graph.node)
        sizes = {"inputs": len(executable.inputs), "outputs": len(executable.outputs)}
        yield {"model": name, "nodes": nodes, "bytes": len(model), **sizes}


def saved_programs(path: Path) -> list[tuple[PayloadContent, Program]]:
    """The graphs in a file that ``save_compiled_function`` or ``save_cache_artifacts`` made; their Programs have the
    default options.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, is damaged, or has no graph of ours.
    """
    from ..cache.program_record import from_record
    from ..cache.store import DamagedError, encoded_in
    from ..options import Options
    from ..pipeline.program_payload import read_content

    try:
        contents = [read_content(content) for content in dict.fromkeys(encoded_in(path.read_bytes()))]
        contents.sort(key=lambda content: (content.name.index, content.name.direction != "forward"))
        found = [(content, from_record(content.record, None, Options())) for content in contents]
    except (DamagedError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no graphs of onnxrt, or is no file of save_compiled_function")
    return found
