"""Tests of completions and of the chunks that they are streamed in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import SamplingParamsError
from agent_loop.trajectory.codec import decode_completion, encode_completion, from_plain, to_plain
from agent_loop.types import (
    SamplingParams,
    TokenChunk,
    TokenOutput,
    as_logprobs,
    as_token_ids,
)


@st.composite
def outputs(draw: st.DrawFn) -> TokenOutput:
    counts = draw(st.lists(st.integers(1, 4), max_size=4))
    has_logprobs, width = draw(st.booleans()), draw(st.integers(0, 3))
    chunks = [
        TokenChunk(
            list(range(count)),
            [-0.5] * count if has_logprobs else None,
            weight_version=version,
            extras={"top": np.full((count, width), version)} if width else {},
        )
        for version, count in enumerate(counts, start=3)
    ]
    end = TokenChunk(
        [],
        [],
        stop_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        num_preempted=draw(st.integers(0, 2)),
        num_cached_tokens=draw(st.sampled_from([None, 0, 7])),
    )
    return TokenOutput.from_chunks([*chunks, end])


@given(outputs())
def test_the_chunks_of_a_completion_join_to_the_completion(output: TokenOutput) -> None:
    assert TokenOutput.from_chunks(output.chunks) == output
    assert TokenOutput.from_chunks([token for c in output.chunks for token in c.single_tokens()]) == output


@given(outputs())
def test_a_completion_is_unchanged_after_encoding_and_decoding(output: TokenOutput) -> None:
    assert decode_completion(encode_completion(output)) == output
    assert from_plain(to_plain(output), TokenOutput) == output


def test_extras_with_different_shapes_are_dropped() -> None:
    both, one = np.zeros((2, 3)), np.zeros((2, 4))
    chunks = [
        TokenChunk([1, 2], None, extras={"a": both, "b": both}),
        TokenChunk([3, 4], None, extras={"a": both, "b": one}),
        TokenChunk([], None, stop_reason="stop"),
    ]
    extras = TokenOutput.from_chunks(chunks).extras
    assert {name: array.shape for name, array in extras.items()} == {"a": (4, 3)}


def test_chunks_of_one_version_are_joined() -> None:
    chunks = [
        TokenChunk([1, 2], [-0.1, -0.2], weight_version=4),
        TokenChunk([3], [-0.3], weight_version=4),
        TokenChunk([], [], weight_version=5, stop_reason="stop"),
    ]
    output = TokenOutput.from_chunks(chunks)
    assert (output.token_ids, output.weight_version, len(output.chunks)) == ([1, 2, 3], 4, 1)


def test_an_incomplete_stream_is_aborted() -> None:
    assert TokenOutput.from_chunks([TokenChunk([1], None)]).stop_reason == "aborted"
    assert TokenOutput.from_chunks([]).token_ids == []


@given(st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), st.booleans(), st.floats(-9, 9))))
def test_ids_are_packed_as_numpy_packs_them(ids: list[int]) -> None:
    packed, expected = as_token_ids(ids), np.asarray(ids, np.int32)
    assert packed.dtype == np.int32
    assert packed.tolist() == expected.tolist()
    assert as_token_ids(packed) is packed


@given(st.lists(st.floats(width=32)))
def test_logprobs_are_packed_as_numpy_packs_them(logprobs: list[float]) -> None:
    packed = as_logprobs(logprobs)
    assert packed.dtype == np.float32
    np.testing.assert_array_equal(packed, np.asarray(logprobs, np.float32))
    assert as_logprobs(packed) is packed


@pytest.mark.parametrize("ids", [[2**31], ["a"], [None]])
def test_an_invalid_id_is_an_error(ids: list[int]) -> None:
    with pytest.raises((OverflowError, ValueError, TypeError)):
        as_token_ids(ids)


def test_limited_returns_a_copy_and_does_not_change_the_original() -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=(7,))
    expected = SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=(7, 8))
    assert params.limited(3, more_stop_token_ids=(8,)) == expected
    assert params == SamplingParams(temperature=0.5, stop_token_ids=(7,))


def test_limited_parameters_are_validated() -> None:
    with pytest.raises(SamplingParamsError, match="max_tokens is 0"):
        SamplingParams().limited(0)
