"""Which kernels torch chooses."""

from __future__ import annotations

import os
from typing import Any, cast

import torch


def use_deterministic_kernels(device: torch.device) -> None:
    """Let this process's GPU compute the same sums in the same order each time; kernels that cannot raise an error.

    Does nothing on a CPU, whose kernels always do.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # (cuBLAS reads it at its first product)
        cast(Any, torch).use_deterministic_algorithms(True)
