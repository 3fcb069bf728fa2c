"""Random options, environment variables, models and cache entries: a right result, or an error that names the cause."""

from __future__ import annotations

import random
from pathlib import Path

import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_backends.cache.store import DamagedError, Store, StoredRecord, decoded
from dynamo_backends.cli import main
from dynamo_backends.options import ENVIRONMENT_PREFIX, Options, options_from_text, parse_options

NAMES = st.sampled_from(list(Options.__dataclass_fields__)) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.binary(max_size=4)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LEAVES, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)
FEW = settings(max_examples=150, database=None, deadline=None, derandomize=True)


@FEW
@given(st.dictionaries(NAMES, VALUES, max_size=3) | VALUES)
def test_any_options_are_taken_or_refused_by_name(options: object) -> None:
    try:
        parse_options(options)  # type: ignore[arg-type]
    except ValueError as error:
        assert "option" in str(error)


@FEW
@given(st.dictionaries(NAMES, st.text(max_size=20), max_size=2))
def test_any_text_of_an_option_is_taken_or_refused_by_name(texts: dict[str, str]) -> None:
    try:
        options_from_text(texts)
    except ValueError as error:
        assert "option" in str(error)


@FEW
@given(NAMES, st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20))
def test_any_variable_is_taken_or_refused_by_name(name: str, text: str) -> None:
    name = "".join(letter for letter in name if letter.isalnum() or letter == "_").upper()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(ENVIRONMENT_PREFIX + name, text)
        try:
            parse_options()
        except ValueError as error:
            assert ENVIRONMENT_PREFIX + name in str(error)


@FEW
@given(st.data())
def test_a_changed_cache_entry_is_no_entry(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed_entries"
    store = Store(folder, 2**20)
    store.put("key", StoredRecord({"a": [1, None]}, [b"bytes", b"more"]))
    [path] = folder.glob("*.cached")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    changed = bytes(content) != path.read_bytes()
    path.write_bytes(content)
    assert (store.get("key") is None) == changed
    with pytest.raises(DamagedError):
        decoded(data.draw(st.binary(max_size=100)), "key")


def test_a_changed_model_is_compared_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An ONNX file given to ``compare``, with some bytes changed: an exit code and a message."""
    path = tmp_path / "model.onnx"
    exported = torch.onnx.export(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()), (torch.ones(1, 2),))
    exported.save(str(path))
    model = onnx.load(path)
    onnx.save(model, path)
    content, chance = path.read_bytes(), random.Random(0)
    other = tmp_path / "changed.onnx"
    for _ in range(25):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        other.write_bytes(changed[: chance.choice([len(changed), chance.randrange(len(changed))])])
        code = main(["compare", str(path), str(other)])
        said = capsys.readouterr()
        assert code in (0, 1, 2)
        assert "Traceback" not in said.out + said.err
        assert code != 2 or said.err
