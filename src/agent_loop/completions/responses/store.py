"""Stored responses, by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.completions.responses.response_models import ResponseObject
from agent_loop.errors import RequestError

MAX_RESPONSES = 1024
MAX_CHARACTERS = 256_000_000
"""Maximum size of all stored items, as JSON."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response with the conversation that it ends."""

    response: ResponseObject
    input_items: Sequence[Mapping[str, Any]]
    """Items of the whole conversation before the response, each with an id."""
    messages: Sequence[Mapping[str, Any]]
    """The same conversation as messages of a chat request, without instructions and with the response."""
    num_characters: int = 0


class ResponseStore:
    """Responses of one program, or of one server.

    The least recently used responses are removed when there are too many, but never the latest one. Responses that
    continue a removed one keep its conversation.

    Args:
        max_responses: Maximum number of responses.
        max_characters: Maximum size of all responses.
    """

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, stored: StoredResponse) -> None:
        """Store a response, or replace the response with the same id."""
        self.remove(stored.response.id)
        self._responses[stored.response.id] = stored
        self._num_characters += stored.num_characters
        while len(self._responses) > 1 and self._is_full:
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if there is no such response."""
        if response_id in self._responses:
            self._responses.move_to_end(response_id)
        return self._responses.get(response_id)

    def remove(self, response_id: str) -> bool:
        """Remove a response. Return whether there was one."""
        removed = self._responses.pop(response_id, None)
        if removed is not None:
            self._num_characters -= removed.num_characters
        return removed is not None

    def continued(self, response_id: str) -> StoredResponse:
        """Return the response that a request continues.

        Raises:
            RequestError: There is no such response, or it is not complete.
        """
        stored = self.get(response_id)
        param = "previous_response_id"
        if stored is None:
            raise RequestError(
                f"{param}: there is no response {response_id!r}; it may have been sent with store=false, or removed. "
                "Send the whole conversation as input",
                param=param,
                code="previous_response_not_found",
            )
        if stored.response.status not in ("completed", "incomplete"):
            raise RequestError(
                f"{param}: the response {response_id!r} is {stored.response.status}, and cannot be continued",
                param=param,
            )
        return stored

    def item(self, item_id: str) -> Mapping[str, Any] | None:
        """Return an item of a stored response or of its input; None if there is no such item."""
        for stored in reversed(self._responses.values()):
            for item in stored.response.output:
                if item.id == item_id:
                    return item.model_dump()
            for given in stored.input_items:
                if given["id"] == item_id:
                    return given
        return None

    @property
    def _is_full(self) -> bool:
        return len(self._responses) > self._max_responses or self._num_characters > self._max_characters
