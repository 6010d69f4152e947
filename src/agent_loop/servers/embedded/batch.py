"""Batch of one step: the tokens that the model computes, and how attention groups them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.servers.embedded.attention import KVCache, PrefillChunk, Reads, SlotAttention, SlotGroup
from agent_loop.servers.embedded.slots import Slot
from agent_loop.servers.embedded.vision import ImageRows, PromptImages

SHORTEST_BUCKET = 256
"""Sequences up to this length are computed together. Longer ones are grouped by similar length."""
NO_IMAGES: Mapping[int, PromptImages] = {}
SHORT_CHUNK = 64
"""Largest number of new tokens in a chunk that is computed together with others. The sequence may have up to
`SHORTEST_BUCKET` tokens."""
GATHER_COST, LONG_GATHER_COST = 1.5, 5.0
"""Factors by which attention is slower if slots are read by index, because they are copied first (measured on a
CPU)."""
LONG_GATHER_BYTES = 32 * 2**20
"""Size from which `LONG_GATHER_COST` applies, because glibc then allocates fresh memory for each copy."""


class Chunk(NamedTuple):
    """New tokens of one slot."""

    slot: Slot
    num_new: int
    """Number of the slot's tokens that the step computes."""

    @property
    def end(self) -> int:
        """Length of the sequence, including the chunk."""
        return self.slot.num_cached + self.num_new

    @property
    def is_short(self) -> bool:
        return self.num_new <= SHORT_CHUNK and self.end <= SHORTEST_BUCKET


_Group: TypeAlias = list[Chunk]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of one step, packed in one row, decoding rows first."""

    token_ids: Tensor
    """Shape [1, tokens]."""
    position_ids: Tensor
    """Shape [1, tokens], or [3, 1, tokens] if a slot has three-dimensional positions."""
    attention: SlotAttention
    sampled_slots: tuple[Slot, ...]
    """Slots whose next token is sampled after this step, in the order of their logits."""
    logit_rows: Tensor | None
    """Rows whose logits are needed, [sampled_slots]; None for all."""
    chunks: tuple[Chunk, ...]
    """Number of tokens that the step adds to the cache of each slot, in the order of the rows."""
    image_rows: tuple[ImageRows, ...] = ()


def pack_step(
    busy: Sequence[Slot],
    *,
    cache: KVCache,
    chunk_tokens: int,
    images: Mapping[int, PromptImages] = NO_IMAGES,
) -> StepBatch:
    """Pack all decoding slots, then chunks of prefilling slots in the given order, of `chunk_tokens` tokens at most."""
    token_bytes = cache.keys[0][0, :, 0].nbytes
    decoding = [Chunk(slot, 1) for slot in busy if slot.num_tokens - slot.num_cached == 1]
    prefilling = _cut_chunks((slot for slot in busy if slot.is_prefilling), budget=chunk_tokens)
    long = [chunk for chunk in prefilling if not chunk.is_short]
    short = _grouped((chunk for chunk in prefilling if chunk.is_short), key=_count_class)
    groups = _decode_groups(decoding, token_bytes=token_bytes) + short
    chunks = [chunk for group in (*groups, long) for chunk in group]
    counts = np.array([chunk.num_new for chunk in chunks])
    ends = np.cumsum(counts)
    slot_ids = np.repeat([chunk.slot.index for chunk in chunks], counts)
    # The position of a token is its row in the step, shifted by the number of tokens that its slot has cached.
    shifts = np.array([chunk.slot.num_cached for chunk in chunks]) - (ends - counts)
    positions: NDArray[np.int64] = np.arange(int(ends[-1])) + np.repeat(shifts, counts)
    token_ids = np.concatenate([chunk.slot.tokens[chunk.slot.num_cached : chunk.end] for chunk in chunks])
    device = cache.keys[0].device
    is_sampled = [chunk.end == chunk.slot.num_tokens for chunk in chunks]
    logit_rows = ends[is_sampled] - 1
    num_long = sum(chunk.num_new for chunk in long)
    attention = SlotAttention(
        cache=cache,
        max_model_len=cache.max_model_len,
        cache_rows={
            heads: _to(device, _cache_rows(slot_ids, positions, heads, max_model_len=cache.max_model_len))
            for heads in cache.kv_head_counts
        },
        reads={
            window: Reads(
                groups=tuple(_slot_groups(groups, cache=cache, token_bytes=token_bytes, window=window)),
                chunks=tuple(_prefill_chunks(long, row=int(ends[-1]) - num_long, cache=cache, window=window)),
            )
            for window in cache.windows
        },
    )
    return StepBatch(
        token_ids=_to(device, token_ids.astype(np.int64)).unsqueeze(0),
        position_ids=_to(device, _model_positions(positions, chunks, images)).unsqueeze(-2),
        attention=attention,
        sampled_slots=tuple(chunk.slot for chunk, s in zip(chunks, is_sampled, strict=True) if s),
        logit_rows=None if len(logit_rows) == len(token_ids) else _to(device, logit_rows),
        chunks=tuple(chunks),
        image_rows=_image_rows(chunks, images) if images else (),
    )


def _model_positions(
    positions: NDArray[np.int64], chunks: Sequence[Chunk], images: Mapping[int, PromptImages]
) -> NDArray[np.int64]:
    """Return the model's position ids: [tokens], or [3, tokens] if images have three-dimensional positions."""
    if not any(prompt.positions is not None for prompt in images.values()):
        return positions
    model_positions = np.tile(positions, (3, 1))
    row = 0
    for chunk in chunks:
        if chunk.slot.index in images:
            between = images[chunk.slot.index].positions_between(chunk.slot.num_cached, chunk.end)
            model_positions[:, row : row + chunk.num_new] = between
        row += chunk.num_new
    return model_positions


def _image_rows(chunks: Sequence[Chunk], images: Mapping[int, PromptImages]) -> tuple[ImageRows, ...]:
    found: list[ImageRows] = []
    row = 0
    for chunk in chunks:
        if chunk.slot.index in images:
            found += images[chunk.slot.index].rows_between(chunk.slot.num_cached, chunk.end, first_row=row)
        row += chunk.num_new
    return tuple(found)


def _cut_chunks(prefilling: Iterable[Slot], *, budget: int) -> _Group:
    chunks: _Group = []
    for slot in prefilling:
        if budget <= 0:
            break
        count = min(slot.num_tokens - slot.num_cached, budget)
        chunks.append(Chunk(slot, count))
        budget -= count
    return chunks


def _decode_groups(decoding: _Group, *, token_bytes: int) -> list[_Group]:
    """Group all rows in one call, or in one call for each class of similar lengths, whichever reads less."""
    if not decoding:
        return []
    [together] = _grouped(decoding, key=lambda chunk: 0)
    if max(chunk.end for chunk in decoding) <= SHORTEST_BUCKET:
        return [together]
    separate = _grouped(together, key=_length_class)
    cost = sum(_read_cost(group, token_bytes=token_bytes).cost for group in separate)
    return [together] if _read_cost(together, token_bytes=token_bytes).cost <= cost else separate


def _grouped(chunks: Iterable[Chunk], *, key: Callable[[Chunk], int]) -> list[_Group]:
    """Return groups of chunks with the same key, each in the order of their slots."""
    ordered = sorted(chunks, key=lambda chunk: (key(chunk), chunk.slot.index))
    return [list(group) for _, group in groupby(ordered, key=key)]


def _length_class(chunk: Chunk) -> int:
    return max(chunk.end, SHORTEST_BUCKET).bit_length()


def _count_class(chunk: Chunk) -> int:
    return max(7, chunk.num_new - 1).bit_length()


class _ReadCost(NamedTuple):
    cost: float
    """Estimated cost of a group, in tokens read in place."""
    is_range: bool
    """Whether all slots from the first to the last are read in place, instead of only the group's by index."""


def _read_cost(group: _Group, *, token_bytes: int) -> _ReadCost:
    indices, length = [chunk.slot.index for chunk in group], max(chunk.end for chunk in group)
    is_long = length * len(group) * token_bytes >= LONG_GATHER_BYTES
    as_range = length * (max(indices) - min(indices) + 1)
    by_index = length * len(group) * (LONG_GATHER_COST if is_long else GATHER_COST)
    return _ReadCost(min(as_range, by_index), as_range <= by_index)


def _slot_groups(
    groups: Iterable[_Group], *, cache: KVCache, token_bytes: int, window: int | None
) -> Iterable[SlotGroup]:
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    row = 0
    for group in groups:
        counts = np.array([chunk.num_new for chunk in group])
        starts = np.array([chunk.slot.num_cached for chunk in group])
        slots = np.array([chunk.slot.index for chunk in group])
        first_rows = row + np.cumsum(counts) - counts
        # In place, the slots between those of the group are computed too, with rows that are dropped.
        is_range = counts.max() == 1 and _read_cost(group, token_bytes=token_bytes).is_range
        places = slots - slots[0] if is_range else np.arange(len(group))
        num_slots, length = int(places[-1]) + 1, int((starts + counts).max())
        steps = np.minimum(
            np.arange(int(counts.max())), counts[:, None] - 1
        )  # repeats the chunk's last token
        rows = np.full((num_slots, steps.shape[1]), row)
        rows[places] = first_rows[:, None] + steps
        is_kept = np.zeros(rows.shape, np.bool_)
        is_kept[places] = np.arange(steps.shape[1]) < counts[:, None]
        last_seen = np.full(rows.shape, length - 1)
        last_seen[places] = starts[:, None] + steps
        first_seen = np.maximum(last_seen - (window or length) + 1, 0)
        start, mask = int(first_seen.min()), None
        if last_seen.min() < length - 1 or first_seen.max() > start:
            positions = np.arange(start, length)
            is_hidden = (positions > last_seen[:, :, None]) | (positions < first_seen[:, :, None])
            mask = _additive(_to(device, is_hidden), dtype=dtype).unsqueeze(1)
        yield SlotGroup(
            rows=_to(device, rows.ravel()),
            kept=None if is_kept.all() else _to(device, np.flatnonzero(is_kept)),
            slots=slice(int(slots[0]), int(slots[0]) + num_slots) if is_range else _to(device, slots),
            positions=slice(start, length),
            mask=mask,
        )
        row += int(counts.sum())


def _prefill_chunks(
    chunks: Iterable[Chunk], *, row: int, cache: KVCache, window: int | None
) -> Iterable[PrefillChunk]:
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    for chunk in chunks:
        last_seen = torch.arange(chunk.slot.num_cached, chunk.end, device=device)[:, None]
        first_seen = last_seen - (window or chunk.end) + 1
        start, mask = max(0, int(first_seen[0])), None
        if chunk.slot.num_cached or first_seen[-1] > 0:
            positions = torch.arange(start, chunk.end, device=device)
            mask = _additive((positions > last_seen) | (positions < first_seen), dtype=dtype)
        yield PrefillChunk(
            row_start=row,
            row_end=row + chunk.num_new,
            slot=chunk.slot.index,
            positions=slice(start, chunk.end),
            mask=mask,
        )
        row += chunk.num_new


def _cache_rows(
    slot_ids: NDArray[np.int64], positions: NDArray[np.int64], num_heads: int, *, max_model_len: int
) -> NDArray[np.int64]:
    heads = np.arange(num_heads)
    return ((slot_ids[:, None] * num_heads + heads) * max_model_len + positions[:, None]).ravel()


def _additive(is_hidden: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(
        is_hidden, float("-inf")
    )


def _to(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    return cast(Any, torch).from_numpy(array).to(device)
