"""Helpers for tests of all engines: a tiny model, its expected completions, schemas, and whole runs with it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agent_loop.checks import Reference, check_server
from agent_loop.config import Config, load_config
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.base import AsyncServerBase, ServerSpec
from agent_loop.servers.embedded.grammar import GrammarCompiler
from agent_loop.servers.factory import create_servers
from agent_loop.testing.conformance import CheckReport
from agent_loop.tiny_models.tokenizer import end_id, pad_id, train_tokenizer
from agent_loop.tools.registry import load_tools
from agent_loop.training import metrics as names
from agent_loop.training.metrics import read_metrics
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


async def train_three_steps(case: EngineCase, model_path: Path, *, folder: Path) -> None:
    """Train the example with GRPO. The log-probs of rollouts show that the engine has the weights of each step."""
    config = case.config(
        model_path,
        data__train_batch_size=8,
        rollout__n=4,
        actor__lr="1e-3",
        trainer__total_steps=3,
        trainer__run_dir=folder / "run",
    )
    result = await PPOTrainer(config, console=Console(quiet=True)).fit()
    steps = [line for line in read_metrics(result.run_dir / "metrics.jsonl") if line["step"] > 0]
    assert len(steps) == 3
    for line in steps:
        assert line[names.LOGPROB_DIFF_MAX] < 10 * LOG_PROB_TOLERANCE
        assert line[names.GRAD_NORM] > 0


async def check_contract(server: AsyncServerBase, model_path: Path) -> CheckReport:
    """Start a server that was not started, run the conformance suite, and close the server."""
    await server.start()
    try:
        reference = Reference.load(model_path)
        report = await check_server(server, max_model_len=MAX_MODEL_LEN, reference=reference, on_result=print)
    finally:
        await server.close()
    report.raise_if_failed()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return report


@cache
def _tokenizer() -> tuple[Any, list[dict[str, Any]]]:
    schemas = [
        tool.tool_schema for tool in load_tools(load_config(TASK_CONFIG).rollout.multi_turn.tools).values()
    ]
    conversations = demonstrations(task, rng=random.Random(0), habit=Habit(first_step_share=0.5))
    return train_tokenizer(islice(conversations, TOKENIZER_CONVERSATIONS), tools=schemas), schemas


# -- completions under a JSON schema ---------------------------------------------------------------------------------

COLOURS = ("red", "green", "blue", "bluish")
SCHEMA = json.dumps({"enum": COLOURS})
"""A schema without optional white space, so that all engines allow the same tokens."""
LETTERS = json.dumps({"type": "string", "pattern": "^[ab]{120}$"})
"""A schema that takes long, and in which no token is white space."""


def constrained_logprobs(
    model: Any, path: Path, prompt: IntArray, output: TokenOutput, *, temperature: float
) -> list[float]:
    """Return log-probs of the distribution over the tokens that `SCHEMA` allows, by one forward over all tokens."""
    end = int(model.generation_config.eos_token_id)
    vocab_size = int(model.config.vocab_size)
    compiler = GrammarCompiler(str(path), vocab_size=vocab_size, eos_token_ids=frozenset({end}))
    grammar = compiler.grammar(SCHEMA, stop_token_ids=frozenset({end}))
    ids = torch.tensor([*prompt.tolist(), *output.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].double()
    found: list[float] = []
    for row, token in zip(logits / (temperature or 1.0), output.token_ids, strict=True):
        allowed = torch.from_numpy(grammar.allowed(vocab_size))
        found.append(float(row.masked_fill(~allowed, -torch.inf).log_softmax(-1)[token]))
        grammar.accept(token)
    return found


async def assert_logprobs_are_of_the_allowed_tokens(
    server: AsyncServerBase, model: Any, path: Path, *, temperature: float
) -> None:
    """Compare completions under a schema with the constrained distribution of the reference."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    all_prompts = prompts(12, seed=9)
    params = SamplingParams(temperature=temperature, max_tokens=40, json_schema=SCHEMA, top_logprobs=5)
    outputs = await generate_all(server, all_prompts, params, prefix=f"schema-{temperature}-")
    texts: set[str] = set()
    num_forced = 0
    for prompt, output in zip(all_prompts, outputs, strict=True):
        assert output.stop_reason == "stop"
        texts.add(json.loads(tokenizer.decode(output.token_ids[:-1])))
        expected = constrained_logprobs(model, path, prompt, output, temperature=temperature)
        np.testing.assert_allclose(output.log_probs or [], expected, atol=LOG_PROB_TOLERANCE)
        is_forced = [logprob == 0.0 for logprob in expected]
        assert output.chunks[0].with_forced().extras["forced"].tolist() == is_forced
        num_forced += sum(is_forced)
    assert texts <= set(COLOURS)
    assert len(texts) > 1
    assert num_forced >= len(outputs)


async def assert_penalties_give_log_probs_of_the_penalised_logits(
    server: AsyncServerBase, model: Any, *, has_repetition: bool = True, counts_late: bool = False
) -> None:
    """Compare completions with penalties with the reference's penalised logits.

    Args:
        has_repetition: Whether the server has `repetition_penalty`.
        counts_late: Whether each token counts one step late, and the last token of the prompt at first.
    """
    prompt = prompts(1, seed=10)[0]
    factor = 1.3 if has_repetition else 1.0
    params = SamplingParams(
        temperature=0.8,
        max_tokens=24,
        ignore_eos=True,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=factor,
    )
    output = await server.generate(prompt, params, "penalties")
    ids = torch.tensor([*prompt.tolist(), *output.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].double()
    expected: list[float] = []
    for place, row in enumerate(logits):
        counted = [int(prompt[-1]), *output.token_ids] if counts_late else output.token_ids
        before = counted[:place]
        for token in {*prompt.tolist(), *before}:
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in set(before):
            row[token] -= 0.7 + 0.4 * before.count(token)
        expected.append(float((row / 0.8).log_softmax(-1)[output.token_ids[place]]))
    np.testing.assert_allclose(output.log_probs or [], expected, atol=LOG_PROB_TOLERANCE)


def assert_are_letters(path: Path, outputs: Sequence[TokenOutput]) -> None:
    """Check that completions are whole and match `LETTERS`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    for output in outputs:
        text = tokenizer.decode(output.token_ids)
        assert output.stop_reason == "stop", text
        assert re.fullmatch('"[ab]{120}"', tokenizer.decode(output.token_ids[:-1])), text
