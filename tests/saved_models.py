"""Saves compiled models in one process and checks them in another, for ``tests/pipeline/test_saved_graphs.py``.

python tests/saved_models.py save FOLDER
python tests/saved_models.py load FOLDER     # prints what is right and what was compiled, as JSON
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


class Writes(nn.Module):
    """Changes a buffer and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        x.mul_(2)
        return x + self.count


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1), x.t(), x


class Odd(nn.Module):
    """Returns more than tensors."""

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"a": x + 1, "none": None, "three": 3, "size": x.shape[0], "half": 0.5}


class Complex(nn.Module):
    """PyTorch runs a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x.sin()).abs().cos()


class Constants(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(4)


class Dropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.5, training=True) * 2


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).relu()


class Break(nn.Module):
    """Two graphs, which several sizes make four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Perceptron(), Perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y)


MODELS = {kind.__name__: kind for kind in (Perceptron, Writes, Views, Odd, Complex, Constants, Dropout, Statistics)}
CASES = [
    (name, trains, dynamic)
    for name in MODELS
    for trains in (False, True)
    for dynamic in (False, True)
    if not (dynamic and name == "Statistics")  # PyTorch 2.13 raises TensorifyScalarRestartAnalysis, with aot_eager too
]


def build(kind: type[nn.Module], trains: bool) -> nn.Module:
    torch.manual_seed(0)
    return kind().train(trains)


def check(run: Callable[..., object], model: nn.Module, sizes: tuple[int, ...], trains: bool) -> None:
    """Compares calls with eager: results, written arguments and buffers, gradients; then with other weights."""
    for size in sizes:
        ours, eager = copy.deepcopy(model), copy.deepcopy(model)
        argument = torch.randn(size, 4)
        for _ in range(3):
            needs_grad = trains and not isinstance(model, Writes)
            one, two = (argument.clone().requires_grad_(needs_grad) for _ in range(2))
            torch.manual_seed(1)
            found = run(ours, one)
            torch.manual_seed(1)
            expected = eager(two)
            same(found, expected)
            same([one.detach(), ours.state_dict()], [two.detach(), eager.state_dict()])
            for result, argument_of in ((found, one), (expected, two)):
                tensors = [
                    leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
                ]
                if tensors:
                    torch.stack([leaf.sum() for leaf in tensors]).sum().backward()
                assert bool(tensors) == needs_grad and (not needs_grad or argument_of.grad is not None)
            gradients = ([value.grad for value in (x, *part.parameters())] for x, part in ((one, ours), (two, eager)))
            same(*gradients)
            with torch.no_grad():
                for value in (*ours.parameters(), *eager.parameters()):
                    value.mul_(1.5)
                    value.grad = None


def same(one: object, other: object) -> None:
    for found, expected in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if isinstance(found, torch.Tensor):
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected


def save(folder: Path) -> None:
    for name, trains, dynamic in CASES:
        with torch.set_grad_enabled(trains):
            model, x = build(MODELS[name], trains), torch.randn(3, 4)
            x.requires_grad_(trains and name != "Writes")
            function = torch.compile(model.forward, backend="onnxrt", fullgraph=True, dynamic=dynamic)
            compiled = function.aot_compile(((x,), {}))
            compiled.save_compiled_function(str(folder / f"{name}_{trains}_{dynamic}"))
    torch._dynamo.config.caching_precompile = True
    for trains in (False, True):
        run_with_breaks(trains)
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    (folder / "artifacts").write_bytes(artifacts[0])


def run_with_breaks(trains: bool) -> None:
    model = build(Break, trains) if trains else nn.Sequential(build(Break, trains))  # PyTorch keeps one for each code
    with torch.set_grad_enabled(trains):
        compiled = torch.compile(model, backend="onnxrt")
        for size in (4, 5, 6):
            x = torch.randn(size, 4)
            same(compiled(x), model(x))
            if trains:
                compiled(x).sum().backward()
                found = [value.grad.clone() for value in model.parameters()]
                model.zero_grad()
                model(x).sum().backward()
                same(found, [value.grad for value in model.parameters()])
                model.zero_grad()


def load(folder: Path) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)  # as on another machine
    torch._dynamo.config.caching_precompile = True
    torch._dynamo.lookup_backend("onnxrt")  # imports the backends with this setting
    torch._dynamo.config.caching_precompile = False
    for name, trains, dynamic in CASES:
        with torch.set_grad_enabled(trains), (folder / f"{name}_{trains}_{dynamic}").open("rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
            check(loaded, build(MODELS[name], trains), (3, 5) if dynamic else (3,), trains)
    of_functions = dict(counters["dynamo_backends"])
    counters.clear()
    torch._dynamo.config.caching_precompile = True
    torch.compiler.load_cache_artifacts((folder / "artifacts").read_bytes())
    for trains in (False, True):
        run_with_breaks(trains)
    kept = {"functions": of_functions, "cache": dict(counters["dynamo_backends"]), "dynamo": dict(counters["stats"])}
    with torch.no_grad():  # what was not saved is traced beside what was
        model, x = build(Break, False).double(), torch.randn(4, 4).double()
        same(torch.compile(model, backend="onnxrt")(x), model(x))
    print(json.dumps(kept))


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
