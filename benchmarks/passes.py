"""Measures what the passes do: ONNX nodes, latency, compile time, for all passes and for each.

::

    python benchmarks/passes.py                              # all of it, into benchmarks/passes.json
    python benchmarks/passes.py --quick --models bert llama  # a look; writes no file unless --json says which

Tables go to standard output in Markdown, progress to standard error. Each model is measured in a process of its own;
one that crashes is reported and the others go on. The documentation's tables are made of ``passes.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this file's folder, in which this file would be found as the package ``passes``

from benchmarks.measure import Settings  # noqa: E402
from benchmarks.models import MODELS  # noqa: E402
from benchmarks.report import RESULTS, report  # noqa: E402
from dynamo_backends.bench.machine import machine  # noqa: E402
from dynamo_backends.bench.processes import last_error  # noqa: E402
from passes.engine.manager import all_passes  # noqa: E402

logger = logging.getLogger("benchmarks.passes")

_QUICK = Settings(rounds=5, pass_rounds=5, compiles=1, per_pass=False)


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    settings = _settings(options)
    names = options.models or list(MODELS)
    results: dict[str, Any] = {
        "command": _command(options),
        "machine": machine(),
        "settings": dataclasses.asdict(settings),
        "passes": {item.name: {"default": item.default} for item in all_passes()},
        "models": {},
    }
    for position, name in enumerate(names, 1):
        start = time.perf_counter()
        found = measure(name, settings, options.timeout)
        results["models"][name] = rounded(found)
        said = found.get("failed", "measured")
        logger.info("%2d/%d %-12s %4.0f s  %s", position, len(names), name, time.perf_counter() - start, said)
    results["machine"]["threads"] = max((item.pop("threads", 0) for item in results["models"].values()), default=0)
    path = options.json or (RESULTS if names == list(MODELS) and not options.quick else None)
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        logger.info("written to %s", path)
    print(report(results))


def measure(name: str, settings: Settings, timeout: float) -> dict[str, Any]:
    """Measures one model in a process of its own.

    Args:
        name: one of ``MODELS``.
        settings: what is measured.
        timeout: seconds after which the process is ended.

    Returns:
        What ``benchmarks.measure`` found, or ``failed`` with the reason alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.measure",
            name,
            json.dumps(dataclasses.asdict(settings)),
            str(path),
        ]
        try:
            finished = subprocess.run(
                command, cwd=ROOT, timeout=timeout, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {timeout:.0f} s"}
        if finished.returncode or not path.exists():
            logger.debug("%s", finished.stderr)
            return {"failed": f"exit code {finished.returncode}: {last_error(finished.stderr)}"}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def rounded(value: Any, digits: int = 4) -> Any:
    """The same structure with floats of a few significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="MODEL", help=f"of: {', '.join(MODELS)}")
    parser.add_argument("--quick", action="store_true", help="few rounds, one compile, no times of single passes")
    parser.add_argument("--no-export", action="store_true", help="without torch.onnx.export as the yardstick")
    parser.add_argument("--no-training", action="store_true", help="without training steps")
    parser.add_argument(
        "--per-pass",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile and time call and training step without each pass that fired (the default, but for --quick)",
    )
    parser.add_argument("--rounds", type=int, help="rounds of timing, of single passes too")
    parser.add_argument("--threads", type=int, help="of PyTorch and of each session; by default PyTorch's choice")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="for each model")
    parser.add_argument("--verbose", action="store_true", help="show all a model that fails wrote to standard error")
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"result; of a full run by default {RESULTS.name}")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    settings = _QUICK if options.quick else Settings()
    return dataclasses.replace(
        settings,
        rounds=options.rounds or settings.rounds,
        pass_rounds=options.rounds or settings.pass_rounds,
        export=not options.no_export,
        per_pass=settings.per_pass if options.per_pass is None else options.per_pass,
        training=not options.no_training,
        threads=options.threads,
    )


def _command(options: argparse.Namespace) -> str:
    """The command that measures the same again."""
    words = ["python", "benchmarks/passes.py"]
    words += ["--models", *options.models] if options.models else []
    words += [f"--{name}" for name in ("quick", "no-export", "no-training") if getattr(options, name.replace("-", "_"))]
    words += [] if options.per_pass is None else ["--per-pass" if options.per_pass else "--no-per-pass"]
    words += [f"--{name} {value}" for name in ("rounds", "threads") if (value := getattr(options, name))]
    return " ".join(words)


if __name__ == "__main__":
    main()
