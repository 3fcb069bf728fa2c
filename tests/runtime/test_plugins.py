"""Execution providers that come as libraries: how they are found, chosen and checked, and what runs on them.

A library stays loaded until the process ends, and ONNX Runtime then lists its providers: tests that load one run in a
process of their own. OpenVINO's plugin only takes hardware of Intel; on other processors of x86-64 the tests use it
through ``as_intel.c``, where there is a C compiler.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted

from dynamo_backends import explain
from dynamo_backends.bench import measuring
from dynamo_backends.bench.case import split_mode
from dynamo_backends.bench.worker import _on_provider
from dynamo_backends.cli import main
from dynamo_backends.dumps.cut_folder import repro_text
from dynamo_backends.options import parse_options
from dynamo_backends.runtime import provider_libraries, subprocess_session
from dynamo_backends.runtime.ort_internals import IDENTITY
from dynamo_backends.runtime.precision_probe import STEPS, digits, is_enough, operands
from dynamo_backends.runtime.provider_libraries import add_providers, installed_plugins, is_built_in, plugin_of
from dynamo_backends.runtime.settings import SessionSettings
from dynamo_backends.runtime.subprocess_session import precise_enough

CPU, AZURE = "CPUExecutionProvider", "AzureExecutionProvider"
OPENVINO, WEBGPU = "OpenVINOExecutionProvider", "WebGpuExecutionProvider"
ON_DEVICE = (CPU, {"device": "CPU"})

pytestmark = pytest.mark.skipif(is_built_in(OPENVINO), reason="a build of ONNX Runtime with OpenVINO, no plugin")


def needs(name: str) -> pytest.MarkDecorator:
    plugin = plugin_of(name)
    return pytest.mark.skipif(plugin is None, reason=f"no package with {name} is installed")


def in_process(script: str, *arguments: str, **variables: str) -> Any:
    """What a script prints as JSON in its last line."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


# Chosen by device


def test_a_provider_that_is_built_in_runs_by_its_device() -> None:
    options = onnxruntime.SessionOptions()
    assert add_providers(options, [ON_DEVICE])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    assert_same_as_eager(model, torch.randn(4, 8), settings={"options": {"providers": [ON_DEVICE]}})
    assert counted("nodes_on_onnx") and not counted("nodes_in_pytorch")


def test_a_forked_child_makes_a_new_session_of_a_provider_that_is_built_in() -> None:
    options = onnxruntime.SessionOptions()
    add_providers(options, [ON_DEVICE])
    provider_libraries._renew()
    assert add_providers(onnxruntime.SessionOptions(), [ON_DEVICE])


def test_without_a_device_providers_that_are_built_in_are_given_by_name() -> None:
    options = onnxruntime.SessionOptions()
    assert not add_providers(options, [(CPU, {"use_arena": "0"})])
    assert not options.has_providers()


def test_a_device_that_is_not_there_is_an_error_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"no device 'GPU'; it has: CPU \("):
        parse_options({"providers": [(CPU, {"device": "GPU"})]})


def test_a_library_that_cannot_be_loaded_is_an_error_with_its_own_words() -> None:
    with pytest.raises(ValueError, match=r"/nowhere\.so: cannot open shared object file"):
        parse_options({"providers": [(OPENVINO, {"library": "/nowhere.so"})]})


# Found among the installed packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a package in a folder of its own, with the text of its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, text: str) -> None:
        (tmp_path / f"{name}-1.2.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.2\n"
        (tmp_path / f"{name}-1.2.dist-info" / "METADATA").write_text(metadata)
        (tmp_path / f"{name}.py").write_text(text)
        installed_plugins.cache_clear()

    yield install
    installed_plugins.cache_clear()


def test_an_installed_package_is_found_by_the_name_of_its_provider(package: Callable[[str, str], None]) -> None:
    names = "def get_ep_names(): return ['NewExecutionProvider']\n"
    package("onnxruntime_ep_new", f"{names}def get_library_path(): return '/nowhere/new.so'\n")
    found = plugin_of("NewExecutionProvider")
    assert found is not None and (found.package, found.version) == ("onnxruntime-ep-new", "1.2")
    assert plugin_of("NewExecutionProvider.AUTO") == found and plugin_of("NewerExecutionProvider") != found
    with pytest.raises(ValueError, match=r"/nowhere/new\.so cannot be loaded"):
        parse_options({"providers": ["NewExecutionProvider"]})
    with pytest.raises(ValueError, match="Did you mean 'NewExecutionProvider'"):
        parse_options({"providers": ["NweExecutionProvider"]})


def test_a_package_that_cannot_be_imported_is_named_where_a_provider_is_missing(
    package: Callable[[str, str], None],
) -> None:
    package("onnxruntime_ep_broken", "raise OSError('libvulkan.so.1 is missing')")
    with pytest.raises(ValueError, match=r"onnxruntime-ep-broken 1\.2 cannot be imported: OSError: libvulkan"):
        parse_options({"providers": ["OtherExecutionProvider"]})


def test_no_package_is_looked_for_where_providers_are_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_libraries, "installed_plugins", lambda: pytest.fail("it was"))
    with torch.no_grad():
        compiled(torch.nn.Linear(3, 4), options={"providers": [CPU]})(torch.randn(2, 3))


# Precision


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Values with so many significant bits."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent)


@pytest.mark.parametrize(("bits", "expected"), [(24, "float32"), (16, "float32"), (11, "float16"), (8, "bfloat16")])
@pytest.mark.parametrize("what", ["both", "argument", "weights", "result"])
def test_the_probe_tells_the_digits_of_a_product(bits: int, expected: str, what: str) -> None:
    weights = operands()["MatMul"][1]

    def run(x: np.ndarray) -> np.ndarray:
        x = rounded(x, bits) if what in ("both", "argument") else x
        w = rounded(weights, bits) if what in ("both", "weights") else weights
        return rounded(x @ w, bits if what == "result" else 24)

    assert digits("MatMul", run) == expected


def test_the_probe_tells_that_there_are_fewer_digits_than_any_dtype_has() -> None:
    assert digits("MatMul", lambda x: rounded(x, 4) @ operands()["MatMul"][1]) not in STEPS
    assert not is_enough("fewer", "bfloat16")
    assert is_enough("float32", "bfloat16") and not is_enough("bfloat16", "float16")


class Answering:
    """A subprocess that finds these digits."""

    def __init__(self, answer: object) -> None:
        self.answer, self.calls = answer, 0

    def ask(self, request: object) -> object:
        self.calls += 1
        return self.answer


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], Answering]]:
    def install(answer: object) -> Answering:
        checker = Answering(answer)
        monkeypatch.setattr(subprocess_session, "_CHECKER", checker)
        monkeypatch.setattr(subprocess_session, "_DIGITS", {})
        monkeypatch.setattr(subprocess_session, "_warned", set())
        return checker

    before = torch.get_float32_matmul_precision()
    yield install
    torch.set_float32_matmul_precision(before)


def test_a_provider_with_too_few_digits_is_an_error_or_the_next_one_is_used(
    answering: Callable[[object], Answering], caplog: pytest.LogCaptureFixture
) -> None:
    checker = answering({"MatMul": "float32", "Conv": "bfloat16"})
    with pytest.raises(ValueError, match=f"{AZURE}' computes Conv of float32 with the digits of bfloat16"):
        precise_enough([AZURE])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert precise_enough([AZURE, CPU]) == (CPU,)
            assert precise_enough([AZURE, AZURE]) == (CPU,)
    assert len(caplog.records) == 1 and checker.calls == 1
    torch.set_float32_matmul_precision("high")
    assert precise_enough([AZURE, CPU]) == (CPU,)
    torch.set_float32_matmul_precision("medium")
    assert precise_enough([AZURE, CPU]) == (AZURE, CPU)


@pytest.mark.parametrize("answer", [{"MatMul": None, "Conv": "float32"}, "it crashed"])
def test_a_provider_whose_digits_are_not_known_is_used(
    answer: object, answering: Callable[[object], Answering]
) -> None:
    answering(answer)
    assert precise_enough([AZURE, CPU]) == (AZURE, CPU)


def test_the_check_of_digits_is_off_with_that_of_results(answering: Callable[[object], Answering]) -> None:
    checker = answering({"MatMul": "bfloat16", "Conv": "bfloat16"})
    with torch.no_grad(), pytest.raises(ValueError, match="digits of bfloat16"):
        compiled(torch.sin, options={"providers": [AZURE]})(torch.randn(3))
    calls = checker.calls
    torch._dynamo.reset()
    with torch.no_grad():
        compiled(torch.sin, options={"providers": [AZURE], "check_providers": False, "placement": "onnx"})
    assert checker.calls == calls


# What follows the provider


@pytest.mark.skipif(AZURE not in onnxruntime.get_available_providers(), reason="another build of ONNX Runtime")
def test_a_graph_on_another_provider_is_kept_on_disk_and_still_compared(tmp_path: Path) -> None:
    options = {"cache": True, "cache_dir": str(tmp_path), "providers": [AZURE, CPU]}
    x = torch.randn(3)
    for event in ("cache_stored", "cache_hits"):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(compiled(torch.sin, options=options)(x), x.sin())
        assert counted(event) == 1


@pytest.mark.skipif(AZURE not in onnxruntime.get_available_providers(), reason="another build of ONNX Runtime")
def test_explain_says_what_the_first_provider_runs() -> None:
    with torch.no_grad():
        [graph] = explain(torch.sin, options={"providers": [AZURE, CPU]})(torch.randn(3)).graphs
        [on_cpu] = explain(torch.sin)(torch.randn(3)).graphs
    assert (graph.graphs[0].on_first_provider, on_cpu.graphs[0].on_first_provider) == (0, 1)


def test_a_column_of_the_bench_is_a_provider_with_its_options() -> None:
    assert split_mode(f"onnxrt:{CPU}") == ("onnxrt", CPU)
    assert split_mode(f"inductor:{CPU}") == (f"inductor:{CPU}", "")
    assert _on_provider(CPU, {"opset": 18}) == {"opset": 18, "providers": [CPU, CPU]}
    assert _on_provider(CPU, {"providers": [AZURE, ON_DEVICE]})["providers"] == [ON_DEVICE, CPU]


@needs(WEBGPU)
def test_the_settings_of_a_session_name_the_package() -> None:
    [package] = SessionSettings((WEBGPU, CPU)).as_json()["packages"]  # type: ignore[misc]
    plugin = plugin_of(WEBGPU)
    assert plugin is not None and package == f"onnxruntime-ep-webgpu {plugin.version}"
    assert SessionSettings((ON_DEVICE,)).as_json()["packages"] == []


def test_repro_py_takes_providers_by_device_without_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = repro_text({"session": {}})
    assert "from dynamo_backends" not in text
    (tmp_path / "a_repro.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    repro = importlib.import_module("a_repro")
    session = repro.session_of(IDENTITY, {"providers": [CPU], "provider_options": [{"device": "CPU"}]})
    assert session.get_providers() == [CPU]
    with pytest.raises(ValueError, match="'OtherExecutionProvider' is neither built into ONNX Runtime nor installed"):
        repro.session_of(IDENTITY, {"providers": ["OtherExecutionProvider"]})


# The command


def test_the_command_lists_providers_without_pytorch() -> None:
    script = """
        import contextlib, io, json, sys
        from dynamo_backends.cli import main
        with contextlib.redirect_stdout(io.StringIO()) as text:
            assert main(["providers"]) == 0
            assert main(["providers", "--json"]) == 0
        assert "torch" not in sys.modules
        said = text.getvalue()
        print(json.dumps([said, json.loads(said[said.index("{"):])]))
    """
    text, report = in_process(script)
    rows = {row["name"]: row for row in report["providers"]}
    assert rows[CPU]["devices"][0].startswith("CPU (")
    assert rows[CPU]["package"] == "onnxruntime" and rows[CPU]["version"] == onnxruntime.__version__
    for plugin in installed_plugins():
        assert all(rows[name]["package"] == plugin.package in text for name in plugin.names)


def test_the_command_says_what_providers_run_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(bench: measuring.Bench, cases: object) -> dict[str, Any]:
        row = {"status": "right", "message": "", "milliseconds": 2.0, "times_as_fast": 1.5, "events": {}}
        return {"cases": [{"message": "", "rows": dict.fromkeys(bench.settings.backends, row)}]}

    monkeypatch.setattr(measuring.Bench, "run", run)
    monkeypatch.setattr("dynamo_backends.cli.providers.provider_rows", lambda: rows)
    from dynamo_backends.cli.providers import ProviderRow

    rows = [ProviderRow(CPU, "onnxruntime", "1"), ProviderRow("x", "onnxruntime-ep-x", "1", note="no device")]
    assert main(["providers", "--model", "mlp", "--json"]) == 0
    eager, on_cpu = json.loads(capsys.readouterr().out)["runs"]
    assert eager["milliseconds"] == 2.0
    assert on_cpu == {
        "provider": CPU, "operators": 5, "on_provider": 5, "milliseconds": 2.0, "times_as_fast": 1.5, "result": "right",
    }  # fmt: skip
    assert main(["providers", "--model", "mlp"]) == 0
    assert "1.50" in capsys.readouterr().out


# Plugins that are installed


@needs(WEBGPU)
@needs(OPENVINO)
def test_virtual_devices_are_listed_and_chosen_and_do_not_run() -> None:
    script = """
        import json
        import onnxruntime
        from dynamo_backends.runtime.provider_libraries import *
        from dynamo_backends.runtime.ort_internals import IDENTITY

        said = []
        for name in ("WebGpuExecutionProvider", "OpenVINOExecutionProvider"):
            library = plugin_of(name).library
            onnxruntime.register_execution_provider_library(f"{name}.virtual", library)
            said.append([device_text(item) for item in devices_of(name) if is_virtual(item)])
        said.append(device_of("OpenVINOExecutionProvider", {"device": "5010"}).ep_metadata["npu_platform"])
        try:
            device_of("OpenVINOExecutionProvider", {"device": "TPU"})
        except ProviderError as error:
            said.append(str(error))
        for given in ({}, {"device": "GPU"}):
            options = onnxruntime.SessionOptions()
            assert add_providers(options, [("WebGpuExecutionProvider", given), ("CPUExecutionProvider", {})])
            options.log_severity_level = 4
            try:
                onnxruntime.InferenceSession(IDENTITY, options, enable_fallback=0)
            except Exception as error:
                said.append(str(error))
        from dynamo_backends.runtime.providers import check_providers
        try:
            check_providers(["WebGpuExecutionProvider"])
        except ValueError as error:
            said.append(str(error))
        print(json.dumps(said))
    """
    webgpu, openvino, chosen, unknown, *errors = in_process(script)
    assert len(webgpu) == 1 and webgpu[0].startswith("GPU") and "virtual" in webgpu[0]
    assert len(openvino) == 4 and all(text.startswith("NPU") for text in openvino)
    assert chosen == "5010" and "no device 'TPU'" in unknown and "NPU" in unknown
    assert len(errors) == 3 and all("virtual GPU device" in text for text in errors)


@needs(OPENVINO)
def test_a_plugin_without_a_device_is_an_error_with_the_hardware() -> None:
    script = f"""
        import json
        from dynamo_backends.runtime.provider_libraries import *
        try:
            device_of({OPENVINO!r}, {{}})
            print("null")
        except ProviderError as error:
            print(json.dumps(str(error)))
    """
    said = in_process(script)
    if said is None:
        pytest.skip("OpenVINO finds a device on this machine")
    assert "onnxruntime-ep-openvino" in said and "finds no device" in said and "CPU (" in said


@pytest.fixture(scope="module")
def openvino(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """The options with which OpenVINO has a device here, and environment variables."""
    plugin, compiler = plugin_of(OPENVINO), shutil.which("cc")
    assert plugin is not None
    script = f"""
        from dynamo_backends.runtime.provider_libraries import devices_of
        print(len(devices_of({OPENVINO!r})))
    """
    if in_process(script):
        return {}, {}
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux") or compiler is None:
        pytest.skip("OpenVINO finds no device on this machine, and there is no C compiler on Linux, x86-64")
    library = tmp_path_factory.mktemp("library") / "as_intel.so"
    source = Path(__file__).with_name("as_intel.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    variables = {"OPENVINO_PLUGIN": plugin.library}
    given = {"library": str(library)}
    script = f"""
        import json, sys
        from dynamo_backends.runtime.provider_libraries import devices_of
        print(len(devices_of({OPENVINO!r}, json.loads(sys.argv[1])["library"])))
    """
    if not in_process(script, json.dumps(given), **variables):
        pytest.skip("OpenVINO finds no device on this machine, not even as Intel's")
    return given, variables


RUN = f"""
    import json, os, sys
    import torch
    from torch._dynamo.utils import counters

    OPENVINO, CPU = {OPENVINO!r}, {CPU!r}
    given = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    x = torch.randn(16, 256)

    def run(*providers, **options):
        torch._dynamo.reset()
        counters["dynamo_backends"].clear()
        run.compiled = torch.compile(model, backend="onnxrt", options={{"providers": providers, **options}})
        return error()

    @torch.no_grad()
    def error():
        return float((run.compiled(x) - model(x)).abs().max())

    def counted(name):
        return counters["dynamo_backends"][name]
"""


@needs(OPENVINO)
def test_openvino_s_plugin_runs_in_float32_from_the_cache_and_saved(
    openvino: tuple[dict[str, str], dict[str, str]], tmp_path: Path
) -> None:
    given, variables = openvino
    script = f"""{RUN}
    said = []
    cached = {{"cache": True, "cache_dir": sys.argv[2]}}
    for _ in range(2):
        said.append([run((OPENVINO, given), CPU, **cached), counted("cache_hits"), counted("nodes_in_pytorch")])
    said.append([counted(f"{{event}}_on_provider {{OPENVINO}}") for event in ("wrong", "failed")])
    from dynamo_backends import explain
    with torch.no_grad():
        explained = explain(model, options={{"providers": [(OPENVINO, given), CPU]}})(x)
    said.append([explained.graphs[0].graphs[0].on_first_provider, sum(explained.graphs[0].graphs[0].on_onnx.values())])
    for options in ({{"precision": "FP32"}}, {{"device": "TPU"}}, {{"load_config": "nonsense"}}):
        try:
            run((OPENVINO, {{**given, **options}}))
        except ValueError as error_:
            said.append(str(error_))
    print(json.dumps(said))
    """
    first, second, failures, counts, *errors = in_process(script, json.dumps(given), str(tmp_path), **variables)
    assert max(first[0], second[0]) < 1e-4
    assert (first[1:], second[1:]) == ([0, 0], [1, 0])
    assert failures == [0, 0]
    assert counts[0] == counts[1] > 0
    ignored, no_device, not_started = errors
    assert "ignores the option 'precision'" in ignored and "load_config" in ignored
    assert "no device 'TPU'; it has: " in no_device
    assert "does not start with the options" in not_started


@needs(OPENVINO)
def test_openvino_s_plugin_is_not_used_with_fewer_digits_than_asked(
    openvino: tuple[dict[str, str], dict[str, str]],
) -> None:
    given, variables = openvino
    script = f"""{RUN}
    given["load_config"] = json.dumps({{"CPU": {{"INFERENCE_PRECISION_HINT": "bf16"}}}})
    said = [run((OPENVINO, given), check_providers=False), run((OPENVINO, given), CPU)]
    torch.set_float32_matmul_precision("medium")
    said.append(run((OPENVINO, given)))
    torch.set_float32_matmul_precision("highest")
    try:
        said.append(run((OPENVINO, given)))
    except ValueError as error_:
        said.append(str(error_))
    print(json.dumps(said))
    """
    unchecked, checked, allowed, said = in_process(script, json.dumps(given), **variables)
    if unchecked < 1e-5:
        pytest.skip("this processor has no bfloat16")
    assert checked < 1e-5 < allowed
    assert "digits of bfloat16" in said


@needs(OPENVINO)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_the_next_provider_runs_in_a_forked_child(openvino: tuple[dict[str, str], dict[str, str]]) -> None:
    """OpenVINO waits there for threads of the parent, without an end."""
    given, variables = openvino
    script = f"""{RUN}
    said = [run((OPENVINO, given), CPU)]
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([error(), counted(f"failed_on_provider {{OPENVINO}}")]).encode())
        os._exit(0)
    said.append(json.loads(os.read(read, 1000)))
    said.append(error())
    print(json.dumps(said))
    """
    before, (in_child, failed), after = in_process(script, json.dumps(given), **variables)
    assert max(before, in_child, after) < 1e-4 and failed == 1
