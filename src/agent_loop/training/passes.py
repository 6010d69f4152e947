"""Passes of a model over micro-batches, one after the other or several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from agent_loop.runtime.threads import run_in_threads
from agent_loop.training.master_weights import Gradients, MasterWeights
from agent_loop.training.micro_batches import MicroBatch

FoundT = TypeVar("FoundT")


def compute_each(
    function: Callable[[MicroBatch], FoundT], micro_batches: Iterable[MicroBatch], *, num_threads: int
) -> Iterator[tuple[MicroBatch, FoundT]]:
    """What is found of each micro-batch, in their order.

    Args:
        function: With several threads, it runs in them.
        num_threads: So many micro-batches are computed at once.
    """
    if num_threads == 1:
        for micro_batch in micro_batches:
            yield micro_batch, function(micro_batch)
        return

    def compute(micro_batch: MicroBatch) -> tuple[MicroBatch, FoundT]:
        torch.set_num_threads(1)  # of this thread: the others fill the cores
        return micro_batch, function(micro_batch)

    yield from run_in_threads(compute, micro_batches, num_threads=num_threads)


def add_gradients(
    loss_of: Callable[[MicroBatch], tuple[Tensor, FoundT]],
    micro_batches: Iterable[MicroBatch],
    *,
    into: MasterWeights,
    num_threads: int,
) -> Iterator[tuple[MicroBatch, FoundT]]:
    """Adds the gradient of each micro-batch, and yields what else was found of it, in their order.

    Args:
        loss_of: A micro-batch's share of the loss, and what else to keep of it. With several threads, it runs in them.
        into: The weights of the model that the losses come from.
        num_threads: So many micro-batches are computed at once, each with memory for all gradients. The sums are the
            same, bit by bit. Must be 1 where the weights are sharded.
    """
    if num_threads == 1:
        for micro_batch in micro_batches:
            loss, found = loss_of(micro_batch)
            cast(Any, loss).backward()
            yield micro_batch, found
        return

    def differentiate(micro_batch: MicroBatch) -> tuple[Gradients, FoundT]:
        loss, found = loss_of(micro_batch)
        return into.gradients_of(loss), found

    for micro_batch, (gradients, found) in compute_each(
        differentiate, micro_batches, num_threads=num_threads
    ):
        into.add(gradients)
        yield micro_batch, found
