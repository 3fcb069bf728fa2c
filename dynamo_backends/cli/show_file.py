"""``dynamo-backends show FILE``: the graphs in a file of saved compiles.

PyTorch's files are pickles in pickles, whose loading calls whatever they name. The graphs are found by the bytes with
which they begin, so that nothing in the file is executed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.text_table import text_table
from .common import count_text, print_json

if TYPE_CHECKING:
    from ..partition.program import Program
    from ..pipeline.program_payload import PayloadContent


def show_saved(arguments: argparse.Namespace) -> int:
    """Prints the graphs of the file ``arguments.graph``, and writes their models to the folder ``arguments.onnx``."""
    import onnx

    from ..common import installation as installation

    texts, as_json = [], []
    stems: Counter[str] = Counter()  # graphs of several processes may have one name
    for saved, program in saved_programs(Path(arguments.graph)):
        coverage, rows = program.coverage, []
        stem = f"{saved.name.index}_{saved.name.direction or 'graph'}"
        stems[stem] += 1
        stem += f"_{stems[stem]}" if stems[stem] > 1 else ""
        for region, executable in enumerate(item.executable for item in program.regions):
            model = executable.model_without_constants
            name = f"{stem}.region_{region}.onnx"
            if arguments.onnx is not None:
                arguments.onnx.mkdir(parents=True, exist_ok=True)
                (arguments.onnx / name).write_bytes(model)
            nodes = len(onnx.load_from_string(model).graph.node)
            rows.append([name, nodes, len(model), len(executable.inputs), len(executable.outputs)])
        weights = [name for name, _ in saved.weights.values()]
        fallbacks = [
            {"operator": target, "number": times, "reason": str(reason)} for target, reason, times in coverage.fallbacks
        ]
        as_json.append(
            {
                "graph": str(saved.name),
                "operators_on_onnx": coverage.on_onnx,
                "operators_in_pytorch": fallbacks,
                "regions": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
                "weights": weights,
                "versions": dict(saved.versions),
            }
        )
        constants = f"; {count_text(len(weights), 'weight')} as constants" if weights else ""
        versions = ", ".join(f"{name} {version}" for name, version in saved.versions.items())
        texts.append(f"{saved.name}: {coverage.on_onnx} operators on ONNX Runtime{constants}; saved with {versions}")
        if rows:
            texts.append(text_table(rows, _COLUMNS))
        texts += [f"in PyTorch: {item['operator']} x{item['number']} ({item['reason']})" for item in fallbacks]
    if arguments.json:
        print_json(as_json)
    else:
        print("\n".join(texts))
    return 0


_COLUMNS = ["model", "nodes", "bytes", "inputs", "outputs"]


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
