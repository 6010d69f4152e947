"""The share of a mini-batch that a rank computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.micro_batches import MicroBatch, micro_batches, sorted_rows
from agent_loop.training.process_group import ProcessGroup


def micro_batches_of_rank(
    batch: RolloutBatch,
    *,
    rows: Tensor,
    process_group: ProcessGroup,
    max_tokens: int,
    device: torch.device,
    use_packing: bool = False,
    share_prefixes: bool = False,
    pad: bool = True,
    at_least: int = 1,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of this rank's share of the rows; of all rows if there is one rank.

    Rows are distributed by length, or in the order of their tokens if they share prefixes, so that all shares have
    about the same number of tokens to compute. All ranks run the same number of micro-batches: a rank with fewer runs
    spare ones at the end.
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

    if process_group.size == 1:
        yield from cut(rows)
        return
    rank, size = process_group.rank, process_group.size
    lengths = batch["attention_mask"][rows].sum(dim=1)
    longest_first = rows[lengths.argsort(descending=True, stable=True)]
    if share_prefixes and len(rows):
        shares = sorted_rows(batch, rows).shares(size)
        own_rows = torch.tensor(shares[rank] if rank < len(shares) else (), dtype=torch.long)
    else:
        own_rows = longest_first[rank::size]
    own = list(cut(own_rows))
    num_spare = max(process_group.all_gather(len(own))) - len(own)
    yield from own
    spare = _spare(own[-1] if own else next(cut(longest_first[-1:])))
    for _ in range(num_spare):
        yield spare


def _spare(micro_batch: MicroBatch) -> MicroBatch:
    """Return a micro-batch that the model runs on, and that counts nowhere."""
    return replace(micro_batch, mask_BR=torch.zeros_like(micro_batch.mask_BR), is_spare=True)
