"""Times the ways ONNX Runtime computes attention for one position where heads share keys, its cache appended to.

::

    python benchmarks/grouped_attention.py

The ways take turns; a figure is the least of all rounds, in microseconds. Every way's results are compared first.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np
import onnx
import onnxruntime

SIZES = ((8, 2, 40, 32), (8, 2, 128, 64), (8, 2, 1024, 64), (32, 8, 256, 64), (32, 8, 1024, 64))
"""Heads of the query, heads of the keys, cached keys, features."""

_APPEND = "nk = Concat <axis = 2> (pk, k) nv = Concat <axis = 2> (pv, v)"
_ROWS = "rows = Constant <value_ints = [1, {K}, {G}, {D}]> () r = Reshape(q, rows)"
_APART = "apart = Constant <value_ints = [1, 1, {W}]> () y = Reshape(o, apart)"

WAYS = {
    "products": f"""{_APPEND} {_ROWS} t = Transpose <perm = [0, 1, 3, 2]> (nk) s = MatMul(r, t)
        c = Constant <value_float = {{scale}}> () z = Mul(s, c) p = Softmax(z) o = MatMul(p, nv) {_APART}""",
    "Attention, heads": f"""{_APPEND} heads = Constant <value_ints = [1, {{H}}, 1, {{D}}]> () r = Reshape(q, heads)
        o = Attention <scale = {{scale}}> (r, nk, nv) {_APART}""",
    "Attention, rows": f"{_APPEND} {_ROWS} o = Attention <scale = {{scale}}> (r, nk, nv) {_APART}",
    "Attention, rows, its own cache": f"{_ROWS} o, nk, nv = Attention <scale = {{scale}}> (r, k, v, , pk, pv) {_APART}",
    "GroupQueryAttention": """flat = Constant <value_ints = [1, 1, {N}]> () a = Reshape(k, flat) b = Reshape(v, flat)
        before = Constant <value = int32[1] {{{L}}}> () all = Constant <value = int32[1] {{{M}}}> ()
        y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = {H}, kv_num_heads = {K}, scale = {scale}>
            (q, a, b, pk, pv, before, all)""",
}
_MODEL = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
agraph (float[1,1,{W}] q, float[1,{K},1,{D}] k, float[1,{K},1,{D}] v, float[1,{K},{L},{D}] pk, float[1,{K},{L},{D}] pv)
    => (float[1,1,{W}] y, float[1,{K},{M},{D}] nk, float[1,{K},{M},{D}] nv) {{ {body} }}"""


def session(way: str, sizes: tuple[int, int, int, int], threads: int) -> onnxruntime.InferenceSession:
    """A session that computes attention in one of ``WAYS``."""
    heads, shared, cached, features = sizes
    numbers = {"H": heads, "K": shared, "L": cached, "D": features, "M": cached + 1, "G": heads // shared}
    numbers |= {"W": heads * features, "N": shared * features, "scale": features**-0.5}
    model = onnx.parser.parse_model(_MODEL.format(body=WAYS[way].format(**numbers), **numbers))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measure(sizes: tuple[int, int, int, int], threads: int, rounds: int) -> dict[str, float]:
    """Microseconds of each way; raises ``AssertionError`` if one computes something else."""
    sessions = {way: session(way, sizes, threads) for way in WAYS}
    random = np.random.default_rng(0)
    inputs = next(iter(sessions.values())).get_inputs()
    feeds = {item.name: random.standard_normal(item.shape, np.float32) for item in inputs}
    expected = sessions["products"].run(None, feeds)
    best = dict.fromkeys(WAYS, math.inf)
    for way, item in sessions.items():
        for ours, theirs in zip(item.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=way)
    for _ in range(rounds):
        for way, item in sessions.items():
            start = time.perf_counter()
            item.run(None, feeds)
            best[way] = min(best[way], 1e6 * (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of each session")
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    print(f"| heads, sharing, cached keys, features | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for sizes in SIZES:
        found = measure(sizes, options.threads, options.rounds)
        print(f"| {', '.join(map(str, sizes))} | {' | '.join(f'{number:.1f}' for number in found.values())} |")


if __name__ == "__main__":
    main()
