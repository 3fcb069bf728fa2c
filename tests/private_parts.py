"""The private parts of PyTorch, ONNX Runtime and onnxscript that the package uses.

``python tests/private_parts.py`` prints the tables of ``docs/versions.md``; ``test_torch_versions.py`` compares them.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NOTICED_BY = {
    "torch._C": "test_op_tools.py",
    "torch._VF": "test_export.py",
    "torch._is_functional_tensor": "test_export.py",
    "torch._C._AutoDispatchBelowAutograd": "test_onnx_attention.py",
    "torch._C._cuda_getCurrentRawStream": "test_cuda.py",
    "torch._C._from_dlpack": "test_binding.py",
    "torch._C._storage_Use_Count": "test_freezing.py",
    "torch._C._dynamo": "test_saved_graphs.py",
    "torch._C._to_dlpack": "test_binding.py",
    "torch._decomp": "test_converters.py",
    "torch._dynamo": "test_dynamo_features.py",
    "torch._dynamo.eval_frame": "test_serving.py",
    "torch._dynamo.exc": "test_bad_input.py",
    "torch._dynamo.lookup_backend": "test_safety_net.py",
    "torch._functorch": "test_training.py",
    "torch._functorch._aot_autograd.autograd_cache": "test_saved_graphs.py",
    "torch._functorch._aot_autograd.schemas": "test_saved_graphs.py",
    "torch._guards": "test_dynamo_features.py",
    "torch._inductor": "test_placement.py",
    "torch._inductor.compiler_bisector": "test_pass_manager.py",
    "torch._inductor.output_code": "test_saved_graphs.py",
    "torch._inductor.pattern_matcher": "test_patterns.py",
    "torch._library": "test_editing.py",
    "torch._logging": "test_torch_logs.py",
    "torch._ops": "test_operators.py",
    "torch._prims_common": "test_special_values.py",
    "torch._subclasses": "test_dynamic.py",
    "torch._sym_sqrt": "test_dynamic.py",
    "torch.autograd._get_sequence_nr": "test_op_tools.py",
    "torch.autograd.function": "test_op_tools.py",
    "torch.compiler._compile_session_context": "test_dynamo_features.py",
    "torch.fx.experimental._config": "test_export.py",
    "torch.fx.node": "test_stage_graphs.py",
    "torch.nn.Module._call_impl": "test_op_tools.py",
    "torch.onnx._internal": "test_converters.py",
    "torch.overrides": "test_op_tools.py",
    "torch.utils._dtype_abbrs": "test_fx_debug.py",
    "torch.utils._python_dispatch": "test_op_tools.py",
    "torch.utils._pytree": "test_outputs.py",
    "torch.utils._sympy": "test_dynamic.py",
    "onnxruntime.capi": "test_binding.py",
    "onnxruntime.InferenceSession._sess": "test_binding.py",
    "onnxscript._internal.evaluator": "test_converters.py",
    "onnxscript._internal.tape_builder": "test_onnx_patterns.py",
    "onnxscript.rewriter": "test_onnx_patterns.py",
}
"""A test file that runs what uses it, by its name or what that begins with."""

LIBRARIES = ("torch", "onnxruntime", "onnxscript")
_SHOWN = 3


def used(library: str) -> dict[str, list[str]]:
    """The modules that use each private part of a library, by its name."""
    parts_of = {"torch": _part_of_torch, "onnxruntime": _part_of_onnx_runtime, "onnxscript": _part_of_onnxscript}[
        library
    ]
    found: dict[str, set[str]] = collections.defaultdict(set)
    for package in ("dynamo_backends", "passes"):
        for path in (ROOT / package).rglob("*.py"):
            for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
                if (part := parts_of(name)) is not None:
                    found[part].add(str(path.relative_to(ROOT)))
    whole = {name for name in found if any(other.startswith(f"{name}.") for other in found)}  # ``import torch._dynamo``
    return {name: sorted(found[name]) for name in sorted(found) if name not in whole}


def _part_of_torch(name: str) -> str | None:
    """A name to one part after the first that is private; ``None`` if it is not private, or not PyTorch's."""
    parts = name.split(".")
    private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    if parts[0] != "torch" or parts[1:2] == ["ops"] or not private:
        return None
    return ".".join(parts[: private[0] + 2])


def _part_of_onnx_runtime(name: str) -> str | None:
    """What is in ``onnxruntime.capi``, and the native session, an attribute of whatever a session is called."""
    parts = name.split(".")
    if parts[:2] == ["onnxruntime", "capi"]:
        return ".".join(parts[:3])
    return "onnxruntime.InferenceSession._sess" if "_sess" in parts[1:] else None


def _part_of_onnxscript(name: str) -> str | None:
    """A name to one part after the first that is private."""
    parts = name.split(".")
    private = [i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    return ".".join(parts[: private[0] + 2]) if parts[0] == "onnxscript" and private else None


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(parts)])


def noticed_by(name: str) -> str:
    """The test file of a private part; empty if none is named."""
    parts = name.split(".")
    starts = [".".join(parts[:end]) for end in range(len(parts), 1, -1)]
    return next((NOTICED_BY[start] for start in starts if start in NOTICED_BY), "")


def table(library: str) -> str:
    """The table of a library in Markdown."""
    called = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "onnxscript": "onnxscript"}[library]
    rows = [f"| of {called} | used in | a test that runs it |", "| --- | --- | --- |"]
    for name, modules in used(library).items():
        where = ", ".join(f"`{module}`" for module in modules[:_SHOWN])
        more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
        rows.append(f"| `{name}` | {where}{more} | `{noticed_by(name)}` |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(*map(table, LIBRARIES), sep="\n")
