"""Batch of one step: the tokens that the model computes, and how attention groups them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.servers.embedded.attention import DecodeGroup, PrefillChunk, PrefillGroup, SlotAttention
from agent_loop.servers.embedded.cache import KVCache
from agent_loop.servers.embedded.slots import Slot
from agent_loop.servers.embedded.vision import ImageRows, PromptImages

SHORTEST_BUCKET = 256
"""Decoding rows up to this length are computed together. Longer rows are grouped by similar length."""
NO_IMAGES: Mapping[int, PromptImages] = {}
SHORTEST_CHUNK = 7
SHORT_CHUNK = 64
"""Largest number of new tokens in a chunk that is computed together with others. The sequence may have up to
`SHORTEST_BUCKET` tokens."""
GATHER_COST, LONG_GATHER_COST = 1.5, 5.0
"""Factors by which attention is slower if slots are read by index, because they are copied first (measured on a
CPU)."""
LONG_GATHER_BYTES = 32 * 2**20
"""Size from which `LONG_GATHER_COST` applies, because glibc then allocates fresh memory for each copy."""

Chunk: TypeAlias = tuple[Slot, int]
"""A slot, and the number of its tokens that the step computes."""


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
    advances: tuple[tuple[Slot, int], ...]
    """Number of tokens that the step adds to the cache of each slot."""
    image_rows: tuple[ImageRows, ...] = ()


class _GroupPlan(NamedTuple):
    slots: list[Slot]
    """Slots in ascending order of index."""
    length: int
    """Length of the longest row."""
    span: int
    """Number of slots from the first index to the last."""
    is_range: bool
    """Whether all slots of the span are read in place, instead of only `slots` by index."""
    cost: float
    """Estimated cost, in tokens read in place."""


def pack_step(
    busy: Sequence[Slot],
    *,
    cache: KVCache,
    chunk_tokens: int,
    images: Mapping[int, PromptImages] = NO_IMAGES,
) -> StepBatch:
    """Pack all decoding slots, then chunks of the prefilling slots in the given order until `chunk_tokens` is reached.

    Args:
        busy: Slots of the running requests.
        cache: KV cache of all slots.
        chunk_tokens: Largest number of prompt tokens in the step.
        images: Images of the prompts that have some, by index of the slot.
    """
    decoding = [slot for slot in busy if slot.num_tokens - slot.num_cached == 1]
    plans = _plan_groups(decoding, cache=cache)
    rows = [slot for plan in plans for slot in plan.slots]
    short, long = _split_by_length(
        _cut_chunks((slot for slot in busy if slot.is_prefilling), budget=chunk_tokens)
    )
    chunks = [chunk for group in (*short, long) for chunk in group]
    advances = [(slot, 1) for slot in rows] + chunks
    counts = np.array([count for _, count in advances])
    ends = np.cumsum(counts)
    slot_ids = np.repeat([slot.index for slot, _ in advances], counts)
    # The position of a token is its row in the step, shifted by the number of tokens that its slot has cached.
    shifts = np.array([slot.num_cached for slot, _ in advances]) - (ends - counts)
    positions: NDArray[np.int64] = np.arange(int(ends[-1])) + np.repeat(shifts, counts)
    token_ids = np.concatenate([s.tokens[s.num_cached : s.num_cached + count] for s, count in advances])
    device = cache.keys[0].device
    is_sampled = [slot.num_cached + count == slot.num_tokens for slot, count in advances]
    logit_rows = ends[is_sampled] - 1
    attention = SlotAttention(
        cache=cache,
        max_model_len=cache.max_model_len,
        cache_rows={
            heads: _to(
                device,
                array=_cache_rows(
                    slot_ids, positions=positions, num_heads=heads, max_model_len=cache.max_model_len
                ),
            )
            for heads in cache.kv_head_counts
        },
        groups=tuple(_decode_groups(plans, cache=cache)),
        chunks=(
            *_prefill_groups(short, first_row=len(rows), cache=cache),
            *_prefill_chunks(long, end_row=int(ends[-1]), cache=cache),
        ),
    )
    return StepBatch(
        token_ids=_to(device, array=token_ids.astype(np.int64)).unsqueeze(0),
        position_ids=_to(device, array=_model_positions(positions, advances, images)).unsqueeze(-2),
        attention=attention,
        sampled_slots=tuple(slot for (slot, _), sampled in zip(advances, is_sampled, strict=True) if sampled),
        logit_rows=None if len(logit_rows) == len(token_ids) else _to(device, array=logit_rows),
        advances=tuple(advances),
        image_rows=_image_rows(advances, images) if images else (),
    )


def _model_positions(
    positions: NDArray[np.int64], advances: Sequence[tuple[Slot, int]], images: Mapping[int, PromptImages]
) -> NDArray[np.int64]:
    """Return the model's position ids: [tokens], or [3, tokens] if images have three-dimensional positions."""
    if not any(prompt.positions is not None for prompt in images.values()):
        return positions
    model_positions = np.tile(positions, (3, 1))
    row = 0
    for slot, count in advances:
        if slot.index in images:
            between = images[slot.index].positions_between(slot.num_cached, slot.num_cached + count)
            model_positions[:, row : row + count] = between
        row += count
    return model_positions


def _image_rows(
    advances: Sequence[tuple[Slot, int]], images: Mapping[int, PromptImages]
) -> tuple[ImageRows, ...]:
    found: list[ImageRows] = []
    row = 0
    for slot, count in advances:
        if slot.index in images:
            start, end = slot.num_cached, slot.num_cached + count
            found += images[slot.index].rows_between(start, end, first_row=row)
        row += count
    return tuple(found)


def _cut_chunks(prefilling: Iterable[Slot], *, budget: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    for slot in prefilling:
        if budget <= 0:
            break
        count = min(slot.num_tokens - slot.num_cached, budget)
        chunks.append((slot, count))
        budget -= count
    return chunks


def _plan_groups(decoding: Iterable[Slot], *, cache: KVCache) -> list[_GroupPlan]:
    """Group all rows in one call, or in one call for each class of similar lengths, whichever reads less."""
    slots = sorted(decoding, key=attrgetter("index"))
    if not slots:
        return []
    token_bytes = cache.keys[0][0, :, 0].nbytes
    together = _plan(slots, token_bytes=token_bytes)
    if together.length <= SHORTEST_BUCKET:
        return [together]
    by_length = groupby(sorted(slots, key=_length_class), key=_length_class)
    separate = [_plan(list(group), token_bytes=token_bytes) for _, group in by_length]
    return [together] if together.cost <= sum(plan.cost for plan in separate) else separate


def _plan(slots: list[Slot], *, token_bytes: int) -> _GroupPlan:
    """Plan one call for the slots."""
    span = slots[-1].index - slots[0].index + 1
    length = max([slot.num_tokens for slot in slots])
    num_tokens = length * len(slots)
    is_long = num_tokens * token_bytes >= LONG_GATHER_BYTES
    as_range, by_index = length * span, num_tokens * (LONG_GATHER_COST if is_long else GATHER_COST)
    return _GroupPlan(slots, length, span, is_range=as_range <= by_index, cost=min(as_range, by_index))


def _length_class(slot: Slot) -> int:
    return max(slot.num_tokens, SHORTEST_BUCKET).bit_length()


def _decode_groups(plans: Iterable[_GroupPlan], *, cache: KVCache) -> Iterable[DecodeGroup]:
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    row = 0
    for plan in plans:
        first, count = plan.slots[0].index, len(plan.slots)
        offsets = np.array([slot.index for slot in plan.slots]) - first
        is_spread = plan.is_range and plan.span > count
        lengths = np.full(plan.span if plan.is_range else count, plan.length)
        lengths[offsets if plan.is_range else np.arange(count)] = [slot.num_tokens for slot in plan.slots]
        mask = None
        if lengths.min() < plan.length:
            is_past_end = np.arange(plan.length) >= lengths[:, None]
            mask = _additive(_to(device, array=is_past_end), dtype=dtype)[:, None, None]
        yield DecodeGroup(
            row_start=row,
            row_end=row + count,
            slots=slice(first, first + plan.span) if plan.is_range else _to(device, array=offsets + first),
            length=plan.length,
            mask=mask,
            positions_in_range=_to(device, array=offsets) if is_spread else None,
        )
        row += count


def _split_by_length(chunks: Sequence[Chunk]) -> tuple[list[list[Chunk]], list[Chunk]]:
    """Return groups of short chunks of similar length, and the other chunks."""

    def is_short(chunk: Chunk) -> bool:
        slot, count = chunk
        return count <= SHORT_CHUNK and slot.num_cached + count <= SHORTEST_BUCKET

    def length_class(chunk: Chunk) -> int:
        return max(SHORTEST_CHUNK, chunk[1] - 1).bit_length()

    short = sorted(filter(is_short, chunks), key=length_class)
    groups = [list(group) for _, group in groupby(short, key=length_class)]
    return groups, [chunk for chunk in chunks if not is_short(chunk)]


def _prefill_groups(
    groups: Iterable[Sequence[Chunk]], *, first_row: int, cache: KVCache
) -> Iterable[PrefillGroup]:
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    row = first_row
    for chunks in groups:
        counts, starts = (
            np.array(numbers) for numbers in zip(*((n, s.num_cached) for s, n in chunks), strict=True)
        )
        length, steps = int((starts + counts).max()), np.arange(int(counts.max()))
        is_kept = steps < counts[:, None]
        indices = np.minimum(steps, counts[:, None] - 1)  # padding repeats the chunk's last token
        first_rows = row + np.cumsum(counts) - counts
        is_future = np.arange(length) > (starts[:, None] + indices)[:, :, None]
        yield PrefillGroup(
            rows=_to(device, array=(first_rows[:, None] + indices).ravel()),
            kept=_to(device, array=np.flatnonzero(is_kept)),
            slots=_to(device, array=np.array([slot.index for slot, _ in chunks])),
            length=length,
            mask=_additive(_to(device, array=is_future), dtype=dtype).unsqueeze(1),
        )
        row += int(counts.sum())


def _prefill_chunks(chunks: Sequence[Chunk], *, end_row: int, cache: KVCache) -> Iterable[PrefillChunk]:
    device, dtype = cache.keys[0].device, cache.keys[0].dtype
    row = end_row - sum(count for _, count in chunks)
    for slot, count in chunks:
        length, mask = slot.num_cached + count, None
        if slot.num_cached:
            is_future = torch.ones((count, length), dtype=torch.bool, device=device).triu(slot.num_cached + 1)
            mask = _additive(is_future, dtype=dtype)
        yield PrefillChunk(row_start=row, row_end=row + count, slot=slot.index, length=length, mask=mask)
        row += count


def _cache_rows(
    slot_ids: NDArray[np.int64], *, positions: NDArray[np.int64], num_heads: int, max_model_len: int
) -> NDArray[np.int64]:
    heads = np.arange(num_heads)
    return ((slot_ids[:, None] * num_heads + heads) * max_model_len + positions[:, None]).ravel()


def _additive(is_hidden: Tensor, *, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(
        is_hidden, float("-inf")
    )


def _to(device: torch.device, *, array: NDArray[np.generic]) -> Tensor:
    return cast(Any, torch).from_numpy(array).to(device)
