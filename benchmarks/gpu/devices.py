"""The device of the checks: whether there is one, its memory, its clock, and its peak arithmetic."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

GB = 1e9
PEAKS = {
    "B200": (2250e12, 8.0e12),
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "GH200": (989e12, 4.0e12),
    "A100-SXM4-80GB": (312e12, 2.04e12),
    "A100": (312e12, 1.56e12),
    "L40S": (362e12, 0.864e12),
    "L40": (181e12, 0.864e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
    "A40": (150e12, 0.696e12),
    "RTX 4090": (165e12, 1.008e12),
    "RTX 3090": (71e12, 0.936e12),
}
"""Operations per second of dense bfloat16 products with float32 sums, and bytes per second of the memory, by words of
the device's name, as the vendor states them. More specific names come first."""


def device_of(option: str) -> tuple[torch.device | None, str]:
    """Return the device that an option names, and a description of the machine. None if there is no GPU.

    Args:
        option: `auto` for the GPU, or `cpu`.

    Raises:
        RuntimeError: The machine has a GPU that torch cannot use. The checks would be skipped silently.
    """
    version = f"torch {torch.__version__}"
    if option == "cpu":
        return torch.device("cpu"), f"{version}, CPU: a check of the checks, no verdict on a GPU"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / GB:.0f} GB"
        return torch.device("cuda"), f"{version}, {name}"
    hardware = unused_gpu()
    if hardware:
        raise RuntimeError(
            f"this machine has a GPU ({hardware}), but {version} cannot use it; install a build of torch for its "
            "driver, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    return None, version


def unused_gpu() -> str | None:
    """Return a sign of a GPU that this process does not hide from itself; None without one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    return next((str(path) for path in (Path("/dev/nvidia0"), Path("/dev/kfd")) if path.exists()), None)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def allocated_bytes(device: torch.device) -> float:
    """Return the memory of live tensors on a GPU, or the resident size of this process."""
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" else _status("VmRSS")


def elapsed_s(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds that some work takes on the device."""
    synchronize(device)
    start_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start_s


def peak_flops(device: torch.device) -> float | None:
    """Return the device's operations per second in bfloat16; None if they are not known."""
    return _peaks(device)[0]


def peak_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second of the device's memory; None if they are not known."""
    return _peaks(device)[1]


def _peaks(device: torch.device) -> tuple[float, float] | tuple[None, None]:
    if device.type != "cuda":
        return None, None
    name = torch.cuda.get_device_name(device)
    return next((peaks for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name)), (None, None))


class PeakMemory:
    """Highest memory since its creation, above that at its creation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self._before = allocated_bytes(device)

    @property
    def num_bytes(self) -> float:
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device)) - self._before
        return _status("VmHWM") - self._before


def _status(name: str) -> float:
    """Return a size of this process in bytes, from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
