"""The README and the pages agree with the code."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import page_blocks
import pytest
import torch
from conftest import assert_same_as_eager, counted
from torch._dynamo.utils import counters

import dynamo_backends
import passes
from dynamo_backends import op_tools
from dynamo_backends.bench.case import Case
from dynamo_backends.bench.loading import load
from dynamo_backends.bench.measuring import CaseResult, Measurement
from dynamo_backends.cli import COMMANDS, bench, build_parser
from dynamo_backends.events import EVENTS
from passes import unregister
from passes.engine.manager import all_passes

ROOT = Path(__file__).parents[2]


def counted_in(source: str) -> set[str]:
    """The events that a module counts, with a word in capitals for what stands in an f-string."""
    found = set()
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "count":
            for part in ast.walk(call.args[0]):
                if isinstance(part, ast.JoinedStr):
                    parts = part.values
                    found.add("".join(str(each.value) if isinstance(each, ast.Constant) else "*" for each in parts))
                elif isinstance(part, ast.Constant) and part not in getattr(call.args[0], "values", []):
                    found.add(str(part.value))
    return found


def test_every_counter_is_in_the_list() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "dynamo_backends").rglob("*.py"))
    counted_somewhere = set().union(*map(counted_in, sources))
    assert counted_somewhere == {re.sub(r"\b[A-Z]{4,}\b", "*", name) for name in EVENTS}


def test_hints_name_commands_that_exist() -> None:
    """In what the package prints and writes: ``dynamo-backends NAME``, also as the arguments of ``try_next``."""
    hint = re.compile(r"""(?:dynamo-backends |try_(?:next|again)\(arguments, ")([a-z]+)\b(?! needs| was)""")
    package = ROOT / "dynamo_backends"
    texts = {path: path.read_text(encoding="utf-8") for ending in ("py", "js") for path in package.rglob(f"*.{ending}")}
    found = {name for text in texts.values() for name in hint.findall(text)} - {"itself", "needs", "was"}
    assert found <= COMMANDS.keys()


def test_reference_of_commands_has_every_argument_once() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "tables.py"))["commands_reference"]()
    for name in COMMANDS:
        assert f"## `{name}" in text
    assert all(
        f"`{option}" in text for option in ("--length", "--stage", "--check", "--forward-only", "--why", "--rounds")
    )
    assert "%(" not in text


def test_public_modules_are_on_the_page_of_the_python_interface() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    wanted = ["dynamo_backends", "dynamo_backends.op_tools", "passes"]
    wanted += [passes.fx_editing.__name__, passes.onnx_editing.__name__]
    assert re.findall(r"automodule:: (\S+)", page) == wanted
    for module in (dynamo_backends, op_tools, passes):
        assert all(inspect.getdoc(getattr(module, name)) for name in module.__all__)


def test_page_of_the_dump_names_what_a_dump_has(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "dump_folder.md").read_text(encoding="utf-8")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    compiled = torch.compile(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    compiled(torch.randn(2, 4)).sum().backward()
    [run] = tmp_path.glob("run_*")
    files = {re.sub(r"\d+", "0", path.name) for path in run.rglob("*") if path.is_file() and path.suffix != ".diff"}
    assert len(files) > 10
    assert {name for name in files if name not in page} == set()
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    keys = {*manifest, *manifest["graphs"][0], *manifest["dynamo_graphs"][0]}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    demo = text.index("pip install -c constraints.txt -e '.[demo]' && dynamo-backends demo")
    test = text.index("pip install -c constraints.txt -e '.[test]' && python -m pytest")
    assert demo < test < text.index("## Run a model")


def test_readme_has_the_figures_of_the_bench() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    bench_page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split("## Inference")[1]
    header, _, ours, theirs = re.findall(r"^\|.*", readme, re.MULTILINE)[:4]
    models = [cell.strip().lower() for cell in header.split("|")[2:-2]]
    for row, backend in ((ours, "onnxrt"), (theirs, "inductor")):
        for model, shown in zip(models, row.split("|")[2:-2], strict=True):
            table = bench_page.split(f"\n{model}: inference")[1]
            measured = re.search(rf"^{backend} .*? ± \S+ +(\S+)", table, re.MULTILINE)
            assert measured and measured[1] == shown.strip(), (model, backend)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_pass_gains_something_or_is_listed_with_what_it_is_kept_for() -> None:
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    gains = report["gains"](report["load_results"]())
    measured = [item.name for item in all_passes() if not item.is_needed]
    without = {name for name in measured if not any(gain.is_shown for gain in gains.get(name, {}).values())}
    assert without == set(report["KEPT_WITHOUT_GAIN"])


def test_table_of_passes_says_which_are_not_measured() -> None:
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    table = report["passes_table"]({"passes": {}, "models": {}})
    rows = [row for row in table.splitlines()[2:] if row]
    assert [row.split("`")[1] for row in rows] == [item.name for item in all_passes()]
    assert all(row.count("not measured") == 7 for row in rows)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= set(index)


@pytest.mark.parametrize("switch", ["--no-backward", "--dynamic", "--length"])
def test_switches_of_the_demo_are_documented(switch: str) -> None:
    assert f"`{switch}`" in (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_each_block_of_the_readme_runs_by_itself_and_prints_what_it_shows(tmp_path: Path) -> None:
    """``.ci/run`` does the same with the other pages."""
    program = [sys.executable, page_blocks.__file__, ROOT / "README.md"]
    ran = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_a_page_shows_may_differ_in_numbers_only() -> None:
    printed = "a     ms\n---  ---\nx   1.25\n/tmp/x/app.py:3 run_20261122_162306_pid22154"
    assert page_blocks.difference("a ms\n---- --\nx 3e-05\napp.py:7 run_1_2_pid3", printed) is None
    assert page_blocks.difference("...\nx 3", "a\nb\nx 4") is None
    assert page_blocks.difference("a\n...", "a\nb\nx 4") is None
    assert page_blocks.difference("a\nx 3", "a\ny 4") is not None
    assert page_blocks.difference("a\nb", "a") is not None
    assert page_blocks.difference("a", "a\nb") is not None
    assert page_blocks.difference("...\nc", "a\nb") is not None


def test_a_block_that_fails_or_prints_something_else_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "```python\n{}\n```\n\n"
    shows = "```text\nfour\n```\n\n"
    made_before, shown, command = (
        block.format("x = 'four'") * 2,
        block.format("print('five')") + shows,
        "```console\n{}```\n",
    )
    page.write_text(
        made_before
        + block.format("print(x)")  # each block runs by itself
        + block.format("print('four')") + shows
        + shown
        + block.format("open('a.txt', 'w')")
        + command.format("$ dynamo-backends ls\n$ dynamo-backends --version\nfour\n")
    )  # fmt: skip
    ran = subprocess.run([sys.executable, page_blocks.__file__, page], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    told = [line for line in ran.stdout.splitlines() if str(page) in line]
    assert [re.sub(r".*page.md:(\d+): .*", r"\1", line) for line in told] == ["10", "22", "30", "30"]
    assert "NameError: name 'x' is not defined" in ran.stdout
    assert "not printed: four" in told[1] and "ls ends with 2" in told[2] and "not printed: four" in told[3]


def test_output_is_written_behind_its_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "```text\nof nothing\n```\n\n```python\n{}\n```\n\n```text\n{}```\n"
    page.write_text(text.format("x = 4", "") + text.format("print(4)", "three\n"))
    subprocess.run([sys.executable, page_blocks.__file__, "--write", page], capture_output=True, timeout=300)
    assert page.read_text() == text.format("x = 4", "") + text.format("print(4)", "4\n")


def commands_of(text: str) -> set[str]:
    """Calls of ``dynamo-backends`` in fenced blocks and in backquotes, but for usage lines and versions."""
    fenced = re.findall(r"^(?:\$ |try: |.* && )?dynamo-backends (\D.*)$", text, re.MULTILINE)
    quoted = re.findall(r"`dynamo-backends ([^`]*)`", text)
    return {command for command in [*fenced, *quoted] if not re.search(r"\[|…|\.\.\.|^COMMAND", command)}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands_of(page.read_text("utf-8"))], ids=lambda page: page.name
)
def test_commands_of_a_page_have_arguments_that_there_are(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for command in commands_of(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        if command in COMMANDS:  # only mentioned
            continue
        try:
            build_parser().parse_args(shlex.split(command, comments=True))
        except SystemExit as leaves:
            if leaves.code:
                wrong.append((command, capsys.readouterr().err.splitlines()[-1:]))
    assert not wrong


def documented_examples() -> list[str]:
    text = (ROOT / "docs" / "writing_passes.md").read_text(encoding="utf-8")
    return [
        block for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "regist" in block
    ]


@pytest.fixture
def documented_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The passes of the page, registered as its code says, which tries them too."""
    monkeypatch.chdir(tmp_path)
    before = {item.name for item in all_passes()}
    for block in documented_examples():
        exec(compile(block, "docs/writing_passes.md", "exec"), {})
    added = {item.name for item in all_passes()} - before
    counters.clear()
    yield added
    for name in added:
        unregister(name)


FIRES: dict[str, tuple[str, Callable[..., object]]] = {
    "double negation": ("post_grad.someone.unnegate", lambda x: x.neg().neg().sin() @ x),
    "double absolute": ("joint.someone.double_abs", lambda x: x.abs().abs().sin()),
    "square": ("onnx.someone.square", lambda x: (x * x).sum(-1)),
    "log1p": ("post_grad.someone.log1p", lambda x: torch.log(1 + x.abs()) + 1),
    "relu_once": ("onnx.someone.relu_once", lambda x: x.relu().relu() + 1),
    "transposes": ("onnx.someone.transposes", lambda x: x.view(2, 2, 4).permute(1, 2, 0).permute(1, 2, 0).exp()),
}
UNTHOUGHT_OF: dict[str, Callable[..., object]] = {
    "returned": lambda x: (x.neg().neg(), x.t().neg().neg(), x * x, x.relu().relu(), x.abs().abs()),
    "changed in place": lambda x: (x.neg().neg().add_(1), x.abs().abs().add_(1)),
    "views": lambda x: (y := x.view(16)[3:], y.neg().neg(), torch.log(1 + y.abs()), y * y),
    "broadcast": lambda x: x[:1].relu().relu() + x.unsqueeze(0).neg().neg() / torch.log(2 + x.abs()),
    "float64": lambda x: (torch.log(1 + x.double().abs()), x.double().neg().neg() * 2, x.double() * x.double()),
    "integers": lambda x: (i := x.mul(9).int(), i.neg().neg() + 1, i * i, torch.log(1 + i.abs())),
    "one number": lambda x: (n := x[0, 0], n.neg().neg().sin(), n * n, torch.log(1 + n.abs())),
}


@pytest.mark.parametrize("case", FIRES)
def test_documented_passes_fire(case: str, documented_passes: set[str]) -> None:
    name, function = FIRES[case]
    assert name in documented_passes
    settings = {"options": {"passes": {"disable": ["*"], "enable": [name]}}}
    with torch.no_grad():
        assert_same_as_eager(function, torch.randn(4, 4), settings=settings)
    assert counted(f"pass {name}") == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("case", UNTHOUGHT_OF)
def test_documented_passes_on_cases_their_author_did_not_think_of(
    case: str, trains: bool, dynamic: bool, documented_passes: set[str]
) -> None:
    assert len(documented_passes) == len(FIRES)
    function = UNTHOUGHT_OF[case]
    with torch.set_grad_enabled(trains):
        x = torch.randn(4, 4, requires_grad=trains)
        assert_same_as_eager(function, x, settings={"dynamic": dynamic})


def test_switches_of_the_bench_are_documented() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    switches = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    assert len(switches) > 10
    assert {switch for switch in switches if f"`{switch}`" not in text} == {"--help"}


def test_fields_of_the_benchs_json_are_documented() -> None:
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    fields = {*Measurement.__dataclass_fields__, *CaseResult.__dataclass_fields__}
    assert {field for field in fields if f"`{field}`" not in text} == set()


def test_the_documented_model_of_the_bench_is_measured(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_models.py").write_text(block)
    loaded = load(Case(f"{tmp_path / 'my_models.py'}:classifier"))
    assert loaded.model(*loaded.inputs[0].args).shape == (32, 10)
