"""The tables of faults say what is so: each entry is shown, and the test that fails names the entry that can go.

And what ``docs/upstream.md`` says of versions, and of PyTorch.
"""

from __future__ import annotations

import collections
import dataclasses
from importlib import metadata

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_on_onnx, compiled, counted
from packaging.version import Version
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu
from upstream_faults import DEMONSTRATIONS, faults, unknown

from dynamo_backends import SessionError
from dynamo_backends import faults as versions
from dynamo_backends.exporter import known_wrong
from dynamo_backends.faults import Fault, installed_version
from dynamo_backends.regions import Support
from dynamo_backends.runtime import kernels, oracle
from dynamo_backends.runtime.kernels import fault_in, refusal_of_node

NAMES = sorted({fault.shown_by for fault in faults()})


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_is_there_in_the_versions_that_its_entry_names(name: str) -> None:
    """When it fails, the fault is gone: end the entry's ``versions`` there. Or it is back."""
    entries = [fault for fault in faults() if fault.shown_by == name]
    with unknown(name):
        is_there = DEMONSTRATIONS[name]()
    for entry in entries:
        version = installed_version(entry.library)
        if entry.is_installed:
            assert is_there, f"{name!r} is gone in {entry.library} {version}: write {entry.versions!r} + ',<{version}'"
        else:
            assert not is_there, f"{name!r} is in {entry.library} {version} too, which {entry.versions!r} leaves out"


def test_no_demonstration_is_left_behind() -> None:
    assert sorted(DEMONSTRATIONS) == NAMES


def neg(x: torch.Tensor) -> torch.Tensor:
    return -x


FAULT: Fault = Fault("planted", frozenset(), "planted by a test", "onnxruntime", ">=1.24")
VERSION = installed_version("onnxruntime")


@pytest.mark.parametrize(
    ("fault", "holds"),
    [
        (FAULT, True),
        (dataclasses.replace(FAULT, providers=()), True),
        (dataclasses.replace(FAULT, versions=f"=={VERSION}"), True),
        (dataclasses.replace(FAULT, versions=f"<{VERSION}"), False),
        (dataclasses.replace(FAULT, versions=f">{VERSION}"), False),
        (dataclasses.replace(FAULT, library="onnxscript", versions=">=1000"), False),
        (dataclasses.replace(FAULT, applies=lambda node: False), False),
    ],
)
def test_a_fault_holds_where_the_library_has_it(fault: Fault, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an ATen operator, and by an ONNX node."""
    by_aten = dataclasses.replace(fault, operators=frozenset({torch.ops.aten.neg.default}))
    monkeypatch.setattr(known_wrong, "FAULTS", (by_aten,))
    compiled(neg)(torch.ones(3))
    assert counted("fallback aten.neg.default") == holds
    monkeypatch.setattr(kernels, "FAULTS", (dataclasses.replace(fault, operators=frozenset({"Neg"})),))
    assert (fault_in(NEG, CPU) is not None) == holds


def test_a_nightly_build_has_the_faults_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda library: Version("9000.1.dev20260101"))
    assert dataclasses.replace(FAULT, versions=">=9000").is_installed
    assert not dataclasses.replace(FAULT, versions=">=9001").is_installed


def test_any_build_of_a_library_is_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """``onnxruntime-openvino`` installs the package ``onnxruntime``, and is not called so."""
    version = metadata.version

    def of_another_name(name: str) -> str:
        if name == "onnxruntime":
            raise metadata.PackageNotFoundError
        return "7.8" if name == "onnxruntime-openvino" else version(name)

    monkeypatch.setattr(metadata, "version", of_another_name)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"onnxruntime": ["onnxruntime-openvino"]})
    assert installed_version.__wrapped__("onnxruntime") == Version("7.8")


CPU = ("CPUExecutionProvider",)
NEG = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 18]>\ng (float[4] x) => (float[4] y) { y = Neg(x) }')


def test_an_optimizer_runs_where_its_fault_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 18]> g (double[4] x) => (double[4] y) { y = Neg(x) }'
    )
    always = {"NoopElimination", "NotWhereFusion", "SimplifiedLayerNormFusion", *kernels._SLOW_OPTIMIZERS}
    assert set(kernels.optimizers_to_disable(NEG)) == always
    assert set(kernels.optimizers_to_disable(doubles)) == always | {"MatMulScaleFusion"}
    mended = tuple(dataclasses.replace(fault, versions=f"<{VERSION}") for fault in kernels.OPTIMIZER_FAULTS)
    monkeypatch.setattr(kernels, "OPTIMIZER_FAULTS", mended)
    assert kernels.optimizers_to_disable(doubles) == kernels._SLOW_OPTIMIZERS


@pytest.mark.parametrize("takes", [True, False])
def test_a_fault_of_the_cpu_provider_does_not_hold_for_what_another_takes(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no other provider here that takes a node; what ONNX Runtime says of one is made up."""
    providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    asked: list[tuple[object, bool]] = []

    def load(model: ir.Model, given: object, *, only_first: bool, sizes: object = None) -> None:
        asked.append((given, only_first))
        if only_first and not takes:
            raise SessionError("no kernel")

    monkeypatch.setattr(kernels, "_load", load)
    monkeypatch.setattr(oracle.ORACLE, "_known", collections.OrderedDict())
    monkeypatch.setattr(kernels, "FAULTS", (dataclasses.replace(FAULT, operators=frozenset({"Neg"})),))
    assert (fault_in(NEG, providers) is None) == takes
    assert (refusal_of_node(NEG.graph[0], providers, 18) is None) == takes
    assert asked == [(providers, True)]

    monkeypatch.setattr(kernels, "FAULTS", ())
    by_aten = dataclasses.replace(FAULT, operators=frozenset({torch.ops.aten.neg.default}))
    monkeypatch.setattr(known_wrong, "FAULTS", (by_aten,))
    module = make_fx(neg, tracing_mode="fake")(torch.ones(3))
    [node] = module.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    reason = Support(18, providers).reason_against(node)
    assert reason == (None if takes else by_aten.reason)


def test_a_provider_that_takes_nothing_leaves_the_faults_of_the_next() -> None:
    """A real one: Azure's takes calls of a service."""
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime is built without it")
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (float[4] d, int64[3,1] i, float[3] u) => (float[4] y) { y = ScatterND<reduction="add">(d, i, u) }"""
    )
    assert fault_in(model, ("AzureExecutionProvider", "CPUExecutionProvider")) is not None


def test_gelu_of_infinity_is_pytorchs_fault() -> None:
    """PyTorch 2.13 with oneDNN returns NaN for gelu(inf) in float32, and inf in float64; ONNX Runtime is right.

    Nothing is to be done. When the first line fails, PyTorch is mended: take it out of ``docs/upstream.md``.
    """
    x = torch.full((8,), float("inf"))
    if torch.backends.mkldnn.is_available():
        assert gelu(x).isnan().all()
    assert gelu(x.double()).isposinf().all()
    assert compiled(gelu)(x).isposinf().all()  # type: ignore[attr-defined]
    assert_on_onnx()
