"""Selection of deterministic torch kernels."""

from __future__ import annotations

import os
from typing import Any, cast

import torch


def use_deterministic_kernels(device: torch.device) -> None:
    """Use deterministic GPU kernels in this process. Kernels without a deterministic version raise an error.

    Does nothing on a CPU, whose kernels are always deterministic.
    """
    if device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # (cuBLAS reads it once, at its first use)
        cast(Any, torch).use_deterministic_algorithms(True)
