"""A real engine behind verl's interface of servers, and rows of verl's GSM8K files in both homes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

from transformers import Qwen3ForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

from agent_loop.config import MultiTurnConfig, RolloutConfig
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.embedded.server import EmbeddedServer
from agent_loop.servers.scripted import ScriptedServer
from tests.helpers import hermes_template, small_tokenizer, text_reply
from tests.verl.harness import assert_same, completion, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

MAX_TOKENS = 24
VERSIONS = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"))
"""Fields that verl's client adds to completions of servers without versions."""
TOOLS = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config: {type: native}
"""


class EngineClient:
    """verl's client of an embedded engine."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **more: Any
    ) -> TokenOutput:
        params = {
            **sampling_params,
            "max_tokens": min(MAX_TOKENS, sampling_params.get("max_tokens", MAX_TOKENS)),
        }
        return await completion(
            self._server, request_id, prompt_ids=prompt_ids, sampling_params=params, **VERSIONS
        )


def dataset_batch(config: Any, file: Path) -> DataProto:
    """Return verl's batch of a file, as its V0 trainer sends it for validation."""
    dataset = RLHFDataset(str(file), small_tokenizer(), config.data)
    batch = DataProto.from_single_dict(collate_fn([dataset[index] for index in range(len(dataset))]))
    return DataProto.from_dict(
        non_tensors={**batch.non_tensor_batch, "uid": np.array(list("abcd"), dtype=object)},
        meta_info={"validate": True},
    )


def test_a_real_engine_gives_both_managers_the_same_batch_of_a_gsm8k_file(model: Path, gsm8k: Path) -> None:
    config = verl_config(model, val_kwargs__temperature=0)

    async def run() -> tuple[DataProto, DataProto]:
        server = EmbeddedServer(Qwen3ForCausalLM.from_pretrained(model))
        try:
            client = EngineClient(server)
            verls = await AgentLoopWorker(config, client).generate_sequences(dataset_batch(config, gsm8k))
            ours = await VerlRolloutWorker(config, client).generate_batch(dataset_batch(config, gsm8k))
        finally:
            await server.close()
        return ours, verls

    ours, verls = asyncio.run(run())
    assert ours.batch["response_mask"].sum() > 0
    logprobs = [batch.batch.pop("rollout_log_probs") for batch in (ours, verls)]
    assert (logprobs[0] - logprobs[1]).abs().max() < 1e-4  # batches of the engine differ in size
    for batch in (ours, verls):
        batch.meta_info["timing"] = dict.fromkeys(batch.meta_info.pop("metrics")[0])
    assert_same(ours, verls)


def test_the_same_file_runs_in_this_package(gsm8k: Path, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(TOOLS)
    multi_turn = MultiTurnConfig(tool_config_path=str(tmp_path / "tools.yaml"))
    rows = load_rows([str(gsm8k)], prompt_key="prompt")

    async def run() -> Any:
        config = RolloutConfig(prompt_length=800, response_length=64, multi_turn=multi_turn)
        server = ScriptedServer(lambda request: text_reply("#### 2"))
        async with AgentLoopManager(config, servers=[server], template=hermes_template()) as manager:
            return await manager.generate_sequences(rows)

    batch = asyncio.run(run())
    assert len(batch) == 4
    assert set(batch["data_source"]) == {"openai/gsm8k"}
