"""Tiny policy, and rollouts that sample from the policy without servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, Row, as_token_ids

VOCABULARY = 24
PAD = 0
REWARDED = 7
"""Token that the reward counts."""


def tiny_policy(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    model = WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), pad_token="0", unk_token="0")


class FakeTemplate:
    tokenizer = tiny_tokenizer()

    @property
    def pad_token_id(self) -> int:
        return PAD


class FakeRollouts:
    """Manager stub that samples two short turns with a fixed tool reply between them.

    The sampled tokens depend on the weights and their version only.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        *,
        on_run: Callable[[int], None] | None = None,
        hangs_at: int | None = None,
    ) -> None:
        self.template = FakeTemplate()
        self.weight_version = 0
        self.rows: list[Sequence[Row]] = []
        self.was_cancelled = False
        self._model = model
        self._on_run = on_run or (lambda version: None)
        self._hangs_at = hangs_at

    def check_rows(self, rows: Iterable[Row]) -> None:
        pass

    async def run(
        self,
        rows: Sequence[Row],
        *,
        n: int | None = None,
        validate: bool = False,
        num_groups: int | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        journal: object = None,
        label: str = "",
        greedy: bool = False,
    ) -> list[Trajectory]:
        self.loop = asyncio.get_running_loop()
        if not validate:
            self.rows.append(rows)
            self._on_run(self.weight_version)
            if self.weight_version == self._hangs_at:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.was_cancelled = True
        generator = torch.Generator().manual_seed(1000 + self.weight_version)
        trajectories = [
            sample_trajectory(
                self._model,
                row,
                group=group,
                rollout=rollout,
                generator=generator,
                weight_version=self.weight_version,
            )
            for group, row in enumerate(rows)
            for rollout in range(n or 1)
        ]
        for trajectory in trajectories if on_trajectory else ():
            on_trajectory(trajectory)
        return trajectories

    def check_forks(self) -> None:
        pass

    async def run_forks(self, forks: Sequence[Any], **options: Any) -> list[Trajectory]:
        raise AssertionError("trajectories without messages cannot be forked")

    @asynccontextmanager
    async def awake(self) -> AsyncGenerator[None]:
        yield

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int) -> None:
        missing, unexpected = self._model.load_state_dict(dict(weights), strict=False)
        assert missing in ([], ["lm_head.weight"])
        assert unexpected == []
        self.weight_version = weight_version


@torch.no_grad()
def sample_trajectory(
    model: Qwen3ForCausalLM,
    row: Row,
    *,
    generator: torch.Generator,
    group: int = 0,
    rollout: int = 0,
    weight_version: int = 0,
    num_tokens: tuple[int, int] = (3, 2),
    has_logprobs: bool = True,
) -> Trajectory:
    """Return a trajectory of two model turns of `num_tokens` with a tool reply between them.

    The reward is the share of `REWARDED` among the sampled tokens.
    """
    prompt = [int(word) for word in row["raw_prompt"][0]["content"].split()]
    ids = list(prompt)
    segments = [Segment(as_token_ids(prompt), Origin.PROMPT)]
    sampled: list[int] = []
    for turn, length in enumerate(num_tokens):
        if turn:
            reply = [2, 3 + turn]
            ids += reply
            segments.append(Segment(as_token_ids(reply), Origin.TOOL))
        turn_ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(length):
            logits: Any = model(torch.tensor([ids])).logits[0, -1]
            distribution = logits.log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            turn_ids.append(token)
            ids.append(token)
            logprobs.append(float(distribution[token]))
        segments.append(
            Segment(
                as_token_ids(turn_ids),
                Origin.MODEL,
                np.array(logprobs, np.float32) if has_logprobs else None,
                weight_version,
            )
        )
        sampled += turn_ids
    return Trajectory(
        output=AgentLoopOutput(segments=segments),
        row=row,
        group=group,
        rollout=rollout,
        reward=sampled.count(REWARDED) / len(sampled),
        reward_extra={},
    )


def sample_trajectories(
    model: Qwen3ForCausalLM, *, num_groups: int = 4, n: int = 6, seed: int = 0, has_logprobs: bool = True
) -> list[Trajectory]:
    """Return trajectories with prompts and turns of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        sample_trajectory(
            model,
            {"raw_prompt": [{"role": "user", "content": " ".join(map(str, range(4, 5 + group)))}]},
            group=group,
            rollout=rollout,
            generator=generator,
            num_tokens=(1 + rollout % 3, 1 + group),
            has_logprobs=has_logprobs,
        )
        for group in range(num_groups)
        for rollout in range(n)
    ]
