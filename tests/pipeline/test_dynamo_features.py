"""Features of ``torch.compile``: calling conventions, graph breaks, recompiles, threads, control flow, operators."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import torch
import torch.nn.functional as F
from conftest import assert_on_onnx, assert_same_as_eager, assert_same_values, compiled, counted
from functorch.experimental.control_flow import map as torch_map
from torch import nn
from torch._higher_order_ops import while_loop
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import flex_attention


def x() -> torch.Tensor:
    return torch.randn(4, 6)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def test_function_and_decorator() -> None:
    def foo(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + torch.cos(y)

    @torch.compile(backend="onnxrt")
    def decorated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + torch.cos(y)

    a, b = x(), x()
    assert_same_values(compiled(foo)(a, b), foo(a, b))
    assert_same_values(decorated(a, b), foo(a, b))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2


def test_module_and_its_compile_method() -> None:
    model, a = TwoLayers(), x()
    expected = model(a)
    assert_same_values(compiled(model)(a), expected)
    model.compile(backend="onnxrt", fullgraph=True)
    assert_same_values(model(a), expected)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_inductor_are_accepted(mode: str) -> None:
    assert_same_as_eager(mlp(), x(), settings={"mode": mode, "fullgraph": True})


def test_compiled_functions_call_functions_and_compiled_modules() -> None:
    inner = compiled(mlp())

    def helper(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * 2

    with torch.no_grad():
        a = x()
        assert_same_values(compiled(lambda x: helper(inner(x)).sum())(a), helper(inner._orig_mod(a)).sum())


def test_data_dependent_branch() -> None:
    def branch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = a / (torch.abs(a) + 1)
        if b.sum() < 0:
            b = b * -1
        return y * b

    assert_same_as_eager(branch, x(), torch.ones(6))
    assert_same_as_eager(branch, x(), -torch.ones(6))


def test_numpy_and_scipy_in_the_middle() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        y = torch.from_numpy(np.sin((x * 2).numpy()))
        y = torch.from_numpy(scipy.fft.dct(y.numpy()))
        return y.relu() + 1

    # The discrete cosine transform sums six values, which eager computes from other roundings.
    assert_same_as_eager(middle, x())


def test_prints_and_lists_as_side_effects() -> None:
    seen: list[int] = []

    def append(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen.append(y.shape[0])
        return y + 1

    compiled(append)(x())
    assert seen == [4]


def test_reset_compiles_again() -> None:
    function = compiled(lambda x: x + 1)
    function(x())
    torch._dynamo.reset()
    function(x())
    assert counted("graphs") == 2


def test_recompile_for_another_dtype_and_rank() -> None:
    function = compiled(lambda x: x * 2 + 1)
    for value in (x(), x().double(), torch.ones(3, dtype=torch.int32), torch.randn(2, 2, 2)):
        assert_same_values(function(value), value * 2 + 1)


def test_copy_of_a_compiled_module() -> None:
    function = compiled(mlp())
    a = x()
    expected = function(a)
    twin = copy.deepcopy(function)
    assert_same_values(twin(a), expected)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.allclose(twin(a), expected)
    assert_same_values(function(a), expected)


def test_two_models_in_one_process() -> None:
    first, second, a = mlp(), mlp(), x()
    compiled_first, compiled_second = compiled(first), compiled(second)
    for _ in range(2):
        assert_same_values(compiled_first(a), first(a))
        assert_same_values(compiled_second(a), second(a))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_grad_modes(context: type) -> None:
    model, a = mlp().eval(), x()
    function = compiled(model)
    with context():
        expected, actual = model(a), function(a)
    assert_same_values(actual, expected)
    assert actual.is_inference() == expected.is_inference()
    assert_on_onnx()


def test_grad_modes_in_turn() -> None:
    model, a = mlp(), x()
    function = compiled(model)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert_same_values(function(a), model(a))


def test_training_mode_is_switched() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    function, twin, a = compiled(model), copy.deepcopy(model), x()
    for training in (True, False, True):
        function.train(training)
        twin.train(training)
        torch.manual_seed(0)
        expected = twin(a)
        torch.manual_seed(0)
        assert_same_values(function(a), expected)


def test_weights_are_never_stale() -> None:
    model, a = mlp(), x()
    function = compiled(model)
    with torch.no_grad():
        function(a)
        model[0].weight.mul_(2)
        assert_same_values(function(a), model(a))
        model[0].weight.data[0] = 5.0
        assert_same_values(function(a), model(a))
        model[0].weight = nn.Parameter(torch.randn(16, 6))
        assert_same_values(function(a), model(a))
        model[2].bias.data = torch.randn(4)
        assert_same_values(function(a), model(a))
        model.load_state_dict(mlp().state_dict())
        assert_same_values(function(a), model(a))


def test_hooks() -> None:
    def hooked() -> nn.Module:
        model = mlp()
        model[0].register_forward_hook(lambda module, args, output: output * 2)
        model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model[0].weight.register_hook(lambda gradient: gradient * 3)
        return model

    model, a = hooked(), x()
    function = compiled(model)
    assert_same_values(function(a), model(a))
    function(a).sum().backward()
    actual, model[0].weight.grad = model[0].weight.grad, None
    model(a).sum().backward()
    assert_same_values(actual, model[0].weight.grad)


def test_eight_threads() -> None:
    """The same compiled module, called at once with different inputs."""
    model = mlp().eval()
    function = compiled(model)
    barrier = threading.Barrier(8)
    with torch.no_grad():
        function(x())

    def work(seed: int) -> None:
        a = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(a)
            barrier.wait()
            for _ in range(50):
                assert_same_values(function(a), expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert counted("runtime_failures") == 0


def test_threads_compile_at_once() -> None:
    barrier = threading.Barrier(4)

    def work(factor: int) -> None:
        barrier.wait()
        function = compiled(lambda x: x * factor + factor)
        assert_same_values(function(torch.ones(3)), torch.full((3,), 2.0 * factor))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(2, 6)))


def test_cond() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos() + 1, (x * 2,)) + 1

    assert_same_as_eager(call, torch.ones(3))
    assert_same_as_eager(call, -torch.ones(3))


def test_while_loop() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x + 1))

    assert_same_as_eager(call, x())


def test_map() -> None:
    assert_same_as_eager(lambda x: torch_map(lambda row: row.sin() + 1, x * 2) * 2, x())


def test_flex_attention() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q * 2, q, q, score_mod=lambda score, b, h, i, j: score + (i - j)) + 1

    q = torch.randn(1, 2, 16, 16)
    # Eager's scores differ from the fused kernel's in the last places, softmax multiplies that.
    assert_same_as_eager(attend, q, tolerance={"rtol": 1e-4, "atol": 1e-5})


def test_function_transforms() -> None:
    assert_same_as_eager(lambda x: torch.vmap(lambda row: row.sin().sum() * row)(x), x())
    assert_same_as_eager(lambda x: torch.func.grad(lambda y: (y.sin() * y).sum())(x), x())
    assert_same_as_eager(lambda x: torch.func.jacrev(lambda y: y.sin() * 2)(x), torch.randn(3))
    assert_same_as_eager(lambda x: torch.func.jvp(lambda y: y.sin() * 2, (x,), (torch.ones(3),)), torch.randn(3))


@torch.library.custom_op("dynamo_backends_tests::numpy_sin", mutates_args=())
def numpy_sin(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.detach().numpy()))


numpy_sin.register_fake(torch.empty_like)
numpy_sin.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("dynamo_backends_tests::double_in_place", mutates_args={"x"})
def double_in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sum()


double_in_place.register_fake(lambda x: x.new_empty(()))


def test_custom_operator() -> None:
    assert_same_as_eager(lambda x: numpy_sin(x + 1) * 2, x())
    assert_same_as_eager(lambda x: numpy_sin(x + 1) * 2, x().requires_grad_())
    assert counted("fallback dynamo_backends_tests.numpy_sin.default") > 0


def test_custom_operator_that_changes_its_argument() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        before = y * 3
        first = double_in_place(y)
        after = y * 5
        second = double_in_place(x)
        return before, after, first, second, x + y

    assert_same_as_eager(call, x(), calls=2)


def test_optimizer_step_is_compiled() -> None:
    def run(compile_it: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.randn(3, requires_grad=True), torch.randn(2, 2, requires_grad=True)]
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        step = compiled(optimizer.step) if compile_it else optimizer.step
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = parameter.detach() * 2
            step()
        return parameters

    assert_same_values(run(True), run(False))


def test_recurrent_and_packed_sequences() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTM(6, 5, 2, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)
            return self.out(padded)

    assert_same_as_eager(Recurrent(), torch.randn(2, 3, 6))
    assert_same_as_eager(lambda a, b: nn.utils.rnn.pad_sequence([a, b]) + 1, torch.randn(3, 2), torch.randn(2, 2))


def test_an_index_out_of_range_is_pytorchs_error() -> None:
    function = compiled(lambda table, i: table[i] * 2)
    table = torch.randn(5, 3)
    assert_same_values(function(table, torch.tensor([1, 4])), table[[1, 4]] * 2)
    with pytest.raises(IndexError, match="out of"):
        function(table, torch.tensor([1, 7]))
    assert_same_values(function(table, torch.tensor([0, -1])), table[[0, -1]] * 2)
    embedding = compiled(lambda table, i: F.embedding(i, table) * 2)
    with pytest.raises(IndexError, match="out of range"):
        embedding(table, torch.tensor([7]))


def test_an_exception_of_the_users_code_comes_through() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 3:
            raise ValueError("too many")
        return x + 1

    with pytest.raises(ValueError, match="too many"):
        compiled(fails)(x())


def test_a_graph_of_a_thousand_nodes() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for i in range(500):
            x = torch.sin(x + i)
        return x

    a = x()
    # 500 sines shrink an error about as often as they grow it; the first roundings differ.
    assert_same_values(compiled(deep)(a), deep(a), rtol=1e-4, atol=1e-4)
    assert counted("regions") == 1
    assert_on_onnx()


def test_zeros_without_memory() -> None:
    """Autograd passes on tensors that have no memory; ONNX Runtime would read from address 0."""
    zeros, none = torch._efficientzerotensor(3), torch._efficientzerotensor(3, dtype=torch.bool)
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: x.sin() + 1)(zeros), torch.ones(3))
        assert torch.equal(compiled(lambda x: ~x)(none), torch.ones(3, dtype=torch.bool))
    value = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(lambda x: x.sin() + 1)(value), value, zeros)
    assert torch.equal(gradient, torch.zeros(3))


@pytest.mark.parametrize("backend", ["onnxrt", "onnx_debug"])
def test_transforms_around_a_compiled_graph(backend: str, tmp_path: Path) -> None:
    """Tensors of forward-mode AD and of ``vmap`` hold more than their memory does."""
    options = {"dump_dir": str(tmp_path)} if backend == "onnx_debug" else {}
    function = compiled(lambda x: x.sin() + 1, backend=backend, options=options)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        assert torch.allclose(forward_ad.unpack_dual(function(dual)).tangent, torch.ones(3).cos())
    product = compiled(lambda x: (x @ x).tanh(), backend=backend, options=options)
    jacobian, expected = (
        torch.autograd.functional.jacobian(item, torch.eye(2), vectorize=True)
        for item in (product, lambda x: (x @ x).tanh())
    )
    assert torch.allclose(jacobian, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8(dtype: torch.dtype) -> None:
    """It has no way through DLPack."""
    value = torch.randn(8).to(dtype)
    with torch.no_grad():
        assert torch.equal(compiled(lambda x: x.to(torch.float32) + 1)(value), value.float() + 1)
        result = compiled(lambda x: (x.abs() + 1).to(dtype))(torch.ones(8))
    assert result.dtype is dtype and torch.equal(result.float(), torch.full((8,), 2.0))


def test_under_a_fake_tensor_mode_nothing_is_computed() -> None:
    """Fake tensors have no memory that ONNX Runtime could read."""
    run, x = compiled(lambda x: x.sin() @ x.t()), torch.randn(3, 4)
    with torch.no_grad():
        run(x)
        with FakeTensorMode(allow_non_fake_inputs=True):
            result = run(x)
        assert isinstance(result, FakeTensor) and result.shape == (3, 3)
        assert_same_values(run(x), x.sin() @ x.t())
