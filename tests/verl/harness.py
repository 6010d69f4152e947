"""Runs of verl's own agent loop worker and of `VerlRolloutWorker`, in one process, with the same scripted client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
import verl.trainer.config
from omegaconf import OmegaConf, open_dict
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput

from agent_loop.integrations.verl.manager.batch import joined
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker
from agent_loop.servers.embedded.server import EmbeddedServer
from agent_loop.types import SamplingParams
from tests.helpers import call_text, encoded, small_tokenizer

CONFIG = Path(verl.trainer.config.__file__).parent / "_generated_ppo_trainer.yaml"
PROMPT_LENGTH, RESPONSE_LENGTH = 400, 320

Reply = Callable[[str], str]
"""Returns the model's completion for the text so far."""


class ScriptedClient:
    """verl's client with completions from a function. Limits completions as verl's servers do."""

    def __init__(self, reply: Reply, *, global_steps: int | None = 3) -> None:
        self._reply = reply
        self._global_steps = global_steps
        self.requests: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        assert all(type(token_id) is int for token_id in prompt_ids)
        self.requests.append({"request_id": request_id, **sampling_params, **more})
        await asyncio.sleep(0)
        default = min(RESPONSE_LENGTH, PROMPT_LENGTH + RESPONSE_LENGTH - len(prompt_ids))
        ids = encoded(self._reply(small_tokenizer().decode(prompt_ids)))
        ids = ids[: max(1, sampling_params.get("max_tokens", default))]
        versions = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), self._global_steps)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.25 * (1 + index % 7) for index in range(len(ids))],
            stop_reason="completed",
            num_preempted=1,
            extra_fields={"num_cached_tokens": 1, **versions},
        )


async def completion(
    server: EmbeddedServer,
    request_id: str,
    *,
    prompt_ids: list[int],
    sampling_params: dict[str, Any],
    **fields: Any,
) -> TokenOutput:
    """Return an embedded engine's completion as verl's servers return it, with extra fields."""
    params = {name: value for name, value in sampling_params.items() if name != "logprobs"}
    output = await server.generate(np.array(prompt_ids, np.int32), SamplingParams.parse(params), request_id)
    return TokenOutput(
        token_ids=output.token_ids,
        log_probs=output.log_probs,
        stop_reason="completed",
        extra_fields=fields,
    )


class RewardWorker:
    """verl's reward worker without Ray. Scores the text of a response and keeps its requests."""

    def __init__(self, score: Callable[[str], float]) -> None:
        self._score = score
        self.requests: list[DataProto] = []

    @property
    def compute_score(self) -> Any:
        return self

    async def remote(self, data: DataProto) -> dict[str, Any]:
        self.requests.append(data)
        score = self._score(small_tokenizer().decode(data.batch["responses"][-1]))
        return {"reward_score": score, "reward_extra_info": {"acc": score > 0, "score": score}}


def scored(score: Callable[[str], float]) -> dict[str, Any]:
    """Return the option of a worker whose trajectories are scored by their text."""
    return {"reward_loop_worker_handles": [RewardWorker(score)]}


def calling(name: str, **arguments: Any) -> Reply:
    """Return a model that calls a tool once, and then says that it is done."""
    call = f"{call_text(name, **arguments)}<|im_end|>"
    return lambda text: "done<|im_end|>" if "<tool_response>" in text else call


def saying_a_number(text: str) -> str:
    return f"I say {len(text) % 7}<|im_end|>"


def verl_config(model: Path, **rollout: Any) -> Any:
    """Return verl's configuration. Names of `rollout` settings have `__` for dots."""
    config = OmegaConf.load(CONFIG)
    with open_dict(config):
        config.actor_rollout_ref.model.path = str(model)
        config.data.max_prompt_length = PROMPT_LENGTH
        config.data.max_response_length = RESPONSE_LENGTH
        config.actor_rollout_ref.rollout.name = "vllm"
        config.actor_rollout_ref.rollout.agent.num_workers = 1
        for name, value in rollout.items():
            OmegaConf.update(config, f"actor_rollout_ref.rollout.{name.replace('__', '.')}", value)
    return config


def batch_of(prompts: Sequence[Any], *, validate: bool = False, **columns: Sequence[Any]) -> DataProto:
    """Return a batch as verl's V0 trainer sends it."""
    arrays = {"raw_prompt": _objects([_messages(prompt) for prompt in prompts])}
    arrays |= {name: _objects(values) for name, values in columns.items()}
    return DataProto.from_dict(non_tensors=arrays, meta_info={"validate": validate, "global_steps": 3})


def run_ours(config: Any, client: Any, batch: DataProto, **options: Any) -> DataProto:
    """Run a batch with this package. The client may be given as the function that completes its texts."""
    client = ScriptedClient(client) if isinstance(client, FunctionType) else client

    async def run() -> DataProto:
        worker = VerlRolloutWorker(config, client, **options)
        return joined([await worker.generate_batch(batch)])

    return asyncio.run(run())


def run_verls(config: Any, client: Any, batch: DataProto, **options: Any) -> DataProto:
    client = ScriptedClient(client) if isinstance(client, FunctionType) else client

    async def run() -> DataProto:
        output = await AgentLoopWorker(config, client, **options).generate_sequences(batch)
        metrics = output.meta_info.pop("metrics")
        timing = AgentLoopManager._performance_metrics(None, [metrics], output)
        output.meta_info = {"timing": timing, **output.meta_info}
        return output

    return asyncio.run(run())


def assert_same(ours: DataProto, verls: DataProto) -> None:
    """Assert that two batches have the same columns of the same types with the same values, apart from times."""
    assert set(ours.batch.keys()) == set(verls.batch.keys())
    for name, tensor in verls.batch.items():
        assert ours.batch[name].dtype == tensor.dtype, name
        assert torch.equal(ours.batch[name], tensor), name
    assert set(ours.non_tensor_batch) == set(verls.non_tensor_batch)
    for name, values in verls.non_tensor_batch.items():
        assert ours.non_tensor_batch[name].dtype == values.dtype, name
        assert list(map(repr, ours.non_tensor_batch[name])) == list(map(repr, values)), name
    assert set(ours.meta_info) == set(verls.meta_info)
    assert set(ours.meta_info["timing"]) == set(verls.meta_info["timing"])
    assert ours.meta_info.get("reward_extra_keys") == verls.meta_info.get("reward_extra_keys")


def _messages(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _objects(values: Sequence[Any]) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
