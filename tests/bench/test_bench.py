"""``dynamo-backends bench``: its measurements, its judgement of wrong results, and its errors for invalid arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import mmap
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_backends.bench import case, machine, measuring, models, processes, table, timing
from dynamo_backends.bench.case import Case, UsageError
from dynamo_backends.bench.loading import load
from dynamo_backends.bench.measuring import Bench, BenchSettings, CaseResult, Measurement, geometric_means
from dynamo_backends.bench.processes import Process, WorkerError
from dynamo_backends.bench.reference import CaseJudge, text_difference
from dynamo_backends.bench.steps import Steps, loss_of
from dynamo_backends.bench.worker import RequestHandler, error_line
from dynamo_backends.cli import main
from dynamo_backends.cli.bench import exit_code
from dynamo_backends.common import python_process
from dynamo_backends.numerics.function_runs import Recording, Rerun
from dynamo_backends.numerics.whole_graph import ResultCheck

FILE = '''
import os
import torch
from torch._dynamo import list_backends, register_backend


def linear():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)), torch.randn(3, 8)


def sizes():
    return linear()[0], torch.randn(3, 8), [torch.randn(5, 8)], (torch.randn(7, 8),)


def named():
    return linear()[0], {"input": torch.randn(3, 8)}


def wide():
    layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 32))
    return model, {"input": torch.randn(5, 64)}, {"input": torch.randn(7, 64)}


class Branching(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def branching():
    return Branching(32, 32), torch.randn(4, 32)


def convolution():
    """Its buffers change in training."""
    layers = [torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), torch.randn(2, 2, 6, 6)


def dropout():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)), torch.randn(3, 8)


class Random(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


class OnlyFloat32(torch.nn.Module):
    def forward(self, x):
        assert x.dtype is torch.float32
        return x + 1


def only_float32():
    return OnlyFloat32(), torch.randn(3)


@torch.library.custom_op("bench_test::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + float(os.urandom(1)[0])


noisy.register_fake(torch.empty_like)


class Noisy(torch.nn.Module):
    def forward(self, x):
        return noisy(x), x.exp()


def unstable():
    return Noisy(), torch.randn(3)


def failing():
    return torch.nn.Linear(2, 2), torch.randn(3)


def raising():
    return torch.nn.Linear(2, 2), {}["weights.pt"]


def random():
    return Random(), torch.randn(3)


def other_each_time():
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    return linear()


def text():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, eos_token_id=2
    )
    return LlamaForCausalLM(config), {"input_ids": torch.randint(3, 64, (2, 4))}


def not_a_pair():
    return torch.nn.Linear(2, 2)


def inputs_of_a_kind():
    return torch.nn.Linear(2, 2), "text"


def bench_wrong(gm, inputs):
    return lambda *args: tuple(out * 1.001 for out in gm(*args))


def bench_coarse(gm, inputs):
    return lambda *args: tuple(out * 1.1 for out in gm(*args))


def bench_later_wrong(gm, inputs):
    """Right in the first three calls: a result in memory that is used again, say."""
    calls = []

    def run(*args):
        calls.append(None)
        return tuple(out * (1 + (len(calls) > 3)) for out in gm(*args))

    return run


def bench_crash(gm, inputs):
    os.abort()


def bench_raise(gm, inputs):
    raise NotImplementedError("no such kernel\\nand more of it")


def bench_double(gm, inputs):
    return lambda *args: tuple(out.double() for out in gm(*args))


for backend in (bench_wrong, bench_crash):
    if backend.__name__ not in list_backends(exclude_tags=()):
        register_backend(backend)
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "bench_models.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(autouse=True)
def _grad_mode_and_path() -> Iterator[None]:
    """Restores the grad mode and ``sys.path``, which a worker changes in its own process; forgets what was compiled."""
    enabled, path = torch.is_grad_enabled(), list(sys.path)
    yield
    torch._dynamo.reset()  # else the models of many tests, which share a ``forward``, reach the limit of recompilations
    torch.set_grad_enabled(enabled)
    sys.path[:] = path


class InProcess:
    """A worker in this process, for tests that need no subprocess."""

    asked: list[tuple[str, dict[str, str]]] = []

    def __init__(self, timeout: float, environment: dict[str, str], keep: Callable[[str], None]) -> None:
        self._worker = RequestHandler()
        self._environment = environment

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append((what, self._environment))
        try:
            answer = getattr(self._worker, what)(**json.loads(json.dumps(arguments)))
        except UsageError as error:
            raise WorkerError(error.kind, str(error)) from None
        found: dict[str, Any] = json.loads(json.dumps(answer))
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[InProcess]]:
    import torch._inductor.config

    monkeypatch.setattr(measuring, "Process", InProcess)
    monkeypatch.setattr(InProcess, "asked", [])
    with torch._inductor.config.patch(freezing=False):  # which a worker sets for its whole process
        yield InProcess


def bench(*cases: Case, backends: str, **settings: Any) -> dict[str, Any]:
    wanted = {"rounds": 2, **settings}
    return Bench(BenchSettings(backends.split(","), **wanted), lambda text: None).run(cases)


def status(found: dict[str, Any], number: int = 0) -> dict[str, str]:
    return {name: row["status"] for name, row in found["cases"][number]["rows"].items()}


# ------------------------------------------------------------------------------------------------- the whole command


def test_the_command(file: str, tmp_path: Path) -> None:
    """Backends that are right, wrong, and bring their process down; in processes."""
    backends = f"eager,onnxrt,bench_wrong,bench_crash,{file}:bench_raise"
    command = [sys.executable, "-m", "dynamo_backends", "bench", f"{file}:linear", "--json", "-"]
    command += ["--backends", backends, "--rounds", "2", "--threads", "1", "--options", "opset=20"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    rows = found["cases"][0]["rows"]
    assert [row["status"] for row in rows.values()] == ["right", "right", "wrong", "crashed", "failed"]
    assert "SIGABRT" in rows["bench_crash"]["message"]
    assert rows[f"{file}:bench_raise"]["message"] == "NotImplementedError: no such kernel"
    assert "error " in rows["bench_wrong"]["message"]
    for name in ("eager", "onnxrt"):
        row = rows[name]
        assert len(row["rounds"]) == 2 and min(row["rounds"]) > 0
        assert row["milliseconds"] > 0 and row["first_seconds"] > 0
    assert rows["onnxrt"]["graphs"] == 1 and rows["onnxrt"]["events"]["nodes_on_onnx"] > 0
    if sys.platform == "linux":
        assert rows["onnxrt"]["peak_bytes"] > 10 * 2**20, "at least what was imported"
    for name in ("bench_wrong", "bench_crash"):
        assert rows[name]["milliseconds"] is None and rows[name]["rounds"] == [] and rows[name]["first_seconds"] is None
    for said in ("wrong", "crashed", "x eager", "onnxrt, first result", "round 1 of 2"):
        assert said in done.stderr, "with --json - the table is on standard error, as the progress is"


def test_help_lists_models_and_imports_no_pytorch() -> None:
    code = (
        "import sys\nfrom dynamo_backends.cli import main\n"
        "try: main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'onnxruntime', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*models.MODELS, *case.OWN_NAMES, "--decode"))


# ------------------------------------------------------------------------------------------------ processes that fail


READY = "print('ready', flush=True); "


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import time; time.sleep(60)", "timed out", "longer than 0.5 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("raise SystemExit(3)", "crashed", "exit code 3"),
        ("raise KeyError('x')", "crashed", "exit code 1: KeyError: 'x'"),
    ],
)
def test_a_process_that_gives_no_answer(code: str, kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_process, "worker_command", lambda module: [sys.executable, "-c", READY + code])
    with contextlib.closing(Process(0.5 if kind == "timed out" else 60, {})) as process:
        with pytest.raises(WorkerError, match=message) as caught:
            process.ask("load")
        assert caught.value.kind == kind
        with pytest.raises(WorkerError, match=message):
            process.ask("turn")


def test_what_a_process_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print('{\"ok\": {\"child\": %d}}' % p.pid)"
    code = f"{child}; sys.stdout.flush(); sys.stdin.read()"
    monkeypatch.setattr(python_process, "worker_command", lambda module: [sys.executable, "-c", READY + code])
    with contextlib.closing(Process(60, {})) as process:
        pid = process.ask("load")["child"]
    for _ in range(100):  # a signal takes its time
        if not _runs(pid):
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_compilers_find_empty_caches_and_downloads_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", "/downloads")
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/mine")
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE_DIR", "/ours")
    found = processes.fresh_caches(str(tmp_path))
    assert found["HF_HOME"] == "/downloads" and found["TORCH_HOME"] == "/mine/torch"
    places = ("XDG_CACHE_HOME", "DYNAMO_BACKENDS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    assert all(found[name].startswith(str(tmp_path)) for name in places)


# ----------------------------------------------------------------------------- what is right, in every kind of case


@pytest.mark.parametrize(
    ("function", "mode"),
    [("named", "inference"), ("convolution", "train"), ("random", "inference")],
)
def test_backends_that_are_right_have_times(file: str, function: str, mode: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:{function}", mode), backends="eager,onnxrt,dynamo_eager")
    assert set(status(found).values()) == {"right"}
    assert exit_code(found) == 0
    for name, row in found["cases"][0]["rows"].items():
        assert row["milliseconds"] > 0 and len(row["rounds"]) == 2, name
        assert row["tokens_per_second"] is None
    assert found["cases"][0]["rows"]["eager"]["times_as_fast"] == 1 and row["times_as_fast"] > 0


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("backend", ["bench_wrong", "bench_later_wrong", "bench_double"])
def test_a_wrong_result_has_no_time(file: str, backend: str, mode: str, in_process: type[InProcess]) -> None:
    """Also one that is wrong in a later call, or of another dtype than eager's."""
    found = bench(Case(f"{file}:linear", mode), backends=f"eager,{file}:{backend}")
    row = found["cases"][0]["rows"][f"{file}:{backend}"]
    assert row["status"] == "wrong" and row["milliseconds"] is None and row["rounds"] == []
    assert ("float64 instead of" in row["message"]) == (backend == "bench_double")
    assert exit_code(found) == 1
    assert "wrong" in table.table(found)


def test_a_backend_with_a_mode_trains(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:convolution", "train"), backends="onnxrt:max-autotune")
    assert set(status(found).values()) == {"right"}, found


def test_a_mode_may_follow_a_backend() -> None:
    assert case.split_mode("onnxrt:max-autotune") == ("onnxrt", "max-autotune")
    assert case.split_mode("file.py:make:reduce-overhead") == ("file.py:make", "reduce-overhead")
    assert case.split_mode("file.py:make") == ("file.py:make", "")
    assert case.split_mode("onnxrt") == ("onnxrt", "")


def test_gradients_are_judged(file: str) -> None:
    steps = Steps(wanted := Case(f"{file}:linear", "train"), loaded := load(wanted))
    reference = CaseJudge(steps)
    [results] = steps.results(loaded.model)
    assert len(results) == 1 + 4, "the output, and a gradient for each weight and bias"
    assert reference.difference([results]) == ""
    *others, last = results
    assert isinstance(last, torch.Tensor)
    assert reference.difference([[*others, last * 1.001]]).startswith("result 4: error ")
    assert "None instead of" in reference.difference([[*others, None]])
    assert "4 results instead of 5" in reference.difference([others])


LUCKY = """
import torch

class Total(torch.nn.Module):
    def forward(self, x):
        return x.sum()

def terms(seed):
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return torch.cat([x, -x + x.roll(1) * 1e-3])

def lucky():
    return Total(), terms(SEED)
"""


def test_eager_may_be_exact_by_luck(tmp_path: Path) -> None:
    """Of a result with few elements. Another order of additions has a larger error, and is right."""
    made: dict[str, Any] = {}
    exec(LUCKY, made)

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, x)

    def errors(seed: int) -> tuple[float, float]:
        x = made["terms"](seed)
        exact = float(x.double().sum())
        return abs(float(x.sum()) - exact) / abs(exact), abs(float(one_by_one(x)) - exact) / abs(exact)

    seed = max(range(300), key=lambda seed: errors(seed)[1] / (1e-6 + errors(seed)[0]))
    (tmp_path / "lucky.py").write_text(LUCKY.replace("SEED", str(seed)))
    steps = Steps(wanted := Case(f"{tmp_path}/lucky.py:lucky"), loaded := load(wanted))
    [x], actual = loaded.inputs[0].args, one_by_one(made["terms"](seed))
    alone = ResultCheck({0: x.sum()}, lambda seed: {0: x.double().sum()})
    assert alone.judge(0, actual).is_wrong, "without perturbed runs"
    reference = CaseJudge(steps)
    assert reference.difference([[actual]]) == ""
    assert "error" in reference.difference([[actual + 1e-4]])


def test_random_numbers_are_not_called_wrong(file: str) -> None:
    """Those of another compiler are others; eager's with its seed are right."""
    steps = Steps(wanted := Case(f"{file}:dropout", "train"), loaded := load(wanted))
    reference = CaseJudge(steps)
    assert reference.difference(steps.results(loaded.model)) == ""
    assert reference.difference([[torch.zeros(3, 8), None, None]]) != ""
    assert "random" in reference.unchecked


def test_what_is_not_checked_has_a_time_and_says_so(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:random"), backends=f"eager,{file}:bench_wrong")
    row = found["cases"][0]["rows"][f"{file}:bench_wrong"]
    assert row["status"] == "not checked" and row["milliseconds"] > 0
    assert "draws random numbers" in row["message"] and "not checked" in table.table(found)
    assert exit_code(found) == 0


def test_a_model_that_returns_other_numbers_each_time_is_not_called_right(
    file: str, in_process: type[InProcess]
) -> None:
    found = bench(Case(f"{file}:unstable"), backends=f"eager,{file}:bench_wrong")
    rows = list(found["cases"][0]["rows"].values())
    assert [row["status"] for row in rows] == ["not checked", "wrong"], "the other result is wrong"
    assert "bench_test.noisy" in rows[0]["message"]


def test_an_error_that_is_not_of_float64_is_told(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for a model that has no float64."""

    def fail(*args: object) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(Rerun, "_compute", fail)
    steps = Steps(wanted := Case(f"{file}:linear"), load(wanted))
    reference = CaseJudge(steps)
    assert reference.difference([[torch.zeros(3, 4)]]) and "a fault of ours" in reference.unchecked


def test_a_model_that_has_no_float64_is_judged_by_eager_with_other_roundings(
    file: str, in_process: type[InProcess]
) -> None:
    found = bench(Case(f"{file}:only_float32"), backends=f"eager,onnxrt,{file}:bench_wrong")
    assert list(status(found).values()) == ["right", "right", "wrong"]


def test_a_model_that_fails_in_eager_is_said_to(file: str, in_process: type[InProcess]) -> None:
    """Once, and nothing else is measured; the next case is."""
    found = bench(Case(f"{file}:failing"), Case(f"{file}:raising"), backends="eager,onnxrt")
    failing, raising = found["cases"]
    assert "raised RuntimeError: mat1 and mat2 shapes" in failing["message"] and not failing["rows"]
    assert re.search(r":raising' raised KeyError: 'weights.pt' \(.*\.py:\d+\)", raising["message"])
    assert exit_code(found) == 2


def test_sizes_take_turns(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:sizes", dynamic=True), backends="onnxrt,onnx_export")
    assert set(status(found).values()) == {"right"}
    assert found["cases"][0]["sizes"] == ["3x8", "5x8", "7x8"]
    assert found["cases"][0]["rows"]["onnxrt"]["graphs"] == 1, "compiled once for all sizes"


def test_the_export_is_for_inference(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:linear", "train"), backends="eager,onnx_export")
    assert status(found) == {"eager": "right", "onnx_export": "not supported"}
    assert exit_code(found) == 0


@pytest.mark.parametrize("cache", case.CACHES)
def test_decoding(file: str, cache: str, in_process: type[InProcess]) -> None:
    wanted = Case(f"{file}:text", "decode", cache=cache, tokens=3)
    found = bench(wanted, backends="eager,dynamo_eager")
    assert set(status(found).values()) == {"right"}
    row = found["cases"][0]["rows"]["dynamo_eager"]
    assert row["graphs"] >= 1, "its forward is compiled"
    assert row["tokens_per_second"] == pytest.approx(2 * 3 / row["milliseconds"] * 1e3), "two rows"
    assert found["cases"][0]["prompt_tokens"] == 2 * 4 and len(row["prefills"]) == len(row["rounds"]) == 2
    assert all(0 < prefill < call for prefill, call in zip(row["prefills"], row["rounds"], strict=True))
    prefill = sum(row["prefills"]) / 2
    assert row["prefill_tokens_per_second"] == pytest.approx(2 * 4 / prefill * 1e3)
    assert row["decode_tokens_per_second"] == pytest.approx(2 * 2 / (row["milliseconds"] - prefill) * 1e3)
    assert re.search("tokens/s +prefill/s +decode/s", table.table(found))


def test_a_text_with_wrong_logits_is_wrong(file: str) -> None:
    steps = Steps(wanted := Case(f"{file}:text", "decode", cache="dynamic", tokens=3), loaded := load(wanted))
    reference = CaseJudge(steps)
    [(tokens, logits)] = steps.results(loaded.model)
    assert reference.difference([[tokens, logits]]) == ""
    assert "logits" in reference.difference([[tokens, logits * 1.001]])


def test_texts_may_part_where_two_tokens_are_equally_likely() -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0]], [[3.0, 0.0, 1.0]]])
    eager = [torch.tensor([[1, 0]]), logits]

    def check(second: torch.Tensor, moved: torch.Tensor | None = None) -> ResultCheck:
        exact = second.double()
        return ResultCheck(
            {0: eager[0], 1: second}, lambda seed: {1: exact if seed is None or moved is None else moved}
        )

    other = torch.cat([logits[:1], torch.tensor([[[0.0, 9.0, 0.0]]])])  # after another first token
    assert text_difference(check(logits), [torch.tensor([[2, 1]]), other]) == ""
    assert "at element [1, 0, " in text_difference(check(logits), [torch.tensor([[1, 1]]), other])
    assert "not the likeliest" in text_difference(check(logits), [torch.tensor([[0, 1]]), other])
    assert "instead of" in text_difference(check(logits), [torch.tensor([[1]]), logits[:1]])
    moved = [eager[0], logits * 1.001]
    assert text_difference(check(logits), moved) != ""
    assert text_difference(check(logits, moved[1].double()), moved) == ""


@pytest.mark.parametrize("name", ["deit", "mlp", "t5"])
def test_models_of_the_list_are_built_the_same_in_each_process(name: str) -> None:
    first, second = load(Case(name)), load(Case(name))
    assert first.fingerprint() == second.fingerprint()
    assert not first.model.training and len(first.inputs) == 1
    assert len(load(Case(name, dynamic=True)).inputs) == 3


@pytest.mark.parametrize("name", models.PUBLISHED)
def test_published_sizes_are_those_of_the_documentation(name: str) -> None:
    with torch.device("meta"):
        model = models.PUBLISHED[name].build()
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    assert f"\n| `{name}` | {models.PUBLISHED[name].summary} | {millions:,.1f} |\n" in page


@torch.no_grad()
def test_a_published_model_runs() -> None:
    wanted = Case("electra", published=True)
    [logits] = Steps(wanted, loaded := load(wanted)).results(loaded.model)[0]
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 128, 30_522)
    assert wanted.label == "electra: published, inference"


def test_a_model_in_another_dtype(in_process: type[InProcess]) -> None:
    wanted = Case("mlp", dtype="bfloat16")
    assert wanted.label == "mlp: inference, bfloat16"
    assert bench(wanted, backends="eager,onnxrt")["cases"][0]["rows"]["onnxrt"]["status"] == "right"
    loaded = load(wanted)
    assert {tensor.dtype for tensor in loaded.tensors} == {torch.bfloat16}


# --------------------------------------------------------------------------------------------------- quantized models


@pytest.mark.parametrize("scheme", case.SCHEMES)
def test_a_quantized_model_is_compared_with_itself_in_eager(
    file: str, scheme: str, in_process: type[InProcess]
) -> None:
    found = bench(Case(f"{file}:wide", quantize=scheme, dynamic=True), backends=f"eager,onnxrt,{file}:bench_coarse")
    assert status(found) == {"eager": "right", "onnxrt": "right", f"{file}:bench_coarse": "wrong"}, found
    assert scheme in table.table(found)


def test_a_quantized_model_generates(file: str, in_process: type[InProcess]) -> None:
    wanted = Case(f"{file}:text", "decode", cache="dynamic", tokens=2, quantize="int8-dynamic")
    found = bench(wanted, backends="eager,dynamo_eager", rounds=1)
    assert set(status(found).values()) == {"right"}


@pytest.mark.parametrize("scheme", ["int8-weights", "int8-dynamic"])
def test_only_what_rounding_does_to_a_quantized_model_is_right(scheme: str, file: str) -> None:
    """An input may round to the next integer; a result that is further away is wrong."""
    worker = RequestHandler()
    worker.load({"model": f"{file}:wide", "quantize": scheme}, "eager")
    judge = CaseJudge(worker.steps)
    with Rerun(Recording(), 99, is_wide=False):
        [[other]] = worker.steps.results(worker.loaded.model)
    [[eager]] = worker.steps.results(worker.loaded.model)
    assert not torch.equal(eager, other)  # type: ignore[arg-type]
    assert judge.difference([[other]]) == ""
    assert "error" in judge.difference([[eager * 1.1]])  # type: ignore[operator]
    assert "error" in judge.difference([[eager + 0.1 * torch.randn_like(eager)]])  # type: ignore[operator, call-overload]


# --------------------------------------------------------------------------------------------------------- the rounds


def test_other_weights_in_each_process_are_seen(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:other_each_time"), backends="eager")
    row = found["cases"][0]["rows"]["eager"]
    assert row["status"] == "failed" and "seed" in row["message"]


def test_turns_and_caches(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:linear"), backends="eager,dynamo_eager", again=True)
    assert all(row["again_seconds"] > 0 for row in found["cases"][0]["rows"].values())
    assert "again s" in table.table(found)
    caches = [environment["XDG_CACHE_HOME"] for what, environment in in_process.asked if what == "first"]
    assert len(set(caches)) == 2 and caches[2:] == caches[:2], "fresh, and those of the first again"
    turns = [environment["XDG_CACHE_HOME"] for what, environment in in_process.asked if what == "turn"]
    assert turns == [*caches[:2], *caches[:2]], "in turn"


def test_json_has_all_that_was_measured(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:linear"), Case(f"{file}:linear", "train"), backends="eager,dynamo_eager")
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {
        "schema", "started", "seconds", "interrupted", "machine", "settings", "cases", "times_as_fast"
    }  # fmt: skip
    assert found["schema"] == measuring.SCHEMA
    assert {"processor", "cores", "versions", "threads"} <= set(found["machine"])
    fields = set(Measurement.__dataclass_fields__)
    for item in found["cases"]:
        assert set(item) == {*CaseResult.__dataclass_fields__, "label"}
        assert all(set(row) == fields for row in item["rows"].values())
    means = found["times_as_fast"]["dynamo_eager"]
    assert means["cases"] == 2 and 0 < means["worst"] <= means["geometric_mean"]
    assert "geometric mean" in table.table(found)


def test_a_model_that_is_not_there_does_not_end_the_others(file: str, in_process: type[InProcess]) -> None:
    found = bench(Case(f"{file}:linear"), Case(f"{file}:nothing"), backends="eager")
    assert found["cases"][0]["rows"]["eager"]["status"] == "right"
    said = " ".join(table.table(found).split())  # a path of any length may break its lines anywhere
    assert "unknown function" in found["cases"][1]["message"] and "unknown function" in said
    assert exit_code(found) == 2


def test_what_was_done_before_an_interruption_is_kept(
    file: str, in_process: type[InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = in_process.ask

    def interrupted(self: InProcess, what: str, **arguments: Any) -> dict[str, Any]:
        if what == "turn" and arguments_of_load[-1] == "train":
            raise KeyboardInterrupt
        if what == "load":
            arguments_of_load.append(arguments["case"]["mode"])
        return ask(self, what, **arguments)

    arguments_of_load: list[str] = []
    monkeypatch.setattr(in_process, "ask", interrupted)
    cases = [Case(f"{file}:linear"), Case(f"{file}:linear", "train")]
    found = Bench(BenchSettings(["eager"], rounds=2), lambda text: None).run(cases)
    assert len(found["cases"]) == 1 and found["interrupted"]
    assert exit_code(found) == 2
    with pytest.raises(KeyboardInterrupt):
        Bench(BenchSettings(["eager"]), lambda text: None).run(cases[1:])


def result_of(model: str, **milliseconds: list[float]) -> CaseResult:
    result = CaseResult(Case(model), rows={name: Measurement(rounds=values) for name, values in milliseconds.items()})
    result.summarize()
    return result


def test_geometric_means_are_of_cases_both_are_right_on() -> None:
    results = [
        result_of("a", one=[2.0, 20.0, 4.0], two=[1.0, 10.0, 2.0]),  # busy in the second round
        result_of("b", one=[1.0], two=[2.0]),
        result_of("c", one=[1.0], two=[]),
        CaseResult(Case("d"), message="failed: it was not there"),
    ]
    found = geometric_means(results, ["one", "two"])
    assert found["two"]["geometric_mean"] == pytest.approx(1.0)
    assert found["two"]["worst"] == 0.5 and found["two"]["worst_case"] == "b: inference"
    assert found["two"]["cases"] == 2 and results[2].rows["two"].times_as_fast is None


# -------------------------------------------------------------------------------------------------------- measuring


def test_the_first_call_of_a_turn_is_not_timed() -> None:
    calls = []

    def call() -> None:
        calls.append(None)
        time.sleep(0.2 if len(calls) == 1 else 0)

    assert timing.milliseconds(call) < 100
    assert len(calls) > 10, "short calls are timed together"


def test_memory_is_that_of_this_process() -> None:
    if machine.resident() is None or not machine.reset_peak():
        pytest.skip("not on Linux, or /proc is not writable")
    before = machine.resident()
    with mmap.mmap(-1, 64 * 2**20) as block:  # the system's: malloc may have as much free that is resident already
        block[::4096] = b"x" * len(range(0, len(block), 4096))
        held = machine.resident()
    assert before is not None and held is not None and held - before > 60 * 2**20
    assert machine.peak() > held - 2**20  # type: ignore[operator]  # the system counts in batches of pages
    machine.reset_peak()
    assert machine.peak() < held - 60 * 2**20  # type: ignore[operator]


def test_a_turn_ends_when_its_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """A clock of a machine on which other threads of the process are busy until a given time."""

        now, busy_until = 0.0, 0.2

        def perf_counter(self) -> float:
            return self.now

        def process_time(self) -> float:
            return min(self.now, self.busy_until)

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    timing.wait_until_quiet(longest=0.05)
    assert clock.now < clock.busy_until
    timing.wait_until_quiet(longest=30)
    assert clock.busy_until <= clock.now < 0.5


def test_loss() -> None:
    x = torch.tensor([1.0, 3.0])
    assert loss_of({"loss": x[0], "logits": x}) == 1
    assert loss_of((torch.tensor([1, 2]), x)) == 5
    assert loss_of(x.sum()) == 4
    with pytest.raises(ValueError, match="no floating-point"):
        loss_of(torch.tensor([1]))


# ----------------------------------------------------------------------------------------- what is asked for wrongly


def said_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code = main(["bench", *arguments])
    except SystemExit as caught:  # the parser's
        code = int(str(caught.code))
    assert code == 2
    return "".join(capsys.readouterr())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("arguments", "datum"),
    [
        (["bertt"], "'bertt'.*'bert'"),
        (["nowhere.py:make"], "nowhere.py"),
        ([":make"], "file.py:function"),
        (["some-thing:make"], "some-thing"),
        (["bert", "--backends", "eager,,"], "--backends"),
        (["bert", "--backends", "eager,eager"], "'eager' twice"),
        (["bert", "--backends", "nowhere.py:make"], "nowhere.py"),
        (["bert", "--tokens", "8"], "--tokens.* --decode"),
        (["bert", "--train", "--decode"], "--decode.* --train"),
        (["bert", "--rounds", "0"], "--rounds.* 1"),
        (["bert", "--quantize", "int3"], "--quantize.* 'int3'.*int8-weights"),
        (["mlp", "--quantize", "int8-weights", "--train"], "--quantize.* --train"),
        (["bert", "--options", "opset"], "NAME=VALUE"),
        (["bert", "--json", "no/such/folder/x.json"], "no/such/folder"),
        (["bert", "--json", "."], "directory"),
        (["mlp", "--published"], "--published: 'mlp'.*'?bert"),
        (["file.py:make", "--published"], "--published: 'file.py:make'"),
        ([], "MODEL"),
    ],
)
def test_bad_arguments(arguments: list[str], datum: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(datum, said_of(arguments, capsys))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (["{file}:linera"], ["linera", "'linear'"]),
        (["{file}:not_a_pair"], ["not_a_pair", "(model, inputs)"]),
        (["{file}:inputs_of_a_kind"], ["inputs_of_a_kind", "(model, inputs)"]),
        (["json:dumps2"], ["json", "dumps2"]),
        (["no_such_module:make"], ["'no_such_module'"]),
        (["{file}:linear", "--dynamic"], ["--dynamic"]),
        (["{file}:linear", "--decode"], ["--decode", "generate()"]),
        (["mlp", "--decode"], ["--decode", "mlp", "llama"]),
        (["mlp", "--device", "nosuch"], ["--device nosuch", "cuda"]),
        (["{file}:only_float32", "--quantize", "int8-weights"], ["int8-weights", "nothing to quantize", "nn.Linear"]),
        (["mlp", "--backends", "onnxr"], ["'onnxr'", "'onnxrt'"]),
        (["mlp", "--backends", "{file}:nothing"], ["nothing"]),
        (["mlp", "--options", "opest=20"], ["'opest'", "'opset'"]),
        (["mlp", "--options", "opset=3"], ["opset", "3"]),
    ],
)
def test_what_only_the_processes_can_see(
    arguments: list[str], data: list[str], file: str, in_process: type[InProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of([text.format(file=file) for text in arguments], capsys)
    assert [datum for datum in data if datum not in said] == []


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'transformers>=5'" in said_of(["bert"], capsys)


def test_a_missing_compiler_is_named() -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    assert "C++ compiler" in error_line(InvalidCxxCompiler())


def test_errors_are_a_line_with_their_cause() -> None:
    error = RuntimeError("\n\x1b[96mFailed.\x1b[0m Next:\n- look")
    assert error_line(error) == "RuntimeError: Failed. Next:"
    error.__cause__ = KeyError("a.b")
    assert error_line(error).startswith("RuntimeError: Failed. Next: ") and "KeyError: 'a.b'" in error_line(error)


# ------------------------------------------------------------------------------------------------- table and picture


@pytest.fixture
def found() -> dict[str, Any]:
    """Two cases, one backend wrong on one of them."""
    row = Measurement(rounds=[1.5, 1.0], first_seconds=0.01, peak_bytes=3 * 2**20)
    quick = Measurement(rounds=[0.5, 0.5], first_seconds=3.21)
    wrong = Measurement("wrong", "result 0: off float64 by 3")
    results = [
        CaseResult(Case("a"), parameters=1_200_000, sizes=["2x8"], threads=2, rows={"eager": row, "onnxrt": quick}),
        CaseResult(Case("b"), parameters=1, sizes=["2x8"], threads=2, rows={"eager": row, "onnxrt": wrong}),
    ]
    for result in results:
        result.summarize()
    return {
        "machine": {**machine.machine(), "threads": 2},
        "settings": {"backends": ["eager", "onnxrt"], "rounds": 2},
        "interrupted": False,
        "cases": [{"label": result.case.label, **dataclasses.asdict(result)} for result in results],
        "times_as_fast": geometric_means(results, ["eager", "onnxrt"]),
    }


def test_the_table_fits_a_terminal(found: dict[str, Any]) -> None:
    text = table.table(found)
    assert max(map(len, text.splitlines())) <= 100
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "2.50" in text and "0.5000 ± 0.0000" in text and "1.25 ± 0.25" in text
    assert re.search("^onnxrt: .*result 0: .* 3", text, re.M)
    assert lines["onnxrt"]


def test_every_model_is_listed_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(models.MODELS) >= 20
    find: Callable[[str], Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    case.check_model("mlp")
    with pytest.raises(UsageError, match="needs transformers"):
        case.check_model("deit")
