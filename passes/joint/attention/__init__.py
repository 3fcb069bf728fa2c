"""Finds attention that a model writes out, and writes it as one operator.

Rule: what ``forms.py`` recognizes becomes ``dynamo_backends.attention(query, key, value, bias, hidden,
kept)``, which means what was written: also for a row that is masked altogether. Query, key and value keep their leading
dimensions; heads that share keys stay expanded before it.

Not if a value between the two products has a user outside, as in a training step, where the backward reads the
probabilities (``joint.attention_in_training``).

Before::

    bmm = aten.bmm.default(q, k_transposed);  scores = aten.view.default(bmm, [2, 4, 8, 8])
    masked = aten.add.Tensor(aten.div.Tensor(scores, 4.0), mask)
    p = aten.view.default(aten._softmax.default(masked, -1, False), [8, 8, 8])
    result = aten.view.default(aten.bmm.default(p, v), [2, 4, 8, 16])

After::

    result = dynamo_backends.attention.default(q, k, v, mask, None, None, scale = 0.25)
"""

from __future__ import annotations

from torch import fx

from ...engine.context import PassContext
from ...engine.fx.editing import NotComputable, call, replace_all
from ...engine.registry import Pass
from ...operators import attention
from .forms import PARTS, Forward, NotAttention, find_forward
from .writing import operands, places_of, product_sizes, softmaxes


def find_attention(module: fx.GraphModule, context: PassContext) -> int:
    """Replaces attention that only a forward uses; returns how many."""
    fired = 0
    for softmax in softmaxes(module):
        try:
            found = find_forward(softmax)
            _check_users(found)
        except NotAttention as error:
            context.refuse(error.node, error.reason, matched=error.matched, of=PARTS)
            continue
        try:
            result = call(found.value_product, attention, *operands(found, found.value_product))
            places = places_of(found.value_product, result, product_sizes(found))
        except NotComputable as error:
            context.refuse(found.value_product, f"its operands do not fit: {error}", matched=PARTS, of=PARTS)
            continue
        fired += replace_all(places, context, at=found.value_product)
    return fired


def _check_users(found: Forward) -> None:
    inside = {*found.chain, found.value_product, found.scores_product}
    for node in (*found.chain, found.scores_product):
        if any(user not in inside for user in node.users):
            raise NotAttention(node, "the graph needs a value between the two products, as a backward does", PARTS)


PASS = Pass("joint.attention", "Writes attention that is written out as one operator.", find_attention)
