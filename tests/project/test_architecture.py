"""The import rules of docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from passes import catalog
from passes.engine.manager import STAGES

ROOT = Path(__file__).parents[2]


def modules_of(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no modules in {package}"
    return found


@functools.cache
def imports_of(path: Path, *, types: bool = True) -> tuple[str, ...]:
    """The absolute names of what a module imports, ``package.module.name`` for ``from ... import``.

    Args:
        path: the module.
        types: whether imports that only a type checker sees (``if TYPE_CHECKING:``) count.
    """
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    tree = ast.parse(path.read_text())
    if not types:
        tree = _WithoutTypes().visit(tree)
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names.extend(f"{base}.{alias.name}" for alias in node.names)
    return tuple(names)


class _WithoutTypes(ast.NodeTransformer):
    """Removes what only a type checker sees."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if is_for_types else self.generic_visit(node)


def importers(package: str, imported: str) -> set[str]:
    """The modules of a package that import ``imported`` or something in it."""
    return {
        str(path.relative_to(ROOT))
        for path in modules_of(package)
        for name in imports_of(path)
        if name == imported or name.startswith(f"{imported}.")
    }


@pytest.mark.parametrize(
    ("package", "imported"),
    [
        ("passes", "dynamo_backends"),
        ("passes", "onnxruntime"),
        ("dynamo_backends/exporter", "dynamo_backends.runtime"),
        ("dynamo_backends/exporter", "dynamo_backends.debug"),
        ("dynamo_backends/exporter", "onnxruntime"),
        ("dynamo_backends/dumps", "dynamo_backends.debug"),
        ("dynamo_backends/runtime", "torch.fx"),
        ("dynamo_backends/runtime", "torch._dynamo"),
        ("dynamo_backends/runtime", "dynamo_backends.exporter"),
        ("dynamo_backends/runtime", "dynamo_backends.debug"),
        ("dynamo_backends/runtime", "dynamo_backends.pipeline"),
    ],
)
def test_must_not_import(package: str, imported: str) -> None:
    assert importers(package, imported) == set()


@pytest.mark.parametrize("name", ["reading", "schema", "blame", "models", "stage_graphs", "stage_diff", "nonfinite"])
def test_a_dump_is_read_and_shown_without_pytorch(name: str) -> None:
    """What runs or judges its models may use it."""
    assert f"dynamo_backends/dumps/{name}.py" not in importers("dynamo_backends/dumps", "torch")


@pytest.mark.parametrize(
    ("imported", "where"),
    [
        ("torch.onnx._internal", {"dynamo_backends/exporter/torch_internals.py"}),
        (
            "torch._functorch",
            {
                f"dynamo_backends/graphs/{name}.py"
                for name in ("aot_serialization", "descriptors", "partitioning", "saving_mode")
            },
        ),
        ("torch._inductor.compile_fx", {"dynamo_backends/graphs/inductor.py"}),
        ("onnxscript._internal.evaluator", {"dynamo_backends/exporter/torch_internals.py"}),
        ("onnxruntime.capi", {f"dynamo_backends/runtime/{name}.py" for name in ("messages", "ort_internals")}),
    ],
)
def test_private_parts_are_imported_in_one_place(imported: str, where: set[str]) -> None:
    assert importers("dynamo_backends", imported) == where
    assert importers("passes", imported) == set()


@pytest.mark.parametrize("imported", ["onnxscript._internal", "onnxscript.rewriter._pattern_ir"])
def test_the_rewriter_of_onnxscript_is_used_in_one_module_of_passes(imported: str) -> None:
    assert importers("passes", imported) == {"passes/engine/onnx/patterns.py"}


def test_passes_are_used_through_their_manager() -> None:
    imported = {
        name for path in modules_of("dynamo_backends") for name in imports_of(path) if name.startswith("passes")
    }
    assert imported
    allowed = (
        "passes.engine.manager.",
        "passes.engine.results.",  # what a dump has of a pass
        "passes.engine.choices.",
        "passes.engine.locks.",
        "passes.engine.origins",  # whether a registered function is defined again, of converters as of passes
        "passes.engine.fx.editing.",  # what is a view of what
        "passes.engine.fx.snapshot.",  # a graph as it was, for the safety net
        "passes.engine.registry",  # which passes are on, and whether others registered any, without the manager
        "passes.order.",
        "passes.operators",
    )  # the operators our passes write need a translation
    assert all(name.startswith(allowed) for name in imported), imported


def test_the_engine_knows_no_pass_and_a_pass_no_other_backend() -> None:
    stages = [f"passes.{stage}" for stage in STAGES]
    contents = (*stages, "passes.catalog", "passes.operators")
    assert {name: importers("passes/engine", name) for name in contents} == dict.fromkeys(contents, set())
    known = {text for path in modules_of("passes") for text in _texts(path) if "onnxrt" in text or text == "in_pytorch"}
    assert not known, "what is our backend's is passed in"


def _texts(path: Path) -> Iterator[str]:
    """The strings in a module's code, without docstrings and the like."""
    tree = ast.parse(path.read_text())
    told = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    yield from (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in told
    )


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_folder_holds_passes_and_nothing_else(stage: str) -> None:
    """Each module, or folder, in it is one pass of the catalog."""
    folder = ROOT / "passes" / stage
    found = {path.stem for path in folder.iterdir() if path.stem not in ("__init__", "__pycache__")}
    assert found == {name.split(".", 1)[1] for name in catalog.ORDER if name.startswith(f"{stage}.")}


_DEBUGGING = ("dynamo_backends/debug/", "dynamo_backends/cli/", "dynamo_backends/op_tools/")


def test_production_code_does_not_import_the_debug_backend() -> None:
    """``backends.py`` imports it when it is asked for; nothing else does, but the operator tools, which debug too."""
    outside = importers("dynamo_backends", "dynamo_backends.debug")
    outside = {path for path in outside if not path.startswith(_DEBUGGING)}
    assert outside <= {"dynamo_backends/backends.py"}


def test_the_report_knows_dumps_and_nothing_else() -> None:
    known = {name for path in paths_of("dynamo_backends/report") for name in imports_of(ROOT / path)}
    ours = {name.split(".")[1] for name in known if name.startswith("dynamo_backends.")}
    assert ours == {"dumps", "report"} and not any(name.split(".")[0] == "torch" for name in known)


def test_artifacts_import_no_stage() -> None:
    """But for the types of what they hold."""
    known = reached("dynamo_backends/graphs/artifacts.py")
    assert {path.split("/")[1] for path in known if path.startswith("dynamo_backends/")} <= {
        "graphs",
        "common",
        "errors.py",
        "events.py",
    }


# The folders


TOP = {"__init__", "__main__", "backends", "errors", "events", "options", "versions"}
"""The modules that are in no folder."""


def folders() -> list[str]:
    """The folders in the table, from the top."""
    text = (ROOT / "docs/architecture.md").read_text().split("## Folders")[1].split("##")[0]
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def test_the_table_has_all_folders() -> None:
    package = ROOT / "dynamo_backends"
    assert (
        sorted(folders()) == sorted(path.parent.name for path in package.glob("*/__init__.py")) and len(folders()) <= 19
    )
    assert {path.stem for path in package.glob("*.py")} == TOP


@pytest.mark.parametrize("name", folders())
def test_a_folder_imports_only_folders_below_it(name: str) -> None:
    above = {f"dynamo_backends/{other}/" for other in folders()[: folders().index(name)]}
    own = paths_of(f"dynamo_backends/{name}")
    found = {
        path for module in own for other in imports_of(ROOT / module, types=False) for path in modules_named(other)
    }
    assert {path for path in found if path.startswith(tuple(above))} == set()
    assert "dynamo_backends/backends.py" not in found or name in ("cli", "bench")


def test_a_folder_says_what_it_is() -> None:
    for name in folders():
        assert ast.get_docstring(ast.parse((ROOT / "dynamo_backends" / name / "__init__.py").read_text()))


# The path of a graph


def boxes() -> list[str]:
    """The boxes of the drawing, from the top."""
    text = (ROOT / "docs/architecture.md").read_text().split("## The path of a graph")[1].split("```")[1]
    return re.findall(r"\| ([\w/]+) +\|", text)


def paths_of_box(name: str) -> set[str]:
    folder = ROOT / "dynamo_backends" / name
    return set(paths_of(f"dynamo_backends/{name}")) if folder.is_dir() else {f"dynamo_backends/{name}.py"}


def test_each_box_of_the_drawing_imports_only_boxes_below_it() -> None:
    names = boxes()
    assert len(names) == 10
    above: set[str] = set()
    for name in names:
        own = paths_of_box(name)
        assert all((ROOT / path).is_file() for path in own)
        assert set().union(*map(reached, own)) & (above - own) == set(), name
        above |= own


@pytest.mark.parametrize(
    ("called", "where"),
    [
        ("RunnableRegion", {"partition/program"}),  # one construction of what runs
        ("LoadedProgram", {"partition/program"}),
        # whatever a Program comes from
        ("partition.program.load", {"pipeline/program_cache", "pipeline/program_payload", "pipeline/stages"}),
        (
            "dynamo_compile_lock",
            {"graphs/late_compile", "exporter/recurrent_layers"},
        ),  # one lock of what is compiled at a call, and of patches of PyTorch while it traces
        ("growth", {"cache/graphs", "graphs/late_compile"}),  # one check of what it assumes
        ("or_captured", {"backends"}),  # one net under a graph of Dynamo's, one under a graph of AOTAutograd's,
        (
            "or_original",
            {"common/safety_net", "pipeline/runners", "pipeline/pipeline"},
        ),  # and one under the partitioner
    ],
)
def test_it_is_done_in_one_place(called: str, where: set[str]) -> None:
    outside = ("bench", "cli", "debug", "dumps", "explanations", "op_tools", "report")
    module, _, name = called.rpartition(".")
    found = {
        str(path.relative_to(ROOT / "dynamo_backends").with_suffix(""))
        for path in modules_of("dynamo_backends")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == name
        if not module or f"dynamo_backends.{called}" in imports_of(path)
    }
    assert {name for name in found if not name.startswith(outside)} == where


@pytest.mark.parametrize(
    ("start", "unknown"),
    [
        ("dynamo_backends/exporter", "dynamo_backends/runtime/"),
        ("dynamo_backends/runtime", "dynamo_backends/exporter/"),
        ("dynamo_backends/runtime", "dynamo_backends/graphs/artifacts.py"),
        ("dynamo_backends/numerics", "dynamo_backends/runtime/"),
    ],
)
def test_does_not_know_through_others(start: str, unknown: str) -> None:
    """Neither by what the modules it imports import. Imports for types alone do not count."""
    known = set().union(*(reached(str(path.relative_to(ROOT))) for path in modules_of(start)))
    assert {path for path in known if path.startswith(unknown)} == set()


FOUNDATIONS = {"errors", "events", "versions", "common/upstream_faults", "common/strides", "common/session_events"}
"""What all of the package may import, without PyTorch's graphs."""


@pytest.mark.parametrize("name", sorted(FOUNDATIONS))
def test_foundations_import_nothing_but_each_other(name: str) -> None:
    known = reached(f"dynamo_backends/{name}.py")
    assert known <= {f"dynamo_backends/{other}.py" for other in FOUNDATIONS}


def test_the_runtime_does_not_know_fx_through_others() -> None:
    modules = {*paths_of("dynamo_backends/runtime")}.union(*map(reached, paths_of("dynamo_backends/runtime")))
    fx = ("torch.fx", "torch._dynamo")
    assert {path for path in modules if any(name.startswith(fx) for name in imports_of(ROOT / path))} == set()


def test_what_onnx_runtime_says_is_read_in_one_module() -> None:
    outside = {
        *paths_of("dynamo_backends/runtime"),
        "dynamo_backends/partition/regions.py",
        "dynamo_backends/pipeline/stages.py",
    }
    assert {path for path in outside if "re" in imports_of(ROOT / path)} == {"dynamo_backends/runtime/messages.py"}
    said = [path for path in paths_of("dynamo_backends") if "ONNXRuntimeError" in (ROOT / path).read_text()]
    assert said == ["dynamo_backends/runtime/messages.py"]


@pytest.mark.parametrize("package", ["dynamo_backends", "passes"])
def test_no_import_circles(package: str) -> None:
    """Neither by imports inside functions, nor by those for types."""
    circles = {path for path in paths_of(package) if path in reached(path, types=True)}
    assert circles == set()


def paths_of(package: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in modules_of(package)]


def reached(module: str, *, types: bool = False) -> set[str]:
    """The modules of this repository that a module's imports lead to, those inside functions too; itself only if it is
    part of a circle. A package stands for its ``__init__.py``. ``types``: see ``imports_of``."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        path = ROOT / waiting.pop()
        for name in imports_of(path, types=types):
            for imported in modules_named(name):
                if imported not in found:
                    found.add(imported)
                    waiting.append(imported)
    return found


def modules_named(name: str) -> list[str]:
    """The file of a module, or of what is imported from it."""
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1):
        base = ROOT.joinpath(*parts[:end])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if end > 0 and path.is_file():
                return [str(path.relative_to(ROOT))]
    return []
