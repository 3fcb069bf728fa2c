"""Adapts our compiler to PyTorch's serialization of compiled graphs. It imports Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache as NotSavedError
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode
from torch._subclasses import FakeTensor

from .artifacts import Runner

__all__ = ["NotSavedError", "OutputCode", "keyed", "serializable", "share_memory"]

_KEY = "_dynamo_backends_key"


def serializable(
    compile_it: Callable[[fx.GraphModule, Sequence[object]], Runner],
) -> Callable[[fx.GraphModule, Sequence[object]], Runner]:
    """A compiler for ``aot_autograd`` whose results, which are ``OutputCode``, AOTAutograd keeps in its cache."""
    return SerializableAOTDispatchCompiler(OutputCode, compile_it)


@contextlib.contextmanager
def keyed(module: fx.GraphModule, key: str) -> Iterator[None]:
    """A context in which ``key`` is a part of a Dynamo graph's key in AOTAutograd's cache."""
    setattr(module, _KEY, key)  # PyTorch hashes all attributes of the module
    try:
        yield
    finally:
        delattr(module, _KEY)


def share_memory(arguments: Sequence[object]) -> bool:
    """Whether two of a graph's example arguments may share memory; a subclass of a tensor may share any."""
    tensors = [item for item in arguments if isinstance(item, torch.Tensor)]
    if not all(type(item) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor) for item in tensors):
        return True
    strided = [item for item in tensors if item.layout is torch.strided]
    return len({item.untyped_storage()._cdata for item in strided}) < len(tensors)
