"""The cases of ``threads_sweep.py``: how each is compiled, run and judged, and its ONNX operators."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from large_layers import FUNCTIONS, LAYERS, Layer
from large_samples import TooSmall, large_samples
from operators import call, copy_of, entries, first_dtype, is_random, samples, seed
from threads_judge import UNDEFINED, Results, Subject, Verdict, flat, judge
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.options import parse_options
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.pipeline import Pipeline
from dynamo_backends.pipeline.stage_data import CompiledRegion

ERROR = "error"
TOO_SMALL = "too small"
NOT_ON_ONNX = "not on ONNX"
RANDOM = "random"
EAGER_RAISES = "eager raises"
EMITTED = "emitted"

TOO_SMALL_BY_NATURE: dict[str, str] = {
    "broadcast_shapes": "takes shapes only",
    "item": "takes one element",
    "scalar_tensor": "makes one element",
    "sparse.sampled_addmm": "takes a sparse tensor, and so runs in PyTorch",
}
"""Entries that cannot be large, and why."""


@dataclasses.dataclass(frozen=True)
class Undefined:
    """Results that PyTorch does not define.

    Attributes:
        sentence: where its documentation says so.
        results: their positions among the results.
    """

    sentence: str
    results: frozenset[int]


_FIRST, _SECOND = frozenset({0}), frozenset({1})
_EQUAL_VALUES = "torch.argsort: if stable is False, the relative order of values which compare equal is not guaranteed"
_MEDIAN = "torch.median: indices does not necessarily contain the first occurrence of each median value found"
UNDEFINED_RESULTS = {
    "argsort": Undefined(_EQUAL_VALUES, _FIRST),
    "median": Undefined(_MEDIAN, _SECOND),
    "nanmedian": Undefined(_MEDIAN, _SECOND),
    "sort": Undefined(_EQUAL_VALUES, _SECOND),
    "topk": Undefined(
        "torch.topk: the indices of tied elements are not guaranteed to be stable and may vary across different "
        "invocations",
        _SECOND,
    ),
}
"""By the name of the entry. Results at repeated indices without a sum are undefined too; no such sample is made
(``large_samples.UNIQUE_INDICES``)."""


@dataclasses.dataclass
class Report:
    """One case, or one sample of it, judged."""

    case: str
    sample: int
    verdict: Verdict
    how: str = ""
    operators: list[str] = dataclasses.field(default_factory=list)
    in_pytorch: list[str] = dataclasses.field(default_factory=list)
    """The operators of its graphs that ran in PyTorch."""
    seconds: float = 0.0


class _Listener(Observer):
    """Collects the ONNX operators of all models that get a session."""

    def __init__(self, operators: set[str]) -> None:
        self._operators = operators

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        if name == "session" and isinstance(artifact, CompiledRegion):
            model = artifact.optimized_model
            for part in (model.graph, *model.functions.values()):
                self._operators.update(map(operator_name, ir.traversal.RecursiveGraphIterator(part)))


def operator_name(node: ir.Node) -> str:
    """``Conv``, ``com.microsoft.Gelu``, ``ScatterND[add]``."""
    name = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    if name.startswith("Scatter"):
        reduction = node.attributes.get("reduction")
        return f"{name}[{reduction.as_string() if reduction is not None else 'none'}]"
    return name


def _compiled(function: Callable[..., object], operators: set[str]) -> Callable[..., object]:
    """``torch.compile(function, backend="onnxrt", dynamic=False)``, with a listener."""

    def backend(module: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return Pipeline(parse_options({"placement": "onnx"}), _Listener(operators)).compile_dynamo_graph(module, inputs)

    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend=backend, dynamic=False)


def _why_not_on_onnx() -> str | None:
    events = counters["dynamo_backends"]
    if events["runtime_failures"]:
        return "ONNX Runtime failed while running a region"
    if events["nodes_on_onnx"]:
        return None
    return ", ".join(_in_pytorch()) or "no operator"


def _in_pytorch() -> list[str]:
    """The ATen operators of all graphs compiled since the last reset that PyTorch runs."""
    return sorted(event[9:] for event in counters["dynamo_backends"] if event.startswith("fallback "))


def _to_double(value: object) -> object:
    """Arguments in double precision, those too that say a result's dtype."""
    dtypes = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def convert(leaf: object) -> object:
        if isinstance(leaf, torch.dtype):
            return dtypes.get(leaf, leaf)
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        if leaf.dtype is torch.complex64:
            return leaf.detach().to(torch.complex128).requires_grad_(leaf.requires_grad)
        if leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(convert, value)


def _with_gradients(function: Callable[[object], object], arguments: object, others: Sequence[torch.Tensor]) -> Results:
    """The results, and the gradients of arguments and parameters for random cotangents, the same at each call."""
    results = pytree.tree_leaves(function(arguments))
    ends = [leaf for leaf in results if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    starts = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    starts += [leaf for leaf in others if leaf.requires_grad]
    if not ends:
        return flat(results)
    cotangents = [_cotangent(leaf.shape, leaf.dtype) for leaf in ends]
    gradients = torch.autograd.grad(ends, starts, cotangents, allow_unused=True)
    return flat(results) + flat([item for item in gradients if item is not None])


@functools.lru_cache(maxsize=8)
def _cotangent(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of float32's precision, so that float64 gets the same."""
    generator = torch.Generator().manual_seed(1234)
    real = torch.randn(shape, generator=generator)
    return real.to(dtype)


def _subject(
    function: Callable[[object], object],
    arguments: object,
    operators: set[str],
    *,
    gradients: bool,
    module: torch.nn.Module | None = None,
    exact_function: Callable[[object], object] | None = None,
    exact_module: torch.nn.Module | None = None,
    undefined: frozenset[int] = frozenset(),
) -> Subject:
    compiled = _compiled(function, operators)
    parameters = list(module.parameters()) if module is not None else []
    exact_parameters = list(exact_module.parameters()) if exact_module is not None else []

    def run(chosen: Callable[[object], object], given: object, others: list[torch.nn.Parameter]) -> Results:
        seed()
        if gradients:
            return _with_gradients(chosen, copy_of(given), others)
        with torch.no_grad():
            return flat(chosen(copy_of(given)))

    return Subject(
        compiled=lambda: run(compiled, arguments, parameters),
        eager=lambda: run(function, arguments, parameters),
        exact=lambda: run(exact_function or function, _to_double(arguments), exact_parameters),
        undefined=undefined,
    )


def _judged(subject: Subject, settings: Settings) -> Verdict:
    """The verdict, with only one run where nothing is on ONNX."""
    try:
        subject.eager()
    except Exception as error:
        return Verdict(EAGER_RAISES, text=line(error))
    torch.set_num_threads(settings.threads[-1])
    subject.compiled()
    reason = _why_not_on_onnx()
    if reason is not None:
        return Verdict(NOT_ON_ONNX, text=reason)
    return judge(subject, runs=settings.runs, threads=settings.threads, seconds=settings.seconds)


def line(error: BaseException) -> str:
    """An error in one line, with the place it came from."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(where.filename).name}:{where.lineno})"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How each case is run."""

    runs: int = 20
    threads: tuple[int, ...] = (1, 2, 4)
    samples: int = 2
    seconds: float = 6.0
    timeout: float = 120.0


def all_cases() -> list[str]:
    """The names of all cases that are judged."""
    names = []
    for name, op in entries().items():
        if "empty" in name or "jiterator" in name or not op.supported_dtypes("cpu"):
            continue
        names.append(f"value/{name}")
        if op.supports_autograd and first_dtype(op) in op.supported_backward_dtypes("cpu"):
            names.append(f"gradient/{name}")
    tables = {"layer": LAYERS, "inference": LAYERS | FUNCTIONS, "function": FUNCTIONS}
    return names + [f"{kind}/{name}" for kind, table in tables.items() for name in table]


def emitting_cases() -> list[str]:
    """The names of the cases that are only compiled, at small sizes."""
    from zoo import ZOO

    return [f"emit/{name[6:]}" for name in all_cases() if name.startswith("value/")] + [f"emit/zoo.{n}" for n in ZOO]


def run_case(case: str, settings: Settings) -> Iterator[Report]:
    """Judges one case, one report for each of its samples."""
    kind, name = case.split("/", 1)
    if kind in ("value", "gradient"):
        yield from _operator_reports(case, name, settings, gradients=kind == "gradient")
    elif kind == "emit":
        yield _emission(case, name)
    else:
        yield layer_report(case, (LAYERS | FUNCTIONS)[name], settings, inference=kind == "inference")


def _operator_reports(case: str, name: str, settings: Settings, *, gradients: bool) -> Iterator[Report]:
    op = entries()[name]
    dtype = first_dtype(op)
    started = time.perf_counter()
    try:
        first = next(samples(op, dtype), None)
        if first is not None and is_random(op, first):
            yield Report(case, 0, Verdict(RANDOM, text="another seed gives another result"))
            return
        torch.set_num_threads(2)
        large = large_samples(op, dtype, settings.samples, gradients=gradients)
    except TooSmall as error:
        yield Report(case, 0, Verdict(TOO_SMALL, text=TOO_SMALL_BY_NATURE.get(name, str(error))))
        return
    table = UNDEFINED_RESULTS.get(name)
    for index, made in enumerate(large):
        operators: set[str] = set()
        arguments = (made.sample.input, made.sample.args, made.sample.kwargs)
        try:
            subject = _subject(
                lambda given: call(op, given),
                arguments,
                operators,
                gradients=gradients,
                undefined=table.results if table else frozenset(),
            )
            verdict = _judged(subject, settings)
            if verdict.outcome == UNDEFINED and table is not None:
                verdict.text = table.sentence
        except Exception as error:
            verdict = Verdict(ERROR, text=line(error))
        seconds = time.perf_counter() - started
        yield Report(case, index, verdict, made.how, sorted(operators), _in_pytorch(), seconds)
        started = time.perf_counter()


def layer_report(case: str, build: Callable[[], Layer], settings: Settings, *, inference: bool = False) -> Report:
    """Judges a layer or function: forward and backward, or in evaluation mode without gradients."""
    started = time.perf_counter()
    seed()
    layer = build()
    module = layer.function if isinstance(layer.function, torch.nn.Module) else None
    if inference and module is not None:
        module.eval()
    exact = copy.deepcopy(module).double() if module is not None else None
    for leaf in pytree.tree_leaves(layer.inputs[: layer.differentiable]):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaf.requires_grad_(not inference)
    operators: set[str] = set()
    try:
        subject = _subject(
            lambda given: layer.function(*given),  # type: ignore[misc]
            layer.inputs,
            operators,
            gradients=not inference,
            module=module,
            exact_function=(lambda given: exact(*given)) if exact is not None else None,
            exact_module=exact,
        )
        verdict = _judged(subject, settings)
    except Exception as error:
        verdict = Verdict(ERROR, text=line(error))
    return Report(case, 0, verdict, "", sorted(operators), _in_pytorch(), time.perf_counter() - started)


def _emission(case: str, name: str) -> Report:
    """Compiles small samples, with gradients if there are any, and returns the ONNX operators of their models."""
    operators: set[str] = set()
    if name.startswith("zoo."):
        from zoo import ZOO

        entry = ZOO[name[4:]]
        model, feeds = entry.build(), entry.inputs()
        result = _compiled(lambda: model(**feeds), operators)()
        loss = getattr(result, "loss", None)
        ends = [loss] if loss is not None else [leaf for leaf in pytree.tree_leaves(result) if leaf.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        return Report(case, 0, Verdict(EMITTED), "", sorted(operators))
    op = entries()[name]
    dtype = first_dtype(op)
    gradients = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for sample in samples(op, dtype, 3, gradients=gradients):
        arguments = (sample.input, sample.args, sample.kwargs)
        try:
            compiled = _compiled(lambda given: call(op, given), operators)
            if gradients:
                _with_gradients(compiled, copy_of(arguments), [])
            else:
                compiled(copy_of(arguments))
        except Exception:  # the sweep at size and tests/operators_sweep.py report it
            continue
    return Report(case, 0, Verdict(EMITTED), "", sorted(operators))
