"""Plugin of verl: a platform without an accelerator. `VERL_USE_EXTERNAL_MODULES` and `VERL_PLATFORM=cpu` select it."""

from __future__ import annotations

import types
from collections.abc import Generator
from contextlib import contextmanager
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


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = _module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl moves tensors to it

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VISIBLE_CPUS"

    @contextmanager
    def nvtx_range(self, msg: str) -> Generator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"  # the trainer counts no other resource; the test gives one that does not exist to Ray

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
