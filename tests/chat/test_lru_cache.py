"""Tests of the cache of least recently used values."""

from __future__ import annotations

from agent_loop.chat.lru_cache import LruCache


def test_a_value_is_created_once_and_the_least_recently_used_values_are_dropped() -> None:
    made: list[str] = []
    kept: LruCache[str] = LruCache(2)

    def value(key: str) -> str:
        return kept.get(key, lambda: made.append(key) or key.upper())

    assert [value(key) for key in "abacba"] == ["A", "B", "A", "C", "B", "A"]
    assert made == ["a", "b", "c", "b", "a"]
    assert len(kept) == 2


def test_an_error_is_not_cached() -> None:
    kept: LruCache[float] = LruCache(2)
    for _ in range(2):
        try:
            kept.get("a", lambda: 1 / 0)
        except ZeroDivisionError:
            assert len(kept) == 0
    assert kept.get("a", lambda: 2.0) == 2.0
