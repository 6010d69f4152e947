"""Tests of `top_logprobs` in the embedded engine, in rollouts and in batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
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
from agent_loop.types import SamplingParams, TokenOutput, same_arrays
from tests.engines.common import EngineCase, make_model_folder
from tests.servers.tiny_embedded import joined, random_prompt, serving, tiny_model

K = 4


def assert_top_of_the_model(model: Any, prompt: Any, output: TokenOutput, *, temperature: float) -> None:
    """Check that the likeliest tokens are those of one forward pass over prompt and completion."""
    ids = torch.from_numpy(joined(prompt, output.token_ids).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    logprobs, token_ids = (logits.double() / (temperature or 1.0)).log_softmax(-1).topk(K)
    assert output.extras["top_token_ids"].dtype == np.int32
    assert output.extras["top_logprobs"].dtype == np.float32
    assert output.extras["top_token_ids"].tolist() == token_ids.tolist()
    np.testing.assert_allclose(output.extras["top_logprobs"], logprobs.numpy(), atol=2e-5)


@pytest.mark.parametrize(
    "variant",
    [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 2}],
    ids=str,
)
def test_the_likeliest_tokens_are_those_of_a_full_forward_pass(variant: dict[str, Any]) -> None:
    model, prompt = tiny_model(), random_prompt(9)

    async def scenario() -> tuple[TokenOutput, TokenOutput, TokenOutput]:
        params = SamplingParams(**variant, max_tokens=12, seed=3, top_logprobs=K)
        async with serving(model) as server:
            whole, plain = await asyncio.gather(
                server.generate(prompt, params, "a"),
                server.generate(prompt, SamplingParams(**variant, max_tokens=12, seed=3), "b"),
            )
            chunks = [chunk async for chunk in server.stream(prompt, params, "c")]
            return whole, plain, TokenOutput.from_chunks(chunks)

    whole, plain, streamed = asyncio.run(scenario())
    assert_top_of_the_model(model, prompt, whole, temperature=variant["temperature"])
    assert_top_of_the_model(model, prompt, streamed, temperature=variant["temperature"])
    assert plain.token_ids == whole.token_ids == streamed.token_ids
    assert not plain.extras


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
