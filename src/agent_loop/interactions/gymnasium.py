"""Any Gymnasium environment that can be put into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from agent_loop.config import NotNegative, Section
from agent_loop.errors import InteractionBug
from agent_loop.interactions.actions import ActionReader, NoAction
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.flipping import text_of
from agent_loop.interactions.settings import read_settings
from agent_loop.loading import import_extra, load_object
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.numeric import as_reward
from agent_loop.runtime.threads import OneThread
from agent_loop.seeds import trajectory_seed
from agent_loop.types import Message

ObservationText = Callable[[Any, Any], str]
"""(observation, environment) -> what the model reads."""
LARGEST_SEED = 2**31 - 1
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0?m", re.DOTALL)


class GymnasiumSettings(Section):
    """`config` of the interaction."""

    env_id: str
    """As `gymnasium.make` takes it: `FrozenLake-v1`, or `my_package.my_module:MyEnv-v0`, which imports the module."""
    env_kwargs: dict[str, Any] = Field(default={})
    """Given to `gymnasium.make`."""
    observation: str = "text"
    """What the model reads: `text` is `str(observation)`, `render` is what `env.render()` returns (with `render_mode:
    ansi` in `env_kwargs`), and `file.py:function` or `module:function` is yours: `(observation, env) -> str`."""
    actions: dict[str, Any] = Field(default={})
    """Words for actions, as in `{left: 0, down: 1}`; empty if the model writes the action itself."""
    action_pattern: str | None = None
    """Where the action is in what the model says: a regular expression whose last match counts."""
    invalid_reply: str = "That is no valid action: {reason}."
    invalid_score: float = 0.0
    """Of a turn without a valid action; the environment does not notice it."""
    max_invalid_in_a_row: NotNegative = 3
    """One more such turn ends the trajectory, neither terminated nor truncated."""
    on_replay: OnReplay = OnReplay.RESTART
    """`rerun` where the rows' seeds make the environment's every step reproducible."""


class GymnasiumInteraction(BaseInteraction):
    """Plays one environment per trajectory: its observations are the user's turns, its rewards the turns' scores, and
    their sum the verdict.

    The row's `interaction_kwargs` may hold `seed` and `options` for `reset`; anything else goes to `gymnasium.make`.
    Without a `seed` there, `rollout.seed` decides, for each trajectory by itself.
    Each reply records `terminated` and `truncated`. An environment lives in a thread of its own.
    """

    opens_conversation = True

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_settings(GymnasiumSettings, self.config)
        self.on_replay = self._settings.on_replay
        self._make: Callable[..., Any] = import_extra("gymnasium", extra="gymnasium", by=__name__).make
        self._text_of = _observation_text(self._settings.observation)
        self._actions = ActionReader(words=self._settings.actions, pattern=self._settings.action_pattern)
        self._games: dict[str, _Game] = {}

    async def start_interaction(
        self,
        instance_id: str,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        env_kwargs = self._settings.env_kwargs | {
            key: value for key, value in kwargs.items() if value is not None
        }
        game = self._games[instance_id] = _Game(OneThread(f"{self.name}-{instance_id[:8]}"))

        if seed is None and (derived := trajectory_seed(self.name)) is not None:
            seed = derived & LARGEST_SEED

        def begin() -> str:
            game.env = self._make(self._settings.env_id, **env_kwargs)
            observation, _ = game.env.reset(seed=seed, options=options)
            return self._text_of(observation, game.env)

        return await game.thread.run(begin)

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        game = self._games[instance_id]
        try:
            action = self._actions.read(text_of(messages[-1]), game.env.action_space)
        except NoAction as reason:
            return self._refuse(game, str(reason))
        text, score, terminated, truncated = await game.thread.run(self._step, game, action)
        game.num_invalid_in_a_row = 0
        game.total += score
        return terminated or truncated, text, score, {"terminated": terminated, "truncated": truncated}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._games[instance_id].total

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        game = self._games.pop(instance_id, None)
        if game is None:
            return
        try:
            await game.thread.run(game.close)
        finally:
            game.thread.shutdown()

    def _step(self, game: _Game, action: Any) -> tuple[str, float, bool, bool]:
        observation, reward, terminated, truncated, _ = game.env.step(action)
        score = as_reward(reward)
        if score is None:
            raise InteractionBug(f"{self._settings.env_id} returned {describe_value(reward)} as its reward")
        return self._text_of(observation, game.env), score, bool(terminated), bool(truncated)

    def _refuse(self, game: _Game, reason: str) -> tuple[bool, str, float, dict[str, Any]]:
        game.num_invalid_in_a_row += 1
        game.total += self._settings.invalid_score
        is_over = game.num_invalid_in_a_row > self._settings.max_invalid_in_a_row
        extra = {"terminated": False, "truncated": False, "invalid_action": reason}
        return (
            is_over,
            self._settings.invalid_reply.replace("{reason}", reason),
            self._settings.invalid_score,
            extra,
        )


@dataclass(slots=True)
class _Game:
    """One trajectory's environment."""

    thread: OneThread
    env: Any = None
    """None until it is made; used in the thread alone."""
    total: float = 0.0
    num_invalid_in_a_row: int = 0

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


def _observation_text(observation: str) -> ObservationText:
    if observation == "text":
        return lambda value, env: str(value)
    if observation == "render":
        return lambda value, env: _rendered(env)
    return load_object(observation, key="observation")


def _rendered(env: Any) -> str:
    """What the environment draws, with brackets where it draws in colour: that is where things are."""
    drawn = env.render()
    if not isinstance(drawn, str):
        raise InteractionBug(
            f"render() of {env} returned {describe_value(drawn)}; set render_mode: ansi in env_kwargs, or give "
            "observation: file.py:function"
        )
    return _COLOURED.sub(r"[\1]", drawn).strip("\n")
