"""Load of a vLLM server, read from its metrics page."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GAUGE = re.compile(r"^vllm:(kv_cache_usage_perc|num_requests_waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Load after the engine's last step."""

    kv_cache_share: float | None = None
    """Share of the KV cache that running requests hold, of the fullest engine; None if the page does not have it."""
    num_waiting: int = 0
    """Queued requests of all clients."""

    @classmethod
    def read(cls, page: str) -> Gauges:
        """Read a metrics page in the text format of Prometheus."""
        values: dict[str, list[float]] = {"kv_cache_usage_perc": [], "num_requests_waiting": []}
        for name, value in _GAUGE.findall(page):
            values[name].append(float(value))
        return cls(
            kv_cache_share=max(values["kv_cache_usage_perc"], default=None),
            num_waiting=round(sum(values["num_requests_waiting"])),
        )
