"""Patterns of our passes, traced ahead: ``python -m passes.patterns`` writes this file; do not edit it.

Traced with the decompositions of dynamo-backends and PyTorch's pattern matcher.
"""

# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

import operator

import torch
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg, MultiOutputPattern

from .patterns import CommutativeCall

aten = torch.ops.aten
prims = torch.ops.prims
device = torch.device


def post_grad_find_layer_norm__root():
    mean_dim = CallFunction(aten.mean.dim, KeywordArg('x'), [-1], True)
    sub_Tensor = CallFunction(aten.sub.Tensor, KeywordArg('x'), mean_dim, _users=2)
    pow_Tensor_Scalar = CallFunction(aten.pow.Tensor_Scalar, sub_Tensor, 2)
    mean_dim_1 = CallFunction(aten.mean.dim, pow_Tensor_Scalar, [-1], True)
    add_Tensor = CommutativeCall(aten.add.Tensor, mean_dim_1, KeywordArg('eps'))
    sqrt_default = CallFunction(aten.sqrt.default, add_Tensor)
    div_Tensor = CallFunction(aten.div.Tensor, sub_Tensor, sqrt_default)
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('weight'), div_Tensor)
    result = CommutativeCall(aten.add.Tensor, mul_Tensor, KeywordArg('bias'), _users=0)
    return result


def post_grad_find_layer_norm__reciprocal():
    mean_dim = CallFunction(aten.mean.dim, KeywordArg('x'), [-1], True)
    sub_Tensor = CallFunction(aten.sub.Tensor, KeywordArg('x'), mean_dim, _users=2)
    pow_Tensor_Scalar = CallFunction(aten.pow.Tensor_Scalar, sub_Tensor, 2)
    mean_dim_1 = CallFunction(aten.mean.dim, pow_Tensor_Scalar, [-1], True)
    add_Tensor = CommutativeCall(aten.add.Tensor, mean_dim_1, KeywordArg('eps'))
    rsqrt_default = CallFunction(aten.rsqrt.default, add_Tensor)
    mul_Tensor = CommutativeCall(aten.mul.Tensor, sub_Tensor, rsqrt_default)
    mul_Tensor_1 = CommutativeCall(aten.mul.Tensor, KeywordArg('weight'), mul_Tensor)
    result = CommutativeCall(aten.add.Tensor, mul_Tensor_1, KeywordArg('bias'), _users=0)
    return result


def post_grad_find_layer_norm__two_means():
    mean_dim = CallFunction(aten.mean.dim, KeywordArg('x'), [-1], True, _users=2)
    sub_Tensor = CallFunction(aten.sub.Tensor, KeywordArg('x'), mean_dim)
    sub_Tensor_1 = CallFunction(aten.sub.Tensor, KeywordArg('x'), mean_dim)
    pow_Tensor_Scalar = CallFunction(aten.pow.Tensor_Scalar, sub_Tensor_1, 2)
    mean_dim_1 = CallFunction(aten.mean.dim, pow_Tensor_Scalar, [-1], True)
    add_Tensor = CommutativeCall(aten.add.Tensor, mean_dim_1, KeywordArg('eps'))
    sqrt_default = CallFunction(aten.sqrt.default, add_Tensor)
    div_Tensor = CallFunction(aten.div.Tensor, sub_Tensor, sqrt_default)
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('weight'), div_Tensor)
    result = CommutativeCall(aten.add.Tensor, mul_Tensor, KeywordArg('bias'), _users=0)
    return result


def post_grad_find_gelu__erf_product():
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('half'))
    mul_Tensor_1 = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('scale'))
    erf_default = CallFunction(aten.erf.default, mul_Tensor_1)
    add_Tensor = CommutativeCall(aten.add.Tensor, erf_default, KeywordArg('one'))
    result = CommutativeCall(aten.mul.Tensor, mul_Tensor, add_Tensor, _users=0)
    return result


def post_grad_find_gelu__erf_quotient():
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('half'))
    div_Tensor = CallFunction(aten.div.Tensor, KeywordArg('x'), KeywordArg('scale'))
    erf_default = CallFunction(aten.erf.default, div_Tensor)
    add_Tensor = CommutativeCall(aten.add.Tensor, erf_default, KeywordArg('one'))
    result = CommutativeCall(aten.mul.Tensor, mul_Tensor, add_Tensor, _users=0)
    return result


def post_grad_find_gelu__erf_half_last():
    div_Tensor = CallFunction(aten.div.Tensor, KeywordArg('x'), KeywordArg('scale'))
    erf_default = CallFunction(aten.erf.default, div_Tensor)
    add_Tensor = CommutativeCall(aten.add.Tensor, erf_default, KeywordArg('one'))
    mul_Tensor = CommutativeCall(aten.mul.Tensor, add_Tensor, KeywordArg('half'))
    result = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), mul_Tensor, _users=0)
    return result


def post_grad_find_gelu__erf_half_at_the_end():
    div_Tensor = CallFunction(aten.div.Tensor, KeywordArg('x'), KeywordArg('scale'))
    erf_default = CallFunction(aten.erf.default, div_Tensor)
    add_Tensor = CommutativeCall(aten.add.Tensor, erf_default, KeywordArg('one'))
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), add_Tensor)
    result = CommutativeCall(aten.mul.Tensor, mul_Tensor, KeywordArg('half'), _users=0)
    return result


def post_grad_find_gelu__tanh_power():
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('half'))
    pow_Tensor_Scalar = CallFunction(aten.pow.Tensor_Scalar, KeywordArg('x'), 3)
    mul_Tensor_1 = CommutativeCall(aten.mul.Tensor, pow_Tensor_Scalar, KeywordArg('inner'))
    add_Tensor = CommutativeCall(aten.add.Tensor, KeywordArg('x'), mul_Tensor_1)
    mul_Tensor_2 = CommutativeCall(aten.mul.Tensor, add_Tensor, KeywordArg('outer'))
    tanh_default = CallFunction(aten.tanh.default, mul_Tensor_2)
    add_Tensor_1 = CommutativeCall(aten.add.Tensor, tanh_default, KeywordArg('one'))
    result = CommutativeCall(aten.mul.Tensor, mul_Tensor, add_Tensor_1, _users=0)
    return result


def post_grad_find_gelu__tanh_products():
    mul_Tensor = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('half'))
    mul_Tensor_1 = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('outer'))
    mul_Tensor_2 = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), KeywordArg('inner'))
    mul_Tensor_3 = CommutativeCall(aten.mul.Tensor, mul_Tensor_2, KeywordArg('x'))
    add_Tensor = CommutativeCall(aten.add.Tensor, mul_Tensor_3, 1.0)
    mul_Tensor_4 = CommutativeCall(aten.mul.Tensor, mul_Tensor_1, add_Tensor)
    tanh_default = CallFunction(aten.tanh.default, mul_Tensor_4)
    add_Tensor_1 = CommutativeCall(aten.add.Tensor, tanh_default, KeywordArg('one'))
    result = CommutativeCall(aten.mul.Tensor, mul_Tensor, add_Tensor_1, _users=0)
    return result


def post_grad_find_silu__silu():
    sigmoid_default = CallFunction(aten.sigmoid.default, KeywordArg('x'))
    result = CommutativeCall(aten.mul.Tensor, KeywordArg('x'), sigmoid_default, _users=0)
    return result


def post_grad_find_softmax__last():
    amax_default = CallFunction(aten.amax.default, KeywordArg('x'), [-1], True)
    sub_Tensor = CallFunction(aten.sub.Tensor, KeywordArg('x'), amax_default)
    exp_default = CallFunction(aten.exp.default, sub_Tensor, _users=2)
    sum_dim_IntList = CallFunction(aten.sum.dim_IntList, exp_default, [-1], True)
    result = CallFunction(aten.div.Tensor, exp_default, sum_dim_IntList, _users=0)
    return result


def post_grad_find_softmax__last_of_four():
    amax_default = CallFunction(aten.amax.default, KeywordArg('x'), [3], True)
    sub_Tensor = CallFunction(aten.sub.Tensor, KeywordArg('x'), amax_default)
    exp_default = CallFunction(aten.exp.default, sub_Tensor, _users=2)
    sum_dim_IntList = CallFunction(aten.sum.dim_IntList, exp_default, [3], True)
    result = CallFunction(aten.div.Tensor, exp_default, sum_dim_IntList, _users=0)
    return result
