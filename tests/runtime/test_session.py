"""The sessions of one region: a variant changes the settings it should, and no others."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_values
from torch import nn

from dynamo_backends.debug.optimized_models import final_session, optimized_model, save_optimized
from dynamo_backends.debug.wrong_rewrite import find_rewrite
from dynamo_backends.dumps.model_sessions import check_config
from dynamo_backends.dumps.reading import DumpError
from dynamo_backends.graphs.artifacts import Runner
from dynamo_backends.options import parse_options
from dynamo_backends.partition.program import LoadedProgram
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.pipeline import Pipeline
from dynamo_backends.pipeline.stage_data import CompiledGraph
from dynamo_backends.runtime.executable import Executable
from dynamo_backends.runtime.session import Session
from dynamo_backends.runtime.settings import SessionSettings
from passes import Pass, PassContext

CPU = ("CPUExecutionProvider",)
ADDS_ZERO = """<ir_version: 10, opset_import: ["" : 18]>
g (float[4] x) => (float[4] y) <float zero = {0.0}> { a = Neg(x) b = Add(a, zero) y = Exp(b) }"""


def operators(model: str | Path | bytes) -> list[str]:
    proto = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model)
    return [node.op_type for node in proto.graph.node]


def test_the_optimized_model_that_is_saved_is_the_one_that_runs(tmp_path: Path) -> None:
    """Without the optimizers that are disabled, and with none if optimizations are off."""
    model = ir.from_onnx_text(ADDS_ZERO)
    for settings, expected in (
        (SessionSettings(CPU), ["Neg", "Exp"]),
        (SessionSettings(CPU, disabled_optimizers=("NoopElimination",)), ["Neg", "Add", "Exp"]),
        (SessionSettings(CPU, optimize=False), ["Neg", "Add", "Exp"]),
    ):
        path = save_optimized(Session(model, settings), str(tmp_path))
        assert operators(Path(path)) == expected


def test_an_optimized_model_keeps_the_sizes_from_which_shapes_are_inferred() -> None:
    names = ", ".join(f"y{i}" for i in range(200))
    sizes = ", ".join(["1"] * 200)
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[200] x, float[1] weight) => (float[1] z) <int64[200] sizes = {{{sizes}}}> {{
            {names} = Split <axis = 0> (x, sizes) z = Mul(y7, weight) }}""")
    settings = SessionSettings(CPU)
    whole = optimized_model(Session(model, settings, constants={"weight": torch.ones(1)}))
    final_session(whole[0], settings, [], [], whole[1])


def test_a_variant_differs_in_what_is_given_alone() -> None:
    settings = SessionSettings(
        (("CPUExecutionProvider", {"use_arena": "0"}),),
        threads=2,
        shares_graph=True,
        disabled_optimizers=("NoopElimination",),
    )
    session = Session(ir.from_onnx_text(ADDS_ZERO), settings)
    other = session.variant(ir.from_onnx_text(ADDS_ZERO.replace("Neg", "Abs")))
    assert other.settings == settings
    assert hash(other.settings) == hash(settings), "a provider's options have no hash"
    assert operators(other.model) == ["Abs", "Add", "Exp"]
    assert session.variant(optimize=False).settings.optimize is False
    assert session.variant().model is session.model
    assert session.variant(threads=1).settings == SessionSettings(
        settings.providers, threads=1, shares_graph=True, disabled_optimizers=("NoopElimination",)
    )
    options = other.ort_session(2).get_session_options()
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.log_severity_level == 4, "what it refuses is raised, and need not be written to stderr too"


class Keeper(Observer):
    """An observer that keeps compiled graphs."""

    def __init__(self) -> None:
        self.graphs: list[CompiledGraph] = []

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        self.graphs.append(graph)
        return loaded.run


def compile_and_keep(function: object, *args: object, **options: object) -> list[CompiledGraph]:
    keeper = Keeper()

    def backend(module: torch.fx.GraphModule, example_inputs: list[object]) -> object:
        return Pipeline(parse_options(options), keeper).compile_dynamo_graph(module, example_inputs)

    result = torch.compile(function, backend=backend)(*args)  # type: ignore[call-overload]
    if result.requires_grad:
        result.sum().backward()
    return keeper.graphs


def test_the_search_for_a_wrong_optimizer_runs_what_the_region_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search adds to the optimizers that do not run in the region; it does not forget them."""
    [graph] = compile_and_keep(lambda x: (x.neg() * 2).exp(), torch.randn(4), threads=1)
    [region] = graph.regions
    assert region.bound.settings.disabled_optimizers
    tried: list[SessionSettings] = []
    create = Session.create

    def record(self: Session, threads: int) -> object:
        tried.append(self.settings)
        return create(self, threads)

    monkeypatch.setattr(Session, "create", record)
    values = {item.node: torch.randn(4) for item in region.region.inputs}
    find_rewrite(region, region.bound, [], values, region.bound.outputs[0].name)
    assert tried
    for settings in tried:
        assert set(region.executable.settings.disabled_optimizers) <= set(settings.disabled_optimizers)
        assert settings.threads == 1


def test_a_checked_pass_runs_with_the_threads_of_the_session(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[[Pass], None]
) -> None:
    """Not with PyTorch's, where the option ``threads`` says another number."""

    def negate_twice(model: ir.Model, context: PassContext) -> int:
        [node] = [node for node in model.graph if node.op_type == "Exp"]
        once, twice = (ir.node("Neg", [node.inputs[0]]) for _ in range(2))
        twice.replace_input_with(0, once.outputs[0])
        model.graph.insert_before(node, [once, twice])
        node.replace_input_with(0, twice.outputs[0])
        return 1

    planted(Pass("onnx.twice", "Planted by a test.", negate_twice))
    threads: list[int] = []
    create = Session.create
    monkeypatch.setattr(Session, "create", lambda self, number: threads.append(number) or create(self, number))
    torch.set_num_threads(1)
    compile_and_keep(lambda x: x.exp() @ x, torch.randn(4, 4), threads=2, verify_passes=True)
    assert len(threads) > 1  # those of the check, and the one that runs
    assert set(threads) == {2}


def test_sessions_that_share_a_graph_do_not_spin_and_others_as_long_as_told() -> None:
    for function, shares in ((lambda x: x.exp() * 2, False), (lambda x: x.exp().sort().values.sin(), True)):
        [graph] = compile_and_keep(function, torch.randn(4), spin=3)
        assert [region.executable.settings.shares_graph for region in graph.regions] == [shares] * (1 + shares)
        for region in graph.regions:
            options = region.bound.ort_session(region.bound.threads).get_session_options()
            key, value = ("allow_spinning", "0") if shares else ("spin_duration_us", "3000")
            assert options.get_session_config_entry(f"session.intra_op.{key}") == value


COMPILES = """
import json, pickle, sys
import torch
from torch import nn
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from test_session import compile_and_keep, model_to_store

for i in range(int(sys.argv[2])):
    torch.compile(lambda x: x.sin() + i, backend="onnxrt", dynamic=False)(torch.randn(2 + i))
    torch._dynamo.reset()
graphs = compile_and_keep(*model_to_store())
stored = {str(graph.name): [region.executable for region in graph.regions] for graph in graphs}
with open(sys.argv[3], "wb") as file:
    pickle.dump({name.split(maxsplit=2)[2]: items for name, items in stored.items()}, file)
print(json.dumps(list(stored)))
"""


class Sorted(nn.Module):
    """An encoder layer with a sort, which runs in PyTorch and cuts each graph in two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ordered, _ = torch.nn.functional.gelu(self.layer(x)).sort(dim=1)
        return (ordered.sigmoid() @ x.mT) * 2


def model_to_store() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Sorted(), torch.randn(2, 5, 16)


def test_what_a_cache_stores_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever was compiled before, in a training step with several regions and dropout; and it runs without FX."""
    stored: list[dict[str, list[Executable]]] = []
    names = []
    for number, seed in ((0, "1"), (3, "2")):
        path = tmp_path / f"{number}.pickle"
        command = [sys.executable, "-c", COMPILES, str(Path(__file__).parent), str(number), str(path)]
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        assert run.returncode == 0, run.stderr
        names.append(json.loads(run.stdout))
        stored.append(pickle.loads(path.read_bytes()))
    first, second = stored
    assert names[0] != names[1], "the graphs should have other numbers"
    assert first.keys() == {"forward", "backward"}
    assert all(first.values())
    for direction, regions in first.items():
        for region, other in zip(regions, second[direction], strict=True):
            assert region.model == other.model
            assert (region, hash(region)) == (other, hash(other))
            proto = onnx.load_from_string(region.model)
            assert Path(__file__).name in str(proto)
            for node in proto.graph.node:
                for line in [item for item in node.metadata_props if item.key == "source"]:
                    node.metadata_props.remove(line)
            assert not PATH.search(proto.SerializeToString()), "a path that is not a line of the model's source"
    regions = [region for regions in first.values() for region in regions]
    assert len(set(regions)) == len(regions) > 2


PATH = re.compile(rb"/(usr|home|root|tmp|site-packages|var|opt)/")


def test_what_is_stored_runs() -> None:
    x = torch.randn(3, 4)
    [graph] = compile_and_keep(lambda x: (x.t().exp() @ x).relu() > 1, x)
    [region] = graph.regions
    stored = pickle.loads(pickle.dumps(region.executable))
    loaded = stored.load()
    assert_same_values(loaded([x]), [(x.t().exp() @ x).relu() > 1])
    assert np.array_equal(loaded([x])[0], region.bound([x])[0])
    others = [
        dataclasses.replace(stored, model=stored.model + b" "),
        dataclasses.replace(stored, outputs=()),
        dataclasses.replace(stored, settings=dataclasses.replace(stored.settings, threads=7)),
    ]
    assert stored == region.executable
    assert len({stored, *others}) == 4
    assert str(stored.model) not in repr(stored), "it is long"


@pytest.mark.parametrize("shares_graph", [False, True])
def test_a_dump_may_name_what_our_sessions_are_configured_by(shares_graph: bool) -> None:
    for providers in (("CPUExecutionProvider",), ("OpenVINOExecutionProvider", "CPUExecutionProvider")):
        check_config(SessionSettings(providers, shares_graph=shares_graph).config)
    with pytest.raises(DumpError):
        check_config({"session.optimized_model_external_initializers_file_name": "/etc/passwd"})


def test_sessions_of_few_numbers_of_threads_are_kept() -> None:
    session = Session(ir.from_onnx_text(ADDS_ZERO), SessionSettings(CPU))
    made = [weakref.ref(session.ort_session(threads)) for threads in (1, 2, 3, 4, 5, 6, 7, 8)]
    gc.collect()
    alive = [ref() is not None for ref in made]
    assert alive[-1] and sum(alive) <= 4
    assert session.pool_threads == sum(i for i, kept in enumerate(alive) if kept)
