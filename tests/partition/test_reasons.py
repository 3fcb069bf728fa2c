"""The reason why a node runs in PyTorch is an object with a kind; errors name their node."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping

import onnx_ir as ir
import pytest
import torch
from conftest import compiled, counted
from onnxscript import opset18 as op
from torch import nn

from dynamo_backends import SessionError, TranslationError, UnsupportedOperatorError
from dynamo_backends.errors import KernelFaultError, Kind, Reason
from dynamo_backends.exporter.converters import CONVERTERS, NotTranslatable
from dynamo_backends.graphs.artifacts import Coverage, GraphName, Runner
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.options import parse_options
from dynamo_backends.partition.coverage import CoverageCounts
from dynamo_backends.partition.program import LoadedProgram
from dynamo_backends.partition.regions import Support
from dynamo_backends.pipeline import stages
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.pipeline import Pipeline
from dynamo_backends.pipeline.stage_data import CompiledGraph
from dynamo_backends.runtime.executable import Executable
from dynamo_backends.runtime.messages import session_error
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings

aten = torch.ops.aten
CPU = ("CPUExecutionProvider",)


class Keeper(Observer):
    """An observer that keeps the report of each graph."""

    def __init__(self) -> None:
        self.accounts: list[Coverage] = []

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        self.accounts.append(graph.split.coverage)
        return loaded.run


def coverage_of(function: Callable[..., object], *args: object, **options: object) -> Coverage:
    keeper = Keeper()

    def backend(module: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        return Pipeline(parse_options(options), keeper).compile_dynamo_graph(module, example_inputs)

    torch.compile(function, backend=backend, dynamic=False)(*args)
    return keeper.accounts[0]


KINDS: dict[str, tuple[Callable[[torch.Tensor], object], str, Kind]] = {
    "no translation": (lambda x: torch.linalg.eigvalsh(x) + 1, "aten._linalg_eigh.default", Kind.NO_TRANSLATION),
    "no kernel": (lambda x: torch.special.erf(x.double()) * 2, "aten.erf.default", Kind.REJECTED),
    "complex": (lambda x: torch.view_as_real(x.to(torch.complex64) * 2), "aten.mul.Tensor", Kind.NOT_IN_ONNX),
    "fault": (lambda x: torch.topk(x, 1).values + 1, "aten.topk.default", Kind.UPSTREAM_FAULT),
    "random": (lambda x: torch.rand_like(x) * x, "aten.rand_like.default", Kind.RANDOM),
    "memory": (lambda x: torch.empty_like(x).fill_(2.0) * x, "aten.empty_like.default", Kind.UNINITIALIZED),
    "view": (lambda x: (x * 2, x.t()), "aten.t.default", Kind.SHARED_MEMORY),
    "repeated sums": (
        lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]) * 2,
        "aten.index_add.default",
        Kind.FASTER_IN_PYTORCH,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_a_reason(name: str) -> None:
    function, operator, kind = KINDS[name]
    coverage = coverage_of(function, torch.eye(3))
    found = {str(node.target): reason for node, reason in coverage.in_pytorch.items()}
    assert found[operator].kind is kind, found
    by_design = {Kind.RANDOM, Kind.UNINITIALIZED, Kind.SHARED_MEMORY, Kind.FASTER_IN_PYTORCH}
    assert found[operator].by_design == (kind in by_design)
    assert coverage.total == coverage.on_onnx + len(coverage.in_pytorch)


def test_the_share_on_onnx_runtime() -> None:
    """To take one of an operator's results is none of the operators."""
    coverage = coverage_of(lambda x: (x.max(0).values * 2).sin() + x.sort(0).values, torch.eye(3))
    assert (coverage.on_onnx, coverage.total, coverage.share) == (4, 5, 0.8)
    assert Coverage(0, {}).share == 1.0, "a graph that only returns its arguments leaves nothing to PyTorch"


def test_the_reason_of_a_converter_may_have_a_kind() -> None:
    attention = nn.functional.scaled_dot_product_attention
    x = torch.randn(1, 2, 4, 8)
    coverage = coverage_of(lambda x: attention(x, x, x, dropout_p=0.5) * 2, x)
    assert coverage.in_pytorch
    assert all(reason.by_design for reason in coverage.in_pytorch.values()), coverage.in_pytorch


def test_what_has_side_effects_runs_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a translation of it: ONNX Runtime may leave it out, or run it in another order."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(aten._assert_async.msg, (x, "not true"))
    x.meta["val"] = node.meta["val"] = torch.ones(())
    monkeypatch.setitem(CONVERTERS, aten._assert_async.msg, lambda x, message: op.Identity(x))
    reason = Support(18, CPU).reason_against(node)
    assert reason is not None and reason.kind is Kind.NOT_IN_ONNX


def test_an_unsupported_operator_is_named() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(lambda x: torch.linalg.eigvalsh(x) + 1, options={"fallback": "error"})(torch.eye(3))
    error = caught.value.inner_exception
    assert isinstance(error, UnsupportedOperatorError)
    assert (error.node, error.operator) == ("_linalg_eigh", "aten._linalg_eigh.default")
    assert error.source.startswith(short_file(__file__))
    assert error.reason.kind is Kind.NO_TRANSLATION


def test_a_translation_error_knows_its_node() -> None:
    error = NotTranslatable("not of integers").of("sinh_1", "aten.sinh.default")
    assert isinstance(error, TranslationError)
    assert error.node == "sinh_1"
    assert str(error) == "sinh_1 (aten.sinh.default): not of integers"
    assert str(error.reason) == "not of integers"


def model_of(text: str) -> ir.Model:
    """The model, each node as if it came from the FX node ``from_<name of the node>``."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    for node in model.graph:
        node.name = f"node_{node.outputs[0].name}"
        node.metadata_props["aten"] = "aten.none.default"
        node.metadata_props["fx_node"] = f"from_{node.outputs[0].name}"
    return model


@pytest.mark.parametrize(
    "text",
    [
        "g (double[4] x) => (double[4] y) { a = Neg(x) y = Erf(a) }",
        "g (float[4] x, int64[4] z) => (float[4] y) { a = Neg(x) y = Add(a, z) }",
        "g (float[4] x, float[3] z) => (float[4] y) { a = Neg(x) y = Add(a, z) }",
        "g (float[4] x) => (float[4] y) { a = Neg(x) y = NoSuchOperator(a) }",
    ],
    ids=["no kernel", "types", "shapes", "no operator"],
)
def test_a_refusal_knows_the_node_that_the_runtime_names(text: str) -> None:
    with pytest.raises(SessionError) as caught:
        Session(model_of(text), SessionSettings(CPU))
    assert caught.value.node == "from_y", str(caught.value)
    assert caught.value.reason.kind is Kind.REJECTED
    assert "node_y" not in str(caught.value.reason)


def test_a_failure_while_running_knows_the_node() -> None:
    model = model_of("g (float[N] x, int64[M] i) => (float[M] y) { a = Neg(x) y = Gather(a, i) }")
    session = Session(model, SessionSettings(CPU, threads=1))
    with pytest.raises(Exception, match="data bounds") as caught:
        session.ort_session(1).run(None, {"x": torch.ones(2).numpy(), "i": torch.tensor([7]).numpy()})
    assert session_error(caught.value, session.model).node == "from_y"


def test_a_kernel_fault_knows_its_node() -> None:
    text = "g (float[2,2] x) => (float[2,1] y) { a = Constant<value_ints=[1]>() y = ReduceLogSumExp(x, a) }"
    with pytest.raises(KernelFaultError) as caught:
        Session(model_of(text), SessionSettings(CPU))
    assert caught.value.node == "from_y"
    assert caught.value.reason.kind is Kind.UPSTREAM_FAULT


def refuse_once(error: SessionError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ONNX Runtime reject the next region."""
    load = Executable.load
    refusals = iter([error])

    def refuse(self: Executable, constants: Mapping[int, torch.Tensor]) -> object:
        for refusal in refusals:
            raise refusal
        return load(self, constants)

    monkeypatch.setattr(Executable, "load", refuse)


def test_a_region_that_is_refused_loses_the_nodes_that_are_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Reason(Kind.REJECTED, "made up, of the node alone")
    coverage_of(lambda x: x.exp().max(0).values.sin(), torch.randn(2, 3))  # so the nodes are asked about no more
    torch._dynamo.reset()
    refuse_once(SessionError("made up"), monkeypatch)
    monkeypatch.setattr(Support, "probe", lambda self, node: alone if node.target is aten.sin.default else None)
    coverage = coverage_of(lambda x: x.exp().max(0).values.sin(), torch.randn(2, 3))
    assert [(node.name, reason) for node, reason in coverage.in_pytorch.items()] == [("sin", alone)]
    assert counted("rejected_regions") == 1


def test_a_graph_is_split_anew_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time costs a session; then a region goes to PyTorch as a whole."""
    names = iter(["exp", *(f"exp_{i}" for i in range(1, 20))])

    def refuse(*args: object) -> object:
        raise SessionError("made up", node=next(names))

    monkeypatch.setattr(Executable, "load", refuse)
    monkeypatch.setattr(stages, "MAXIMUM_SPLITS", 3)
    coverage = coverage_of(lambda x: x.exp().exp().exp().exp().exp().exp().exp(), torch.zeros(2))
    assert (coverage.on_onnx, coverage.total) == (0, 7)
    assert counted("rejected_regions") == 1 + 3


@pytest.mark.parametrize(
    ("error", "in_pytorch"),
    [
        (SessionError("made up", node="sin"), ["sin"]),
        (SessionError("made up", node="getitem"), ["max_1"]),
        (SessionError("made up", node="of_a_pass"), ["exp", "max_1", "sin"]),
        (KernelFaultError("made up", Reason(Kind.UPSTREAM_FAULT, "wrong"), None), ["exp", "max_1", "sin"]),
    ],
    ids=["a node", "a result", "no node", "a kernel"],
)
def test_a_region_that_is_refused_loses_the_node_that_is_named(
    error: SessionError, in_pytorch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all its nodes if none is."""
    refuse_once(error, monkeypatch)
    coverage = coverage_of(lambda x: x.exp().max(0).values.sin(), torch.randn(2, 3))
    assert [node.name for node in coverage.in_pytorch] == in_pytorch
    assert {reason.kind for reason in coverage.in_pytorch.values()} == {error.reason.kind}
    assert coverage.total == 3


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("std::bad_alloc"),
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bad allocation"),
        RuntimeError("bfc_arena.cc:376 Failed to allocate memory for requested buffer of size 1"),
        RuntimeError("pthread_create failed, error code: 11 error msg: Resource temporarily unavailable"),
    ],
)
def test_what_is_about_memory_is_told_from_what_is_about_the_model(error: Exception) -> None:
    model = Session(model_of("g (float[4] x) => (float[4] y) { y = Neg(x) }"), SessionSettings(CPU)).model
    said = session_error(error, model)
    assert said.reason.kind is Kind.OUT_OF_MEMORY
    assert str(said) == (str(error) or "MemoryError")


def test_the_error_of_a_translation_reaches_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(x: object) -> object:
        raise KeyError("not found")

    monkeypatch.setitem(CONVERTERS, aten.asinh.default, bad)
    coverage = coverage_of(lambda x: x.asinh().exp(), torch.randn(5))
    [(node, reason)] = coverage.in_pytorch.items()
    assert node.target is aten.asinh.default
    assert reason.kind is Kind.NO_TRANSLATION and "KeyError: 'not found'" in str(reason)


@pytest.mark.parametrize(("regions", "rest"), [(0, r"\bnone\b"), (1, r"\b1 region\b"), (2, r"\b2 regions\b")])
def test_the_warning_says_where_the_rest_runs(regions: int, rest: str, caplog: pytest.LogCaptureFixture) -> None:
    reason = Reason(Kind.NO_TRANSLATION, "no translation")
    CoverageCounts(regions, 3 * regions, [("aten.topk.default", reason, 1)]).log(GraphName(4, "inference"), "")
    (said,) = caplog.messages
    assert said.startswith(f"graph 4 inference: 1 of {3 * regions + 1} ") and re.search(rest, said)
    assert said.endswith(f"aten.topk.default x1 ({reason})")


def test_the_log_names_every_operator_in_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    meant, other = (
        ("aten.rand.default", Reason(Kind.RANDOM, "drawn"), 2),
        ("aten.sort.default", Reason(Kind.REJECTED, "no"), 1),
    )
    with caplog.at_level(logging.INFO, logger="dynamo_backends"):
        CoverageCounts(1, 5, [meant]).log(GraphName(0, "inference"), "a.py:1")
        CoverageCounts(1, 5, [meant, other]).log(GraphName(1, "inference"), "a.py:2")
    first, second = caplog.records
    assert first.levelno == logging.INFO and "aten.rand.default x2 (drawn)" in first.getMessage()
    assert second.levelno == logging.WARNING and "3 of 8" in second.getMessage()
    assert all(text in second.getMessage() for text in ("aten.rand.default x2 (drawn)", "aten.sort.default x1 (no)"))


def test_a_fallback_is_logged_once_and_counted_at_each_recompile(caplog: pytest.LogCaptureFixture) -> None:
    def values(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x.relu() + 1)

    function = torch.compile(values, backend="onnxrt", dynamic=False)
    for size in (2, 3, 4):
        function(torch.randn(size, size))
    assert sum("_linalg_svd" in message for message in caplog.messages) == 1
    assert counted("fallback aten._linalg_svd.default") == 3
    torch.compile(lambda x: torch.linalg.svdvals(x), backend="onnxrt")(torch.randn(2, 2))
    assert sum("_linalg_svd" in message for message in caplog.messages) == 2, "another line of the user"
