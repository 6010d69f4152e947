"""What each process of a team runs, and what none does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.batch import assemble
from agent_loop.training.actor import Actor
from agent_loop.training.learner import Learner
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.team import Team
from agent_loop.training.team_processes import lead_team
from agent_loop.training.team_share import own_micro_batches
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

BATCH = assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD)


class OneOfMany(Team):
    """Tells what it was asked to collect, and has others that gave what it is told."""

    def __init__(self, *, rank: int, size: int, others: list[int] | None = None) -> None:
        super().__init__(rank=rank, size=size)
        self.given: list[int] = []
        self._others = others or []

    def collect(self, value: Any) -> list[Any]:
        self.given.append(value)
        return [value, *self._others]


def shares(rows: torch.Tensor, *, size: int) -> list[list[MicroBatch]]:
    """The micro-batches of each process."""

    def share(team: Team) -> list[MicroBatch]:
        return list(own_micro_batches(BATCH, rows=rows, team=team, max_tokens=40, device=torch.device("cpu")))

    asked = [OneOfMany(rank=rank, size=size) for rank in range(size)]
    for team in asked:
        share(team)
    counts = [count for team in asked for count in team.given]
    return [share(OneOfMany(rank=rank, size=size, others=counts)) for rank in range(size)]


@pytest.mark.parametrize(("num_rows", "size"), [(24, 2), (23, 3), (2, 4), (1, 2)])
def test_each_row_counts_in_one_process_and_all_run_as_many_micro_batches(num_rows: int, size: int) -> None:
    rows = torch.arange(24)[:num_rows]

    of_processes = shares(rows, size=size)

    assert len({len(share) for share in of_processes}) == 1
    counted = [m.rows_B for share in of_processes for m in share if not m.is_spare]
    assert sorted(torch.cat(counted).tolist()) == rows.tolist()


def test_shares_are_about_as_many_tokens() -> None:
    tokens = [
        sum(int(m.attention_mask_BW.sum()) for m in share if not m.is_spare)
        for share in shares(torch.arange(24), size=2)
    ]

    assert max(tokens) - min(tokens) <= int(BATCH["attention_mask"].sum(dim=1).max())


def test_a_spare_micro_batch_counts_nowhere() -> None:
    spare = next(m for share in shares(torch.arange(1), size=2) for m in share if m.is_spare)
    values_BR = torch.zeros(BATCH["responses"].shape)

    spare.put(torch.ones_like(spare.mask_BR, dtype=torch.float32), into=values_BR)

    assert not spare.mask_BR.any()
    assert not values_BR.any()


def test_images_are_refused_before_the_others_are_told() -> None:
    config = Config()
    learner = Learner(config, actor=Actor(tiny_policy(), config=config.actor), team=Team(size=2, orders=None))
    batch = BATCH.clone()
    batch["attachments"] = torch.zeros(len(batch))

    with pytest.raises(ConfigError, match=r"images or videos.*num_processes=1"):
        learner.learn(batch)


def test_a_number_of_processes_that_torchrun_did_not_start_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    config = Config.model_validate({"model": {"device": "cpu"}, "trainer": {"num_processes": 2}})

    async def lead() -> None:
        async with lead_team(config):
            pass

    with pytest.raises(ConfigError, match="num_processes is 2, but torchrun started 4"):
        asyncio.run(lead())
