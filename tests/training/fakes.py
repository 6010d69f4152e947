"""Tiny policy, and rollouts that sample from the policy without servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.advantages.groups import grpo_advantages
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

    vocab_size = VOCABULARY

    @property
    def pad_token_id(self) -> int:
        return PAD


class FakeRollouts:
    """Manager stub that samples two short turns with a fixed tool reply between them.

    The sampled tokens depend on the weights and their version only. `edit` changes a trajectory, given the step.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM | None = None,
        *,
        on_run: Callable[[int], None] | None = None,
        hangs_at: int | None = None,
        edit: Callable[[Trajectory, int], Trajectory] | None = None,
    ) -> None:
        self.template = FakeTemplate()
        self.weight_version = 0
        self.rows: list[Sequence[Row]] = []
        self.by_label: dict[str, Sequence[Row]] = {}
        self.was_cancelled = False
        self._model = model or tiny_policy()
        self._on_run = on_run or (lambda version: None)
        self._hangs_at = hangs_at
        self._edit = edit or (lambda trajectory, step: trajectory)

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
            assert label not in self.by_label
            self.by_label[label] = rows
            self._on_run(self.weight_version)
            if self.weight_version == self._hangs_at:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.was_cancelled = True
        generator = torch.Generator().manual_seed(1000 + self.weight_version)
        plans = [Plan(row, group, rollout) for group, row in enumerate(rows) for rollout in range(n or 1)]
        step = self.weight_version + 1
        trajectories = [
            self._edit(trajectory, step)
            for trajectory in sample(self._model, plans, generator=generator, weight_version=step - 1)
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


@dataclass(frozen=True)
class Plan:
    """Trajectory to sample: two model turns of `num_tokens` with a tool reply between them."""

    row: Row
    group: int = 0
    rollout: int = 0
    num_tokens: tuple[int, int] = (3, 2)

    @property
    def prompt(self) -> list[int]:
        return [int(word) for word in self.row["raw_prompt"][0]["content"].split()]


REPLY = [2, 4]
"""Tokens of the tool's reply."""


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    plans: Sequence[Plan],
    *,
    generator: torch.Generator,
    weight_version: int = 0,
    has_logprobs: bool = True,
) -> list[Trajectory]:
    """Return a trajectory for each plan. All of them sample their next token in the same forward.

    The reward is the share of `REWARDED` among the sampled tokens.
    """
    prompts = [plan.prompt for plan in plans]
    sequences = [list(prompt) for prompt in prompts]
    logprobs: list[list[float]] = [[] for _ in plans]
    for step in range(max(sum(plan.num_tokens) for plan in plans)):
        pending = [i for i, plan in enumerate(plans) if step < sum(plan.num_tokens)]
        for i in pending:
            if step == plans[i].num_tokens[0]:
                sequences[i] += REPLY
        width = max(len(sequences[i]) for i in pending)
        # Causal attention: padding on the right changes nothing at the last token.
        ids = torch.tensor([sequences[i] + [PAD] * (width - len(sequences[i])) for i in pending])
        logits: Any = model(ids).logits
        last = logits[range(len(pending)), [len(sequences[i]) - 1 for i in pending]].log_softmax(-1)
        tokens = torch.multinomial(last.exp(), 1, generator=generator).flatten().tolist()
        for row, (i, token) in enumerate(zip(pending, tokens, strict=True)):
            sequences[i].append(token)
            logprobs[i].append(float(last[row, token]))
    return [
        planned_trajectory(
            plan,
            sequence[len(prompt) :],
            logprobs=np.array(values, np.float32) if has_logprobs else None,
            weight_version=weight_version,
        )
        for plan, prompt, sequence, values in zip(plans, prompts, sequences, logprobs, strict=True)
    ]


def planned_trajectory(
    plan: Plan, response: Sequence[int], *, logprobs: np.ndarray | None, weight_version: int
) -> Trajectory:
    """Return the trajectory of `plan` whose tokens after the prompt are `response`."""
    first = plan.num_tokens[0]
    turns = (response[:first], response[first + len(REPLY) :])
    of_turns = (None, None) if logprobs is None else (logprobs[:first], logprobs[first:])
    models = [
        Segment(as_token_ids(ids), Origin.MODEL, values, weight_version)
        for ids, values in zip(turns, of_turns, strict=True)
    ]
    segments = [
        Segment(as_token_ids(plan.prompt), Origin.PROMPT),
        models[0],
        Segment(as_token_ids(REPLY), Origin.TOOL),
        models[1],
    ]
    sampled = [*turns[0], *turns[1]]
    return Trajectory(
        output=AgentLoopOutput(segments=segments),
        row=plan.row,
        group=plan.group,
        rollout=plan.rollout,
        reward=sampled.count(REWARDED) / len(sampled),
        reward_extra={},
    )


def sample_trajectories(
    model: Qwen3ForCausalLM, *, num_groups: int = 4, n: int = 6, seed: int = 0, has_logprobs: bool = True
) -> list[Trajectory]:
    """Return trajectories with prompts and turns of different lengths."""
    plans = [
        Plan(
            {"raw_prompt": [{"role": "user", "content": " ".join(map(str, range(4, 5 + group)))}]},
            group,
            rollout,
            num_tokens=(1 + rollout % 3, 1 + group),
        )
        for group in range(num_groups)
        for rollout in range(n)
    ]
    return sample(model, plans, generator=torch.Generator().manual_seed(seed), has_logprobs=has_logprobs)


def sampled_batch(**options: Any) -> RolloutBatch:
    """Return a batch of trajectories that `tiny_policy` sampled."""
    return assemble(sample_trajectories(tiny_policy(), **options), pad_token_id=PAD)


def advantages_of(batch: RolloutBatch) -> Tensor:
    """Return the advantages [B, 1] of GRPO."""
    return grpo_advantages(batch["reward"], groups_B=batch["group"])[:, None]
