"""Memory of the calling process, from `/proc`. `ru_maxrss` would start at the peak of the process that started it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(name: str) -> int:
    """Return a figure of the calling process: `VmRSS` (resident now) or `VmHWM` (its peak)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"the kernel reports no {name}")
