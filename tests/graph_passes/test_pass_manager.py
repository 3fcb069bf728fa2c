"""The pass manager: order, options, reports, passes that fail, and PyTorch's bisector."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch import fx
from torch._inductor.compiler_bisector import CompilerBisector
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.cli import main
from dynamo_backends.cli.passes import why_text
from dynamo_backends.dumps.reading import DumpedPass, latest_run
from dynamo_backends.pipeline.pass_target import BACKEND
from passes import Pass, PassContext, catalog, fx_editing, register, unregister
from passes.engine.manager import STAGES, PassManager, Switches, Target, all_passes
from passes.engine.results import NearMiss, PassResult

aten = torch.ops.aten


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """Registers a pass for the duration of a test."""
    names: list[str] = []

    def add(name: str, function: Callable[..., int], **settings: object) -> None:
        register(Pass(name, "Planted by a test.", function, **settings))  # type: ignore[arg-type]
        names.append(name)

    yield add
    for name in names:
        unregister(name)


def nothing(graph: object, context: PassContext) -> int:
    return 0


def third_sine_becomes_cosine(module: fx.GraphModule, context: PassContext) -> int:
    """Wrong at its third match only."""
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.sin.default):
        if context.allows(node):
            fired += 1
            if fired == 3:
                node.target = aten.cos.default
    module.recompile()
    return fired


# The list


def test_each_pass_has_a_stage_a_sentence_and_its_place() -> None:
    passes = all_passes()
    assert passes == tuple(sorted(catalog.OURS, key=lambda item: STAGES.index(item.stage)))
    for item in passes:
        assert item.stage in STAGES
        assert item.sentence.endswith(".") and len(item.sentence) > 20
        assert sys.modules[f"passes.{item.name}"].__doc__, f"{item.name} does not tell its rule"


def in_order(stage: str) -> list[str]:
    return [item.name for item in all_passes() if item.stage == stage]


def test_passes_of_other_packages_follow_ours_but_those_that_clean_up(plant: Callable[..., None]) -> None:
    ours = {stage: in_order(stage) for stage in STAGES}
    for stage in STAGES:
        plant(f"{stage}.mine", nothing)
    assert in_order("pre_grad") == [*ours["pre_grad"], "pre_grad.mine"]
    assert in_order("joint") == [*ours["joint"], "joint.mine"]
    assert in_order("post_grad") == [*ours["post_grad"], "post_grad.mine"]
    assert in_order("onnx")[-3:] == ["onnx.mine", *ours["onnx"][-2:]]


def test_before_and_after_a_pass(plant: Callable[..., None]) -> None:
    ours = in_order("joint")
    plant("joint.early", nothing, before=["joint.common_subexpressions"])
    plant("joint.between", nothing, after=["joint.remove_noops"], before=["joint.early"])
    plant("joint.late", nothing, after=["joint.remove_noops"])
    names = in_order("joint")
    at = names.index("joint.common_subexpressions")
    assert names[at - 2 : at] == ["joint.between", "joint.early"]
    assert names[-1] == "joint.late"
    assert [name for name in names if name in ours] == ours


def test_before_and_after_a_stage(plant: Callable[..., None]) -> None:
    plant("onnx.first", nothing, before=["onnx"])
    plant("onnx.last", nothing, after=["onnx"])
    plant("joint.somewhere", nothing, before=["post_grad", "onnx.attention"], after=["pre_grad"])
    names = in_order("onnx")
    assert names[0] == "onnx.first" and names[-3:-1] == ["onnx.last", "onnx.long_sums"]


BAD_PLACES = {
    "unknown": (
        {"before": ["joint.common_subexpresions"]},
        "'joint.common_subexpresions'.*'joint.common_subexpressions'",
    ),
    "unknown stage": ({"after": ["joynt"]}, "'joynt'"),
    "itself": ({"before": ["joint.mine"]}, "'joint.mine'"),
    "a circle": (
        {"before": ["joint.remove_noops"], "after": ["joint.common_subexpressions"]},
        "'joint.common_subexpressions' .*'joint.remove_noops'",
    ),
    "an earlier stage": ({"before": ["pre_grad"]}, "'joint.mine'.*'pre_grad'"),
    "a pass of a later stage": ({"after": ["onnx.attention"]}, "'joint.mine'.*'onnx.attention'"),
    "no list": ({"before": "joint.common_subexpressions"}, "before takes"),
}


@pytest.mark.parametrize("case", BAD_PLACES)
def test_a_place_that_there_is_not_is_an_error(case: str, plant: Callable[..., None]) -> None:
    places, said = BAD_PLACES[case]
    with pytest.raises((ValueError, TypeError), match=said):
        plant("joint.mine", nothing, **places)


def test_nobody_runs_after_what_cleans_up(plant: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="onnx.long_sums"):
        plant("onnx.mine", nothing, after=["onnx.long_sums"])


def test_two_passes_that_want_to_be_before_each_other(plant: Callable[..., None]) -> None:
    plant("joint.one", nothing)
    plant("joint.two", nothing, before=["joint.one"])
    with pytest.raises(ValueError, match="'joint.one' .*'joint.two'"):
        plant("joint.three", nothing, after=["joint.one"], before=["joint.two"])


# Two passes of one name


_CELL = """
import functools, torch
from passes import OnnxPattern, Pass, Pattern, onnx_pattern_pass, pattern_pass, register, register_pass

def none(module, context): return 0
def some(module, context, factor=2): return factor
def make(factor):
    def run(module, context): return factor
    return run
def scaled(factor, module, context): return factor
def local(is_first):
    if is_first:
        def run(module, context): return 0
    else:
        def run(module, context): return 1
    return run
class Scale:
    def __init__(self, factor): self.factor = factor
    def __call__(self, module, context): return self.factor
def relu(x): return torch.relu(torch.relu(x))
def gelu(x): return torch.nn.functional.gelu(torch.relu(x))
def onnx_relu(op, x): return op.Relu(op.Relu(x))
def onnx_gelu(op, x): return op.Gelu(op.Relu(x))
def pattern(search): return Pattern("one", search, lambda x: torch.relu(x), [torch.empty(2)])
"""

TWO_OF_ONE_NAME = {
    "functions": ('register_pass("joint.mine", "")(none)', 'register_pass("joint.mine", "")(some)'),
    "lambdas": (
        'register(Pass("joint.mine", "", lambda module, context: 0))',
        'register(Pass("joint.mine", "", lambda module, context: 1))',
    ),
    "functions of one def": (
        'register(Pass("joint.mine", "", make(2)))',
        'register(Pass("joint.mine", "", make(3)))',
    ),
    "partial": (
        'register(Pass("joint.mine", "", functools.partial(scaled, 2)))',
        'register(Pass("joint.mine", "", functools.partial(scaled, 3)))',
    ),
    "objects": ('register(Pass("joint.mine", "", Scale(2)))', 'register(Pass("joint.mine", "", Scale(3)))'),
    "patterns": (
        'register(pattern_pass("joint.mine", "", [pattern(relu)]))',
        'register(pattern_pass("joint.mine", "", [pattern(gelu)]))',
    ),
    "functions that make patterns": (
        'register(pattern_pass("joint.mine", "", lambda: [pattern(relu)]))',
        'register(pattern_pass("joint.mine", "", lambda: [pattern(gelu)]))',
    ),
    "onnx patterns": (
        'register(onnx_pattern_pass("onnx.mine", "", [OnnxPattern("one", onnx_relu, onnx_relu)]))',
        'register(onnx_pattern_pass("onnx.mine", "", [OnnxPattern("one", onnx_gelu, onnx_relu)]))',
    ),
    "local functions": (
        'register(Pass("joint.mine", "", local(True)))',
        'register(Pass("joint.mine", "", local(False)))',
    ),
    "numbers of a pattern": (
        'register(pattern_pass("joint.mine", "", [Pattern("one", some, some, [], scalars={"factor": 0.5})]))',
        'register(pattern_pass("joint.mine", "", [Pattern("one", some, some, [], scalars={"module": 0.5})]))',
    ),
    "inputs of a pattern": (
        'register(pattern_pass("joint.mine", "", [Pattern("one", relu, relu, [torch.empty(2)])]))',
        'register(pattern_pass("joint.mine", "", [Pattern("one", relu, relu, [torch.empty(2).double()])]))',
    ),
    "order of operands of an onnx pattern": (
        'register(onnx_pattern_pass("onnx.mine", "", [OnnxPattern("one", onnx_relu, onnx_relu)]))',
        'register(onnx_pattern_pass("onnx.mine", "", [OnnxPattern("one", onnx_relu, onnx_relu, commute=False)]))',
    ),
}


@pytest.mark.parametrize("case", TWO_OF_ONE_NAME)
def test_a_name_belongs_to_one_pass(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """A pass that is defined again replaces the former one and says so; another needs ``unregister``."""
    first, second = (_CELL + line for line in TWO_OF_ONE_NAME[case])
    cell = {"__name__": "a_notebook"}

    def run(text: str) -> Pass:
        exec(compile(text, "cell.py", "exec"), cell)
        return next(item for item in all_passes() if item.name.endswith(".mine"))

    try:
        pass_ = run(first)
        assert not caplog.records
        again = run(first)
        assert again.run is not pass_.run and [record.levelname for record in caplog.records] == ["WARNING"]
        with pytest.raises(ValueError, match=r"cell\.py.*; .*cell\.py.*unregister"):
            exec(compile(TWO_OF_ONE_NAME[case][1], "cell.py", "exec"), cell)
        assert run("").run is again.run
        unregister(again.name)
        assert run(second).run is not again.run
    finally:
        unregister("joint.mine")
        unregister("onnx.mine")


# Switches


@pytest.mark.parametrize(
    ("switches", "on"),
    [
        ({}, {"joint.a", "joint.b", "onnx.c"}),
        ({"disable": ["joint.*"]}, {"onnx.c"}),
        ({"disable": ["*"]}, set()),
        ({"disable": ["*"], "enable": ["joint.a"]}, {"joint.a"}),
        ({"disable": ["*"], "enable": ["joint.*"]}, {"joint.a", "joint.b"}),
        ({"disable": ["joint.a"], "enable": ["joint.*"]}, {"joint.b", "onnx.c"}),
        ({"enable": ["onnx.off"]}, {"joint.a", "joint.b", "onnx.c", "onnx.off"}),
    ],
)
def test_the_most_specific_switch_decides(switches: dict[str, list[str]], on: set[str]) -> None:
    passes = [Pass(name, "A test's.", nothing, default=name != "onnx.off") for name in ("joint.a", "joint.b", "onnx.c")]
    passes.append(Pass("onnx.off", "A test's.", nothing, default=False))
    passes.append(Pass("onnx.needed", "A test's.", nothing, is_needed=True))
    chosen = Switches(**{key: tuple(names) for key, names in switches.items()})
    assert {item.name for item in passes if chosen.is_on(item)} == on | {"onnx.needed"}


BAD_SWITCHES = {
    "unknown name": ({"disable": ["joint.remove_nops"]}, "'joint.remove_nops'.*'joint.remove_noops'"),
    "without stage": ({"disable": ["remove_noops"]}, "'remove_noops'.*'joint.remove_noops'"),
    "pattern that fits nothing": ({"enable": ["jont.*"]}, r"'jont\.\*'"),
    "unknown key": ({"disabled": ["joint.*"]}, "'disabled'.*'disable'"),
    "no list": ({"disable": "joint.*"}, "option 'passes'"),
    "no names": ({"disable": [1]}, "option 'passes'"),
    "no dict": (["joint.*"], "expected {'disable'"),
    "what is needed": ({"disable": ["onnx.long_sums"]}, "'onnx.long_sums'"),
    "a pattern of what is needed": ({"disable": ["onnx.long_*"]}, r"'onnx\.long_\*'"),
    "both": ({"disable": ["joint.*"], "enable": ["joint.*"]}, r"'joint\.\*'"),
}


@pytest.mark.parametrize("case", BAD_SWITCHES)
def test_bad_switches_are_errors(case: str) -> None:
    value, said = BAD_SWITCHES[case]
    with pytest.raises(Exception, match=said):
        compiled(torch.relu, options={"passes": value})(torch.ones(2))


def test_switches_of_a_compile() -> None:
    with torch.no_grad():
        compiled(lambda x: (x + 1).detach() * 2)(torch.ones(3))
        assert any(event.startswith("pass ") for event in torch._dynamo.utils.counters["dynamo_backends"])
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled(lambda x: (x + 1).detach() * 2, options={"passes": {"disable": ["*"]}})(torch.ones(3))
        assert not any(event.startswith("pass ") for event in torch._dynamo.utils.counters["dynamo_backends"])


@pytest.mark.parametrize("text", ['{"disable": ["post_grad.*", "joint.*"]}', "-post_grad.*, -joint.*"])
def test_switches_in_the_environment(text: str, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]) -> None:
    ran = []
    plant("post_grad.seen", lambda graph, context: ran.append("post_grad") or 0)
    plant("onnx.seen", lambda graph, context: ran.append("onnx") or 0)
    monkeypatch.setenv("DYNAMO_BACKENDS_PASSES", text)
    compiled(torch.relu)(torch.ones(3))
    assert ran == ["onnx"]


@pytest.mark.parametrize("text", ["joint.*", "{", "-jont.*"])
def test_a_bad_environment_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_BACKENDS_PASSES", text)
    with pytest.raises(Exception, match="DYNAMO_BACKENDS_PASSES"):
        compiled(torch.relu)(torch.ones(3))


# Running


def test_subgraphs_are_visited(plant: Callable[..., None]) -> None:
    seen: list[int] = []

    def sines_twice_negated(module: fx.GraphModule, context: PassContext) -> int:
        sines = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        for node in sines:
            negated = fx_editing.call(node, aten.neg.default, node.args)
            fx_editing.replace(node, fx_editing.call(node, aten.neg.default, (negated,)), context)
        seen.append(len(sines))
        return len(sines)

    plant("post_grad.count", sines_twice_negated)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin().sin(), lambda x: x.cos(), (x,)).sin()

    with torch.no_grad():
        compiled(branches)(torch.randn(3))
    assert sorted(seen) == [0, 1, 2]
    assert counted("pass post_grad.count") == 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_fails_is_left_out(
    stage: str, plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(graph: fx.GraphModule | ir.Model, context: PassContext) -> int:
        """Breaks the graph, then fails."""
        if isinstance(graph, fx.GraphModule):
            for node in list(graph.graph.nodes):
                if node.op == "call_function":
                    node.target = torch.neg
        else:
            for node in graph.graph:
                node.op_type = "Neg"
        raise KeyError("lost")

    plant(f"{stage}.spoil", spoil)
    with caplog.at_level(logging.WARNING, "passes.engine.manager"):
        assert_same_as_eager(lambda x: torch.sin(x) * 2, torch.randn(3, requires_grad=True))
    assert f"pass '{stage}.spoil' failed" in caplog.text and "KeyError: 'lost'" in caplog.text
    assert "'disable'" in caplog.text


def test_a_pass_that_fails_is_an_error_when_fallback_is(plant: Callable[..., None]) -> None:
    def fail(graph: object, context: PassContext) -> int:
        raise KeyError("lost")

    plant("post_grad.fail", fail)
    with pytest.raises(Exception, match=r"'post_grad.fail' .*graph \d+ inference: KeyError: 'lost'"):
        compiled(torch.sin, options={"fallback": "error"})(torch.ones(3))


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("is_needed", [True, False])
def test_a_node_with_a_users_converter_is_rewritten_by_needed_passes_only(asks: bool, is_needed: bool) -> None:
    def sine_becomes_cosine(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        if asks and not context.allows(node):
            return 0
        node.target = aten.cos.default
        return 1

    def keeps(node: fx.Node) -> str | None:
        return "aten.sin.default" if node.target is aten.sin.default else None

    module = make_fx(lambda x: x.sin() + 1, tracing_mode="fake")(torch.ones(3))
    item = Pass("post_grad.mine", "A test's.", sine_becomes_cosine, is_needed=is_needed)
    (result,) = PassManager(target=Target(keeps=keeps), strict=True, passes=[item]).run("post_grad", module)
    (first, *_) = (node.target for node in module.graph.nodes if node.op == "call_function")
    assert (first, result.fired) == ((aten.cos.default, 1) if is_needed else (aten.sin.default, 0))
    assert not result.undone


@pytest.mark.parametrize("result", [None, True, 1.0])
def test_a_pass_says_how_often_it_fired(result: object) -> None:
    item = Pass("post_grad.mine", "A test's.", lambda graph, context: result)
    manager = PassManager(strict=True, passes=[item])
    with pytest.raises(RuntimeError, match=re.escape(repr(result))):
        manager.run("post_grad", fx.symbolic_trace(lambda x: x + 1))


def test_near_misses_that_got_furthest_come_first() -> None:
    context = PassContext("joint.mine", explain=True)
    for i in range(25):
        context.record_near_miss(f"node_{i}", "too short", matched=i, of=100)
    context.record_near_miss("node_3", "too short", matched=99, of=100)  # known already
    context.record_near_miss("node_24", "not pure", matched=1, of=1, pattern="second")
    context.record_near_miss("matched", "at first it did not", matched=1, of=1)
    assert context.allows("matched")
    assert context.near_misses[0].reason == "not pure" and context.near_misses[0].pattern == "second"
    assert [miss.node for miss in context.near_misses[1:]] == [f"node_{i}" for i in range(24, 5, -1)]
    assert context.matches == ["matched"] and context.stage == "joint"
    silent = PassContext("joint.mine")
    silent.record_near_miss("node", "a reason")
    assert not silent.near_misses


# Reports


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    function = torch.compile(
        lambda x: (torch.relu(x) + 0).detach() * 2, backend="onnx_debug", options={"dump_dir": str(tmp_path)}
    )
    with torch.no_grad():
        function(torch.randn(3))
    return tmp_path


def test_the_manifest_has_each_pass(dump: Path) -> None:
    manifest = json.loads((latest_run(dump) / "manifest.json").read_text())
    (dynamo,), (graph,) = manifest["dynamo_graphs"], manifest["graphs"]
    results = [*dynamo["passes"], *graph["passes"], *graph["regions"][0]["passes"]]
    assert [result["name"] for result in results] == [item.name for item in all_passes() if item.default]
    (removed,) = [result for result in results if result["name"] == "joint.remove_noops"]
    for result in results:
        assert result["nodes_before"] >= result["nodes_after"] and result["milliseconds"] >= 0
    fired = {result["name"]: result["nodes_before"] - result["nodes_after"] for result in results if result["fired"]}
    assert fired and removed["nodes_before"] > 0


def test_a_diff_for_each_pass_that_fired(dump: Path) -> None:
    diffs = {path.name: path.read_text() for path in latest_run(dump).rglob("*.diff")}
    manifest = json.loads((latest_run(dump) / "manifest.json").read_text())
    (graph,) = manifest["graphs"]
    results = [*manifest["dynamo_graphs"][0]["passes"], *graph["passes"], *graph["regions"][0]["passes"]]
    assert set(diffs) == {f"{result['name']}.diff" for result in results if result["fired"]}
    text = next(text for text in diffs.values() if "detach" in text)
    changed = [line for line in text.splitlines()[2:] if line.startswith(("-", "+"))]
    assert any("detach" in line and line.startswith("-") for line in changed)
    assert "fired 1, nodes" in text.splitlines()[1]


def test_the_command_lists_all_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes"]) == 0
    printed = capsys.readouterr().out
    for item in all_passes():
        (line,) = [line for line in printed.splitlines() if f" {item.name} " in line]
        assert item.sentence in line and line.startswith(item.stage) and (" on " if item.default else " off ") in line


def test_the_command_shows_what_passes_did(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (dump, latest_run(dump), latest_run(dump) / "manifest.json"):
        assert main(["passes", str(given)]) == 0
        printed = capsys.readouterr().out
        lines = {line.split()[0]: line.split() for line in printed.splitlines() if "." in line.split(" ")[0]}
        assert set(lines) >= {item.name for item in all_passes() if item.default}


def test_the_command_on_what_is_not_there(
    dump: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["passes", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["passes", str(dump), "--why", "joint.common_subexpresions"]) == 2
    assert "Did you mean 'joint.common_subexpressions'" in capsys.readouterr().err
    assert main(["passes", "--why", "joint.common_subexpressions"]) == 2
    assert "no dump here" in capsys.readouterr().err


def test_the_command_tells_why_a_pass_did_not_fire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def almost(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(q @ k.transpose(-2, -1)), -1) @ v

    arguments = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    with torch.no_grad():
        torch.compile(almost, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(*arguments)
    assert main(["passes", str(tmp_path), "--why", "onnx.attention"]) == 0
    printed = capsys.readouterr().out
    assert "onnx.attention fired 0 times." in printed
    assert "2 of 4 nodes" in printed and " at bmm_1 " in printed


def test_near_misses_are_grouped_by_reason_and_close_ones_come_first() -> None:
    far = [NearMiss(f"mul_{i}", f"mul_{i} is used elsewhere", 1, 4) for i in range(9)]
    near_misses = [*far, NearMiss("tanh", "its dtype is not known", 3, 4, "gelu"), NearMiss("a", "no place")]
    result = PassResult("post_grad.it", 0, 9, 9, 0.1, near_misses=near_misses)
    lines = why_text("post_grad.it", [DumpedPass(result, 0, Path(), "forward")]).splitlines()
    nodes = [line.split(" (")[0].strip() for line in lines if line.startswith("  at ")]
    assert nodes == ["at tanh", "at mul_0", "at a"]
    assert sum("is used elsewhere" in line for line in lines) == 1


# PyTorch's bisector


def waves(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = torch.sin(x) + 1
    return x


def test_the_bisector_names_pass_and_match(
    plant: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("post_grad.bad", third_sine_becomes_cosine)
    x = torch.randn(3)

    def no_inductor(*args: object, **kwargs: object) -> None:
        raise AssertionError("Inductor ran")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", no_inductor)

    def is_right() -> bool:
        torch._dynamo.reset()
        with torch.no_grad():
            return torch.allclose(torch.compile(waves, backend="onnxrt")(x), waves(x))

    result = CompilerBisector.do_bisect(is_right)
    assert result is not None
    assert (result.backend, result.subsystem) == (BACKEND, "post_grad_passes")
    assert result.debug_info is not None
    assert result.debug_info.startswith("post_grad.bad at sin_2 of graph")


SCRIPT = """
    import sys, torch
    from passes import register_pass

    @register_pass("pre_grad.bad", "Turns the fourth sine into a cosine.")
    def bad(module, context):
        fired = 0
        for node in module.graph.nodes:
            if node.target is torch.sin and context.allows(node):
                fired += 1
                if fired == 4:
                    node.target = torch.cos
        return fired

    def f(x):
        for _ in range(6):
            x = torch.sin(x) + 1
        return x

    x = torch.randn(3)
    with torch.no_grad():
        sys.exit(not torch.allclose(torch.compile(f, backend="onnxrt")(x), f(x)))
"""


def test_the_command_bisects_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "dynamo_backends", "bisect", sys.executable, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    (said,) = run.stdout.splitlines()  # and nothing of PyTorch's
    assert [datum for datum in ("onnxrt", "pre_grad", "pre_grad.bad", "sin_3", "graph 0") if datum not in said] == []


@pytest.mark.parametrize(("code", "said"), [("0", "no issue found"), ("1", "'eager'")])
def test_the_command_bisects_what_is_not_ours(code: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", sys.executable, "-c", f"raise SystemExit({code})"]) == int(code)
    assert said in capsys.readouterr().out


def test_bisect_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect"]) == 2
    assert main(["bisect", "/no/such/program"]) == 2
    assert "/no/such/program" in capsys.readouterr().err


def test_passes_are_registered_while_others_compile() -> None:
    """A compile in another thread sees all passes, or all and the new one."""
    expected, seen, stop = len(all_passes()), set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(len(all_passes()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        register(Pass("joint.race", "Planted by a test.", lambda graph, context: 0))
        unregister("joint.race")
    stop.set()
    reader.join()
    assert seen <= {expected, expected + 1}
