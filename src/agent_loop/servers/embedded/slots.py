"""Which slot of the KV cache holds which tokens, and where a new request goes. No tensors, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agent_loop.types import IntArray

MIN_COPIED_TOKENS = 16
"""A shared prefix shorter than this is computed again: that is cheaper than copying or waiting for it."""


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the KV cache."""

    index: int
    tokens: IntArray
    """Shape [max_model_len]; the first `num_tokens` count."""
    num_tokens: int = 0
    num_cached: int = 0
    """Tokens whose keys and values are in the cache; the rest is still to compute."""
    session: str | None = None
    """The session whose next turn it is kept for."""
    is_busy: bool = False
    is_stale: bool = False
    """Holds keys and values of older weights: of no use to other requests."""
    admission: int = 0
    """The number of the last request placed here, counted over all slots."""
    last_used: int = 0
    """Grows with each release, counted over all slots."""

    @property
    def is_prefilling(self) -> bool:
        """More than the newest token is still to compute."""
        return self.is_busy and self.num_tokens - self.num_cached > 1

    def append(self, token_id: int) -> None:
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def clear(self) -> None:
        """Forgets what is cached."""
        self.num_tokens = self.num_cached = 0
        self.session = None
        self.is_stale = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes and what it finds there."""

    slot: Slot
    num_reused: int
    """Tokens of the prompt that need not be computed."""
    copy_from: Slot | None = None
    """Where the keys and values from `copy_start` to `num_reused` are to be copied from, if they are not there."""
    copy_start: int = 0


@dataclass(frozen=True, slots=True)
class PrefixInPrefill:
    """A prefix that another request is computing: once it is there, it can be copied."""

    slot: Slot
    admission: int
    """The request that computes it, as `Slot.admission` numbers it."""
    num_tokens: int

    @property
    def is_coming(self) -> bool:
        """Still being computed; False once it is there, and if its request ended before."""
        slot = self.slot
        return slot.is_prefilling and slot.admission == self.admission and slot.num_cached < self.num_tokens


class SlotTable:
    """All slots. A finished request leaves its tokens in place until the slot is needed: empty slots go first,
    then those that no session owns, then those of sessions, longest unused first."""

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

    def place(self, prompt_ids: IntArray, *, session: str) -> Placement | PrefixInPrefill:
        """Finds a slot for a prompt, or a prefix that is worth waiting for. Needs an idle slot."""
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

    def occupy(self, placement: Placement, *, prompt_ids: IntArray, session: str) -> Slot:
        """Gives the slot to a request."""
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
        """Takes the slot back; its tokens stay for the session's next turn unless they are stale."""
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

    def forget_idle(self) -> None:
        """Drops what idle slots hold."""
        for slot in self.slots:
            if not slot.is_busy:
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        if slot.session is not None:
            self.end_session(slot.session)
        slot.clear()

    def _common_prefixes(self, prompt_ids: IntArray) -> IntArray:
        """For each slot, how many leading tokens it shares with the prompt, the last one left out: [num_slots]."""
        num_tokens = len(prompt_ids) - 1
        differs = np.ones((len(self.slots), num_tokens + 1), dtype=np.bool_)
        np.not_equal(self._tokens[:, :num_tokens], prompt_ids[:num_tokens], out=differs[:, :num_tokens])
        held = np.array([slot.num_tokens for slot in self.slots])
        return np.minimum(differs.argmax(axis=1), held).astype(np.int32)


def _common_prefix(slot: Slot, *, prompt_ids: IntArray) -> int:
    num_tokens = min(slot.num_cached, len(prompt_ids) - 1)
    differs = slot.tokens[:num_tokens] != prompt_ids[:num_tokens]
    return int(differs.argmax()) if differs.any() else num_tokens


def _eviction_order(slot: Slot) -> tuple[bool, bool, int]:
    return (slot.num_cached > 0, slot.session is not None, slot.last_used)
