"""Execution providers other than the CPU's: what each is asked, what replaces it, and the messages.

Tests of OpenVINO run if ``onnxruntime-openvino`` is installed: ``python tests/with_openvino.py``.
"""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import json
import logging
import operator
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch import fx

from dynamo_backends.cache.program_record import from_record, to_record
from dynamo_backends.common import python_process
from dynamo_backends.debug.rows import Blame, GraphComparison, Row
from dynamo_backends.debug.verdict import with_precision
from dynamo_backends.dumps.blame import Cause, CauseKind
from dynamo_backends.errors import Kind, Reason, SessionError
from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.numerics.whole_graph import measure
from dynamo_backends.options import parse_options
from dynamo_backends.partition import program, regions
from dynamo_backends.partition.coverage import CoverageCounts
from dynamo_backends.partition.program import Program, RegionCode, RegionProgram
from dynamo_backends.partition.runnable_region import MOST_CHECKED, OnProvider, RunnableRegion
from dynamo_backends.runtime import subprocess_session
from dynamo_backends.runtime.executable import Executable
from dynamo_backends.runtime.node_support import AnswerCache
from dynamo_backends.runtime.ort_internals import IDENTITY
from dynamo_backends.runtime.provider_options import is_own
from dynamo_backends.runtime.providers import (
    Provider,
    as_precise_as_pytorch,
    fallbacks,
    float32_precision,
    with_threads,
)
from dynamo_backends.runtime.settings import SessionSettings
from dynamo_backends.runtime.subprocess_session import check_in_subprocess
from dynamo_backends.weights.region_session import RegionSession

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
AZURE = "AzureExecutionProvider"
FIRST, SECOND = "FirstExecutionProvider", "SecondExecutionProvider"

_PARTS = 8
"""A tenth of the operators, in so many tests, which xdist runs at once."""

needs_openvino = pytest.mark.skipif(
    OPENVINO not in onnxruntime.get_available_providers(),
    reason="onnxruntime-openvino is not installed; python tests/with_openvino.py installs it",
)


class Fake:
    """A session that computes something, and counts."""

    def __init__(self, compute: object) -> None:
        self.compute = compute
        self.calls = 0

    def __call__(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.calls += 1
        if isinstance(self.compute, str):
            raise SessionError(self.compute)
        return [self.compute(args[0])]  # type: ignore[operator]


def region() -> fx.GraphModule:
    """``x.exp()`` as the graph of a region."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    exp = graph.call_function(torch.ops.aten.exp.default, (x,))
    graph.output([exp])
    x.meta["val"] = exp.meta["val"] = torch.empty(3)
    return fx.GraphModule({}, graph)


def checked(**sessions: object) -> tuple[RunnableRegion, dict[str, Fake]]:
    """A region on the named providers, which compute the given results or raise the given text."""
    made = {name: Fake(compute) for name, compute in sessions.items()}

    def build(executable: Executable, args: object = ()) -> Fake:
        found = made[str(executable.settings.providers[0])]
        if found.compute == "refuses":
            raise SessionError("it refuses")
        return found

    first, *others = [Executable(b"", (), (), SessionSettings(tuple(list(made)[i:]))) for i in range(len(made))]
    providers = [OnProvider(first, build(first)), *map(OnProvider, others)]  # type: ignore[arg-type]
    name = GraphName(0, "inference")
    return RunnableRegion(name, 0, providers, in_pytorch, build, checked=region()), made  # type: ignore[arg-type]


def in_pytorch(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.exp()]


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1


X = torch.tensor([0.0, 1.0, 2.0])


@pytest.mark.parametrize(("fault", "event"), [(off_by_one, "wrong"), ("it fails", "failed")], ids=["wrong", "fails"])
def test_the_next_provider_takes_over_from_one_that_is_wrong_or_fails(
    fault: object, event: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong one for good; one that fails is tried again, less and less."""
    session, made = checked(**{FIRST: fault, SECOND: torch.exp, CPU: torch.exp})
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            torch.testing.assert_close(session(X), [X.exp()])
    assert [made[name].calls for name in (SECOND, CPU)] == [100, 0]
    assert made[FIRST].calls == counted(f"{event}_on_provider {FIRST}")
    assert made[FIRST].calls == 1 if event == "wrong" else 2 < made[FIRST].calls < 10
    [message] = [record.getMessage() for record in caplog.records]
    assert message.index(FIRST) < message.index(SECOND)


def test_a_provider_that_failed_for_a_while_is_used_again_and_still_checked() -> None:
    session, made = checked(**{FIRST: "it fails", SECOND: torch.exp, CPU: torch.exp})
    session(X)
    session(X[:2])
    made[FIRST].compute = lambda x: x.exp() if len(x) == 3 else x.exp() + 1
    for _ in range(4):
        session(X)
    before = made[SECOND].calls
    session(X)
    assert made[SECOND].calls == before
    torch.testing.assert_close(session(X[:2]), [X[:2].exp()])
    assert counted(f"wrong_on_provider {FIRST}") == 1


def test_a_region_whose_only_provider_failed_for_a_while_recovers() -> None:
    """As soon as one whose providers never wait: at the latest after as many calls as failed."""
    session, made = checked(**{FIRST: "it fails", CPU: "refuses"})
    for _ in range(100):
        torch.testing.assert_close(session(X), [X.exp()])
    failing = made[FIRST].calls
    assert failing < 10
    made[FIRST].compute = torch.exp
    for _ in range(101):
        session(X)
    assert made[FIRST].calls > failing
    assert counted("recovered_regions") == 1


def test_a_provider_that_refuses_is_passed_over_and_the_cpu_provider_is_not_checked() -> None:
    session, made = checked(**{FIRST: off_by_one, SECOND: "refuses", CPU: off_by_one})
    assert torch.equal(session(X)[0], X.exp() + 1)
    assert made[SECOND].calls == 0


def test_where_none_is_right_pytorch_runs_each_call() -> None:
    session, _ = checked(**{FIRST: off_by_one, CPU: "refuses"})
    for number in (1, 2):
        assert torch.equal(session(X)[0], X.exp())
        assert session.failures == number


def test_a_wrong_provider_is_told_of_even_if_the_others_fail(caplog: pytest.LogCaptureFixture) -> None:
    session, made = checked(**{FIRST: off_by_one, CPU: "no memory at the moment"})
    session(X)
    made[CPU].compute = torch.exp
    for _ in range(3):
        torch.testing.assert_close(session(X), [X.exp()])
    assert made[FIRST].calls == 1
    [message] = [record.getMessage() for record in caplog.records if FIRST in record.getMessage()]
    assert "differs from PyTorch" in message


def test_rounding_is_no_fault_and_each_of_the_first_sizes_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    session, _ = checked(**{FIRST: lambda x: x.double().exp().float(), CPU: torch.exp})
    monkeypatch.setattr(session, "_checked", lambda x: ran.append(len(x)) or [x.exp()])
    for size in (*range(1, 2 * MOST_CHECKED), 1):
        session(torch.rand(size))
    assert ran == list(range(1, MOST_CHECKED + 1))
    assert not counted(f"wrong_on_provider {FIRST}")


def test_threads_share_the_session_of_a_provider_that_takes_over() -> None:
    made: list[Fake] = []
    all_failed = threading.Barrier(3, timeout=10)

    def fail(x: torch.Tensor) -> torch.Tensor:
        all_failed.wait()
        raise SessionError("it fails")

    def build(executable: Executable, args: object = ()) -> Fake:
        made.append(Fake(torch.exp))
        time.sleep(0.1)
        return made[-1]

    first, second = [Executable(b"", (), (), SessionSettings(names)) for names in ((FIRST, CPU), (CPU,))]
    providers = [OnProvider(first, Fake(fail)), OnProvider(second)]  # type: ignore[arg-type]
    session = RunnableRegion(GraphName(0, "inference"), 0, providers, in_pytorch, build)  # type: ignore[arg-type]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for results in pool.map(session, [X] * 3):
            torch.testing.assert_close(results, [X.exp()])
    assert len(made) == 1


def test_the_only_provider_is_given_up_while_another_thread_runs_it() -> None:
    calls, runs, given_up = itertools.count(), threading.Event(), threading.Event()

    def compute(x: torch.Tensor) -> torch.Tensor:
        if next(calls) == 1:
            runs.set()
            given_up.wait(10)
        return x.exp() + (len(x) == 3)

    session, _ = checked(**{FIRST: compute})
    session(X[:2])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        results = pool.submit(session, X[:2])
        runs.wait(10)
        session(X)
        given_up.set()
        torch.testing.assert_close(results.result(), [X[:2].exp()])


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_only_the_provider_that_runs_keeps_a_session(fault: str) -> None:
    """A session has a copy of the weights."""
    made: list[weakref.ref[Fake]] = []

    def build(executable: Executable, args: object = ()) -> Fake:
        fake = Fake(off_by_one if fault == "wrong" and not made else torch.exp)
        made.append(weakref.ref(fake))
        return fake

    first, second = [Executable(b"", (), (), SessionSettings(names)) for names in ((FIRST, CPU), (CPU,))]
    providers = [OnProvider(first, build(first)), OnProvider(second)]  # type: ignore[arg-type]
    of = region() if fault == "wrong" else None
    session = RunnableRegion(GraphName(0, "inference"), 0, providers, in_pytorch, build, checked=of)  # type: ignore[arg-type]
    del providers
    if fault == "fails":
        made[0]().compute = "it fails"  # type: ignore[union-attr]
        session(X)
        made[0]().compute = torch.exp  # type: ignore[union-attr]
    for _ in range(3):
        session(X)
    gc.collect()
    assert [item() is not None for item in made] == ([False, True] if fault == "wrong" else [True, False])


def test_a_provider_without_memory_for_its_session_is_tried_again() -> None:
    session, made = checked(**{FIRST: "it fails", SECOND: "refuses"})
    build = session._build

    def without_memory(executable: Executable, args: Sequence[object]) -> Any:
        if made[SECOND].compute == "refuses":
            raise SessionError("no memory", Reason(Kind.OUT_OF_MEMORY, "no memory"))
        return build(executable, args)

    session._build = without_memory
    session(X)
    made[SECOND].compute = torch.exp
    for _ in range(3):
        torch.testing.assert_close(session(X), [X.exp()])
    assert made[SECOND].calls


@pytest.mark.parametrize("kept", [[(SECOND, CPU), (CPU,)], [(CPU,)], []])
def test_the_record_of_a_program_has_the_providers_that_take_over(kept: list[tuple[str, ...]]) -> None:
    """Without those on which a kernel is wrong."""
    code = fx.Graph()
    code.set_codegen(fx.graph._BoxedCodeGen())
    code.output([code.call_function(operator.getitem, (code.call_module("region_0"), 0))])
    first, *others = [Executable(b"", (), (), SessionSettings(names)) for names in ((FIRST, SECOND, CPU), *kept)]
    coverage = CoverageCounts(1, 1, ())
    part = RegionProgram(first, RegionCode.of(region().graph), tuple(others))
    options = types.SimpleNamespace(providers=(FIRST, SECOND, CPU))
    [read] = from_record(to_record(Program(code, {}, (part,), coverage), {}), None, options).regions  # type: ignore[arg-type]
    assert [other.settings.providers for other in read.others] == kept


@pytest.fixture
def azure_rejects(monkeypatch: pytest.MonkeyPatch) -> str:
    """A provider that rejects each region because of one node."""
    if AZURE not in onnxruntime.get_available_providers():
        pytest.skip("the installed ONNX Runtime has another second provider")
    make = program.RegionSession

    def rejecting(executable: Executable, *args: Any, **kwargs: Any) -> RegionSession:
        if executable.settings.providers[0] == AZURE:
            raise SessionError("it rejects cos", node="cos")
        return make(executable, *args, **kwargs)

    monkeypatch.delenv("DYNAMO_BACKENDS_PROVIDERS", raising=False)
    monkeypatch.setattr(program, "RegionSession", rejecting)
    return AZURE


def sin_and_cos(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos() + 1


@pytest.mark.parametrize("alone", [False, True])
def test_fallback_error_is_about_pytorch(alone: bool, azure_rejects: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another provider may run a region of which the first rejects a node, in the region or already alone."""
    asked = regions.reason_against_model

    def rejects_cos(model: ir.Model, providers: Any, **given: Any) -> SessionError | None:
        is_cos = any(node.op_type == "Cos" for node in model.graph)
        return SessionError("no cos") if is_cos and providers[0] == AZURE else asked(model, providers, **given)

    if alone:
        monkeypatch.setattr(regions, "reason_against_model", rejects_cos)
        monkeypatch.setattr(regions, "ANSWERS", AnswerCache())
    settings = {"options": {"fallback": "error", "check_providers": False, "providers": [azure_rejects, CPU]}}
    with torch.no_grad():
        assert_same_as_eager(sin_and_cos, X, settings=settings)
    assert counted("rejected_by_provider") == 1


def test_another_provider_runs_a_saved_graph_that_the_first_rejects(azure_rejects: str, tmp_path: Path) -> None:
    options = {"fallback": "error", "check_providers": False, "providers": [azure_rejects, CPU]}
    function = torch.compile(sin_and_cos, backend="onnxrt", fullgraph=True, options=options)
    with torch.no_grad():
        function.aot_compile(((X,), {})).save_compiled_function(str(tmp_path / "saved"))
        before = counted("rejected_by_provider")
        with (tmp_path / "saved").open("rb") as file:
            torch.testing.assert_close(torch.compiler.load_compiled_function(file)(X), sin_and_cos(X))
    assert counted("graphs_loaded") == 1
    assert counted("rejected_by_provider") == before + 1


def test_sessions_of_a_graph_are_freed_before_it_is_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their weights would be in memory twice."""
    made: list[weakref.ref[RegionSession]] = []
    alive: list[int] = []
    make = program.RegionSession

    def rejecting_once(*args: Any, **kwargs: Any) -> RegionSession:
        alive.append(sum(session() is not None for session in made))
        if len(alive) == 2:
            raise SessionError("it rejects cos", node="cos")
        session = make(*args, **kwargs)
        made.append(weakref.ref(session))
        return session

    monkeypatch.setattr(program, "RegionSession", rejecting_once)
    with torch.no_grad():
        function = compiled(lambda x: torch.special.bessel_j0(x.sin()).tan().cos(), options={"providers": [CPU]})
        function(X)
    assert alive == [0, 1, 0, 1]


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_precision_that_the_newer_setting_gives() -> None:
    """``torch.get_float32_matmul_precision`` raises once it was used."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert as_precise_as_pytorch(["CUDAExecutionProvider"], ["MatMul"]) == (
            ("CUDAExecutionProvider", {"use_tf32": "1"}),
        )
        x = torch.randn(3, 3)
        torch.testing.assert_close(compiled(lambda x: x @ x, options={"fallback": "error"})(x), x @ x)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.usefixtures("precision")
def test_a_provider_computes_float32_as_pytorch_is_set_to() -> None:
    def options(setting: str, *providers: Provider, operators: Sequence[str] = ("MatMul",)) -> list[object]:
        torch.set_float32_matmul_precision(setting)
        return [item[1] if isinstance(item, tuple) else {} for item in as_precise_as_pytorch(providers, operators)]

    def hint(setting: str, *providers: Provider) -> object:
        [found] = options(setting, *providers)
        return json.loads(found["load_config"])["CPU"]["INFERENCE_PRECISION_HINT"]  # type: ignore[index]

    assert options("highest", "CUDAExecutionProvider", CPU) == [{"use_tf32": "0"}, {}]
    assert options("high", "CUDAExecutionProvider", CPU) == [{"use_tf32": "1"}, {}]
    torch.set_float32_matmul_precision("highest")
    assert float32_precision([("CUDAExecutionProvider", {"use_tf32": "1"}), CPU]) is torch.float16
    assert float32_precision([("CUDAExecutionProvider", {"use_tf32": "0"}), CPU]) is torch.float32
    # PyTorch rounds convolutions by default, and products not; the provider has one switch.
    pairs = [(["Conv", "Relu"], "1"), (["Conv", "LSTM"], "1"), ([], "0")]
    pairs += [([kind, "Conv"], "0") for kind in ("MatMul", "Gemm", "FusedMatMul", "Attention", "Einsum")]
    for operators, expected in pairs:
        assert options("highest", "CUDAExecutionProvider", operators=operators) == [{"use_tf32": expected}]
    assert [hint(setting, OPENVINO) for setting in ("highest", "high", "medium")] == ["f32", "f32", "bf16"]
    of_the_user = (OPENVINO, {"precision": "ACCURACY", "cache_dir": "x"})
    assert options("medium", of_the_user) == [of_the_user[1]], "what the user wrote wins"
    mine = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "f16"}, "NPU": {"A": "1"}}), "device": "NPU"}
    [found] = options("medium", (OPENVINO, mine))
    config = json.loads(found["load_config"])  # type: ignore[index]
    assert hint("medium", (OPENVINO, mine)) == "f16" and config["NPU"] == {"A": "1"} and "GPU" in config
    assert options("medium", (OPENVINO, {"load_config": "a/file.json"})) == [{"load_config": "a/file.json"}]


@pytest.mark.usefixtures("precision")
def test_results_are_judged_by_the_precision_that_pytorch_allows() -> None:
    torch.set_float32_matmul_precision("medium")
    session, made = checked(**{FIRST: lambda x: x.exp().bfloat16().float(), CPU: torch.exp})
    session(X)
    assert made[CPU].calls == 0


def test_a_provider_with_threads_of_its_own_has_as_many_as_the_session() -> None:
    [(_, given), cpu] = with_threads([*as_precise_as_pytorch([OPENVINO, CPU]), FIRST], 3)
    assert cpu == (CPU, {}), "it runs all that is left"
    assert json.loads(given["load_config"])["CPU"] == {"INFERENCE_NUM_THREADS": "3", "INFERENCE_PRECISION_HINT": "f32"}
    assert all(is_own(OPENVINO, option, value) for option, value in given.items()), "a dump may have them"
    assert not is_own(OPENVINO, "load_config", json.dumps({"CPU": {"CACHE_DIR": "/tmp"}}))
    assert with_threads([(OPENVINO, {"num_of_threads": "1"})], 3) == [(OPENVINO, {"num_of_threads": "1"})]


def test_the_cpu_provider_comes_last_even_if_it_is_not_named() -> None:
    assert list(fallbacks([FIRST, SECOND])) == [(FIRST, SECOND), (SECOND,), (CPU,)]
    assert list(fallbacks([FIRST, CPU, SECOND])) == [(FIRST, CPU, SECOND), (CPU, SECOND)]


def test_a_provider_that_is_not_installed_is_an_error_with_its_package() -> None:
    with pytest.raises(ValueError, match="Available: .*CPUExecutionProvider.*onnxruntime-gpu"):
        parse_options({"providers": ["CUDAExecutionProvider"]})
    with pytest.raises(ValueError, match=f"Did you mean '{CPU}'"):
        parse_options({"providers": ["CPU"]})


def test_a_provider_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime itself takes the CPU provider instead."""
    monkeypatch.delenv("DYNAMO_BACKENDS_PROVIDERS", raising=False)  # which a run on another provider sets
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [FIRST, CPU])

    class WithoutFirst:
        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def get_providers(self) -> list[str]:
            return [CPU]

    monkeypatch.setattr(onnxruntime, "InferenceSession", WithoutFirst)
    with pytest.raises(ValueError, match=f"{FIRST}' does not start"):
        parse_options({"providers": [FIRST]})


def test_the_verdict_says_that_an_error_may_be_one_of_precision() -> None:
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    row = Row("mm", "aten.mm.default", dtype="float32", region=0)
    row.error = measure(exact.bfloat16().float(), exact)
    comparison = GraphComparison(Blame("mm", Cause(CauseKind.NODE), region=0), rows=[row])
    assert "rounding to bfloat16" in (note := with_precision(comparison, [OPENVINO, CPU]).note)
    assert "f32" in note
    assert not with_precision(comparison, [CPU]).note
    row.error = measure(exact.float() + 1, exact)
    assert not with_precision(comparison, [OPENVINO]).note, "that is no rounding"


def test_a_process_that_crashes_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And one that does not start, which is said once."""
    settings = SessionSettings((CPU,), threads=1)
    check_in_subprocess(IDENTITY, settings)
    with pytest.raises(SessionError, match="Identitz"):
        check_in_subprocess(IDENTITY.replace(b"Identity", b"Identitz"), settings)
    crashing = [sys.executable, "-c", "print('ready', flush=True); input(); import os; os.abort()"]
    monkeypatch.setattr(python_process, "worker_command", lambda module: crashing)
    monkeypatch.setattr(subprocess_session, "_CHECKER", subprocess_session._Checker())
    with pytest.raises(SessionError, match="crashed, exit code -6"):
        check_in_subprocess(IDENTITY, settings)
    monkeypatch.setattr(python_process, "worker_command", lambda module: [sys.executable, "-c", "import no_package"])
    monkeypatch.setattr(subprocess_session, "_CHECKER", subprocess_session._Checker())
    for _ in range(2):
        with pytest.raises(SessionError, match="No module named 'no_package'"):
            check_in_subprocess(IDENTITY, settings)
    assert len([record for record in caplog.records if "no_package" in record.getMessage()]) == 1


@needs_openvino
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("remainder", range(_PARTS))
def test_a_part_of_the_operators_on_openvino(remainder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All: ``tests/with_openvino.py --run tests/operators_sweep.py --mode values --dtype float32 --samples 1``."""
    from operators import compiled_difference, entries, is_random, samples

    monkeypatch.setenv("DYNAMO_BACKENDS_PROVIDERS", f"{OPENVINO},{CPU}")
    table = {name: op for name, op in entries().items() if torch.float32 in op.supported_dtypes("cpu")}
    for name in sorted(table)[remainder :: 10 * _PARTS]:
        sample = next(samples(table[name], torch.float32))
        if "jiterator" not in name and not is_random(table[name], sample):
            assert compiled_difference(table[name], sample) is None, name


def is_exact_with(hint: str) -> bool:
    """Whether OpenVINO with this configuration computes a product in float32: in bfloat16, errors are near 0.1."""
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[64, 256] x, float[256, 256] w) => (y) { y = MatMul(x, w) }'
    model = onnx.parser.parse_model(text).SerializeToString()
    session = onnxruntime.InferenceSession(
        model, providers=[OPENVINO, CPU], provider_options=[{"load_config": hint}, {}]
    )
    x, w = torch.randn(64, 256), torch.randn(256, 256)
    return bool(np.allclose(session.run(None, {"x": x.numpy(), "w": w.numpy()})[0], x @ w, atol=1e-3))


@needs_openvino
class TestOpenVino:
    """What was found in ``onnxruntime-openvino`` 1.24.1; the tests run there."""

    providers = (OPENVINO, CPU)

    def on(self, **options: object) -> dict[str, object]:
        return {"options": {"providers": list(self.providers), **options}}

    def test_a_model_runs_on_it_in_float32(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        assert_same_as_eager(model, torch.randn(4, 64), settings=self.on())
        assert counted("nodes_on_onnx") and not counted(f"wrong_on_provider {OPENVINO}")

    def test_what_it_computes_with_fewer_digits_runs_on_the_cpu_provider(self) -> None:
        hint = '{"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}}'
        model, x = torch.nn.Linear(256, 256), torch.randn(64, 256)
        if is_exact_with(hint):
            pytest.skip("this processor has no bfloat16: OpenVINO ignores the hint")
        given = (OPENVINO, {"load_config": hint})
        with torch.no_grad():
            torch.testing.assert_close(compiled(model, options={"providers": [given, CPU]})(x), model(x))
            torch._dynamo.reset()
            with pytest.raises(ValueError, match="digits of bfloat16"):
                compiled(model, options={"providers": [given]})(x)

    @pytest.mark.parametrize(
        "function", [torch.zeros_like, torch.log1p, lambda x: x.sigmoid().log1p()], ids=["constant", "log1p", "both"]
    )
    def test_what_ends_its_process_runs_elsewhere(self, function: object) -> None:
        for shape in ((), (3, 4)):
            assert_same_as_eager(function, torch.rand(shape), settings=self.on())  # type: ignore[arg-type]

    def test_options_that_it_does_not_know_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="Invalid OpenVINO EP option"):
            parse_options({"providers": [(OPENVINO, {"nonsense": "1"})]})
        with pytest.raises(ValueError, match="does not start"):
            parse_options({"providers": [(OPENVINO, {"device_type": "GPU.7"})]})

    def test_sizes_may_change(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        run = compiled(model, dynamic=True, **self.on())
        for size in (2, 3, 5):
            x = torch.randn(size, 8)
            torch.testing.assert_close(run(x), model(x))

    def test_it_trains(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32))
        assert_same_as_eager(model, torch.randn(4, 16), settings=self.on())
