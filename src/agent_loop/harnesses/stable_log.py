"""Episode log that finds recorded turns although a program writes dates or process ids into its messages."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.chat.multimodal import Encoded
from agent_loop.episode.turn_log import TurnLog
from agent_loop.types import Message

PLACEHOLDER = "*"


class StableLog:
    """Log that compares messages without the texts that differ whenever a program runs.

    A resumed program runs its own tools again, and tells the model today's date. Its messages then match the recorded
    ones, and the tokens are those on record, with the texts that the model saw before.

    Args:
        log: The log that records.
        volatile: Matches the texts that are left out of the comparison.
    """

    def __init__(self, log: TurnLog, volatile: re.Pattern[str]) -> None:
        self._log = log
        self._volatile = volatile

    @classmethod
    def wrap(cls, log: TurnLog, volatile: re.Pattern[str]) -> TurnLog:
        """Return the log as a `TurnLog`. What this class does not define is done by the wrapped log."""
        return cast(TurnLog, cls(log, volatile))

    def tokens(
        self, messages: Sequence[Message], *, encode: Callable[[], Awaitable[Encoded]]
    ) -> Awaitable[Encoded]:
        return self._log.tokens(self._stable(messages), encode=encode)

    def branch(self, *, at: Any) -> TurnLog:
        return self.wrap(self._log.branch(at=at), self._volatile)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def _stable(self, value: Any) -> Any:
        """Return a JSON value whose strings have placeholders for volatile texts."""
        if isinstance(value, str):
            return self._volatile.sub(PLACEHOLDER, value)
        if isinstance(value, Mapping):
            return {name: self._stable(each) for name, each in cast(Mapping[str, Any], value).items()}
        if isinstance(value, list | tuple):
            return [self._stable(each) for each in cast(Sequence[Any], value)]
        return value
