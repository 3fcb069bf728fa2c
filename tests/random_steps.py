"""The steps of the random programs of ``random_programs.py``, as Python source.

A field ``{0}``, ``{1}`` or ``{2}`` is an operand. ``<dim>``, ``<n>``, ``<f>``, ``<k>``, ``<t>`` and ``<view>`` stand
for a dimension, a small integer, a number, a boolean, a dtype and a view, drawn for each step. A step need not suit all
operands: one that eager rejects is dropped.
"""

from __future__ import annotations

import random
import re


def _names(text: str) -> list[str]:
    return text.split()


DIMENSIONS = ("a", "b", "c", "d")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)

_UNARY = _names(
    """
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil clone conj conj_physical cos cosh deg2rad
    digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 imag isfinite isinf isnan isneginf isposinf isreal
    lgamma log log10 log1p log2 logical_not logit neg positive nan_to_num rad2deg real reciprocal relu
    resolve_conj round rsqrt selu sgn sigmoid sign signbit sin sinc sinh sqrt square tan tanh trunc view_as_real
    sum mean prod amax amin all any argmax argmin count_nonzero std var nansum nanmean median nanmedian numel
    ravel flatten squeeze fliplr flipud t adjoint diag diagonal trace tril triu rot90 atleast_1d atleast_2d
    atleast_3d zeros_like ones_like nonzero unique argsort norm logdet corrcoef cov msort vander diagflat
    diag_embed triu_indices
    """
)
_SPECIAL = _names(
    """
    bessel_j0 bessel_j1 entr erfcx i0e i1 i1e log_ndtr ndtr ndtri spherical_bessel_j0 xlog1py expit exp2 digamma
    psi gammaln log1p modified_bessel_i0 modified_bessel_k0 airy_ai
    """
)
_ACTIVATIONS = _names(
    """
    relu relu6 elu celu gelu selu silu mish hardswish hardsigmoid hardtanh leaky_relu logsigmoid softplus
    softsign tanhshrink softshrink hardshrink
    """
)
_BINARY = _names(
    """
    add sub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot logaddexp
    logaddexp2 copysign nextafter heaviside xlogy ldexp gcd lcm eq ne lt le gt ge isclose logical_and logical_or
    logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift dot inner outer mv mm
    matmul bmm kron cross dist vdot float_power rsub complex polar bucketize searchsorted masked_select isin
    tensordot equal allclose
    """
)
_DIM = _names(
    """
    sum mean prod amax amin all any argmax argmin cumsum cumprod logcumsumexp std var logsumexp softmax
    log_softmax unbind nansum count_nonzero unsqueeze squeeze flip median mode sort cummax cummin argsort
    aminmax norm nanmean
    """
)
_IN_PLACE_BINARY = _names(
    """
    add_ sub_ mul_ div_ copy_ pow_ remainder_ fmod_ maximum minimum eq_ ne_ lt_ ge_ logical_and_ logical_or_
    bitwise_and_ bitwise_xor_ atan2_ hypot_ floor_divide_ copysign_ xlogy_ fill_ masked_fill clamp_min_
    clamp_max_ true_divide_ heaviside_ ldexp_ float_power_
    """
)
_IN_PLACE_UNARY = _names(
    """
    abs_ neg_ exp_ sqrt_ relu_ sigmoid_ tanh_ floor_ ceil_ round_ sin_ cos_ zero_ square_ reciprocal_ rsqrt_
    erf_ log1p_ sign_ trunc_ frac_ logical_not_ bitwise_not_ t_ expm1_ tril_ triu_ nan_to_num_ conj_physical_
    atan_ sgn_ sinc_ deg2rad_
    """
)

VIEWS = (
    *("", "", "", "[0]", "[1:]", "[..., :1]", "[..., -1]", "[:, None]", ".mT", ".mT[..., :1]", ".view(-1)", "[::2]"),
    *(".diagonal()", ".t()", ".unsqueeze(<dim>)", ".squeeze(<dim>)", ".transpose(<dim>, <dim>)", ".flatten()"),
    *(".narrow(<dim>, 0, <n>)", ".select(<dim>, <n>)", ".expand(2, -1, -1)", ".unfold(<dim>, <n>, 1)", "[..., 1::2]"),
    *(".chunk(2, <dim>)[0]", ".split(<n>, <dim>)[-1]", ".movedim(<dim>, <dim>)", ".detach()", ".view_as({0})", ".real"),
    *(
        "[None]",
        "[-1:]",
        ".unbind(<dim>)[0]",
        ".tensor_split(2, <dim>)[-1]",
        ".swapaxes(<dim>, <dim>)",
        ".contiguous()",
    ),
)

PLAIN = [
    *(f"torch.{name}({{0}})" for name in _UNARY),
    *(f"torch.special.{name}({{0}})" for name in _SPECIAL),
    *(f"F.{name}({{0}})" for name in _ACTIVATIONS),
    *(f"torch.{name}({{0}}, {{1}})" for name in _BINARY),
    *(
        f"torch.{name}({{0}}, <f>)"
        for name in ("add", "sub", "mul", "div", "pow", "remainder", "fmod", "gt", "eq", "rsub")
    ),
    *(f"torch.{name}({{0}}, dim=<dim>)" for name in _DIM),
    *(
        f"torch.{name}({{0}}, dim=<dim>, keepdim=True)"
        for name in ("sum", "mean", "amax", "amin", "argmax", "std", "any")
    ),
    *(f"torch.{name}({{0}}, dim=(<dim>, <dim>))" for name in ("sum", "mean", "amax", "var", "logsumexp", "flip")),
    *(f"{{0}}{view}" for view in VIEWS if view),
    *("{0} + {1}", "{0} * {1}", "{0} - {1}", "{0} / ({1}.abs() + 1)", "{0} @ {1}", "{0} @ {1}.mT", "{0}.mT @ {1}"),
    *(
        "{0} > {1}",
        "{0} == {1}",
        "-{0}",
        "~({0} > 0)",
        "{0} ** 2",
        "2 ** {0}",
        "1 - {0}",
        "3 / ({0}.abs() + 1)",
        "{0} // 2",
    ),
    *(
        "{0} % 3",
        "abs({0})",
        "{0} & {1}",
        "{0} | 1",
        "{0} << 1",
        "{0} * 2.5",
        "{0} - 1",
        "{0}[[0, -1]]",
        "{0}[{1} > 0]",
    ),
    *(
        "{0}[..., None] + {1}",
        "{0}[:, 0]",
        "{0}[{1}.long().abs() % {0}.shape[0]]",
        "{0}.T",
        "{0}.H",
        "{0}.sum((0, -1))",
    ),
    "torch.where({0} > 0, {0}, {1})",
    "torch.where({0} > {1}, {1}, 2)",
    "torch.where({0} != 0, {1}, {2})",
    "({0} < {1}).to({0})",
    "{0}.masked_fill({1} > 0, <f>)",
    "{0}.expand_as({1})",
    "{0}.to(torch.<t>)",
    "{0}.to({1}.dtype)",
    "{0}.type_as({1})",
    "{0}.double().mean()",
    "{0}.view(torch.int32)",
    "torch.cat([{0}, {1}], <dim>)",
    "torch.cat([{0}, {1}, {0}], <dim>)",
    "torch.stack([{0}, {1}], <dim>)",
    "torch.hstack([{0}, {1}])",
    "torch.vstack([{0}, {1}])",
    "torch.dstack([{0}, {1}])",
    "torch.broadcast_tensors({0}, {1})[0]",
    "torch.addcmul({0}, {1}, {2}, value=<n>)",
    "torch.addcdiv({0}, {1}, {2}.abs() + 1)",
    "torch.lerp({0}, {1}, 0.3)",
    "torch.lerp({0}, {1}, {2})",
    "torch.clamp({0}, -<n>, <n>)",
    "torch.clamp({0}, min={1})",
    "torch.clamp({0}, max={1})",
    "torch.addmm({0}, {1}, {2})",
    "torch.baddbmm({0}, {1}, {2}, beta=<f>)",
    "torch.addmv({0}, {1}, {2})",
    "torch.einsum('...i,...j->...ij', {0}, {1})",
    "torch.einsum('...i,...i->...', {0}, {1})",
    "torch.gather({0}, <dim>, {0}.argsort(<dim>))",
    "torch.gather({0}, <dim>, {1}.long().abs() % <n>)",
    "torch.take_along_dim({0}, {0}.argsort(<dim>), <dim>)",
    "torch.take({0}, {1}.long().abs() % {0}.numel())",
    "torch.index_select({0}, <dim>, torch.tensor([0, -1 % {0}.shape[<dim>]]))",
    "torch.index_add({0}, <dim>, torch.tensor([0]), {1})",
    "torch.scatter({0}, <dim>, {0}.argsort(<dim>), {1})",
    "torch.scatter({0}, <dim>, {1}.long().abs() % <n>, <f>)",
    "torch.scatter_add({0}, <dim>, {0}.argsort(<dim>), {1})",
    "torch.scatter_reduce({0}, <dim>, {1}.long().abs() % <n>, {1}, 'amax')",
    "torch.scatter_reduce({0}, <dim>, {1}.long().abs() % <n>, {1}, 'mean', include_self=<k>)",
    "torch.index_fill({0}, <dim>, torch.tensor([0]), <f>)",
    "torch.topk({0}, <n>, dim=<dim>, largest=<k>).values",
    "torch.topk({0}, <n>, dim=<dim>).indices",
    "torch.kthvalue({0}, <n>, <dim>).values",
    "torch.sort({0}, <dim>, descending=<k>).values",
    "torch.sort({0}, dim=<dim>, stable=True).indices",
    "torch.max({0}, <dim>).values",
    "torch.min({0}, <dim>, keepdim=True).indices",
    "torch.cumsum({0}, <dim>, dtype=torch.<t>)",
    "torch.sum({0}, dtype=torch.<t>)",
    "torch.roll({0}, <n>, <dim>)",
    "torch.roll({0}, (<n>, 1), (0, -1))",
    "torch.tile({0}, (2, <n>))",
    "{0}.repeat(2, *[1] * {0}.dim())",
    "torch.repeat_interleave({0}, <n>, dim=<dim>)",
    "{0}.reshape(-1)",
    "{0}.reshape(<n>, -1)",
    "{0}.reshape({1}.shape)",
    "{0}.view({0}.shape[0], -1)",
    "{0}.flatten(0, 1)",
    "{0}.unflatten(<dim>, (-1, 1))",
    "{0}.permute(*reversed(range({0}.dim())))",
    "{0}.permute(-1, *range({0}.dim() - 1))",
    "{0}.as_strided((<n>, 2), (2, 1))",
    "{0}.as_strided((2,), (1,), 1)",
    "{0}.new_zeros({1}.shape)",
    "{0}.new_full((2, <n>), <n>)",
    "torch.full_like({0}, <f>)",
    "torch.arange({0}.shape[0])",
    "torch.arange(0, {0}.shape[-1], 2) * {0}.sum()",
    "torch.linspace(0, 1, {0}.shape[0])",
    "torch.eye({0}.shape[0])",
    "torch.tensor([1.0, <f>]) * {0}.sum()",
    "torch.tril({0}, <n> - 2)",
    "torch.diff({0}, dim=<dim>)",
    "torch.diagonal_scatter({0}, {1})",
    "torch.select_scatter({0}, {1}, <dim>, <n>)",
    "torch.slice_scatter({0}, {1}, <dim>, start=1)",
    "torch.slice_scatter({0}, {1}, <dim>, end=-1)",
    "torch.meshgrid({0}, {1}, indexing='ij')[0]",
    "torch.cartesian_prod({0}, {1})",
    "torch.combinations({0})",
    "torch.cdist({0}, {1})",
    "torch.trapezoid({0}, dim=<dim>)",
    "torch.renorm({0}, 2, <dim>, 1.0)",
    "torch.quantile({0}, 0.4, dim=<dim>)",
    "torch.var_mean({0}, <dim>)[1]",
    "torch.std({0}, <dim>, correction=0)",
    "torch.histc({0}, 4, -3, 3)",
    "torch.bincount({0}.long().flatten().abs())",
    "torch.linalg.norm({0})",
    "torch.linalg.vector_norm({0}, <n>, dim=<dim>)",
    "torch.linalg.matrix_norm({0})",
    "torch.linalg.inv({0} @ {0}.mH + torch.eye({0}.shape[-2]))",
    "torch.linalg.det({0})",
    "torch.linalg.solve({0} @ {0}.mH + torch.eye({0}.shape[-2]), {1})",
    "torch.linalg.cholesky({0} @ {0}.mH + torch.eye({0}.shape[-2]))",
    "torch.linalg.multi_dot([{0}, {1}, {2}])",
    "torch.linalg.matrix_power({0}, <n>)",
    "torch.fft.fft({0}).real",
    "torch.fft.rfft({0}).abs()",
    "torch.fft.ifft({0}, dim=<dim>)",
    "torch.view_as_complex({0}.reshape(-1, 2))",
    "torch.view_as_real({0} * 1j)",
    "torch.complex({0}, {1})",
    "{0} * (1 + 2j)",
    "{0}.conj() * {1}",
    "{0}.imag",
    "{0}.conj()",
    "F.softmax({0}, <dim>, dtype=torch.float32)",
    "F.gumbel_softmax({0}, dim=<dim>)",
    "F.normalize({0}, dim=<dim>)",
    "F.glu({0}, <dim>)",
    "F.gelu({0}, approximate='tanh')",
    "F.threshold({0}, 0.1, <f>)",
    "F.hardtanh({0}, -0.5, 0.7)",
    "F.leaky_relu({0}, 0.2)",
    "F.softplus({0}, beta=2)",
    "F.prelu({0}, torch.tensor([0.25], dtype={0}.dtype))",
    "F.layer_norm({0}, {0}.shape[-1:])",
    "F.layer_norm({0}, {0}.shape[-1:], {1}, {2})",
    "F.rms_norm({0}, {0}.shape[-1:])",
    "F.rms_norm({0}, {0}.shape[-2:])",
    "F.group_norm({0}, 1)",
    "F.instance_norm({0})",
    "F.batch_norm({0}, None, None, training=True)",
    "F.batch_norm({0}, {1}, {2}.abs() + 1, training=<k>)",
    "F.local_response_norm({0}, 2)",
    "F.linear({0}, {1})",
    "F.linear({0}, {1}, {2})",
    "F.bilinear({0}, {1}, {2})",
    "F.conv1d({0}, {1})",
    "F.conv1d({0}, {1}, padding=1, stride=2)",
    "F.conv2d({0}, {1})",
    "F.conv2d({0}, {1}, padding='same')",
    "F.conv_transpose1d({0}, {1}, stride=2)",
    "F.conv_transpose2d({0}, {1})",
    "F.conv2d({0}, {0}[:1])",
    "F.max_pool1d({0}, 2)",
    "F.max_pool2d({0}, 2, ceil_mode=<k>)",
    "F.max_pool2d({0}, 2, stride=1, padding=1)",
    "F.avg_pool1d({0}, 2)",
    "F.avg_pool2d({0}, 2, count_include_pad=<k>, padding=1)",
    "F.adaptive_avg_pool2d({0}, 2)",
    "F.adaptive_max_pool1d({0}, 2)",
    "F.lp_pool1d({0}, 2, 2)",
    "F.unfold({0}, 2)",
    "F.interpolate({0}, scale_factor=2)",
    "F.interpolate({0}, scale_factor=1.5, mode='bilinear')",
    "F.interpolate({0}, size=(3, 3), mode='bilinear', align_corners=<k>)",
    "F.interpolate({0}, size=5, mode='linear')",
    "F.pixel_shuffle({0}, 1)",
    "F.pixel_unshuffle({0}, 2)",
    "F.channel_shuffle({0}, 1)",
    "F.pad({0}, (1, <n>))",
    "F.pad({0}, (1, -1), value=<f>)",
    "F.pad({0}, (1, 1), mode='reflect')",
    "F.pad({0}, (1, 1), mode='replicate')",
    "F.pad({0}, (1, 1, 0, 1), mode='circular')",
    "F.one_hot({0}.long().abs() % 4)",
    "F.one_hot({0}.long().abs() % 4, 5)",
    "F.embedding({0}.long().abs() % {1}.shape[0], {1})",
    "F.embedding({0}.long().abs() % {1}.shape[0], {1}, padding_idx=0)",
    "F.embedding_bag({0}.long().abs() % {1}.shape[0], {1}, mode='sum')",
    "F.cosine_similarity({0}, {1}, dim=<dim>)",
    "F.pairwise_distance({0}, {1})",
    "F.mse_loss({0}, {1})",
    "F.l1_loss({0}, {1}, reduction='sum')",
    "F.smooth_l1_loss({0}, {1}, beta=0.5)",
    "F.huber_loss({0}, {1})",
    "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid())",
    "F.binary_cross_entropy({0}.sigmoid(), {1}.sigmoid())",
    "F.kl_div({0}, {1}.softmax(-1), reduction='batchmean')",
    "F.cross_entropy({0}, {1}.softmax(-1))",
    "F.cross_entropy({0}, {0}.argmax(1))",
    "F.cross_entropy({0}, {0}.argmin(1), label_smoothing=0.1, reduction='none')",
    "F.nll_loss({0}, {0}.argmax(1))",
    "F.hinge_embedding_loss({0}, {1}.sign())",
    "F.margin_ranking_loss({0}, {1}, {2}.sign())",
    "F.triplet_margin_loss({0}, {1}, {2})",
    "F.poisson_nll_loss({0}, {1}.abs())",
    "F.gaussian_nll_loss({0}, {1}, {2}.abs() + 1)",
    "F.scaled_dot_product_attention({0}, {1}, {2})",
    "F.scaled_dot_product_attention({0}, {0}, {1}, is_causal=True)",
    "F.scaled_dot_product_attention({0}, {0}, {0}, {1} > 0)",
    "F.dropout({0}, 0.4, training=<k>)",
    "F.alpha_dropout({0}, 0.4, training=True)",
    "torch.rand_like({0}) + {0}",
    "torch.randn({0}.shape)",
    "torch.bernoulli({0}.sigmoid())",
    "{0}.shape[0] * {1}",
    "{0} / {1}.shape[-1]",
    "{0}[: {1}.shape[0]]",
    "{0}.numel() * {1}",
    "{0}.size(<dim>) + {1}.sum()",
    "torch.zeros({0}.shape[0], {1}.shape[-1]) + 1",
    "sum({0}.unbind(<dim>))",
    "torch.utils.checkpoint.checkpoint(lambda x: x.sin() * x, {0}, use_reentrant=False)",
    "torch.vmap(lambda x: x.sin().sum())({0})",
    "torch.vmap(lambda x, y: x * y)({0}, {1})",
]
"""Expressions that make a new value, or a view."""

_TARGETS = ("{0}.clone()", "{0}.clone()", "{0}", "({0} * 1)")

CHANGES = [
    *(f".{name}({{1}})" for name in _IN_PLACE_BINARY),
    *(f".{name}()" for name in _IN_PLACE_UNARY),
    *(".add_({1}, alpha=2)", ".sub_({1}, alpha=2)", ".add_(<f>)", ".mul_(<f>)", ".fill_(<f>)", ".fill_({1}.sum())"),
    *(".addcmul_({1}, {1}, value=2)", ".addcdiv_({1}, {1}.abs() + 1)", ".lerp_({1}, 0.3)", ".clamp_(-0.5, 0.5)"),
    *(".masked_fill_({1} > 0, 3)", ".masked_fill_({1} > 0, {1}.sum())", ".masked_scatter_({1} > 0, {1})"),
    *(".index_add_(<dim>, torch.tensor([0]), {1})", ".index_copy_(<dim>, torch.tensor([0]), {1})", ".clamp_(min={1})"),
    *(".index_fill_(<dim>, torch.tensor([0]), 7)", ".index_put_((torch.tensor([0, -1]),), {1})", ".cumsum_(<dim>)"),
    *(".index_put_((torch.tensor([0, 0]),), {1}, accumulate=True)", ".scatter_(<dim>, {1}.long().abs() % <n>, {1})"),
    *(".scatter_add_(<dim>, {1}.long().abs() % <n>, {1})", ".fill_diagonal_(<f>)", ".transpose_(<dim>, <dim>)"),
    *(
        ".unsqueeze_(<dim>)",
        ".squeeze_(<dim>)",
        ".put_(torch.tensor([0]), {1})",
        ".addmm_({1}, {1}.mT)",
        ".cumprod_(<dim>)",
    ),
    *(
        ".renorm_(2, <dim>, 1.0)",
        ".pow_(2)",
        ".scatter_reduce_(<dim>, {1}.long().abs() % <n>, {1}, 'sum')",
        ".swapdims_(0, -1)",
    ),
]
"""What changes a tensor in place."""

WRITES = [
    "{name} = <target>\n{name}<view0> = {1}",
    "{name} = <target>\n{name}[{1} > 0] = <f>",
    "{name} = <target>\n{name}[..., 0] += 1",
    "{name} = <target>\n{name}[0] = {name}[-1]",
    "{name} = <target>\n{name} += {1}",
    "{name} = <target>\n{name} *= 2",
    "{name} = <target>\n{name}[::2] -= {1}[::2]",
    "{name} = torch.empty_like({0})\ntorch.add({0}, {1}, out={name})",
    "{name} = {0}.clone()\ntorch.mul({0}, 2, out={name})",
    "{name} = {0}.clone()\nother = {name}.detach()\nother.mul_(2)",
    "{name} = {0}.clone()\nother = {name}.view(-1)\nother.add_(1)\n{name} = {name} * other.sum()",
    "{name} = {0}<view>\n{0}.add_(1)",
    "{name} = {0}.clone()\n{name}.data = {name}.data * 2",
    "{name} = {0}.clone()\n{name}.set_({1})",
    # What is larger would be memory that nobody wrote.
    "{name} = {0}.clone()\nif {1}.numel() <= {0}.numel():\n    {name}.resize_({1}.shape)",
]
"""Statements that write."""

SCALAR = [
    "{0}.relu()",
    "{0} * 2",
    "{0} + 1",
    "{0}.sin()",
    "{0}.abs()",
    "{0} - {0}.sum()",
    "{0}.clone().mul_(3)",
    "-{0}",
]
"""Expressions that keep shape and dtype, as the branches of ``torch.cond`` must."""

NESTED = [
    "if {0}.shape[0] > 2:\n    {name} = <plain>\nelse:\n    {name} = <plain>",
    "if {0}.dim() == {1}.dim():\n    {name} = <plain>\nelse:\n    {name} = <plain>",
    "if {0}.sum() > 0:\n    {name} = <plain>\nelse:\n    {name} = <plain>",
    "{name} = {0}\nfor i in range(<n>):\n    {name} = <same> * (i + 1)",
    "{name} = 0\nfor x in {0}:\n    {name} = {name} + x.sin()",
    "{name} = {0}\nwhile {name}.shape[0] > 1:\n    {name} = {name}[1:] + 1",
    "with torch.no_grad():\n    {name} = <plain>",
    "with torch.enable_grad():\n    {name} = <plain>",
    "with torch.autocast('cpu', dtype=torch.bfloat16):\n    {name} = <plain>",
    "{name} = (<plain>).detach()",
    "torch._dynamo.graph_break()\n{name} = <plain>",
    "{name} = {0} * {1}.sum().item()",
    "{name} = {0}[: int({1}.abs().sum().item() * 7.31) % 3]",
    "{name} = torch.cond({1}.sum() > 0, lambda x: <branch>, lambda x: <branch>, ({0},))",
    "{name} = torch.cond({0}.shape[0] > 2, lambda x: <branch>, lambda x: <branch>, ({0},))",
    "{name} = [x * 2 for x in {0}.chunk(2, -1)][0]",
    "{name} = (lambda x, y=2: x * y)(<plain>)",
]
"""Statements with other expressions in them."""


def text_of_steps(chance: random.Random, kind: str) -> str:
    """The source of a step: ``plain``, ``in_place`` or ``nested``."""
    if kind == "plain":
        text = "{name} = <plain>"
    elif kind == "in_place":
        text = "{name} = <target><view><change>" if chance.random() < 0.3 else "{name} = <target>\n{name}<view><change>"
        if chance.random() < 0.25:
            text = chance.choice(WRITES)
    else:
        text = chance.choice(NESTED)
    while found := re.search(r"<(\w+)>", text):
        text = text[: found.start()] + _drawn(chance, found[1]) + text[found.end() :]
    return text


def _drawn(chance: random.Random, field: str) -> str:
    if field in ("plain", "same", "branch", "change"):
        expression = chance.choice({"plain": PLAIN, "same": SCALAR, "branch": SCALAR, "change": CHANGES}[field])
        return expression.replace("{0}", {"same": "{name}", "branch": "x"}.get(field, "{0}"))
    if field == "view0":
        return chance.choice([view for view in VIEWS if view.startswith("[")])
    values = {
        "target": _TARGETS,
        "view": VIEWS,
        "dim": ("0", "0", "1", "-1", "-1", "-2", "2"),
        "n": ("1", "2", "2", "3"),
        "f": ("0.5", "2", "-1.5", "0", "3"),
        "k": ("True", "False"),
        "t": DTYPES,
    }
    return chance.choice(values[field])
