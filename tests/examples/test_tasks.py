from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import islice

import pytest

from agent_loop.chat.template import ChatTemplate
from agent_loop.rewards.function import load_reward
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.tiny_models.tokenizer import end_id, render
from agent_loop.trajectory import Trajectory
from agent_loop.types import Message, Row, StopReason
from examples.common.demonstrations import GIVE_UP, demonstrations
from tests.examples.conftest import Example

NUM_ROWS = 8


@pytest.mark.nightly(keep=2)
def test_the_solution_earns_the_reward_with_the_real_tools(example: Example) -> None:
    rows = held_out_rows(example)
    trajectories = replay(example, rows, turns=[example.task.solution(row) for row in rows])
    assert [t.reward for t in trajectories] == [1.0] * NUM_ROWS
    assert {t.output.stop_reason for t in trajectories} <= {
        StopReason.ANSWERED,
        StopReason.INTERACTION_FINISHED,
    }
    assert not any(t.output.incidents for t in trajectories)


@pytest.mark.nightly(keep=4)
def test_a_rollout_has_the_same_tokens_as_the_demonstration(example: Example) -> None:
    rows = held_out_rows(example)
    trajectories = replay(example, rows, turns=[example.task.solution(row) for row in rows])
    for row, trajectory in zip(rows, trajectories, strict=True):
        messages = row["raw_prompt"] + example.task.solution(row)
        text = render(example.tokenizer, messages, tools=example.schemas).removesuffix("\n")
        assert [*trajectory.output.prompt_ids, *trajectory.output.response_ids] == example.tokenizer.encode(
            text
        )


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("answer", [GIVE_UP, "", "12"])
def test_a_wrong_answer_earns_nothing(example: Example, answer: str) -> None:
    rows = held_out_rows(example)
    trajectories = replay(example, rows, turns=[[{"role": "assistant", "content": answer}]] * NUM_ROWS)
    assert [t.reward for t in trajectories] == [0.0] * NUM_ROWS


def test_training_questions_and_held_out_questions_are_disjoint(example: Example) -> None:
    held_out = {question(row) for seed in range(3) for row in example.task.val_rows(seed=seed)}
    for seed in range(3):
        assert held_out.isdisjoint(question(row) for row in example.task.train_rows(seed=seed))
    conversations = demonstrations(example.task, rng=random.Random(0), habit=example.recipe.habit)
    assert held_out.isdisjoint(messages[1]["content"] for messages in islice(conversations, 1000))


def held_out_rows(example: Example) -> Sequence[Row]:
    config = example.config.data
    rows = load_rows(config.val_files, prompt_key=config.prompt_key, workspace=config.workspace)
    return rows[:NUM_ROWS]


def question(row: Row) -> str:
    return row["prompt"][-1]["content"]


def replay(example: Example, rows: Sequence[Row], *, turns: Sequence[Sequence[Message]]) -> list[Trajectory]:
    """Run the rows with a model that returns the assistant turns of `turns`, one list per row."""
    template = ChatTemplate(example.tokenizer)
    completions_by_prompt = {
        tuple(template.open(row["raw_prompt"], tools=example.schemas).tolist()): completions(
            example, messages
        )
        for row, messages in zip(rows, turns, strict=True)
    }

    def script(request: ScriptedRequest) -> ScriptedReply:
        prompt = tuple(request.prompt_ids.tolist())
        opening = next(each for each in completions_by_prompt if prompt[: len(each)] == each)
        return ScriptedReply(completions_by_prompt[opening][request.turn])

    reward_function = example.config.reward.function  # None if a tool gives the reward
    reward = None if reward_function is None else load_reward(reward_function, timeout_s=5.0)

    async def run() -> list[Trajectory]:
        manager = AgentLoopManager(
            example.config.rollout,
            servers=[ScriptedServer(script)],
            template=template,
            reward=reward,
        )
        async with manager:
            return await manager.run(rows, n=1)

    return asyncio.run(run())


def completions(example: Example, messages: Sequence[Message]) -> list[list[int]]:
    """Return the tokens of each assistant turn, including the end token."""
    opening = "<|im_start|>assistant\n"
    texts = [
        render(example.tokenizer, [message], tools=[]).removeprefix(opening).removesuffix("<|im_end|>\n")
        for message in messages
        if message["role"] == "assistant"
    ]
    return [[*example.tokenizer.encode(text), end_id(example.tokenizer)] for text in texts]
