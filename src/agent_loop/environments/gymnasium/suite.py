"""Gymnasium environments as a suite of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from pydantic import ConfigDict

from agent_loop.config import Section, parse_section
from agent_loop.environments.base import Environment, Reply
from agent_loop.environments.gymnasium.known_worlds import MINIGRID, KnownWorld, known_world
from agent_loop.environments.gymnasium.solutions import best_actions
from agent_loop.environments.gymnasium.world import EXTRA, GymnasiumSettings, TextForm, World
from agent_loop.environments.suite import SizedOptions, SolutionTurn, TaskSuite, option_value
from agent_loop.errors import ConfigError, DataError
from agent_loop.interactions.swapped_roles import text_of
from agent_loop.loading import import_extra
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message

FROZEN_LAKES = ("FrozenLake-v1", "FrozenLake8x8-v1")
SYSTEM = "{goal} Answer with one action per turn: {actions}."
NUM_SEEDS = 2**31


class GymnasiumOptions(SizedOptions):
    """Options of an environment. Further options are keyword arguments of `gymnasium.make`, as JSON values."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    map_size: int | None = None
    """Side of a random map for each row of `FrozenLake-v1`. None plays the map that the environment's own arguments
    choose."""
    observation: str | None = None
    """How an observation becomes text, as for the interaction `gymnasium`. None chooses what suits the environment."""


class GymnasiumSuite(TaskSuite):
    """Gymnasium environments. Rows differ in their seeds, and the reward is the sum of the environment's rewards."""

    name = "gymnasium"
    extra = EXTRA
    summary = "Gymnasium's toy_text worlds, MiniGrid, and other environments whose actions are text"
    options: ClassVar[type[Section]] = GymnasiumOptions
    reward_parts: ClassVar[Mapping[str, str]] = {"reward": "the sum of the environment's rewards"}
    lists_tasks = False
    solved_reward = None

    def tasks(self) -> Sequence[str]:
        registry = _gymnasium().registry
        return sorted(name for name in registry if known_world(name) is not None)

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        known = _known(task)
        where = f"gymnasium:{task}"
        if options.map_size is not None and task not in FROZEN_LAKES:
            raise ConfigError(f"{where} has no option map_size; only FrozenLake-v1 has random maps")
        observation = options.observation or known.observation
        given: Mapping[str, Any] = options.model_extra or {}
        env_kwargs = {name: option_value(value) for name, value in given.items()}
        if observation == "render":
            env_kwargs.setdefault("render_mode", "ansi")
        actions = {name: number for number, name in enumerate(known.actions)}
        settings: dict[str, Any] = {
            "env_id": task,
            "env_kwargs": env_kwargs,
            "observation": observation,
            "actions": actions,
        }
        system = SYSTEM.format(goal=known.goal, actions=", ".join(actions) or "a JSON value").strip()
        for seed in count(options.seed):
            key = {**settings, "seed": seed % NUM_SEEDS}
            if options.map_size is not None:
                key["env_kwargs"] = {**env_kwargs, "desc": _random_map(options.map_size, seed, where=where)}
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": _start(key)}]
            yield {"raw_prompt": prompt, "task": key}

    def environment(self) -> Environment:
        return GymnasiumEnvironment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn] | None:
        """Return the actions of the best way to an end, if the environment tells what each action leads to."""
        task: Mapping[str, Any] = row["task"]
        env: Any = _gymnasium().make(task["env_id"], **task["env_kwargs"])
        try:
            env.reset(seed=task["seed"])
            actions = best_actions(env.unwrapped)
        finally:
            env.close()
        if actions is None:
            return None
        names = {value: name for name, value in task["actions"].items()}
        return [SolutionTurn(text=names[action]) for action in actions]

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the environment, its arguments and its first observation. Another seed may start the same."""
        task = {key: value for key, value in row["task"].items() if key != "seed"}
        return json.dumps([task, row["raw_prompt"][-1]["content"]], sort_keys=True)


class GymnasiumEnvironment(Environment):
    """One episode of a Gymnasium environment. Each turn of the model names an action."""

    on_replay = OnReplay.RERUN
    _world: World | None = None

    def reset(self, row: Mapping[str, Any]) -> None:
        self._world = _world(row["task"])
        start = self._world.reset(seed=row["task"]["seed"])
        if start != text_of(row["raw_prompt"][-1]):
            raise DataError(
                f"{row['task']['env_id']} starts with another observation than the row's for seed "
                f"{row['task']['seed']}; make the rows again with the installed version"
            )

    def reply(self, messages: Sequence[Message]) -> Reply:
        return self._playing.play(text_of(messages[-1]))

    def reward(self, messages: Sequence[Message]) -> float:
        return self._playing.total

    def close(self) -> None:
        if self._world is not None:
            self._world.close()

    @property
    def _playing(self) -> World:
        assert self._world is not None, "reset comes first"
        return self._world


def _known(env_id: str) -> KnownWorld:
    if env_id.removeprefix(f"{MINIGRID}:").startswith("MiniGrid-"):
        import_extra(MINIGRID, extra=MINIGRID, by="the suite gymnasium")  # registers its environments
    return known_world(env_id) or KnownWorld(goal=f"You act in {env_id}.")


def _world(task: Mapping[str, Any]) -> World:
    settings = {name: value for name, value in task.items() if name != "seed"}
    _known(task["env_id"])
    where = f"gymnasium:{task['env_id']}"
    return World(TextForm.of(parse_section(GymnasiumSettings, settings, where=where)))


def _start(task: Mapping[str, Any]) -> str:
    """Return the first observation of a row.

    Raises:
        ConfigError: There is no such environment, or it refuses its arguments.
    """
    world = _world(task)
    try:
        return world.reset(seed=task["seed"])
    except ConfigError:
        raise
    except Exception as error:
        kwargs = json.dumps(task["env_kwargs"])
        raise ConfigError(
            f"gymnasium:{task['env_id']} cannot be made with {kwargs}: {describe_error(error)}; change the options"
        ) from error
    finally:
        world.close()


def _random_map(size: int, seed: int, *, where: str) -> list[str]:
    if size < 2:
        raise ConfigError(f"{where}: map_size is {size}; give 2 or more")
    lake = import_extra("gymnasium.envs.toy_text.frozen_lake", extra=EXTRA, by="the suite gymnasium")
    return [str(line) for line in lake.generate_random_map(size=size, seed=seed)]


def _gymnasium() -> Any:
    return import_extra("gymnasium", extra=EXTRA, by="the suite gymnasium")
