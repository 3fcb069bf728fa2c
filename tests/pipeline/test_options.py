"""The options that change how a model runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from dynamo_backends import UnsupportedOperatorError, decomposition_table, onnx_compiler
from dynamo_backends import options as options_module
from dynamo_backends.backends import AotCompiler
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.options import OptionFormat, Options, most_threads, option, parse_options
from dynamo_backends.runtime.opsets import MINIMUM_OPSET, maximum_opset
from dynamo_backends.runtime.session import Session
from passes import Pass, PassContext


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Softmax(-1))


def test_every_option_has_help_and_a_valid_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CACHE", "PLACEMENT", "AUTOTUNE_BUDGET"):
        monkeypatch.delenv(f"DYNAMO_BACKENDS_{name}")  # tests/conftest.py sets it
    defaults = Options()
    for name, field in Options.__dataclass_fields__.items():
        assert field.metadata["help"].endswith("."), name
        assert getattr(defaults, name) == getattr(parse_options(), name)


def test_a_new_option_is_one_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its help, its check, and how what a user or the environment says is read, are all in it."""

    def check(value: object) -> None:
        if value not in (1, 2):
            raise ValueError(f"expected 1 or 2, got {value!r}")

    @dataclasses.dataclass(frozen=True)
    class More(Options):
        speed: int = option(
            "run", 1, OptionFormat(check, int, lambda value: 2 if value == "fast" else value), "How fast it is."
        )

    monkeypatch.setattr(options_module, "Options", More)
    assert parse_options().speed == 1  # type: ignore[attr-defined]
    assert parse_options({"speed": "fast"}).speed == 2  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="^option 'speed': .*, got 3$"):
        parse_options({"speed": 3})
    with pytest.raises(ValueError, match="'sped'.*'speed'"):
        parse_options({"sped": 1})
    monkeypatch.setenv("DYNAMO_BACKENDS_SPEED", "2")
    assert parse_options().speed == 2  # type: ignore[attr-defined]
    monkeypatch.setenv("DYNAMO_BACKENDS_SPEED", "3")
    with pytest.raises(ValueError, match="DYNAMO_BACKENDS_SPEED='3': .*, got 3$"):
        parse_options()


@pytest.mark.parametrize("threads", [0, -1, most_threads() + 1, 20_000, 100_000, True, "2"])
def test_a_number_of_threads_that_no_machine_has(threads: object) -> None:
    """It is refused before a session tries to make them: 100,000 exhaust the memory."""
    with pytest.raises(ValueError, match="option 'threads': .*integer"):
        parse_options({"threads": threads})


def test_any_sensible_number_of_threads() -> None:
    assert most_threads() >= max(64, os.cpu_count() or 1)
    assert parse_options({"threads": most_threads()}).threads == most_threads()
    with pytest.raises(ValueError, match=f"'threads'.* 1 to {most_threads()} "):
        parse_options({"threads": most_threads() + 1})


@pytest.mark.parametrize("opset", range(MINIMUM_OPSET, maximum_opset() + 1))
def test_every_opset(opset: int) -> None:
    assert_same_as_eager(block(), torch.randn(3, 6), settings={"options": {"opset": opset}})


@pytest.mark.parametrize(
    "providers",
    [["CPUExecutionProvider"], ("CPUExecutionProvider",), [("CPUExecutionProvider", {"use_arena": "0"})]],
)
def test_providers(providers: object) -> None:
    with torch.no_grad():
        assert_same_as_eager(block(), torch.randn(3, 6), settings={"options": {"providers": providers}})
    assert_on_onnx()


def test_the_provider_that_is_asked_for_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[object]] = []
    create = onnxruntime.InferenceSession

    def record(*args: object, providers: list[object], **kwargs: object) -> object:
        asked.append(providers)
        return create(*args, providers=providers, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", record)
    pair = ("CPUExecutionProvider", {"use_arena": "0"})
    compiled(lambda x: x.sinh() + 3, options={"providers": [pair]})(torch.ones(3))
    assert asked
    assert all(providers == [pair] for providers in asked)


def sessions_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread counts for which sessions are requested from now on."""
    used: list[int] = []
    call = Session.ort_session

    def record(self: Session, threads: int) -> onnxruntime.InferenceSession:
        used.append(threads)
        session = call(self, threads)
        assert session.get_session_options().intra_op_num_threads == threads
        return session

    monkeypatch.setattr(Session, "ort_session", record)
    return used


def test_threads_follow_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    used = sessions_threads(monkeypatch)
    function = compiled(lambda x: (x @ x).relu())
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        assert_same_values(function(torch.eye(3)), torch.eye(3))
    assert used == [1, 2, 1]


def test_threads_as_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    used = sessions_threads(monkeypatch)
    torch.set_num_threads(2)
    compiled(lambda x: (x @ x).relu(), options={"threads": 1})(torch.eye(3))
    assert used == [1]


def test_unsupported_operators_fall_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_same_as_eager(lambda x: torch.linalg.eigvalsh(x @ x.t()) + 1, torch.randn(3, 3))
    (record,) = [record for record in caplog.records if record.name.startswith("dynamo_backends")]
    assert "aten._linalg_eigh.default" in record.getMessage()
    assert "no translation to ONNX" in record.getMessage()


def test_fallback_error_names_node_line_and_remedy() -> None:
    def unsupported(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x) + 1  # the line the error names

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(unsupported, options={"fallback": "error"})(torch.eye(3))
    assert isinstance(caught.value.inner_exception, UnsupportedOperatorError)
    message = str(caught.value.inner_exception)
    line = unsupported.__code__.co_firstlineno + 1
    for part in (
        "_linalg_eigh",
        f"{short_file(__file__)}:{line}",
        "no translation to ONNX",
        "Remove options={'fallback': 'error'}",
    ):
        assert part in message


def test_fallback_error_leaves_supported_models_alone() -> None:
    settings = {"options": {"fallback": "error"}}
    assert_same_as_eager(block(), torch.randn(3, 6), settings=settings)
    assert_same_as_eager(lambda x: (x.view(-1), x[1:], x + 1), torch.randn(3, 6), settings=settings)
    # Drawing random numbers stays in PyTorch by design.
    assert_same_as_eager(lambda x: nn.functional.dropout(x) * 2, torch.randn(3, 6), settings=settings)


def test_fallback_error_with_symbolic_sizes() -> None:
    """Arithmetic on sizes is no operator that could be missing."""
    function = compiled(
        lambda x: (x * x.shape[0], x[: x.shape[0] // 2] + 1, x.shape[0] % 3),
        dynamic=True,
        options={"fallback": "error"},
    )
    for size in (4, 7):
        x = torch.randn(size, 3)
        assert_same_values(function(x), (x * size, x[: size // 2] + 1, size % 3))


def test_environment_sets_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_BACKENDS_OPSET", "18")
    monkeypatch.setenv("DYNAMO_BACKENDS_THREADS", "1")
    monkeypatch.setenv("DYNAMO_BACKENDS_FALLBACK", "error")
    monkeypatch.setenv("DYNAMO_BACKENDS_PROVIDERS", "CPUExecutionProvider")
    options = parse_options({"fallback": "pytorch"})
    assert (options.opset, options.threads, options.fallback) == (18, 1, "pytorch")
    assert options.providers == ("CPUExecutionProvider",)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("True", True), ("0", False), ("false", False), ("FALSE", False)]
)
def test_booleans_in_the_environment(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cache", "verify_passes"):  # one is on by default, one off
        monkeypatch.setenv(f"DYNAMO_BACKENDS_{name.upper()}", text)
        assert getattr(parse_options(), name) is value


def test_environment_takes_providers_with_options_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_BACKENDS_PROVIDERS", '[["CPUExecutionProvider", {"use_arena": "0"}]]')
    assert parse_options().providers == (("CPUExecutionProvider", {"use_arena": "0"}),)
    with torch.no_grad():
        assert_same_as_eager(block(), torch.randn(3, 6))


@pytest.mark.parametrize("partition", [True, False])
def test_as_a_compiler_for_aot_autograd(partition: bool) -> None:
    """``fw_compiler`` alone serves forward and backward."""
    compiler = onnx_compiler(opset=18)
    extra = {"partition_fn": compiler.partition_fn} if partition else {}
    backend = aot_autograd(fw_compiler=compiler, decompositions=decomposition_table(18), **extra)
    assert_same_as_eager(block(), torch.randn(3, 6), settings={"backend": backend, "fullgraph": True})
    assert counted("graphs") == 1
    assert counted("regions") == 2


def test_as_a_compiler_that_keeps_input_mutations_in_the_graph() -> None:
    """A read of the old value comes before the write, whatever else moves."""

    def change(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = x.t() * 3
        x.copy_((x @ w).sin())
        after = x * 5
        return before, torch.linalg.eigvalsh(after), before.exp() + 1

    backend = aot_autograd(
        fw_compiler=onnx_compiler(), decompositions=decomposition_table(), keep_inference_input_mutations=True
    )
    settings = {"backend": backend}
    assert_same_as_eager(change, torch.randn(3, 3), torch.randn(3, 3), calls=2, settings=settings)


def through_aot_autograd(compiler: AotCompiler, opset: int) -> object:
    return aot_autograd(
        fw_compiler=compiler, partition_fn=compiler.partition_fn, decompositions=decomposition_table(opset)
    )


def test_the_partitioner_of_a_compiler_has_its_options(planted: Callable[[Pass], None]) -> None:
    """The opset and the switches are the compiler's, for the passes of the stage ``joint`` too."""
    targets: list[tuple[int, str]] = []

    def note(module: torch.fx.GraphModule, context: PassContext) -> int:
        targets.append((context.target.opset, context.graph))
        return 0

    for name in ("joint.note", "joint.off"):
        planted(Pass(name, "Planted by a test.", note))
    compiler = onnx_compiler(opset=18, passes={"disable": ["joint.off"]})
    model = torch.compile(block(), backend=through_aot_autograd(compiler, 18))
    model(torch.randn(3, 6)).sum().backward()
    assert [opset for opset, _ in targets] == [18]
    with torch.no_grad():
        model(torch.randn(3, 6))
    assert [opset for opset, _ in targets] == [18, 18], "an inference graph has no partitioner, and joint passes"
    assert len({graph for _, graph in targets}) == 2


def test_the_partitioner_of_a_compiler_has_its_observer(tmp_path: Path) -> None:
    """The joint graph is in the dump, beside the forward and the backward that were made of it."""
    compiler = onnx_compiler(debug=True, dump_dir=str(tmp_path))
    model = torch.compile(block(), backend=through_aot_autograd(compiler, 23))
    model(torch.randn(3, 6)).sum().backward()
    [folder] = [path for path in (tmp_path / "latest").iterdir() if path.name.startswith("graph_")]
    assert (folder / "joint.py").exists()
    assert (folder / "forward" / "aten.py").exists()
    assert (folder / "backward" / "aten.py").exists()
    manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    [joint] = manifest["dynamo_graphs"]
    assert {result["name"].split(".")[0] for result in joint["passes"]} == {"joint"}


def test_the_partitioner_of_a_compiler_checks_passes(planted: Callable[[Pass], None]) -> None:
    """With ``verify_passes``, on made-up arguments: a wrong joint pass is undone."""

    def wrong(module: torch.fx.GraphModule, context: PassContext) -> int:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default
            return 1
        return 0

    planted(Pass("joint.wrong", "Planted by a test.", wrong))
    backend = through_aot_autograd(onnx_compiler(verify_passes=True), 23)
    assert_same_as_eager(lambda x: x.sin() * 2, torch.randn(5, requires_grad=True), settings={"backend": backend})
    assert counted("undone pass joint.wrong") == 1


def test_a_copy_of_a_model_compiled_through_aot_autograd() -> None:
    """``copy.deepcopy`` copies the backend too; it records to the same list."""
    records: list[object] = []
    model = torch.compile(block(), backend=through_aot_autograd(onnx_compiler(record=records), 23))
    x = torch.randn(3, 6)
    expected = model(x)
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    torch.testing.assert_close(other(x), expected)
    assert len(records) == 2


def test_decompositions_are_for_an_opset_that_is_translated_to() -> None:
    with pytest.raises(ValueError, match="opset 17 .*18"):
        decomposition_table(17)
    with pytest.raises(TypeError, match="opset .*'18'"):
        decomposition_table("18")  # type: ignore[arg-type]


def test_a_layer_that_is_one_operator_has_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    """The warning names it, and it helps."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()
    x = torch.randn(2, 4, 16)
    try:
        for is_enabled in (True, False):
            torch._dynamo.reset()
            torch.backends.mha.set_fastpath_enabled(is_enabled)
            with torch.inference_mode():
                torch.testing.assert_close(compiled(encoder)(x), encoder(x))
            assert ("torch.backends.mha.set_fastpath_enabled(False)" in caplog.text) == is_enabled
            assert (counted("nodes_on_onnx") > 0) == (not is_enabled)
            caplog.clear()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert counted("nodes_in_pytorch") == 1
