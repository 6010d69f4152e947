"""What a vLLM server's metrics page says of its load."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GAUGE = re.compile(r"^vllm:(kv_cache_usage_perc|num_requests_waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gauges:
    """As of its last step."""

    kv_cache_share: float | None = None
    """Of the KV cache, what running requests hold: the fullest engine's, where there are several; None if it is not
    told."""
    num_waiting: int = 0
    """Requests of all clients that wait for a place."""

    @classmethod
    def read(cls, page: str) -> Gauges:
        """Args: page: In the text format of Prometheus."""
        values: dict[str, list[float]] = {"kv_cache_usage_perc": [], "num_requests_waiting": []}
        for name, value in _GAUGE.findall(page):
            values[name].append(float(value))
        return cls(
            kv_cache_share=max(values["kv_cache_usage_perc"], default=None),
            num_waiting=round(sum(values["num_requests_waiting"])),
        )
