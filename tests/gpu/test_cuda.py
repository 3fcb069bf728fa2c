"""On a GPU of NVIDIA with ONNX Runtime's CUDA provider: ``pytest -m gpu``.

``GPU_TESTS_DEVICE=cpu pytest -m gpu tests/gpu`` runs them on the CPU.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import transformers as tf
from conftest import compiled, counted
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from zoo import SMALL

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="no GPU, or an ONNX Runtime without its provider"),
]


def perceptron(width: int = 64) -> torch.nn.Module:
    layers = torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width), torch.nn.Linear(width, 8)
    return torch.nn.Sequential(*layers).to(DEVICE).eval()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def stream() -> Any:
    """A context for work on another stream than PyTorch's default."""
    return torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else nullcontext()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_by_default_the_gpu_runs_all_of_a_model() -> None:
    model, x = perceptron(), numbers(5, 64)
    result = compiled(model, options={"fallback": "error"})(x)
    torch.testing.assert_close(result, model(x))
    assert result.device == x.device and counted("nodes_on_onnx") and not counted("nodes_in_pytorch")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, x = perceptron().to(dtype), numbers(5, 64, dtype=dtype)
    torch.testing.assert_close(compiled(model)(x), model(x), rtol=3e-2, atol=3e-2)  # a few of bfloat16's 2**-8


def test_autocast() -> None:
    model, x = perceptron(), numbers(5, 64)
    function = compiled(model)
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(function(x), model(x), rtol=3e-2, atol=3e-2)  # as above


def test_sizes_change() -> None:
    model = perceptron()
    function = compiled(model)
    for rows in (5, 7, 9, 130, 1, 5):
        x = numbers(rows, 64)
        torch.testing.assert_close(function(x), model(x))


@pytest.mark.parametrize("context", [nullcontext, stream])
def test_an_argument_that_is_still_computed_and_then_overwritten(context: Callable[[], Any]) -> None:
    model, large = perceptron(), numbers(2048 if DEVICE == "cuda" else 64, 2048 if DEVICE == "cuda" else 64)
    function = compiled(model)
    function(numbers(5, 64))
    found, expected = [], []
    with context():
        for _ in range(20):
            product = large
            for _ in range(6):
                product = product @ large / 64
            x = product[:5, :64].contiguous().clamp(-3, 3)
            expected.append(model(x))
            found.append(function(x))
            x.fill_(float("nan"))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_results_become_arguments_and_are_freed_at_once() -> None:
    model, back = perceptron(), numbers(8, 64)
    function = compiled(model)
    ours = theirs = numbers(5, 64)
    for _ in range(200):
        ours, theirs = function(ours) @ back, model(theirs) @ back
        ours, theirs = ours / ours.norm(), theirs / theirs.norm()
        function(numbers(5, 64))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)  # roundings of 200 calls add up


def test_threads_with_streams_of_their_own() -> None:
    model = perceptron()
    function = compiled(model)
    function(numbers(5, 64))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad(), stream():
                for _ in range(50):
                    x = numbers(5, 64)
                    torch.testing.assert_close(function(x), model(x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_models_are_freed_while_they_run() -> None:
    for _ in range(20):
        model = perceptron()
        function = compiled(lambda x, model=model: torch.cat([model(x)] * 40)[::2])  # a concatenation copies pointers
        for _ in range(10):
            function(numbers(5, 64))
        del function, model
        torch._dynamo.reset()
        gc.collect()


def test_gpu_memory_is_freed() -> None:
    if DEVICE != "cuda":
        pytest.skip("a GPU's memory")
    free = []
    for _ in range(4):
        model, x = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)]).to(DEVICE), numbers(64, 2048)
        function = compiled(model)
        for _ in range(4):
            function(x)
        del model, x, function
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[3] > free[1] - 2**26


def test_results_on_the_cpu() -> None:
    x = numbers(5, 64)
    ours = compiled(lambda x: (x.softmax(-1).cpu() * 2, x.cpu().cos().to(DEVICE), x.sum().item() + 1))(x)
    theirs = (x.softmax(-1).cpu() * 2, x.cpu().cos().to(DEVICE), x.sum().item() + 1)
    for result, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)  # a sum of 320 numbers in another order


@pytest.mark.parametrize("placement", ["measured", "onnx"])
def test_training(placement: str) -> None:
    with torch.enable_grad():
        model = perceptron().train()
        other = copy.deepcopy(model)
        function = compiled(model, options={"placement": placement})
        for call, owner in ((function, model), (other, other)):
            optimizer = torch.optim.AdamW(owner.parameters(), 1e-3)
            torch.manual_seed(0)
            for _ in range(10):
                optimizer.zero_grad()
                call(numbers(5, 64)).square().mean().backward()
                optimizer.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # AdamW divides by small numbers, ten times


def test_dropout_draws_eagers_numbers() -> None:
    with torch.enable_grad():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 4)).to(DEVICE)
        x = numbers(5, 64)
        for placement in ("measured", "onnx"):
            function = compiled(model, options={"placement": placement})
            torch.manual_seed(3)
            ours = function(x)
            torch.manual_seed(3)
            torch.testing.assert_close(ours, model(x))


def test_weights_that_change() -> None:
    model, x = perceptron(), numbers(5, 64)
    function = compiled(model)
    function(x)
    for _ in range(3):
        model[0].weight.mul_(1.1)  # type: ignore[index]
        torch.testing.assert_close(function(x), model(x))
        model[3].weight.data.add_(0.1)  # type: ignore[index]
        torch.testing.assert_close(function(x), model(x))


def test_constant_weights() -> None:
    model, x = perceptron(), numbers(5, 64)
    function = compiled(model, options={"weights": "constants"})
    torch.testing.assert_close(function(x), model(x))
    assert counted("constant_weights")
    model[0].weight.mul_(1.1)  # type: ignore[index]
    torch.testing.assert_close(function(x), model(x))
    model[3].weight.data.add_(0.1)  # type: ignore[index]
    for _ in range(300):
        result = function(x)
    torch.testing.assert_close(result, model(x))


def test_channels_last() -> None:
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
    model = torch.nn.Sequential(*layers).to(DEVICE).eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = numbers(2, 3, 32, 32).to(memory_format=torch.channels_last)
    result = compiled(model, options={"fallback": "error"})(x)
    torch.testing.assert_close(result, model(x), rtol=1e-2, atol=1e-2)  # eager computes with TF32


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_and_its_fusion_in_float32(dtype: torch.dtype, backend: SDPBackend | None) -> None:
    torch.set_num_threads(1)
    x = [numbers(2, 12, 9, 32, dtype=dtype) for _ in range(3)]

    def attend(*x: torch.Tensor) -> torch.Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(*x)

    result = compiled(attend, options={"fallback": "error"})(*x)
    torch.testing.assert_close(result, attend(*x), rtol=1e-2, atol=1e-2)  # eager rounds probabilities to float16
    if dtype is torch.float32 and (DEVICE == "cuda" or backend is None):  # the CPU keeps what PyTorch writes out
        assert counted("pass onnx.attention")


def test_an_operator_that_onnx_lacks_runs_in_pytorch() -> None:
    x = numbers(5, 5)
    ours = compiled(lambda x: torch.linalg.qr(x.sin()).R.abs().exp())(x)
    expected = torch.linalg.qr(x.sin()).R.abs().exp()
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)  # ill-conditioned
    assert counted("nodes_in_pytorch") and counted("nodes_on_onnx")


def test_generating() -> None:
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**SMALL, "num_hidden_layers": 2})).to(DEVICE).eval()
    tokens = torch.randint(3, 50, (2, 8), device=DEVICE)
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(tokens, **settings)
    model.forward = compiled(model.forward)
    assert torch.equal(model.generate(tokens, **settings), expected)


def test_the_verdict_of_onnx_debug_is_ok(tmp_path: Path) -> None:
    with torch.enable_grad():
        model = perceptron()
        torch.compile(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(numbers(5, 64)).sum().backward()
    content = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    assert [graph["verdict"] for graph in content["graphs"]] == ["ok", "ok"]
    assert not any(graph["unchecked"] for graph in content["graphs"])


def test_options_that_cannot_be_given() -> None:
    if DEVICE != "cuda":
        pytest.skip("an option of its provider")
    options = {"providers": [("CUDAExecutionProvider", {"enable_cuda_graph": "1"}), "CPUExecutionProvider"]}
    with pytest.raises(ValueError, match="enable_cuda_graph"):
        compiled(perceptron(), options=options)(numbers(5, 64))
