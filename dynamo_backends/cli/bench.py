"""``dynamo-backends bench``: measures backends on models; see ``dynamo_backends.bench``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..bench.case import (
    CACHES,
    DTYPES,
    OWN_NAMES,
    SCHEMES,
    Case,
    UsageError,
    check_backends,
    check_model,
)
from ..bench.measuring import TIMED, Bench, BenchSettings
from ..bench.models import MODELS, PUBLISHED
from ..bench.table import table
from ..errors import writing
from .common import MODEL_HELP, add_device_argument, add_options_argument, positive

BACKENDS = "eager,inductor,onnxrt,onnx_export"
TOKENS = Case.tokens

DETAILS = (
    "Each backend runs in its own process; they take turns. Results are checked against eager and float64, and a wrong "
    "result has no time."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", 100)
    parser.epilog = _epilog()
    parser.add_argument("models", nargs="+", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--backends",
        metavar="NAMES",
        default=BACKENDS,
        help="comma-separated; the first is the baseline (default: %(default)s)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--train", action="store_true", help="time a training step: forward, loss, backward")
    modes.add_argument("--decode", action="store_true", help="time generate(), with a dynamic and a static cache")
    parser.add_argument(
        "--published", action="store_true", help="models of the list with the configuration of a published checkpoint"
    )
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic=True and run several sizes")
    parser.add_argument("--cache", choices=CACHES, help="with --decode: only this kind of cache")
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help=f"with --decode: tokens to generate (default: {TOKENS})"
    )
    parser.add_argument("--quantize", choices=SCHEMES, default="", help="quantize the model first, with torchao")
    add_device_argument(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="of the model and its inputs (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of PyTorch and of each session")
    parser.add_argument("--rounds", type=positive, default=9, metavar="N", help="timed rounds (default: %(default)s)")
    parser.add_argument(
        "--again", action="store_true", help="also time the first result of a new process with filled compiler caches"
    )
    add_options_argument(parser, "onnxrt, onnx_debug and fx_debug")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="limit of each request to a process (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON; - is standard output")
    parser.add_argument("--verbose", action="store_true", help="print the standard error of the processes")


def _epilog() -> str:
    models = [f"  {name:<16} {entry.summary}" for name, entry in MODELS.items()]
    published = [f"  {name:<16} {entry.summary}" for name, entry in PUBLISHED.items()]
    backends = [f"  {name:<17} {summary}" for name, summary in OWN_NAMES.items()]
    return "\n".join(
        [
            "models:",
            *models,
            "",
            "--published, with all sizes of",
            *published,
            "",
            "backends: those registered with PyTorch, also with a mode of torch.compile as in onnxrt:max-autotune;",
            "ours with an execution provider, as in onnxrt:OpenVINOExecutionProvider; file.py:function;",
            "package.module:function; and",
            *backends,
            "",
            "--quantize SCHEME, a configuration of torchao:",
            *(f"  {name:<16} {summary}" for name, summary in SCHEMES.items()),
            "",
            "Exit codes: 0 all results are right, or not supported; 1 a backend was wrong, failed, crashed or timed",
            "out; 2 a model could not be measured, an argument is invalid, or the bench was interrupted.",
        ]
    )


def run(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    start = time.perf_counter()
    console = Console(stderr=True, highlight=False)

    def keep(name: str, text: str) -> None:
        if arguments.verbose and text.strip():
            console.print(f"--- {name}\n{text}", markup=False, soft_wrap=True)

    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal and ("round" not in text or " round 1 " in text):
                console.print(f"{time.perf_counter() - start:6.0f} s  {text}", markup=False, soft_wrap=True)

        results = Bench(settings, say, keep).run(_cases(arguments))
    text = table(results)
    if arguments.json == "-":
        sys.stdout.write(json.dumps(results, indent=1) + "\n")
        sys.stderr.write(text)
    else:
        sys.stdout.write(text)
        if arguments.json is not None:
            with writing(arguments.json):
                Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return exit_code(results)


def exit_code(results: dict[str, Any]) -> int:
    """2 if it was interrupted or a model was not measured, 1 if a backend was wrong or failed, else 0."""
    if results["interrupted"] or any(case["message"] for case in results["cases"]):
        return 2
    rows = [row for case in results["cases"] for row in case["rows"].values()]
    return int(any(row["status"] not in (*TIMED, "not supported") for row in rows))


def _settings(arguments: argparse.Namespace) -> BenchSettings:
    """The settings; ``UsageError`` if an argument is invalid."""
    for name in arguments.models:
        check_model(name, published=arguments.published)
    backends = [name.strip() for name in arguments.backends.split(",")]
    check_backends(backends)
    if arguments.quantize and arguments.train:
        raise UsageError("--quantize is for inference; torchao's integers have no gradients. Leave out --train")
    if not arguments.decode and (arguments.cache is not None or arguments.tokens is not None):
        raise UsageError("--cache and --tokens require --decode")
    if arguments.json not in (None, "-"):
        Path(arguments.json).open("a").close()  # raises before anything is measured if it cannot be written
    return BenchSettings(backends, arguments.rounds, arguments.again, arguments.timeout)


def _cases(arguments: argparse.Namespace) -> list[Case]:
    caches = ([arguments.cache] if arguments.cache else CACHES) if arguments.decode else [""]
    mode = "train" if arguments.train else "decode" if arguments.decode else "inference"
    return [
        Case(
            model,
            mode=mode,
            published=arguments.published,
            dynamic=arguments.dynamic,
            cache=cache,
            tokens=arguments.tokens or TOKENS,
            quantize=arguments.quantize,
            device=arguments.device,
            dtype=arguments.dtype,
            threads=arguments.threads,
            options=dict(arguments.options),
        )
        for model in arguments.models
        for cache in caches
    ]
