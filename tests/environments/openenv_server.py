"""Program that serves an environment with the server of OpenEnv: `openenv_server.py count|guess|shop PORT SESSIONS`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

REWARD = 0.25


class Says(Action):
    message: str


class Heard(Observation):
    text: str


class Count(Environment[Says, Heard, State]):
    """Ends after `2 + seed % 3` steps, each with the same reward. Any other message than "next" is an exception."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int = 0, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.left = 2 + seed % 3
        return Heard(text=f"{self.left} to go")

    def step(self, action: Says, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        if action.message != "next":
            raise RuntimeError(f"no such word: {action.message}")
        self.left -= 1
        return Heard(text=f"{self.left} to go", reward=REWARD, done=not self.left)

    @property
    def state(self) -> State:
        return State()


class Guesses(Action):
    low: int
    high: int


class Guess(Environment[Guesses, Heard, State]):
    """Rewards a range by its width, at every step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int = 0, episode_id: str | None = None, **kwargs: Any) -> Heard:
        return Heard(text="Give a range.")

    def step(self, action: Guesses, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        width = action.high - action.low
        return Heard(text=f"width {width}", reward=width, done=width > 2)

    @property
    def state(self) -> State:
        return State()


class Shop(MCPEnvironment):
    """Has two tools. Buying ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("shop")
        self.bought = ""

        @mcp.tool
        def price_of(fruit: str) -> int:
            """Return the price of a fruit."""
            return {"pear": 3, "plum": 4}[fruit]

        @mcp.tool
        def buy(fruit: str) -> str:
            """Buy a fruit."""
            self.bought = fruit
            return f"one {fruit}"

        super().__init__(mcp)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.bought = ""
        return Observation()

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and isinstance(observation, CallToolObservation):
            observation.reward = float(self.bought == "pear")
            observation.done = bool(self.bought)
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


KINDS: dict[str, tuple[type[Environment[Any, Any, Any]], type[Action], type[Observation]]] = {
    "count": (Count, Says, Heard),
    "guess": (Guess, Guesses, Heard),
    "shop": (Shop, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port, sessions = sys.argv[1:]
    environment, action, observation = KINDS[kind]
    app = create_app(environment, action, observation, max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
