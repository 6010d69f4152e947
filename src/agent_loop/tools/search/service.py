"""Client of a retrieval service over HTTP: Search-R1's, or any service that answers a GET with JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from agent_loop.errors import DataError, ToolError
from agent_loop.runtime.describe import one_line
from agent_loop.tools.search.corpus import Passage, as_passage
from agent_loop.tools.web.client import WebClient

RESULT_KEYS = ("result", "results", "documents", "hits")


class SearchService:
    """Client of a retrieval service.

    Args:
        url: URL of the service, as in `http://127.0.0.1:8000/retrieve`.
        method: `post` sends `{"queries": [...], "topk": 3, "return_scores": true}` and expects
            `{"result": [[{"document": {...}, "score": ...}, ...], ...]}`, one list per query, as Search-R1's retriever
            returns it. `get` sends `?query=...&topk=3` for each query and expects a list of documents, either directly
            or under one of `RESULT_KEYS`.
        client: HTTP client for the requests.
    """

    def __init__(self, url: str, *, method: Literal["post", "get"], client: WebClient) -> None:
        self._url = url
        self._method = method
        self._client = client

    async def search(self, queries: Sequence[str], *, limit: int, instance_id: str) -> list[list[Passage]]:
        """Return the passages of each query, best first.

        Raises:
            ToolUnavailable: The service cannot be reached, or is overloaded.
            ToolError: The service rejected the request, or its response does not contain passages.
        """
        if self._method == "post":
            body = {"queries": list(queries), "topk": limit, "return_scores": True}
            response = await self._client.request("POST", self._url, instance_id=instance_id, body=body)
            lists = _list_in(response.json())
            if len(lists) != len(queries):
                raise ToolError(
                    f"the service returned {len(lists)} lists of results for {len(queries)} queries"
                )
            return [_passages(found)[:limit] for found in lists]
        found: list[list[Passage]] = []
        for query in queries:
            parameters = {"query": query, "topk": limit}
            response = await self._client.request("GET", self._url, instance_id=instance_id, query=parameters)
            found.append(_passages(_list_in(response.json()))[:limit])
        return found


def _list_in(answer: Any) -> list[Any]:
    if isinstance(answer, Mapping):
        fields = cast(Mapping[str, Any], answer)
        answer = next((fields[key] for key in RESULT_KEYS if key in fields), None)
    if not isinstance(answer, list):
        raise ToolError(
            f"the service did not return a list of results: {one_line(repr(answer), max_length=200)}"
        )
    return cast(list[Any], answer)


def _passages(found: Any) -> list[Passage]:
    if not isinstance(found, list):
        raise ToolError(
            f"the service did not return a list of results: {one_line(repr(found), max_length=200)}"
        )
    try:
        return [as_passage(_document(item), where="a result") for item in cast(list[Any], found)]
    except DataError as error:
        raise ToolError(f"the service returned a result that is not a passage: {error}") from error


def _document(item: Any) -> Any:
    """Return the document of a result, which may be nested beside its score."""
    fields: Mapping[str, Any] = cast(Mapping[str, Any], item) if isinstance(item, Mapping) else {}
    return fields.get("document", item)
