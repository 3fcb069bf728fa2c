"""``dynamo-backends bench``: backends against each other on models; see ``dynamo_backends.bench``."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..bench.case import CACHES, OPTIMIZERS, OWN_NAMES, Case, UsageError, check_backends, check_model
from ..bench.measuring import TIMED, Bench, Settings
from ..bench.models import MODELS
from ..bench.plot import check_plot, plot
from ..bench.table import table
from .common import add_options_argument, positive

BACKENDS = "eager,inductor,onnxrt,onnx_export"
TOKENS = Case.tokens


DESCRIPTION = textwrap.fill(
    "Measures backends on models: time to first result, latency, overhead of a call, memory, and whether the "
    "results are right, against eager and float64. Each backend runs in a process of its own; they take "
    "turns. A wrong result has no time.",
    100,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog()
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="a name of the list below, file.py:function or package.module:function; the function returns (model, "
        "inputs): a tensor, a tuple of positional or a dict of keyword arguments",
    )
    parser.add_argument(
        "--backends",
        default=BACKENDS,
        metavar="NAMES",
        help="with commas between them; the first is what the others are compared with (default: %(default)s)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--train", action="store_true", help="a training step: forward, loss, backward")
    modes.add_argument("--decode", action="store_true", help="generate(): tokens a second, dynamic and static cache")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="", help="with --train: and its step, compiled by the same backend"
    )
    parser.add_argument("--dynamic", action="store_true", help="several sizes in turn, compiled with dynamic=True")
    parser.add_argument("--cache", choices=CACHES, help="with --decode: one kind of cache only")
    parser.add_argument("--beams", type=positive, default=1, metavar="N", help="with --decode: beams (default: 1)")
    parser.add_argument("--tokens", type=positive, metavar="N", help=f"with --decode: how many (default: {TOKENS})")
    parser.add_argument("--threads", type=positive, metavar="N", help="of PyTorch and of each session")
    parser.add_argument("--rounds", type=positive, default=9, metavar="N", help="of timing (default: %(default)s)")
    parser.add_argument(
        "--starts", type=positive, default=1, metavar="N", help="processes whose first result is timed (default: 1)"
    )
    parser.add_argument(
        "--again", action="store_true", help="time the first result of another process with the caches of the first too"
    )
    parser.add_argument("--no-overhead", action="store_true", help="do not measure the overhead of a call")
    add_options_argument(parser, "onnxrt, onnx_debug and fx_debug")
    parser.add_argument(
        "--timeout", type=positive, default=600, metavar="SECONDS", help="for each thing a process does (default: 600)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was found; - is standard output")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture; needs matplotlib")
    parser.add_argument("--verbose", action="store_true", help="show what the processes wrote to standard error")


def _epilog() -> str:
    models = [f"  {name:<16} {entry.summary}" for name, entry in MODELS.items()]
    backends = [f"  {name:<16} {summary}" for name, summary in OWN_NAMES.items()]
    return "\n".join(
        [
            "models:",
            *models,
            "",
            "backends: those registered with PyTorch, alone or as in onnxrt:max-autotune with one of torch.compile's",
            "modes, file.py:function, package.module:function, and",
            *backends,
            "",
            "Exit codes: 0 all is right; 1 a backend was wrong, failed, crashed or took too long; 2 nothing could be",
            "measured of a model, or an argument is wrong.",
        ]
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; see ``exit_code``."""
    settings = _settings(arguments)
    with _progress(arguments.verbose) as (say, done, keep):
        found = Bench(settings, say, done, keep).run(_cases(arguments))
    text = table(found)
    if arguments.json == "-":
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        sys.stderr.write(text)
    else:
        sys.stdout.write(text)
        if arguments.json is not None:
            Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        plot(found, arguments.plot)
    return exit_code(found)


def exit_code(found: dict[str, Any]) -> int:
    """2 if it was interrupted or a model not measured, 1 if a backend has no time and might have one, else 0."""
    if found["interrupted"] or any(case["message"] for case in found["cases"]):
        return 2
    rows = [row for case in found["cases"] for row in case["rows"].values()]
    return int(any(row["status"] not in (*TIMED, "not supported") for row in rows))


def _settings(arguments: argparse.Namespace) -> Settings:
    """Checks the arguments; raises ``UsageError`` if one is wrong."""
    for name in arguments.models:
        check_model(name)
    backends = [name.strip() for name in arguments.backends.split(",")]
    check_backends(backends)
    if not arguments.decode and (arguments.cache is not None or arguments.beams != 1 or arguments.tokens is not None):
        raise UsageError("--cache, --beams and --tokens are of --decode")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    if arguments.json not in (None, "-"):
        Path(arguments.json).open("a").close()  # raises, if it cannot be written, before anything is measured
    return Settings(
        backends,
        rounds=arguments.rounds,
        starts=arguments.starts,
        again=arguments.again,
        overhead=not (arguments.no_overhead or arguments.train or arguments.decode),
        timeout=arguments.timeout,
    )


def _cases(arguments: argparse.Namespace) -> list[Case]:
    if arguments.optimizer and not arguments.train:
        raise UsageError("--optimizer goes with --train")
    mode = "train" if arguments.train else "decode" if arguments.decode else "inference"
    caches = ([arguments.cache] if arguments.cache else CACHES) if arguments.decode else [""]
    return [
        Case(
            model,
            mode,
            dynamic=arguments.dynamic,
            cache=cache,
            optimizer=arguments.optimizer,
            beams=arguments.beams,
            tokens=arguments.tokens or TOKENS,
            threads=arguments.threads,
            options=dict(arguments.options),
        )
        for model in arguments.models
        for cache in caches
    ]


@contextlib.contextmanager
def _progress(verbose: bool) -> Iterator[tuple[Any, Any, Any]]:
    """What is being done, on standard error: one line that changes on a terminal, else a line for each thing; and a
    line for each case that is done."""
    console = Console(stderr=True, highlight=False)
    start = time.perf_counter()

    def keep(name: str, text: str) -> None:
        if verbose and text.strip():
            console.print(f"--- {name}", markup=False)
            console.print(text, markup=False, soft_wrap=True)

    def done(text: str) -> None:
        console.print(f"{time.perf_counter() - start:6.0f} s  {text}", markup=False, soft_wrap=True)

    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update, done, keep
        return

    def say(text: str) -> None:
        if "round" not in text or " round 1 " in text:
            done(text)

    yield say, done, keep
