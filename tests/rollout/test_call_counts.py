from __future__ import annotations

import json

from tests.rollout.call_counts import STORED, calls_per_trajectory

MARGIN = 1.05


def test_a_trajectory_takes_no_more_calls_than_it_did() -> None:
    stored, now = json.loads(STORED.read_text()), calls_per_trajectory()
    grown = {name: (stored[name], now[name]) for name in stored if now[name] > MARGIN * stored[name]}
    assert not grown, (
        f"calls per trajectory, before and now: {grown}; see what takes them with cProfile, or, if they are worth it, "
        "renew the figures with: python -m tests.rollout.call_counts"
    )
