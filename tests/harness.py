"""Number of cases that a test runs by default and nightly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(number: int, **options: Any) -> settings:
    """Return Hypothesis settings that try `number` examples nightly and a fifth of them by default.

    `--hypothesis-profile=full` selects the nightly number; `tests/conftest.py` defines the profiles.
    """
    percent: int = settings().max_examples
    return settings(max_examples=max(3, number * percent // 100), deadline=None, **options)


def sweep(cases: Iterable[Any], *, default: int) -> list[Any]:
    """Return `cases` as parameters of a test: `default` of them, evenly spaced, always run, and the others nightly."""
    cases = list(cases)
    chosen = {position * len(cases) // default for position in range(default)}
    return [case if position in chosen else nightly(case) for position, case in enumerate(cases)]


def nightly(case: Any) -> Any:
    """Return `case` as a parameter that only `make nightly` runs."""
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.nightly])
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.nightly)
