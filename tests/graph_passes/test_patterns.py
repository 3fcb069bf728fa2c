"""Patterns of two functions on FX graphs: matches, rejections with reasons, and up-to-date serialized patterns."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch._inductor.pattern_matcher import Match

from dynamo_backends import decomposition_table
from passes import Pass, PassContext, Pattern, Target, pattern_pass, register, unregister

F = torch.nn.functional
aten = torch.ops.aten


@pytest.fixture
def plant() -> Iterator[Callable[[Pass], Pass]]:
    """Registers a pass for the duration of a test."""
    planted: list[Pass] = []

    def add(item: Pass) -> Pass:
        register(item)
        planted.append(item)
        return item

    yield add
    for item in planted:
        unregister(item.name)


def clipped(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.neg(torch.relu(x)))


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def clipped_pass(**settings: object) -> Pass:
    return pattern_pass(
        "post_grad.clip", "relu(-relu(x)) is 0.", [Pattern("clip", clipped, zeros, [torch.empty(2, 3)], **settings)]
    )


def test_a_pattern_of_two_functions(plant: Callable[[Pass], Pass]) -> None:
    plant(clipped_pass())
    with torch.no_grad():
        assert_same_as_eager(lambda x: clipped(x) + x + clipped(x * 2), torch.randn(5, 7))
    assert counted("pass post_grad.clip") == 2


def test_other_shapes_and_dynamic_shapes_than_the_example(plant: Callable[[Pass], Pass]) -> None:
    plant(clipped_pass())
    function = compiled(lambda x: clipped(x) + x, dynamic=True)
    for shape in ((2, 3), (4, 5)):
        x = torch.randn(shape)
        torch.testing.assert_close(function(x), clipped(x) + x)
    assert counted("pass post_grad.clip") == 1


def test_a_value_that_is_used_elsewhere_stays(plant: Callable[[Pass], Pass]) -> None:
    plant(clipped_pass())

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = torch.neg(torch.relu(x))
        return torch.relu(inner), inner

    with torch.no_grad():
        assert_same_as_eager(both, torch.randn(3))
    assert counted("pass post_grad.clip") == 0


def test_a_check_rejects_with_a_reason() -> None:
    def refuse(match: Match) -> str | None:
        return "too small" if match.kwargs["x"].meta["val"].numel() < 10 else None

    item = clipped_pass(check=refuse)
    for size, fired in ((3, 0), (30, 1)):
        module, context = traced(clipped, torch.randn(size)), PassContext(item.name, explain=True)
        assert item.run(module, context) == fired
        said = [(miss.reason, miss.matched, miss.of, miss.pattern) for miss in context.near_misses]
        assert said == ([] if fired else [("too small", 3, 3, "clip")])


@pytest.mark.parametrize(
    ("replacement", "datum"),
    [
        (lambda x: torch.zeros_like(x).sum(0), r"float32 \[3\].* relu_1 .*float32 \[2, 3\]"),
        (lambda x: torch.zeros_like(x).double(), r"float64 \[2, 3\].* relu_1 .*float32 \[2, 3\]"),
        (lambda x: x, "memory .*argument"),
        (lambda x: x.view(2, 3), "memory .*argument"),
        (lambda x: x @ x, "computed"),
    ],
    ids=["shape", "dtype", "memory", "a view", "does not fit"],
)
def test_a_replacement_that_is_not_the_same_is_rejected(replacement: Callable[..., object], datum: str) -> None:
    pattern = Pattern("clip", clipped, replacement, [torch.empty(3, 3)])
    item = pattern_pass("post_grad.clip", "relu(-relu(x)) is 0.", [pattern])
    module, context = traced(lambda x: clipped(x), torch.randn(2, 3)), PassContext(item.name, explain=True)
    assert item.run(module, context) == 0
    assert re.search(datum, context.near_misses[0].reason)


def test_matchers_know_the_decompositions_they_were_made_with() -> None:
    """Two targets of one opset whose graphs are made otherwise."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return F.hardswish(torch.relu(x))

    item = pattern_pass("post_grad.odd", "Odd.", [Pattern("odd", search, torch.relu, [torch.empty(2)])])
    whole, apart = traced(search, torch.randn(3)), traced(lambda x: torch.relu(x) * 2.0, torch.randn(3))
    keeps, takes_apart = Target(), Target(decompositions=lambda: {aten.hardswish.default: lambda x: x * 2.0})
    for target, matches, other in ((keeps, whole, apart), (takes_apart, apart, whole), (keeps, whole, apart)):
        context = PassContext(item.name, target=target)
        assert item.run(copy.deepcopy(other), context) == 0
        assert item.run(copy.deepcopy(matches), context) == 1


def test_numbers_as_arguments() -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.relu(x) * factor

    def is_positive(match: Match) -> str | None:
        return None if match.kwargs["factor"] > 0 else "not positive"

    pattern = Pattern(
        "scaled",
        scaled,
        lambda x, factor: torch.relu(x * factor),
        [torch.empty(2)],
        check=is_positive,
        scalars={"factor": 0.1234},
    )
    item = pattern_pass("post_grad.scaled", "Moves a factor into relu.", [pattern])
    module = traced(lambda x: torch.relu(x) * 3.0, torch.randn(4))
    assert item.run(module, PassContext(item.name)) == 1
    x = torch.randn(4)
    torch.testing.assert_close(module(x), torch.relu(x) * 3.0)
    module, context = traced(lambda x: torch.relu(x) * -3.0, torch.randn(4)), PassContext(item.name, explain=True)
    assert item.run(module, context) == 0
    assert context.near_misses[0].reason == "not positive"


def test_a_training_pattern_replaces_forward_and_backward(plant: Callable[[Pass], Pass]) -> None:
    """exp(x) * exp(x): in the joint graph the match is both products of the backward as well."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * torch.exp(x)

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * 2)

    example = torch.empty(2, 3, requires_grad=True)
    plant(
        pattern_pass(
            "joint.exp", "exp(x) ** 2 is exp(2 x).", [Pattern("exp", search, replacement, [example], is_training=True)]
        )
    )
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert_same_as_eager(lambda x: search(x) + 1, x)
    assert counted("pass joint.exp") == 1


def test_replacements_keep_the_source_line() -> None:
    item = clipped_pass()
    module = compiled_graph(lambda x: clipped(x) + x, torch.randn(3))
    (result,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert item.run(module, PassContext(item.name)) == 1
    new = next(node for node in module.graph.nodes if node in result.all_input_nodes and node.op == "call_function")
    assert "test_patterns.py" in new.meta["stack_trace"]


def traced(function: Callable[..., object], *args: torch.Tensor) -> torch.fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    return make_fx(function)(*(mode.from_tensor(arg) for arg in args))


def compiled_graph(function: Callable[..., object], *args: torch.Tensor) -> torch.fx.GraphModule:
    """The ATen graph AOTAutograd makes of a function."""
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def keep(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        seen.append(module)
        return module.forward

    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep))(*args)
    return seen[0]


# Our own patterns


def test_the_matcher_is_not_imported_for_graphs_it_has_nothing_for() -> None:
    script = """
        import sys, torch
        with torch.no_grad():
            torch.compile(lambda x: torch.relu(x) * 2 + 1, backend="onnxrt")(torch.ones(3))
        print("torch._inductor.pattern_matcher" in sys.modules)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.check_output(command, env=environment, text=True).strip() == "False"


def test_our_passes_do_not_load_pytorchs_pattern_matcher() -> None:
    """Which takes most of a second, and traces each pattern; in a process of its own, where nothing else loads it."""
    script = """
        import sys, torch
        torch.compile(lambda x: x + 1, backend="onnxrt", options={"passes": {"disable": ["*"]}})(torch.ones(3))
        from passes import PassContext
        from passes.engine.registry import all_passes
        import onnx_ir as ir
        empty = torch.fx.symbolic_trace(lambda x: x)
        for item in all_passes():
            graph = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=10)
            item.run(graph if item.stage == "onnx" else empty, PassContext(item.name, explain=True))
        print("torch._inductor.pattern_matcher" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.check_output(command, env=environment, text=True) == "False\n"


# Passes of other packages

PACKAGE = {
    "setup.cfg": """
        [metadata]
        name = someone-elses-passes
        version = 1.0

        [options]
        packages = someone

        [options.entry_points]
        dynamo_backends_passes =
            someone = someone.passes
    """,
    "pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
    """,
    "someone/__init__.py": "",
    "someone/passes.py": """
        import torch

        from passes import Pattern, pattern_pass, register, register_pass


        @register_pass("post_grad.someone.unnegate", "Replaces neg(neg(x)) by x.")
        def unnegate(module, context):
            fired = 0
            for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default):
                inner = node.args[0]
                if inner.target is not torch.ops.aten.neg.default:
                    context.record_near_miss(node, "its argument is not negated", matched=1, of=2)
                elif context.allows(node):
                    node.replace_all_uses_with(inner.args[0])
                    module.graph.erase_node(node)
                    fired += 1
            module.recompile()
            return fired


        register(
            pattern_pass(
                "post_grad.someone.softsign",
                "Writes x / (1 + |x|) as softsign's own decomposition.",
                lambda: [
                    Pattern("softsign", lambda x: x / (1 + x.abs()), torch.nn.functional.softsign, [torch.empty(2)])
                ],
            )
        )
    """,
}

CALL = """
    import json, torch
    from torch._dynamo.utils import counters
    x = torch.randn(5)
    def f(x): return torch.neg(torch.neg(x)) + x / (1 + x.abs())
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend="onnxrt")(x), f(x))
    print(json.dumps({k: v for k, v in counters["dynamo_backends"].items() if "someone" in k}))
"""


def test_passes_of_an_installed_package(tmp_path: Path) -> None:
    """The documented example as another package, installed by pip into a folder of its own."""
    source, site = tmp_path / "source", tmp_path / "site"
    for name, text in PACKAGE.items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--no-index", "--target", str(site), str(source)], check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALL)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == '{"pass post_grad.someone.unnegate": 1, "pass post_grad.someone.softsign": 1}'
    command = [sys.executable, "-m", "dynamo_backends", "passes"]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300).stdout
    assert "post_grad.someone.unnegate" in listed and "Replaces neg(neg(x)) by x." in listed


def test_a_broken_package_is_left_out_with_a_warning(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dynamo_backends_passes]\nbroken = no_such_module_anywhere\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    script = "import torch; print(torch.compile(lambda x: x + 1, backend='onnxrt')(torch.ones(2)).tolist())"
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "[2.0, 2.0]"
    assert "no_such_module_anywhere" in run.stderr and "left out" in run.stderr


def test_names_are_checked(plant: Callable[[Pass], Pass]) -> None:
    with pytest.raises(ValueError, match="'silu'"):
        pattern_pass("silu", "No stage.", [])
    with pytest.raises(ValueError, match="'post_grad.bfloat16_in_float32'"):
        plant(pattern_pass("post_grad.bfloat16_in_float32", "Taken.", []))


def test_traced_with_the_decompositions_of_the_graphs(plant: Callable[[Pass], Pass]) -> None:
    """``hardswish`` stays whole in our graphs; Inductor's table, PyTorch's default for patterns, takes it apart."""
    assert aten.hardswish.default not in decomposition_table()

    def search(x: torch.Tensor) -> torch.Tensor:
        return F.hardswish(F.logsigmoid(x))

    plant(pattern_pass("post_grad.odd", "Odd.", [Pattern("odd", search, lambda x: x * 0 + 1, [torch.empty(2)])]))
    with torch.no_grad():
        result = compiled(lambda x: search(x))(torch.randn(7))
    assert counted("pass post_grad.odd") == 1
    assert result.tolist() == [1.0] * 7
