"""Compiled functions that PyTorch saves and loads: ``aot_compile``, and its caches."""

from __future__ import annotations

import enum
import gc
import importlib
import itertools
import json
import linecache
import logging
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.ao.quantization.fx._decomposed
from conftest import assert_same_values, compiled, counted
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from dynamo_backends import keep_value_guards_unsafe, onnx_compiler
from dynamo_backends.cache import store
from dynamo_backends.cli import main
from dynamo_backends.errors import AheadOfTimeError, SessionError
from dynamo_backends.partition import program
from dynamo_backends.pipeline import pass_target, program_payload
from dynamo_backends.runtime import integer_kernels, kernel_faults
from dynamo_backends.runtime import providers as runtime_providers
from dynamo_backends.weights.changes import can_be_watched
from dynamo_backends.weights.region_session import RegionSession

PROGRAM = Path(__file__).parents[1] / "saved_models.py"


def test_what_one_process_saves_another_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Static and dynamic sizes, training, written arguments, views, numbers, parts in PyTorch, graph breaks. And what
    ``dynamo-backends show`` says of the files."""
    for command in ("save", "load"):  # with no cache in common
        names = ("DYNAMO_BACKENDS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        folders = {name: str(tmp_path / f"{command} {name}") for name in names}
        ended = subprocess.run(
            [sys.executable, PROGRAM, command, tmp_path],
            env={**os.environ, **folders, "DYNAMO_BACKENDS_CACHE": "1", "DYNAMO_BACKENDS_PLACEMENT": "measured"},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["functions"]["graphs_loaded"] > 30 and "regions" not in found["functions"]
    assert found["functions"]["constant_weights"] and found["functions"]["weight_refreshes"]
    assert found["cache"]["graphs_loaded"] and found["cache"]["constant_weights"]
    assert "graphs" not in found["cache"] and not found["dynamo"], "nothing is traced"
    (perceptron,) = show(tmp_path / "Perceptron_False_False", capsys, onnx=tmp_path / "models")
    assert sorted(perceptron["weights"]) == ["down.bias", "down.weight", "scale", "up.bias", "up.weight"]
    for file, graphs, weights in (("Perceptron_True_True", 2, 0), ("Complex_False_True", 1, 0), ("artifacts", 5, 5)):
        shown = show(tmp_path / file, capsys, onnx=tmp_path / "models")
        assert len(shown) >= graphs and max(len(graph["weights"]) for graph in shown) == weights
        assert any(graph["operators_on_onnx"] for graph in shown)
        assert all(graph["versions"] == program_payload.versions() for graph in shown)
        for region in (region for graph in shown for region in graph["regions"]):
            model = onnx.load(tmp_path / "models" / region["model"])
            onnx.checker.check_model(model)
            assert len(model.graph.node) == region["nodes"]
        assert any(graph["operators_in_pytorch"] for graph in shown) == (file != "Perceptron_True_True")


def show(file: Path, capsys: pytest.CaptureFixture[str], onnx: Path) -> list[dict[str, Any]]:
    """What ``dynamo-backends show --json`` says of a file."""
    assert main(["show", str(file), "--json", "--onnx", str(onnx)]) == 0
    shown: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert main(["show", str(file)]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("operators on ONNX Runtime", "onnxruntime "))
    return shown


def save(backend: object, path: Path, **options: object) -> object:
    """Saves a compiled perceptron, and returns it loaded."""
    function = torch.compile(perceptron, backend=backend, fullgraph=True, options=options or None)
    with torch.no_grad():
        function.aot_compile(((X,), {})).save_compiled_function(str(path))
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


X = torch.randn(3, 4)


def perceptron(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ x.t()).tanh()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PyTorch's caches are in a folder of this test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", "1")
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("options", [{"fallback": "error"}, {"placement": "fastest"}, {"weights": "inputs"}])
def test_options_are_saved(options: dict[str, object], tmp_path: Path) -> None:
    loaded = save("onnxrt", tmp_path / "function", **options)
    with torch.no_grad():
        assert_same_values(loaded(X), perceptron(X))
    assert counted("graphs_loaded") == 1


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("onnx_debug", {}, "debugging"),
        ("fx_debug", {}, "debugging"),
        ("onnxrt", {"verify_passes": True}, "verify_passes"),
        (aot_autograd(fw_compiler=onnx_compiler()), {}, "backend='onnxrt'"),
    ],
)
def test_what_cannot_be_saved_is_an_error(
    backend: object, options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(AheadOfTimeError, match=reason):
        save(backend, tmp_path / "function", **options)


def test_a_subgraph_cannot_be_saved() -> None:
    def either(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    function = torch.compile(either, backend="onnxrt", fullgraph=True)
    with torch.no_grad(), pytest.raises(AheadOfTimeError, match="subgraph"):
        function.aot_compile(((X,), {}))
    with torch.no_grad():
        assert_same_values(function(X), either(X))


def test_a_failed_compile_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dynamo_backends.pipeline.stages.split_graph", fails)
    with pytest.raises(ZeroDivisionError):
        save("onnxrt", tmp_path / "function")


def test_a_file_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save("onnxrt", tmp_path / "function")
    now = program_payload.versions()
    monkeypatch.setattr(program_payload, "versions", lambda: {**now, "onnxruntime": "99.9"})
    with (tmp_path / "function").open("rb") as file, pytest.raises(AheadOfTimeError, match="99.9"):
        torch.compiler.load_compiled_function(file)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_products_of_another_processor_are_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As if it was saved where products of uint8 with int8 are exact, and is loaded where they saturate."""
    weight, low, high = torch.ones(64, 8, dtype=dtype), torch.iinfo(dtype).min, torch.iinfo(dtype).max

    def product(x: torch.Tensor) -> torch.Tensor:
        dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default
        numbers = dequantize(weight, 0.1, 0, low, high, dtype)
        return dequantize(x, 0.1, 0, 0, 255, torch.uint8) @ numbers

    for module in (integer_kernels, kernel_faults, pass_target):
        monkeypatch.setattr(module, "mixed_signs_are_exact", lambda: True)
    with torch.no_grad():
        aot = compiled(product, fullgraph=True).aot_compile(((torch.zeros(32, 64, dtype=torch.uint8),), {}))
    assert counted("pass onnx.quantized_products") == 1
    aot.save_compiled_function(str(tmp_path / "product"))
    with (tmp_path / "product").open("rb") as file:
        torch.compiler.load_compiled_function(file)
    monkeypatch.setattr(integer_kernels, "mixed_signs_are_exact", lambda: False)
    is_refused = pytest.raises(AheadOfTimeError, match="processor") if dtype == torch.int8 else nullcontext()
    with (tmp_path / "product").open("rb") as file, is_refused:
        torch.compiler.load_compiled_function(file)


def test_a_damaged_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("onnxrt", tmp_path / "function")
    content = (tmp_path / "function").read_bytes()
    inside = content.index(b"dynamo-backends cache")
    changed = bytearray(content)
    changed[inside + 200] ^= 1
    for damaged, reason in (
        (changed, "damaged"),
        (content[:inside], "no graphs"),
        (b"text", "no graphs"),
        (b"", "no graphs"),
    ):
        (tmp_path / "damaged").write_bytes(damaged)
        with (
            (tmp_path / "damaged").open("rb") as file,
            pytest.raises((AheadOfTimeError, pickle.UnpicklingError, EOFError, RuntimeError)),  # the last: PyTorch 2.15
        ):
            torch.compiler.load_compiled_function(file)
        assert main(["show", str(tmp_path / "damaged")]) == 2
        assert reason in capsys.readouterr().err


class Executes:
    """What a pickle calls when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


def test_show_executes_nothing_and_names_files_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil").write_bytes(pickle.dumps([Executes(), pickle.dumps(Executes())]))
    assert main(["show", "evil"]) == 2
    assert "no graphs of onnxrt" in capsys.readouterr().err
    assert not Path("executed").exists()
    save("onnxrt", tmp_path / "function")
    [content] = store.encoded_in((tmp_path / "function").read_bytes())
    record = store.decoded(content, program_payload.FORMAT)
    for name in ([0, "/../../ab"], ["/../../ab", "inference"]):
        header = {**record.header, "graph": name}
        (tmp_path / "renamed").write_bytes(
            store.encoded(program_payload.FORMAT, store.StoredRecord(header, record.blobs))
        )
        assert main(["show", "renamed", "--onnx", "models"]) == 2
        assert "/../../ab" in capsys.readouterr().err and not list(tmp_path.rglob("*.onnx"))


@pytest.mark.parametrize("arguments", [["function", "--stage", "aten"], ["0", "--onnx", "models"], ["missing.pt2"]])
def test_arguments_of_show_that_do_not_fit(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "function").write_bytes(b"")
    assert main(["show", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err or arguments[0] == "0"


def test_guards_that_are_kept() -> None:
    """Those on sizes, dtypes and the grad mode; a module's class and functions may be others."""

    options = {"guard_filter_fn": keep_value_guards_unsafe}
    model = Scaled()
    function = torch.compile(model.forward, backend="onnxrt", fullgraph=True, options=options)
    with torch.no_grad():
        loaded = function.aot_compile(((X,), {}))
        assert_same_values(loaded(model, X), model(X))
        for other in (torch.randn(5, 4), X.double(), X.t().contiguous().t()):
            with pytest.raises(RuntimeError, match="GuardManager check failed"):
                loaded(model, other)
    with pytest.raises(RuntimeError, match="GuardManager check failed"):
        loaded(model, X)


@pytest.mark.parametrize("has_guards", [True, False])
def test_guards_of_other_backends_are_pytorchs(has_guards: bool, tmp_path: Path) -> None:
    """Their number of threads too; that a graph of ours runs with another is in the first test."""
    if has_guards:
        save("onnxrt", tmp_path / "of_ours")
    else:  # AOTAutograd's cache saves graphs without Dynamo's guards
        with functorch_config.patch(bundled_autograd_cache=True), torch.no_grad():
            compiled(torch.cos, options={"cache": False})(X)
    save("aot_eager", tmp_path / "of_theirs")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with (tmp_path / "of_theirs").open("rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
        with pytest.raises(RuntimeError, match="num_threads"), torch.no_grad():
            loaded(X)
    finally:
        torch.set_num_threads(threads)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS["gelu"](self.linear(x))


ACTIVATIONS = {"gelu": nn.functional.gelu}


SOURCE = """
import torch


def helper(x):
    x.mul_(2)


act = lambda x: x.sin()


class Other(torch.nn.Module):
    def forward(self, x):
        return x * 3


class Model(torch.nn.Module):
    def forward(self, x):
        x = x.clone()
        helper(x)
        return act(x) * 2"""


def test_changed_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed or longer function, a lambda, the end of the file; not comments, other functions or lines."""
    monkeypatch.syspath_prepend(tmp_path)
    module_file = tmp_path / "changing_model.py"
    module_file.write_text(SOURCE)
    model = importlib.import_module("changing_model").Model()
    function = torch.compile(model.forward, backend="onnxrt", fullgraph=True)
    with torch.no_grad():
        function.aot_compile(((X,), {})).save_compiled_function(str(tmp_path / "function"))

    def loaded() -> object:
        linecache.clearcache()
        with torch.no_grad(), (tmp_path / "function").open("rb") as file:
            return torch.compiler.load_compiled_function(file)(model, X)

    for old, new, name in (
        ("mul_(2)", "mul_(2)\n    x.add_(1)", "changing_model.helper"),
        ("sin", "cos", "changing_model"),
        ("act(x) * 2", "act(x) * 2 * 2", r"changing_model\.Model\.forward"),
        ("class Model", "class Another", r"changing_model\.Model\.forward"),
    ):
        module_file.write_text(SOURCE.replace(old, new))
        with pytest.raises(AheadOfTimeError, match=name):
            loaded()
    module_file.write_text("# another line\n" + SOURCE.replace("x * 3", "x * 4").replace("):", "):  # a comment"))
    assert_same_values(loaded(), (X * 2).sin() * 2)
    module_file.unlink()
    assert_same_values(loaded(), (X * 2).sin() * 2)


SCRIPT = """
import sys
import torch


def function(x):
    return x.sin() * 2


if __name__ == "__main__":
    with torch.no_grad():
        compiled = torch.compile(function, backend="onnxrt", fullgraph=True)
        compiled.aot_compile(((torch.ones(3),), {})).save_compiled_function("function")
"""


def test_a_script_saves_what_another_program_loads(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "script.py"], check=True, cwd=tmp_path)
    load = "import torch; print(torch.compiler.load_compiled_function(open('function', 'rb'))(torch.ones(3)).sum())"
    load = f"import sys, torch\nwith torch.no_grad(): {load.removeprefix('import torch; ')}"
    load += "\nassert not {'onnx', 'onnx_ir'} & {*sys.modules}, 'it imports libraries that create models'"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "tensor(5.0" in done.stdout, done.stderr
    (tmp_path / "script.py").write_text(SCRIPT.replace("* 2", "* 3"))
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "script.function has changed" in done.stderr
    other = SCRIPT.partition("if __name__")[0].replace("* 2", "* 4") + "\n" + load  # the function, defined once more
    (tmp_path / "other.py").write_text(other)
    done = subprocess.run([sys.executable, "other.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0 and "other.function has changed" in done.stderr
    (tmp_path / "script.py").unlink()
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "source of script is not found" in done.stderr


def test_show_lists_graphs_of_equal_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("onnxrt", tmp_path / "one")
    for function in (lambda x: x.sin() * 2, lambda x: x.sin() * 2):
        with torch.no_grad(), functorch_config.patch(bundled_autograd_cache=True):
            torch.compile(function, backend="onnxrt")(X)
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    (tmp_path / "artifacts").write_bytes(artifacts[0])
    shown = show(tmp_path / "artifacts", capsys, onnx=tmp_path / "models")
    for graph in shown:
        index = graph["graph"].split()[1]
        assert all(region["model"].startswith(f"{index}_inference") for region in graph["regions"])


class Kind(enum.Enum):
    SINE = 1
    COSINE = 2


def sine_or_cosine(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    return x.sin() if kind is Kind.SINE else x.cos()


def of_builtin(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return function(x)


def test_guards_on_values_that_are_no_tensors() -> None:
    """PyTorch cannot save that on a member of an Enum; the filter keeps it, so that the user hears of it."""
    options = {"guard_filter_fn": keep_value_guards_unsafe}
    with torch.no_grad():
        with pytest.raises(Exception, match="ID_MATCH"):
            torch.compile(sine_or_cosine, backend="onnxrt", fullgraph=True, options=options).aot_compile(
                ((X, Kind.SINE), {})
            )
        compiled = torch.compile(of_builtin, backend="onnxrt", fullgraph=True, options=options)
        loaded = compiled.aot_compile(((X, torch.sin), {}))
        assert_same_values(loaded(X, torch.sin), X.sin())
        with pytest.raises(RuntimeError, match="GuardManager check failed"):
            loaded(X, torch.cos)


def test_a_region_that_is_rejected_when_it_is_loaded_is_counted_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other region still runs on ONNX Runtime."""
    options = {"providers": ["CPUExecutionProvider"]}
    function = torch.compile(two_regions, backend="onnxrt", fullgraph=True, options=options)
    with torch.no_grad():
        function.aot_compile(((X,), {})).save_compiled_function(str(tmp_path / "saved"))
    make, calls, told = program.RegionSession, itertools.count(), []

    def fails_once(*args: Any, **kwargs: Any) -> RegionSession:
        if next(calls) == 1:
            raise SessionError("out of memory")
        return make(*args, **kwargs)

    monkeypatch.setattr(program, "RegionSession", fails_once)
    monkeypatch.setattr(program_payload, "reporting", lambda run, graph: told.append(graph) or run)
    with (tmp_path / "saved").open("rb") as file, torch.no_grad():
        assert_same_values(torch.compiler.load_compiled_function(file)(X), two_regions(X))
    [summary] = told
    assert (summary.on_onnx, summary.in_pytorch, [item.number for item in summary.fallbacks]) == (2, 2, [1, 1])


def two_regions(x: torch.Tensor) -> torch.Tensor:
    return torch.special.bessel_j0(x.sin().tan()).cos()


@pytest.mark.parametrize("fallback", ["pytorch", "error"])
def test_what_onnx_runtime_rejects_when_it_is_loaded(
    fallback: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = save("onnxrt", tmp_path / "function", fallback=fallback)

    def fails(*args: object, **kwargs: object) -> None:
        raise SessionError("out of memory")

    monkeypatch.setattr("dynamo_backends.partition.program.RegionSession", fails)
    with torch.no_grad():
        if fallback == "error":
            with pytest.raises(SessionError, match="out of memory"):
                loaded(X)
        else:
            assert_same_values(loaded(X), perceptron(X))
            assert counted("not_loaded") == 1 and not counted("graphs_loaded")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def _in_inference_mode(weight: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return weight.clone()


UNWATCHABLE = {
    "inference": _in_inference_mode,
    "expanded": lambda weight: weight[:1, :1].expand_as(weight),
    "every other row": lambda weight: weight.repeat_interleave(2, 0)[::2],
    "negated view": lambda weight: torch._neg_view(weight.clone()),
}


@pytest.mark.parametrize("how", UNWATCHABLE)
@pytest.mark.parametrize("is_every_weight", [False, True])
def test_weights_whose_changes_cannot_be_noticed_are_inputs_of_a_loaded_graph(
    how: str, is_every_weight: bool, tmp_path: Path
) -> None:
    options = {"weights": "checked"} if is_every_weight else {}
    options = {**options, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    with torch.no_grad():
        function = torch.compile(Two().eval().forward, backend="onnxrt", fullgraph=True, options=options)
        function.aot_compile(((X,), {})).save_compiled_function(str(tmp_path / "two"))
        with open(tmp_path / "two", "rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
        model = Two().eval()
        for factor in (1, 2, 3):
            for layer in [model.up, model.down] if is_every_weight else [model.up]:
                weight = UNWATCHABLE[how](layer.weight.detach() * factor)
                layer.weight = nn.Parameter(weight, requires_grad=False)
                assert not can_be_watched(layer.weight)
            assert_same_values(loaded(model, X), model(X))
    assert counted("graphs_loaded") == 1 and not counted("runtime_failures") and not counted("internal_failures")
    number = 1 + is_every_weight
    assert (counted("constant_weights"), counted("weights_left_inputs")) == (4 + 4 - number, number)  # saved and loaded


@pytest.mark.skipif(
    "AzureExecutionProvider" not in onnxruntime.get_available_providers(), reason="another build of ONNX Runtime"
)
@pytest.mark.parametrize("providers", [["AzureExecutionProvider"], ["CPUExecutionProvider", "AzureExecutionProvider"]])
def test_the_next_provider_runs_a_saved_graph_where_one_is_missing(
    providers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save("onnxrt", tmp_path / "function", providers=providers)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(runtime_providers, "_started", set())
    before = counted("rejected_by_provider")
    with (tmp_path / "function").open("rb") as file, caplog.at_level(logging.WARNING):
        loaded = torch.compiler.load_compiled_function(file)
    assert "AzureExecutionProvider" in caplog.text
    with torch.no_grad():
        assert_same_values(loaded(X), perceptron(X))
    assert counted("graphs_loaded") and not counted("not_loaded")
    assert counted("rejected_by_provider") == before + (providers[0] == "AzureExecutionProvider")


def test_autograd_s_cache_keeps_options_apart() -> None:
    """And other weights than those of the process that filled it are used."""
    model = nn.Linear(4, 4)
    with functorch_config.patch(bundled_autograd_cache=True), torch.no_grad():
        for options, hits in (({}, 0), ({}, 1), ({"opset": 18}, 1), ({"weights": "inputs"}, 1), ({}, 2)):
            torch._dynamo.reset()
            model.weight.mul_(1.1)
            assert_same_values(compiled(model, options=options)(X), model(X))
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
    assert counters["aot_autograd"]["autograd_cache_saved"] == 3
    assert counted("graphs_loaded") == 2


def test_arguments_that_overlap_are_not_those_that_do_not() -> None:
    def write_and_multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    with functorch_config.patch(bundled_autograd_cache=True), torch.no_grad():
        for overlaps in (False, True, True, False):
            torch._dynamo.reset()
            whole = torch.randn(8, 4)
            parts, others = (
                [part if overlaps else part.clone() for part in (memory[:4], memory[2:6])]
                for memory in (whole, whole.clone())
            )
            assert_same_values(compiled(write_and_multiply)(*parts), write_and_multiply(*others))
            assert_same_values(parts, others)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_saved_graphs_keep_no_weights_alive() -> None:
    model = nn.Linear(4, 4)
    with functorch_config.patch(bundled_autograd_cache=True), torch.no_grad():
        run = compiled(model)
        run(X)
        old = weakref.ref(model.weight)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        for _ in range(4):
            assert_same_values(run(X), model(X))
    gc.collect()
    assert old() is None


def test_what_autograd_s_cache_does_not_keep_is_counted() -> None:
    """A graph without a key would never be found; a part that cannot be saved."""

    def either(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with functorch_config.patch(bundled_autograd_cache=True), torch.no_grad():
        assert_same_values(compiled(perceptron, options={"verify_passes": True})(X), perceptron(X))
        assert counted("not_saved: a graph without a key") == 1
        assert_same_values(compiled(either)(X), either(X))
    assert not counters["aot_autograd"]["autograd_cache_saved"]
