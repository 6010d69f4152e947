"""Allocation of the KV cache's slots to requests, and the tokens in each slot. No tensors, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agent_loop.types import IntArray

MIN_COPIED_TOKENS = 16
"""Shortest shared prefix that is copied. Computing a shorter one again is cheaper than copying or waiting for it."""


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the KV cache."""

    index: int
    tokens: IntArray
    """Shape [max_model_len]; only the first `num_tokens` are used."""
    num_tokens: int = 0
    num_cached: int = 0
    """Number of tokens whose keys and values are in the cache. The others have to be computed."""
    session: str | None = None
    """Session whose next turn the slot is kept for."""
    is_busy: bool = False
    is_stale: bool = False
    """Whether the keys and values are of older weights, so that other requests cannot use them."""
    admission: int = 0
    """Number of the last request in this slot, counted over all slots."""
    last_used: int = 0
    """Number of the last release of this slot, counted over all slots."""

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token has to be computed."""
        return self.is_busy and self.num_tokens - self.num_cached > 1

    def append(self, token_id: int) -> None:
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def clear(self) -> None:
        """Mark the slot as empty."""
        self.num_tokens = self.num_cached = 0
        self.session = None
        self.is_stale = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Slot for a request, and the cached prefix that the request reuses."""

    slot: Slot
    num_reused: int
    """Number of prompt tokens that need not be computed."""
    copy_from: Slot | None = None
    """Slot to copy the keys and values from `copy_start` to `num_reused` from; None if nothing has to be copied."""
    copy_start: int = 0


@dataclass(frozen=True, slots=True)
class PrefixInPrefill:
    """Prefix that another request is computing. It can be copied once it is in the cache."""

    slot: Slot
    admission: int
    """`Slot.admission` of the request that computes the prefix."""
    num_tokens: int

    @property
    def is_pending(self) -> bool:
        """Whether the prefix is still being computed. False if it is in the cache, or if its request ended before."""
        slot = self.slot
        return slot.is_prefilling and slot.admission == self.admission and slot.num_cached < self.num_tokens


class SlotTable:
    """All slots. The tokens of a finished request stay in its slot until the slot is needed.

    Empty slots are used first, then slots without a session, then the slots of sessions, least recently used first.
    """

    def __init__(self, *, num_slots: int, max_model_len: int) -> None:
        self._tokens = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.slots = tuple(Slot(index=i, tokens=self._tokens[i]) for i in range(num_slots))
        self._of_session: dict[str, Slot] = {}
        self._num_idle = num_slots
        self._admissions = 0
        self._releases = 0

    @property
    def has_idle(self) -> bool:
        return self._num_idle > 0

    def find_placement(self, prompt_ids: IntArray, *, session: str) -> Placement | PrefixInPrefill:
        """Find a slot for a prompt, or a prefix that is worth waiting for. There must be an idle slot."""
        own = self._of_session.get(session)
        if own is not None and own.is_busy:
            own = None
        own_common = 0 if own is None else _common_prefix(own, prompt_ids=prompt_ids)
        if own is not None and own_common == min(own.num_cached, len(prompt_ids) - 1):
            return Placement(slot=own, num_reused=own_common)
        common = self._common_prefixes(prompt_ids)
        useful = [
            slot
            for i in np.flatnonzero(common >= own_common + MIN_COPIED_TOKENS)
            if not (slot := self.slots[i]).is_stale
        ]
        source = max(useful, key=lambda s: min(int(common[s.index]), s.num_cached), default=None)
        available = 0 if source is None else min(int(common[source.index]), source.num_cached)
        for slot in useful:
            if slot.is_prefilling and common[slot.index] >= max(available, own_common) + MIN_COPIED_TOKENS:
                return PrefixInPrefill(slot, admission=slot.admission, num_tokens=int(common[slot.index]))
        target = own or min((s for s in self.slots if not s.is_busy), key=_eviction_order)
        if source is None or available < own_common + MIN_COPIED_TOKENS:
            return Placement(slot=target, num_reused=own_common)
        if source is target:
            return Placement(slot=target, num_reused=available)
        return Placement(slot=target, num_reused=available, copy_from=source, copy_start=own_common)

    def assign(self, placement: Placement, *, prompt_ids: IntArray, session: str) -> Slot:
        """Assign the slot of a placement to a request, and return the slot."""
        slot = placement.slot
        self.end_session(session)
        self._clear(slot)
        self._of_session[session] = slot
        self._admissions += 1
        self._num_idle -= 1
        slot.session, slot.is_busy, slot.admission = session, True, self._admissions
        slot.tokens[: len(prompt_ids)] = prompt_ids
        slot.num_tokens, slot.num_cached = len(prompt_ids), placement.num_reused
        return slot

    def release(self, slot: Slot) -> None:
        """Release a slot. Its tokens are kept for the session's next turn unless they are stale."""
        self._releases += 1
        self._num_idle += 1
        slot.is_busy, slot.last_used = False, self._releases
        slot.num_tokens = slot.num_cached
        if slot.is_stale:
            self._clear(slot)

    def end_session(self, session: str) -> None:
        slot = self._of_session.pop(session, None)
        if slot is not None:
            slot.session = None

    def drop_idle(self) -> None:
        """Clear the idle slots."""
        for slot in self.slots:
            if not slot.is_busy:
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        if slot.session is not None:
            self.end_session(slot.session)
        slot.clear()

    def _common_prefixes(self, prompt_ids: IntArray) -> IntArray:
        """Return the number of leading prompt tokens that each slot has too, without the last one: [num_slots]."""
        num_tokens = len(prompt_ids) - 1
        differs = np.ones((len(self.slots), num_tokens + 1), dtype=np.bool_)
        np.not_equal(self._tokens[:, :num_tokens], prompt_ids[:num_tokens], out=differs[:, :num_tokens])
        lengths = np.array([slot.num_tokens for slot in self.slots])
        return np.minimum(differs.argmax(axis=1), lengths).astype(np.int32)


def _common_prefix(slot: Slot, *, prompt_ids: IntArray) -> int:
    num_tokens = min(slot.num_cached, len(prompt_ids) - 1)
    differs = slot.tokens[:num_tokens] != prompt_ids[:num_tokens]
    return int(differs.argmax()) if differs.any() else num_tokens


def _eviction_order(slot: Slot) -> tuple[bool, bool, int]:
    return (slot.num_cached > 0, slot.session is not None, slot.last_used)
