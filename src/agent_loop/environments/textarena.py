"""Games of TextArena as a suite of tasks, for one or several players."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from threading import RLock
from typing import Any, ClassVar

from agent_loop.config import Positive, Section
from agent_loop.environments.game import Game
from agent_loop.environments.players import POLICY
from agent_loop.environments.suite import SizedOptions, TaskSuite
from agent_loop.errors import ConfigError, DataError, EnvironmentBug, did_you_mean
from agent_loop.loading import import_extra
from agent_loop.runtime.describe import describe_error

EXTRA = "textarena"
NEEDS_DOWNLOAD = frozenset(
    {
        "Codenames",
        "Crosswords",
        "DontSayIt",
        "Hangman",
        "LetterAuction",
        "SpellingBee",
        "WordChains",
        "WordLadder",
        "WordSearch",
        "Wordle",
    }
)
"""Folders of games that download word lists of NLTK when they are imported or started."""
NEEDS_SERVICE = frozenset(["Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"])
"""Folders of games with a judge or game master, which is a model behind OpenRouter."""
NUMBERS_OF_PLAYERS = (2, 1, *range(3, 16))
"""Numbers of players in the order in which they are tried if none is given."""
BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\]")
GENERIC_MOVES = (
    *(f"[{number}]" for number in range(21)),
    *(f"[{row} {column}]" for row in range(8) for column in range(8)),
    *(f"[{row},{column}]" for row in range(8) for column in range(8)),
)
"""Moves to try in games whose texts hold no legal move in brackets."""
MAX_ATTEMPTS = 10
"""Invalid moves with which a seat forfeits. Games allow one or a few."""
_lock = RLock()
"""Held while a game runs: all games draw from Python's global generator of random numbers."""


class TextArenaOptions(SizedOptions):
    """Options of a game."""

    players: Positive | None = None
    """Number of players. None is 2, or the smallest other number that the game accepts."""
    opponent: str = POLICY
    """Player of the other seats, as in the column `players`: `policy` is self-play. With another player the rows give
    the policy each seat in turn."""


class TextArenaSuite(TaskSuite):
    """Games of TextArena. Every seat's reward is the game's own."""

    name = "textarena"
    extra = EXTRA
    summary = "text games of one, two and more players"
    options: ClassVar[type[Section]] = TextArenaOptions
    reward_parts: ClassVar[Mapping[str, str]] = {"reward": "the game's own reward of the seat"}
    agent_name: ClassVar[str] = "game_agent"
    lists_tasks: ClassVar[bool] = False

    def tasks(self) -> Sequence[str]:
        specs = _registry()
        return sorted(
            name for name in specs if not name.endswith(("-raw", "-train")) and _reason(specs[name]) is None
        )

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        refuse_unplayable(task)
        num_players = options.players or _number_of_players(task)
        for index in count():
            key = {"game": task, "players": num_players, "seed": options.seed + index}
            game = TextArenaGame()
            game.reset({"task": key})
            seat = game.turn()
            prompt = "" if seat is None else game.observe(seat)
            players = [options.opponent] * num_players
            players[index % num_players] = POLICY
            yield {"raw_prompt": [{"role": "user", "content": prompt}], "task": key, "players": players}

    def environment(self) -> Game:
        return TextArenaGame()

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the game and its seed: the same deal belongs to one split, whoever plays it."""
        return "{game} {players} {seed}".format(**row["task"])


class TextArenaGame(Game):
    """One game. Its observations are those of TextArena, without the seat's own moves."""

    def reset(self, row: Mapping[str, Any]) -> int:
        task: Mapping[str, Any] = row["task"]
        refuse_unplayable(task["game"])
        self._random_state = random.Random(task["seed"]).getstate()
        try:
            self._env = self._run(lambda: _textarena().make(task["game"]))
            self._run(lambda: self._env.reset(num_players=task["players"], seed=task["seed"]))
        except Exception as error:
            raise DataError(
                f"textarena:{task['game']} does not start with {task['players']} players: {describe_error(error)}; "
                "change the option players, or choose another game"
            ) from error
        self._inner = _unwrapped(self._env)
        self._seen: dict[int, list[str]] = {}
        self._is_over = False
        return task["players"]

    def turn(self) -> int | None:
        state = self._inner.state
        return None if self._is_over or state.done else state.current_player_id

    def observe(self, seat: int) -> str:
        texts = self._unread(seat)
        self._inner.state.observations[seat] = []
        self._seen.setdefault(seat, []).extend(texts)
        return "\n".join(texts)

    def act(self, seat: int, text: str) -> None:
        is_over, _ = self._run(lambda: self._env.step(text))
        self._is_over = bool(is_over)

    def forfeit(self, seat: int) -> None:
        """Make invalid moves until the game takes the turn from the seat."""
        for _ in range(MAX_ATTEMPTS):
            if self.turn() != seat:
                return
            self.act(seat, "")

    def rewards(self) -> dict[int, float]:
        rewards: Mapping[int, Any] | None = self._inner.state.rewards
        if rewards is None:
            raise EnvironmentBug(f"textarena:{self._env.env_id} is over and has no rewards")
        if not all(isinstance(reward, int | float) for reward in rewards.values()):
            raise EnvironmentBug(
                f"textarena:{self._env.env_id} ended with the rewards {rewards}, which are not all numbers"
            )
        return {seat: float(reward) for seat, reward in rewards.items()}

    def legal_moves(self, seat: int) -> list[str]:
        """Return the moves in the seat's observations that the game accepts, as copies of the game say.

        Without such moves, return the first of some numbers and coordinates that it accepts.
        """
        texts = "\n".join([*self._seen.get(seat, []), *self._unread(seat)])
        listed = dict.fromkeys(f"[{move}]" for move in BRACKETED.findall(texts))
        legal = [move for move in listed if self._accepts(seat, move)]
        if legal:
            return legal
        generic = random.Random(f"{len(texts)} {seat}").sample(GENERIC_MOVES, len(GENERIC_MOVES))
        legal = [move for move in generic if self._accepts(seat, move)]
        return legal or ["[pass]"]

    def _unread(self, seat: int) -> list[str]:
        state, own = self._inner.state, _textarena().core.ObservationType.PLAYER_ACTION
        return [
            f"[{_sender(state, sender)}] {text}"
            for sender, text, kind in state.observations.get(seat, [])
            if not (sender == seat and kind is own)
        ]

    def _accepts(self, seat: int, move: str) -> bool:
        trial = copy.deepcopy(self._env)
        state = _unwrapped(trial).state
        before = getattr(state, "error_count", 0)
        random_state = self._random_state
        try:
            self._run(lambda: trial.step(move))
        except Exception:  # noqa: BLE001  (some games raise at a move that they cannot parse)
            return False
        finally:
            self._random_state = random_state
        info: Mapping[str, Any] = state.game_info.get(seat, {})
        return getattr(state, "error_count", 0) <= before and not info.get("invalid_move", False)

    def _run(self, function: Callable[[], Any]) -> Any:
        """Call a function of the game with this game's own random numbers."""
        with _lock:
            others = random.getstate()
            random.setstate(self._random_state)
            try:
                return function()
            finally:
                self._random_state = random.getstate()
                random.setstate(others)


def refuse_unplayable(game: str) -> None:
    """Raise an error if a game does not exist, or needs a download or a service."""
    specs = _registry()
    if game not in specs:
        raise DataError(f"textarena:{game}: there is no such game{did_you_mean(game, specs)}")
    reason = _reason(specs[game])
    if reason is not None:
        raise DataError(f"textarena:{game} {reason}; choose another game")


def _reason(spec: Any) -> str | None:
    folder = str(spec.entry_point).split(".")[2]
    if folder in NEEDS_DOWNLOAD:
        return "downloads word lists of NLTK when it starts"
    if folder in NEEDS_SERVICE:
        return "needs a model behind OpenRouter as judge or game master"
    return None


@lru_cache(maxsize=256)
def _number_of_players(game: str) -> int:
    errors: list[DataError] = []
    for number in NUMBERS_OF_PLAYERS:
        try:
            TextArenaGame().reset({"task": {"game": game, "players": number, "seed": 0}})
            return number
        except DataError as error:
            errors.append(error)
    raise errors[0]


def _registry() -> Mapping[str, Any]:
    _textarena()
    return import_extra("textarena.envs.registration", extra=EXTRA, by="the suite textarena").ENV_REGISTRY


def _textarena() -> Any:
    try:
        return import_extra("textarena", extra=EXTRA, by="the suite textarena")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"textarena cannot be imported: {describe_error(error)}") from error


def _unwrapped(env: Any) -> Any:
    while hasattr(env, "env"):
        env = env.env
    return env


def _sender(state: Any, sender: int) -> str:
    return "GAME" if sender == -1 else str(state.role_mapping.get(sender, f"Player {sender}"))
