"""Gymnasium environments whose actions have names here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MINIGRID = "minigrid"


@dataclass(frozen=True, slots=True)
class KnownWorld:
    """How the suite shows an environment."""

    goal: str
    """First sentence of the prompt."""
    actions: tuple[str, ...] = ()
    """Names of the actions 0, 1, ... If there are none, the model writes the value of its action."""
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
