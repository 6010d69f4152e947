"""Passes of a model over micro-batches, in sequence or in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from agent_loop.runtime.threads import run_in_threads
from agent_loop.training.master_weights import Gradients, MasterWeights
from agent_loop.training.micro_batches import MicroBatch

ResultT = TypeVar("ResultT")


def compute_each(
    function: Callable[[MicroBatch], ResultT], micro_batches: Iterable[MicroBatch], *, num_threads: int
) -> Iterator[tuple[MicroBatch, ResultT]]:
    """Yield each micro-batch and the result of the function, in order.

    Args:
        function: Function of a micro-batch; called in the threads if there are several.
        micro_batches: The micro-batches.
        num_threads: Number of micro-batches that are computed at once.
    """
    if num_threads == 1:
        for micro_batch in micro_batches:
            yield micro_batch, function(micro_batch)
        return

    def compute(micro_batch: MicroBatch) -> tuple[MicroBatch, ResultT]:
        torch.set_num_threads(1)  # per thread, because the other threads use the other cores
        return micro_batch, function(micro_batch)

    yield from run_in_threads(compute, micro_batches, num_threads=num_threads)


def add_gradients(
    loss_of: Callable[[MicroBatch], tuple[Tensor, ResultT]],
    micro_batches: Iterable[MicroBatch],
    *,
    into: MasterWeights,
    num_threads: int,
) -> Iterator[tuple[MicroBatch, ResultT]]:
    """Add the gradient of each micro-batch to the weights, and yield the other result of `loss_of`, in order.

    Args:
        loss_of: Function that returns a micro-batch's part of the loss, and another result. It is called in the threads
            if there are several.
        micro_batches: The micro-batches.
        into: Weights of the model.
        num_threads: Number of micro-batches that are computed at once, each with memory for all gradients. The sums do
            not depend on it, to the last bit. Must be 1 if the weights are sharded.
    """
    if num_threads == 1:
        for micro_batch in micro_batches:
            loss, found = loss_of(micro_batch)
            cast(Any, loss).backward()
            yield micro_batch, found
        return

    def differentiate(micro_batch: MicroBatch) -> tuple[Gradients, ResultT]:
        loss, found = loss_of(micro_batch)
        return into.gradients_of(loss), found

    for micro_batch, (gradients, found) in compute_each(
        differentiate, micro_batches, num_threads=num_threads
    ):
        into.add(gradients)
        yield micro_batch, found
