"""Helpers for tests of all engines: a tiny model, its expected completions, and whole runs with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agent_loop.config import Config, load_config
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.base import AsyncServerBase, ServerSpec
from agent_loop.servers.factory import create_servers
from agent_loop.tiny_models.tokenizer import end_id, pad_id, train_tokenizer
from agent_loop.tools.registry import load_tools
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.trajectory import Trajectory
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from agent_loop.weights.adapted import AdaptedWeights, Factors
from examples.common.demonstrations import Habit, demonstrations
from examples.common.warm_start import encode, warm_start
from examples.two_hop_lookup import task

TASK_CONFIG = "examples/two_hop_lookup/config.yaml"
TOKENIZER_CONVERSATIONS = 500
MAX_MODEL_LEN = 192
"""Sum of the example's limits for prompt and response."""
MAX_ATTEMPTS = 10
"""Attempts to update weights in the middle of a completion, which a fast engine may have ended before."""
MAX_REQUESTS_AT_ONCE = 96
"""Concurrent requests of the engines, so that 64 requests and a few more run without a queue."""
LOG_PROB_TOLERANCE = 2e-5
"""Largest difference between two float32 implementations of one forward."""


@dataclass(frozen=True, slots=True)
class EngineCase:
    """Engine and its settings. Tests of different engines differ only in this."""

    engine: str
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    server_urls: tuple[str, ...] = ()

    def config(self, model_path: Path, **changes: Any) -> Config:
        """Return the configuration of the two-hop example on this engine.

        Args:
            changes: Dotted keys, with `__` for the dot.
        """
        values: dict[str, Any] = {
            "model.path": model_path,
            "rollout.engine": self.engine,
            "rollout.start_timeout_s": 300,
            "rollout.request_timeout_s": 120,
            **{f"rollout.engine_kwargs.{key}": value for key, value in self.engine_kwargs.items()},
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        if self.server_urls:
            values["rollout.server_urls"] = f"[{','.join(self.server_urls)}]"
        return load_config(TASK_CONFIG, overrides=[f"{key}={value}" for key, value in values.items()])

    def server(self, model_path: Path, **changes: Any) -> AsyncServerBase:
        """Create one server that is not started."""
        config = self.config(model_path, **changes)
        (server,) = create_servers(config.model, rollout=config.rollout)
        return server

    def spec(self, model_path: Path, **changes: Any) -> ServerSpec:
        """Return the spec of a server for `config`."""
        config = self.config(model_path, **changes)
        return ServerSpec(
            name=f"{self.engine}-0",
            model=config.model,
            max_model_len=config.rollout.prompt_length + config.rollout.response_length,
            engine_kwargs=config.rollout.engine_kwargs,
            start_timeout_s=config.rollout.start_timeout_s,
        )


def make_model_folder(
    path: Path, *, is_tied: bool, seed: int = 0, warm_start_steps: int = 0, **changes: Any
) -> Path:
    """Write a Qwen3 model of about 140,000 weights with the example's tokenizer and chat template.

    Heads have 32 dimensions, the minimum of CPU builds of engines. Without warm start the weights are random, and
    large enough that two tokens hardly ever tie. A few hundred steps teach the model to call the example's tools.
    """
    tokenizer, tools = _tokenizer()
    config = Qwen3Config(
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": is_tied,
            "initializer_range": 0.06 if warm_start_steps else 0.2,
            "eos_token_id": end_id(tokenizer),
            "pad_token_id": pad_id(tokenizer),
            **changes,
        }
    )
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = end_id(tokenizer)
    model.generation_config.pad_token_id = pad_id(tokenizer)
    if warm_start_steps:
        conversations = demonstrations(task, rng=random.Random(seed), habit=Habit(first_step_share=0.5))
        examples = encode(conversations, tokenizer=tokenizer, tools=tools)
        for _ in warm_start(model, examples=examples, pad_id=pad_id(tokenizer), num_steps=warm_start_steps):
            pass
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def load_reference(path: Path) -> Qwen3ForCausalLM:
    """Load the model with `transformers`, as the reference of every engine."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def changed_weights(model: Any, *, seed: int, scale: float = 0.02) -> dict[str, torch.Tensor]:
    """Return all weights, tied ones once, with enough noise to change the model's completions."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight.detach() + scale * torch.randn(weight.shape, generator=generator)
        for name, weight in model.named_parameters()
    }


def adapted_weights_of(model: Any, *, seed: int, base_id: str, rank: int = 4) -> AdaptedWeights:
    """Return the model's weights as a base, with adapters on all linear layers that change the completions."""
    generator = torch.Generator().manual_seed(seed)
    base = {name: weight.detach() for name, weight in model.named_parameters()}
    factors = {
        name: Factors(
            0.05 * torch.randn(weight.shape[0], rank, generator=generator),
            torch.randn(rank, weight.shape[1], generator=generator),
        )
        for name, weight in base.items()
        if name.endswith("_proj.weight")
    }
    return AdaptedWeights(base, base_id=base_id, factors=factors)


def load_into(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Load an engine's weights into a reference model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def prompts(count: int, *, length: int = 24, seed: int = 0, vocab_size: int = 250) -> list[IntArray]:
    """Return prompts of random token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, vocab_size, length).astype(np.int32) for _ in range(count)]


def reference_logprobs(
    model: Any, prompt_ids: IntArray, token_ids: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    """Return log-probs of a completion as `TokenOutput.log_probs` defines them, by one forward over all tokens."""
    ids = torch.tensor([*prompt_ids.tolist(), *token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt_ids) - 1 :]
    logprobs = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


async def assert_scores_are_those_of_the_reference(
    server: AsyncServerBase,
    model: Any,
    *,
    longest: int = MAX_MODEL_LEN,
    num_top: int = 7,
    has_whole_vocabulary: bool = True,
) -> float:
    """Compare the scores of texts of several lengths with one forward each. Return the largest difference."""
    lengths_and_starts = ((2, 1), (24, 1), (24, 24), (100, 60), (longest, 3))
    texts = [prompts(1, length=length, seed=length)[0] for length, _ in lengths_and_starts]
    worst = 0.0
    for num_asked in (num_top, 0, *([model.config.vocab_size + 9] if has_whole_vocabulary else [])):
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(server.score(text, start=start, top_logprobs=num_asked))
                for text, (_, start) in zip(texts, lengths_and_starts, strict=True)
            ]
        for text, (_, start), call in zip(texts, lengths_and_starts, calls, strict=True):
            scores = call.result()
            ids = torch.tensor(text.tolist())
            with torch.no_grad():
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, start - 1 :]
            logprobs = logits.double().log_softmax(-1)
            expected = logprobs.gather(1, ids[start:, None])[:, 0].numpy()
            assert scores.logprobs.shape == (len(text) - start,)
            worst = max(worst, float(np.abs(scores.logprobs - expected).max(initial=0.0)))
            if num_asked:
                values, tokens = logprobs.topk(min(num_asked, model.config.vocab_size))
                assert scores.top_ids is not None
                assert scores.top_logprobs is not None
                worst = max(worst, float(np.abs(scores.top_logprobs - values.numpy()).max(initial=0.0)))
                if num_asked == num_top:
                    np.testing.assert_array_equal(scores.top_ids, tokens.numpy())
    print(f"{server.name}: scores differ from those of transformers by at most {worst:.2g}")
    assert worst < LOG_PROB_TOLERANCE
    return worst


def reference_greedy(model: Any, prompt_ids: IntArray, *, max_tokens: int) -> list[int]:
    """Return a greedy completion, computed by one forward per token, with its end token if there is one."""
    ids = prompt_ids.tolist()
    with torch.no_grad():
        for _ in range(max_tokens):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
            if ids[-1] == model.generation_config.eos_token_id:
                break
    return ids[len(prompt_ids) :]


def largest_difference(model: Any, prompt_ids: IntArray, output: TokenOutput, *, temperature: float) -> float:
    """Return the largest difference between a completion's log-probs and the reference's."""
    assert output.log_probs is not None
    expected = reference_logprobs(model, prompt_ids, output.token_ids, temperature=temperature)
    return max(abs(got - want) for got, want in zip(output.log_probs, expected, strict=True))


async def generate_all(
    server: AsyncServerBase, all_prompts: Sequence[IntArray], params: SamplingParams, *, prefix: str = "r"
) -> list[TokenOutput]:
    """Generate completions concurrently, each in a session of its own."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(server.generate(prompt, params, f"{prefix}{index}"))
            for index, prompt in enumerate(all_prompts)
        ]
    return [task.result() for task in tasks]


async def assert_matches_the_reference(
    server: AsyncServerBase, model: Any, *, seed: int = 0, max_tokens: int = 24
) -> float:
    """Check that greedy tokens equal the reference's. Return the largest difference of a log-prob."""
    all_prompts = prompts(4, seed=seed)
    outputs = await generate_all(
        server, all_prompts, SamplingParams(temperature=0, max_tokens=max_tokens), prefix=f"reference-{seed}-"
    )
    worst = 0.0
    for prompt, output in zip(all_prompts, outputs, strict=True):
        assert output.token_ids == reference_greedy(model, prompt, max_tokens=max_tokens)
        if output.log_probs is not None:
            worst = max(worst, largest_difference(model, prompt, output, temperature=1.0))
    assert worst < LOG_PROB_TOLERANCE
    return worst


async def assert_a_request_in_flight_gets_new_weights(server: AsyncServerBase, model_path: Path) -> None:
    """Update the weights during a completion. Compare its log-probs with both models, and restore the weights."""
    old, new = load_reference(model_path), load_reference(model_path)
    weights = changed_weights(old, seed=31)
    load_into(new, weights)
    prompt, other_prompt = prompts(2, seed=30)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    for _ in range(MAX_ATTEMPTS):  # the completion may end before the update
        version = (await server.health()).weight_version
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.generate(prompt, params, "in flight"))
            await server.generate(other_prompt, SamplingParams(max_tokens=10, ignore_eos=True), "other")
            kv_cache_share = (await server.health()).kv_cache_share or 0
            await server.update_weights(weights.items(), weight_version=version + 1)
        output = task.result()
        if len(output.chunks) == 2:
            break
        await server.update_weights(old.named_parameters(), weight_version=version + 2)
    else:
        pytest.fail("no update took place in the middle of a completion")
    assert 0 < kv_cache_share < 1
    assert [chunk.weight_version for chunk in output.chunks] == [version, version + 1]
    assert (len(output.token_ids), output.num_preempted) == (150, 1)
    first = len(output.chunks[0].token_ids)
    context = np.concatenate([prompt, np.asarray(output.token_ids[:first], dtype=np.int32)])
    expected = [
        *reference_logprobs(old, prompt, output.token_ids[:first]),
        *reference_logprobs(new, context, output.token_ids[first:]),
    ]
    np.testing.assert_allclose(output.log_probs, expected, atol=LOG_PROB_TOLERANCE)
    await server.update_weights(old.named_parameters(), weight_version=version + 2)
    await assert_matches_the_reference(server, old)


async def assert_adapters_are_merged(server: AsyncServerBase, base: Any, *, first_version: int) -> None:
    """Publish two versions of adapters, and compare the completions with the merged model."""
    merged = deepcopy(base)
    for version in (first_version, first_version + 1):
        weights = adapted_weights_of(base, seed=version, base_id="adapted")
        await server.update_weights(weights, weight_version=version)
        load_into(merged, dict(weights))
        await assert_matches_the_reference(server, merged, seed=version)


async def roll_out(case: EngineCase, model_path: Path, *, num_rows: int = 64) -> list[Trajectory]:
    """Run a rollout of `num_rows` rows with the tool agent, with a manager from the configuration."""
    config = case.config(model_path, rollout__n=1, rollout__max_failed_share=0.0)
    rows = load_rows(config.data.val_files, prompt_key=config.data.prompt_key)[:num_rows]
    async with AgentLoopManager.from_config(config) as manager:
        return await manager.run(rows)


def assert_is_token_exact(
    model: Any, trajectories: Iterable[Trajectory], *, temperature: float = 1.0
) -> float:
    """Compare the log-probs of all sampled tokens with one forward per trajectory. Return the largest difference."""
    worst = 0.0
    for trajectory in trajectories:
        output = trajectory.output
        assert output is not None, trajectory
        expected = reference_logprobs(
            model,
            np.asarray(output.prompt_ids, dtype=np.int32),
            output.response_ids,
            temperature=temperature,
        )
        assert output.response_logprobs is not None
        for got, want, is_model in zip(output.response_logprobs, expected, output.response_mask, strict=True):
            if is_model:
                worst = max(worst, abs(got - want))
    assert worst < LOG_PROB_TOLERANCE
    return worst


class ComparingManager(AgentLoopManager):
    """Manager that compares the engine's completions with a fresh load of the weights after each weight update."""

    published: list[int]
    differences: list[float]

    def compare_with(self, *, model_path: Path, folder: Path) -> None:
        """Set the model and the folder that the checkpoints are written to and loaded from."""
        self.published, self.differences = [], []
        self._model_path, self._folder = model_path, folder

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        collected = [(name, weight.clone()) for name, weight in weights]
        await super().update_weights(collected, weight_version=weight_version)
        checkpoint = load_reference(self._model_path)
        load_into(checkpoint, dict(collected))
        path = self._folder / f"published-{weight_version}"
        checkpoint.save_pretrained(path)
        await self.wake_up()
        difference = await assert_matches_the_reference(
            self.server_manager.pool.servers[0], load_reference(path), seed=weight_version
        )
        await self.sleep()
        self.published.append(weight_version)
        self.differences.append(difference)


async def train_three_steps(case: EngineCase, model_path: Path, *, folder: Path) -> ComparingManager:
    """Train the example with GRPO. Compare the engine with a fresh load of the weights after each step."""
    config = case.config(
        model_path,
        data__train_batch_size=8,
        rollout__n=4,
        actor__lr="1e-3",
        trainer__total_steps=3,
        trainer__save_every=3,
        trainer__run_dir=folder / "run",
    )
    async with ComparingManager.from_config(config) as manager:
        manager.compare_with(model_path=model_path, folder=folder)
        result = await PPOTrainer(config, manager=manager, console=Console(quiet=True)).fit()
    assert result.step == 3
    return manager


@cache
def _tokenizer() -> tuple[Any, list[dict[str, Any]]]:
    schemas = [
        tool.tool_schema for tool in load_tools(load_config(TASK_CONFIG).rollout.multi_turn.tools).values()
    ]
    conversations = demonstrations(task, rng=random.Random(0), habit=Habit(first_step_share=0.5))
    return train_tokenizer(islice(conversations, TOKENIZER_CONVERSATIONS), tools=schemas), schemas
