"""Responses of the Responses API: those that are stored, and those that run in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, Literal

from starlette.exceptions import HTTPException

from agent_loop.completions.response_models import ChatCompletion
from agent_loop.completions.responses.calls import CallRecord
from agent_loop.completions.responses.requests import ResponsesRequest
from agent_loop.completions.responses.response_models import (
    DeletedResponse,
    InputItemList,
    ResponseObject,
)
from agent_loop.completions.responses.store import MAX_CHARACTERS, ResponseStore, StoredResponse
from agent_loop.completions.responses.translation import PreparedResponse, prepare_response
from agent_loop.completions.responses.writer import ResponseWriter
from agent_loop.errors import AgentLoopError
from agent_loop.serving.errors import error_response_of, make_error

logger = logging.getLogger(__name__)


class ResponseRecords:
    """Responses of one program, or of one server.

    Args:
        max_characters: Maximum size of the stored responses.
    """

    def __init__(self, *, max_characters: int = MAX_CHARACTERS) -> None:
        self._store = ResponseStore(max_characters=max_characters)
        self._calls = CallRecord()
        self._running: dict[str, asyncio.Task[None]] = {}

    def prepare(self, body: ResponsesRequest, *, wishes: Collection[str] = ()) -> PreparedResponse:
        """Translate a request.

        Args:
            body: The request.
            wishes: Hosted tools that the request may do without, by names such as `tools.web_search`.

        Raises:
            RequestError: The request uses a feature that is not supported, or names a response that is not stored.
        """
        return prepare_response(body, store=self._store, calls=self._calls, wishes=wishes)

    def writer(self, prepared: PreparedResponse) -> ResponseWriter:
        """Return the writer of a response."""
        return ResponseWriter(prepared, store=self._store, calls=self._calls)

    # -- background ------------------------------------------------------------------------------------------------

    def start(
        self,
        prepared: PreparedResponse,
        *,
        complete: Callable[[], Coroutine[Any, Any, ChatCompletion]],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> ResponseObject:
        """Start a response in the background, and return it as it is.

        Args:
            prepared: The request.
            complete: Samples the completion.
            start_task: Starts a task that outlives the HTTP request.
        """
        writer = self.writer(prepared)
        started = writer.start()
        task = start_task(_write_completion(writer, complete))
        self._running[prepared.id] = task
        task.add_done_callback(partial(self._on_done, prepared.id, writer))
        return started

    async def cancel(self, response_id: str) -> ResponseObject:
        """Abort a response in the background. A response that has ended stays as it is.

        Raises:
            HTTPException: The response is unknown, or was not started in the background.
        """
        if not self._stored(response_id).response.background:
            raise HTTPException(400, "only responses with background=true can be cancelled")
        await self._abort(response_id)
        return self._stored(response_id).response

    def _on_done(self, response_id: str, writer: ResponseWriter, task: asyncio.Task[None]) -> None:
        self._running.pop(response_id, None)
        if task.cancelled() and self._store.get(response_id) is not None:
            writer.write_cancellation()

    async def _abort(self, response_id: str) -> None:
        task = self._running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)  # `_on_done` runs in the next step of the event loop

    # -- stored ----------------------------------------------------------------------------------------------------

    def retrieve(self, response_id: str) -> ResponseObject:
        """Return a stored response.

        Raises:
            HTTPException: The response is unknown.
        """
        return self._stored(response_id).response

    async def delete(self, response_id: str) -> DeletedResponse:
        """Remove a stored response. Abort it if it is running.

        Raises:
            HTTPException: The response is unknown.
        """
        self._stored(response_id)
        await self._abort(response_id)
        self._store.remove(response_id)
        return DeletedResponse(id=response_id)

    def input_items(
        self, response_id: str, *, after: str | None, limit: int, order: Literal["asc", "desc"]
    ) -> InputItemList:
        """Return a page of the items of the conversation before a response.

        Raises:
            HTTPException: The response or the item `after` is unknown.
        """
        items = list(self._stored(response_id).input_items)
        if order == "desc":
            items.reverse()
        ids = [str(item["id"]) for item in items]
        if after is not None and after not in ids:
            raise HTTPException(404, f"the response has no input item {after!r}")
        start = 0 if after is None else ids.index(after) + 1
        page = [_as_dict(item) for item in items[start : start + limit]]
        return InputItemList(
            data=page,
            first_id=str(page[0]["id"]) if page else None,
            last_id=str(page[-1]["id"]) if page else None,
            has_more=start + limit < len(items),
        )

    def _stored(self, response_id: str) -> StoredResponse:
        stored = self._store.get(response_id)
        if stored is None:
            raise HTTPException(
                404,
                f"there is no response {response_id!r}; it may have been sent with store=false, or removed",
            )
        return stored


async def _write_completion(
    writer: ResponseWriter, complete: Callable[[], Coroutine[Any, Any, ChatCompletion]]
) -> None:
    """Sample the completion and write the response. An error becomes a failed response."""
    try:
        writer.write_whole(await complete())
    except AgentLoopError as error:
        writer.write_failure(error_response_of(error))
    except Exception as error:
        logger.exception("a response in the background failed")
        writer.write_failure(make_error(f"internal error: {type(error).__name__}", status=500))


def _as_dict(item: Mapping[str, Any]) -> dict[str, Any]:
    return dict(item)
