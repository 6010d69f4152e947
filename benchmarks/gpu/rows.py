"""Batches of random rows, and a plain computation of the loss and the gradients of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_loop.config import ActorConfig
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training import metrics as names
from agent_loop.training.actor import Actor
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids

ENTROPY_COEFF = 0.01
NO_CLIP = 1e9
"""Bound of the gradient's norm that clips nothing."""
MAX_LOG_RATIO = 0.05
"""Distance of old log-probs from the current ones, within the clip range of PPO, so that rounding moves no token across
its edge."""


@dataclass(frozen=True, slots=True)
class Row:
    """Prompt, and runs of tokens with whether the model sampled them."""

    prompt: list[int]
    runs: list[tuple[list[int], bool]]

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *(token for run, _ in self.runs for token in run)]

    @property
    def is_sampled(self) -> list[bool]:
        """For each token of the row, whether the model sampled it."""
        return [False] * len(self.prompt) + [flag for run, flag in self.runs for _ in run]


@dataclass(frozen=True, slots=True)
class Gradients:
    """Loss of a batch, and its gradient by the name of the weight, float32 on the CPU."""

    loss: float
    of_weights: dict[str, Tensor]

    def error(self, exact: Gradients) -> float:
        """Return the distance of the gradients from exact ones, relative to their norm."""
        pairs = [(self.of_weights[name], value) for name, value in exact.of_weights.items()]
        squared = sum(float((ours.double() - value.double()).square().sum()) for ours, value in pairs)
        return (squared / sum(float(value.double().square().sum()) for _, value in pairs)) ** 0.5


def random_rows(sizes: Sequence[tuple[int, ...]], *, vocabulary: int, seed: int = 0) -> list[Row]:
    """Return rows of random tokens.

    Args:
        sizes: For each row the length of its prompt, and those of its runs, every other of which was sampled.
        vocabulary: Size of the vocabulary.
        seed: Seed of the tokens.
    """
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in generator.integers(1, vocabulary, count)]

    return [
        Row(tokens(prompt), [(tokens(size), number % 2 == 0) for number, size in enumerate(runs)])
        for prompt, *runs in sizes
    ]


def as_batch(rows: Sequence[Row], logprobs: Sequence[Sequence[float]]) -> RolloutBatch:
    """Return rows as a batch. `logprobs` holds those of the sampled tokens of each row, as of the rollout."""
    trajectories: list[Trajectory] = []
    for number, (row, of_row) in enumerate(zip(rows, logprobs, strict=True)):
        segments, start = [Segment(as_token_ids(row.prompt), Origin.PROMPT)], 0
        for ids, is_sampled in row.runs:
            if is_sampled:
                part = np.asarray(of_row[start : start + len(ids)], np.float32)
                segments.append(Segment(as_token_ids(ids), Origin.MODEL, part, 0))
                start += len(ids)
            else:
                segments.append(Segment(as_token_ids(ids), Origin.TOOL))
        trajectories.append(Trajectory(AgentLoopOutput(segments=segments), {}, number, 0, 0.0, {}))
    return assemble(trajectories, pad_token_id=0)


def batch_near(model: Any, rows: Sequence[Row], *, seed: int = 0) -> tuple[RolloutBatch, Tensor]:
    """Return a batch whose old log-probs are near those of a model, and random advantages, [B, R]."""
    generator = torch.Generator().manual_seed(seed)
    found: list[list[float]] = []
    for row in rows:
        with torch.no_grad():
            logprobs, _ = _sampled(model, row)
        noise = 2 * torch.rand(len(logprobs), generator=generator) - 1
        found.append((logprobs.float().cpu() + MAX_LOG_RATIO * noise).tolist())
    batch = as_batch(rows, found)
    return batch, torch.randn(batch["responses"].shape, generator=generator)


def plain_gradients(
    model: Any, rows: Sequence[Row], batch: RolloutBatch, advantages_BR: Tensor, *, config: ActorConfig
) -> Gradients:
    """Return PPO's loss and gradients, with the formula written out, from one forward of each row."""
    weights = dict(model.named_parameters())
    sums = {name: torch.zeros(weight.shape, device=weight.device) for name, weight in weights.items()}
    num_tokens, total = float(batch["response_mask"].sum()), 0.0
    for number, row in enumerate(rows):
        is_sampled = batch["response_mask"][number].bool()
        advantages = advantages_BR[number][is_sampled].to(model.device)
        old = batch["rollout_log_probs"][number][is_sampled].to(model.device)
        logprobs, entropy = _sampled(model, row)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        loss = -(gain.sum() + config.entropy_coeff * entropy.sum()) / num_tokens
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for name, gradient in zip(weights, gradients, strict=True):
            sums[name] += gradient
        total += float(loss.detach())
    return Gradients(total, {name: value.cpu() for name, value in sums.items()})


def _sampled(model: Any, row: Row) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the sampled tokens of a row and the entropies before them, in float32."""
    ids = torch.tensor([row.token_ids], device=model.device)
    places = torch.tensor(row.is_sampled, device=model.device).nonzero().flatten()
    logits_NV = model(input_ids=ids, use_cache=False).logits[0, places - 1].float()
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
    return logprobs_NV.gather(1, ids[0, places][:, None])[:, 0], entropy_N


def actor_of(
    model: Any, *, dtype: torch.dtype | None = None, process_group: Any = None, **settings: Any
) -> Actor:
    """Return an actor that owns a model, which must be in float32."""
    config = ActorConfig(
        **{
            "share_prefixes": False,
            "grad_clip": NO_CLIP,
            "entropy_coeff": ENTROPY_COEFF,
            "lr": 1e-3,
            "weight_decay": 0.1,
            **settings,
        }
    )
    options = {} if process_group is None else {"process_group": process_group}
    return Actor(model, config=config, dtype=dtype, **options)


def actor_gradients(actor: Actor, batch: RolloutBatch, advantages_BR: Tensor) -> Gradients:
    """Run an update, and return its loss and the gradients of its optimiser step."""
    found: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, weight in actor._weights.tensors.items():
            gradient: Any = weight.grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name] = whole.detach().float().cpu().clone()

    adamw: torch.optim.Optimizer = actor.optimizer._adamw
    hook: Any = adamw.register_step_pre_hook(keep)
    try:
        metrics = actor.update(batch, advantages_BR=advantages_BR)
    finally:
        hook.remove()
    return Gradients(metrics[names.LOSS], found)


def trained_weights(actor: Actor) -> dict[str, Tensor]:
    """Return the weights that the optimiser updates, float32 on the CPU."""
    return {name: weight.detach().float().cpu().clone() for name, weight in actor._weights.tensors.items()}


def adamw_step(
    weights: dict[str, Tensor], gradients: Sequence[dict[str, Tensor]], *, config: ActorConfig
) -> dict[str, Tensor]:
    """Return weights after steps of torch's AdamW on the CPU."""
    tensors = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    adamw: Any = make(
        list(tensors.values()), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
    )
    for of_step in gradients:
        for name, tensor in tensors.items():
            tensor.grad = of_step[name].clone()
        adamw.step()
    return {name: tensor.detach() for name, tensor in tensors.items()}
