"""A learner of several processes: rank 0 has the training loop, and the others do what it orders."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import Config
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training.checkpoint import Checkpoint, SavesPretrained
from agent_loop.training.actor import Actor
from agent_loop.training.critic import Critic
from agent_loop.training.learner import Learner, load_learner
from agent_loop.training.parallel import Team, save_whole


@dataclass(frozen=True, slots=True)
class Order:
    """What all processes do next."""

    kind: Literal["load", "learn", "weights", "state", "save", "leave"]
    checkpoint: Checkpoint | None = None
    """For `load`."""
    batch: RolloutBatch | None = None
    """For `learn`, with the next one."""
    baseline_rewards: Mapping[int, float] | None = None
    model: str = ""
    """For `save`: `policy` or `critic`."""


class Leader:
    """Rank 0 of a team: gives the orders. One at a time, from any thread."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._is_together = False

    @contextmanager
    def together(self, order: Order) -> Generator[None]:
        """Its body is this process's part of the order."""
        self.team.order(order)
        self._is_together = True
        yield
        self._is_together = False  # an error in the body leaves the others in the middle of it

    @contextmanager
    def leading(self) -> Generator[None]:
        """Lets the others leave at the end. Those that wait in the middle of an order notice that this one ends."""
        try:
            yield
        finally:
            if self.team.size > 1 and not self._is_together:
                self.team.order(Order("leave"))


class TeamLearner(Learner):
    """The learner of rank 0: what it does, the other processes do with it."""

    def __init__(self, config: Config, *, actor: Actor, critic: Critic | None = None, leader: Leader) -> None:
        """As `Learner`, with models that are sharded over the leader's team."""
        super().__init__(config, actor=actor, critic=critic)
        self._leader = leader

    def models(self) -> Mapping[str, SavesPretrained]:
        """All that is trained, to be saved."""
        return {name: _Sharded(name, model, self._leader) for name, model in self.sharded_models().items()}

    def learn(
        self, batch: RolloutBatch, *, baseline_rewards: Mapping[int, float] | None = None
    ) -> dict[str, float]:
        """One step, as `Learner` has it."""
        with self._leader.together(Order("learn", batch=batch, baseline_rewards=baseline_rewards)):
            return super().learn(batch, baseline_rewards=baseline_rewards)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, each in full. A reader may stop early; the other processes go through all of them."""
        with self._leader.together(Order("weights")):
            is_read = True
            for weight in super().weights():
                try:
                    if is_read:
                        yield weight
                except GeneratorExit:
                    is_read = False

    def state_dict(self) -> dict[str, Any]:
        """All that is to be kept beside the models, in full."""
        with self._leader.together(Order("state")):
            return super().state_dict()


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A model that all processes gather and rank 0 saves."""

    name: str
    model: PreTrainedModel
    leader: Leader

    def save_pretrained(self, save_directory: str) -> None:
        with self.leader.together(Order("save", model=self.name)):
            save_whole(self.model, save_directory)


def lead_learner(config: Config, *, checkpoint: Checkpoint | None, leader: Leader) -> Learner:
    """What `load_learner` gives, on all processes of the team.

    Raises:
        ConfigError: A model cannot be loaded or not be trained so.
        CheckpointError: The checkpoint is damaged.
    """
    if leader.team.size == 1:
        return load_learner(config, checkpoint=checkpoint)
    with leader.together(Order("load", checkpoint=checkpoint)):
        make = partial(TeamLearner, leader=leader)
        return load_learner(config, checkpoint=checkpoint, team=leader.team, make=make)


def follow(config: Config, *, team: Team) -> None:
    """Does what rank 0 orders until it lets this process leave. Ctrl-C is rank 0's to answer.

    Raises:
        RuntimeError: Rank 0 ended without a word.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    learner: Learner | None = None
    while (order := team.order(Order("leave"))).kind != "leave":
        if order.kind == "load":
            learner = load_learner(config, checkpoint=order.checkpoint, team=team)
        elif learner is None:
            raise RuntimeError(f"rank {team.rank} was ordered to {order.kind} before it loaded a model")
        else:
            _obey(order, learner)


def _obey(order: Order, learner: Learner) -> None:
    if order.kind == "learn" and order.batch is not None:
        learner.learn(order.batch, baseline_rewards=order.baseline_rewards)
    elif order.kind == "weights":
        for _ in learner.weights():
            pass
    elif order.kind == "state":
        learner.state_dict()
    elif order.kind == "save":
        save_whole(learner.sharded_models()[order.model], None)
