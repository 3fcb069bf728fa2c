"""Devices of results, without a GPU: which device is requested, and which stream waits for which."""

from __future__ import annotations

import dataclasses
import gc
import operator
from collections.abc import Callable, Mapping

import onnxruntime
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from dynamo_backends.debug import node_sessions
from dynamo_backends.errors import Kind, Reason
from dynamo_backends.exporter.signature import used_results
from dynamo_backends.exporter.translate import translate
from dynamo_backends.graphs import fake_tensors
from dynamo_backends.graphs.artifacts import Region, RegionOutput
from dynamo_backends.graphs.layout import ROW_MAJOR
from dynamo_backends.options import Options, parse_options
from dynamo_backends.partition.regions import Support, split_graph
from dynamo_backends.pipeline import emission
from dynamo_backends.pipeline.emission import output_specs
from dynamo_backends.pipeline.pass_target import pass_target
from dynamo_backends.runtime import providers
from dynamo_backends.runtime.binding import InputSpec, OutputSpec
from dynamo_backends.runtime.cuda_stream import SessionStream
from dynamo_backends.runtime.executable import Executable
from dynamo_backends.runtime.ort_internals import PublicCalls
from dynamo_backends.runtime.providers import fallbacks
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings
from dynamo_backends.runtime.tensors import ort_device

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 1)


def test_names_of_devices() -> None:
    public = PublicCalls()
    names = [(device.type, device.index or 0) for device in (CPU, FIRST, SECOND)]
    assert [public.device(*name) for name in names] == names
    for device, name in zip((CPU, FIRST, SECOND), names, strict=True):
        made, expected = ort_device(device), onnxruntime.OrtDevice.make(*name)
        assert (made.device_type(), made.device_id()) == (expected.device_type(), expected.device_id())


def graph_of_two() -> tuple[fx.Node, fx.Node]:
    """``x.sin()`` and its first size; ``x`` is on the meta device, which stands for any but the CPU."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    sin = graph.call_function(torch.ops.aten.sin.default, (x,))
    sin.meta["val"] = torch.empty(3, device="meta")
    size = graph.call_function(torch.ops.aten.sym_size.int, (sin, 0))
    size.meta["val"] = 3
    return sin, size


def test_each_result_is_on_its_own_device() -> None:
    sin, size = graph_of_two()
    outputs = [RegionOutput(sin), RegionOutput(size)]
    model = translate([sin, size], [node_sessions.RegionInput(sin.args[0])], outputs, opset=18)  # type: ignore[arg-type]
    region = Region(0, [sin, size], [], outputs, [ROW_MAJOR, ROW_MAJOR])
    for specs in (output_specs(region, model), [node_sessions.output_spec(output, "y") for output in outputs]):
        assert [spec.device.type for spec in specs] == ["meta", "cpu"], "a number is on the CPU"


def test_a_node_on_a_device_that_no_provider_serves_runs_in_pytorch() -> None:
    sin, _ = graph_of_two()
    reason = Support(18, ("CPUExecutionProvider",)).reason_against(sin)
    assert reason is not None and reason.kind is Kind.DEVICE


def test_a_copy_between_devices_runs_in_pytorch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    copy = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"device": FIRST})
    with FakeTensorMode():
        x.meta["val"], copy.meta["val"] = torch.empty(3), torch.empty(3, device=FIRST)
    reason = Support(18, ("CUDAExecutionProvider", "CPUExecutionProvider")).reason_against(copy)
    assert reason is not None and reason.kind is Kind.DEVICE


def session_of(argument: torch.device, result: torch.device) -> Session:
    sin, _ = graph_of_two()
    model = translate([sin], [node_sessions.RegionInput(sin.args[0])], [RegionOutput(sin)], opset=18)  # type: ignore[arg-type]
    inputs = [InputSpec("x", torch.float32, device=argument)]
    outputs = [OutputSpec(sin.name, torch.float32, device=result)]
    return Session(model, SessionSettings(("CPUExecutionProvider",)), inputs, outputs)


def test_a_run_waits_for_what_pytorch_still_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def synchronize(self) -> None:
            waited.append(self._device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    x = torch.ones(3)
    for argument, result, expected in ((CPU, CPU, []), (SECOND, CPU, [SECOND]), (FIRST, SECOND, [FIRST, SECOND])):
        waited.clear()
        session = session_of(argument, result)
        monkeypatch.setattr(session, "_devices", [ort_device(CPU)])  # there is no other here
        torch.testing.assert_close(session([x])[0], x.sin())
        assert waited == expected


def test_a_result_that_nobody_reads_is_not_compared() -> None:
    """On a GPU, batch normalization returns full statistics in inference; the translation returns empty ones."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    normalize = torch.ops.aten._native_batch_norm_legit_no_training.default
    call = graph.call_function(normalize, (x, weight, weight, weight, weight, 0.1, 1e-5))
    x.meta["val"], weight.meta["val"] = torch.empty(2, 16, 4, 4), torch.empty(16)
    call.meta["val"] = (torch.empty(2, 16, 4, 4), torch.empty(16), torch.empty(16))
    result = graph.call_function(operator.getitem, (call, 0))
    result.meta["val"] = call.meta["val"][0]
    support = Support(18, ("CPUExecutionProvider",))
    assert support.reason_against(call) is None
    mean = graph.call_function(operator.getitem, (call, 1))
    mean.meta["val"] = call.meta["val"][1]
    reason = support.reason_against(call)
    assert reason is not None and reason.kind is Kind.NO_TRANSLATION


def test_a_number_on_the_cpu_does_not_split_a_graph() -> None:
    def reason(factor: torch.Tensor) -> Kind | None:
        graph = fx.Graph()
        nodes = graph.placeholder("x"), graph.placeholder("factor")
        product = graph.call_function(torch.ops.aten.mul.Tensor, nodes)
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(3, device=FIRST)
        nodes[0].meta["val"], nodes[1].meta["val"], product.meta["val"] = x, factor, x
        found = Support(18, ("CUDAExecutionProvider", "CPUExecutionProvider")).reason_against(product)
        return found and found.kind

    assert reason(torch.empty(3)) is Kind.DEVICE
    assert reason(torch.empty(())) is not Kind.DEVICE  # here the provider is missing


def test_a_provider_is_only_tried_on_devices_that_it_reads() -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    openvino = ("OpenVINOExecutionProvider", {"device": "GPU"})
    assert list(fallbacks([cuda, openvino])) == [(cuda, openvino), (openvino,), (cpu,)]
    assert list(fallbacks([cuda, openvino], {"cpu", "cuda"})) == [(cuda, openvino)]
    assert list(fallbacks([openvino], {"cuda"})) == []


def test_the_default_providers_are_those_of_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(providers, "_told", set())
    given = parse_options({"providers": ["CPUExecutionProvider"]}, device="cuda")
    assert given.providers == ("CPUExecutionProvider",) and not caplog.records
    assert parse_options(device="cuda").providers == ("CPUExecutionProvider",)
    assert parse_options(device="cuda").weights == "inputs"
    assert [record.getMessage().count("onnxruntime-gpu") for record in caplog.records] == [1], "it is told once"
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(providers, "_started", {repr("CUDAExecutionProvider")})
    assert providers.default_providers("cuda") == ("CUDAExecutionProvider", "CPUExecutionProvider")
    monkeypatch.setattr(providers, "_started", set())
    assert providers.default_providers("cuda") == ("CPUExecutionProvider",), "it is there, and does not start"
    assert parse_options().providers == ("CPUExecutionProvider",)


class Stream:
    """In place of a GPU's stream: notes what happens on it."""

    def provider_options(self, given: Mapping[str, str]) -> Mapping[str, str]:
        return given

    def copy(self, results: Callable[[], object]) -> object:
        self.events.append("copy")
        return results()

    def __init__(self) -> None:
        self.events: list[str] = []

    def wait(self) -> None:
        self.events.append("wait")

    def run(self, launch: Callable[[], object]) -> object:
        self.events.append("run")
        return launch()


def test_a_session_is_not_freed_before_the_gpu_has_done_what_it_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(SessionStream, "of", lambda providers, devices: stream)
    session = session_of(CPU, CPU)
    session([torch.ones(3)])
    assert stream.events == ["run", "copy"], "no call waits; its sizes are not known, so that its results are copied"
    other = session.returning(session.outputs)
    del session
    assert "wait" not in stream.events
    del other
    gc.collect()
    assert stream.events[-1] == "wait"


def test_which_sessions_have_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"stream of {device}")
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    assert SessionStream.of([cuda, cpu], [CPU]) is None and SessionStream.of([cpu], [SECOND]) is None
    first, second = (SessionStream.of([cuda, cpu], [CPU, torch.device("cuda", i)]) for i in (0, 1))
    assert first is not None and second is not None
    assert first.provider_options({"device_id": "1", "x": "y"}) == {"x": "y", "user_compute_stream": "1"}
    assert second.provider_options({}) == {"device_id": "1", "user_compute_stream": "1"}
    settings = SessionSettings(((cuda, {"device_id": "0", "x": "y"}), cpu)).with_options(cuda, second.provider_options)
    assert settings.providers == ((cuda, {"x": "y", "device_id": "1", "user_compute_stream": "1"}), (cpu, {}))


def test_a_gpu_needs_no_threads() -> None:
    torch.set_num_threads(2)
    assert SessionSettings(("CUDAExecutionProvider", "CPUExecutionProvider")).current_threads == 1
    assert SessionSettings(("CUDAExecutionProvider",), threads=3).current_threads == 3
    assert SessionSettings(("CPUExecutionProvider", "CUDAExecutionProvider")).current_threads == 2


def test_a_session_runs_on_one_gpu() -> None:
    graph = fx.Graph()
    calls = []
    with FakeTensorMode():
        for i in range(2):
            x = graph.placeholder(f"x{i}")
            x.meta["val"] = torch.empty(3, device=f"cuda:{i}")
            for target in (torch.ops.aten.sin.default, torch.ops.aten.exp.default):
                x = graph.call_function(target, (x,))
                x.meta["val"] = torch.empty(3, device=f"cuda:{i}")
            calls.append(x)
    graph.output((*calls,))

    class Everything(Support):
        def reason_against(self, node: fx.Node) -> Reason | None:
            return None

    split = split_graph(fx.GraphModule({}, graph), Everything(18, ("CUDAExecutionProvider",)), {})
    [region] = split.regions
    assert {node.meta["val"].device.index for node in region.nodes} == {0}
    assert {reason.kind for reason in split.in_pytorch.values()} == {Kind.DEVICE}


def test_no_assertion_and_no_random_operator_is_probed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    aten = torch.ops.aten
    with FakeTensorMode():
        flag, x = torch.empty((), dtype=torch.bool, device="cuda:0"), torch.empty(2, 3, device="cuda:0")
        index = torch.empty(2, dtype=torch.int64, device="cuda:0")
        probed = {
            function
            for function, *args in (
                (aten._assert_async.default, flag),
                (aten._assert_async.msg, flag, "no"),
                (aten._functional_assert_async.msg, flag, "no", x),
                (aten.bernoulli.default, x),
                (aten.index_select.default, x, 0, index),
                (aten.sin.default, x),
                (aten.mm.default, x, x),
                (aten.convolution.default, x, x, None, [1], [0], [1], False, [0], 1),
            )
            if fake_tensors._needs_probe(function, args, {})
        }
    assert probed == {aten.sin.default, aten.mm.default, aten.convolution.default}


def test_results_that_are_read() -> None:
    def read(*indices: object) -> tuple[int, ...]:
        graph = fx.Graph()
        call = graph.call_function(torch.ops.aten.topk.default, (graph.placeholder("x"), 1))
        call.meta["val"] = (torch.empty(1), torch.empty(1))
        for index in indices:
            graph.call_function(operator.getitem, (call, index))
        return used_results(call)

    assert [read(1), read(0, 1, 1), read()] == [(1,), (0, 1), (0, 1)]
    assert [read(-1), read(slice(0, 1)), read(1, -2)] == 3 * [(0, 1)], "as a pass may write it"


class FakeStream:
    """In place of a stream of PyTorch's; ``order`` has the waits of all."""

    def __init__(self, number: int, order: list[str]) -> None:
        self.cuda_stream, self._order = number, order

    def wait_stream(self, other: FakeStream) -> None:
        self._order.append(f"{self.cuda_stream} waits for {other.cuda_stream}")

    def synchronize(self) -> None:
        self._order.append("the program waits")


@pytest.mark.parametrize("current", [0, 7])
def test_the_order_on_streams(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    default, mine = FakeStream(0, order), FakeStream(current, order)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mine)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current, raising=False)
    stream = SessionStream.of(["CUDAExecutionProvider"], [torch.device("cuda", 0)])
    assert stream is not None
    assert stream.run(lambda: order.append("run")) is None
    stream.copy(lambda: order.append("copy"))
    stream.wait()
    waits = ["0 waits for 7", "run", "7 waits for 0", "copy", "0 waits for 7"] if current else ["run", "copy"]
    assert order == [*waits, "the program waits"]


def test_the_memory_of_results_on_a_gpu_is_pytorchs() -> None:
    assert OutputSpec("y", torch.float32, sizes=(2, 3), device=FIRST).memory_sizes == (2, 3)
    assert OutputSpec("y", torch.float32, sizes=(2, 3), device=torch.device("meta")).memory_sizes is None


def test_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    assert providers.on_current_gpu([cuda, cpu]) == ((cuda, {"device_id": "1"}), cpu)
    assert providers.on_current_gpu([(cuda, {"device_id": "2"})]) == ((cuda, {"device_id": "2"}),)
    with providers.unchanged_gpu():
        current[0] = 0
    assert current == [1]
    current[0] = 0
    assert providers.on_current_gpu([cuda, cpu]) == (cuda, cpu)


def test_what_a_gpu_changes_for_passes_and_probes() -> None:
    cuda, cpu, openvino = "CUDAExecutionProvider", "CPUExecutionProvider", "OpenVINOExecutionProvider"
    assert [providers.needs_subprocess(item) for item in ([cuda, cpu], [cpu, openvino], [openvino])] == [False] * 2 + [
        True
    ]
    options = dataclasses.replace(Options(), threads=3)
    object.__setattr__(options, "providers", (cuda, cpu))
    target = pass_target(options, Support(23, (cpu,)))
    assert target.multiplies_bfloat16 and target.threads == 1 and target.providers == (cuda, cpu)


def test_an_executable_is_made_for_providers_that_reach_its_tensors() -> None:
    sin, _ = graph_of_two()
    model = translate([sin], [node_sessions.RegionInput(sin.args[0])], [RegionOutput(sin)], opset=18)  # type: ignore[arg-type]
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"

    def made(device: torch.device) -> list[list[str]]:
        inputs, outputs = (
            (InputSpec("x", torch.float32, device=device),),
            (OutputSpec("y", torch.float32, device=device),),
        )
        executable = Executable(b"", inputs, outputs, SessionSettings((cuda, cpu)))
        return [
            [str(item[0]) if isinstance(item, tuple) else item for item in each.settings.providers]
            for each in emission._on_providers(executable, model)
        ]

    assert made(FIRST) == [[cuda, cpu]] and made(CPU) == [[cuda, cpu], [cpu]]
