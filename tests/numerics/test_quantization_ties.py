"""Another run may round a tie to the other side; a wrong quantization is not a tie."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators ``quantized_decomposed``
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.numerics.graph_execution import FxExecution
from dynamo_backends.numerics.local_error import NodeCheck, Segment, is_quantization
from dynamo_backends.numerics.quantization_ties import TieExecution
from dynamo_backends.numerics.verdicts import verdict

decomposed = torch.ops.quantized_decomposed

Form = Callable[..., torch.Tensor]


def written_out(
    x: torch.Tensor, noise: float = 0.0, scale: float = 1.0, zero: int = 0, low: int = -128
) -> torch.Tensor:
    """As torchao does; each row has a tie."""
    y = x.tanh() * (1 + noise)
    step = x.tanh().abs().amax(-1, keepdim=True) / 127.5
    numbers = ((y / (step * scale)).round() + zero).clamp(low, 127).to(torch.int8)
    return (numbers.float() * step).exp()


def of_pt2e(x: torch.Tensor, noise: float = 0.0, scale: float = 1.0, zero: int = 0, low: int = -128) -> torch.Tensor:
    y, step = x.tanh() * (1 + noise), 2.0**-7
    numbers = decomposed.quantize_per_tensor(y, step * scale, zero, low, 127, torch.int8)
    return decomposed.dequantize_per_tensor(numbers, step, 0, -128, 127, torch.int8).exp()


ROWS = torch.cat([torch.tensor([[-3.0, -2.999], [2.0, -1.0]]), torch.tensor([[-100.5, 0.5]]).div(128).atanh()])


FORMS: dict[str, Form] = {"written out": written_out, "pt2e": of_pt2e}


def run(execution: FxExecution, module: fx.GraphModule) -> FxExecution:
    for node in module.graph.nodes:
        if node.op != "output":
            execution.run(node)
    return execution


def compare(form: Form, **settings: float) -> tuple[bool, bool, dict[str, int]]:
    """Whether the result of another run is wrong by eager's ties, and by its own; the elements that are turned."""
    module, other = make_fx(lambda x: form(x))(ROWS), make_fx(lambda x: form(x, **settings))(ROWS)
    state = torch.get_rng_state()
    theirs = {
        node.name: value for node, value in run(FxExecution(other, [ROWS], state, exact=False), other).eager.items()
    }
    actual = {node: theirs[node.name] for node in module.graph.nodes if node.op == "call_function"}
    plain = run(FxExecution(module, [ROWS], state), module)
    execution = TieExecution(module, [ROWS], state, recorded={}, actual=actual)
    run(execution, module)
    (last,) = module.graph.output_node().all_input_nodes
    wrong, still = (
        verdict(actual[last], item.eager[last], item.exact_of(last)).is_wrong for item in (plain, execution)
    )
    return wrong, still, execution.turned


@pytest.mark.parametrize("form", FORMS)
def test_rounding_may_turn_a_tie(form: str) -> None:
    found = [compare(FORMS[form], noise=noise) for noise in (2e-7, -2e-7)]
    assert [still for _, still, _ in found] == [False, False]
    assert any(wrong and turned for wrong, _, turned in found)


@pytest.mark.parametrize("fault", [{"scale": 1.01}, {"scale": 0.99}, {"zero": 1}, {"low": -100}, {"noise": 1e-3}])
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_quantization_is_no_tie(form: str, fault: dict[str, float]) -> None:
    for noise in (2e-7, -2e-7):
        _, still, turned = compare(FORMS[form], **{"noise": noise, **fault})
        assert still and not (form == "pt2e" and turned)


def test_which_nodes_are_quantizations() -> None:
    graphs = [make_fx(functools.partial(form))(ROWS).graph for form in FORMS.values()]
    found = [[node.target for node in graph.nodes if is_quantization(node)] for graph in graphs]
    assert found == [[torch.ops.aten.round.default], [decomposed.quantize_per_tensor.default]]


@pytest.mark.parametrize(("by", "is_wrong"), [([0, 1, 0], False), ([1, 0, 0], True), ([0, 2, 0], True)])
def test_the_rounding_inside_of_an_operator_without_float64(by: list[int], is_wrong: bool) -> None:
    """Eager multiplies by the reciprocal of the scale; a division may differ in the last place."""
    x = torch.tensor([1.0, 2.5, -3.0]) * 0.3
    graph = make_fx(lambda x: decomposed.quantize_per_tensor(x, 0.3, 0, -128, 127, torch.int8))(x).graph
    given, node = list(graph.nodes)[:2]
    check = NodeCheck(Segment([node], {given: x}))
    right = check.eager[0]
    assert isinstance(right, torch.Tensor)
    other = right + torch.tensor(by, dtype=torch.int8) * (1 if right[1] == 2 else -1)
    assert check.verdicts([other])[0].is_wrong == is_wrong
