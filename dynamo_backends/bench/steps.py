"""One call of a model, in inference, in training and in generating text; and what comes out of it to be judged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from .case import Case
from .loading import SEED, Inputs, Loaded

Forward: TypeAlias = Callable[..., Any]
"""A model, compiled or not. One with a method ``bound`` that takes ``Inputs`` is timed as what that returns."""


def loss_of(output: object) -> torch.Tensor:
    """Something to train on: the loss in a model's result, a result that is one number, or the mean of the squares of
    the first floating-point result.

    Raises:
        ValueError: there is no floating-point result.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    for value in pytree.tree_leaves(output):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value if value.numel() == 1 else value.float().square().mean()
    raise ValueError("the model has no floating-point result to train on")


class Steps:
    """The calls of a case.

    Args:
        case: what is done.
        loaded: with what.

    Attributes:
        trained: what gets gradients: parameters, and inputs that ask for them.
    """

    def __init__(self, case: Case, loaded: Loaded) -> None:
        self.case = case
        self.loaded = loaded
        self.trained = [tensor for tensor in loaded.tensors if tensor.requires_grad]
        self._optimizer = _optimizer_of(case, self.trained)
        self._step = self._optimizer.step if self._optimizer is not None else None
        fixed = {id(tensor) for tensor in loaded.model.parameters() if self._optimizer is None}
        changing = [tensor for tensor in loaded.tensors if id(tensor) not in fixed]
        self._first_values = [(tensor, tensor.detach().clone()) for tensor in changing]
        if case.mode == "decode":
            self._prepare_generation(loaded.model)

    @staticmethod
    def _prepare_generation(model: Any) -> None:
        """All tokens that are asked for: no end of the text before. ``generate`` wants some number to pad with."""
        config = model.generation_config
        config.eos_token_id = None
        config.forced_eos_token_id = None
        if config.pad_token_id is None:
            config.pad_token_id = 0

    def calls(self, forward: Forward) -> list[Callable[[], object]]:
        """One call for each size; in inference with nothing of ours between the clock and the model."""
        return [self._call(forward, inputs) for inputs in self.loaded.inputs]

    def timed(self, forward: Forward) -> Callable[[], object]:
        """What is timed: a call, or a call of each size in turn."""
        bound = getattr(forward, "bound", None)
        calls = self.calls(forward) if bound is None else [bound(inputs) for inputs in self.loaded.inputs]
        if len(calls) == 1:
            return calls[0]

        def each_size() -> None:
            for call in calls:
                call()

        return each_size

    def _call(self, forward: Forward, inputs: Inputs) -> Callable[[], object]:
        if self.case.mode == "decode":
            return functools.partial(self.generate, inputs)
        if self.case.mode == "train":
            return functools.partial(self._train, forward, inputs)
        return functools.partial(forward, *inputs.args, **inputs.kwargs)

    def _train(self, forward: Forward, inputs: Inputs) -> object:
        for tensor in self.trained:
            tensor.grad = None
        output = forward(*inputs.args, **inputs.kwargs)
        loss_of(output).backward()
        if self._step is not None:
            self._step()
        return output

    def compile_optimizer(self, settings: Mapping[str, Any]) -> None:
        """Compiles the optimizer's step, if there is one, with the arguments of ``torch.compile``."""
        if self._optimizer is not None:
            self._step = torch.compile(self._optimizer.step, **settings)

    def generate(self, inputs: Inputs, *, judged: bool = False, cache: str | None = None) -> Any:
        """The text that the model continues; its ``forward`` is the compiled one.

        Args:
            inputs: the prompt.
            judged: whether the scores come too, beside the tokens.
            cache: another kind than the case's.
        """
        model: Any = self.loaded.model
        settings: dict[str, Any] = {
            "max_new_tokens": self.case.tokens,
            "do_sample": False,
            "num_beams": self.case.beams,
            "disable_compile": True,  # it is compiled by us, or not at all
            "use_cache": True,
        }
        if (cache or self.case.cache) == "static":
            settings["cache_implementation"] = "static"
        if judged:
            settings["return_dict_in_generate"] = True
            settings["output_logits" if self.case.beams == 1 else "output_scores"] = True
        return model.generate(*inputs.args, **inputs.kwargs, **settings)

    def results(self, forward: Forward) -> list[list[object]]:
        """What is judged, for each size: the leaves of the results; in training the gradients after them.

        Random numbers, buffers and inputs are before each as they were at the first call.
        """
        found = []
        for inputs, call in zip(self.loaded.inputs, self.calls(forward), strict=True):
            self.restore()
            torch.manual_seed(SEED)
            if self.case.mode == "decode":
                found.append(generated(self.generate(inputs, judged=True), self.case.beams))
                continue
            leaves = leaves_of(call())
            if self.case.mode == "train":
                leaves += [tensor.grad for tensor in self.trained]
            found.append([_kept(leaf) for leaf in leaves])
        return found

    def restore(self) -> None:
        """Makes buffers, inputs, and weights that an optimizer changes, what they were at first."""
        with torch.no_grad():
            for tensor, value in self._first_values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _optimizer_of(case: Case, trained: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    """With so small a rate that many steps change no result by much."""
    kinds = {"sgd": functools.partial(torch.optim.SGD, momentum=0.9), "adamw": torch.optim.AdamW}
    return kinds[case.optimizer](trained, lr=1e-6) if case.optimizer else None


def leaves_of(output: object) -> list[object]:
    """The tensors and numbers of a result; anything else is left out."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (torch.Tensor, bool, int, float))]


def generated(output: Any, beams: int) -> list[object]:
    """What is judged of a generated text.

    Returns:
        The tokens, int64 (rows, tokens), without the prompt where the model has logits for them; and the logits (steps,
        rows, vocabulary), or with beams the score of each row.
    """
    if beams > 1:
        return [output.sequences.clone(), output.sequences_scores.clone()]
    logits = torch.stack(list(output.logits))
    return [output.sequences[:, -logits.shape[0] :].clone(), logits]


def _kept(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
