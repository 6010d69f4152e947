"""Training batches for the tiny models, and a comparison with the log-probs of single rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.families.zoo import token_ids
from tests.servers.tiny_embedded import full_forward_logprobs


def ragged_batch(*, limits: Sequence[int] = (), num_rows: int = 12) -> RolloutBatch:
    """Return rows of two turns with random lengths and a common prefix. The first rows are at the limits or cross
    them."""
    rng = random.Random(0)
    prompt = token_ids(80)
    lengths = [n for limit in limits for n in (limit - 2, limit + 1, 2 * limit + 3)]
    lengths += [rng.randrange(1, 40) for _ in range(num_rows)]
    trajectories: list[Trajectory] = []
    for number, length in enumerate(lengths[:num_rows]):
        segments = [Segment(as_token_ids(prompt[:length]), Origin.PROMPT)]
        for turn in range(2):
            ids = token_ids(rng.randrange(1, 6), seed=10 * number + turn)
            segments.append(Segment(as_token_ids(ids), Origin.MODEL, weight_version=0))
            segments.append(Segment(as_token_ids(token_ids(rng.randrange(1, 4), seed=number)), Origin.TOOL))
        trajectories.append(Trajectory(AgentLoopOutput(segments=segments), {}, 0, 0, 0.0, {}))
    return assemble(trajectories, pad_token_id=0)


def check_logprobs(found_BR: Tensor, model: object, batch: RolloutBatch, *, tolerance: float = 1e-4) -> None:
    """Compare the log-probs of the model's tokens with those of a forward of each single row."""
    width = batch["prompts"].shape[1]
    with torch.inference_mode():
        for row in range(len(batch)):
            prompt = batch["prompts"][row][batch["attention_mask"][row, :width].bool()].tolist()
            response = batch["responses"][row][batch["attention_mask"][row, width:].bool()].tolist()
            expected = torch.tensor(full_forward_logprobs(model, prompt, response))
            is_model = batch["response_mask"][row, : len(response)].bool()
            assert found_BR[row, : len(response)][is_model].tolist() == pytest.approx(
                expected[is_model].tolist(), abs=tolerance
            )
