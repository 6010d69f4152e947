"""Gymnasium environments that are played through text: as a suite of tasks, and as an interaction."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, ClassVar, cast

import numpy as np
from pydantic import ConfigDict, Field

from agent_loop.config import NotNegative, Section, parse_section
from agent_loop.environments.base import Environment, Reply
from agent_loop.environments.suite import SizedOptions, SolutionTurn, TaskSuite, option_value
from agent_loop.errors import ConfigError, DataError, EnvironmentBug
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.registry import read_settings
from agent_loop.interactions.simulated_user import text_of
from agent_loop.loading import import_extra, load_object
from agent_loop.runtime.describe import describe_error, describe_value, one_line
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.numeric import as_reward
from agent_loop.runtime.threads import OneThread
from agent_loop.seeds import trajectory_seed
from agent_loop.types import Message

FROZEN_LAKES = ("FrozenLake-v1", "FrozenLake8x8-v1")
SYSTEM = "{goal} Answer with one action per turn: {actions}."
NUM_SEEDS = 2**31
LARGEST_SEED = 2**31 - 1
EXTRA = "gymnasium"
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", re.DOTALL)
MINIGRID = "minigrid"


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
    return World(parse_section(GymnasiumSettings, settings, where=where))


def _start(task: Mapping[str, Any]) -> str:
    """Return the first observation of a row."""
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


class GymnasiumInteraction(BaseInteraction):
    """Plays one environment per trajectory.

    The environment's observations are the user turns, and its rewards are the scores of the model's turns. Their sum
    is the score of the trajectory.

    A row's `interaction_kwargs` may hold `seed` and `options` for `reset`; other keys go to `gymnasium.make`.
    Without a `seed` in the row, each trajectory derives its own from `rollout.seed`.
    Each reply records `terminated` and `truncated`. Every environment runs in its own thread.
    """

    opens_conversation = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(GymnasiumSettings, self.config)
        self.on_replay = self._settings.on_replay
        World(self._settings)  # wrong settings are refused here
        self._games: dict[str, tuple[World, OneThread]] = {}

    async def start_interaction(
        self,
        instance_id: str,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        env_kwargs = {key: value for key, value in kwargs.items() if value is not None}
        world, thread = World(self._settings), OneThread(f"{self.name}-{instance_id[:8]}")
        self._games[instance_id] = world, thread
        if seed is None and (derived := trajectory_seed(self.name)) is not None:
            seed = derived & LARGEST_SEED
        return await thread.run(partial(world.reset, seed=seed, options=options, **env_kwargs))

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        world, thread = self._games[instance_id]
        reply = await thread.run(world.play, text_of(messages[-1]))
        return reply.is_over, reply.content, reply.score, dict(reply.extra)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        world, _ = self._games[instance_id]
        return world.total

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id not in self._games:
            return
        world, thread = self._games.pop(instance_id)
        try:
            await thread.run(world.close)
        finally:
            thread.shutdown()


ObservationText = Callable[[Any, Any], str]
"""Function `(observation, environment) -> text for the model`."""


class GymnasiumSettings(Section):
    """Settings under `config` of the interaction."""

    env_id: str
    """Environment id for `gymnasium.make`: `FrozenLake-v1`, or `my_package.my_module:MyEnv-v0`, which imports the
    module."""
    env_kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments for `gymnasium.make`."""
    observation: str = "text"
    """How an observation becomes text: `text` is `str(observation)`, and `render` is the result of `env.render()`, for
    which `env_kwargs` sets `render_mode: ansi`. `file.py:function` or `module:function` names your own function
    `(observation, env) -> str`."""
    actions: dict[str, Any] = Field(default={})
    """Actions by name, as in `{left: 0, down: 1}`. If empty, the model writes the action's value."""
    action_pattern: str | None = None
    """Regular expression that finds the action in the model's answer. The last match counts."""
    invalid_reply: str = "That is not a valid action: {reason}."
    """Reply to a turn without a valid action."""
    invalid_score: float = 0.0
    """Score of a turn without a valid action. The environment does not step in such a turn."""
    max_invalid_in_a_row: NotNegative = 3
    """Consecutive turns without a valid action that are allowed. One more ends the trajectory, neither terminated nor
    truncated."""
    on_replay: OnReplay = OnReplay.RESTART
    """Choose `rerun` if the rows' seeds make every step of the environment reproducible."""


class World:
    """Environment of one trajectory. All methods block."""

    def __init__(self, settings: GymnasiumSettings) -> None:
        self._settings = settings
        self._make = _gymnasium().make
        self._text_of = _observation_text(settings.observation)
        self._actions = ActionReader(words=settings.actions, pattern=settings.action_pattern)
        self._env: Any = None
        self._num_invalid_in_a_row = 0
        self.total = 0.0
        """Sum of the scores of all turns."""

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None = None, **env_kwargs: Any) -> str:
        """Create the environment, start an episode and return its first observation."""
        self._env = self._make(self._settings.env_id, **{**self._settings.env_kwargs, **env_kwargs})
        observation, _ = self._env.reset(seed=seed, options=options)
        return self._text_of(observation, self._env)

    def play(self, text: str) -> Reply:
        """Take the action that a model turn names, and return the environment's reply."""
        try:
            action = self._actions.read(text, self._env.action_space)
        except InvalidAction as reason:
            return self._refuse(str(reason))
        observation, reward, terminated, truncated, _ = self._env.step(action)
        score = as_reward(reward)
        if score is None:
            raise EnvironmentBug(f"{self._settings.env_id} returned {describe_value(reward)} as its reward")
        self._num_invalid_in_a_row = 0
        self.total += score
        return Reply(
            self._text_of(observation, self._env),
            score=score,
            is_over=bool(terminated or truncated),
            extra={"terminated": bool(terminated), "truncated": bool(truncated)},
        )

    def close(self) -> None:
        """Close the environment, if it was created."""
        if self._env is not None:
            self._env.close()

    def _refuse(self, reason: str) -> Reply:
        self._num_invalid_in_a_row += 1
        self.total += self._settings.invalid_score
        return Reply(
            self._settings.invalid_reply.replace("{reason}", reason),
            score=self._settings.invalid_score,
            is_over=self._num_invalid_in_a_row > self._settings.max_invalid_in_a_row,
            extra={"terminated": False, "truncated": False, "invalid_action": reason},
        )


def _observation_text(observation: str) -> ObservationText:
    if observation == "text":
        return lambda value, env: str(value)
    if observation == "render":
        return lambda value, env: _rendered(env)
    return load_object(observation, key="observation")


def _rendered(env: Any) -> str:
    """Return the text that the environment renders, with brackets in place of colour, which marks positions."""
    drawn = env.render()
    if not isinstance(drawn, str):
        raise EnvironmentBug(
            f"render() of {env} returned {describe_value(drawn)} instead of a str; set render_mode: ansi in "
            "env_kwargs, or set observation to file.py:function"
        )
    return _COLOURED.sub(r"[\1]", drawn).strip("\n")


class InvalidAction(Exception):
    """Raised when a text names no action of the space. The message can be shown to the model."""


class ActionReader:
    """Converts text to a member of a Gymnasium space.

    Args:
        words: Action values by name; names are case-insensitive. If empty, the text is the action itself: taken
            literally for a `Text` space, parsed as JSON for any other.
        pattern: A case-insensitive regular expression that finds the action. Its last match counts: the first group
            if there is one, or the whole match. None takes the whole text.
    """

    def __init__(self, *, words: Mapping[str, Any], pattern: str | None) -> None:
        self._words = {word.casefold(): value for word, value in words.items()}
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.IGNORECASE | re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"action_pattern is {pattern!r}, which is not a valid regular expression: {error}"
            ) from error

    def read(self, text: str, space: Any) -> Any:
        """Return the action that `text` names."""
        action = self._value_of(self._matched_text(text), space)
        if isinstance(action, bool) or not space.contains(action):  # (a bool passes as an integer otherwise)
            raise InvalidAction(f"{describe_value(action)} is not in {space}")
        return action

    def _matched_text(self, text: str) -> str:
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise InvalidAction(f"nothing in the answer matches {self._pattern.pattern}")
        groups = matches[-1].groups()
        return str(groups[0] if groups and groups[0] is not None else matches[-1][0]).strip()

    def _value_of(self, text: str, space: Any) -> Any:
        if self._words:
            if text.casefold() not in self._words:
                raise InvalidAction(
                    f"{one_line(text, max_length=80)!r} is not one of the actions {', '.join(self._words)}"
                )
            value = self._words[text.casefold()]
        elif type(space).__name__ == "Text":
            return text
        else:
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidAction(
                    f"{one_line(text, max_length=80)!r} is not a JSON value of {space}"
                ) from error
        return _member(value, space)


def _member(value: Any, space: Any) -> Any:
    """Convert a value from JSON or YAML to the types of its space."""
    kind = type(space).__name__
    if kind == "Dict" and isinstance(value, dict):
        values = cast(dict[str, Any], value)
        return {
            key: _member(inner, space[key]) if key in space.spaces else inner for key, inner in values.items()
        }
    if isinstance(value, list):
        items = cast(list[Any], value)
        if kind == "Tuple" and len(items) == len(space):
            return tuple(map(_member, items, space))
        if kind == "Sequence":
            return tuple(_member(item, space.feature_space) for item in items)
    return _array(value, space) if kind == "Box" or isinstance(value, list) else value


def _array(value: Any, space: Any) -> Any:
    """Convert numbers to an array of the space's dtype."""
    try:
        exact = np.asarray(value)
        array = np.asarray(value, dtype=space.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidAction(f"{describe_value(value)} is not in {space}: {describe_error(error)}") from error
    is_rounded = array.dtype.kind in "iu" and not np.array_equal(array, exact)
    if exact.dtype.kind not in "biuf" or is_rounded:
        raise InvalidAction(f"{describe_value(value)} is not in {space}")
    return array


@dataclass(frozen=True, slots=True)
class KnownWorld:
    """How the suite shows an environment."""

    goal: str
    """First sentence of the prompt."""
    actions: tuple[str, ...] = ()
    """Names of the actions 0, 1, ... If empty, the model writes the value of its action."""
    observation: str = "text"
    """How an observation becomes text."""


_LAKE = KnownWorld(
    goal="Walk from S to G over frozen fields F, and avoid the holes H. Brackets mark your field.",
    actions=("left", "down", "right", "up"),
    observation="render",
)
_CLIFF = KnownWorld(
    goal="You are at x. Walk to T, and avoid the cliff C.",
    actions=("up", "right", "down", "left"),
    observation="render",
)
_TAXI = KnownWorld(
    goal="Drive a taxi to its passenger, and bring the passenger to the destination. You cannot cross a | in the map.",
    actions=("south", "north", "east", "west", "pickup", "dropoff"),
    observation=f"{__name__}:taxi_text",
)
_BLACKJACK = KnownWorld(
    goal="Play Blackjack. You see your sum, the dealer's card, and whether you have a usable ace.",
    actions=("stick", "hit"),
)
_GRID = KnownWorld(
    goal="You move in a grid with two characters per field. The arrow or letter of your field shows your direction.",
    actions=("left", "right", "forward", "pickup", "drop", "toggle", "done"),
    observation=f"{__name__}:grid_text",
)
KNOWN_WORLDS: Mapping[str, KnownWorld] = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "Taxi": _TAXI,
    "Blackjack": _BLACKJACK,
}
"""Environments by id, without the version."""


def known_world(env_id: str) -> KnownWorld | None:
    """Return how the suite shows an environment, or None if it has no names for the actions."""
    name = env_id.removeprefix(f"{MINIGRID}:").partition("-v")[0]
    return _GRID if name.startswith("MiniGrid-") else KNOWN_WORLDS.get(name)


def taxi_text(observation: Any, env: Any) -> str:
    """Return the map and the places of the world Taxi, whose own text marks the places by colours alone."""
    row, column, passenger, destination = env.unwrapped.decode(int(observation))
    lines = ["".join(field.decode() for field in line) for line in env.unwrapped.desc]
    stands = ("R", "G", "Y", "B", "in the taxi")
    return "\n".join(
        [
            *lines,
            f"Taxi: row {row}, column {column}. Passenger: {stands[passenger]}. Destination: {stands[destination]}.",
        ]
    )


def grid_text(observation: Any, env: Any) -> str:
    """Return the mission and the grid of a MiniGrid environment."""
    return f"{observation['mission']}\n{env.unwrapped.pprint_grid()}"


def best_actions(world: Any) -> list[int] | None:
    """Return the actions from the current state to the end with the largest return, on a shortest path to that end.

    Args:
        world: An unwrapped environment. Its `P` maps a state and an action to outcomes
            `(probability, next state, reward, is the end)`, as in the toy_text worlds.

    Returns:
        None if there is no `P`, if an action has several outcomes, or if no path has an end.
    """
    table: Any = getattr(world, "P", None)
    if table is None:
        return None
    paths: dict[int, tuple[float, list[int]]] = {int(world.s): (0.0, [])}
    queue, ends = deque(paths), list[tuple[float, list[int]]]()
    while queue:
        state = queue.popleft()
        total, path = paths[state]
        for action, outcomes in table[state].items():
            if len({(int(target), reward) for _, target, reward, _ in outcomes}) > 1:
                return None
            _, target, reward, is_end = outcomes[0]
            reached = total + float(reward), [*path, int(action)]
            if is_end:
                ends.append(reached)
            elif int(target) not in paths:
                paths[int(target)] = reached
                queue.append(int(target))
    return max(ends, key=lambda end: end[0])[1] if ends else None
