"""Writes tensors as ONNX test data, ``input_0.pb``; of large ones only a summary, ``input_0.json``."""

from __future__ import annotations

import json
import math

import numpy as np
import onnx
import torch

from ..common.strides import element_bytes
from ..dumps import reading
from ..exporter.torch_internals import onnx_dtype
from ..numerics.value_range import extent
from .dump_folder import DumpFolder


def write_tensor(
    folder: DumpFolder, relative: str, value: torch.Tensor, name: str, limit: int, *, always: bool = False
) -> None:
    """Writes a tensor row-major as ``<relative>.pb``; with more bytes than ``limit``, a summary ``<relative>.json``.

    Args:
        name: of the ONNX value.
        limit: -1 is none.
        always: whether a tensor of more bytes is written, too. Files of a run with the same content are stored once.
    """
    size = value.numel() * value.element_size()
    if 0 <= limit < size and not always:
        folder.remove(f"{relative}.pb")  # of an earlier run with other sizes
        folder.write_text(f"{relative}.json", json.dumps({"name": name, **summary(value)}, indent=1))
        return
    folder.remove(f"{relative}.json")
    proto = onnx.TensorProto(data_type=int(onnx_dtype(value.dtype)), dims=list(value.shape), name=name)
    data = np.from_dlpack(element_bytes(value.cpu())) if size else b""  # not numpy(): it makes the storage unresizable
    if size <= reading.PROTOBUF_LIMIT:
        # ``raw_data`` would be copied several times; it is the last field
        head = onnx.TensorProto(raw_data=b"").SerializeToString()[:-1] + _varint(size)
        folder.write_once(f"{relative}.pb", proto.SerializeToString() + head, memoryview(data))  # type: ignore[arg-type]
        return
    # onnx rejects such a file if it has hard links
    folder.write_bytes(f"{relative}.bin", memoryview(data))  # type: ignore[arg-type]
    reading.make_external(proto, f"{relative.rsplit('/', 1)[-1]}.bin", size)
    folder.write_once(f"{relative}.pb", proto.SerializeToString())


def _varint(number: int) -> bytes:
    """A whole number in protobuf's encoding."""
    parts = []
    while number >= 128:
        parts.append(number % 128 + 128)
        number //= 128
    return bytes([*parts, number])


def summary(value: torch.Tensor) -> dict[str, object]:
    """dtype, shape, range, mean, and the number of NaN and infinite elements."""
    result: dict[str, object] = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "bytes": value.numel() * value.element_size(),
    }
    if value.is_floating_point():
        found = extent(value)
        assert found is not None
        result.update(nan=found.nan, inf=found.infinite)
        if found.smallest is not None:
            finite = value[value.isfinite()] if found.nan or found.infinite else value
            mean = float(finite.mean(dtype=torch.float64))
            result.update(min=found.smallest, max=found.largest, mean=mean if math.isfinite(mean) else None)
    elif not value.is_complex() and value.numel():
        result.update(min=int(value.min()), max=int(value.max()))
    return result
