"""
``torch.compile``, step by step
===============================

What ``torch.compile`` does with functions, modules, control flow, and calls of other libraries, with the backends of
this project.
"""

import tempfile

import torch

import dynamo_backends

torch.manual_seed(0)

# %%
# A function
# ----------
#
# ``torch.compile`` returns a function that compiles when it is first called.


def foo(x, y):
    return torch.sin(x) + torch.cos(y)


compiled_foo = torch.compile(foo, backend="onnxrt")
x, y = torch.randn(10, 10), torch.randn(10, 10)
torch.testing.assert_close(compiled_foo(x, y), foo(x, y))

# %%
# A decorator
# -----------


@torch.compile(backend="onnxrt")
def bar(x, y):
    return torch.sin(x) * torch.cos(y)


print(bar(x, y).shape)

# %%
# A module
# --------
#
# The compiled module has the parameters of the one it was made from: an optimizer of one trains the other.


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(100, 10)

    def forward(self, x):
        return torch.nn.functional.relu(self.inner(x))


net = Net()
compiled_net = torch.compile(net, backend="onnxrt")
batch = torch.randn(8, 100)
torch.testing.assert_close(compiled_net(batch), net(batch))
assert next(compiled_net.parameters()) is next(net.parameters())

# %%
# How fast is it?
# ---------------
#
# Times are comparable if both functions take turns, after calls that compile and warm up. Here each function is called
# in rounds, and the median counts. ``dynamo-backends bench MODEL --train`` also uses separate processes, measures
# memory, and checks the results.

import statistics  # noqa: E402
import time  # noqa: E402


def medians(functions, rounds=20):
    times = {name: [] for name in functions}
    for _ in range(3):
        for function in functions.values():
            function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


mlp, data = Mlp(), torch.randn(32, 512)
compiled_mlp = torch.compile(mlp, backend="onnxrt")


def evaluate(model):
    def run():
        with torch.no_grad():
            model(data)

    return run


def train(model, optimizer):
    def run():
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()

    return run


optimizer = torch.optim.SGD(mlp.parameters(), lr=1e-3)
for what, functions in {
    "evaluation": {"eager": evaluate(mlp), "onnxrt": evaluate(compiled_mlp)},
    "training": {"eager": train(mlp, optimizer), "onnxrt": train(compiled_mlp, optimizer)},
}.items():
    found = medians(functions)
    print(what, *(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in found.items()))

# %%
# The first training steps are timed with PyTorch and with ONNX Runtime, and the fastest engine is kept.
#
# Control flow
# ------------
#
# A branch on a tensor's value cannot be in a graph. Dynamo ends the graph there (a *graph break*), runs the branch in
# Python, and starts another graph after it. ``explain`` shows the graphs, why each ends, what would run where, and the
# guards.


def branching(a, b):
    x = a / (torch.abs(a) + 1)
    if b.sum() < 0:
        b = b * -1
    return x * b


a, b = torch.randn(10), torch.randn(10)
compiled = torch.compile(branching, backend="onnxrt")
for sign in (1, -1):
    torch.testing.assert_close(compiled(a, b * sign), branching(a, b * sign))
print(dynamo_backends.explain(branching)(a, b))

# %%
# ``fullgraph=True`` makes a graph break an error, with the line.

try:
    torch.compile(branching, backend="onnxrt", fullgraph=True)(a, b)
except torch._dynamo.exc.Unsupported as error:
    print(str(error).splitlines()[0])
else:
    raise AssertionError("a branch on a tensor's value is one graph")

# %%
# ``torch.cond`` is a branch that stays in the graph.


def with_cond(a, b):
    return torch.cond(b.sum() < 0, lambda a, b: a * -b, lambda a, b: a * b, (a, b))


compiled = torch.compile(with_cond, backend="onnxrt", fullgraph=True)
for sign in (1, -1):
    torch.testing.assert_close(compiled(a, b * sign), with_cond(a, b * sign))

# %%
# Calls that are not PyTorch's
# ----------------------------
#
# A function of another library is a graph break too. ``torch.compiler.disable`` marks functions that Dynamo must not
# trace.

from math import factorial  # noqa: E402

import numpy as np  # noqa: E402


@torch.compiler.disable
def not_pytorch(x):
    return torch.from_numpy(np.vectorize(lambda number: number / factorial(3))(x.numpy()).astype(np.float32))


def mixed(x):
    return torch.relu(not_pytorch(x * 2)) + 1


compiled = torch.compile(mixed, backend="onnxrt")
torch.testing.assert_close(compiled(a), mixed(a))

# %%
# See the graph
# -------------
#
# The backend ``fx_debug`` prints Dynamo's graph and AOTAutograd's graphs, and runs them in PyTorch.

torch.compile(foo, backend="fx_debug", options={"dump_dir": tempfile.mkdtemp()})(x, y)
