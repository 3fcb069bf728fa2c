"""``dynamo-backends providers``: the execution providers there are, and what each would run of a model."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.text_table import fit_table
from .common import MODEL_HELP, add_json_argument, print_json, say

DETAILS = (
    "Those that are built into ONNX Runtime, and those of installed packages onnxruntime-ep-..., with the devices that "
    "they find on this machine. With --model, how many of the model's operators each runs, and the time of a call."
)

_EVENTS = ("rejected_by_provider", "wrong_on_provider", "failed_on_provider")
"""Counters that say that another provider ran a region."""


@dataclasses.dataclass(frozen=True)
class ProviderRow:
    """An execution provider.

    Attributes:
        name: ``OpenVINOExecutionProvider``; empty for a package that cannot be used.
        package, version: of the distribution that it comes with.
        devices: those on which it runs here; empty if ONNX Runtime lists none of a provider that is built in.
        options: those that are known; a provider may have others.
        note: why it cannot be used.
    """

    name: str
    package: str
    version: str
    devices: Sequence[str] = ()
    options: Sequence[str] = ()
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help=f"what each provider runs of a model: {MODEL_HELP}")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed rounds (default: %(default)s)")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    rows = provider_rows()
    report: dict[str, Any] = {"providers": [dataclasses.asdict(row) for row in rows]}
    text = _table(rows)
    if arguments.model is not None:
        names = [row.name for row in rows if row.name and not row.note]
        report["model"] = arguments.model
        report["runs"] = runs = _runs(arguments.model, names, arguments.rounds)
        text += "\n" + _runs_table(arguments.model, runs)
    if arguments.json:
        print_json(report)
    else:
        sys.stdout.write(text)
    return 0


def provider_rows() -> list[ProviderRow]:
    """The providers of this environment. It loads the libraries of installed packages."""
    import onnxruntime

    from ..runtime.provider_libraries import (
        OWN_OPTIONS,
        ProviderError,
        device_text,
        devices_of,
        installed_plugins,
        is_built_in,
    )
    from ..runtime.provider_options import PLUGIN_OPTIONS, PRECISIONS

    rows = []
    for name in filter(is_built_in, onnxruntime.get_available_providers()):
        devices = [device_text(item) for item in onnxruntime.get_ep_devices() if item.ep_name == name]
        options = sorted({option for options in PRECISIONS.get(name, {}).values() for option in options})
        rows.append(ProviderRow(name, "onnxruntime", onnxruntime.__version__, devices, options))
    for plugin in installed_plugins():
        if plugin.error:
            rows.append(ProviderRow("", plugin.package, plugin.version, note=plugin.error))
        for name in plugin.names:
            devices, note = [], ""
            try:
                devices = [device_text(item) for item in devices_of(name)]
                note = "" if devices else "no device that it supports on this machine"
            except ProviderError as error:
                note = str(error)
            options = [*OWN_OPTIONS, *PLUGIN_OPTIONS.get(name, {})]
            rows.append(ProviderRow(name, plugin.package, plugin.version, devices, options, note))
    return rows


def _table(rows: Sequence[ProviderRow]) -> str:
    from ..runtime.provider_options import PACKAGES

    cells = [(row.name, f"{row.package} {row.version}", "; ".join(row.devices) or row.note or "-") for row in rows]
    packages: dict[str, list[str]] = {}
    for name, package in PACKAGES.items():
        if name not in {row.name for row in rows}:
            packages.setdefault(package, []).append(name)
    lines = [fit_table(cells, ("provider", "package", "devices"))]
    lines += ["", "options:", *(_wrapped(f"{row.name}: {', '.join(row.options)}") for row in rows if row.options)]
    lines += ["", "not installed:", *(_wrapped(f"{package}: {', '.join(each)}") for package, each in packages.items())]
    return "\n".join([*lines, ""])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def _runs(model: str, names: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """What each provider runs of a model in inference: ``provider``, the number of ``operators``, those that are
    ``on_provider``, and if there are any, ``milliseconds`` of a call, ``times_as_fast`` as eager, and the ``result``.
    """
    from ..bench.case import EAGER, Case, check_model
    from ..bench.measuring import Bench, BenchSettings

    check_model(model)
    runs = [_coverage(model, name) for name in names]
    timed = [EAGER, *(f"onnxrt:{item['provider']}" for item in runs if item["on_provider"])]
    measured = Bench(BenchSettings(timed, rounds), say).run([Case(model)])["cases"][0]
    if measured["message"]:
        raise ValueError(measured["message"])
    for item in runs:
        row: Mapping[str, Any] = measured["rows"].get(f"onnxrt:{item['provider']}") or {}
        for key in ("milliseconds", "times_as_fast"):
            item[key] = row.get(key)
        events = [event for event in row.get("events", ()) if event.split()[0] in _EVENTS]
        item["result"] = "; ".join(filter(None, [row.get("status", ""), row.get("message", ""), *events]))
    return [{"provider": EAGER, "milliseconds": measured["rows"][EAGER]["milliseconds"], "result": ""}, *runs]


def _coverage(model: str, name: str) -> dict[str, Any]:
    import torch

    from ..bench.case import Case
    from ..bench.loading import load
    from ..explanations.functions import explain

    say(f"{model}: operators on {name}")
    loaded = load(Case(model))
    inputs = loaded.inputs[0]
    with torch.no_grad():
        explained = explain(loaded.model, options={"providers": [name, "CPUExecutionProvider"]})
        graphs = explained(*inputs.args, **inputs.kwargs).graphs
    parts = [part for graph in graphs for part in graph.graphs]
    number = sum(sum(part.on_onnx.values()) + sum(item.number for item in part.in_pytorch) for part in parts)
    return {"provider": name, "operators": number, "on_provider": sum(part.on_first_provider for part in parts)}


def _runs_table(model: str, runs: Sequence[Mapping[str, Any]]) -> str:
    def number(value: float | None, decimals: int) -> str:
        return "-" if value is None else f"{value:.{decimals}f}"

    cells = [
        (
            item["provider"],
            item.get("on_provider", ""),
            item.get("operators", ""),
            number(item["milliseconds"], 2),
            number(item.get("times_as_fast"), 2),
            item["result"],
        )
        for item in runs
    ]
    headers = (model, "operators", "of", "ms a call", "x eager", "result")
    return fit_table(cells, headers) + "\n"
