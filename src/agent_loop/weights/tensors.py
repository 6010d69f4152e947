"""Tensors as bytes: conversion, checksums, and packing into buckets."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_loop.errors import WeightsError
from agent_loop.weights.handle import TensorSpec

ALIGNMENT = 64
"""Alignment of tensors in bytes. It suits vector units and the weight loaders of engines."""
PAGE_BYTES = 4096


def to_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on its device: [num_bytes], uint8; not copied if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(data_N: Tensor, spec: TensorSpec) -> Tensor:
    """Return the tensor with these bytes, which shares their memory."""
    dtype: Any = getattr(torch, spec.dtype)
    return data_N.view(dtype).view(spec.shape)


def checksum(data_N: Tensor) -> int:
    """Return the checksum of bytes: shape [num_bytes], uint8, contiguous, on any device.

    It is the CRC-32 of the sums of the 4 KiB pages (512 words of 64 bits, added without carry), followed by the bytes
    of the last, incomplete page. It detects every change of a single word, but no exchange of words within a page. On
    a CPU it reads 10 GB/s, against 2.3 GB/s of a plain CRC-32.
    """
    num_whole = len(data_N) // PAGE_BYTES * PAGE_BYTES
    words = PAGE_BYTES // 8
    rest: Any = data_N[num_whole:].cpu().numpy()
    sums: Any
    if data_N.device.type == "cpu":
        whole: Any = data_N[:num_whole].numpy()
        sums = whole.view(np.uint64).reshape(-1, words).sum(axis=1)
    else:
        if data_N.storage_offset() % 8:
            data_N = data_N.clone()  # torch views only aligned bytes as words
        sums = data_N[:num_whole].view(torch.int64).view(-1, words).sum(dim=1).cpu().numpy()
    return zlib.crc32(rest, zlib.crc32(sums))


def verify(spec: TensorSpec, tensor: Tensor) -> None:
    """Compare a received tensor with its checksum."""
    found = checksum(to_bytes(tensor))
    if found != spec.checksum:
        raise WeightsError(
            f"weight {spec.name!r} was damaged in transfer: its checksum is {found}, but {spec.checksum} was sent; "
            "publish again"
        )


def pack(named: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[tuple[TensorSpec, Tensor]]:
    """Assign each tensor an aligned offset in a bucket, in order. Yield its spec without a checksum, and its bytes.

    A bucket has at most `bucket_bytes`, unless it holds a single larger tensor.
    """
    bucket = offset = 0
    names = set[str]()
    for name, tensor in named:
        if name in names:
            raise WeightsError(f"weight {name!r} was published twice; publish each weight once")
        names.add(name)
        if tensor.is_meta:
            raise WeightsError(
                f"weight {name!r} is on the meta device and holds no data; materialize it first"
            )
        if type(tensor.detach()) is not Tensor or tensor.layout != torch.strided:
            raise WeightsError(
                f"weight {name!r} is a {type(tensor).__name__} of layout {tensor.layout}; publish plain dense tensors "
                "(full_tensor() of a sharded one)"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        data_N = to_bytes(tensor)
        if offset and offset + len(data_N) > bucket_bytes:
            bucket, offset = bucket + 1, 0
        yield TensorSpec(name, dtype, tuple(tensor.shape), tensor.element_size(), bucket, offset, 0), data_N
        offset = -(-(offset + len(data_N)) // ALIGNMENT) * ALIGNMENT
