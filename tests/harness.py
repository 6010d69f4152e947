"""Number of examples that a test tries by default and nightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings


def is_nightly() -> bool:
    """Return whether every case runs: with `--hypothesis-profile=full`, which `make nightly` passes."""
    return settings.get_current_profile_name() == "full"


def examples(number: int, **options: Any) -> settings:
    """Return Hypothesis settings that try `number` examples nightly and a fifth of them by default."""
    return settings(max_examples=number if is_nightly() else max(3, number // 5), deadline=None, **options)


def thinned(cases: Sequence[Any], *, step: int) -> Sequence[Any]:
    """Return all `cases` nightly, and every `step`-th of them by default."""
    return cases if is_nightly() else cases[::step]
