"""What a process of a team runs of a mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.team import Team


def own_micro_batches(
    batch: RolloutBatch,
    *,
    rows: Tensor,
    team: Team,
    max_tokens: int,
    device: torch.device,
    use_packing: bool = False,
    share_prefixes: bool = False,
    pad: bool = True,
    at_least: int = 1,
) -> Iterator[MicroBatch]:
    """This process's share of the rows, as `micro_batches` cuts it; all rows where there is one process.

    Rows are dealt by length, so that the shares are about as many tokens. All processes run as many micro-batches: one
    with fewer ends with spare ones.
    """

    def cut(own_rows: Tensor) -> Iterator[MicroBatch]:
        return micro_batches(
            batch,
            rows=own_rows,
            max_tokens=max_tokens,
            device=device,
            use_packing=use_packing,
            share_prefixes=share_prefixes,
            pad=pad,
            at_least=at_least,
        )

    if team.size == 1:
        yield from cut(rows)
        return
    lengths = batch["attention_mask"][rows].sum(dim=1)
    longest_first = rows[lengths.argsort(descending=True, stable=True)]
    own = list(cut(longest_first[team.rank :: team.size]))
    num_spare = max(team.collect(len(own))) - len(own)
    yield from own
    spare = _spare(own[-1] if own else next(cut(longest_first[-1:])))
    for _ in range(num_spare):
        yield spare


def _spare(micro_batch: MicroBatch) -> MicroBatch:
    """It makes the model run, and counts nowhere."""
    return replace(micro_batch, mask_BR=torch.zeros_like(micro_batch.mask_BR), is_spare=True)
