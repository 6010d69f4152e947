"""Tests of the parts of the embedded engine: slots, packing of a step, and attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.servers.embedded.attention import KVCache, LayerShape
from agent_loop.servers.embedded.batch import pack_step
from agent_loop.servers.embedded.slots import Placement, PrefixInPrefill, Slot, SlotTable
from agent_loop.types import IntArray
from tests.harness import examples

NUM_SLOTS, MAX_LEN, KV_HEADS, HEADS, DIM = 12, 1100, 2, 4, 8
SHAPE = LayerShape(KV_HEADS, DIM, DIM, torch.float32, torch.device("cpu"))


def busy_slot(index: int, *, num_cached: int, num_new: int) -> Slot:
    tokens = np.arange(MAX_LEN, dtype=np.int32) % 97
    return Slot(
        index=index, tokens=tokens, num_tokens=num_cached + num_new, num_cached=num_cached, is_busy=True
    )


@st.composite
def busy_slots(draw: st.DrawFn) -> list[Slot]:
    """Draw slots in any order and of any length, in decode or in prefill."""
    indices = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True))
    lengths = st.one_of(st.integers(0, 30), st.integers(0, MAX_LEN - 60))
    return [
        busy_slot(index, num_cached=draw(lengths), num_new=draw(st.sampled_from([1, 1, 1, 2, 50])))
        for index in indices
    ]


@examples(40)
@given(
    slots=busy_slots(),
    chunk_tokens=st.sampled_from([1, 33, 1000]),
    window=st.sampled_from([None, 1, 20, 300]),
)
def test_attention_over_any_mix_of_slots_equals_plain_attention_of_each_slot(
    slots: list[Slot], chunk_tokens: int, window: int | None
) -> None:
    cache = KVCache([replace(SHAPE, window=window)], num_slots=NUM_SLOTS, max_model_len=MAX_LEN)
    torch.manual_seed(0)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    batch = pack_step(slots, cache=cache, chunk_tokens=chunk_tokens)
    num_tokens = batch.token_ids.shape[1]
    query = torch.randn(1, HEADS, num_tokens, DIM)
    key, value = torch.randn(2, 1, KV_HEADS, num_tokens, DIM)
    got = batch.attention.attend(0, query=query, key=key, value=value, scaling=None, window=window)
    assert got.shape == (1, num_tokens, HEADS, DIM)
    row = 0
    for slot, count in batch.chunks:
        end = slot.num_cached + count
        positions = torch.arange(slot.num_cached, end)
        assert batch.position_ids[0, row : row + count].tolist() == positions.tolist()
        assert batch.token_ids[0, row : row + count].tolist() == slot.tokens[slot.num_cached : end].tolist()
        assert torch.equal(cache.keys[0][slot.index, :, slot.num_cached : end], key[0, :, row : row + count])
        distance = positions[:, None] - torch.arange(end)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[0, :, row : row + count],
            cache.keys[0][slot.index, :, :end].repeat_interleave(HEADS // KV_HEADS, 0),
            cache.values[0][slot.index, :, :end].repeat_interleave(HEADS // KV_HEADS, 0),
            attn_mask=(distance >= 0) & (distance < (window or end)),
        )
        torch.testing.assert_close(got[0, row : row + count].transpose(0, 1), expected, atol=1e-5, rtol=1e-4)
        row += count
    assert row == num_tokens


@examples(40)
@given(slots=busy_slots(), chunk_tokens=st.sampled_from([1, 33, 1000]))
def test_a_step_has_all_decoding_rows_and_at_most_chunk_tokens_of_prefill(
    slots: list[Slot], chunk_tokens: int
) -> None:
    cache = KVCache([SHAPE], num_slots=NUM_SLOTS, max_model_len=MAX_LEN)
    batch = pack_step(slots, cache=cache, chunk_tokens=chunk_tokens)
    decoding = [slot for slot in slots if slot.num_tokens - slot.num_cached == 1]
    in_step = [slot for slot, _ in batch.chunks]
    assert {id(slot) for slot in decoding} <= {id(slot) for slot in in_step}
    assert sum(count for slot, count in batch.chunks if slot not in decoding) <= chunk_tokens
    complete = [slot for slot, count in batch.chunks if slot.num_cached + count == slot.num_tokens]
    assert list(batch.sampled_slots) == complete


def test_short_chunks_of_similar_length_are_computed_in_one_call() -> None:
    cache = KVCache([SHAPE], num_slots=NUM_SLOTS, max_model_len=MAX_LEN)
    lengths = [(20, 5), (300, 5), (0, 17), (30, 6), (0, 18), (41, 5), (0, 500)]
    slots = [busy_slot(index, num_cached=old, num_new=new) for index, (old, new) in enumerate(lengths)]

    batch = pack_step(slots, cache=cache, chunk_tokens=1000)

    assert [slot.index for slot, _ in batch.chunks] == [0, 3, 5, 2, 4, 1, 6]
    reads = batch.attention.reads[None]
    assert [group.slots.tolist() for group in reads.groups] == [[0, 3, 5], [2, 4]]  # pyright: ignore
    assert [chunk.slot for chunk in reads.chunks] == [1, 6]


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, IntArray, int, bool]]:
    """Draw turns: session, prompt, number of sampled tokens, and whether the next turn starts before this one ends."""
    stems = [np.full(40, stem, dtype=np.int32) for stem in range(3)]
    turns: list[tuple[str, IntArray, int, bool]] = []
    for _ in range(draw(st.integers(1, 25))):
        stem = stems[draw(st.integers(0, 2))][: draw(st.integers(1, 40))]
        tail = draw(st.lists(st.integers(0, 4), min_size=1, max_size=20))
        prompt = np.concatenate([stem, np.array(tail, dtype=np.int32)])
        turns.append((draw(st.sampled_from("abcdef")), prompt, draw(st.integers(1, 5)), draw(st.booleans())))
    return turns


@given(turns=conversations())
def test_the_tokens_that_a_slot_lists_are_the_tokens_that_were_written_to_it(
    turns: list[tuple[str, IntArray, int, bool]],
) -> None:
    table = SlotTable(num_slots=3, max_model_len=80)
    written: dict[int, list[int]] = {slot.index: [] for slot in table.slots}
    running: dict[str, Slot] = {}
    for session, prompt, num_sampled, overlaps in turns:
        if session in running or not table.has_idle:
            for slot in running.values():
                table.release(slot)
            running.clear()
        placement = table.find_placement(prompt, session=session)
        assert isinstance(placement, Placement), "no slot is in prefill between these turns"
        index, reused = placement.slot.index, placement.num_reused
        assert reused < len(prompt)
        assert not placement.slot.is_busy
        prefix = written[index][:reused]
        if placement.copy_from is not None:
            source = written[placement.copy_from.index]
            prefix[placement.copy_start :] = source[placement.copy_start : reused]
        assert prefix == prompt[:reused].tolist()
        slot = table.assign(placement, prompt_ids=prompt, session=session)
        sampled = [7] * num_sampled
        for token in sampled:
            slot.append(token)
        slot.num_cached = slot.num_tokens - 1
        written[index] = [*prompt.tolist(), *sampled[:-1]]
        running[session] = slot
        if not overlaps:
            table.release(running.pop(session))


def test_a_request_waits_for_a_prefix_only_until_it_is_computed() -> None:
    table = SlotTable(num_slots=2, max_model_len=1000)
    long_prompt = np.arange(900, dtype=np.int32)
    placement = table.find_placement(long_prompt, session="first")
    assert isinstance(placement, Placement)
    first = table.assign(placement, prompt_ids=long_prompt, session="first")
    second_prompt = np.concatenate([long_prompt[:50], np.array([5], dtype=np.int32)])
    prefix = table.find_placement(second_prompt, session="second")
    assert isinstance(prefix, PrefixInPrefill)
    assert prefix.is_pending
    first.num_cached = 512
    assert first.is_prefilling
    assert not prefix.is_pending
    assert table.find_placement(second_prompt, session="second") == Placement(
        slot=table.slots[1], num_reused=50, copy_from=first
    )
