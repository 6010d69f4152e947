"""Calls that the model made, by their ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from agent_loop.completions.responses.response_models import CustomToolCall, FunctionCall, ResponseObject


class CallRecord:
    """Calls that the model made, by their ids. Old calls are forgotten when there are too many.

    Args:
        max_calls: Maximum number of calls.
    """

    def __init__(self, *, max_calls: int = 65536) -> None:
        self._max_calls = max_calls
        self._turns: OrderedDict[str, set[str]] = OrderedDict()
        """Responses with a call of this id. Some models give the same ids in every turn."""
        self._arguments: dict[str, dict[str, Mapping[str, Any]]] = {}

    def add(self, response: ResponseObject, *, custom_arguments: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the calls of a response."""
        for item in response.output:
            if not isinstance(item, FunctionCall | CustomToolCall):
                continue
            self._turns.setdefault(item.call_id, set()).add(response.id)
            if isinstance(item, CustomToolCall) and item.call_id in custom_arguments:
                arguments = custom_arguments[item.call_id]
                self._arguments.setdefault(item.call_id, {})[item.input] = arguments
        while len(self._turns) > self._max_calls:
            oldest, _ = self._turns.popitem(last=False)
            self._arguments.pop(oldest, None)

    def are_of_one_turn(self, call_ids: Sequence[str]) -> bool:
        """Return whether one response has all of these calls."""
        none: set[str] = set()
        first, *others = (self._turns.get(call_id, none) for call_id in call_ids)
        return bool(first.intersection(*others))

    def custom_arguments(self, call_id: str, text: str) -> Mapping[str, Any] | None:
        """Return the arguments that the model sampled for a call of a custom tool, if the client saw `text` for them.

        None if the arguments are the text alone.
        """
        return self._arguments.get(call_id, {}).get(text)
