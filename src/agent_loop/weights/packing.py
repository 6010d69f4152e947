"""Conversion between tensors and bytes, and packing of tensors into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import DTYPE_BYTES, TensorSpec

ALIGNMENT = 64
"""Alignment of tensors in bytes. It suits vector units and the weight loaders of engines."""


def align(offset: int) -> int:
    """Round an offset up to the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def to_bytes(tensor: Tensor, *, name: str) -> Tensor:
    """Return the bytes of a tensor on its device, [num_bytes], uint8. They are not copied if the tensor is contiguous.

    Raises:
        WeightsError: The tensor is on the meta device, sharded, sparse or of an unknown dtype.
    """
    check_transferable(tensor, name=name)
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data_N: Tensor, spec: TensorSpec) -> Tensor:
    """Return the tensor with these bytes, which shares their memory."""
    dtype: Any = getattr(torch, spec.dtype)
    return data_N.view(dtype).view(spec.shape)


def check_transferable(tensor: Tensor, *, name: str) -> None:
    """Raise an error if a tensor cannot be sent.

    Raises:
        WeightsError: See `to_bytes`.
    """
    if tensor.is_meta:
        raise WeightsError(f"weight {name!r} is on the meta device and holds no data; materialize it first")
    if type(tensor.detach()) is not Tensor or tensor.layout != torch.strided:
        raise WeightsError(
            f"weight {name!r} is a {type(tensor).__name__} of layout {tensor.layout}; publish plain dense tensors "
            "(full_tensor() of a sharded one)"
        )
    if dtype_name(tensor.dtype) not in DTYPE_BYTES:
        raise WeightsError(
            f"weight {name!r} is of {tensor.dtype}; publish one of {', '.join(sorted(DTYPE_BYTES))}"
        )


def pack(named: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Assign each tensor an aligned offset in a bucket, in order.

    A bucket has at most `bucket_bytes`, unless it holds a single larger tensor.
    """
    bucket = offset = 0
    for name, tensor in named:
        check_transferable(tensor, name=name)
        num_bytes = tensor.numel() * tensor.element_size()
        if offset and offset + num_bytes > bucket_bytes:
            bucket, offset = bucket + 1, 0
        yield TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), bucket, offset), tensor
        offset = align(offset + num_bytes)
