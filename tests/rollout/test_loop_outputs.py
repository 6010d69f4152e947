"""Outputs of loops on token ids are completed with text, weight versions and limits; invalid outputs fail their row."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.config import AlgorithmConfig, RolloutConfig
from agent_loop.environments.live import check_reply
from agent_loop.errors import EnvironmentBug, RewardError, ToolBug
from agent_loop.interactions.base import Reply
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction, read_score
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.runtime.numeric import MAX_REWARD
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.tools.results import read_reward
from agent_loop.training.advantages.estimate import estimate_advantages, load_estimator
from agent_loop.training.advantages.rewards import collect_rewards
from agent_loop.trajectory import AgentLoopOutput, Feedback, IncidentKind, Segment, Trajectory
from agent_loop.types import Origin, StopReason
from tests.helpers import call_text, encoded, hermes_template, roles, text_reply, user
from tests.rollout.harness import WorkerHarness, error_of

ANSWER = "It is 7.<|im_end|>"
REPLY = encoded("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n")
Edit = Callable[[dict[str, Any]], AgentLoopOutput]


@register("bare_turns")
class BareTurns(AgentLoopBase):
    """Loop that samples turns on token ids and returns the output as `edit` changed it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        ids, mask, logprobs = list[int](), list[int](), list[float]()
        for turn in range(row.get("num_turns", 1)):
            if turn:
                ids += REPLY
                mask += [0] * len(REPLY)
                logprobs += [0.0] * len(REPLY)
            out = await self.server_manager.generate(
                str(id(self)), prompt_ids=prompt_ids + ids, sampling_params=sampling_params
            )
            ids += out.token_ids
            mask += [1] * len(out.token_ids)
            logprobs += out.log_probs or []
        return row.get("edit", changed())(
            {
                "prompt_ids": prompt_ids,
                "response_ids": ids,
                "response_mask": mask,
                "response_logprobs": logprobs,
            }
        )


def changed(**changes: Any) -> Edit:
    """Return an edit that changes fields. A function is called with the value of its field."""

    def edit(fields: dict[str, Any]) -> AgentLoopOutput:
        new = {name: value(fields[name]) if callable(value) else value for name, value in changes.items()}
        return AgentLoopOutput(**{**fields, **new})

    return edit


class Versioned(ScriptedServer):
    """Server whose weights have version 3 from the start."""

    async def start(self) -> None:
        await self.update_weights([], weight_version=3)


def run_manager(
    script: Sequence[ScriptedReply], rows: Sequence[dict[str, Any]], **settings: Any
) -> tuple[Any, list[AgentLoopOutput]]:
    """Return the batch, and the outputs of another run."""

    async def main() -> tuple[Any, list[Trajectory]]:
        config = RolloutConfig(n=1, agent={"default_agent_loop": "bare_turns"}, **settings)  # pyright: ignore
        servers = [Versioned(script)]
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            return await manager.generate_sequences(rows), await manager.run(rows)

    batch, trajectories = run_virtual(main())
    return batch, [trajectory.output for trajectory in trajectories]


def run_rows(
    *rows: dict[str, Any], replies: Sequence[ScriptedReply] = (), **options: Any
) -> list[Trajectory]:
    """Run rows whose reward is 0.5 unless they have one."""
    reward = RewardFunction(lambda output, row: 0.5, timeout_s=5)
    replies = replies or [text_reply("It is 7.")] * len(rows)
    return WorkerHarness(replies, agent="bare_turns", **{"reward": reward, **options}).run(rows)


def kinds(output: AgentLoopOutput) -> list[IncidentKind]:
    return [incident.kind for incident in output.incidents]


def question(**columns: Any) -> dict[str, Any]:
    return {"raw_prompt": user("What is 1 + 2?"), **columns}


def test_a_reward_function_can_read_the_answer_of_a_loop_on_token_ids() -> None:
    reward = RewardFunction(lambda output, row: float("7" in output.answer), timeout_s=5)
    row = question(edit=changed(prompt_ids=encoded("another prompt")))
    own, other = run_rows(question(), row, reward=reward)
    assert own.reward == other.reward == 1.0
    answer = {"role": "assistant", "content": "It is 7."}
    assert list(own.output.messages) == [*user("What is 1 + 2?"), answer]
    assert list(other.output.messages) == [*user("another prompt"), answer]


def test_each_turn_and_each_reply_becomes_a_message_and_calls_are_parsed() -> None:
    replies = [text_reply("Hm." + call_text("add", a=1, b=2)), text_reply("It is 7.")]
    [output] = [t.output for t in run_rows(question(num_turns=2), replies=replies)]
    assert roles(output.messages) == ["user", "assistant", "tool", "assistant"]
    assert output.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert "Sure?" in output.messages[2]["content"]
    assert output.answer == "It is 7."


@pytest.mark.parametrize("num_turns", [1, 3])
def test_tokens_carry_the_weight_version_that_sampled_them(num_turns: int) -> None:
    batch, [output] = run_manager([text_reply("It is 7.")] * 3, [question(num_turns=num_turns)])
    assert {s.weight_version for s in output.segments if s.origin is Origin.MODEL} == {3}
    assert output.num_assistant_turns == num_turns
    assert torch.equal(batch["weight_versions"] == 3, batch["response_mask"] == 1)


def test_a_completion_that_spans_a_weight_update_keeps_both_versions() -> None:
    harness = WorkerHarness([text_reply("one two three", latency_s=1.0)], agent="bare_turns")

    async def scenario() -> list[Trajectory]:
        row = question(edit=changed(response_logprobs=None))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(harness.worker.run(harness.jobs([row])))
            await asyncio.sleep(0.5)
            await harness.server.update_weights([], weight_version=1)
        return running.result()

    [trajectory] = run_virtual(scenario())
    assert [s.weight_version for s in trajectory.output.response_segments] == [0, 1]
    assert trajectory.output.response_logprobs is not None
    assert kinds(trajectory.output) == []


def test_logprobs_that_a_loop_omits_are_taken_from_its_completions() -> None:
    reply = text_reply("It is 7.", logprobs=[-0.25] * len(encoded(ANSWER)))
    row = question(num_turns=2, edit=changed(response_logprobs=None))
    [output] = [t.output for t in run_rows(row, replies=[reply] * 2)]
    assert output.response_logprobs is not None
    sampled = output.response_logprobs[output.response_mask == 1]
    assert sampled.tolist() == [-0.25] * (2 * len(encoded(ANSWER)))


def test_logprobs_of_another_context_are_not_used_but_the_weight_version_is() -> None:
    edit = changed(prompt_ids=lambda ids: ids[1:], response_logprobs=None)
    _, [output] = run_manager([text_reply("7")], [question(edit=edit)])
    assert output.response_logprobs is None
    assert [s.weight_version for s in output.response_segments] == [3]
    assert kinds(output) == []


def test_tokens_that_no_completion_contains_are_reported() -> None:
    forced = encoded("Sure: ")
    edit = changed(
        response_ids=lambda ids: forced + ids,
        response_mask=lambda mask: [1] * len(forced) + mask,
        response_logprobs=None,
    )
    _, [output] = run_manager([text_reply("7")], [question(edit=edit)])
    assert kinds(output) == [IncidentKind.UNMATCHED_TOKENS]
    assert f"{len(forced)} tokens" in output.incidents[0].detail
    assert {s.weight_version for s in output.response_segments} == {3}


LONG = text_reply("one two three four five six seven " * 40)


@pytest.mark.parametrize("pad_to", ["longest", "limits"])
def test_a_response_over_its_limit_is_cut_and_reported_and_the_batch_is_complete(pad_to: str) -> None:
    feedback = [Feedback(Origin.TOOL, place=place, reward=1.0) for place in (2, 100)]
    rows = [question(), question(num_turns=2), question(edit=changed(feedback=feedback))]
    batch, outputs = run_manager([LONG, LONG], rows, pad_to=pad_to, prompt_length=64, response_length=32)
    assert batch.batch_size[0] == 3
    assert batch["turn_rewards"].sum() == 1.0
    assert [each.place for each in outputs[2].feedback] == [2, None]
    for output in outputs:
        assert len(output.response_ids) == 32
        assert output.stop_reason is StopReason.RESPONSE_LENGTH
        assert kinds(output) == [IncidentKind.TRUNCATED_RESPONSE]
        assert output.response_logprobs is not None
        assert output.answer.startswith("one two")
        assert len(output.answer) < 200


@pytest.mark.parametrize("pad_to", ["longest", "limits"])
def test_a_prompt_over_its_limit_ends_its_row_with_prompt_length(pad_to: str) -> None:
    rows = [question(raw_prompt=user("word " * 200)), question()]
    batch, [long, short] = run_manager(
        [text_reply("7")], rows, pad_to=pad_to, prompt_length=64, response_length=32
    )
    assert batch.batch_size[0] == 2
    assert long.stop_reason is StopReason.PROMPT_LENGTH
    assert kinds(long) == [IncidentKind.TRUNCATED_PROMPT]
    assert long.segments == ()
    assert list(long.messages) == rows[0]["raw_prompt"]
    assert short.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_on_the_configured_side(side: str) -> None:
    row = question(raw_prompt=user("word " * 200))
    [output] = [t.output for t in run_rows(row, prompt_length=20, truncate_prompt=side)]
    whole = hermes_template().open(row["raw_prompt"]).tolist()
    assert output.prompt_ids.tolist() == (whole[-20:] if side == "left" else whole[:20])
    assert kinds(output) == [IncidentKind.TRUNCATED_PROMPT]
    assert output.answer == "It is 7."


def test_the_outputs_of_a_list_and_streamed_completions_are_completed_one_by_one() -> None:
    @register("several_bare")
    class Several(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
            prompt_ids = await self.apply_chat_template(row["raw_prompt"])
            request: dict[str, Any] = {"prompt_ids": prompt_ids, "sampling_params": sampling_params}
            first = (await self.server_manager.generate("one", **request)).token_ids
            second = [
                token
                async for chunk in self.server_manager.stream("two", **request)
                for token in chunk.token_ids
            ]
            outputs = [
                AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids))
                for ids in (first, second)
            ]
            bad: Any = "many"
            invalid = AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[], num_turns=bad)
            return [*outputs, invalid]

    replies = {"one": text_reply("first"), "two": text_reply("second")}
    harness = WorkerHarness(lambda request: replies[request.request_id], agent="several_bare")
    first, second, bad = (trajectory.output for trajectory in harness.run([question()]))
    assert (first.answer, second.answer) == ("first", "second")
    assert first.response_logprobs is not None
    assert second.response_logprobs is not None
    assert bad.failure is not None
    assert "num_turns is 'many' (str)" in bad.failure.error


BAD_REWARDS = [math.nan, math.inf, 2 * MAX_REWARD, 10**400]
BAD: dict[str, tuple[Edit, str]] = {
    "no prompt": (changed(prompt_ids=[]), "prompt_ids is empty"),
    "text for ids": (changed(prompt_ids="abc"), "prompt_ids"),
    "nested ids": (changed(response_ids=[[1, 2]]), "flat list of integers"),
    "fractions": (changed(prompt_ids=[1.5]), "flat list of integers"),
    "negative ids": (changed(prompt_ids=[-1]), "prompt_ids holds -1"),
    "huge ids": (changed(prompt_ids=[2**40]), "prompt_ids holds"),
    "huger ids": (changed(prompt_ids=[2**70]), "flat list of integers"),
    "unknown ids": (changed(prompt_ids=[10**6]), "a prompt segment holds token ids from 1000000 to 1000000"),
    "a segment of another type": (
        lambda f: AgentLoopOutput(segments=[Segment(np.array([1, 2]), Origin.PROMPT)]),  # pyright: ignore
        "give a flat int32 array",
    ),
    "a nested mask": (changed(response_mask=lambda mask: [mask]), "response_mask has shape"),
    "turns as text": (changed(num_turns="2"), "num_turns is '2'"),
    "a huge number of turns": (changed(num_turns=2**40), "num_turns is"),
    "an unknown reason": (changed(stop_reason="tired"), "stop_reason is 'tired'"),
    "a huge version": (changed(weight_version=2**40), "weight_version is"),
    "a version as text": (changed(weight_version="3"), "weight_version is '3'"),
    "a message as text": (changed(messages=["hi"]), "messages holds 'hi'"),
    "feedback beyond the end": (
        changed(feedback=[Feedback(Origin.TOOL, place=99, reward=1.0)]),
        "feedback.place is 99",
    ),
    "a turn reward": (
        changed(feedback=[Feedback(Origin.TOOL, place=0, reward=math.nan)]),
        "the reward of a turn is ",
    ),
    "nothing at all": (lambda f: [], "returned"),  # pyright: ignore
    **{
        f"log-prob {logprob}": (
            changed(response_logprobs=lambda found, last=logprob: [*found[:-1], last]),
            f"response_logprobs holds {logprob}; give log-probs",
        )
        for logprob in (math.nan, 0.5)
    },
    **{
        f"reward {number}": (changed(reward_score=reward), "reward_score is ")
        for number, reward in enumerate([*BAD_REWARDS, "x", np.array([1.0, 2.0])])
    },
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_output_fails_its_own_row_with_a_message(name: str) -> None:
    edit, message = BAD[name]
    bad, good = run_rows(question(edit=edit), question())
    assert bad.output.stop_reason is StopReason.FAILED
    assert message in error_of(bad)
    assert bad.reward is bad.output.reward_score is None
    assert (good.reward, good.output.stop_reason) == (0.5, StopReason.ANSWERED)
    assert len(assemble([bad, good], pad_token_id=0)) == 2


@pytest.mark.parametrize("reward", [True, np.float32(0.25), torch.tensor(2.0), -MAX_REWARD, 3])
def test_a_reward_score_of_another_numeric_type_becomes_a_float(reward: Any) -> None:
    [trajectory] = run_rows(question(edit=changed(reward_score=reward)))
    assert type(trajectory.reward) is type(trajectory.output.reward_score) is float
    assert trajectory.reward == float(reward)


@pytest.mark.parametrize("reward", BAD_REWARDS)
def test_every_source_of_rewards_refuses_values_that_a_batch_cannot_hold(reward: float) -> None:
    with pytest.raises(RewardError, match="returned reward"):
        read_score({"reward": reward}, source="judge")
    with pytest.raises(ToolBug, match="return a finite number, or None"):
        read_reward(reward, where="tool 'add'")
    with pytest.raises(EnvironmentBug, match="return a finite number"):
        check_reply(Reply(score=reward), where="interaction 'user'")


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_a_reward_that_is_not_finite_in_the_batch_counts_as_missing(estimator: Any) -> None:
    """Check that the batch validates rewards too, for trajectories that no worker created."""
    config = AlgorithmConfig(adv_estimator=estimator, turn_reward_weight=1.0)
    ran = run_rows(*(question(edit=changed(reward_score=score)) for score in (0.0, 1.0, 0.0)))
    ran = [Trajectory(t.output, t.row, 0, rollout, t.reward, {}) for rollout, t in enumerate(ran)]
    clean = assemble(ran, pad_token_id=0)
    spoilt = clean.clone()
    spoilt["reward"][2] = math.inf
    spoilt["turn_rewards"][0, 0], spoilt["has_turn_reward"][0, 0] = math.nan, True
    clean["reward"][2] = math.nan
    width = clean["responses"].shape[1]
    found, expected = (
        estimate_advantages(
            collect_rewards(each, config=config, response_length=width), estimator=load_estimator(config)
        )
        for each in (spoilt, clean)
    )
    assert found.keep_B.tolist() == [True, True, False]
    assert torch.equal(found.advantages_BR[:2], expected.advantages_BR[:2])
    assert found.advantages_BR[:2].isfinite().all()
