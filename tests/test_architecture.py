"""Which package may import what; see docs for why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert all(name.startswith("passes.manager") for name in imported), imported


def test_production_code_does_not_import_the_debug_backend() -> None:
    """``backends.py`` imports it when it is asked for; nothing else does."""
    outside = importers("dynamo_backends", "dynamo_backends.debug")
    outside = {path for path in outside if not path.startswith(("dynamo_backends/debug/", "dynamo_backends/cli/"))}
    assert outside <= {"dynamo_backends/backends.py"}
