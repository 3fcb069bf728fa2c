"""The tables of known upstream faults: a demonstration shows each entry, and fails when the entry can be removed.

Also the versions and PyTorch's faults in ``docs/upstream.md``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from importlib import metadata

import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.ao.quantization.fx._decomposed
from conftest import assert_on_onnx, compiled, counted
from packaging.version import Version
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, max_pool2d
from upstream_faults import DEMONSTRATIONS, WRONG_VALUES, cast_is_dropped, faults, in_a_process, unknown

from dynamo_backends import SessionError
from dynamo_backends.common import upstream_faults as versions
from dynamo_backends.common.upstream_faults import Fault, installed_version
from dynamo_backends.dumps.optimizers import OPTIMIZERS
from dynamo_backends.exporter import upstream_faults
from dynamo_backends.partition.regions import Support
from dynamo_backends.runtime import kernel_faults, node_support
from dynamo_backends.runtime.kernel_faults import fault_in, reason_against_node

decomposed = torch.ops.quantized_decomposed

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


def test_of_two_casts_the_first_is_still_dropped() -> None:
    """When it fails, the pass ``onnx.kept_casts`` can go, once no version that is supported needs it."""
    assert cast_is_dropped()


def test_no_demonstration_is_left_behind() -> None:
    assert sorted(DEMONSTRATIONS) == NAMES


def test_each_operator_with_wrong_values_is_shown() -> None:
    [entry] = [fault for fault in faults() if fault.operators >= {torch.ops.aten.atan2.default}]
    assert entry.operators == WRONG_VALUES.keys()


def neg(x: torch.Tensor) -> torch.Tensor:
    return -x


FAULT: Fault = Fault("planted", frozenset(), "planted by a test")
VERSION = installed_version("onnxruntime")


@pytest.mark.parametrize(
    ("fault", "holds"),
    [
        (FAULT, True),
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
    monkeypatch.setattr(upstream_faults, "FAULTS", (by_aten,))
    compiled(neg)(torch.ones(3))
    assert counted("fallback aten.neg.default") == holds
    monkeypatch.setattr(kernel_faults, "FAULTS", (dataclasses.replace(fault, operators=frozenset({"Neg"})),))
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
    def disabled(model: ir.Model, provider: str = "CPUExecutionProvider") -> set[str]:
        return set(kernel_faults.optimizers_to_disable(model, [provider]))

    doubles = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 18]> g (double[4] x) => (double[4] y) { y = Neg(x) }'
    )
    always = disabled(NEG)
    assert always > {"NoopElimination", "QDQSelectorActionTransformer", *kernel_faults.SLOW_OPTIMIZERS}
    assert always.isdisjoint({"FuseReluClip", "LayerNormFusionL1"})
    assert disabled(doubles) > always | {"FuseReluClip", "LayerNormFusionL1"}
    assert disabled(NEG, "CUDAExecutionProvider") == always - set(kernel_faults.SLOW_OPTIMIZERS)
    mended = tuple(dataclasses.replace(fault, versions=f"<{VERSION}") for fault in kernel_faults.OPTIMIZER_FAULTS)
    monkeypatch.setattr(kernel_faults, "OPTIMIZER_FAULTS", mended)
    assert disabled(doubles) == set(kernel_faults.SLOW_OPTIMIZERS)


_LIST = """
import onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 0
for key in ("optimization.enable_gelu_approximation", "session.enable_dq_matmulnbits_fusion"):
    options.add_session_config_entry(key, "1")
onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
"""

_NO_CHOICE = {
    "CastFloat16Transformer",
    "FreeDimensionOverrideTransformer",
    "Level1_RuleBasedTransformer",
    "Level2_RuleBasedTransformer",
    "MemcpyTransformer",
    "RemoveDuplicateCastTransformer",
}
"""What a session needs, or runs whatever is disabled; and the names of groups."""


def test_all_optimizers_are_listed() -> None:
    """Each that the log of a session names. A new one may compute with fewer bits than the graph has: try it, and add
    it to ``OPTIMIZERS``, and if it does to ``OPTIMIZER_FAULTS``."""
    log = in_a_process(_LIST.replace("MODEL", repr(ir.to_proto(NEG).SerializeToString()))).stderr
    names = set(re.findall(r"GraphTransformer (\w+) modified", log))
    assert "QDQSelectorActionTransformer" in names
    assert names - _NO_CHOICE <= set(OPTIMIZERS)


class WithInt8Weights(torch.nn.Module):
    """Products with dequantized weights, by channels and as a whole, and the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", (torch.arange(64 * 32) * 37 % 255 - 127).to(torch.int8).reshape(64, 32))
        self.register_buffer("scales", torch.linspace(0.01, 0.02, 32))
        self.register_buffer("zeros", torch.arange(32) % 5 - 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_channel = decomposed.dequantize_per_channel(self.weights, self.scales, self.zeros, 1, -128, 127, torch.int8)
        whole = decomposed.dequantize_per_tensor(self.weights, 0.0213, 3, -128, 127, torch.int8)
        return x @ by_channel, torch.nn.functional.linear(x, whole.T, self.scales), by_channel * 2


@pytest.mark.parametrize("weights", ["constants", "inputs"])
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_no_product_is_of_fewer_bits(rows: int, weights: str) -> None:
    model, x = WithInt8Weights().eval(), torch.randn(rows, 64)
    with torch.no_grad():
        for actual, expected in zip(compiled(model, options={"weights": weights})(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    assert_on_onnx()


def quantized(x: torch.Tensor, scale: float, zero: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    q = decomposed.quantize_per_tensor(x, scale, zero, limits.min, limits.max, dtype)
    return decomposed.dequantize_per_tensor(q, scale, zero, limits.min, limits.max, dtype)


FINE = torch.nn.Conv2d(3, 4, 3).requires_grad_(False)
PRECISE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "two quantizations": (lambda x: quantized(quantized(x, 0.5, 0), 0.75, 1), torch.tensor([1, 1.3, 2.6, 4.2, 100.0])),
    "float32 weights": (
        lambda x: quantized(FINE(quantized(x, 0.02, 3)), 1e-4, 0, torch.int16),
        torch.randn(2, 3, 8, 8),
    ),
    "a softmax": (lambda x: quantized(quantized(x, 0.02, 3).softmax(-1), 1e-4, 0, torch.int16), torch.randn(4, 32)),
    "float64 in between": (
        lambda x: torch.nn.functional.layer_norm(x.double(), (64,)).float() * 2 + 1,
        torch.randn(4, 64) + 1000,
    ),
    "nearly gelu": (lambda x: x * 0.500004 * (1 + torch.erf(x / math.sqrt(2))), torch.linspace(-4, 4, 64)),
    "nearly gelu by tanh": (
        lambda x: x * 0.500004 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        torch.linspace(-4, 4, 64),
    ),
    "padded numbers": (
        lambda x: max_pool2d(torch.nn.functional.pad(x, (1, 1, 1, 1)), 2),
        torch.full((1, 1, 4, 4), -1.0),
    ),
    "a float16 in between": (lambda x: x.half().to(torch.int8), torch.tensor([1.9999, 2.5, -3.9999])),
    "a transposed float16": (lambda x: x.half().T.to(torch.int8), torch.tensor([[1.9999, 2.5, -3.9999]])),
    "an int64 in between": (lambda x: x.long().int(), torch.tensor([5e9, -5e9, 7.0], dtype=torch.float64)),
    "a float32 in between": (lambda x: x.float().short(), torch.tensor([2.9999999999], dtype=torch.float64)),
    "a number without dimensions": (lambda x: x.half().to(torch.int8), torch.tensor(1.9999)),
}


@pytest.mark.parametrize("name", PRECISE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_is_computed_with_other_bits(name: str, dynamic: bool) -> None:
    function, x = PRECISE[name]
    actual, expected = compiled(function, dynamic=dynamic)(x), function(x)
    step = 1.01e-4 if name in ("float32 weights", "a softmax") else 1e-6  # of what is quantized at the end
    torch.testing.assert_close(actual, expected, rtol=0, atol=step)
    assert_on_onnx()


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

    monkeypatch.setattr(kernel_faults, "_load", load)
    monkeypatch.setattr(node_support.ANSWERS, "known", {})
    monkeypatch.setattr(kernel_faults, "FAULTS", (dataclasses.replace(FAULT, operators=frozenset({"Neg"})),))
    assert (fault_in(NEG, providers) is None) == takes
    assert (reason_against_node(NEG.graph[0], providers, 18) is None) == takes
    assert asked == [(providers, True)]

    monkeypatch.setattr(kernel_faults, "FAULTS", ())
    by_aten = dataclasses.replace(FAULT, operators=frozenset({torch.ops.aten.neg.default}))
    monkeypatch.setattr(upstream_faults, "FAULTS", (by_aten,))
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
    """PyTorch 2.13 with oneDNN's kernels for AVX-512 returns NaN for gelu(inf) in float32, and inf in float64; ONNX
    Runtime is right.

    Nothing is to be done. When the first line fails, PyTorch is mended: take it out of ``docs/upstream.md``.
    """
    x = torch.full((8,), float("inf"))
    if torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability():
        assert gelu(x).isnan().all()
    assert gelu(x.double()).isposinf().all()
    assert compiled(gelu)(x).isposinf().all()  # type: ignore[attr-defined]
    assert_on_onnx()
