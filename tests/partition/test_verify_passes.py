"""``options={"verify_passes": True}``: a pass that changes the results is undone and reported with node and error."""

from __future__ import annotations

import copy
import json
import logging
import math
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from dynamo_backends.cli import main
from dynamo_backends.dumps.reading import latest_run, read_run
from dynamo_backends.graphs.example_values import real_arguments, synthetic
from dynamo_backends.graphs.late_compile import compile_at_first_call, dynamo_compile_lock
from dynamo_backends.partition import pass_verification
from dynamo_backends.partition.pass_verification import GraphChecker, ModelChecker, evaluate
from dynamo_backends.runtime.binding import InputSpec, OutputSpec
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings
from passes import PassContext, register_pass, unregister

aten = torch.ops.aten
VERIFY = {"options": {"verify_passes": True}}


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """Registers a pass for the duration of a test."""
    names: list[str] = []

    def register(name: str, function: Callable[..., int]) -> None:
        names.append(name)
        register_pass(name, "Planted by a test.")(function)

    yield register
    for name in names:
        unregister(name)


def sine_becomes_cosine(module: fx.GraphModule, context: PassContext) -> int:
    fired = 0
    for node in module.graph.nodes:
        if node.target in (torch.sin, aten.sin.default) and context.allows(node):
            node.target = {torch.sin: torch.cos, aten.sin.default: aten.cos.default}[node.target]
            fired += 1
    module.recompile()
    return fired


def sine_becomes_cosine_in_onnx(model: ir.Model, context: PassContext) -> int:
    fired = 0
    for node in model.graph:
        if node.op_type == "Sin" and context.allows(node):
            node.op_type = "Cos"
            fired += 1
    return fired


def double_negation(module: fx.GraphModule, context: PassContext) -> int:
    """Right: x becomes -(-x), another graph with the same results."""
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.sin.default):
        with module.graph.inserting_after(node):
            inner = module.graph.call_function(aten.neg.default, (node,))
            inner.meta.update(node.meta)
        with module.graph.inserting_after(inner):
            outer = module.graph.call_function(aten.neg.default, (inner,))
            outer.meta.update(node.meta)
        node.replace_all_uses_with(outer, delete_user_cb=lambda user, inner=inner: user is not inner)
        fired += 1
    module.recompile()
    return fired


class Wave(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x).relu()) * 2 + 1


PLANTED = {
    "pre_grad": sine_becomes_cosine,
    "joint": sine_becomes_cosine,
    "post_grad": sine_becomes_cosine,
    "onnx": sine_becomes_cosine_in_onnx,
}


@pytest.mark.parametrize("stage", PLANTED)
def test_a_bad_pass_changes_the_result_without_the_check(stage: str, plant: Callable[..., None]) -> None:
    plant(f"{stage}.bad", PLANTED[stage])
    wave, x = Wave().eval(), torch.randn(3, 8)
    with torch.no_grad():
        assert not torch.allclose(compiled(wave)(x), wave(x))


@pytest.mark.parametrize("stage", PLANTED)
@pytest.mark.parametrize("trains", [False, True])
def test_a_bad_pass_is_undone(
    stage: str, trains: bool, plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(f"{stage}.bad", PLANTED[stage])
    with caplog.at_level(logging.WARNING), torch.set_grad_enabled(trains):
        assert_same_as_eager(Wave().train(trains), torch.randn(3, 8), settings=VERIFY)
    assert counted(f"undone pass {stage}.bad") == 1
    assert counted(f"pass {stage}.bad") == 0
    (said,) = [record.getMessage() for record in caplog.records if record.name == "passes.engine.manager"]
    assert f"pass {stage}.bad" in said
    assert re.search(r"\bsin \([^ ]*test_verify_passes.py:\d+\): error", said), "it names the node and its line"


def test_an_added_node_has_the_name_that_onnx_debug_gives_it(
    plant: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cosine_for_sine(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_function(aten.cos.default, node.args))
        return 1

    plant("post_grad.bad", cosine_for_sine)
    x = torch.randn(3, 8)
    with torch.no_grad():
        compiled(Wave(), **VERIFY)(x)
        compiled(Wave(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})(x)
    (said,) = [record.getMessage() for record in caplog.records if "is undone" in record.getMessage()]
    (graph,) = read_run(latest_run(tmp_path)).graphs
    (named,) = re.findall(r"undone: (\S+ \(\S+\)): error", said)
    assert graph.verdict is not None and graph.verdict.startswith(f"diverges at {named}: pass post_grad.bad")
    assert main(["passes", str(tmp_path)]) == 0
    assert "\ntry: dynamo-backends passes --why post_grad.bad -d " in capsys.readouterr().out, "the pass at fault"


@pytest.mark.parametrize("stage", PLANTED)
def test_ls_names_what_was_undone(
    stage: str, plant: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(f"{stage}.bad", PLANTED[stage])
    with torch.no_grad():
        compiled(Wave(), backend="onnx_debug", options={**VERIFY["options"], "dump_dir": str(tmp_path)})(
            torch.randn(3, 8)
        )
    assert main(["ls", str(tmp_path)]) == 0
    graph = "graph 0" if stage in ("pre_grad", "joint") else "graph 0.inference.*"  # AOTAutograd splits it
    assert re.search(rf"^undone in {graph}: {stage}.bad: \bsin \(", capsys.readouterr().out, re.MULTILINE)


def test_a_right_pass_stays(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    plant("post_grad.negate_twice", double_negation)
    assert_same_as_eager(Wave(), torch.randn(3, 8), settings=VERIFY)
    assert counted("pass post_grad.negate_twice") == 1
    assert counted("undone pass post_grad.negate_twice") == 0
    assert not [record for record in caplog.records if record.name == "passes.engine.manager" and record.levelno > 20]


_drawn = random.Random(0)


@torch.library.custom_op("test_verify_passes::noisy", mutates_args=())
def _noisy(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + _drawn.random())  # by Python: no state of PyTorch's repeats it


_noisy.register_fake(torch.empty_like)


@pytest.mark.parametrize("stage", ["post_grad", "joint"])
def test_a_pass_before_an_operator_that_returns_other_numbers_is_told_to_be_unverified(
    stage: str, plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Its noise excuses any error; a result that does not read it is checked."""
    plant(f"{stage}.bad", sine_becomes_cosine)
    x = torch.randn(3, 8)
    with torch.no_grad():
        compiled(lambda x: _noisy(x.sin()), **VERIFY)(x)
    assert counted(f"pass {stage}.bad") == 1
    assert counted("graphs_not_verified")
    assert "test_verify_passes.noisy" in caplog.text
    with torch.no_grad():
        compiled(lambda x: (x.sin(), _noisy(x.exp())), **VERIFY)(x)
    assert counted(f"undone pass {stage}.bad") == 1


def test_a_pass_that_breaks_the_graph_is_undone(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    def swap_arguments(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.mm.default)
        node.args = (node.args[1], node.args[0])
        module.recompile()
        return 1

    plant("post_grad.bad", swap_arguments)
    with torch.no_grad():
        assert_same_as_eager(torch.mm, torch.randn(2, 3), torch.randn(3, 4), settings=VERIFY)
    assert counted("undone pass post_grad.bad") == 1 and re.search(r"post_grad.bad.*\bmm\b", caplog.text)


def test_a_change_of_dtype_is_a_change(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    def narrow(module: fx.GraphModule, context: PassContext) -> int:
        (result,) = module.graph.output_node().all_input_nodes
        with module.graph.inserting_after(result):
            half = module.graph.call_function(aten._to_copy.default, (result,), {"dtype": torch.float16})
            half.meta["val"] = result.meta["val"].to(torch.float16)
        result.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
        module.recompile()
        return 1

    plant("post_grad.narrow", narrow)
    with torch.no_grad():
        assert_same_as_eager(torch.exp, torch.randn(3), settings=VERIFY)
    assert "is float16 [3], it was float32 [3]" in caplog.text, "before anything is run"


def test_gradients_alone_may_be_wrong(plant: Callable[..., None]) -> None:
    """The joint graph's results are the forward's and the gradients; a fault in the gradients is found too."""

    def forget_a_factor(module: fx.GraphModule, context: PassContext) -> int:
        for node in module.graph.find_nodes(op="call_function", target=aten.cos.default):  # the derivative of sin
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        module.recompile()
        return 1

    plant("joint.bad", forget_a_factor)
    assert_same_as_eager(lambda x: torch.sin(x), torch.randn(5, requires_grad=True), settings=VERIFY)
    assert counted("undone pass joint.bad") == 1


def test_random_numbers_and_state_are_not_disturbed() -> None:
    def noisy(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count += 1
        return torch.nn.functional.dropout(torch.relu(x), 0.3) + torch.rand_like(x)

    assert_same_as_eager(noisy, torch.randn(64), torch.tensor(0), calls=2, settings=VERIFY)


def test_dynamic_shapes_and_several_calls() -> None:
    function = compiled(lambda x: (x @ x.T).softmax(-1).detach() * 2, dynamic=True, **VERIFY)
    for size in (3, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(function(x), (x @ x.T).softmax(-1) * 2)


def test_checkpointing() -> None:
    wave = Wave()
    assert_same_as_eager(lambda x: checkpoint(wave, x, use_reentrant=False), torch.randn(3, 8), settings=VERIFY)


def test_the_manifest_and_the_diff_say_what_was_undone(plant: Callable[..., None], tmp_path: Path) -> None:
    plant("post_grad.bad", sine_becomes_cosine)
    options = {"verify_passes": True, "dump_dir": str(tmp_path)}
    with torch.no_grad():
        torch.compile(Wave(), backend="onnx_debug", options=options)(torch.randn(3, 8))
    run = latest_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    (graph,) = manifest["graphs"]
    assert graph["verdict"] == "ok"
    (undone,) = [result["undone"] for result in graph["passes"] if result["name"] == "post_grad.bad"]
    assert undone.startswith("sin (") and "tolerance" in undone
    (file,) = run.glob("graph_*/inference/passes/post_grad.bad.diff")
    diff = file.read_text()
    assert "undone: sin (" in diff and "-        sin" in diff


def test_a_graph_that_fails_on_the_real_values_is_undone(
    plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Fake tensors do not see that an index is out of range."""

    def shift(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.index_select.default)
        with module.graph.inserting_before(node):
            shifted = module.graph.call_function(aten.add.Tensor, (node.args[2], 100))
        node.args = (*node.args[:2], shifted)
        return 1

    plant("post_grad.shift", shift)
    with torch.no_grad():
        x, index = torch.randn(4, 3), torch.tensor([1, 3])
        assert_same_as_eager(lambda x, index: x.index_select(0, index).sin(), x, index, settings=VERIFY)
    assert counted("undone pass post_grad.shift") == 1
    assert re.search("post_grad.shift.*IndexError", caplog.text)


# The check by itself


def problem(before: Callable[..., object], after: Callable[..., object], *args: object) -> str | None:
    graphs = [make_fx(function)(*copy.deepcopy(args)) for function in (before, after)]
    kept = [item.clone() if isinstance(item, torch.Tensor) else item for item in args]
    state = torch.get_rng_state()
    found = GraphChecker(args).problem(*graphs)
    assert all(
        not isinstance(item, torch.Tensor) or torch.equal(item, old) for item, old in zip(args, kept, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)
    return found


X = torch.tensor([0.5, 1.0, 2.0])

RIGHT: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "the same": (lambda x: (x.sin(), 3, None), lambda x: (x.sin(), 3, None)),
    "another order": (lambda x: x.exp() + x + 1, lambda x: 1 + (x.exp() + x)),
    "an equal number": (lambda x: (x, 1234.5), lambda x: (x, float("1234.5"))),
    "random numbers": (lambda x: torch.rand_like(x) * x, lambda x: x * torch.rand_like(x)),
    "a change in place": (lambda x: x.add_(1) * 2, lambda x: (x + 1) * 2),
    "nearer to float64": (lambda x: (x + 1e8) - 1e8, lambda x: x * 1),
    "a constant": (
        lambda x: x.sin() * torch.tensor([2.0, 3.0, 4.0]),
        lambda x: torch.tensor([2.0, 3.0, 4.0]) * x.sin(),
    ),
    "several results": (lambda x: x.sort(), lambda x: tuple(reversed((x.sort()[1], x.sort()[0])))),
    "what is not a number": (lambda x: (x - 5).log(), lambda x: (x - 5).log() * 1),
}


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_no_problem(what: str) -> None:
    assert problem(*RIGHT[what], X) is None


WRONG: dict[str, tuple[Callable[..., object], Callable[..., object], str]] = {
    "fewer results": (lambda x: (x, x.sin()), lambda x: x, ""),
    "a number": (lambda x: (x, 3), lambda x: (x, 4), "3"),
    "a number for a tensor": (lambda x: (x, x.sin()), lambda x: (x, 4), "sin"),
    "a tensor for a number": (lambda x: (x, 3), lambda x: (x, x.sin()), "sin"),
    "a value after a number": (lambda x: (3, x.sin()), lambda x: (3, x.cos()), "cos "),
    "behind a new node": (lambda x: x.exp() * 2, lambda x: x.abs().exp() * 3, "mul "),
    "a second result": (
        lambda x: x.frexp()[1] + 1,
        lambda x: (x * 2).frexp()[1] + 1,
        "mul ",
    ),
    "another constant": (
        lambda x: x * torch.tensor([2.0, 3.0, 4.0]),
        lambda x: x * torch.tensor([2.0, 3.0, 5.0]),
        "_tensor_constant0 ",
    ),
    "another dtype": (
        lambda x: x.sin(),
        lambda x: x.sin().double(),
        "torch.float64",
    ),
    "another shape": (lambda x: x.sin(), lambda x: x.sin().view(3, 1), "(3, 1)"),
    "another value": (lambda x: x.sin() * 2, lambda x: x.cos() * 2, "cos "),
    "the first node": (lambda x: (x.exp() * 2).sin(), lambda x: (x.exp() * 3).sin(), "mul "),
    "not a number": (
        lambda x: x.log(),
        lambda x: (x - 1).log(),
        "sub ",
    ),
    "another integer": (lambda x: x.argmax(), lambda x: x.argmin(), "argmin "),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_a_problem(what: str) -> None:
    before, after, named = WRONG[what]
    found = problem(before, after, X)
    assert found is not None and named in found


def test_a_number_in_the_place_of_a_tensor_is_a_problem() -> None:
    before, after = fx.symbolic_trace(lambda x: torch.sin(x) + 1), fx.symbolic_trace(lambda x: torch.sin(x) + 1)
    (sine,) = after.graph.find_nodes(op="call_function", target=torch.sin)
    sine.target = torch.numel
    after.recompile()
    assert str(GraphChecker([X]).problem(before, after)).startswith("sin ")
    assert str(GraphChecker([X]).problem(after, before)).startswith("sin ")
    scaled = fx.symbolic_trace(lambda x, n: torch.sin(x) * n)
    assert GraphChecker([X, 3]).problem(scaled, copy.deepcopy(scaled)) is None
    other = copy.deepcopy(after)
    assert GraphChecker([X]).problem(after, other) is None
    next(iter(other.graph.find_nodes(op="call_function", target=torch.numel))).target = torch.Tensor.dim
    other.recompile()
    assert GraphChecker([X]).problem(after, other) is not None


def model_of(body: str) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 20]> main (float[3] x) => (float[3] y) {{ {body} }}'
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    for node in model.graph:
        if node.op_type == "Add":
            node.metadata_props["source"] = "here.py:7"
        if node.op_type == "Abs":
            node.outputs[0].type = None
        if node.op_type == "Dropout":
            node.outputs[1].name = ""
    return model


MODELS = {
    "the same": ("e = Exp(x) m = Add(e, e) y = Sin(m)", None),
    "a new value": ("e = Exp(x) n = Neg(e) m = Sub(e, n) y = Sin(m)", None),
    "a value less": ("e = Exp(x) n = Add(e, e) y = Sin(n)", None),
    "the first value": ("e = Exp(x) a = Abs(e) b = Abs(a) m = Add(e, x) y = Sin(m)", "m (here.py:7)"),
    "values without a type or a name": (
        "e = Exp(x) a = Abs(e) d, unused = Dropout(a) m = Add(d, x) y = Sin(m)",
        "m (here.py:7)",
    ),
    "no source": ("e = Exp(x) m = Sub(e, e) y = Sin(m)", "m"),
    "the output": ("e = Exp(x) m = Add(e, e) y = Cos(m)", "y"),
    "another dtype inside": (
        "e = Exp(x) m = Cast<to = 11>(e) n = Cast<to = 1>(m) y = Sin(n)",
        "sin ",
    ),
    "what is refused": ("e = Exp(x) y = Unheard(e)", "ONNX Runtime"),
}


@pytest.mark.parametrize("what", MODELS)
def test_what_is_a_problem_of_a_model(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's own optimizations, which may be at fault themselves, have no part in it."""
    optimized = []

    class Recorded(Session):
        def __init__(self, model: ir.Model, settings: SessionSettings, *specs: object) -> None:
            optimized.append(settings.optimize)
            super().__init__(model, settings, *specs)  # type: ignore[arg-type]

    monkeypatch.setattr(pass_verification, "Session", Recorded)
    body, said = MODELS[what]
    graph = make_fx(lambda x: (x.exp() * 2).sin())(X)
    first, *_, last = (node for node in graph.graph.nodes if node.op != "output")
    specs = [InputSpec("x", torch.float32)], [OutputSpec("y", torch.float32)]
    settings = SessionSettings(("CPUExecutionProvider",), threads=1)
    checker = ModelChecker(evaluate(graph, [X]), [first], [last], *specs, settings)
    found = checker.problem(model_of("e = Exp(x) d, n = Dropout(e) m = Add(d, e) y = Sin(m)"), model_of(body))
    assert found is None if said is None else str(found).startswith(said), found
    assert optimized and not any(optimized)


def test_a_graph_is_built_once_at_its_first_call() -> None:
    built: list[object] = []

    def build(args: object) -> Callable[[list[object]], object]:
        time.sleep(0.05)
        built.append(args)
        return lambda args: sum(args)  # type: ignore[arg-type]

    run = compile_at_first_call(build)  # type: ignore[arg-type]
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(run([1, 2]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (built, results, run([3, 4])) == ([(1, 2)], [3, 3, 3], 7)


def test_who_compiles_may_call_what_another_thread_is_building() -> None:
    """A compile has Dynamo's lock, and a first call takes it before any other."""
    builds, calls = threading.Event(), threading.Event()

    def build(args: object) -> Callable[[list[object]], object]:
        builds.set()
        with dynamo_compile_lock():  # what the compile of a first call takes
            return lambda args: sum(args)  # type: ignore[arg-type]

    run = compile_at_first_call(build)  # type: ignore[arg-type]

    def compile_and_call() -> None:
        with dynamo_compile_lock():
            calls.set()
            builds.wait(0.2)
            results.append(run([1, 2]))

    results: list[object] = []
    threads = [threading.Thread(target=compile_and_call, daemon=True)]
    threads[0].start()
    calls.wait()
    threads.append(threading.Thread(target=lambda: results.append(run([1, 2])), daemon=True))
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert results == [3, 3]


def test_what_built_a_graph_is_let_go() -> None:
    """It keeps the graph before its passes alive."""

    class Build:
        def __call__(self, args: object) -> Callable[[list[object]], object]:
            return len

    build = Build()
    kept = weakref.ref(build)
    run = compile_at_first_call(build)
    del build
    assert kept() is not None
    assert run([1, 2]) == 2
    assert kept() is None


def test_values_that_stand_for_those_that_are_not_known_yet() -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.empty(1000, 3).t())
    value = synthetic(fake)
    assert isinstance(value, torch.Tensor) and type(value) is torch.Tensor
    assert (value.shape, value.stride(), value.dtype) == ((3, 1000), (1, 3), torch.float32)
    assert abs(float(value.mean())) < 0.1 and abs(float(value.std()) - 1) < 0.1
    assert torch.equal(value, synthetic(fake)), "the same each time"  # type: ignore[arg-type]
    for shape in ((1, 3), (0, 3)):
        expanded = synthetic(mode.from_tensor(torch.ones(shape).unsqueeze(0).expand(4, *shape)))
        assert isinstance(expanded, torch.Tensor) and expanded.shape == (4, *shape) and expanded.stride(0) == 0
    integers = synthetic(mode.from_tensor(torch.ones(2, dtype=torch.int64)))
    assert isinstance(integers, torch.Tensor) and integers.tolist() == [0, 0] and integers.dtype is torch.int64
    assert synthetic(math.pi) == math.pi and synthetic(None) is None


def test_a_symbolic_size_is_what_it_was_at_the_first_call() -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(4, 3).t(), static_shapes=False)
    assert [synthetic(size) for size in fake.shape] == [3, 4]
    value = synthetic(fake)
    assert isinstance(value, torch.Tensor) and (value.shape, value.stride()) == ((3, 4), (1, 3))


def test_dynamic_shapes_in_training(plant: Callable[..., None]) -> None:
    plant("joint.bad", sine_becomes_cosine)
    function = compiled(lambda x: torch.sin(x) * 2, dynamic=True, **VERIFY)
    for size in (3, 5):
        x = torch.randn(size, requires_grad=True)
        function(x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    assert counted("undone pass joint.bad") == 1


def test_integers_that_are_not_known_are_valid_for_the_operators_that_read_them() -> None:
    def arguments(target: torch._ops.OpOverload, *others: object) -> list[object] | None:
        graph = fx.Graph()
        x, integers = graph.placeholder("x"), graph.placeholder("integers")
        node = graph.call_function(target, (x, integers, *(x if other is None else other for other in others)))
        graph.output(node)
        with FakeTensorMode():
            x.meta["val"], integers.meta["val"] = torch.empty(2, 2), torch.empty(2, dtype=torch.int32)
        return real_arguments(fx.GraphModule({}, graph), None)

    for target, others, expected in (
        (aten.embedding.default, (), [0, 0]),
        (aten.linalg_lu_solve.default, (None,), [1, 1]),
        (aten._dyn_quant_matmul_4bit.default, (2, 2, 2), None),
    ):
        values = arguments(target, *others)
        assert (values and values[1].tolist()) == expected  # type: ignore[attr-defined]
