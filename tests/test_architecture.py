"""Which package may import what; see docs for why."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from passes import catalog
from passes.engine.manager import STAGES

ROOT = Path(__file__).parent.parent


def modules_of(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no modules in {package}"
    return found


def imports_of(path: Path) -> Iterator[str]:
    """The absolute names of what a module imports, ``package.module.name`` for ``from ... import``."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


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
        ("dynamo_backends/runtime", "torch.fx"),
        ("dynamo_backends/runtime", "torch._dynamo"),
        ("dynamo_backends/runtime", "dynamo_backends.exporter"),
        ("dynamo_backends/runtime", "dynamo_backends.debug"),
        ("dynamo_backends/runtime", "dynamo_backends.pipeline"),
    ],
)
def test_must_not_import(package: str, imported: str) -> None:
    assert importers(package, imported) == set()


@pytest.mark.parametrize(
    ("imported", "where"),
    [
        ("torch.onnx._internal", {"dynamo_backends/exporter/torch_internals.py"}),
        ("torch._functorch", {"dynamo_backends/aot.py"}),
    ],
)
def test_private_parts_of_torch_are_imported_in_one_place(imported: str, where: set[str]) -> None:
    assert importers("dynamo_backends", imported) == where
    assert importers("passes", imported) == set()


def test_passes_are_used_through_their_manager() -> None:
    imported = {
        name for path in modules_of("dynamo_backends") for name in imports_of(path) if name.startswith("passes")
    }
    assert imported
    allowed = ("passes.engine.manager.", "passes.operators")  # the operators our passes write need a translation
    assert all(name.startswith(allowed) for name in imported), imported


def test_the_engine_knows_no_pass_and_a_pass_no_other_backend() -> None:
    stages = [f"passes.{stage}" for stage in STAGES]
    assert [importers("passes/engine", name) for name in (*stages, "passes.catalog", "passes.operators")] == [set()] * 6
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


@pytest.mark.parametrize(
    "package",
    ["passes", pytest.param("dynamo_backends", marks=pytest.mark.xfail(strict=True, reason="aot and pipeline"))],
)
def test_no_import_circle(package: str) -> None:
    """Imports inside functions and for type checking count too."""
    modules = {_module_name(path): path for path in modules_of(package)}
    graph = {
        name: {found for imported in imports_of(path) if (found := _known(imported, modules)) not in (None, name)}
        for name, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _known(imported: str, modules: Container[str]) -> str | None:
    """The module that an imported name is, or is in."""
    while imported and imported not in modules:
        imported = imported.rpartition(".")[0]
    return imported or None


def test_production_code_does_not_import_the_debug_backend() -> None:
    """``backends.py`` imports it when it is asked for; nothing else does."""
    outside = importers("dynamo_backends", "dynamo_backends.debug")
    outside = {path for path in outside if not path.startswith(("dynamo_backends/debug/", "dynamo_backends/cli/"))}
    assert outside <= {"dynamo_backends/backends.py"}
