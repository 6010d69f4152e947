"""What docs/from-verl.md promises of loops on token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.config import Config, load_config
from agent_loop.integrations.verl import (
    AgentLoopBase,
    AgentLoopOutput,
    build_gpt_oss_tool_response_text,
    register,
)
from agent_loop.rewards.function import RewardFunction, load_reward
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.trajectory import IncidentKind, Trajectory
from tests.helpers import hermes_template, text_reply

RULES = "agent_loop.integrations.verl.rules:default_compute_score"
RESPONSE_LENGTH = 24


@register("one_shot_on_ids")
class OneShot(AgentLoopBase):
    """Loop in verl's form that returns what it gets, repeated as often as the row says."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        rollout = self.config.actor_rollout_ref.rollout
        assert rollout.prometheus.port is None
        assert self.config.trainer.get("balance_batch")
        assert self.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu > 0
        prompt_ids = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True
        )
        output = await self.server_manager.generate(
            request_id="1", prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        response_ids = list(output.token_ids) * kwargs.get("times", 1)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=[1] * len(response_ids),
            num_turns=2,
            metrics={},
        )


def row(**columns: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "raw_prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "agent_name": "one_shot_on_ids",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 0, "split": "train", "interaction_kwargs": {"query": "What is 6 * 7?"}},
        **columns,
    }


def run(
    rows: Sequence[dict[str, Any]],
    *replies: ScriptedReply,
    reward: RewardFunction | None = None,
    **multi_turn: Any,
) -> list[Trajectory]:
    config: Config = load_config(
        overrides=[f"rollout.response_length={RESPONSE_LENGTH if not multi_turn else 512}"]
    )
    rollout = config.rollout.model_copy(
        update={"multi_turn": config.rollout.multi_turn.model_copy(update=multi_turn)}
    )

    def script(request: ScriptedRequest) -> ScriptedReply:
        return replies[request.turn]

    async def main() -> list[Trajectory]:
        server = ScriptedServer(script)
        manager = AgentLoopManager(
            rollout, servers=[server], template=hermes_template(), settings=config, reward=reward
        )
        async with manager:
            return await manager.run(rows, n=1)

    return run_virtual(main())


def test_the_rule_of_a_row_scores_the_text_of_a_loop_on_token_ids() -> None:
    reward = load_reward(RULES, timeout_s=10)
    [right] = run([row()], text_reply("It is\n#### 42"), reward=reward)
    [wrong] = run([row()], text_reply("It is\n#### 41"), reward=reward)
    assert (right.reward, wrong.reward) == (1.0, 0.0)


def test_an_output_over_the_limit_is_cut_and_named_and_the_batch_goes_on() -> None:
    long, short = run([row(times=20), row()], text_reply("#### 42"))
    assert long.output.failure is None
    assert len(long.output.response_ids) == len(long.output.response_mask) == RESPONSE_LENGTH
    [incident] = [i for i in long.output.incidents if i.kind is IncidentKind.TRUNCATED_RESPONSE]
    assert str(RESPONSE_LENGTH) in incident.detail
    assert short.output.incidents == ()


def test_replies_in_the_format_of_gpt_oss_are_written_by_hand() -> None:
    text = build_gpt_oss_tool_response_text([{"content": "42"}], ["multiply"])
    assert text == (
        "<|start|>functions.multiply to=assistant<|channel|>commentary<|message|>42<|end|><|start|>assistant"
    )
