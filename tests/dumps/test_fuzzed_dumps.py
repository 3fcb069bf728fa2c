"""Dumps with random damage: every command ends with exit code 0, 1 or 2, and executes nothing from the dump."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from dumped import dump_of_two_graphs
from onnx import helper

from dynamo_backends.cli import main
from dynamo_backends.dumps.models import load_ir, load_model
from dynamo_backends.dumps.reading import DumpError

COMMANDS = (
    ["ls"],
    ["passes"],
    ["show", "0/forward"],
    ["show", "1/forward", "--stage", "onnx_optimized"],
    ["diff", "0/forward", "aten", "onnx"],
    ["diff", "1/forward", "onnx", "session"],
    ["compare", "0/forward", "0/backward"],
    ["bisect", "0/forward"],
    ["nan", "0/forward"],
    ["precision", "0/backward"],
    ["compare", "1/forward", "--runs", "1"],
    ["profile", "0/forward", "--runs", "1"],
    ["report"],
)
"""Most of them; each reads other files."""

VALUES = (None, True, -1, 0, 3, 10**30, 1e308, "", "x", "../../x", "/etc/passwd", "a\0b", [], [3], {}, {"x": []})
ROUNDS = 150


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next(dump_of_two_graphs(tmp_path_factory.mktemp("fuzzed")).glob("run_*"))


def mutate_json(path: Path, chance: random.Random) -> None:
    """Replaces or removes a value somewhere in a file of JSON."""
    content = json.loads(path.read_text())
    holders: list[tuple[dict | list, str | int]] = []
    waiting = [content]
    while waiting:
        item = waiting.pop()
        keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        holders += [(item, key) for key in keys]
        waiting += [item[key] for key in keys]
    holder, key = chance.choice(holders)
    if isinstance(holder, dict) and chance.random() < 0.3:
        del holder[key]
    else:
        holder[key] = chance.choice(VALUES)  # type: ignore[index]
    path.write_text(json.dumps(content))


def mutate_bytes(path: Path, chance: random.Random) -> None:
    """Cuts a file, or changes a few of its bytes."""
    content = bytearray(path.read_bytes())
    if chance.random() < 0.4 or not content:
        content = content[: chance.randrange(len(content) + 1)]
    else:
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def damage(run: Path, chance: random.Random) -> str:
    """Damages a file of a run at random; returns a description."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".html")
    kinds: list[tuple[Callable[[Path, random.Random], None], list[Path]]] = [
        (mutate_json, [run / "manifest.json"]),
        (mutate_json, [path for path in files if path.suffix == ".json" and path.parent != run]),
        (mutate_bytes, files),
        (mutate_bytes, [path for path in files if path.suffix in (".pb", ".onnx")]),
        (remove, files),
    ]
    mutation, candidates = chance.choices(kinds, [4, 2, 1, 2, 1])[0]
    path = chance.choice(candidates)
    mutation(path, chance)
    return f"{mutation.__name__} of {path.relative_to(run)}"


def test_every_command_survives_every_damage(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    executed = tmp_path / "executed"
    for path in dump.rglob("*.py"):
        text = path.read_text()
        path.write_text(f"open({str(executed)!r}, 'w').close()\n{text}" if path.name == "repro.py" else text)
    chance = random.Random(0)
    codes = set()
    for i in range(ROUNDS):
        run = tmp_path / f"run_{i}"
        shutil.copytree(dump, run)
        what = damage(run, chance)
        command = COMMANDS[i % len(COMMANDS)]
        try:
            code = main([*command, "-d", str(run)])
        except BaseException as error:
            raise AssertionError(f"{command} after {what}: {type(error).__name__}: {error}") from error
        said = capsys.readouterr()
        assert code in (0, 1, 2), (command, what)
        assert "Traceback" not in said.out + said.err, (command, what)
        assert code != 2 or said.err, (command, what)
        codes.add(code)
        shutil.rmtree(run)
    assert codes >= {0, 2}
    assert not executed.exists()


@pytest.fixture
def run(dump: Path, tmp_path: Path) -> Path:
    shutil.copytree(dump, tmp_path / "run")
    return tmp_path / "run"


def with_session(run: Path, **more: object) -> None:
    """Changes each session's settings in the manifest."""
    manifest = json.loads((run / "manifest.json").read_text())
    for graph in manifest["graphs"]:
        for region in graph["regions"]:
            region["session"].update(more)
    (run / "manifest.json").write_text(json.dumps(manifest))


def test_options_of_a_provider_are_used_only_if_the_user_gives_them(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may name libraries to load."""
    options = {"backend_path": "/planted.so"}
    with_session(run, provider_options=[options])
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["options"]["providers"] = [["CPUExecutionProvider", options]]
    (run / "manifest.json").write_text(json.dumps(manifest))
    for command in (["profile", "--runs", "1"], ["bisect", "--rejected"]):
        command.insert(1, "0/forward")
        assert main([*command, "-d", str(run)]) == 2, command
        assert "/planted.so" in capsys.readouterr().err
    monkeypatch.setenv("DYNAMO_BACKENDS_PROVIDERS", json.dumps([["CPUExecutionProvider", options]]))
    assert main(["profile", "0/forward", "--runs", "1", "-d", str(run)]) == 0, "the CPU provider leaves options alone"
    monkeypatch.setenv("DYNAMO_BACKENDS_PROVIDERS", '[["CPUExecutionProvider", {"backend_path": "/other.so"}]]')
    assert main(["profile", "0/forward", "--runs", "1", "-d", str(run)]) == 2


def test_entries_of_the_configuration_that_name_files_are_not_used(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = "session.model_external_initializers_file_folder_path"
    with_session(run, config={entry: "/etc"})
    assert main(["profile", "0/forward", "--runs", "1", "-d", str(run)]) == 2
    assert entry in capsys.readouterr().err


@pytest.mark.parametrize("where", ["initializer", "attribute", "subgraph"])
@pytest.mark.parametrize("location", ["../secret.bin", "{folder}/secret.bin", "link.bin"])
def test_a_model_reads_no_file_outside_its_folder(where: str, location: str, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "secret.bin")
    secret = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", location.format(folder=tmp_path)), ("offset", "0"), ("length", "16")):
        secret.external_data.add(key=key, value=value)
    result = [helper.make_tensor_value_info("w" if where == "initializer" else "y", 1, [4])]
    constant = helper.make_node("Constant", [], ["y"], value=secret)
    graph = {
        "initializer": helper.make_graph([], "g", [], result, [secret]),
        "attribute": helper.make_graph([constant], "g", [], result),
    }
    condition = helper.make_tensor_value_info("c", 9, [])
    branch = graph["attribute"]
    either = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    graph["subgraph"] = helper.make_graph([either], "g", [condition], result)
    onnx.save(helper.make_model(graph[where]), tmp_path / "model" / "model.onnx")
    for load in (load_model, load_ir):
        with pytest.raises(DumpError, match=str(tmp_path / "secret.bin")):
            load(tmp_path / "model" / "model.onnx")
