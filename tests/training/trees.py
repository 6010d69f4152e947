"""Batches whose rows share prefixes, and tiny models of several families."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.training.fakes import PAD, VOCABULARY, tiny_policy

WINDOW = 4
MODELS = ("qwen3", "llama", "gemma3", "mistral", "gpt_neox")


def tiny_model(kind: str) -> Any:
    """Return a model with random weights. Those of Gemma 3 and Mistral have a sliding window of four tokens."""
    if kind == "qwen3":
        return tiny_policy()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    match kind:
        case "llama":
            model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
        case "gemma3":
            config = Gemma3TextConfig(
                **sizes, num_key_value_heads=1, head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2
            )
            model = Gemma3ForCausalLM(config)
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=WINDOW))
        case "gpt_neox":
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))
        case _:
            raise ValueError(kind)
    return model.eval()


def random_tree(random: Random, *, num_rows: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Return rows of at least one token, each of which branches off a random token of another row."""
    rows: list[list[int]] = [[random.randrange(vocabulary) for _ in range(random.randint(1, longest))]]
    while len(rows) < num_rows:
        start = random.choice(rows)
        start = start[: random.randint(0, len(start))]
        end = [random.randrange(vocabulary) for _ in range(random.randint(0 if start else 1, longest))]
        rows.append(start + end)
    return rows


def trajectory(prompt: Sequence[int], *runs: tuple[Sequence[int], bool], group: int = 0) -> Trajectory:
    """Return a trajectory of a prompt and runs of tokens, each with whether the model sampled it."""
    segments = [Segment(as_token_ids(list(prompt)), Origin.PROMPT)]
    for ids, is_models in runs:
        tokens = as_token_ids(list(ids))
        logprobs = np.full(len(ids), -1.0, np.float32)
        segments.append(
            Segment(tokens, Origin.MODEL, logprobs, 0) if is_models else Segment(tokens, Origin.TOOL)
        )
    return Trajectory(AgentLoopOutput(segments=segments), {}, group, 0, 0.0, {})


def tree_batch(random: Random, *, num_rows: int, longest: int) -> RolloutBatch:
    """Return a batch of a random tree of turns, whose rows have prompts of one to five tokens."""
    rows = random_tree(random, num_rows=num_rows, vocabulary=VOCABULARY - 2, longest=longest)
    trajectories: list[Trajectory] = []
    for row in rows:
        ids = [token + 2 for token in (*row, *random.choices(range(5), k=2))]
        first = random.randint(1, min(5, len(ids) - 1))
        second = random.randint(first + 1, len(ids))
        runs = [(ids[first:second], True), (ids[second:], False)]
        if random.random() < 0.5 and second < len(ids) - 1:
            runs = [(ids[first:second], True), (ids[second:-1], False), (ids[-1:], True)]
        trajectories.append(trajectory(ids[:first], *(run for run in runs if run[0])))
    return assemble(trajectories, pad_token_id=PAD)


def forked_batch() -> RolloutBatch:
    """Return rows that fork after the prompt, after a tool's reply, at the last token and nowhere.

    One row is a prefix of another.
    """
    prompt, tool = [4, 5, 6], ([8, 9], False)
    return assemble(
        [
            trajectory(prompt, ([7, 2], True), tool, ([10, 11, 3], True)),
            trajectory(prompt, ([12], True)),
            trajectory(prompt, ([7, 2], True), tool, ([10, 11, 4], True)),
            trajectory(prompt, ([7, 2], True), tool, ([13], True)),
            trajectory(prompt, ([7, 2], True), tool, ([10, 11, 3], True)),
            trajectory(prompt, ([7, 2], True)),
        ],
        pad_token_id=PAD,
    )
