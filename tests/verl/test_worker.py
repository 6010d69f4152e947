"""What only this package does in verl's trainer: failures, own loops and settings, and leases of verl's balancer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf, open_dict
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

import tests.verl.user_code  # noqa: F401  (registers a loop)
from agent_loop.errors import ConfigError, RolloutError
from agent_loop.integrations.verl import VerlAgentLoopManager
from tests.helpers import small_tokenizer
from tests.verl.harness import (
    ScriptedClient,
    batch_of,
    calling,
    run_ours,
    saying_a_number,
    scored,
    verl_config,
)

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

FOLDER = Path(__file__).parent


def test_a_row_that_breaks_has_no_gradient_and_the_mean_score_of_its_group(model: Path) -> None:
    config = verl_config(model, agent__default_agent_loop="two_turns")
    scores = scored(lambda text: float(text.count("hello")))
    batch = batch_of(["a", "break", "a", "a"], uid=["1", "1", "1", "2"])
    output = run_ours(config, lambda text: "hello<|im_end|>", batch, **scores)
    assert output.batch["response_mask"].sum(dim=1).tolist()[1] == 0
    assert output.batch["rm_scores"].sum(dim=1).tolist() == [2, 2, 2, 2]
    assert output.batch["attention_mask"][1, 400:].sum() == 1
    [worker] = scores["reward_loop_worker_handles"]
    assert len(worker.requests) == 3


def test_a_batch_that_mostly_breaks_stops_the_run_with_the_error(model: Path) -> None:
    config = verl_config(model, agent__default_agent_loop="two_turns")
    with pytest.raises(RolloutError, match=r"2 of 3 trajectories failed(.|\n)*this row breaks"):
        run_ours(config, lambda text: "hi<|im_end|>", batch_of(["break", "a", "break"]))


def test_an_interaction_yaml_of_an_earlier_verl_continues_the_conversation(model: Path) -> None:
    config = verl_config(model, agent__default_agent_loop="tool_agent")
    key = "agent_loop_config.rollout.multi_turn.interaction_config_path"
    OmegaConf.update(config, key, str(FOLDER / "interactions.yaml"), force_add=True)

    def reply(text: str) -> str:
        return f"#### {1 + text.count('<|im_start|>assistant')}<|im_end|>"

    rows = batch_of(["one plus two?"], interaction_kwargs=[{"name": "gsm8k", "ground_truth": "3"}])
    output = run_ours(config, reply, rows)
    assert output.non_tensor_batch["turn_scores"].tolist() == [[0.0, 1.0]]
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("trainer.rundir", "x", "agent_loop_config: unknown key 'trainer.rundir'; did you mean 'run_dir'"),
        ("trainer.keep_trajectories", -1, "agent_loop_config: trainer.keep_trajectories is -1"),
    ],
)
def test_a_wrong_setting_is_named_before_an_actor_starts(
    key: str, value: Any, message: str, model: Path
) -> None:
    config = verl_config(model)
    OmegaConf.update(config, f"agent_loop_config.{key}", value, force_add=True)
    with pytest.raises(ConfigError, match=message):
        VerlAgentLoopManager.create(config, llm_client=None)


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
    client = ScriptedClient(saying_a_number)
    output = run_ours(verl_config(model), client, batch, **scored(lambda text: 0.0))

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

    def reply(text: str) -> str:
        return f"I say {1 + text.count('higher')}<|im_end|>"

    output = run_ours(config, reply, batch, **scored(lambda text: -1.0))

    assert output.batch["rm_scores"].sum(dim=1).tolist() == [1.0, 0.0]
    assert output.non_tensor_batch["__num_turns__"].tolist() == [4, 6]


class InProcess:
    """An object with the call syntax of a Ray actor, which counts its calls."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, actor: InProcess, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, **arguments: Any) -> Any:
        self._actor.calls.append(self._name)
        result = getattr(self._actor._wrapped, self._name)(**arguments)
        return result if hasattr(result, "__await__") else Result(result)


class Result:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self._value
        yield


def test_a_trajectory_acquires_a_server_once_and_releases_it(model: Path) -> None:
    config = verl_config(
        model,
        multi_turn__tool_config_path=str(FOLDER / "counter_tool.yaml"),
        agent__default_agent_loop="tool_agent",
    )

    def reply(text: str) -> str:
        if "user\nbreak" in text:
            raise RuntimeError("the server is gone")
        return calling("count", step=1)(text)

    server = InProcess(ScriptedClient(reply))
    router = GlobalRequestLoadBalancer({"a": server})
    balancer = InProcess(router)
    batch = batch_of(["x", "break", "y"])
    output = run_ours(config, LLMServerClient(config, load_balancer_handle=balancer), batch)
    assert output.non_tensor_batch["__num_turns__"].tolist()[::2] == [4, 4]
    assert server.calls == ["generate"] * 5
    assert balancer.calls.count("acquire_server") == balancer.calls.count("release_server") == 3
    assert router.get_total_inflight() == 0
