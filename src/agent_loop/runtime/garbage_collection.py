"""Python's collector of cycles, in a process that runs trajectories: these leave hardly anything in cycles."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

OBJECTS_PER_COLLECTION = 200_000
"""Python's own choice is 700."""

_lock = threading.Lock()
_num_open = 0
_before = gc.get_threshold()


@contextmanager
def infrequent_collections() -> Generator[None]:
    """Has the collector look less often meanwhile, which takes a twentieth of a rollout's time otherwise, and as much
    again for each full collection. May be open more than once at a time, in any thread; a collector that somebody
    slowed down more is left as it is."""
    global _num_open, _before
    with _lock:
        _num_open += 1
        if _num_open == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < OBJECTS_PER_COLLECTION:
                gc.set_threshold(OBJECTS_PER_COLLECTION, *_before[1:])
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open:
                gc.set_threshold(*_before)


def freeze_objects() -> None:
    """Has the collector leave alone whatever is there by now, once all is loaded: a full collection would walk through
    it, libraries included, and hold every trajectory up meanwhile (0.3 s with `torch` and `transformers`)."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_objects() -> Generator[None]:
    """The same while the body lasts."""
    freeze_objects()
    try:
        yield
    finally:
        gc.unfreeze()
