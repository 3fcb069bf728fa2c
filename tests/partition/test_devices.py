"""Devices of results, without a GPU: which device is requested, and which stream waits for which."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from dynamo_backends.debug import node_sessions
from dynamo_backends.errors import Kind
from dynamo_backends.exporter.translate import translate
from dynamo_backends.graphs.artifacts import Region, RegionOutput
from dynamo_backends.graphs.layout import ROW_MAJOR
from dynamo_backends.partition.regions import Support
from dynamo_backends.pipeline.emission import output_specs
from dynamo_backends.runtime.binding import InputSpec, OutputSpec
from dynamo_backends.runtime.ort_internals import PublicCalls
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
