"""Patterns on ONNX graphs: matches, replacements, and the reasons for near misses."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_same_as_eager, counted
from onnxscript.rewriter.pattern import RewriteRule
from onnxscript.rewriter.rules import common

from dynamo_backends.options import parse_options
from dynamo_backends.partition.regions import Support
from dynamo_backends.pipeline.pass_target import pass_target
from passes import OnnxPattern, PassContext, Target, onnx_editing, onnx_pattern_pass, register, unregister
from passes.engine.onnx.inference import infer_types

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def model_of(text: str) -> ir.Model:
    """An ONNX model, written in ONNX's own textual form, with inferred types."""
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text)))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def run(model: ir.Model, **inputs: np.ndarray) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def context(explain: bool = True, target: Target | None = None) -> PassContext:
    return PassContext("onnx.test", target=target or cpu(), explain=explain)


def cpu() -> Target:
    options = parse_options()
    return pass_target(options, Support(options.opset, options.providers))


def apply_patterns(model: ir.Model, context: PassContext, patterns: list) -> int:
    return onnx_pattern_pass("onnx.test", "Of the patterns of a test.", patterns).run(model, context)


def silu(op, x):
    return op.Mul(x, op.Sigmoid(x))


def quick_gelu(op, x):
    return op.QuickGelu(x, alpha=1.0, _domain="com.microsoft")


SILU = OnnxPattern("silu", silu, quick_gelu)

SILU_MODEL = "m (float[4] x) => (float[4] y) { s = Sigmoid(x)  y = Mul(s, x) }"


def test_two_functions_make_a_pass():
    model = model_of(SILU_MODEL)
    x = np.linspace(-3, 3, 4, dtype=np.float32)
    [expected] = run(model, x=x)
    item = onnx_pattern_pass("onnx.my_silu", "Computes x * sigmoid(x) by one operator.", [SILU])
    assert item.run(model, context()) == 1
    assert operators(model) == ["QuickGelu"]
    assert model.opset_imports["com.microsoft"] == 1
    np.testing.assert_allclose(run(model, x=x)[0], expected, rtol=1e-6)  # float32, another kernel


def test_the_result_keeps_name_type_and_metadata():
    model = model_of(SILU_MODEL)
    root = model.graph.outputs[0].producer()
    root.metadata_props["source"], root.name = "model.py:17", "node_y"
    apply_patterns(model, context(), [SILU])
    [node] = model.graph
    assert (node.outputs[0].name, node.name, node.metadata_props["source"]) == ("y", "node_y", "model.py:17")
    assert node.outputs[0].dtype == ir.DataType.FLOAT and list(node.outputs[0].shape) == [4]


def test_operands_match_in_the_order_written_only_if_asked_to():
    model = model_of(SILU_MODEL)
    assert apply_patterns(model, context(), [dataclasses.replace(SILU, commute=False)]) == 0
    assert apply_patterns(model, context(), [SILU]) == 1


def test_a_value_used_elsewhere_stops_a_match():
    model = model_of("m (float[4] x) => (float[4] y, float[4] z) { s = Sigmoid(x)  y = Mul(s, x)  z = Exp(s) }")
    asked = context()
    assert apply_patterns(model, asked, [SILU]) == 0
    assert "other uses" in asked.near_misses[0].reason
    assert apply_patterns(model, asked, [dataclasses.replace(SILU, allow_other_uses=True)]) == 1
    assert sorted(operators(model)) == ["Exp", "QuickGelu", "Sigmoid"]
    run(model, x=np.zeros(4, np.float32))


def test_an_output_of_the_graph_stops_a_match():
    model = model_of("m (float[4] x) => (float[4] y, float[4] s) { s = Sigmoid(x)  y = Mul(s, x) }")
    assert apply_patterns(model, context(), [SILU]) == 0
    assert operators(model) == ["Sigmoid", "Mul"]


def transposed_twice(op, x, first, second):
    return op.Transpose(op.Transpose(x, perm=first), perm=second)


def not_the_inverse(context, first, second):
    taken = [first.as_ints()[i] for i in second.as_ints()]
    return None if taken == sorted(taken) else "the second Transpose does not take back the first"


TRANSPOSED_BACK = OnnxPattern("transposed back", transposed_twice, lambda op, x: op.Identity(x), not_the_inverse)


def test_a_check_rejects_with_its_reason():
    model = model_of("m (float[2,3,4] x) => (y) { a = Transpose<perm=[1,2,0]>(x)  y = Transpose<perm=[1,2,0]>(a) }")
    asked = context()
    assert apply_patterns(model, asked, [TRANSPOSED_BACK]) == 0
    [miss] = asked.near_misses
    assert "second Transpose" in miss.reason
    assert (miss.node, miss.pattern, miss.matched, miss.of) == ("y", "transposed back", 2, 2)
    back = model_of("m (float[2,3,4] x) => (y) { a = Transpose<perm=[1,2,0]>(x)  y = Transpose<perm=[2,0,1]>(a) }")
    assert apply_patterns(back, asked, [TRANSPOSED_BACK]) == 1


def test_a_check_that_says_no_without_a_reason_is_an_error():
    pattern = dataclasses.replace(SILU, check=lambda context, x: False)
    with pytest.raises(TypeError, match="silu"):
        apply_patterns(model_of(SILU_MODEL), context(), [pattern])


def test_a_near_miss_says_how_far_it_got_and_where():
    model = model_of("m (float[4] x, float[4] z) => (float[4] y) { s = Sigmoid(x)  y = Mul(z, s) }")
    asked = context()
    assert apply_patterns(model, asked, [SILU]) == 0
    [miss] = asked.near_misses
    assert (miss.node, miss.matched, miss.of) == ("y", 2, 2)
    assert "two different values" in miss.reason and "x" in miss.reason and "z" in miss.reason


def test_a_first_node_alone_is_no_near_miss():
    model = model_of("m (float[4] x, float[4] z) => (float[4] y) { y = Mul(z, x) }")
    asked = context()
    assert apply_patterns(model, asked, [SILU]) == 0 and not asked.near_misses


def test_nothing_is_put_where_the_provider_has_no_kernel():
    pattern = OnnxPattern("silu", silu, lambda op, x: op.NoSuchOperator(x, _domain="com.microsoft"))
    model, asked = model_of(SILU_MODEL), context()
    assert apply_patterns(model, asked, [pattern]) == 0
    assert operators(model) == ["Sigmoid", "Mul"]
    assert "NoSuchOperator" in asked.near_misses[0].reason
    assert apply_patterns(model, asked, [SILU]) == 1, "the rejected nodes do not count as uses"


def test_the_bisector_may_say_no(monkeypatch):
    model, asked = model_of(SILU_MODEL), context()
    monkeypatch.setattr(asked, "allows", lambda node: False)
    assert apply_patterns(model, asked, [SILU]) == 0
    assert operators(model) == ["Sigmoid", "Mul"]


def test_a_replacement_of_another_dtype_is_rejected():
    cast = OnnxPattern("cast", lambda op, x: op.Neg(op.Neg(x)), lambda op, x: op.Cast(x, to=ir.DataType.DOUBLE))
    model, asked = model_of("m (float[4] x) => (y) { a = Neg(x)  y = Neg(a) }"), context()
    assert apply_patterns(model, asked, [cast]) == 0
    assert "DOUBLE" in asked.near_misses[0].reason


def test_a_replacement_of_another_opset_is_rejected():
    older = OnnxPattern("silu", silu, lambda op, x: op.Mul(x, op.Sigmoid(x, _version=6)))
    model, asked = model_of(SILU_MODEL), context()
    assert apply_patterns(model, asked, [older]) == 0
    assert "opset 6" in asked.near_misses[0].reason


def test_numbers_in_a_replacement_have_the_dtype_of_the_other_operand():
    twice = OnnxPattern("x + x", lambda op, x: op.Add(x, x), lambda op, x: op.Mul(op.Reshape(x, [2, 2]), 2.0))
    model = model_of("m (double[2,2] x) => (y) { y = Add(x, x) }")
    x = np.ones((2, 2))
    assert apply_patterns(model, context(), [twice]) == 1
    [y] = run(model, x=x)
    assert y.dtype == np.float64 and (y == 2).all()


def test_a_parameter_that_takes_the_place_of_the_result():
    negated = OnnxPattern("negated twice", lambda op, x: op.Neg(op.Neg(x)), lambda op, x: x)
    inside = model_of("m (float[4] x) => (y) { a = Neg(x)  b = Neg(a)  y = Exp(b) }")
    assert apply_patterns(inside, context(), [negated]) == 1
    assert operators(inside) == ["Exp"] and inside.graph.inputs[0].name == "x"
    at_the_end = model_of("m (float[4] x) => (y) { a = Neg(x)  y = Neg(a) }")
    assert apply_patterns(at_the_end, context(), [negated]) == 1
    assert operators(at_the_end) == ["Identity"] and at_the_end.graph.outputs[0].name == "y"
    run(at_the_end, x=np.zeros(4, np.float32))


def test_chains_are_followed_in_one_run():
    relus = OnnxPattern("relu twice", lambda op, x: op.Relu(op.Relu(x)), lambda op, x: op.Relu(x))
    model = model_of("m (float[4] x) => (y) { a = Relu(x)  b = Relu(a)  c = Relu(b)  y = Relu(c) }")
    assert apply_patterns(model, context(), [relus]) == 3
    assert operators(model) == ["Relu"]


def sine_and_root(op, x):
    squared = op.Mul(x, x)
    return op.Sqrt(squared), squared


def test_several_results():
    pattern = OnnxPattern("both", sine_and_root, lambda op, x: (op.Abs(x), op.Pow(x, 2.0)))
    model = model_of("m (float[4] x) => (y, z) { s = Mul(x, x)  z = Exp(s)  y = Sqrt(s) }")
    x = np.array([-1, 2, -3, 4], np.float32)
    expected = run(model, x=x)
    assert apply_patterns(model, context(), [pattern]) == 1
    for ours, before in zip(run(model, x=x), expected, strict=True):
        np.testing.assert_allclose(ours, before, rtol=1e-6)  # float32, another kernel


def test_results_that_would_wait_for_each_other_are_rejected():
    def pattern(op, x, z):
        squared = op.Mul(x, x)
        return op.Add(squared, z), squared

    both = OnnxPattern("both", pattern, lambda op, x, z: op.Split(op.Concat(x, z, axis=0), num_outputs=2, _outputs=2))
    model, asked = model_of("m (float[4] x) => (y) { s = Mul(x, x)  z = Exp(s)  y = Add(s, z) }"), context()
    assert apply_patterns(model, asked, [both]) == 0
    assert "depends on another" in asked.near_misses[0].reason


def test_a_pattern_that_ends_in_two_nodes_is_rejected_when_made():
    pattern = OnnxPattern("two ends", lambda op, x: (op.Neg(x), op.Exp(x)), lambda op, x: (x, x))
    with pytest.raises(ValueError, match="two ends.*Neg, Exp"):
        apply_patterns(model_of(SILU_MODEL), context(), [pattern])


def test_subgraphs_are_searched_too():
    model = model_of(
        """m (bool c, float[4] x) => (y) { y = If(c) <
            then_branch = t () => (float[4] a) { s = Sigmoid(x)  a = Mul(s, x) },
            else_branch = e () => (float[4] b) { b = Neg(x) }> }"""
    )
    assert apply_patterns(model, context(), [SILU]) == 1
    x = np.ones(4, np.float32)
    np.testing.assert_allclose(run(model, c=np.array(True), x=x)[0], 1 / (1 + np.exp(-x)), rtol=1e-6)  # float32


def test_patterns_are_made_when_a_graph_first_needs_them_and_once():
    calls = []

    def patterns():
        calls.append(1)
        return [SILU]

    item = onnx_pattern_pass("onnx.lazy", "Computes nothing before it is needed.", patterns)
    assert not calls
    assert item.run(model_of(SILU_MODEL), context()) == item.run(model_of(SILU_MODEL), context()) == 1
    assert calls == [1]


def test_a_pass_of_another_stage_is_rejected():
    with pytest.raises(ValueError, match="stage 'onnx'"):
        onnx_pattern_pass("joint.silu", "Runs on no ONNX graph.", [SILU])


def test_a_registered_pass_runs_in_torch_compile():
    register(onnx_pattern_pass("onnx.my_silu", "Computes x * sigmoid(x) by one operator.", [SILU]))
    try:
        settings = {"options": {"passes": {"enable": ["onnx.my_silu"], "disable": ["onnx.*"]}}}
        assert_same_as_eager(lambda x: torch.sigmoid(x) * x, torch.randn(3, 5), settings=settings)
    finally:
        unregister("onnx.my_silu")
    assert counted("pass onnx.my_silu") == 1


def test_constants_are_read_from_initializers_and_nodes():
    model = model_of("m (float[4] x) => (y) <float[1] w = {2.0}> { c = Constant<value_int=3>()  y = Mul(x, w)  }")
    by_name = {value.name: value for node in model.graph for value in (*node.inputs, *node.outputs)}
    constant = onnx_editing.constant
    assert constant(by_name["w"]) == [2.0]
    assert constant(by_name["c"]) == 3
    assert constant(by_name["x"]) is None and constant(None) is None


def test_types_are_inferred_of_new_nodes():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["n", 4]))
    axes = ir.Node("", "Constant", [], [ir.AttrInt64s("value_ints", [0])])
    nodes = [axes, ir.Node("", "Unsqueeze", [x, axes.outputs[0]]), ir.Node("", "Shape", [x])]
    infer_types(nodes, 20)
    assert nodes[1].outputs[0].dtype == ir.DataType.FLOAT16
    assert [str(dim) for dim in nodes[1].outputs[0].shape] == ["1", "n", "4"]
    assert nodes[2].outputs[0].dtype == ir.DataType.INT64


# Rules of onnxscript


def test_a_rule_of_onnxscript_as_it_is():
    text = "m (float[2,3,4] x) => (y) { a = Transpose<perm=[1,2,0]>(x)  y = Transpose<perm=[1,2,0]>(a) }"
    model = model_of(text)
    x = np.random.default_rng(0).random((2, 3, 4), np.float32)
    [expected] = run(model, x=x)
    item = onnx_pattern_pass("onnx.my_transposes", "Makes one of two transposes.", [common.transpose_transpose_rule])
    asked = context()
    assert item.run(model, asked) == 1
    assert operators(model) == ["Transpose"] and asked.matches == ["y"]
    np.testing.assert_array_equal(run(model, x=x)[0], expected)


def test_every_rule_of_onnxscript_is_taken():
    rules = [getattr(common, name) for name in common.__all__]
    rules = [rule() if inspect.isfunction(rule) else rule for rule in rules]  # some are made when they are wanted
    item = onnx_pattern_pass("onnx.all_of_them", "All there is.", rules)
    model = model_of("m (float[2,3] x) => (y) { a = Relu(x)  b = Relu(a)  c = Identity(b)  y = Exp(c) }")
    assert item.run(model, context()) >= 1
    assert operators(model).count("Relu") == 1


def test_a_rule_of_onnxscript_that_ends_in_several_nodes():
    text = """m (float[2,8] x) => (y, z)
        <int64[1] zero = {0}, int64[1] half = {4}, int64[1] all = {8}, int64[1] last = {1}> {
        b = Slice(x, half, all, last)  z = Exp(b)  a = Slice(x, zero, half, last)  y = Neg(a) }"""
    model = model_of(text)
    x = np.random.default_rng(0).random((2, 8), np.float32)
    expected = run(model, x=x)
    apply_patterns(model, context(), [common.slice_split_rule])
    for ours, before in zip(run(model, x=x), expected, strict=True):
        np.testing.assert_array_equal(ours, before)


def test_a_rule_of_onnxscript_is_vetoed_and_explained(monkeypatch):
    text = "m (float[2,3,4] x) => (y) { a = Transpose<perm=[1,2,0]>(x)  y = Transpose<perm=[1,2,0]>(a) }"
    model, asked = model_of(text), context()
    monkeypatch.setattr(asked, "allows", lambda node: False)
    assert apply_patterns(model, asked, [common.transpose_transpose_rule]) == 0
    assert operators(model) == ["Transpose", "Transpose"] and not model.graph.inputs[0].uses()[1:]
    other = model_of("m (float[4] x, float[4] z) => (y) { a = Relu(x)  y = Neg(a)  }")
    assert apply_patterns(other, asked, [common.successive_relu_rule]) == 0
    near = model_of("m (float[4] x) => (y, a) { a = Relu(x)  y = Relu(a) }")
    explained = context()
    assert apply_patterns(near, explained, [common.successive_relu_rule]) == 0
    assert explained.near_misses, "why it did not match is told"


def test_a_rule_that_would_change_the_shape_is_rejected():
    flat = RewriteRule(lambda op, x: op.Neg(op.Neg(x)), lambda op, x: op.Flatten(x), name="flat")
    model, asked = model_of("m (float[2,3,4] x) => (y) { a = Neg(x)  y = Neg(a) }"), context()
    assert apply_patterns(model, asked, [flat]) == 0
    assert "[2, 12], and y is [2, 3, 4]" in asked.near_misses[0].reason


def test_a_rule_that_makes_functions_is_rejected_when_made():
    rule = RewriteRule(lambda op, x: op.Neg(x), lambda op, x: op.Mine(x, _domain="mine"), name="mine", as_function=True)
    with pytest.raises(ValueError, match="mine"):
        apply_patterns(model_of(SILU_MODEL), context(), [rule])


def test_a_registered_rule_runs_in_torch_compile():
    item = onnx_pattern_pass("onnx.my_transposes", "Makes one of two.", [common.transpose_transpose_rule])
    register(item)
    try:
        settings = {"options": {"passes": {"enable": ["onnx.my_transposes"], "disable": ["*"]}}}
        with torch.no_grad():
            x = torch.randn(2, 3, 4)
            assert_same_as_eager(lambda x: (x * 2).permute(1, 2, 0).permute(1, 2, 0) + 1, x, settings=settings)
    finally:
        unregister("onnx.my_transposes")
    assert counted("pass onnx.my_transposes") == 1
