"""Loops that only this package has, in verl's trainer: agent programs on the gateway, and environments."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import open_dict

from tests.helpers import small_tokenizer
from tests.verl.harness import RewardWorker, ScriptedClient, batch_of, run_ours, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240)]

PROGRAM = """
import json
import urllib.request


def solve(row, *, base_url, api_key):
    messages = list(row["raw_prompt"])
    for _ in range(2):
        request = urllib.request.Request(
            f"{base_url}/chat/completions",
            data=json.dumps({"model": "any", "messages": messages}).encode(),
            headers={"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "and now?"}]
    return {"reward": 0.75, "asked": 2}
"""


def test_an_agent_program_on_the_gateway(model: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    batch = batch_of(
        ["a", "b"], agent_name=["agent_program"] * 2, program=[f"{tmp_path / 'agent.py'}:solve"] * 2
    )
    client = ScriptedClient(lambda text: f"I say {len(text) % 7}<|im_end|>")
    handles = [RewardWorker(lambda text: 0.0)]
    output = run_ours(verl_config(model), client, batch, reward_loop_worker_handles=handles)

    assert output.batch["rm_scores"].sum(dim=1).tolist() == [0.75, 0.75]
    assert output.non_tensor_batch["asked"].tolist() == [2, 2]
    for ids, mask in zip(output.batch["responses"], output.batch["response_mask"], strict=True):
        text = small_tokenizer().decode(ids[: int(mask.nonzero().max()) + 1])
        assert text.count("I say") == 2
        assert "and now?" in text
        sampled = small_tokenizer().decode(ids[mask.bool()])
        assert "and now?" not in sampled
    assert len(client.requests) == 4


ENVIRONMENT = """
from agent_loop.environments.base import Environment, Reply


class Guess(Environment):
    def reset(self, row):
        self.number, self.is_found = row["number"], False
        return "Guess a number."

    def reply(self, messages):
        guess = int(messages[-1]["content"].split()[-1])
        self.is_found = guess == self.number
        return Reply("higher", is_over=self.is_found)

    def reward(self, messages):
        return float(self.is_found)
"""


def test_an_environment_of_a_user(model: Path, tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(ENVIRONMENT)
    config = verl_config(model, multi_turn__max_assistant_turns=3)
    with open_dict(config):
        environments = {"guess": f"{tmp_path / 'guess.py'}:Guess"}
        config.agent_loop_config = {"rollout": {"multi_turn": {"environments": environments}}}
    batch = batch_of(["Play.", "Play."], agent_name=["environment_agent"] * 2, number=[2, 9])
    client = ScriptedClient(lambda text: f"I say {1 + text.count('higher')}<|im_end|>")
    output = run_ours(config, client, batch, reward_loop_worker_handles=[RewardWorker(lambda text: -1.0)])

    assert output.batch["rm_scores"].sum(dim=1).tolist() == [1.0, 0.0]
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4, 6]
