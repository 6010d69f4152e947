"""Plugin of verl: a platform without an accelerator. `VERL_USE_EXTERNAL_MODULES` and `VERL_PLATFORM=cpu` select it."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _module() -> types.ModuleType:
    """Return what verl calls in place of `torch.cuda`."""
    module = types.ModuleType("no_accelerator")
    actions = ["empty_cache", "synchronize", "set_device", "manual_seed", "reset_peak_memory_stats"]
    sizes = ["max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"]
    vars(module).update(
        dict.fromkeys([*actions, *sizes], _zero),
        is_available=lambda: False,
        get_device_name=lambda: "CPU",
        mem_get_info=lambda *_: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


def _returning(value: Any) -> Any:
    """Return a method that returns a value."""
    return lambda self, *args, **kwargs: value


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = _module()

    is_available = _returning(True)
    current_device = _returning("cpu")  # verl moves tensors to it
    device_count = _returning(1)
    get_device_capability = _returning((None, None))
    communication_backend_name = _returning("gloo")
    visible_devices_envvar = _returning("VISIBLE_CPUS")
    ray_resource_name = _returning(
        "GPU"
    )  # the trainer counts no other; the test gives Ray one that does not exist
    ray_noset_envvars = _returning([])
    is_ipc_supported = _returning(False)
    nvtx_range = _returning(nullcontext())
    set_device = synchronize = set_allocator_settings = empty_cache = _returning(None)
    profiler_start = profiler_stop = cudart = _returning(None)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
