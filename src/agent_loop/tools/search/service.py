"""Asks a retrieval service over HTTP: that of Search-R1, or any that answers a GET with JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from agent_loop.errors import DataError, ToolError
from agent_loop.runtime.boundary import one_line
from agent_loop.tools.search.corpus import Passage, as_passage
from agent_loop.tools.web.client import WebClient

RESULT_KEYS = ("result", "results", "documents", "hits")


class SearchService:
    """A service behind a URL.

    Args:
        url: Where it listens, as in `http://127.0.0.1:8000/retrieve`.
        method: `post` sends `{"queries": [...], "topk": 3, "return_scores": true}` and expects
            `{"result": [[{"document": {...}, "score": ...}, ...], ...]}`, one list per query, as Search-R1's retriever
            has it. `get` sends `?query=...&topk=3` for each query and expects a list of documents, itself or under
            one of `RESULT_KEYS`.
        client: Its connections.
    """

    def __init__(self, url: str, *, method: Literal["post", "get"], client: WebClient) -> None:
        self._url = url
        self._method = method
        self._client = client

    async def search(self, queries: Sequence[str], *, limit: int, instance_id: str) -> list[list[Passage]]:
        """For each query its passages, the best first.

        Raises:
            ToolUnavailable: The service cannot be reached, or is too busy.
            ToolError: It refused the request, or answered something else than passages.
        """
        if self._method == "post":
            body = {"queries": list(queries), "topk": limit, "return_scores": True}
            answer = await self._client.request("POST", self._url, instance_id=instance_id, body=body)
            lists = _list_in(answer.json())
            if len(lists) != len(queries):
                raise ToolError(
                    f"the service answered {len(lists)} lists of results for {len(queries)} queries"
                )
            return [_passages(found)[:limit] for found in lists]
        found: list[list[Passage]] = []
        for query in queries:
            asked = {"query": query, "topk": limit}
            answer = await self._client.request("GET", self._url, instance_id=instance_id, query=asked)
            found.append(_passages(_list_in(answer.json()))[:limit])
        return found


def _list_in(answer: Any) -> list[Any]:
    if isinstance(answer, Mapping):
        fields = cast(Mapping[str, Any], answer)
        answer = next((fields[key] for key in RESULT_KEYS if key in fields), None)
    if not isinstance(answer, list):
        raise ToolError(f"the service answered no list of results: {one_line(repr(answer), max_length=200)}")
    return cast(list[Any], answer)


def _passages(found: Any) -> list[Passage]:
    if not isinstance(found, list):
        raise ToolError(f"the service answered no list of results: {one_line(repr(found), max_length=200)}")
    try:
        return [as_passage(_document(item), where="a result") for item in cast(list[Any], found)]
    except DataError as error:
        raise ToolError(f"the service answered what is no passage: {error}") from error


def _document(item: Any) -> Any:
    """A result may hold its document beside its score."""
    fields: Mapping[str, Any] = cast(Mapping[str, Any], item) if isinstance(item, Mapping) else {}
    return fields.get("document", item)
