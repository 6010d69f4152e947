"""Small random models and servers for the tests of the embedded engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.types import IntArray, SamplingParams, TokenOutput

VOCAB_SIZE = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=200)


def build(config: Any, *, seed: int = 0) -> Any:
    """Create a model with random weights, which are large enough that two tokens rarely have equal logits."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    return model.eval()


def tiny_model(*, seed: int = 0, **changes: Any) -> Any:
    return build(Qwen3Config(**{**SIZES, "head_dim": 16, **changes}), seed=seed)


@cache
def shared_model() -> Any:
    """Return the model of many tests, which serve copies of it."""
    return tiny_model()


@asynccontextmanager
async def serving(
    model: Any = None, *, eos_token_ids: Sequence[int] | None = None, **settings: Any
) -> AsyncIterator[EmbeddedServer]:
    """Start a server with a copy of the model, and close it at the end."""
    model = shared_model() if model is None else model
    config = EmbeddedConfig(**{"max_model_len": 256, **settings})
    server = EmbeddedServer(copy.deepcopy(model), config=config, eos_token_ids=eos_token_ids)
    try:
        yield server
    finally:
        await server.close()


def random_prompt(length: int, *, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, length).astype(np.int32)


def joined(*parts: Sequence[int] | IntArray) -> IntArray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


async def generate_all(
    server: EmbeddedServer,
    prompts: Sequence[IntArray],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    concurrency: int = 1000,
    prefix: str = "r",
) -> list[TokenOutput]:
    all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    semaphore = asyncio.Semaphore(concurrency)

    async def generate(index: int) -> TokenOutput:
        async with semaphore:
            return await server.generate(prompts[index], all_params[index], f"{prefix}{index}")

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(index)) for index in range(len(prompts))]
    return [task.result() for task in tasks]


async def wait_until(server: EmbeddedServer, condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. It is checked after each step, because commands run between two steps."""
    while not condition():
        await server.abort("unknown session")


async def wait_until_decoded(server: EmbeddedServer, count: int) -> None:
    await wait_until(server, lambda: server.stats.decoded_tokens >= count)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def full_forward_logprobs(
    model: Any, prompt_ids: IntArray, token_ids: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Return the log-probs of a completion, computed by one plain forward of the whole sequence."""
    ids = torch.from_numpy(joined(prompt_ids, token_ids).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
    logprobs = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def assert_exact(
    prompt_ids: IntArray, output: TokenOutput, *, model: Any = None, temperature: float = 1.0
) -> None:
    """Compare the log-probs of a completion with those of one plain forward."""
    model = shared_model() if model is None else model
    expected = full_forward_logprobs(model, prompt_ids, output.token_ids, temperature=temperature)
    assert output.log_probs == pytest.approx(expected, abs=1e-4)
