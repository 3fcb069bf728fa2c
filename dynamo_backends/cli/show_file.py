"""``dynamo-backends show FILE``: the graphs in a file of saved compiles."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from ..common.text_table import text_table
from .common import count_text, print_json


def show_saved(arguments: argparse.Namespace) -> int:
    """Prints the graphs of the file ``arguments.graph``, and writes their models to the folder ``arguments.onnx``."""
    import onnx

    from ..common import installation as installation
    from .saved_programs import saved_programs

    programs = saved_programs(Path(arguments.graph))
    texts, as_json = [], []
    stems: Counter[str] = Counter()  # graphs of several processes may have one name
    for saved in programs:
        coverage, rows = saved.program.coverage, []
        stem = f"{saved.name.index}_{saved.name.direction or 'graph'}"
        stems[stem] += 1
        stem += f"_{stems[stem]}" if stems[stem] > 1 else ""
        for region, executable in enumerate(item.executable for item in saved.program.regions):
            model = executable.model_without_constants
            name = f"{stem}.region_{region}.onnx"
            if arguments.onnx is not None:
                arguments.onnx.mkdir(parents=True, exist_ok=True)
                (arguments.onnx / name).write_bytes(model)
            nodes = len(onnx.load_from_string(model).graph.node)
            rows.append([name, nodes, len(model), len(executable.inputs), len(executable.outputs)])
        fallbacks = [
            {"operator": target, "number": times, "reason": str(reason)} for target, reason, times in coverage.fallbacks
        ]
        as_json.append(
            {
                "graph": str(saved.name),
                "operators_on_onnx": coverage.on_onnx,
                "operators_in_pytorch": fallbacks,
                "regions": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
                "weights": saved.weights,
                "versions": dict(saved.versions),
            }
        )
        weights = f"; {count_text(len(saved.weights), 'weight')} as constants" if saved.weights else ""
        versions = ", ".join(f"{name} {version}" for name, version in saved.versions.items())
        texts.append(f"{saved.name}: {coverage.on_onnx} operators on ONNX Runtime{weights}; saved with {versions}")
        if rows:
            texts.append(text_table(rows, _COLUMNS))
        texts += [f"in PyTorch: {item['operator']} x{item['number']} ({item['reason']})" for item in fallbacks]
    if arguments.json:
        print_json(as_json)
    else:
        print("\n".join(texts))
    return 0


_COLUMNS = ["model", "nodes", "bytes", "inputs", "outputs"]
