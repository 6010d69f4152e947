"""Streamed completions and the whole ones that they join to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_loop.types import TokenChunk, TokenOutput, VersionSpan


@st.composite
def outputs(draw: st.DrawFn) -> TokenOutput:
    counts = draw(st.lists(st.integers(1, 4), max_size=4))
    spans = tuple(VersionSpan(version, n) for version, n in enumerate(counts, start=3))
    num_tokens = sum(counts)
    return TokenOutput(
        token_ids=list(range(num_tokens)),
        log_probs=draw(st.sampled_from([None, [-0.5] * num_tokens])),
        stop_reason=draw(st.sampled_from(["stop", "length", "aborted"])),
        weight_version=spans[-1].weight_version if spans else 3,
        num_preempted=draw(st.integers(0, 2)),
        num_cached_tokens=draw(st.sampled_from([None, 0, 7])),
        version_spans=spans if len(spans) > 1 else (),
    )


@given(outputs())
def test_a_completion_in_parts_joins_to_itself(output: TokenOutput) -> None:
    assert TokenOutput.from_chunks(TokenChunk.whole(output)) == output


def test_parts_of_one_version_are_one_span() -> None:
    chunks = [
        TokenChunk([1, 2], [-0.1, -0.2], weight_version=4),
        TokenChunk([3], [-0.3], weight_version=4),
        TokenChunk([], [], weight_version=5, stop_reason="stop"),
    ]
    output = TokenOutput.from_chunks(chunks)
    assert (output.token_ids, output.weight_version, output.version_spans) == ([1, 2, 3], 4, ())


def test_a_stream_that_broke_off_is_aborted() -> None:
    assert TokenOutput.from_chunks([TokenChunk([1], None)]).stop_reason == "aborted"
    assert TokenOutput.from_chunks([]).token_ids == []
