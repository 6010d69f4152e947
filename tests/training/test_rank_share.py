"""Tests of the micro-batches that each rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.training.actor import Actor
from agent_loop.training.learner import Learner
from agent_loop.training.micro_batches import Layout, MicroBatch, micro_batches
from agent_loop.training.process_group import ProcessGroup
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

BATCH = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)


class OneOfMany(ProcessGroup):
    """Process group that records what this rank gathers, and returns given values for the other ranks."""

    def __init__(self, *, rank: int, size: int, others: list[int] | None = None) -> None:
        super().__init__(rank=rank, size=size)
        self.given: list[int] = []
        self._others = others or []

    def all_gather(self, value: Any) -> list[Any]:
        self.given.append(value)
        return [value, *self._others]


def shares(rows: torch.Tensor, *, size: int, layout: Layout) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank."""

    def share(process_group: ProcessGroup) -> list[MicroBatch]:
        return list(
            micro_batches(
                BATCH,
                rows=rows,
                process_group=process_group,
                max_tokens=40,
                device=torch.device("cpu"),
                layout=layout,
            )
        )

    asked = [OneOfMany(rank=rank, size=size) for rank in range(size)]
    for process_group in asked:
        share(process_group)
    counts = [count for process_group in asked for count in process_group.given]
    return [share(OneOfMany(rank=rank, size=size, others=counts)) for rank in range(size)]


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize(("num_rows", "size"), [(24, 2), (23, 3), (2, 4), (1, 2)])
def test_each_row_counts_in_one_process_and_all_run_equally_many_micro_batches(
    num_rows: int, size: int, layout: Layout
) -> None:
    rows = torch.arange(24)[:num_rows]

    of_processes = shares(rows, size=size, layout=layout)

    assert len({len(share) for share in of_processes}) == 1
    counted = [m.rows_B for share in of_processes for m in share if not m.is_spare]
    assert sorted(torch.cat(counted).tolist()) == rows.tolist()


def test_images_are_refused_before_other_ranks_get_a_command() -> None:
    config = Config()
    learner = Learner(
        config, actor=Actor(tiny_policy(), config=config.actor), process_group=ProcessGroup(size=2)
    )
    batch = BATCH.clone()
    batch["attachments"] = torch.zeros(len(batch))

    with pytest.raises(ConfigError, match=r"images or videos.*num_processes=1"):
        learner.learn(batch)
