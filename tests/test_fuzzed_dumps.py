"""Damaged dumps, made at random: every command ends with exit code 0, 1 or 2, and nothing in a dump is executed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dumped import dump_of_two_graphs

from dynamo_backends.cli import main

COMMANDS = (
    ["ls"],
    ["passes"],
    ["show", "0/forward"],
    ["show", "1/forward", "--stage", "onnx_optimized"],
    ["diff", "0/forward", "aten", "onnx"],
    ["diff", "1/forward", "onnx", "session"],
    ["compare", "0/forward", "0/backward"],
    ["replay", "1/forward"],
    ["replay", "0/backward", "--runtime", "reference"],
    ["bisect", "0/forward"],
    ["nan", "0/forward"],
    ["precision", "0/backward"],
    ["determinism", "1/forward", "--runs", "1"],
    ["profile", "0/forward", "--runs", "1"],
    ["report", "--no-times"],
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
    """Damages something in a run; in words, what."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".html")
    kinds: list[tuple[Callable[[Path, random.Random], None], list[Path]]] = [
        (mutate_json, [run / "manifest.json"]),
        (mutate_json, [path for path in files if path.name == "side_by_side.json"]),
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
