"""Token ledgers, and limits of episodes: of tokens, turns and time, and the tokens that are kept."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.config import MultiTurnConfig
from agent_loop.episode.deadlines import Deadlines, TimeLimit
from agent_loop.episode.ledger import TokenLedger
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import EpisodeError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.trajectory import AgentLoopOutput, IncidentKind, Segment, placed_attachments
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import Origin, SamplingParams, StopReason, TokenChunk, TokenOutput
from tests.helpers import call_text, encoded, text_reply, user
from tests.rollout.harness import Adder, WorkerHarness


def kinds(output: AgentLoopOutput) -> list[IncidentKind]:
    return [incident.kind for incident in output.incidents]


def test_a_completion_over_its_time_limit_is_cut_and_its_tokens_are_kept() -> None:
    harness = WorkerHarness(lambda _: text_reply("abcdefgh", latency_s=100.0), generate_timeout_s=40.0)
    output = harness.run_one().output
    assert output.stop_reason is StopReason.DEADLINE
    assert kinds(output) == [IncidentKind.CUT_TURN, IncidentKind.GENERATE_TIMEOUT]
    assert "longer than 40 s (rollout.generate_timeout_s)" in output.incidents[1].detail
    whole = encoded("abcdefgh<|im_end|>")
    assert 0 < len(output.response_ids) < len(whole)
    assert output.response_ids.tolist() == whole[: len(output.response_ids)]
    assert output.metrics.total == pytest.approx(40, abs=0.1)


def test_the_time_limit_of_a_completion_includes_its_time_in_the_queue() -> None:
    harness = WorkerHarness([text_reply("ok", latency_s=30.0)], generate_timeout_s=40.0)
    harness.server_manager.pool.balancer.remove_server("scripted-0")
    harness.server_manager.pool.balancer.add_server("scripted-0", max_in_flight=1)
    first, second = (t.output for t in harness.run([{"raw_prompt": user("?")}] * 2))
    assert first.stop_reason is StopReason.ANSWERED
    assert second.stop_reason is StopReason.DEADLINE
    assert kinds(second)[-1] is IncidentKind.GENERATE_TIMEOUT


def test_the_time_limit_applies_to_each_completion_separately() -> None:
    turns = [*[call_text("add", a=1, b=2)] * 3, "3"]
    harness = WorkerHarness(
        [text_reply(turn, latency_s=30.0) for turn in turns],
        tools=[Adder({"latency_s": 30.0})],
        generate_timeout_s=40.0,
        turn_timeout_s=70.0,
    )
    output = harness.run_one().output
    assert (output.stop_reason, kinds(output)) == (StopReason.ANSWERED, [])


def test_a_turn_is_lost_and_reported_if_its_server_does_not_answer_the_abort() -> None:
    harness = WorkerHarness(
        lambda _: ScriptedReply(encoded("never"), latency_s=math.inf), generate_timeout_s=40.0
    )

    async def no_abort(request_id: str) -> None:
        await asyncio.sleep(math.inf)

    harness.server.abort = no_abort
    output = harness.run_one().output
    assert output.stop_reason is StopReason.DEADLINE
    assert kinds(output) == [IncidentKind.GENERATE_TIMEOUT]
    assert output.response_ids.tolist() == []


def test_a_turn_whose_tools_exceed_its_time_limit_ends_the_trajectory() -> None:
    tool = Adder({"latency_s": 50.0})
    harness = WorkerHarness(
        lambda _: text_reply(call_text("add", a=1, b=2), latency_s=20.0),
        tools=[tool],
        multi_turn=MultiTurnConfig(tool_timeout_s=1000),
        turn_timeout_s=60.0,
    )
    output = harness.run_one().output
    assert output.stop_reason is StopReason.DEADLINE
    assert kinds(output) == [IncidentKind.TURN_TIMEOUT]
    assert "longer than 60 s (rollout.multi_turn.turn_timeout_s)" in output.incidents[0].detail
    assert output.num_assistant_turns == 1
    assert tool.open == set()
    assert output.metrics.total == pytest.approx(60, abs=0.1)


def test_the_time_limit_of_a_trajectory_ends_it_without_an_incident_of_a_turn() -> None:
    limits: dict[str, Any] = {"generate_timeout_s": 60.0, "turn_timeout_s": 70.0, "deadline_s": 50.0}
    output = WorkerHarness([text_reply("abcdefgh", latency_s=100.0)], **limits).run_one().output
    assert (output.stop_reason, kinds(output)) == (StopReason.DEADLINE, [IncidentKind.CUT_TURN])


@register("waits_after_its_turn")
class WaitsAfterItsTurn(AgentLoopBase):
    """Loop that waits 500 s after its turn, after the reply to it, or after a branch, as the row's `then` selects."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            if row["then"] == "observe":
                await episode.observe(user("go on"))
            if row["then"] == "branch":
                episode.branch()
            await asyncio.sleep(500)
            return episode.output()


@pytest.mark.parametrize(
    ("then", "reason"),
    [("observe", StopReason.ANSWERED), ("branch", StopReason.ANSWERED), ("wait", StopReason.DEADLINE)],
)
def test_a_turn_ends_when_a_reply_is_added_or_the_episode_branches(then: str, reason: StopReason) -> None:
    harness = WorkerHarness([text_reply("x")], agent="waits_after_its_turn", turn_timeout_s=60.0)
    assert harness.run_one(then=then).output.stop_reason is reason


@pytest.mark.virtual_time
async def test_the_earliest_of_several_limits_applies_and_removed_limits_do_not() -> None:
    deadlines = Deadlines()
    with pytest.raises(TimeoutError):
        async with deadlines:
            deadlines.begin(TimeLimit.TRAJECTORY, seconds=100)
            deadlines.begin(TimeLimit.GENERATE, seconds=10)
            await asyncio.sleep(5)
            deadlines.end(TimeLimit.GENERATE)
            deadlines.begin(TimeLimit.TURN, seconds=20)
            try:
                await asyncio.sleep(1000)
            finally:
                deadlines.end(TimeLimit.TURN)
    assert (deadlines.exceeded, asyncio.get_running_loop().time()) == (TimeLimit.TURN, 25)


def limits(**values: int) -> EpisodeLimits:
    return EpisodeLimits(**{"prompt_length": 10, "response_length": 100, **values})


@pytest.mark.parametrize(
    ("assistant_turns", "num_tokens", "forbidden"),
    [
        (0, 0, None),
        (2, 99, None),
        (2, 100, StopReason.RESPONSE_LENGTH),
        (3, 0, StopReason.MAX_ASSISTANT_TURNS),
        (3, 100, StopReason.MAX_ASSISTANT_TURNS),
    ],
)
def test_another_turn_is_forbidden_by_the_limit_of_turns_or_of_tokens(
    assistant_turns: int, num_tokens: int, forbidden: StopReason | None
) -> None:
    assert (
        limits(max_assistant_turns=3).forbids_turn(assistant_turns=assistant_turns, num_tokens=num_tokens)
        is forbidden
    )


@pytest.mark.parametrize(
    ("requested", "per_turn", "used", "allowed"),
    [(None, None, 0, 100), (7, None, 0, 7), (7, 5, 0, 5), (7, 5, 98, 2)],
)
def test_max_tokens_is_the_minimum_of_the_request_the_turn_limit_and_the_tokens_left(
    requested: int | None, per_turn: int | None, used: int, allowed: int
) -> None:
    applied = EpisodeLimits(10, 100, max_turn_tokens=per_turn).applied(
        SamplingParams(max_tokens=requested, stop_token_ids=(1,)), num_tokens=used, stop_token_ids=[2]
    )
    assert applied.max_tokens == allowed
    assert applied.stop_token_ids == (1, 2)


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
