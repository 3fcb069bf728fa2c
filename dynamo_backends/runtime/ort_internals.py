"""The private functions of ONNX Runtime that calls use, and the public fallback for versions that lack them.

Passing a tensor takes 0.6 microseconds by private functions, and 3.4 by the public ``OrtValue`` (ONNX Runtime 1.32).
At import the private functions are tested once. If they fail, the public classes do the same, with IO binding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import onnxruntime
import torch
from torch._C import _from_dlpack, _to_dlpack  # the functions behind torch.utils.dlpack, without its checks

logger = logging.getLogger(__name__)

Value: TypeAlias = Any
"""A public or private ``OrtValue``; it has ``shape()`` and ``element_type()``."""

Device: TypeAlias = Any

IDENTITY = (
    b'\x08\x08:9\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01g'
    b"Z\x10\n\x01x\x12\x0b\n\t\x08\x01\x12\x05\n\x03\x12\x01nb\x10\n\x01y\x12\x0b\n\t\x08\x01\x12\x05\n\x03\x12\x01nB\x04\n\x00\x10\x12"
)
"""A serialized model that returns its argument ``x``, a float32 vector, as ``y``."""


class PublicCalls:
    """Zero-copy calls by ONNX Runtime's public interface."""

    is_private = False
    session_class: type = onnxruntime.InferenceSession
    """The class whose methods run sessions."""

    def plain(self, tensor: torch.Tensor) -> Value:
        """A value on the memory of a contiguous tensor without gradients, of any dtype but bool."""
        return onnxruntime.OrtValue.from_dlpack(tensor.detach())

    def booleans(self, tensor: torch.Tensor) -> Value:
        """A boolean value on the memory of a contiguous bool or uint8 tensor."""
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.detach().view(torch.bool).numpy())

    def tensor(self, value: Value) -> torch.Tensor:
        """A tensor on the memory of a value; booleans may come as ``uint8``."""
        return torch.from_dlpack(value)

    def public(self, value: Value) -> onnxruntime.OrtValue:
        """A value as the public class."""
        return value

    def device(self, kind: str, index: int) -> Device:
        """A device; the kind is ``cpu`` or ``cuda``."""
        return kind, index

    def run(
        self,
        session: onnxruntime.InferenceSession,
        options: onnxruntime.RunOptions,
        names: Sequence[str],
        arguments: Sequence[Value],
        fetches: Sequence[Value],
        output_names: Sequence[str],
        devices: Sequence[Device],
    ) -> Sequence[Value]:
        """Runs a session and returns its results.

        Args:
            names, arguments: the inputs.
            fetches: values on the memory of the results; if empty, ONNX Runtime allocates the results on ``devices``.
        """
        binding = session.io_binding()
        for name, value in zip(names, arguments, strict=True):
            binding.bind_ortvalue_input(name, value)
        for i, (name, device) in enumerate(zip(output_names, devices, strict=True)):
            if fetches:
                binding.bind_ortvalue_output(name, fetches[i])
            else:
                binding.bind_output(name, *device)
        session.run_with_iobinding(binding, options)
        return fetches or binding.get_outputs()


class PrivateCalls(PublicCalls):
    """The functions behind the public classes."""

    is_private = True

    def __init__(self) -> None:
        from onnxruntime.capi import _pybind_state as native

        self.session_class = native.InferenceSession
        self._devices = native.OrtDevice
        self._from_dlpack = from_dlpack = native.OrtValue.from_dlpack
        self._values = native.OrtValueVector
        self._has_booleans = True
        try:
            from_dlpack(_to_dlpack(torch.zeros(1, dtype=torch.bool)))
        except RuntimeError:  # before 1.32 DLPack has no booleans; an argument of from_dlpack marks them
            self._has_booleans = False

    def plain(self, tensor: torch.Tensor) -> Value:
        return self._from_dlpack(_to_dlpack(tensor))

    def booleans(self, tensor: torch.Tensor) -> Value:
        if self._has_booleans:
            return self._from_dlpack(_to_dlpack(tensor.view(torch.bool)))
        return self._from_dlpack(_to_dlpack(tensor.view(torch.uint8)), True)

    def tensor(self, value: Value) -> torch.Tensor:
        memory: torch.Tensor = _from_dlpack(value.to_dlpack())
        return memory

    def public(self, value: Value) -> onnxruntime.OrtValue:
        return onnxruntime.OrtValue(value)

    def device(self, kind: str, index: int) -> Device:
        number = self._devices.cuda() if kind == "cuda" else self._devices.cpu()
        return self._devices(number, self._devices.default_memory(), index)

    def run(
        self,
        session: onnxruntime.InferenceSession,
        options: onnxruntime.RunOptions,
        names: Sequence[str],
        arguments: Sequence[Value],
        fetches: Sequence[Value],
        output_names: Sequence[str],
        devices: Sequence[Device],
    ) -> Sequence[Value]:
        feeds, results = self._values(), self._values()
        feeds.reserve(len(arguments))
        for value in arguments:
            feeds.push_back(value)
        for value in fetches:
            results.push_back(value)
        session._sess.run_with_ortvaluevector(options, names, feeds, output_names, results, devices)
        return results


_BOOL = 9
"""``TensorProto.BOOL``"""


def _check(calls: PublicCalls) -> None:
    """Runs a session with and without memory for its results, and passes booleans through a value.

    Raises:
        Exception: of any kind, if this version of ONNX Runtime differs.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    session = onnxruntime.InferenceSession(IDENTITY, options, providers=["CPUExecutionProvider"])
    argument, result = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
    for fetches in ([], [calls.plain(result)]):
        device = calls.device("cpu", 0)
        arguments = [calls.plain(argument)]
        returned = calls.run(session, onnxruntime.RunOptions(), ["x"], arguments, fetches, ["y"], [device])[0]
        if not torch.equal(calls.tensor(returned), argument) or list(returned.shape()) != [3]:
            raise RuntimeError(f"expected {argument.tolist()}, got {calls.tensor(returned).tolist()}")
    if not torch.equal(result, argument):
        raise RuntimeError("a session did not write into the memory it was given")
    booleans = torch.tensor([True, False])
    value = calls.booleans(booleans)
    calls.public(value)
    if value.element_type() != _BOOL or not torch.equal(calls.tensor(value).view(torch.bool), booleans):
        raise RuntimeError("booleans are not returned unchanged")


def choose() -> PublicCalls:
    """The private functions if they work, else the public interface, with a warning."""
    try:
        calls = PrivateCalls()
        _check(calls)
    except Exception as error:  # whatever a version lacks
        logger.warning(
            "the private functions of ONNX Runtime %s have changed; calls use its public interface, which takes some "
            "microseconds longer for each tensor: %s: %s",
            onnxruntime.__version__,
            type(error).__name__,
            error,
        )
        return PublicCalls()
    return calls


CALLS = choose()
"""How this version of ONNX Runtime is called."""
