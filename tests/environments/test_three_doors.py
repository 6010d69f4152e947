"""The same tasks through three doors: as rows, as an environment of verifiers, and as an agent program."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from agent_loop.rollout.jobs import Job
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import Script, ScriptedReply, ScriptedRequest
from agent_loop.types import Origin
from tests.environments.test_verifiers import FILES, PYTHON
from tests.helpers import hermes_template, text_reply
from tests.serve.harness import ProgramHarness

pytestmark = [pytest.mark.environments, pytest.mark.timeout(240)]

NUM_TASKS = 6
SEED = 5
DATASET = {"seed": 1, "min_terms": 2, "max_terms": 4}
TEMPERATURE = 0.7


async def program(row: Any, *, base_url: str, api_key: str) -> dict[str, float]:
    """Answer the question of a row, and score the answer. Knows nothing of this package."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", size=NUM_TASKS, **DATASET)
    entry = dataset[row["index"]]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        completion = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": entry["question"]}]
        )
    return {"reward": dataset.score_answer(completion.choices[0].message.content, entry)}


def rows_of_door(door: str) -> list[dict[str, Any]]:
    options = "&".join(f"{name}={value}" for name, value in DATASET.items())
    if door == "rows":
        source = f"reasoning_gym:chain_sum?{options}&size={NUM_TASKS}&system_prompt="
        return load_rows([source], prompt_key="prompt")
    if door == "verifiers":
        settings = "&".join(f"taskset.{option}" for option in options.split("&"))
        source = f"verifiers:{FILES}/sums.py?python={PYTHON}&taskset.size={NUM_TASKS}&{settings}"
        return load_rows([source], prompt_key="prompt")
    prompt = [{"role": "user", "content": "-"}]
    return [{"raw_prompt": prompt, "program": program, "index": index} for index in range(NUM_TASKS)]


def guesses(asked: list[str]) -> Script:
    """Return a script that answers every other question rightly, in the order of the questions' texts."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        prompt = hermes_template().decode(request.prompt_ids)
        question = next(question for question in asked if question in prompt)
        answer = eval(question.rpartition(":")[2].rstrip("= "))
        return text_reply(str(answer + asked.index(question) % 2))

    return script


async def play(door: str, rows: list[dict[str, Any]], asked: list[str]) -> list[tuple[Any, ...]]:
    """Return the tokens, log-probs, reward and sampling parameters of every trajectory of a door."""
    harness = ProgramHarness(guesses(asked))
    params = {"temperature": TEMPERATURE, "top_p": 0.9}
    jobs = [Job(row, group, 0, params, seed=SEED + group) for group, row in enumerate(rows)]
    trajectories = await harness.worker.run(jobs)
    harness.assert_nothing_is_left()
    sent = {
        tuple(request.prompt_ids.tolist()): request.sampling_params for request in harness.server.requests
    }
    played: list[tuple[Any, ...]] = []
    for trajectory in trajectories:
        assert trajectory.output.failure is None, door
        prompt, response = trajectory.output.segments
        assert (prompt.origin, response.origin) == (Origin.PROMPT, Origin.MODEL)
        ids = tuple(prompt.token_ids.tolist())
        played.append(
            (ids, response.token_ids.tolist(), trajectory.reward, trajectory.output.stop_reason, sent[ids])
        )
    return played


def test_the_same_tasks_give_the_same_tokens_and_rewards_through_three_doors() -> None:
    doors = {door: rows_of_door(door) for door in ("rows", "verifiers", "program")}
    asked = [row["raw_prompt"][0]["content"] for row in doors["rows"]]
    assert [row["raw_prompt"] for row in doors["verifiers"]] == [row["raw_prompt"] for row in doors["rows"]]
    by_rows, by_verifiers, by_program = [asyncio.run(play(*door, asked)) for door in doors.items()]
    rewards = [reward for _, _, reward, _, _ in by_rows]
    assert [reward == 1.0 for reward in rewards] == [True, False] * (NUM_TASKS // 2)
    assert by_verifiers == by_rows
    assert by_program == by_rows
