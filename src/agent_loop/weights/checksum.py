"""Checksums of weights, fast enough to be always enabled.

The checksum is the CRC-32 of the sums of the 4 KiB pages, followed by the bytes of the last, incomplete page. The sum
of a page is the sum of its 512 words of 64 bits, without carry. A change of a single word is always detected, and other
damage with probability 1 - 2**-32. Words that are swapped within a page are not detected.

The checksum runs at 10 GB/s on one core, against 2.3 GB/s of plain CRC-32 and 5 GB/s of a copy. It is almost free if it
reads the data from the cache after a copy.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES = 4096
CHUNK_BYTES = 4 << 20
"""Size of the chunks that are copied and summed. It fits the CPU cache and is a multiple of a page."""


def checksum(data_N: Tensor) -> int:
    """Return the checksum of bytes: shape [num_bytes], uint8, contiguous, on any device."""
    if data_N.device.type == "cpu":
        crc = 0
        for start in range(0, len(data_N), CHUNK_BYTES):
            crc = _add(crc, data_N[start : start + CHUNK_BYTES])
        return crc
    num_whole = len(data_N) // PAGE_BYTES * PAGE_BYTES
    sums = data_N[:num_whole].view(torch.int64).view(-1, PAGE_BYTES // 8).sum(dim=1)
    crc = zlib.crc32(_buffer(sums.cpu()))
    return zlib.crc32(_buffer(data_N[num_whole:].cpu()), crc)


def copy_with_checksum(source_N: Tensor, *, target_N: Tensor) -> int:
    """Copy bytes in host memory, and return the checksum of the copy."""
    crc = 0
    for start in range(0, len(source_N), CHUNK_BYTES):
        target = target_N[start : start + CHUNK_BYTES]
        target.copy_(source_N[start : start + CHUNK_BYTES])
        crc = _add(crc, target)
    return crc


def _add(crc: int, chunk: Tensor) -> int:
    bytes_N: Any = chunk.numpy()
    num_whole = len(bytes_N) // PAGE_BYTES * PAGE_BYTES
    sums = bytes_N[:num_whole].view(np.uint64).reshape(-1, PAGE_BYTES // 8).sum(axis=1)
    crc = zlib.crc32(sums, crc)
    return zlib.crc32(bytes_N[num_whole:], crc)


def _buffer(tensor: Tensor) -> Any:
    array: Any = tensor.numpy()
    return array
