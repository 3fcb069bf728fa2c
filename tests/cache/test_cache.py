"""Compiled graphs on disk: a hit gives the same results without compiling; another key never hits."""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib
import json
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import filelock
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_as_eager, assert_same_values, compiled, counted
from torch import fx, nn
from torch._dynamo.utils import counters

from dynamo_backends.cache import environment
from dynamo_backends.cache import store as store_module
from dynamo_backends.cache.graphs import CachedGraphs
from dynamo_backends.cache.program_record import check_expression
from dynamo_backends.cache.store import FolderSize, Store, StoredRecord, folder_named
from dynamo_backends.cli import main
from dynamo_backends.errors import Kind, Reason, SessionError
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.graphs.graph_json import CannotStoreError, decode_graph, decode_target, encode_graph, encode_target
from dynamo_backends.graphs.size_assumptions import Assumptions
from dynamo_backends.options import Options, parse_options
from dynamo_backends.partition.regions import Support
from dynamo_backends.runtime.constants import declared, declared_as_inputs
from dynamo_backends.runtime.dtypes import ONNX_NUMBERS, TORCH_DTYPES
from dynamo_backends.runtime.node_support import ANSWERS
from dynamo_backends.runtime.session import Session
from passes import Pass, register, unregister
from passes.engine import registry
from passes.engine.manager import PassContext, PassManager

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enables the cache in a folder of this test."""
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", "1")
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ANSWERS, "known", {})
    return tmp_path / "cache"


def forget() -> None:
    """Clears what a new process does not have: compiled graphs, answers about nodes, counts."""
    torch._dynamo.reset()
    ANSWERS.known.clear()
    counters.clear()


def events() -> dict[str, int]:
    """The counters, except those of passes, of the cache, and of strides.

    Passes do not run after a hit; strides are asked once in a process.
    """
    left_out = ("pass ", "cache_", "rejected_", "strides_")
    return {event: number for event, number in counters["dynamo_backends"].items() if not event.startswith(left_out)}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()


# The same results


class _Scaled(nn.Module):
    """Reads a constant of the graph, and one that a pass folds from it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor(0.5)).sin()


class _Counter(nn.Module):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.inner(x) * self.calls


def _apart(x: torch.Tensor) -> torch.Tensor:
    """Two regions with a sort in PyTorch between them."""
    y = torch.exp(x).sin()
    return torch.linalg.eigvalsh(y @ y.mT).cos() + 1


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.exp() + 1


def _views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin() + 1
    return y, y.mT, x[0], y.mT.exp()


def _permuted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    return x.mT.exp(), (x + 1).expand(2, 3, 3), x.shape[0]


def _random(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x.exp(), 0.5).sin()


FUNCTIONS: dict[str, Callable[..., object]] = {
    "a constant": _Scaled().eval(),
    "a buffer that is written": _Counter(),
    "PyTorch between regions": _apart,
    "an argument that is written": _in_place,
    "results that share memory": _views,
    "permuted and expanded results": _permuted,
    "random numbers": _random,
    "weights": nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).eval(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["inference", "training", "dynamic"])
def test_a_cached_graph_is_the_same(name: str, mode: str) -> None:
    """In results, gradients, what becomes of arguments and buffers, random numbers, and what is counted of it."""
    x = torch.rand(3, 3, requires_grad=mode == "training" and name != "an argument that is written")
    settings = {"dynamic": True} if mode == "dynamic" else {}

    def run() -> dict[str, int]:
        forget()
        torch.manual_seed(0)
        with torch.set_grad_enabled(mode == "training"):
            assert_same_as_eager(FUNCTIONS[name], x, calls=2, settings=settings)
        return events()

    cold = run()
    stored = counted("cache_stored")
    assert stored > 0 and counted("cache_misses") == stored and counted("cache_hits") == 0
    warm = run()
    assert counted("cache_hits") == stored and counted("cache_misses") == 0
    assert warm == cold


def test_other_sizes_of_a_cached_dynamic_graph() -> None:
    network = model()
    for expected in ("cache_misses", "cache_hits"):
        forget()
        with torch.no_grad():
            run = compiled(network, dynamic=True)
            for batch in (3, 5, 17):
                x = torch.randn(batch, 8)
                torch.testing.assert_close(run(x), network(x))
        assert counted(expected) == 1 and counted("recompiles") == 0


def test_a_compile_that_specializes_is_never_skipped() -> None:
    """Guards that a graph's sizes get while it is traced hold for what is cached too."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.exp() if x.shape[0] % 2 else x.sin()

    for _ in range(2):
        forget()
        run = compiled(function, dynamic=True)
        for size in (3, 4, 5, 8):
            x = torch.rand(size, 2)
            torch.testing.assert_close(run(x), function(x))


@pytest.mark.usefixtures("rebuilt_at_once")
def test_weights_that_change_after_a_hit() -> None:
    x = torch.randn(2, 8)
    with torch.no_grad():
        network = model()
        compiled(network)(x)
        forget()
        other = model()  # the key has no values of weights
        run = compiled(other)
        assert_same_values(run(x), other(x))
        assert counted("cache_hits") == 1 and counted("constant_weights") > 0
        other[0].weight.mul_(2)
        assert_same_values(run(x), other(x))
        other[3].weight.data = torch.randn(4, 16)
        assert_same_values(run(x), other(x))
        assert counted("weight_refreshes") == 2


IN_A_LOOP = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = torch.nn.functional.gelu(layer(x))
        return x
"""

LINE_BY_LINE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Linear(4, 4)
        self.up = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.down(x)
        x = torch.nn.functional.gelu(x)
        x = self.up(x)
        return torch.nn.functional.gelu(x)
"""


def test_a_hit_names_the_lines_of_the_code_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other code was compiled to the same graph: a loop on one line, whose layers have other names."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in_a_loop.py").write_text(IN_A_LOOP)
    (tmp_path / "line_by_line.py").write_text(LINE_BY_LINE)
    compiler = functools.partial(torch.compile, backend="onnxrt", fullgraph=True)
    x = torch.ones(2, 4)
    with torch.no_grad():
        compiler(importlib.import_module("in_a_loop").Model().eval())(x)
        model = importlib.import_module("line_by_line").Model().eval()
        with caplog.at_level("DEBUG", "dynamo_backends.pipeline.stage_logging"):
            saved = compiler(model.forward).aot_compile(((x,), {}))
    assert counted("cache_misses") == counted("cache_hits") == 1
    [text] = [record.getMessage() for record in caplog.records if "from the cache" in record.msg]
    nodes = [line for line in text.splitlines() if "Gemm" in line or "Gelu" in line]
    lines = [f"line_by_line.py:{number}" for number in (11, 12, 13, 14)]
    assert [node.split("# ")[1] for node in nodes] == lines
    assert "in_a_loop" not in caplog.text and "first." not in text
    assert all(f"{name}.weight" in text for name in ("down", "up"))
    saved.save_compiled_function(str(tmp_path / "saved"))
    assert main(["show", str(tmp_path / "saved"), "--onnx", str(tmp_path / "models")]) == 0
    [path] = (tmp_path / "models").iterdir()
    of_nodes = [node.metadata_props for node in ir.load(path).graph if node.op_type in ("Gemm", "Gelu")]
    assert [properties["source"] for properties in of_nodes] == lines
    assert [properties.get("module") for properties in of_nodes] == ["down", None, "up", None]


def test_a_session_that_fails_after_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs the region, of the code that is cached."""
    network, x = model(), torch.randn(2, 8)
    with torch.no_grad():
        compiled(network)(x)
        forget()
        run = compiled(network)
        run(x)
        assert counted("cache_hits") == 1

        def fail(*args: object) -> object:
            raise SessionError("planted")

        monkeypatch.setattr(Session, "__call__", fail)
        assert_same_values(run(x), network(x))
        assert counted("runtime_failures") == 1


SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
x = torch.randn(2, 8)
with torch.no_grad():
    result = torch.compile(model.eval(), backend="onnxrt")(x)
    assert torch.allclose(result, model(x), atol=1e-5)  # float32 rounds by 1e-7; another entry is other numbers
heavy = [name for name in ("onnx", "onnx_ir", "onnxscript", "passes.catalog", "dynamo_backends.pipeline.stages")
         if name in sys.modules]
print(json.dumps({"result": result.tolist(), "counts": counters["dynamo_backends"], "imported": heavy}))
"""


def start_process() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env={**os.environ})


def said(process: subprocess.Popen[str]) -> dict[str, object]:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(text.splitlines()[-1])


def test_processes_share_the_cache(folder: Path) -> None:
    """Two that start with an empty folder at once write to it; a third compiles nothing, and imports no compiler."""
    first, second = map(said, [start_process(), start_process()])
    third = said(start_process())
    assert first["result"] == second["result"] == third["result"]
    for early in (first, second):
        counts = early["counts"]
        assert counts.get("cache_misses", 0) == counts.get("cache_stored", 0)  # one of them may be late, and find it
    assert "cache_misses" in {**first["counts"], **second["counts"]}
    assert third["counts"]["cache_hits"] == 1 and "cache_misses" not in third["counts"]
    assert third["imported"] == []
    assert {path.suffix for path in folder.iterdir()} == {".cached"}, "nothing unfinished is left"


# The key


def _graph(
    shape: tuple[int, ...] = (2, 3), constant: float = 1.0, dtype: torch.dtype = torch.float32
) -> fx.GraphModule:
    """An ATen graph of ``x * constant`` with a tensor constant."""
    graph = fx.Graph()
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.empty(shape, dtype=dtype))
    x = graph.placeholder("x")
    x.meta["val"] = fake
    product = graph.call_function(aten.mul.Tensor, (x, 2.0))
    product.meta["val"] = fake
    held = graph.get_attr("held")
    total = graph.call_function(aten.add.Tensor, (product, held))
    total.meta["val"] = fake
    graph.output((total,))
    return fx.GraphModule({"held": torch.full((3,), constant)}, graph)


def key(graph: fx.GraphModule | None = None, direction: str = "inference", **options: object) -> str:
    cached = CachedGraphs(parse_options(options))
    entry = cached.entry(GraphName(0, direction), graph or _graph(), {}, is_joint=True)
    assert entry is not None
    return entry.key


OPTIONS_OF_GRAPHS = {
    "fallback": "error",
    "placement": "fastest",
    "providers": [("CPUExecutionProvider", {"use_arena": "0"})],
    "weights": "inputs",
    "threads": 3,
    "spin": 2,
    "idle_seconds": 7,
    "opset": 20,
    "passes": {"disable": ["onnx.linear"]},
    "check_providers": False,
    "verify_passes": True,
}
OPTIONS_OF_THE_PROCESS = {
    "dump_dir": "elsewhere",
    "compare": "every",
    "tensor_limit": 1,
    "cache": False,
    "cache_dir": "elsewhere",
    "cache_size": 1,
    "autotune_budget": 50,
}


def test_the_key_changes_with_the_options_that_graphs_depend_on() -> None:
    """A new option belongs to one of the two. Graphs with custom operators are not cached."""
    fields = {field.name for field in dataclasses.fields(Options)} - {"custom_op_libraries"}
    assert fields == OPTIONS_OF_GRAPHS.keys() | OPTIONS_OF_THE_PROCESS.keys()
    before = key()
    changing = {
        name for name, value in (OPTIONS_OF_GRAPHS | OPTIONS_OF_THE_PROCESS).items() if key(**{name: value}) != before
    }
    assert changing == OPTIONS_OF_GRAPHS.keys()


@pytest.mark.parametrize(
    "other",
    {
        "a shape": lambda: key(_graph((4, 3))),
        "a dtype": lambda: key(_graph(dtype=torch.float64)),
        "a constant": lambda: key(_graph(constant=1.5)),
        "negative zero": lambda: key(_graph(constant=-0.0)) if key(_graph(constant=0.0)) else "",
        "direction": lambda: key(direction="forward"),
    }.items(),
    ids=lambda item: item[0],
)
def test_the_key_changes_with(other: tuple[str, Callable[[], str]]) -> None:
    assert key() == key(), "equal content has equal keys"
    assert other[1]() not in (key(), key(_graph(constant=0.0)))


@pytest.mark.parametrize(
    "what", ["arguments", "a number", "an operator", "strides", "a node's name", "forward or backward", "memory"]
)
def test_the_key_changes_with_a_node(what: str) -> None:
    graph = _graph()
    product = next(iter(graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)))
    if what == "arguments":
        product.args = (2.0, product.args[0])
    elif what == "a number":
        product.args = (product.args[0], 2)  # which JSON writes apart from 2.0, and Python finds equal
    elif what == "an operator":
        product.target = aten.div.Tensor
    elif what == "strides":
        product.meta["val"] = product.meta["val"].new_empty(3, 2).mT
    elif what == "forward or backward":
        product.meta["partitioner_tag"] = "is_backward"
    elif what == "memory":
        product.meta["val"] = product.meta["val"].clone()
    else:
        product.name = "another"
    assert key(graph) != key()


@pytest.fixture
def fresh_environment() -> None:
    environment.fixed.cache_clear()
    yield
    environment.fixed.cache_clear()


def _edited(name: str) -> Callable[[], Mapping[str, str]]:
    known = environment.sources()
    assert name in known
    return lambda: {**known, name: "0" * 64}


@pytest.mark.parametrize(
    ("part", "planted"),
    [
        *[
            ("versions", lambda name=name: lambda: {**VERSIONS, name: "99"})
            for name in ("python", "torch", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "numpy")
        ],
        ("sources", lambda: _edited("passes/onnx/linear.py")),
        ("sources", lambda: _edited("passes/onnx/attention/masks.py")),
        ("sources", lambda: _edited("dynamo_backends/exporter/translate.py")),
        ("processor", lambda: lambda: "another"),
    ],
)
def test_the_key_changes_with_the_environment(
    part: str, planted: Callable[[], Callable[[], object]], monkeypatch: pytest.MonkeyPatch, fresh_environment: None
) -> None:
    before = key()
    monkeypatch.setattr(environment, part, planted())
    environment.fixed.cache_clear()
    assert key() != before


VERSIONS = environment.versions()


def test_a_version_that_is_planted_is_one_that_is_there() -> None:
    assert {"python", "torch", "onnxruntime", "onnx", "onnx_ir", "onnxscript", "numpy"} <= set(VERSIONS)


def test_the_key_changes_with_what_a_process_sets() -> None:
    before = key()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert key() != before
    finally:
        torch.set_num_threads(threads)
    try:
        torch.use_deterministic_algorithms(True)
        assert key() != before
    finally:
        torch.use_deterministic_algorithms(False)
    assert key() == before


def test_the_key_changes_with_what_is_a_weight() -> None:
    graph = _graph()
    cached = CachedGraphs(parse_options())
    keys = {cached.entry(GraphName(0), graph, weights, is_joint=True).key for weights in ({}, {0: None})}
    assert len(keys) == 2


def test_symbols_are_a_part_of_the_key() -> None:
    """The same graph, with other relations between its sizes: one is even, or not."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == y.shape[0]:
            return x + y
        return x.sum() + y

    for _ in range(2):
        forget()
        run = compiled(function, dynamic=True)
        for shapes in ((3, 3), (4, 5), (6, 6), (7, 2)):
            x, y = torch.rand(shapes[0]), torch.rand(shapes[1])
            torch.testing.assert_close(run(x, y), function(x, y))
    assert counted("cache_hits") == 2


# What is not cached


def reasons() -> set[str]:
    events = counters["dynamo_backends"]
    return {event.removeprefix("not_cached: ") for event in events if event.startswith("not_cached: ")}


def run_once(**settings: object) -> None:
    network, x = model(), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(network, **settings)(x), network(x))


def test_not_with_passes_of_others(folder: Path) -> None:
    register(Pass("onnx.planted", "Planted by a test.", lambda model, context: 0))
    try:
        run_once()
    finally:
        unregister("onnx.planted")
    assert reasons() == {"registered passes"} and not folder.exists()
    forget()
    run_once()
    assert counted("cache_stored") == 1


def test_not_without_one_of_our_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = {name: item for name, item in registry._registered.items() if name != "onnx.linear"}
    with monkeypatch.context() as planted:
        planted.setattr(registry, "_registered", left)
        run_once()
    assert reasons() == {"registered passes"} and not folder.exists()
    assert registry.are_only_built_in()


def test_not_with_sources_that_changed(folder: Path, monkeypatch: pytest.MonkeyPatch, fresh_environment: None) -> None:
    """What is imported may be what was there before; or after, if the compiler is imported later than that."""
    environment.sources.cache_clear()
    with monkeypatch.context() as planted:
        planted.setattr(environment, "_STARTED", 0.0)
        run_once()
    assert reasons() == {"sources that cannot be read, or changed"} and not folder.exists()
    forget()
    known = environment.sources()
    monkeypatch.setattr(environment, "_sources_now", lambda: {**known, "passes/onnx/linear.py": "0" * 64})
    run_once()
    assert reasons() == {"sources that cannot be read, or changed"}
    assert counted("cache_misses") == 1 and counted("cache_stored") == 0


def test_not_with_translations_of_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, aten.frobenius_norm.dim, lambda *args: None)
    run_once()
    assert reasons() == {"registered converters"} and not folder.exists()
    monkeypatch.setitem(CONVERTERS, aten.frobenius_norm.dim, functools.partial(lambda *args: None, 1))
    assert environment.obstacle(parse_options()) == "registered converters"


def test_not_with_a_library_that_somebody_works_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as onnxscript with a translation that is being written."""
    assert not environment.is_any_editable()
    written = json.dumps({"url": "file:///there", "dir_info": {"editable": True}})
    monkeypatch.setattr(
        metadata,
        "distribution",
        lambda name: SimpleNamespace(read_text=lambda _: written if name == "onnxscript" else ""),
    )
    environment.is_any_editable.cache_clear()
    assert environment.obstacle(parse_options()) == "an editable install of a library"
    environment.is_any_editable.cache_clear()


def test_not_while_the_bisector_is_at_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.CompilerBisector, "get_backend", staticmethod(lambda: "onnxrt"))
    assert environment.obstacle(parse_options()) == "CompilerBisector is running"


def test_not_what_is_watched_or_checked(folder: Path, tmp_path: Path) -> None:
    run_once(backend="onnx_debug", options={"dump_dir": str(tmp_path / "dump")})
    run_once(options={"verify_passes": True})
    run_once(options={"cache": False})
    assert not folder.exists() and not reasons()


def test_not_what_has_a_subgraph(folder: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)) + 1

    for _ in range(2):
        forget()
        x = torch.rand(3)
        torch.testing.assert_close(compiled(function)(x), function(x))
        assert counted("cache_hits") == 0 and counted("not_cached") > 0


def test_not_a_compile_that_adds_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another call would not get them."""
    monkeypatch.setattr(Assumptions, "growth", lambda _: "planted")
    with torch.no_grad():
        compiled(model(), dynamic=True)(torch.randn(3, 8))
    assert reasons() == {"the compile added guards"} and counted("cache_stored") == 0


def _fails(item: Pass, graph: object, context: PassContext) -> int:
    if item.is_needed:
        return item.run(graph, context)
    raise ValueError("planted")


def _memory_ran_out(support: Support, node: fx.Node) -> Reason | None:
    return Reason(Kind.OUT_OF_MEMORY, "Planted.") if node.target is aten.gelu.default else None


@pytest.mark.parametrize(
    ("what", "planted", "reason"),
    [
        ((PassManager, "_call"), staticmethod(_fails), "a pass that was undone"),
        ((Support, "reason_against"), _memory_ran_out, "memory ran out"),
    ],
)
def test_not_what_may_come_out_otherwise(
    what: tuple[type, str], planted: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*what, planted)
    run_once()
    assert reasons() == {reason} and counted("cache_stored") == 0


# Files


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cached"))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04." + os.urandom(300))


def _of_an_older_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"cache 1\n", b"cache 0\n", 1))


def _appended(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def _swapped(path: Path) -> None:
    other = path.parent / f"{'1' * 64}.cached"
    Store(path.parent, 2**30).put("1" * 64, StoredRecord({"some": "thing"}))
    other.replace(path)


@pytest.mark.parametrize(
    "damage", [_truncate, _flip, _empty, _foreign, _of_an_older_version, _appended, _swapped], ids=lambda f: f.__name__
)
def test_a_damaged_entry_is_ignored_and_replaced(damage: Callable[[Path], None], folder: Path) -> None:
    run_once()
    assert len(entries(folder)) == 2, "the graph, the names of the operators with a translation"
    for path in entries(folder):
        damage(path)
    forget()
    run_once()
    assert counted("cache_hits") == 0 and counted("cache_misses") == 1 and counted("cache_stored") == 1
    assert counted("cache_entries_removed") == 2
    forget()
    run_once()
    assert counted("cache_hits") == 1 and counted("cache_entries_removed") == 0


def test_an_entry_that_says_nonsense_is_ignored(folder: Path) -> None:
    """One with the right key and checksum, whose content makes no graph."""
    run_once()
    store = Store(folder, 2**30)
    [path] = [path for path in entries(folder) if isinstance(store.get(path.stem).header, dict)]
    header, blobs = store.get(path.stem).header, store.get(path.stem).blobs
    text = json.dumps(header["regions"][0])
    device, size = '["device", "cpu"]', '["tuple", [2, 4]]'
    assert device in text and size in text

    def read(name: str) -> list[object]:
        return ["get_attr", name, name, ["tuple", []], ["dict", []]]

    def constant(name: str, size: int) -> list[object]:
        return [name, ["tuple", [["dtype", "float32"], ["tuple", [size]]]]]

    for nonsense in (
        {
            **header,
            "code": [["call_function", "x", ["op", "aten", "nothing", "default"], ["tuple", []], ["dict", []]]],
        },
        {**header, "code": [["placeholder", "x", "x=print('planted')", ["tuple", []], ["dict", []]]]},
        {**header, "code": [["call_module", "x", "region_7", ["tuple", []], ["dict", []]]]},
        {**header, "code": [["call_module", "x", "x", ["tuple", []], ["dict", []]]]},
        {**header, "code": [["placeholder", "x", "x", ["list", []], ["dict", []]]]},
        {**header, "constants": [constant("x", -1)]},
        {**header, "regions": [json.loads(text.replace(device, '["device", "nowhere"]'))]},
        {**header, "regions": [json.loads(text.replace(size, '["tuple", ["[].__class__"]]'))]},
        {**header, "regions": [json.loads(text.replace(size, '["tuple", [["list", [1]]]]'))]},
        {**header, "regions": []},
        {**header, "code": [*header["code"], read("__class__")], "originals": {"__class__": "__class__"}},
        {**header, "code": [*header["code"], read("forward")], "constants": [constant("forward", 0)]},
        {**header, "code": [*header["code"], read("training")]},
        {**header, "originals": {"x": "__class__"}},
        {"code": []},
    ):
        store.put(path.stem, StoredRecord(nonsense, blobs))
        forget()
        run_once()
        assert counted("cache_hits") == 0 and counted("cache_stored") == counted("cache_entries_removed") == 1


@pytest.mark.parametrize("what", ["another weight", "settings", "arguments"])
def test_an_entry_that_cannot_be_loaded_is_a_miss(what: str, folder: Path) -> None:
    """One with the right key and checksum, that only ONNX Runtime or the weights show to be wrong."""
    run_once()
    store = Store(folder, 2**30)
    [path] = [path for path in entries(folder) if isinstance(store.get(path.stem).header, dict)]
    header, blobs = store.get(path.stem).header, store.get(path.stem).blobs
    inputs, outputs, settings, weights = header["regions"][0][1]
    if what == "another weight":
        weights = ["tuple", list(range(len(inputs[1])))]
    elif what == "settings":
        settings[1][1] = "many"
    else:
        inputs[1].append(inputs[1][0])
    header["regions"][0][1] = [inputs, outputs, settings, weights]
    store.put(path.stem, StoredRecord(header, blobs))
    forget()
    run_once()
    assert counted("cache_misses") == counted("cache_stored") == 1 and counted("internal_failures") == 0
    forget()
    run_once()
    assert counted("cache_hits") == 1


def test_the_size_is_bounded_and_what_is_not_used_goes(tmp_path: Path) -> None:
    store = Store(tmp_path, 5_000)
    for i, name in enumerate("abcd"):
        assert store.put(name, StoredRecord(None, [bytes(1_000)]))
        os.utime(tmp_path / f"{name}.cached", (i, i))
    assert store.usage().entries == 4
    assert store.get("a") is not None, "which makes it the youngest"
    assert store.put("e", StoredRecord(None, [bytes(1_000)]))
    assert store.usage().bytes <= 5_000
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "c", "d", "e"}
    assert not store.put("f", StoredRecord(None, [bytes(6_000)])), "larger than all there may be"
    assert store.get("f") is None and store.usage().entries == 4


def test_what_a_dead_process_left_goes(tmp_path: Path) -> None:
    left = tmp_path / "x.unfinished"
    left.write_bytes(b"half")
    young = tmp_path / "y.unfinished"
    young.write_bytes(b"half")
    os.utime(left, (1, 1))
    (tmp_path / "notes.txt").write_text("not ours")
    store = Store(tmp_path, 5_000)
    store.put("a", StoredRecord(None))
    assert not left.exists() and young.exists()
    store.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log, once, and no cache."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        forget()
        run_once(options={"cache_dir": blocked / "cache"})
        assert counted("cache_misses") == 1 and counted("cache_stored") == 0
    told = [record for record in caplog.records if record.name == store_module.__name__]
    assert len(told) == 1


def test_a_folder_that_is_read_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image: neither a lock nor an entry can be written."""

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(filelock.FileLock, "acquire", fails)
    monkeypatch.setattr(tempfile, "mkstemp", fails)
    for _ in range(2):
        forget()
        run_once(options={"cache_dir": tmp_path})
        assert counted("cache_misses") == 1 and counted("cache_stored") == 0
    assert [record.name for record in caplog.records].count(store_module.__name__) == 1


def _loose(folder: Path) -> None:
    folder.chmod(0o777)


def _loose_for_a_group(folder: Path) -> None:
    folder.chmod(0o770)


def _in_a_loose_folder(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _loose_behind_a_link(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")
    _loose(folder)


@pytest.mark.parametrize("change", [_loose, _loose_for_a_group, _in_a_loose_folder, _loose_behind_a_link])
def test_a_folder_that_others_may_write_is_left_alone(
    change: Callable[[Path], None], folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is neither read nor written, which the log says once."""
    run_once()
    before = {path: path.stat().st_mtime_ns for path in entries(folder)}
    change(folder)
    for path in entries(folder):
        path.chmod(0o666)  # read, it would be touched
    for _ in range(2):
        forget()
        run_once()
        assert counted("cache_hits") == counted("cache_stored") == 0 and counted("not_cached") == 1
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*")} == before
    (told,) = [record.getMessage() for record in caplog.records if "chmod" in record.getMessage()]
    assert "cache_dir" in told
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_used"] in told
    for path in (folder, folder.parent):
        path.chmod(0o700)
    forget()
    run_once()
    assert counted("cache_hits") == 0, "others may have written the entries"
    assert counted("cache_stored") == 1


@pytest.mark.parametrize("uid", [0, 4711])
@pytest.mark.parametrize("whose", ["folder", "entry", "link"])
def test_what_belongs_to_somebody_else_is_left_alone(
    whose: str, uid: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever this process is: root, too. What is root's is believed."""
    run_once()
    link = folder.parent / "link"
    link.symlink_to(folder)
    own = folder.stat().st_uid
    foreign = {"folder": [folder], "entry": entries(folder), "link": [link]}[whose]
    changed = {os.lstat(path).st_ino for path in foreign}

    def owned(stat: Callable[..., os.stat_result], *args: object) -> os.stat_result:
        status = stat(*args)
        if status.st_ino not in changed:
            return status
        return os.stat_result((*status[:4], uid, *status[5:]))

    for name in ("lstat", "fstat"):
        monkeypatch.setattr(os, name, functools.partial(owned, getattr(os, name)))
    forget()
    run_once(options={"cache_dir": link})
    assert counted("cache_hits") == int(uid in (0, own))


def test_where_nobody_owns_files_all_are_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.delattr(os, "geteuid")
    for _ in range(2):
        forget()
        run_once()
    assert counted("cache_hits") == 1


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        assert Store(tmp_path / "a" / "b", 5_000).put("x", StoredRecord(None))
    finally:
        os.umask(umask)
    assert Store(tmp_path / "a" / "b", 5_000).get("x") is not None
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")} == {0}


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert folder_named(None) == Path("/somewhere/dynamo_backends")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert folder_named(None) == Path("/home/someone/.cache/dynamo_backends")
    assert folder_named("~/elsewhere") == Path("/home/someone/elsewhere")


def test_nothing_is_cached_where_the_home_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """As of a user without a name in a container: no folder ``~`` in the current one."""
    for name in ("HOME", "XDG_CACHE_HOME", "DYNAMO_BACKENDS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.chdir(tmp_path)
    for options in ({}, {}, {"cache_dir": "~/cache"}):
        forget()
        run_once(options=options)
        assert counted("cache_stored") == 0
    told = [record for record in caplog.records if "is not known" in record.getMessage()]
    assert len(told) == 2 and list(tmp_path.iterdir()) == []
    assert main(["cache"]) == 2 and "is not known" in capsys.readouterr().err


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_once()
    usage = Store(folder, 2**30).usage()
    assert usage.entries == 2
    assert main(["cache", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["folder"] == str(folder) and shown["entries"] == 2 and shown["bytes"] == usage.bytes
    assert shown["is_on"] and not shown["cleared"]
    assert main(["cache"]) == 0
    assert str(folder) in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert "removed 2 entries" in capsys.readouterr().out
    assert Store(folder, 2**30).usage() == FolderSize(0, 0)
    forget()
    run_once()
    assert counted("cache_misses") == 1


# Code without pickle and without source text


@pytest.mark.parametrize(
    "encoded",
    [
        ["builtins", "eval"],
        ["builtins", "exec"],
        ["builtins", "__import__"],
        ["builtins", "open"],
        ["torch", "load"],
        ["torch", "compile"],
        ["os", "system"],
        ["_operator", "__class__"],
        ["op", "aten", "__class__", "default"],
        ["op", "aten", "add", "nothing"],
        ["op", "aten", "add", "__class__"],
        ["op", "aten", "save", "default"],
        ["op", "aten", "from_file", "default"],
        ["op", "load_library", "__call__", "default"],
        ["_operator", "attrgetter"],
        ["_operator", "call"],
        ["_operator", "setitem"],
        ["math", "pi"],
        ["math", "__loader__"],
    ],
)
def test_a_function_of_no_known_kind_is_not_made(encoded: list[str]) -> None:
    assert decode_target(encoded) is None


@pytest.mark.parametrize("target", [torch.load, eval, print, torch.sin, lambda x: x, os.system])
def test_a_function_of_no_known_kind_is_not_stored(target: object) -> None:
    with pytest.raises(CannotStoreError):
        encode_target(target)


@pytest.mark.parametrize(
    "text",
    ["s0 +", "__import__('os')", "s0.__class__", "[x for x in s0]", "lambda: 1", "os.system(1)", "math.__loader__(1)"],
)
def test_a_size_is_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        check_expression(text)


@pytest.mark.parametrize("text", ["s0", "2*s0 + 1", "max(1, s77 // 2)", "math.ceil(s0/2)", "-s0 % 3 if s0 > 1 else 2"])
def test_a_size_may_be(text: str) -> None:
    check_expression(text)


def test_arguments_come_back_as_they_were() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    values = (
        *(None, True, 1, 2**70, "text", 0.1, -0.0, float("inf"), torch.float16, torch.device("cpu"), torch.strided),
        *(torch.channels_last, [x, 1], (x, [2.0]), {"a": x}, slice(None, 3, None), 1.0),
    )
    node = graph.call_function(aten.add.Tensor, values, {"alpha": 2})
    graph.output([node])
    encoded = encode_graph(graph)
    again = decode_graph(json.loads(json.dumps(encoded)))
    assert encode_graph(again) == encoded and repr(list(again.nodes)) == repr(list(graph.nodes))
    for ours, original in zip(list(again.nodes)[1].args, node.args, strict=True):
        assert type(ours) is type(original) and repr(ours) == repr(original)


@pytest.mark.parametrize("value", [1j, {1, 2}, torch.zeros(2), {1: 2}, object()])
def test_other_arguments_are_not_stored(value: object) -> None:
    graph = fx.Graph()
    graph.call_function(aten.add.Tensor, (value,))
    with pytest.raises(CannotStoreError):
        encode_graph(graph)


def test_no_pickle() -> None:
    source = Path(environment.__file__).parent
    assert all("import pickle" not in path.read_text() for path in source.glob("*.py"))


# What the runtime writes without onnx


def test_declarations_are_those_of_protobuf() -> None:
    tensors = [("weight", torch.float32, [3, 200]), ("ä" * 100, torch.bool, []), ("bias", torch.int64, [0, 1])]
    model = onnx.ModelProto()
    model.ParseFromString(declared(tensors))
    for (name, dtype, shape), item in zip(tensors, model.graph.initializer, strict=True):
        assert (item.name, item.data_type, list(item.dims)) == (name, ONNX_NUMBERS[dtype], shape)
        assert item.data_location == onnx.TensorProto.EXTERNAL
        length = str(torch.Size(shape).numel() * dtype.itemsize)
        found = {entry.key: entry.value for entry in item.external_data}
        assert found == {"location": "memory", "offset": "0", "length": length}
    inputs = onnx.ModelProto()
    for name, dtype, shape in tensors:
        inputs.graph.input.append(onnx.helper.make_tensor_value_info(name, ONNX_NUMBERS[dtype], shape))
    parsed = onnx.ModelProto()
    parsed.ParseFromString(declared_as_inputs(tensors))
    assert parsed == inputs


def test_dtypes_are_those_of_onnx_ir() -> None:
    for dtype, number in ONNX_NUMBERS.items():
        assert int(ir.tensor_adapters.from_torch_dtype(dtype)) == number
        assert TORCH_DTYPES[number] is ir.tensor_adapters.to_torch_dtype(ir.DataType(number))
