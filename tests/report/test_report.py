"""``report.html``: its content, its controls, and that nothing of a model is interpreted as markup."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from browser import Browser, start_browser
from dumped import graph_entry, write_manifest
from onnx import TensorProto, helper
from selenium.webdriver.common.keys import Keys
from torch import fx, nn

from dynamo_backends.cli import main
from dynamo_backends.dumps.reading import DumpedRun, find_run
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.report import gather, render, write_page
from passes import Pass, PassContext, register, unregister

PAGE = Path(__file__).parents[2] / "dynamo_backends" / "report" / "page"
TABS = ("comparison", "stages", "passes", "placement", "time")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Layers, of which the second has another activation; ``sort`` runs in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = F.hardswish(x)  # the line of the fault
        return torch.tanh(torch.sort(x, dim=-1, stable=True).values)


LINE = f"{short_file(__file__)}:{1 + Path(__file__).read_text().splitlines().index('                x = F.hardswish(x)  # the line of the fault')}"  # noqa: E501


def scale_hardswish(module: fx.GraphModule, context: PassContext) -> int:
    """A pass that is wrong by 1 %."""
    target = torch.ops.aten.hardswish.default
    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target is target]
    for node in found:
        with module.graph.inserting_after(node):
            scaled = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
        scaled.meta.update({key: node.meta[key] for key in ("val", "stack_trace") if key in node.meta})
        node.replace_all_uses_with(scaled, lambda user, new=scaled: user is not new)
    module.recompile()
    return len(found)


def compile_and_run(folder: Path) -> None:
    """Compiles and runs a small right graph, and the model with its backward, in which a pass is wrong."""
    torch.manual_seed(0)
    options = {"dump_dir": str(folder)}
    torch.compile(lambda x: torch.relu(x) + 1, backend="onnx_debug", options=options)(torch.randn(3, 4))
    register(Pass("post_grad.wrong", "Planted by a test.", scale_hardswish))
    try:
        compiled = torch.compile(Model(), backend="onnx_debug", options=options)
        compiled(torch.randn(4, 8)).square().sum().backward()
    finally:
        unregister("post_grad.wrong")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DumpedRun:
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("dump")
    compile_and_run(folder)
    return find_run(folder)


@pytest.fixture(scope="module")
def page(run: DumpedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(gather(run), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from start_browser()


@pytest.fixture
def faulty(run: DumpedRun) -> str:
    """The reference of the forward graph, in which the fault is."""
    return next(graph.reference for graph in run.graphs if graph.direction == "forward")


def copied(run: DumpedRun, folder: Path) -> DumpedRun:
    shutil.copytree(run.folder, folder / "run", symlinks=True)
    return find_run(folder / "run")


def rows_in_sight(browser: Browser) -> list[list[str]]:
    script = """
        const box = document.querySelector("#panel .grid");
        return [...box.querySelectorAll(".body .row")].sort((a, b) => a.ariaRowIndex - b.ariaRowIndex)
            .map((row) => [...row.children].map((cell) => cell.textContent))"""
    found: list[list[str]] = browser.run(script)
    return found


def selected(browser: Browser) -> str:
    """The name of the current row."""
    script = """
        const id = document.querySelector("#panel .grid").getAttribute("aria-activedescendant");
        return id ? document.getElementById(id).children[2].textContent : ''"""
    return str(browser.run(script)).removesuffix(" ▸")


# What is in it.


def test_the_overview_says_what_is_wrong_and_leads_there_with_one_click(
    browser: Browser, page: Path, run: DumpedRun, faulty: str
) -> None:
    browser.open(page)
    assert re.match(r"\d of \d graphs (is|are) wrong", browser.text("h1"))
    assert f"diverges at mul_tensor ({LINE})" in browser.text(".verdict.wrong")
    assert browser.run("return document.querySelectorAll('#graphs a').length") == 1 + len(run.graphs)
    browser.click(".culprit")
    assert browser.run("return location.hash") == f"#{faulty}/passes/post_grad.wrong"
    added = browser.run("return [...document.querySelectorAll('#panel .line.added')].map((line) => line.textContent)")
    assert any("mul_tensor" in line and "1.01" in line for line in added), "the diff has scrolled to the value"
    browser.click(".head .culprit:last-of-type")
    assert browser.run("return location.hash") == f"#{faulty}/comparison/mul_tensor"
    assert selected(browser) == "mul_tensor"
    details = browser.text(".details")
    assert "culprit" in details and LINE in details and "x = F.hardswish(x)" in details
    assert "= Mul(" in browser.text(".details .onnx-node:last-of-type")
    graph = next(graph for graph in run.graphs if graph.reference == faulty)
    assert graph.entry.blame is not None and graph.entry.blame.elements is not None
    assert graph.entry.blame.elements.text in browser.text(".details .elements")
    assert browser.run("return document.querySelectorAll('.stack li.user').length") >= 1
    # Nothing of the table of measures is cut off: the details scroll as a whole.
    tall, shown = browser.run(
        "const box = document.querySelector('.measures'); return [box.scrollHeight, box.clientHeight]"
    )
    assert shown >= tall - 20 and shown > 100


def test_every_tab_shows_what_it_says_without_errors_or_network(browser: Browser, page: Path, run: DumpedRun) -> None:
    for graph in run.graphs:
        for tab in TABS:
            browser.open(page, f"{graph.reference}/{tab}")
            assert browser.text("[role=tab][aria-selected=true]") and browser.text("#panel")
            assert browser.complaints() == []
            assert browser.requests() and all(url.startswith("file://") for url in browser.requests())
            assert not browser.run("return document.querySelectorAll('#panel .notice').length") or tab == "passes"


def test_the_parts_have_what_the_dump_has(run: DumpedRun, faulty: str) -> None:
    report = gather(run)
    assert report.notices == []
    graph = next(graph for graph in run.graphs if graph.reference == faulty)
    recorded = json.loads((graph.folder / "side_by_side.json").read_text())["rows"]
    rows = report.parts[f"{faulty}/comparison"]["rows"]
    assert [row["name"] for row in rows] == [row["name"] for row in recorded]
    names = {row["name"]: i for i, row in enumerate(rows)}
    assert rows[names["mul_tensor"]]["source"] == LINE
    assert [rows[i]["name"] for i in rows[names["mul_tensor"]]["inputs"]] == ["hardswish"]
    for key in ("share", "max_abs"):
        shown = [row["error"] and row["error"][key] for row in rows]
        assert shown == [row["error"] and pytest.approx(row["error"][key], rel=1e-3) for row in recorded]
    assert {row["origin"] for row in rows} == {"argument", "session", "PyTorch", ""}
    together = [row for row in recorded if row["segment"] and row["error"]]
    for row in together:
        found = [rows[i]["name"].split("__")[0] for i in rows[names[row["name"]]]["segment"]]
        assert found == row["segment"]
    assert together, "optimizers removed values"

    stages = {stage["name"]: stage for stage in report.parts[f"{faulty}/stages"]["stages"]}
    assert list(stages) == ["dynamo", "pre_grad", "joint", "aten", "post_grad", "onnx", "onnx_optimized", "session"]
    assert any(line.startswith("+mul") and "1.01" in line for line in stages["post_grad"]["difference"])
    assert any("Clip" in line for line in stages["onnx"]["lines"])
    (sort,) = (item for item in report.parts[f"{faulty}/placement"]["in_pytorch"] if "sort" in item[1])
    assert sort[2] == "no translation to ONNX"
    assert "onnx_passes" in dict(report.parts[f"{faulty}/time"]["seconds"])
    passes = {item["name"]: item for item in report.parts[f"{faulty}/passes"]["passes"]}
    assert passes["post_grad.wrong"]["fired"] == 1 and passes["post_grad.wrong"]["difference"]


def test_pytorch_is_not_imported(run: DumpedRun, tmp_path: Path) -> None:
    code = (
        "import sys; from dynamo_backends.dumps.reading import find_run; from dynamo_backends.report import *\n"
        "write_page(gather(find_run(sys.argv[1])), __import__('pathlib').Path(sys.argv[2]))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, run.folder, tmp_path / "report.html"], check=True, timeout=300)


# That it can be used.


def test_sorting_and_filtering(browser: Browser, page: Path, faulty: str) -> None:
    browser.open(page, f"{faulty}/comparison")
    everything = rows_in_sight(browser)
    assert everything[0][3] == "native_layer_norm", "the table starts with what was computed, not with the weights"
    heads = "#panel .grid [data-key=error]"
    browser.click(f"{heads} button")
    assert browser.run("return document.querySelector(arguments[0]).ariaSort", heads) == "descending"
    shown = [float(row[5]) for row in rows_in_sight(browser) if row[5]]
    assert len(shown) > 5 and shown == sorted(shown, reverse=True)
    browser.click(f"{heads} button")
    ascending = [float(row[5]) for row in rows_in_sight(browser) if row[5]]
    assert ascending == sorted(ascending) and len(ascending) > 5
    browser.click(f"{heads} button")
    assert rows_in_sight(browser) == everything

    browser.press("/")
    assert browser.run("return document.activeElement.id") == "filter"
    browser.press(*"layers.1 gelu")
    assert [row[3] for row in rows_in_sight(browser)] == ["gelu"]
    assert re.match(r"1 of \d+ values", browser.text(".shown"))
    assert browser.run("return document.querySelector('#panel .grid').ariaRowCount") == "2"
    browser.press(Keys.ESCAPE)
    assert rows_in_sight(browser) == everything
    # The culprit is reached though the filter hides it.
    browser.press(*"layer_norm", Keys.ENTER, "c")
    assert selected(browser) == "mul_tensor"


def test_by_keyboard_alone(browser: Browser, page: Path, faulty: str) -> None:
    browser.open(page, f"{faulty}/comparison")
    browser.press(Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    browser.press("/", Keys.ENTER)
    assert browser.run("return document.activeElement.getAttribute('role')") == "grid"
    first = selected(browser)
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP)
    assert selected(browser) == rows_in_sight(browser)[1][2].removesuffix(" ▸") != first
    browser.press(Keys.END)
    last = selected(browser)
    assert last == rows_in_sight(browser)[-1][2].removesuffix(" ▸")
    browser.press(Keys.PAGE_UP, Keys.PAGE_UP)
    assert selected(browser) not in (first, last)
    browser.press(Keys.HOME)
    assert selected(browser) == first
    browser.press(Keys.END, Keys.ENTER)
    assert not browser.run("return document.querySelector('.details').hidden") and last in browser.text(".details")
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert browser.run(outline) == "solid"
    browser.press(Keys.ESCAPE)
    assert browser.run("return document.querySelector('.details').hidden")

    browser.run("document.querySelector('.plot .area').focus()")
    browser.press(Keys.HOME, Keys.ARROW_RIGHT)
    assert browser.run("return document.activeElement.ariaValueNow") == "2"
    said = browser.run("return document.activeElement.ariaValueText")
    assert "error " in said and ": " in said
    browser.press(Keys.ENTER)
    assert selected(browser) == said.split(":")[0]

    browser.run("document.querySelector('[role=tab][aria-selected=true]').focus()")
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run("return document.activeElement.id") == "tab-stages"
    assert browser.text("[role=tab][aria-selected=true]") == "Stages"
    browser.press("?")
    assert browser.run("return document.querySelector('dialog').open")


def test_the_plot_leads_to_the_row(browser: Browser, page: Path, faulty: str) -> None:
    browser.open(page, f"{faulty}/comparison")
    area = browser.driver.find_element("css selector", ".plot .area")
    browser.run("document.querySelector('.plot .area').focus()")
    browser.press(Keys.HOME)
    shown = set()
    for _ in range(int(area.get_attribute("aria-valuemax"))):
        shown.add(browser.run("return document.activeElement.ariaValueText").split(":")[0])
        browser.press(Keys.ARROW_RIGHT)
    assert {"hardswish", "mul_tensor"} < shown and not any(re.fullmatch(r"(t|view)(_\d+)?", name) for name in shown)
    area.click()  # in its middle
    tip = browser.text(".tip strong")
    assert selected(browser) == tip
    drawn = browser.run("""
        const canvas = document.querySelector(".plot canvas"), pen = canvas.getContext("2d");
        const colours = new Set();
        const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
        for (let i = 0; i < data.length; i += 4) colours.add(data.slice(i, i + 3).join());
        return [...colours]""")
    assert {"179,38,30", "11,87,208"} <= set(drawn)  # the tolerance and the errors, light


def variables(dark: bool) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", (PAGE / "report.css").read_text(), re.DOTALL)
    return dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[1 if dark else 0]))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_in_light_and_dark(browser: Browser, page: Path, faulty: str, dark: bool) -> None:
    colours = variables(dark)
    backgrounds = ("bg", "panel", "chosen", "ok-bg", "bad-bg", "warn-bg")
    pairs = [("fg", name) for name in backgrounds] + [("muted", "bg"), ("muted", "panel"), ("muted", "chosen")]
    pairs += [(name, f"{name}-bg") for name in ("ok", "bad", "warn")]
    pairs += [(name, ground) for name in ("accent", "bad") for ground in ("bg", "panel")]
    for one, other in pairs:
        assert contrast(colours[one], colours[other]) >= 4.5, (one, other)
    for i in (1, 2):
        assert contrast(colours[f"series-{i}"], colours["bg"]) >= 4.5
    browser.open(page, f"{faulty}/comparison", dark=dark)
    shown = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert shown == f"rgb({', '.join(str(int(colours['bg'][i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize("width", [1280, 700, 390])
def test_it_fits_the_window(browser: Browser, page: Path, run: DumpedRun, width: int) -> None:
    for fragment in ["", *(f"{graph.reference}/{tab}" for graph in run.graphs for tab in TABS)]:
        browser.open(page, fragment, width=width)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        wide = "const box = document.getElementById('content'); return [box.scrollWidth, box.clientWidth]"
        scrolled, shown = browser.run(wide)
        assert scrolled <= shown, fragment
        sideways = (
            "return [...document.querySelectorAll('.grid')].filter((box) => box.scrollWidth > box.clientWidth).length"
        )
        assert browser.run(sideways) == 0 or width < 1280, fragment


LONG = "graph break: Unsupported Tensor.item() call with capture_scalar_outputs=False: Dynamo does not support it"


@pytest.mark.parametrize("width", [1920, 1280, 390])
def test_nothing_of_the_overview_is_cut(browser: Browser, run: DumpedRun, tmp_path: Path, width: int) -> None:
    """But for the third line of a reason, which the page of the graph has in full."""
    dumped = copied(run, tmp_path)
    manifest = json.loads((dumped.folder / "manifest.json").read_text())
    for item in manifest["dynamo_graphs"]:
        item["where"] = {
            "function": "transformers_wrapper",
            "place": "/home/user/models/modeling_with_a_name.py:1",
            "file": "/home/user/models/modeling_with_a_name.py",
            "line": 1,
        }
        item["end"] = {"reason": LONG, "file": "/home/user/models/modeling_with_a_name.py", "line": 2}
    manifest["graphs"][0]["verdict"] = "not comparable: empty_like"
    (dumped.folder / "manifest.json").write_text(json.dumps(manifest))
    browser.open(write_page(gather(find_run(dumped.folder)), tmp_path / "page.html"), width=width)
    cells = browser.run("""
        return [...document.querySelectorAll(".grid .row > *, .grid .row button")]
            .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)""")
    assert cells == []
    assert LONG in browser.text(".grid .body")
    assert "not comparable empty_like" in browser.text(".grid .body")


def test_a_run_of_which_nothing_was_compiled(browser: Browser, run: DumpedRun, tmp_path: Path) -> None:
    dumped = copied(run, tmp_path)
    manifest = json.loads((dumped.folder / "manifest.json").read_text())
    (dumped.folder / "manifest.json").write_text(json.dumps({**manifest, "graphs": []}))
    browser.open(write_page(gather(find_run(dumped.folder)), tmp_path / "page.html"))
    assert "onnx_debug" in browser.text(".notice")
    assert browser.run("return document.querySelector('.grid')") is None


def test_on_paper_is_all_of_a_page(browser: Browser, page: Path, faulty: str) -> None:
    """What scrolls on the screen is not cut at the end of the first sheet."""
    browser.open(page, f"{faulty}/time", height=300)
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        cut = browser.run("""
            const scrolls = (box) => getComputedStyle(box).overflowY !== "visible";
            const isCut = (box) => scrolls(box) || box.scrollHeight > box.clientHeight + 1;
            return ["content", "panel"].filter((name) => isCut(document.getElementById(name)));""")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert cut == []


# Many nodes.


NODES = 5000


def enlarge(run: DumpedRun) -> None:
    """Enlarges the first graph of a run to 5,000 nodes: its tables, stages and models."""
    manifest: dict[str, Any] = json.loads((run.folder / "manifest.json").read_text())
    entry = manifest["graphs"][0]
    folder = run.folder / entry["folder"]
    template = json.loads((folder / "side_by_side.json").read_text())["rows"][-1]
    (taken,) = run.graphs[0].regions[0].recorded("input")
    names = [f"relu_{i}" for i in range(NODES)]
    stack = [
        {"file": f"/user/model_{i}.py", "line": i, "function": "forward", "code": "x", "user": True} for i in range(9)
    ]
    reads = [taken, *names]
    rows = [
        {**template, "name": name, "module": f"layers.{i // 20}", "stack": stack, "inputs": [reads[i]]}
        for i, name in enumerate(names)
    ]
    table = {"verdict": f"diverges at relu_{NODES // 2} (model.py:7)", "note": "", "rows": rows}
    (folder / "side_by_side.json").write_text(json.dumps(table))
    text = "\n".join(f"{name} = torch.ops.aten.relu.default({reads[i]})" for i, name in enumerate(names))
    calls = [(name, "node", "aten.relu.default", [reads[i]]) for i, name in enumerate(names)]
    stored = [
        {"results": [name], "kind": kind, "operator": operator, "arguments": read, "types": ["f32[3, 4][4, 1]"]}
        for name, kind, operator, read in ((taken, "input", "", []), *calls, ("return", "output", "", names[-1:]))
    ]
    for stage, name in (("aten", "relu_17"), ("post_grad", "changed_17")):
        stored[18]["results"] = [name]
        (folder / f"{stage}.json").write_text(json.dumps(stored))
        (folder / f"{stage}.py").write_text(text.replace("relu_17 =", f"{name} ="))
    entry["stages"] = [
        {"name": name, "file": f"{entry['folder']}/{name}.py", "same_as": None, "nodes": NODES}
        for name in ("aten", "post_grad")
    ]
    blame = {"value": f"relu_{NODES // 2}", "region": 0, "kind": "node", "name": "", "source": ""}
    entry.update(nodes=NODES, verdict=table["verdict"], blame=blame)
    nodes = [helper.make_node("Relu", [reads[i]], [name], name=f"node_{name}") for i, name in enumerate(names)]
    for name, node in zip(names, nodes, strict=True):
        node.metadata_props.add(key="fx_node", value=name)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 4]) for name in (taken, names[-1])]
    graph = helper.make_graph(nodes, "many", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    for name in ("model.onnx", "model.optimized.onnx", "model.session.onnx"):
        (folder / "region_0" / name).unlink()
        onnx.save(model, folder / "region_0" / name)
    (run.folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def large(run: DumpedRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("large")
    enlarge(copied(run, folder))
    dumped = find_run(folder / "run")
    report = gather(dumped)
    assert report.notices == []
    return write_page(report, folder / "report.html"), dumped.graphs[0].reference


@pytest.mark.parametrize("place", ["overview", "comparison"])
def test_five_thousand_nodes_open_in_two_seconds(browser: Browser, large: tuple[Path, str], place: str) -> None:
    """The page's own time, in seconds of a processor: other processes on the machine, the start of the browser and its
    driver's answers do not count. Nothing comes after the page was loaded, so there is no other time to wait."""
    page, reference = large
    browser.measure()
    browser.open(page, f"{reference}/comparison/relu_{NODES - 7}" if place == "comparison" else "")
    answered = browser.run("""
        const row = document.querySelector(".grid .body .row");
        row.click();
        return row.getAttribute("aria-selected") === "true";""")
    assert answered, "it is there, and answers, as soon as it is loaded"
    browser.wait("requestAnimationFrame(() => requestAnimationFrame(done))")
    took = browser.seconds()
    assert 0 < took < 2
    if place == "comparison":
        assert browser.run("return document.querySelector('#panel .grid').ariaRowCount") == str(NODES + 1)
        assert browser.run("return document.querySelectorAll('#panel .row').length") < 150


def test_five_thousand_nodes_scroll_smoothly(browser: Browser, large: tuple[Path, str]) -> None:
    page, reference = large
    browser.open(page, f"{reference}/comparison")
    browser.measure()
    before = browser.seconds()
    browser.wait("""
        const box = document.querySelector("#panel .grid");
        let steps = 0;
        const step = () => {
            box.scrollTop += 130;
            if (++steps < 120) requestAnimationFrame(step);
            else done();
        };
        requestAnimationFrame(step);""")
    took = browser.seconds() - before
    assert 0 < took < 120 / 30, "processor time of 120 frames, at least 30 a second"
    jumped = browser.wait("""
        const box = document.querySelector("#panel .grid");
        box.scrollTop = 60000;
        const isInSight = (row) => {
            const place = row.getBoundingClientRect(), around = box.getBoundingClientRect();
            return place.top > around.top && place.bottom < around.bottom;
        };
        const look = () => done([...box.querySelectorAll(".body .row")].some(isInSight));
        requestAnimationFrame(() => requestAnimationFrame(look));""")
    assert jumped, "after a jump there are rows in sight"


# That nothing of a model becomes more than text.


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>\u2028\"'&{{7*7}}"


def spoil(value: Any, keep: Callable[[str], bool]) -> Any:
    """Replaces each string in a JSON value by markup, except those that ``keep`` names."""
    if isinstance(value, dict):
        return {key: item if keep(key) else spoil(item, keep) for key, item in value.items()}
    if isinstance(value, list):
        return [spoil(item, keep) for item in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) else value


def test_names_and_strings_of_a_model_stay_text(browser: Browser, run: DumpedRun, tmp_path: Path) -> None:
    place = tmp_path / "run_<img src=x onerror=window.hacked=3>&amp;'"
    shutil.copytree(run.folder, place, symlinks=True)
    keys = {"index", "direction", "folder", "stages", "regions", "schema_version", "name", "mark", "blame"}
    for path in [place / "manifest.json", *place.rglob("side_by_side.json")]:
        spoiled = spoil(json.loads(path.read_text()), keys.__contains__)
        path.write_text(json.dumps(spoiled))
    for path in [*place.rglob("dynamo.json"), *place.rglob("aten.json"), *place.rglob("post_grad.json")]:
        path.write_text(json.dumps(spoil(json.loads(path.read_text()), {"kind"}.__contains__)))
    for path in [*place.rglob("*.py"), *place.rglob("*.diff")]:
        path.write_text(path.read_text() + f"# {HOSTILE}\n")
    report = gather(find_run(place))
    page = write_page(report, tmp_path / "report.html")
    scripts = page.read_text().count("<script")
    assert scripts == 2 + len(report.parts)
    for fragment in ["", *(f"{graph.reference}/{tab}" for graph in run.graphs for tab in TABS)]:
        browser.open(page, fragment)
        if fragment.endswith("comparison"):
            browser.press("/", Keys.ENTER, Keys.ENTER)
            assert HOSTILE in browser.text(".details")
        if not fragment:
            assert HOSTILE in browser.text("#content")
            assert "<img src=x" in browser.text(".run")
        assert browser.run("return window.hacked") is None
        assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
        assert browser.run("return document.querySelectorAll('script').length") == scripts
        assert browser.complaints() == []


def test_what_is_not_in_the_policy_does_not_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The second wall: even markup that got in would not run, nor load anything."""
    added = "<script>window.hacked=1</script><img src='http://127.0.0.1:9/x.png'></body>"
    (tmp_path / "page.html").write_text(page.read_text().replace("</body>", added))
    browser.open(tmp_path / "page.html")
    assert browser.run("return window.hacked") is None
    assert all("Content Security Policy" in said for said in browser.complaints())
    fetched = browser.wait("fetch('http://127.0.0.1:9/').then(() => done('loaded'), (error) => done(String(error)))")
    assert fetched != "loaded"


def test_the_data_has_no_character_of_markup(run: DumpedRun) -> None:
    text = render(gather(run))
    parts = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert parts and not any(set(part) & set("<>&\u2028\u2029") for part in parts)


# Damage.


def test_what_is_damaged_of_a_graph_is_said_in_its_place(
    browser: Browser, run: DumpedRun, tmp_path: Path, faulty: str
) -> None:
    dumped = copied(run, tmp_path)
    (dumped.folder / faulty / "side_by_side.json").write_text('{"rows": [{"name"')
    (dumped.folder / faulty / "region_0" / "model.onnx").write_bytes(b"no model")
    manifest = json.loads((dumped.folder / "manifest.json").read_text())
    del manifest["graphs"][0]["regions"]
    (dumped.folder / "manifest.json").write_text(json.dumps(manifest))
    report = gather(find_run(dumped.folder))
    assert any("side_by_side.json is damaged" in notice for notice in report.notices)
    page = write_page(report, tmp_path / "report.html")

    browser.open(page)
    assert "cannot be read" in browser.text("#content .notice")
    browser.open(page, f"{faulty}/comparison")
    assert "side_by_side.json is damaged" in browser.text("#panel")
    browser.open(page, f"{faulty}/stages")
    stages = browser.text("#panel .chooser")
    assert re.search(r"onnx\d+ nodes, missing", stages) and "post_grad" in stages
    browser.open(page, f"{faulty}/placement")
    assert "no translation to ONNX" in browser.text("#panel")
    browser.open(page, f"{faulty.replace('forward', 'backward')}/comparison")
    assert len(rows_in_sight(browser)) > 5
    assert browser.complaints() == []


def test_a_damaged_graph_is_named_and_hides_no_other(tmp_path: Path) -> None:
    backward = {**graph_entry(index=1, direction="backward", folder="graph_001/backward"), "runs": "many"}
    write_manifest(
        tmp_path, graph_entry(), backward, {"index": 2}, 3, graph_entry(index=4, folder="graph_004/inference")
    )  # type: ignore[arg-type]
    report = gather(find_run(tmp_path))
    assert [graph["reference"] for graph in report.overview["graphs"]] == ["graph_000/inference", "graph_004/inference"]
    first, second, third = report.overview["notices"]
    assert "graphs[1]: " in first and "$.runs" in first
    assert "graphs[2]: " in second and "graphs[3]: " in third


# The command.


def test_the_command_writes_it_into_the_run(
    run: DumpedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped = copied(run, tmp_path)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert main(["report", str(dumped.folder), "--open"]) == 1, "a graph diverges"
    path = dumped.folder / "report.html"
    assert path.exists() and opened == [path.resolve().as_uri()]
    assert f"diverges at mul_tensor ({LINE})" in capsys.readouterr().out
    output = tmp_path / "other.html"
    assert main(["report", "-d", str(dumped.folder), "-o", str(output), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["report"] == str(output) and said["damaged"] == []
    assert any(reference.endswith("forward") for reference in said["wrong"])
    assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_the_command_without_a_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "dynamo-backends report: " in capsys.readouterr().err
