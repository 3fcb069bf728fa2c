"""The commands ``ls``, ``show`` and ``diff``: output, exit codes, no import of PyTorch, shell completion."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
from dumped import dump_of_two_graphs, make_dump

from dynamo_backends.cli import main
from dynamo_backends.dumps.reading import find_run
from dynamo_backends.report import gather


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump_of_two_graphs(tmp_path_factory.mktemp("dump"))


Printed = pytest.CaptureFixture[str]


def test_ls(dump: Path, capsys: Printed) -> None:
    assert main(["ls", str(dump), "--times"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ *0  forward +\S*model\.py:3 +\S*model\.py:5 +graph break", printed, re.M)
    assert re.search(r"^ *1  forward  ", printed, re.M)
    assert re.search(r"^1/forward +\d\.\d{3} +\d\.\d{3} ", printed, re.M), "compile time"
    assert re.search(r"^1/forward +3 +66\.7% +1 of 1 +\S+e[-+]\d\d +\S+ +ok$", printed, re.M)
    assert "run_" not in printed.split("\n\n", 1)[1], "one run: they are not listed"
    assert printed.index("verdict") < printed.index("why it ends") < printed.index("compile s")
    assert printed.endswith(f"try: dynamo-backends show 0/forward -d {dump}\n")


def test_ls_lists_the_runs_and_the_graphs_of_the_latest(dump: Path, tmp_path: Path, capsys: Printed) -> None:
    run = find_run(dump).folder
    shutil.copytree(run, tmp_path / "run_1")
    shutil.copytree(run, tmp_path / "run_2")
    (tmp_path / "run_3").mkdir()
    (tmp_path / "latest").symlink_to("run_2")
    assert main(["ls", "-d", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"run_1 +\d{4}-\d\d-\d\dT\S+Z +4 +0 +0", printed)
    assert re.search(r"run_3 .*no manifest\.json", printed)
    assert f"\n{tmp_path / 'run_2'}\n" in printed
    assert main(["ls", str(tmp_path / "run_1"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == str(tmp_path / "run_1") and found["runs"] == []
    assert [graph["graph"] for graph in found["graphs"]] == ["0/forward", "0/backward", "1/forward", "1/backward"]


def test_a_graph_that_diverges_is_exit_code_1(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    shutil.copytree(find_run(dump).folder, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    manifest["graphs"][1]["verdict"] = "diverges at mm_1 (model.py:7)"
    manifest["dynamo_graphs"][0]["given_up"] = "traced again"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    assert main(["ls", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out
    assert "traced again" in printed
    assert "'compare': 'every'" not in printed, "there was one run"
    assert printed.endswith(f"try: dynamo-backends bisect 0/backward -d {tmp_path / 'run'}\n")
    assert main(["ls", str(tmp_path / "run"), "--json"]) == 1
    capsys.readouterr()
    manifest["graphs"][1]["runs"] = 2
    manifest["graphs"][1]["verdict"] = "diverges at mm_1 (somewhere/in/a/folder/model.py:7)"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ls", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().out
    assert "\n\n0/backward diverges at mm_1 (somewhere/in/a/folder/model.py:7)\n" in printed, "the table cut it"
    assert "'compare': 'every'" in printed


TOLD = """\
import torch

def compiled(model):
    return torch.compile(model, backend="onnx_debug", options={"dump_dir": "dump"})

torch.manual_seed(0)
x = torch.randn(4, 4)
with torch.no_grad():
    compiled(lambda x: torch.log(x) * 2)(-x.abs())
    compiled(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))(x)
    compiled(torch.nn.ConvTranspose2d(1, 2, 3, stride=2, padding=1, output_padding=2, dilation=3))(x[None, None])
    for i in range(3):
        torch._dynamo.reset()
        compiled(lambda x: x.relu())(x)
"""
"""NaN in eager too; dropout that is active; a node that ONNX Runtime fails to run (``output_padding >= stride``)."""


def test_ls_tells_what_a_verdict_does_not(tmp_path: Path, capsys: Printed) -> None:
    make_dump(tmp_path, TOLD)
    assert main(["ls", str(tmp_path / "dump"), "--json"]) == 1, "ONNX Runtime failed"
    nan, dropout, failed, *equal = json.loads(capsys.readouterr().out)["graphs"]
    assert nan["verdict"] == "ok" and nan["nonfinite"] == {"mul": 16}
    assert dropout["dropout"] == ["model.py:10"] and not nan["dropout"]
    assert failed["rescued"] and not nan["rescued"]
    assert main(["report", str(tmp_path / "dump"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["wrong"] == ["graph_002/inference"]
    summaries = gather(find_run(tmp_path / "dump")).overview["graphs"]
    assert [(item["state"], item["share"]) for item in summaries[1:3]] == [("ok", 4 / 6), ("wrong", 0)]
    assert main(["ls", str(tmp_path / "dump")]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^2/inference +1 +0\.0% ", printed, re.M), "nothing ran on ONNX Runtime"
    assert "16 in mul" in printed and "model.eval()" in printed
    assert re.findall(r"^try: dynamo-backends (\w+ \S+)", printed, re.M) == ["bisect 2/inference", "nan 0/inference"]
    assert re.search(rf"^3/inference and {len(equal) - 1} equal ", printed, re.M)
    assert main(["ls", str(tmp_path / "dump"), "--all"]) == 1
    assert re.search(r"^5/inference ", capsys.readouterr().out, re.M)


SKIPPED = """\
import sys, torch

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(4, 8)

    def forward(self, x):
        return self.layer(x)[0]

compiled = torch.compile(Recurrent(), backend="onnx_debug", options={"dump_dir": "dump"})
with torch.no_grad():
    compiled(torch.randn(3, 2, 4))
    if sys.argv[1:]:
        torch.compile(torch.sin, backend="onnx_debug", options={"dump_dir": "dump"})(torch.randn(3))
"""


def test_a_function_that_dynamo_skips_is_told(tmp_path: Path, capsys: Printed) -> None:
    (tmp_path / "model.py").write_text(SKIPPED)
    runs = [
        subprocess.run([sys.executable, "model.py", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        for words in ([], ["with a graph"])
    ]
    assert "forward (model.py:9)" in runs[0].stderr and "allow_rnn" in runs[0].stderr
    assert main(["ls", str(tmp_path / "dump")]) == 0
    printed = capsys.readouterr().out
    assert "forward (model.py:9)" in printed and "allow_rnn" in printed


def test_a_report_without_a_browser(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    page = tmp_path / "page.html"
    assert main(["report", str(dump), "--open", "-o", str(page)]) == 0
    assert str(page) in capsys.readouterr().out and page.exists()


FAULTY = """\
import torch
from onnxscript import opset18 as op
from dynamo_backends.exporter.converters import CONVERTERS

CONVERTERS[torch.ops.aten.sinh.default] = lambda x: op.Mul(op.Sinh(x), 1.01)
options = {"dump_dir": "a dump's <folder>"}


def forward(x):
    y = (x @ x).relu().log()
    torch._dynamo.graph_break()
    return x.sinh() + torch.where(y > -1e30, y, 0.0)


with torch.no_grad():
    torch.compile(forward, backend="onnx_debug", options=options)(-torch.eye(4))
    torch.compile(lambda x: (x @ x).softmax(0), backend="onnx_debug", options=options)(torch.randn(4, 4).half())
"""
"""An infinity is born and masked; a translation is wrong; half precision."""

STARTS = [
    ["ls"],
    *([command, "0"] for command in ("show", "bisect", "nan", "precision", "profile")),
    *([command, "1"] for command in ("show", "bisect")),
    ["precision", "2"],
    ["compare", "0", "--runs", "2", "--threads", "2"],
    ["bisect"],
    ["diff", "1", "aten", "onnx"],
    ["compare", "0", "0", "--stage", "onnx_optimized"],
    ["compare", "1", "2", "--seed", "1"],
    ["passes", "--why", "onnx.lift_constants"],
    ["report"],
]


def test_every_hint_runs_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    """With the dump elsewhere, and in a folder that a shell would take apart; hints of hints, too."""
    make_dump(tmp_path, FAULTY)
    folder = str(tmp_path / "a dump's <folder>")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("BROWSER", "true")
    known = [[*command, "-d", folder] for command in [*STARTS, ["passes"]]]
    for command in known:  # grows
        code = main(command)
        printed = capsys.readouterr()
        assert code in (0, 1), (command, printed.err)
        for hint in re.findall(r"^(?:.*\. )?try: (.*)$", printed.out, re.M):
            words = shlex.split(hint, comments=True)
            if words[0] == "python":
                assert subprocess.run([sys.executable, *words[1:]], capture_output=True).returncode == 1, words
            elif words[0] == "dynamo-backends" and words[1:] not in known:
                assert folder in words
                known.append(words[1:])
    hinted = {command[0] for command in known[len(STARTS) + 1 :]}
    assert hinted == {"show", "diff", "nan", "bisect", "compare", "report"}


def test_any_folder_does(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    folder = tmp_path / "a b\n<script>ü→'"
    shutil.copytree(dump, folder, symlinks=True)
    commands = [["ls"], ["show", "0"], ["diff", "0", "aten", "onnx"], ["bisect", "0"], ["bisect"], ["passes"]]
    commands += [["nan", "0"], ["precision", "0"], ["compare", "0", "--runs", "1"], ["profile", "0", "--runs", "1"]]
    for command in [*commands, ["compare", "0", "0"], ["report"]]:
        assert main([*command, "-d", str(folder), "--json"]) == 0
        json.loads(capsys.readouterr().out)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        for columns in ("40", "20"):
            monkeypatch.setenv("COLUMNS", columns)
            assert main([*command, "-d", str(folder)]) == 0
            assert capsys.readouterr().out
    page = (folder / "latest" / "report.html").read_text()
    assert "<script>ü" not in page and "script\\u003eü→'" in page


def test_where_nothing_can_be_written(dump: Path, tmp_path: Path, capsys: Printed) -> None:
    shutil.copytree(find_run(dump).folder, tmp_path / "run")
    (tmp_path / "run" / "report.html").mkdir()
    assert main(["report", "-d", str(tmp_path / "run")]) == 2
    assert "report.html" in capsys.readouterr().err
    given = ["-o", str(tmp_path / "page.html"), "-d", str(tmp_path / "run")]
    assert main(["report", *given]) == 0
    assert capsys.readouterr().out.endswith(f"try: dynamo-backends report {' '.join(given)} --open\n")


def test_a_graph_that_dynamo_gave_up(dump: Path, tmp_path: Path, capsys: Printed) -> None:
    shutil.copytree(find_run(dump).folder, tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    manifest["dynamo_graphs"][0]["given_up"] = "traced again"
    manifest["graphs"] = manifest["graphs"][2:]
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    commands = [["show"], ["diff", "aten", "onnx"], ["bisect"], ["nan"], ["precision"]]
    for name, *rest in [*commands, ["profile"], ["compare", "1"]]:
        assert main([name, "0", *rest, "-d", str(tmp_path / "run")]) == 2
        said = capsys.readouterr().err
        assert "traced again" in said and "model.py:3" in said
    assert main(["show", "7", "-d", str(tmp_path / "run")]) == 2
    assert "traced again" not in capsys.readouterr().err


def test_a_graph_is_named_by_its_folder_anywhere(
    dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    run = find_run(dump).folder
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(run / "graph_001" / "forward")]) == 0
    assert capsys.readouterr().out.endswith(f"try: dynamo-backends diff 1/forward joint aten -d {run}\n")
    monkeypatch.chdir(run)
    assert main(["nan", "graph_001/forward"]) == 0


def test_tables_fit_a_terminal(dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(dump.parent)
    assert main(["ls", dump.name, "--times"]) == 0
    assert main(["show", "1/forward", "-d", dump.name]) == 0
    tables = capsys.readouterr().out.split("class GraphModule")[0].splitlines()
    assert len(tables) > 30 and max(map(len, tables)) <= 80


def test_show(dump: Path, capsys: Printed) -> None:
    assert main(["show", "1/forward", "-d", str(dump)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^dynamo +4  graph_001/dynamo\.py$", printed, re.M)
    assert re.search(r"^pre_grad +4  as dynamo$", printed, re.M)
    assert re.search(r"^session +\d  graph_001/forward/region_\{0,1\}/model\.session\.onnx$", printed, re.M)
    assert "# File: " in printed and "torch.ops.aten.sort.stable" in printed
    assert " = None" not in printed
    assert "\x1b" not in printed, "no terminal"
    assert printed.endswith(f"try: dynamo-backends diff 1/forward joint aten -d {dump}\n")


def test_show_a_stage(dump: Path, capsys: Printed) -> None:
    assert main(["show", "1/forward", "--stage", "onnx", "-d", str(dump)]) == 0
    printed = capsys.readouterr().out
    assert "onnx, region 0: 1 node  graph_001/forward/region_0/model.onnx\n" in printed
    assert re.search(r"^exp: f32\[3, 4\] = Exp\(\w+\)  # model\.py:6$", printed, re.M)
    assert main(["show", "0", "--stage", "joint", "-d", str(dump)]) == 0
    assert capsys.readouterr().out.count("def forward") == 1, "the forward and the backward share it"
    assert main(["show", "0", "-s", "aten", "-d", str(dump), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["graph"] for item in found] == ["graph_000/forward", "graph_000/backward"]
    assert "aten.addmm.default" in [node["operator"] for node in found[0]["graphs"][0]["nodes"]]


def test_show_an_onnx_file(dump: Path, tmp_path: Path, capsys: Printed) -> None:
    (region, _) = find_run(dump).graphs_of("1/forward")[0].regions
    assert main(["show", str(region.model)]) == 0
    assert re.search(r"^\w+: f32\[3, 4\] = Exp\(\w+\)  # model\.py:6$", capsys.readouterr().out, re.M)
    assert main(["show", str(region.model), "--json"]) == 0
    assert [node["operator"] for node in json.loads(capsys.readouterr().out)["nodes"] if node["kind"] == "node"] == [
        "Exp"
    ]
    (tmp_path / "damaged.onnx").write_bytes(region.model.read_bytes()[:-9])
    assert main(["show", str(tmp_path / "damaged.onnx")]) == 2
    assert "damaged.onnx" in capsys.readouterr().err
    assert main(["nan", str(region.model), "-d", str(dump)]) == 2
    assert "ONNX files" in capsys.readouterr().err


def test_colours(dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    show = ["show", "0/forward", "--stage", "aten", "-d", str(dump)]
    diff = ["diff", "0/forward", "aten", "onnx", "-d", str(dump)]
    texts = []
    for command in (show, diff):
        for name, value, coloured in (("FORCE_COLOR", "1", True), ("NO_COLOR", "1", False)):
            monkeypatch.setenv(name, value)
            assert main(command) == 0
            printed = capsys.readouterr().out
            assert ("\x1b[" in printed) == coloured
            texts.append(re.sub(r"\x1b\[[\d;]*m", "", printed))
        monkeypatch.delenv("NO_COLOR")
        assert texts[-1] == texts[-2]


def test_diff(dump: Path, capsys: Printed) -> None:
    assert main(["diff", "1/forward", "post_grad", "onnx", "-d", str(dump)]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"graph_001/forward/\w+\.py -> .*region_1/model\.onnx: .*2 translated", printed)
    assert "model.py:6  return torch.exp(torch.sort(torch.exp(x), stable=True).values)\n" in printed
    assert re.search(r"^-sort = aten\.sort\.stable\(.*  \(runs in PyTorch: ", printed, re.M)
    assert re.search(r"^-exp: .* = aten\.exp\.default\(\w+\)\n\+exp: f32\[3, 4\] = Exp\(\w+\)$", printed, re.M)
    assert printed.endswith(f"try: dynamo-backends show 1/forward --stage onnx -d {dump}\n")
    assert main(["diff", "0", "dynamo", "joint", "-d", str(dump), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert {change["kind"] for change in found["changes"]} >= {"added", "removed", "renamed"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "0", "--stage", "onx"], "'onnx'"),
        (["diff", "0", "aten", "post_grd"], "'post_grad'"),
        (["show"], "GRAPH"),
        (["ls", "one_folder", "-d", "another"], "-d"),
    ],
)
def test_arguments_that_make_no_sense(arguments: list[str], message: str, capsys: Printed) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["ls"], ["show", "0"], ["diff", "0", "aten", "onnx"]])
def test_folders_that_are_no_dump(command: list[str], tmp_path: Path, capsys: Printed) -> None:
    assert main([*command, "-d", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dynamo-backends {command[0]}: ") and "is not a dump" in said


def test_a_graph_that_is_not_there(dump: Path, capsys: Printed) -> None:
    assert main(["show", "graph_001/foward", "-d", str(dump)]) == 2
    assert "there are graph_001/forward" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
from dynamo_backends.cli import main
code = main(sys.argv[1:])
assert not {"torch", "onnxruntime", "transformers"} & set(sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize("command", [["ls"], ["show", "0", "-s", "onnx"], ["diff", "0/forward", "aten", "session"]])
def test_a_dump_is_read_without_pytorch(command: list[str], dump: Path) -> None:
    called = [sys.executable, "-c", WITHOUT_TORCH, *command, "-d", str(dump)]
    done = subprocess.run(called, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _completed(line: str, folder: Path) -> list[str]:
    """What the shell offers after a line; see ``argcomplete``."""
    answer = folder / "answer.txt"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-m", "dynamo_backends"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return [item.strip() for item in answer.read_text().split("\n") if item]


def test_the_shell_completes_commands_options_and_stages(tmp_path: Path) -> None:
    assert _completed("dynamo-backends sh", tmp_path) == ["show"]
    assert _completed("dynamo-backends demo --len", tmp_path) == ["--length"]
    assert _completed("dynamo-backends show 0 --stage onnx_", tmp_path) == ["onnx_optimized"]


@pytest.mark.parametrize(
    ("shell", "script", "expected"),
    [
        (
            "bash",
            'eval "$(register-python-argcomplete dynamo-backends)"\ncomplete -p dynamo-backends',
            "_python_argcomplete",
        ),
        (
            "zsh",
            "autoload -U compinit && compinit -u -D\n"
            'eval "$(register-python-argcomplete dynamo-backends)"\necho $_comps[dynamo-backends]',
            "_python_argcomplete",
        ),
        (
            "fish",
            "register-python-argcomplete --shell fish dynamo-backends | source\ncomplete -C 'dynamo-backends sh'",
            "show\t",
        ),
    ],
    ids=lambda value: value if len(value) < 6 else "",
)
def test_shells_complete(shell: str, script: str, expected: str, dump: Path) -> None:
    """With the lines that docs/command_line.md gives."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected) or shell == "bash" and expected in done.stdout


def test_passes_of_a_dump(dump: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    assert main(["passes", "-d", str(dump), "--json"]) == 0
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert found["onnx.lift_constants"]["fired"] >= 1 and found["onnx.lift_constants"]["undone"] == []
    missed = next(name for name, item in found.items() if item["near_misses"])
    assert main(["passes", str(dump), "--why", missed, "--json"]) == 0
    results = [item["result"] for item in json.loads(capsys.readouterr().out)]
    assert sum(len(result["near_misses"]) for result in results) == found[missed]["near_misses"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["passes", str(dump)]) == 0
    table, _, hint = capsys.readouterr().out.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert hint == f"{missed} has near misses. try: dynamo-backends passes --why {missed} -d {dump}\n"
    monkeypatch.chdir(dump.parent)
    assert main(["passes", "--why", missed]) == 0, "the only dump here"
    assert main(["passes", "--why", "onnx.lift_constant", "-d", str(dump)]) == 2
    assert "Did you mean 'onnx.lift_constants'" in capsys.readouterr().err


def test_all_passes_as_json(capsys: Printed) -> None:
    assert main(["passes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"stage", "name", "default", "sentence"} == set(found[0])


def test_bisect_of_a_number_says_what_became_of_forward_and_backward(dump: Path, capsys: Printed) -> None:
    assert main(["bisect", "0", "-d", str(dump)]) == 0
    assert capsys.readouterr().out.startswith("graph_000/forward: ok\ngraph_000/backward: ok\n")
