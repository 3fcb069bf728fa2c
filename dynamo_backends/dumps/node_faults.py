"""A node that is wrong by itself: its translation, or ONNX Runtime's kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from .bisection import RIGHT, WRONG, Search, constants_of, inputs_of
from .candidates import Feeds
from .cut_folder import Piece
from .cutting import Parts
from .differences import NOTHING, distance
from .exact import exact_outputs
from .execution import PLAIN, Settings
from .reading import DumpedRegion, read_data_set

_FEW_NODES = 64
"""Nodes whose kernels are all looked at where the verdict names none."""


@dataclasses.dataclass(frozen=True)
class Culprit:
    """What PyTorch computed at the node that the verdict names: ``culprit/`` of a region.

    Attributes:
        inputs: what it read.
        eager: its results.
        exact: the same in float64.
    """

    inputs: Feeds
    eager: Feeds
    exact: Feeds

    @classmethod
    def read(cls, region: DumpedRegion) -> Culprit | None:
        """It, where the dump has it.

        Raises:
            DumpError: a file is damaged.
        """
        folder = region.folder / "culprit"
        if not folder.is_dir() or any(folder.glob("*.json")):  # a tensor was larger than the option tensor_limit
            return None
        return cls(*(dict(read_data_set(folder, kind)) for kind in ("input", "eager", "exact")))


def wrong_translation(
    search: Search, culprit: Culprit | None, parts: Parts, known: Feeds, settings: Settings
) -> Piece | None:
    """The node that the verdict names, if its ONNX nodes in float64 are not what PyTorch computes in float64.

    Args:
        search: is told what was tried and found.
        culprit: what PyTorch computed.
        parts: the model before our passes.
        known: the values of all its tensors.
        settings: of the session that ran.
    """
    found = search.found
    what = "the translation: its ONNX nodes in float64, against PyTorch's float64"
    if culprit is None and search.blamed.blames_no_node:
        search.tried("the translation, compared in PyTorch when the model ran", RIGHT)
        return None
    if culprit is None:
        search.tried(what, "not told: the dump has no PyTorch result of a node")
        return None
    known = {**known, **constants_of(parts, culprit.exact), **culprit.inputs}
    names = [name for name in culprit.exact if name in known]
    model, kept = _node_model(parts, names, culprit.inputs, known)
    feeds = inputs_of(model, known)
    exact = exact_outputs(model, feeds, search.runner)
    if exact is None:
        search.tried(what, "not told: nothing computes its ONNX nodes in float64")
        return None
    for name in names:
        right, eager = culprit.exact[name], culprit.eager[name]
        reference = distance(eager, right)
        error = distance(exact[name], right, eager.dtype)
        if error.nonfinite and known[name].dtype == eager.dtype and _overflows_alike(exact[name], eager):
            error = dataclasses.replace(error, nonfinite=0)
        if known[name].dtype == eager.dtype and error.is_explained(reference):
            continue
        search.tried(what, WRONG, name, error.error if known[name].dtype == eager.dtype else float("inf"))
        operators = (_operator_of(parts, i) for i in kept)
        found.place, found.value = "translation", name
        found.cause = next(filter(None, operators), "a folded constant")
        found.advice.append(
            "the ONNX model is not what PyTorch computes, whatever runs it; report it with the folder to "
            "dynamo-backends, or to the package that registered a converter for this operator"
        )
        returned = {name: _as_type(right, eager.dtype)}
        text = (
            f"The translation of {found.cause} ({name}): ONNX Runtime's result is not PyTorch's, which is in "
            "test_data_set_0."
        )
        allowed = {name: error.limit(reference)}
        return Piece(model, search.showing(model, feeds, returned, settings), feeds, returned, allowed, "differs", text)
    search.tried(what, RIGHT)
    return None


def wrong_kernel(
    search: Search, culprit: Culprit | None, parts: Parts, known: Feeds, settings: Settings
) -> Piece | None:
    """The first node that ONNX Runtime computes wrong by itself, of those of the FX node that the verdict names.

    Args:
        search, culprit, parts, known, settings: as of ``wrong_translation``.
    """
    found = search.found
    what = "the kernels: each node alone, nothing optimized, against float64"
    if search.blamed.blames_no_node:
        search.tried("the kernels, compared in PyTorch when the model ran", RIGHT)
        return None
    if culprit is not None:
        kept = parts.before([name for name in culprit.exact if name in known], culprit.inputs)
    else:
        node = found.value.split("__")[0]
        kept = [i for i, item in enumerate(parts.nodes) if item.metadata_props.get("fx_node") == node]
    if not found.value and len(parts.nodes) <= _FEW_NODES:
        kept = list(range(len(parts.nodes)))
    if not kept:
        search.tried(what, "not told: the verdict names no node of this model")
        return None
    untold = set()
    for i in kept:
        model = parts.cut([i], known)
        if model is None:
            continue
        feeds = inputs_of(model, known)
        exact = exact_outputs(model, feeds, search.runner)
        if exact is None:
            untold.add(parts.nodes[i].op_type)
            continue
        outcome = search.runner.run(model, feeds, PLAIN)
        for name, array in outcome.outputs.items():
            right = _as_type(exact[name], array.dtype)
            error = distance(array, right)
            if error.is_explained(NOTHING):
                continue
            search.tried(what, WRONG, name, error.error)
            found.place, found.value, found.cause = "kernel", name, parts.nodes[i].op_type
            found.advice.append("a kernel of ONNX Runtime is wrong: report it to onnxruntime with the folder")
            returned = {name: right}
            text = (
                f"ONNX Runtime's kernel of {found.cause} computes something else than ONNX says; the right result "
                "is in test_data_set_0."
            )
            allowed = {name: error.limit(NOTHING)}
            return Piece(
                model, search.showing(model, feeds, returned, settings), feeds, returned, allowed, "differs", text
            )
    search.tried(what, f"not told: nothing computes {', '.join(sorted(untold))} in float64" if untold else RIGHT)
    return None


def _operator_of(parts: Parts, i: int) -> str:
    return parts.nodes[i].metadata_props.get("aten_op", "")


def _node_model(
    parts: Parts, names: Sequence[str], stop: Collection[str], known: Feeds
) -> tuple[ir.Model, Sequence[int]]:
    """The ONNX nodes of an FX node as a model; where its result was folded, an ``Identity`` of the constant."""
    kept = parts.before(names, stop)
    model = parts.cut(kept, known, outputs=names) if kept else None
    if model is not None:
        return model, kept
    values = [onnx.numpy_helper.from_array(known[name], f"{name}__folded") for name in names]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [f"{name}__folded"], [name]) for name in names],
        "folded",
        [],
        [
            onnx.helper.make_tensor_value_info(name, value.data_type, value.dims)
            for name, value in zip(names, values, strict=True)
        ],
        values,
    )
    opset = parts.model.graph.opset_imports.get("", 18)
    proto = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=parts.model.ir_version
    )
    return ir.from_proto(proto), []


def _as_type(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A float64 result in a dtype: what is too large for it is infinite."""
    with np.errstate(over="ignore"):
        return exact.astype(dtype) if exact.dtype == np.float64 else exact


def _overflows_alike(exact: np.ndarray, eager: np.ndarray) -> bool:
    """Whether float64's result, rounded to the dtype, has its infinities and NaN where eager's has."""
    ours, its = (array.astype(np.float64) for array in (_as_type(exact, eager.dtype), eager))
    return bool((np.isfinite(ours) == np.isfinite(its)).all())
