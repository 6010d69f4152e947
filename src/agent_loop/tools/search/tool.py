"""The tool `search`: passages of a corpus on this machine, or of a retrieval service."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from agent_loop.config import Positive, PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError, DataError, ToolError
from agent_loop.runtime.describe import one_line
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.registry import expand_variables
from agent_loop.tools.search.index import Passage, SearchIndex, as_passage
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
        """Return the passages of each query, best first."""
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
            found.append(_passages(response.json())[:limit])
        return found


def _list_in(answer: Any) -> list[Any]:
    if isinstance(answer, Mapping):
        fields = cast(Mapping[str, Any], answer)
        answer = next((fields[key] for key in RESULT_KEYS if key in fields), None)
    if not isinstance(answer, list):
        found = one_line(repr(answer), max_length=200)
        raise ToolError(f"the service did not return a list of results: {found}")
    return cast(list[Any], answer)


def _passages(found: Any) -> list[Passage]:
    try:
        # A document may be nested beside its score.
        documents: list[Any] = [
            cast(dict[str, Any], item).get("document", item) if isinstance(item, dict) else item
            for item in _list_in(found)
        ]
        return [as_passage(document, where="a result") for document in documents]
    except DataError as error:
        raise ToolError(f"the service returned a result that is not a passage: {error}") from error


SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches for passages on the given queries and returns the best of each.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "minItems": 1,
                    "description": "Fully formed search queries, one for each thing to find out.",
                }
            },
            "required": ["query_list"],
        },
    },
}


class SearchConfig(Section):
    """Config of the tool. Exactly one of `corpus` and `retrieval_service_url` must be set."""

    corpus: list[str] = Field(default=[])
    """`.jsonl`, `.parquet`, `.txt` or `.md` files, or folders of them."""
    cache_dir: str = "~/.cache/agent_loop/search"
    """Folder of the indexes. Old indexes may be deleted whenever no search is running."""
    snippet_words: Annotated[int, Field(ge=1, le=64)] | None = 64
    """Number of words shown of a longer passage of the corpus, around the matches; None shows the whole passage."""
    retrieval_service_url: str | None = None
    method: Literal["post", "get"] = "post"
    """Form of the requests to the service; see `SearchService`."""
    headers: dict[str, str] = Field(default={})
    """Headers of requests to the service; `$NAME` is an environment variable."""
    timeout: PositiveSeconds = 30.0
    """Seconds for one request to the service."""
    rate_limit: Positive | None = None
    """verl's name for the tool's `max_concurrent`."""
    num_workers: Positive | None = None
    """Another name of verl for `max_concurrent`; the smaller value applies."""
    topk: Positive = 3
    """Passages per query."""
    as_json: bool = False
    """Return `{"result": "..."}`, as verl's tool does, instead of plain text."""


class SearchTool(BaseTool):
    """Tool that returns passages in the format of Search-R1.

    The argument is `query_list`, or a single `query` if the schema defines that.
    """

    tool_schema: dict[str, Any] = SCHEMA
    on_replay = OnReplay.RECORDED

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] = SCHEMA) -> None:
        super().__init__(config, tool_schema)
        where = f"the config of tool {self.name!r}"
        settings = parse_section(SearchConfig, config, where=where)
        if bool(settings.corpus) == bool(settings.retrieval_service_url):
            raise ConfigError(f"{where} needs exactly one of corpus and retrieval_service_url")
        self._settings = settings
        headers = expand_variables(settings.headers, where=f"{where}: headers")
        self._client = WebClient(headers=headers, timeout_s=settings.timeout)
        limits = [limit for limit in (settings.rate_limit, settings.num_workers) if limit is not None]
        self.max_concurrent = min(limits, default=None)
        self._service = self._index = None
        if settings.retrieval_service_url:
            self.retries = 2
            self._service = SearchService(
                settings.retrieval_service_url, method=settings.method, client=self._client
            )
        else:
            self._index = SearchIndex(settings.corpus, cache_dir=Path(settings.cache_dir).expanduser())

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Search for all queries."""
        queries = parameters.get("query_list", parameters.get("query", []))
        queries = [queries] if isinstance(queries, str) else queries
        if not queries:
            raise ToolError("there is no query to search for")
        if self._service is not None:
            found = await self._service.search(queries, limit=self._settings.topk, instance_id=instance_id)
        else:
            found = await run_in_thread(self._search_index, queries)
        text = format_results(found)
        if self._settings.as_json:
            text = json.dumps({"result": text}, ensure_ascii=False)
        num_found = sum(map(len, found))
        return ToolResponse(text=text), None, {"query_count": len(queries), "total_results": num_found}

    def _search_index(self, queries: Sequence[str]) -> list[list[Passage]]:
        assert self._index is not None
        limit, snippet_words = self._settings.topk, self._settings.snippet_words
        return [self._index.search(query, limit=limit, snippet_words=snippet_words) for query in queries]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._client.release(instance_id)


def format_results(found: Sequence[Sequence[Passage]]) -> str:
    """Format passages as `Doc 1 (Title: ...)` and so on, with a line of dashes between queries."""
    shown = [
        [f"Doc {number} (Title: {title})\n{text}" for number, (title, text) in enumerate(passages, start=1)]
        for passages in found
    ]
    return "\n---\n".join("\n\n".join(passages) or "No search results found." for passages in shown)
