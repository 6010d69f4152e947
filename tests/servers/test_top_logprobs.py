"""Tests of `top_logprobs` in the embedded engine, in rollouts and in batches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.base import AsyncServerBase, refuse_sampling_params
from agent_loop.servers.openai_compatible import OpenAIServer
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.storage import StoredRun, to_trajectory, write_trajectories
from agent_loop.trajectory import Trajectory
from agent_loop.types import SamplingParams, same_arrays
from tests.engines.common import EngineCase, make_model_folder

K = 4


@pytest.mark.parametrize(
    "server", [ScriptedServer(lambda request: [1]), OpenAIServer("http://nowhere", name="openai-0")]
)
def test_a_server_without_the_ability_is_refused_by_name(server: AsyncServerBase) -> None:
    refuse_sampling_params(server, SamplingParams())
    with pytest.raises(
        ConfigError, match=rf"rollout.top_logprobs is 5, which server '{server.name}' .* does not"
    ):
        refuse_sampling_params(server, SamplingParams(top_logprobs=5))


def test_a_rollout_has_the_likeliest_tokens_in_its_batch_and_its_files(tmp_path: Path) -> None:
    path = make_model_folder(tmp_path / "model", is_tied=False)
    config = EngineCase("embedded").config(path, rollout__n=2, rollout__top_logprobs=K)
    rows = load_rows(config.data.val_files, prompt_key=config.data.prompt_key)[:3]

    async def scenario() -> list[Trajectory]:
        async with AgentLoopManager.from_config(config) as manager:
            return await manager.run(rows)

    trajectories = asyncio.run(scenario())
    batch = assemble(trajectories, pad_token_id=0)
    mask, ids, logprobs = (batch[name] for name in ("response_mask", "responses", "rollout_log_probs"))
    assert batch["top_token_ids"].shape == batch["top_logprobs"].shape == (*mask.shape, K)
    assert not batch["top_logprobs"][mask == 0].any()
    is_listed = (batch["top_token_ids"] == ids[..., None]) & mask.bool()[..., None]
    assert is_listed.any()
    listed = (batch["top_logprobs"] * is_listed).sum(-1)[is_listed.any(-1)]
    torch.testing.assert_close(listed, logprobs[is_listed.any(-1)], atol=1e-6, rtol=0)
    write_trajectories(tmp_path / "t.parquet", trajectories, step=0, split="rollout")
    for trajectory in trajectories:
        stored = StoredRun(tmp_path / "t.parquet").trajectory("rollout", 0, trajectory.trajectory_id)
        for mine, its in zip(to_trajectory(stored).output.segments, trajectory.output.segments, strict=True):
            assert same_arrays(mine.extras, its.extras)
