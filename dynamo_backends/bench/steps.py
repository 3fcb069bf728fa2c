"""A call of a model in inference, training or generation, and the results of it that are judged."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from .case import Case
from .loading import SEED, Inputs, LoadedCase

Forward: TypeAlias = Callable[..., Any]
"""A model, compiled or not. If it has a method ``bound``, the function that this returns for ``Inputs`` is timed."""


def loss_of(output: object) -> torch.Tensor:
    """The loss to train on: the model's own, a result of one element, or the mean square of the first float result.

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


class PrefillClock:
    """A streamer of ``generate`` that times each text from its beginning to its first token.

    Attributes:
        milliseconds: of the prompts since the last ``clear``.
    """

    def __init__(self) -> None:
        self.milliseconds: list[float] = []
        self._started: float | None = None  # until the first token
        self._is_prompt = True

    def start(self) -> None:
        """``generate`` is called."""
        self._started, self._is_prompt = time.perf_counter(), True

    def put(self, value: torch.Tensor) -> None:
        """Gets the prompt, then each token."""
        if self._started is not None and not self._is_prompt:
            self.milliseconds.append((time.perf_counter() - self._started) * 1e3)
            self._started = None
        self._is_prompt = False

    def end(self) -> None:
        """The text is complete."""


class Steps:
    """The calls of a case.

    Attributes:
        prefill: times the prompts of ``generate``.
        trained: the tensors that get gradients: parameters, and inputs that require them.
    """

    def __init__(self, case: Case, loaded: LoadedCase) -> None:
        self.case = case
        self.loaded = loaded
        self.prefill = PrefillClock()
        self.trained = [tensor for tensor in loaded.tensors if tensor.requires_grad]
        fixed = set(map(id, loaded.model.parameters()))
        changing = [tensor for tensor in loaded.tensors if id(tensor) not in fixed]
        self._first_values = [(tensor, tensor.detach().clone()) for tensor in changing]
        if case.mode == "decode":
            config: Any = loaded.model.generation_config
            config.eos_token_id = config.forced_eos_token_id = None  # generate all tokens
            if config.pad_token_id is None:
                config.pad_token_id = 0

    def calls(self, forward: Forward) -> list[Callable[[], Any]]:
        """A call for each size; in inference without any code of the bench around it."""
        kind = {"decode": lambda forward, inputs: self.generate(inputs), "train": self._train}.get(self.case.mode)
        if kind is not None:
            return [functools.partial(kind, forward, inputs) for inputs in self.loaded.inputs]
        return [functools.partial(forward, *inputs.args, **inputs.kwargs) for inputs in self.loaded.inputs]

    def timed(self, forward: Forward) -> Callable[[], object]:
        """The function to time: a call, or a call of each size in turn."""
        bound = getattr(forward, "bound", None)
        calls = self.calls(forward) if bound is None else list(map(bound, self.loaded.inputs))
        return calls[0] if len(calls) == 1 else lambda: [call() for call in calls]

    def _train(self, forward: Forward, inputs: Inputs) -> object:
        for tensor in self.trained:
            tensor.grad = None
        output = forward(*inputs.args, **inputs.kwargs)
        loss_of(output).backward()
        return output

    def generate(self, inputs: Inputs, *, cache: str | None = None) -> list[torch.Tensor]:
        """Generates tokens with the model, whose ``forward`` is compiled; ``cache`` is by default the case's.

        Returns:
            Tokens, int64 (rows, steps), without the prompt, and logits (steps, rows, vocabulary).
        """
        model: Any = self.loaded.model
        self.prefill.start()
        output = model.generate(
            *inputs.args,
            **inputs.kwargs,
            max_new_tokens=self.case.tokens,
            do_sample=False,
            disable_compile=True,  # only the bench compiles
            streamer=self.prefill,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
            **({"cache_implementation": "static"} if (cache or self.case.cache) == "static" else {}),
        )
        return [output.sequences[:, -self.case.tokens :], torch.stack(list(output.logits))]

    def results(self, forward: Forward) -> list[list[object]]:
        """The results to judge, for each size: the leaves of the output, and in training the gradients.

        The seed, buffers and inputs are reset before each size.
        """
        results = []
        for call in self.calls(forward):
            self.restore()
            torch.manual_seed(SEED)
            leaves = leaves_of(call())
            if self.case.mode == "train":
                leaves += [tensor.grad for tensor in self.trained]
            results.append([leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
        return results

    def restore(self) -> None:
        """Resets buffers and inputs to their first values."""
        with torch.no_grad():
            for tensor, value in self._first_values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def leaves_of(output: object) -> list[object]:
    """The tensors and numbers of a result."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (torch.Tensor, bool, int, float))]
