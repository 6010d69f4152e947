"""Token ledger: its segments, masks, log-probs, attachments and forks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.episode.ledger import TokenLedger
from agent_loop.errors import EpisodeError
from agent_loop.trajectory import AgentLoopOutput, Segment, placed_attachments
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import Origin, TokenChunk, TokenOutput

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=2000)


@st.composite
def completions(draw: st.DrawFn) -> TokenOutput:
    ids = draw(token_ids)
    logprobs = [-0.001 * position for position in range(len(ids))]
    cut = draw(st.integers(0, len(ids)))
    chunks = [
        TokenChunk(ids[:cut], logprobs[:cut], weight_version=3),
        TokenChunk(ids[cut:], logprobs[cut:], weight_version=4, stop_reason="stop"),
    ]
    return TokenOutput.from_chunks(chunks)


@given(
    prompt=token_ids,
    turns=st.lists(st.tuples(completions(), token_ids, st.sampled_from([Origin.TOOL, Origin.INTERACTION]))),
)
def test_an_output_has_exactly_the_appended_tokens_masks_and_weight_versions(
    prompt: list[int], turns: list[tuple[TokenOutput, list[int], Origin]]
) -> None:
    ledger = TokenLedger()
    ledger.append(prompt, origin=Origin.PROMPT)
    expected_ids, expected_mask = [], []
    views = []
    for completion, reply, origin in turns:
        views.append((ledger.context, list(prompt) + expected_ids))
        ledger.append_completion(completion)
        ledger.append(reply, origin=origin)
        expected_ids += completion.token_ids + reply
        expected_mask += [1] * len(completion.token_ids) + [0] * len(reply)
    output = AgentLoopOutput(segments=ledger.segments())
    assert output.prompt_ids.tolist() == prompt
    assert output.response_ids.tolist() == expected_ids
    assert output.response_mask.tolist() == expected_mask
    assert np.concatenate([s.token_ids for s in output.segments] or [[]]).tolist() == prompt + expected_ids
    assert output.response_logprobs is not None
    assert len(output.response_logprobs) == len(output.weight_versions) == len(output.response_ids)
    assert (output.response_logprobs[output.response_mask == 0] == 0).all()
    assert set(output.weight_versions[output.response_mask == 0].tolist()) <= {-1}
    assert set(output.weight_versions[output.response_mask == 1].tolist()) <= {3, 4}
    for view, expected in views:
        assert view.tolist() == expected, "a view that `context` returned earlier must not change"


def test_a_completion_across_a_weight_update_is_two_segments_and_one_turn() -> None:
    ledger = TokenLedger()
    ledger.append([1], origin=Origin.PROMPT)
    chunks = [TokenChunk([5, 6], [-1.0] * 2, 1), TokenChunk([7], [-1.0], 2, stop_reason="stop")]
    ledger.append_completion(TokenOutput.from_chunks(chunks))
    output = AgentLoopOutput(segments=ledger.segments())
    assert [(len(s), s.weight_version) for s in output.response_segments] == [(2, 1), (1, 2)]
    assert output.num_turns == 2


def test_response_logprobs_are_none_if_a_completion_has_none() -> None:
    ledger = TokenLedger()
    ledger.append_completion(TokenOutput([5, 6], [-1.0, -2.0], "stop"))
    ledger.append_completion(TokenOutput([7], None, "stop"))
    assert AgentLoopOutput(segments=ledger.segments()).response_logprobs is None


@given(st.lists(st.booleans(), min_size=1))
def test_an_output_built_from_lists_returns_the_same_lists(mask: list[bool]) -> None:
    ids = list(range(len(mask)))
    logprobs = [-float(position) if is_sampled else 0.0 for position, is_sampled in enumerate(mask)]
    output = AgentLoopOutput(
        prompt_ids=[7, 8], response_ids=ids, response_mask=mask, response_logprobs=logprobs, num_turns=2
    )
    assert output.prompt_ids.tolist() == [7, 8]
    assert output.response_ids.tolist() == ids
    assert output.response_mask.tolist() == [int(is_sampled) for is_sampled in mask]
    assert output.response_logprobs is not None
    assert output.response_logprobs.tolist() == logprobs
    assert output.num_turns == 2


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        ({"response_mask": [1, 1]}, "3 tokens but response_mask has 2"),
        ({"response_mask": [1, 1, 2]}, "0 and 1"),
        ({"response_logprobs": [0.0]}, "3 tokens but response_logprobs has 1"),
        ({"response_mask": None}, "needs segments, or"),
        ({"segments": ()}, "one of the two"),
    ],
)
def test_lists_that_do_not_match_are_refused(lists: dict, complaint: str) -> None:
    given_lists = {"prompt_ids": [1], "response_ids": [2, 3, 4], "response_mask": [1, 1, 1], **lists}
    with pytest.raises(EpisodeError, match=complaint):
        AgentLoopOutput(**given_lists)


def test_only_model_segments_carry_a_weight_version() -> None:
    ids = np.zeros(2, np.int32)
    with pytest.raises(EpisodeError, match="weight version"):
        Segment(ids, Origin.TOOL, weight_version=1)
    with pytest.raises(EpisodeError, match="weight version"):
        Segment(ids, Origin.MODEL)


def test_attachments_of_a_segment_count_from_its_start_and_those_of_a_ledger_from_the_first_token() -> None:
    image = Attachment("image", 1, 2, 9, {}, b"")
    ledger = TokenLedger()
    ledger.append([1, 9, 9], origin=Origin.PROMPT, attachments=[image])
    ledger.append_completion(TokenOutput([5, 6], None, "stop"))
    fork = ledger.fork()
    fork.append([7, 9, 9, 8], origin=Origin.TOOL, attachments=[image])
    assert [a.start for a in ledger.attachments] == [1]
    assert [a.start for a in fork.attachments] == [1, 6]
    assert [[a.start for a in segment.attachments] for segment in fork.segments()] == [[1], [], [1]]
    assert [a.start for a in placed_attachments(fork.segments())] == [1, 6]


def test_a_ledger_can_be_forked_at_the_end_of_any_segment() -> None:
    ledger = TokenLedger()
    ledger.append([1, 2], origin=Origin.PROMPT)
    ledger.append_completion(TokenOutput([5, 6], [-1.0, -2.0], "stop"))
    ledger.append([7], origin=Origin.TOOL)
    early, late = ledger.fork(2), ledger.fork(4)
    early.append_completion(TokenOutput([9], [-3.0], "stop"))
    late.append([8], origin=Origin.TOOL)
    assert early.context.tolist() == [1, 2, 9]
    assert (early.num_prompt_tokens, early.num_response_tokens) == (2, 1)
    assert late.context.tolist() == [1, 2, 5, 6, 8]
    assert ledger.context.tolist() == [1, 2, 5, 6, 7]
    own, forked = ledger.segments(), late.segments()
    assert [a is b for a, b in zip(own, forked, strict=True)] == [True, True, False]
    with pytest.raises(EpisodeError, match=r"after \[0, 2, 4, 5\] tokens, not after 3"):
        ledger.fork(3)
