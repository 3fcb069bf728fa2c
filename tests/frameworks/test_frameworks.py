"""Libraries that call ``torch.compile`` for their users: results are eager's, and ONNX Runtime runs the graphs.

``pip install -e '.[frameworks]'`` installs them; without one, its tests are skipped. ``docs/frameworks.md`` has the
code that users write.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import counted
from torch import nn

TOKENS, LENGTH = 100, 8
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away", "from", "home"]
TEXTS = ["the cat sat on a mat", "a dog ran far away from home", "the mat"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def runs_on_onnx() -> Iterator[None]:
    """A library that quietly does not compile would have eager's results, too."""
    missing.clear()
    yield
    assert missing or counted("nodes_on_onnx") > 0


missing: list[str] = []
"""Packages for want of which the test is skipped."""


def package(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        missing.append(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[frameworks]'")


def llama(**settings: Any) -> tf.LlamaForCausalLM:
    config = tf.LlamaConfig(
        vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, pad_token_id=0, eos_token_id=None, **settings,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


def bert_config(**settings: Any) -> tf.BertConfig:
    return tf.BertConfig(
        vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip


def prompt(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, TOKENS, (rows, LENGTH))


def tokenizer() -> tf.PreTrainedTokenizerFast:
    tokenizers = package("tokenizers")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]")
    splits = tokenizers.Tokenizer(model)
    splits.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    return tf.PreTrainedTokenizerFast(tokenizer_object=splits, **names)


def train(model: nn.Module, forward: Callable[..., torch.Tensor], batches: Sequence[Any], backward: Any = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(x), y)
        (torch.Tensor.backward if backward is None else backward)(loss)
        optimizer.step()


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    weights = zip(actual.named_parameters(), expected.named_parameters(), strict=True)
    for (name, ours), (_, eagers) in weights:  # after some steps, each rounded in another order
        torch.testing.assert_close(ours, eagers, rtol=1e-3, atol=1e-5, msg=name)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


BATCHES = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(4)]

# -------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.usefixtures("runs_on_onnx")
def test_generate_compiles() -> None:
    model, ids = llama(), prompt()
    config = tf.CompileConfig(backend="onnxrt", mode=None)
    config._compile_all_devices = True
    settings = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, disable_compile=True, **settings)
    for _ in range(2):  # the second runs what the first compiled
        torch.testing.assert_close(model.generate(ids, compile_config=config, **settings), expected)
    assert counted("graphs") == 1


@pytest.mark.usefixtures("runs_on_onnx")
@pytest.mark.parametrize(("cache", "beams"), [("dynamic", 1), ("dynamic", 3), ("static", 3)])
def test_generate_with_a_compiled_forward(cache: str, beams: int) -> None:
    model, ids = llama(), prompt()
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "cache_implementation": cache}
    expected = model.generate(ids, **settings)
    model.forward = torch.compile(model.forward, backend="onnxrt")
    for _ in range(2):
        torch.testing.assert_close(model.generate(ids, **settings), expected)


@pytest.mark.usefixtures("runs_on_onnx")
def test_trainer(tmp_path: Path) -> None:
    package("accelerate")
    model = tf.BertForSequenceClassification(bert_config(num_labels=2))
    expected = copy.deepcopy(model)
    rows = [{"input_ids": ids, "labels": ids.sum() % 2} for ids in prompt(32)]

    def fit(network: nn.Module, **settings: Any) -> None:
        arguments = tf.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, optim="sgd", use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True, **settings,
        )  # fmt: skip
        tf.Trainer(network, arguments, train_dataset=rows).train()

    fit(expected)
    fit(model, torch_compile=True, torch_compile_backend="onnxrt")
    assert_same_weights(model, expected)


@pytest.mark.usefixtures("runs_on_onnx")
def test_pipeline() -> None:
    model = tf.BertForSequenceClassification(bert_config(num_labels=2)).eval()
    classify = tf.pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
    expected = classify(TEXTS)
    classify.model.compile(backend="onnxrt")
    for ours, eagers in zip(classify(TEXTS), expected, strict=True):
        assert ours["label"] == eagers["label"] and ours["score"] == pytest.approx(eagers["score"], abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- accelerate


@pytest.mark.usefixtures("runs_on_onnx")
def test_accelerator() -> None:
    accelerate = package("accelerate")
    expected = Network()
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="onnxrt")
    model = accelerator.prepare(copy.deepcopy(expected))
    train(expected, expected, BATCHES)
    train(model, model, BATCHES, accelerator.backward)
    assert_same_weights(accelerator.unwrap_model(model, keep_torch_compile=False), expected)


# ----------------------------------------------------------------------------------------------------------- diffusers


def unet(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip
    text = torch.randn(1, 7, 16)
    return model, {"sample": torch.randn(1, 4, 8, 8), "timestep": torch.tensor(10), "encoder_hidden_states": text}


def vae(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, latent_channels=4, sample_size=16,
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 16, 16)}


def dit(diffusers: Any) -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10, norm_num_groups=8,
    )  # fmt: skip
    sample, label = torch.randn(1, 4, 8, 8), torch.tensor([1])
    return model, {"hidden_states": sample, "timestep": torch.tensor([3]), "class_labels": label}


@pytest.mark.usefixtures("runs_on_onnx")
@pytest.mark.parametrize("make", [unet, vae, dit])
def test_a_model_of_diffusers(make: Callable[[Any], tuple[nn.Module, dict[str, Any]]]) -> None:
    model, inputs = make(package("diffusers"))
    model.eval()
    with torch.no_grad():
        expected = model(**inputs).sample
        model.compile(backend="onnxrt")
        torch.testing.assert_close(model(**inputs).sample, expected, rtol=1e-4, atol=1e-5)
    assert counted("nodes_in_pytorch") == 0


@pytest.mark.usefixtures("runs_on_onnx")
def test_a_pipeline_of_diffusers() -> None:
    diffusers = package("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.DDPMPipeline(model.eval(), diffusers.DDPMScheduler(num_train_timesteps=10))
    pipeline.set_progress_bar_config(disable=True)

    def images() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.from_numpy(pipeline(num_inference_steps=3, generator=generator, output_type="np").images)

    expected = images()
    pipeline.unet.compile(backend="onnxrt")
    torch.testing.assert_close(images(), expected, rtol=1e-3, atol=1e-4)
    assert counted("graphs") == 1  # for all steps


# ---------------------------------------------------------------------------------------------------------------- peft


def with_adapter() -> Any:
    peft = package("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    return peft.get_peft_model(llama(use_cache=False), config)


@pytest.mark.usefixtures("runs_on_onnx")
def test_an_adapter_is_trained() -> None:
    model, ids = with_adapter(), prompt()
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad(set_to_none=True)
    torch.compile(model, backend="onnxrt")(input_ids=ids, labels=ids).loss.backward()
    assert expected and all("lora" in name for name in expected)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected.get(name), rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.usefixtures("runs_on_onnx")
@torch.no_grad()
def test_an_adapter_is_disabled_merged_and_restored() -> None:
    model, ids = with_adapter(), prompt()
    compiled = torch.compile(model, backend="onnxrt")

    def logits() -> torch.Tensor:
        actual = compiled(input_ids=ids).logits
        torch.testing.assert_close(actual, model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        return actual

    with_it = logits()
    with model.disable_adapter():
        assert not torch.allclose(logits(), with_it)
    model.merge_adapter()
    torch.testing.assert_close(logits(), with_it, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(), with_it, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------- sentence-transformers


@pytest.mark.usefixtures("runs_on_onnx")
def test_sentences(tmp_path: Path) -> None:
    library = package("sentence_transformers")
    tf.BertModel(bert_config()).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = library.SentenceTransformer(str(tmp_path), device="cpu")
    expected = model.encode(TEXTS)
    model.compile(backend="onnxrt")
    assert model.encode(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert model.encode(TEXTS[:1]) == pytest.approx(expected[:1], abs=1e-5)


# ----------------------------------------------------------------------------------------------------- torch_geometric


@pytest.mark.usefixtures("runs_on_onnx")
@pytest.mark.parametrize("layer", ["GCNConv", "GATConv", "SAGEConv"])
def test_graph_layers_with_several_graphs(layer: str) -> None:
    make = getattr(package("torch_geometric").nn, layer)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(16, 32), make(32, 4)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, edges).relu(), edges)

    model = Graph().eval()
    compiled = torch.compile(model, backend="onnxrt", dynamic=True)
    with torch.no_grad():
        for nodes in (20, 30):
            x, edges = torch.randn(nodes, 16), torch.randint(0, nodes, (2, 4 * nodes))
            torch.testing.assert_close(compiled(x, edges), model(x, edges), rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- lightning


def lightning_module(backend: str | None) -> Any:
    lightning = package("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.network = Network()
            if backend is not None:
                self.network = torch.compile(self.network, backend=backend)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.network(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def fit(module: Any) -> None:
    import lightning

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = torch.utils.data.DataLoader(BATCHES, batch_size=None)
    lightning.Trainer(accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet).fit(module, loader)


@pytest.mark.usefixtures("runs_on_onnx")
def test_the_network_of_a_lightning_module() -> None:
    expected, module = lightning_module(None), lightning_module("onnxrt")
    fit(expected)
    fit(module)
    assert_same_weights(module, expected)


def test_a_whole_lightning_module_is_not_traced_with_any_backend() -> None:
    """When PyTorch can trace ``self.log``, the page says less."""
    for backend in ("eager", "onnxrt"):
        with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError):
            fit(torch.compile(lightning_module(None), backend=backend))
