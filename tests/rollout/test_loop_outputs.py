"""Outputs of loops on token ids are completed with text, weight versions and limits; invalid outputs fail their row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.config import RolloutConfig
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import AgentLoopOutput, Feedback, IncidentKind, Segment, Trajectory
from agent_loop.types import Origin, StopReason
from tests.helpers import call_text, encoded, hermes_template, roles, text_reply, user
from tests.rollout.harness import WorkerHarness

ANSWER = "It is 7.<|im_end|>"
REPLY = "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@register("bare_turns")
class BareTurns(AgentLoopBase):
    """Loop that samples two turns on token ids and returns the output as `edit` changed it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        prompt_ids = await self.apply_chat_template(row["raw_prompt"])
        response_ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for turn in range(row.get("num_turns", 1)):
            if turn:
                response_ids += encoded(REPLY)
                mask += [0] * len(encoded(REPLY))
                logprobs += [0.0] * len(encoded(REPLY))
            out = await self.server_manager.generate(
                str(id(self)), prompt_ids=prompt_ids + response_ids, sampling_params=sampling_params
            )
            response_ids += out.token_ids
            mask += [1] * len(out.token_ids)
            logprobs += out.log_probs or []
        fields: dict[str, Any] = {
            "prompt_ids": prompt_ids,
            "response_ids": response_ids,
            "response_mask": mask,
            "response_logprobs": logprobs,
        }
        edit = row.get("edit")
        return AgentLoopOutput(**fields) if edit is None else edit(fields)


class Versioned(ScriptedServer):
    """Server whose weights have version 3 from the start."""

    async def start(self) -> None:
        await self.update_weights([], weight_version=3)


def run_manager(
    script: Sequence[ScriptedReply], rows: Sequence[dict[str, Any]], **settings: Any
) -> tuple[Any, list[Trajectory]]:
    """Return the batch and the trajectories of two equal runs."""

    async def main() -> tuple[Any, list[Trajectory]]:
        config = RolloutConfig(n=1, agent={"default_agent_loop": "bare_turns"}, **settings)  # pyright: ignore
        servers = [Versioned(script)]
        async with AgentLoopManager(config, servers=servers, template=hermes_template()) as manager:
            return await manager.generate_sequences(rows), await manager.run(rows)

    return run_virtual(main())


def kinds(output: AgentLoopOutput) -> list[IncidentKind]:
    return [incident.kind for incident in output.incidents]


def question(**columns: Any) -> dict[str, Any]:
    return {"raw_prompt": user("What is 1 + 2?"), **columns}


def without_logprobs(fields: dict[str, Any]) -> AgentLoopOutput:
    return AgentLoopOutput(**{**fields, "response_logprobs": None})


def test_a_reward_function_can_read_the_answer_of_a_loop_on_token_ids() -> None:
    def reward(output: AgentLoopOutput, row: Any) -> float:
        return float("7" in output.answer)

    harness = WorkerHarness(
        [text_reply("It is 7.")], agent="bare_turns", reward=RewardFunction(reward, timeout_s=5)
    )
    trajectory = harness.run_one()
    assert trajectory.reward == 1.0
    assert list(trajectory.output.messages) == [
        *user("What is 1 + 2?"),
        {"role": "assistant", "content": "It is 7."},
    ]


def test_each_turn_and_each_reply_becomes_a_message_and_calls_are_parsed() -> None:
    script = [text_reply("Hm." + call_text("add", a=1, b=2)), text_reply("It is 7.")]
    output = WorkerHarness(script, agent="bare_turns").run_one(num_turns=2).output
    assert roles(output.messages) == ["user", "assistant", "tool", "assistant"]
    assert output.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert "Sure?" in output.messages[2]["content"]
    assert output.answer == "It is 7."


def test_a_prompt_other_than_the_rows_is_decoded_to_text() -> None:
    def edit(fields: dict[str, Any]) -> AgentLoopOutput:
        return AgentLoopOutput(**{**fields, "prompt_ids": encoded("another prompt")})

    output = WorkerHarness([text_reply("7")], agent="bare_turns").run_one(edit=edit).output
    assert output.messages[0] == {"role": "user", "content": "another prompt"}


@pytest.mark.parametrize("num_turns", [1, 3])
def test_tokens_carry_the_weight_version_that_sampled_them(num_turns: int) -> None:
    batch, trajectories = run_manager([text_reply("It is 7.")] * 3, [question(num_turns=num_turns)])
    [output] = [t.output for t in trajectories]
    assert {s.weight_version for s in output.segments if s.origin is Origin.MODEL} == {3}
    assert output.num_assistant_turns == num_turns
    assert torch.equal(batch["weight_versions"] == 3, batch["response_mask"] == 1)


def test_a_completion_that_spans_a_weight_update_keeps_both_versions() -> None:
    async def scenario() -> list[Trajectory]:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(harness.worker.run(harness.jobs([question(edit=without_logprobs)])))
            await asyncio.sleep(0.5)
            await harness.server.update_weights([], weight_version=1)
        return running.result()

    harness = WorkerHarness([text_reply("one two three", latency_s=1.0)], agent="bare_turns")
    [trajectory] = run_virtual(scenario())
    segments = trajectory.output.response_segments
    assert [s.weight_version for s in segments] == [0, 1]
    assert trajectory.output.response_logprobs is not None
    assert kinds(trajectory.output) == []


def test_logprobs_that_a_loop_omits_are_taken_from_its_completions() -> None:
    reply = text_reply("It is 7.", logprobs=[-0.25] * len(encoded(ANSWER)))
    [output] = [
        t.output
        for t in WorkerHarness([reply] * 2, agent="bare_turns").run(
            [question(num_turns=2, edit=without_logprobs)]
        )
    ]
    assert output.response_logprobs is not None
    assert output.response_logprobs[output.response_mask == 1].tolist() == [-0.25] * (
        2 * len(encoded(ANSWER))
    )


def test_logprobs_of_another_context_are_not_used_but_the_weight_version_is() -> None:
    def edit(fields: dict[str, Any]) -> AgentLoopOutput:
        fields = {**fields, "prompt_ids": fields["prompt_ids"][1:], "response_logprobs": None}
        return AgentLoopOutput(**fields)

    [output] = [t.output for t in run_manager([text_reply("7")], [question(edit=edit)])[1]]
    assert output.response_logprobs is None
    assert [s.weight_version for s in output.response_segments] == [3]
    assert kinds(output) == []


def test_tokens_that_no_completion_contains_are_reported() -> None:
    def edit(fields: dict[str, Any]) -> AgentLoopOutput:
        forced = encoded("Sure: ")
        ids = forced + fields["response_ids"]
        return AgentLoopOutput(
            prompt_ids=fields["prompt_ids"], response_ids=ids, response_mask=[1] * len(ids)
        )

    [output] = [t.output for t in run_manager([text_reply("7")], [question(edit=edit)])[1]]
    assert kinds(output) == [IncidentKind.UNMATCHED_TOKENS]
    assert f"{len(encoded('Sure: '))} tokens" in output.incidents[0].detail
    assert {s.weight_version for s in output.response_segments} == {3}


@pytest.mark.parametrize("pad_to", ["longest", "limits"])
def test_a_response_over_its_limit_is_cut_and_reported_and_the_batch_is_complete(pad_to: str) -> None:
    long = text_reply("one two three four five six seven " * 40)
    rows = [question(), question(num_turns=2), question(edit=lambda fields: AgentLoopOutput(**fields))]
    batch, trajectories = run_manager([long, long], rows, pad_to=pad_to, prompt_length=64, response_length=32)
    assert batch.batch_size[0] == 3
    for trajectory in trajectories:
        output = trajectory.output
        assert len(output.response_ids) == 32
        assert output.stop_reason is StopReason.RESPONSE_LENGTH
        assert kinds(output) == [IncidentKind.TRUNCATED_RESPONSE]
        assert output.response_logprobs is not None
        assert output.answer.startswith("one two")
        assert len(output.answer) < 200


@pytest.mark.parametrize("pad_to", ["longest", "limits"])
def test_a_prompt_over_its_limit_ends_its_row_with_prompt_length(pad_to: str) -> None:
    rows = [question(raw_prompt=user("word " * 200)), question()]
    batch, trajectories = run_manager(
        [text_reply("7")], rows, pad_to=pad_to, prompt_length=64, response_length=32
    )
    assert batch.batch_size[0] == 2
    long, short = (trajectory.output for trajectory in trajectories)
    assert long.stop_reason is StopReason.PROMPT_LENGTH
    assert kinds(long) == [IncidentKind.TRUNCATED_PROMPT]
    assert long.segments == ()
    assert list(long.messages) == rows[0]["raw_prompt"]
    assert short.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_on_the_configured_side(side: str) -> None:
    harness = WorkerHarness([text_reply("7")], agent="bare_turns", prompt_length=20, truncate_prompt=side)
    output = harness.run_one(raw_prompt=user("word " * 200)).output
    whole = hermes_template().open(user("word " * 200)).tolist()
    assert output.prompt_ids.tolist() == (whole[-20:] if side == "left" else whole[:20])
    assert kinds(output) == [IncidentKind.TRUNCATED_PROMPT]
    assert output.answer == "7"


def test_feedback_of_a_turn_that_was_cut_has_no_position() -> None:
    def edit(fields: dict[str, Any]) -> AgentLoopOutput:
        feedback = [Feedback(Origin.TOOL, place=place, reward=1.0) for place in (2, 100)]
        return AgentLoopOutput(**fields, feedback=feedback)

    long = text_reply("one two three four five six seven " * 40)
    batch, trajectories = run_manager([long], [question(edit=edit)], response_length=32)
    assert [feedback.place for feedback in trajectories[0].output.feedback] == [2, None]
    assert batch["turn_rewards"].sum() == 1.0


def test_the_outputs_of_a_list_are_completed_one_by_one() -> None:
    @register("several_bare")
    class Several(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
            prompt_ids = await self.apply_chat_template(row["raw_prompt"])
            outputs: list[AgentLoopOutput] = []
            for name in ("one", "two"):
                out = await self.server_manager.generate(
                    name, prompt_ids=prompt_ids, sampling_params=sampling_params
                )
                ids = out.token_ids
                outputs.append(
                    AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids))
                )
            bad: Any = "many"
            return [
                *outputs,
                AgentLoopOutput(prompt_ids=[1], response_ids=[], response_mask=[], num_turns=bad),
            ]

    replies = {"one": text_reply("first"), "two": text_reply("second")}
    harness = WorkerHarness(lambda request: replies[request.request_id], agent="several_bare")
    first, second, bad = (trajectory.output for trajectory in harness.run([question()]))
    assert (first.answer, second.answer) == ("first", "second")
    assert first.response_logprobs is not None
    assert second.response_logprobs is not None
    assert bad.stop_reason is StopReason.FAILED
    assert bad.failure is not None
    assert "num_turns is 'many' (str)" in bad.failure.error


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "text for ids": (lambda f: AgentLoopOutput(**{**f, "prompt_ids": "abc"}), "prompt_ids"),
    "nested ids": (lambda f: AgentLoopOutput(**{**f, "response_ids": [[1, 2]]}), "flat list of integers"),
    "fractions": (lambda f: AgentLoopOutput(**{**f, "prompt_ids": [1.5]}), "flat list of integers"),
    "negative ids": (lambda f: AgentLoopOutput(**{**f, "prompt_ids": [-1]}), "prompt_ids holds -1"),
    "huge ids": (lambda f: AgentLoopOutput(**{**f, "prompt_ids": [2**40]}), "prompt_ids holds"),
    "huger ids": (lambda f: AgentLoopOutput(**{**f, "prompt_ids": [2**70]}), "flat list of integers"),
    "ids that the model does not know": (
        lambda f: AgentLoopOutput(**{**f, "prompt_ids": [10**6]}),
        "a prompt segment holds token ids from 1000000 to 1000000",
    ),
    "a segment of another type": (
        lambda f: AgentLoopOutput(segments=[Segment(np.array([1, 2]), Origin.PROMPT)]),  # pyright: ignore
        "give a flat int32 array",
    ),
    "a nested mask": (
        lambda f: AgentLoopOutput(**{**f, "response_mask": [f["response_mask"]]}),
        "response_mask has shape",
    ),
    "turns as text": (lambda f: AgentLoopOutput(**f, num_turns="2"), "num_turns is '2'"),
    "a huge number of turns": (lambda f: AgentLoopOutput(**f, num_turns=2**40), "num_turns is"),
    "an unknown reason": (lambda f: AgentLoopOutput(**f, stop_reason="tired"), "stop_reason is 'tired'"),
    "a huge version": (lambda f: AgentLoopOutput(**f, weight_version=2**40), "weight_version is"),
    "a version as text": (lambda f: AgentLoopOutput(**f, weight_version="3"), "weight_version is '3'"),
    "a message as text": (lambda f: AgentLoopOutput(**f, messages=["hi"]), "messages holds 'hi'"),
    "feedback beyond the end": (
        lambda f: AgentLoopOutput(**f, feedback=[Feedback(Origin.TOOL, place=99, reward=1.0)]),
        "feedback.place is 99",
    ),
    "nothing at all": (lambda f: [], "returned"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_output_fails_its_own_row_with_a_message(name: str) -> None:
    edit, message = BAD[name]
    batch, trajectories = run_manager([text_reply("7")], [question(edit=edit), question()])
    assert batch.batch_size[0] == 2
    bad, good = (trajectory.output for trajectory in trajectories)
    assert bad.failure is not None
    assert message in bad.failure.error
    assert good.stop_reason is StopReason.ANSWERED


def test_streamed_completions_of_a_loop_are_recorded_too() -> None:
    @register("streaming")
    class Streaming(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
            prompt_ids = await self.apply_chat_template(row["raw_prompt"])
            ids: list[int] = []
            async for chunk in self.server_manager.stream(
                "mine", prompt_ids=prompt_ids, sampling_params=sampling_params
            ):
                ids += chunk.token_ids
            return AgentLoopOutput(prompt_ids=prompt_ids, response_ids=ids, response_mask=[1] * len(ids))

    output = WorkerHarness([text_reply("It is 7.")], agent="streaming").run_one().output
    assert output.answer == "It is 7."
    assert output.response_logprobs is not None
