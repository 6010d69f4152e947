"""The tool `search`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from agent_loop.config import Positive, PositiveSeconds, Section, parse_section
from agent_loop.errors import ConfigError, ToolError
from agent_loop.runtime.boundary import OnReplay
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.environment import from_environment
from agent_loop.tools.search.corpus import Passage
from agent_loop.tools.search.index import SearchIndex
from agent_loop.tools.search.service import SearchService
from agent_loop.tools.web.client import WebClient

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
    """Give `corpus` or `retrieval_service_url`."""

    corpus: list[str] = Field(default=[])
    """`.jsonl`, `.parquet`, `.txt` or `.md` files, or folders of them."""
    cache_dir: str = "~/.cache/agent_loop/search"
    """Where indexes are kept. Old ones may be deleted at any time that nobody searches."""
    snippet_words: Annotated[int, Field(ge=1, le=64)] | None = 64
    """Of a longer passage of the corpus, so many words around what was asked for; None shows it whole."""
    retrieval_service_url: str | None = None
    method: Literal["post", "get"] = "post"
    """How the service is asked: see `SearchService`."""
    headers: dict[str, str] = Field(default={})
    """For the service; `$NAME` is an environment variable."""
    timeout: PositiveSeconds = 30.0
    """One request to the service."""
    rate_limit: Positive | None = None
    """verl's name of the tool's `max_concurrent`."""
    num_workers: Positive | None = None
    """Another; the smaller one holds."""
    topk: Positive = 3
    """Passages per query."""
    as_json: bool = False
    """Answer `{"result": "..."}`, as verl's tool does, and not the text alone."""


class Backend(Protocol):
    """Where passages come from."""

    async def search(
        self, queries: Sequence[str], *, limit: int, instance_id: str
    ) -> list[list[Passage]]: ...


class SearchTool(BaseTool):
    """Finds passages, in the form of Search-R1. The arguments are `query_list`, or one `query` if the schema says so.

    Raises:
        ConfigError: The config is wrong, or the corpus does not exist.
        DataError: The corpus cannot be read.
    """

    tool_schema: dict[str, Any] = SCHEMA
    on_replay = OnReplay.RECORDED

    def __init__(self, config: Mapping[str, Any], tool_schema: Mapping[str, Any] = SCHEMA) -> None:
        super().__init__(config, tool_schema)
        where = f"the config of tool {self.name!r}"
        settings = parse_section(SearchConfig, config, where=where)
        if bool(settings.corpus) == bool(settings.retrieval_service_url):
            raise ConfigError(f"{where} needs one of corpus and retrieval_service_url, and not both")
        self._settings = settings
        headers = from_environment(settings.headers, where=f"{where}: headers")
        self._client = WebClient(headers=headers, timeout_s=settings.timeout)
        limits = [limit for limit in (settings.rate_limit, settings.num_workers) if limit is not None]
        self.max_concurrent = min(limits, default=None)
        if settings.retrieval_service_url:
            self.retries = 2
            self._backend: Backend = SearchService(
                settings.retrieval_service_url, method=settings.method, client=self._client
            )
        else:
            self._backend = LocalSearch(settings)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Answers all queries at once."""
        queries = parameters.get("query_list", parameters.get("query", []))
        queries = [queries] if isinstance(queries, str) else queries
        if not queries:
            raise ToolError("there is no query to search for")
        found = await self._backend.search(queries, limit=self._settings.topk, instance_id=instance_id)
        text = format_results(found)
        if self._settings.as_json:
            text = json.dumps({"result": text}, ensure_ascii=False)
        num_found = sum(map(len, found))
        return ToolResponse(text=text), None, {"query_count": len(queries), "total_results": num_found}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._client.leave(instance_id)


class LocalSearch:
    """Searches an index, in threads."""

    def __init__(self, settings: SearchConfig) -> None:
        cache_dir = Path(settings.cache_dir).expanduser()
        self._index = SearchIndex(settings.corpus, cache_dir=cache_dir)
        self._snippet_words = settings.snippet_words

    async def search(self, queries: Sequence[str], *, limit: int, instance_id: str) -> list[list[Passage]]:
        """Raises: ToolError: A query holds no word."""

        def search_all() -> list[list[Passage]]:
            return [
                self._index.search(query, limit=limit, snippet_words=self._snippet_words) for query in queries
            ]

        return await run_in_thread(search_all)


def format_results(found: Sequence[Sequence[Passage]]) -> str:
    """The passages of each query as `Doc 1 (Title: ...)` and so on, queries divided by a line of dashes."""
    return "\n---\n".join(_format_query(passages) for passages in found)


def _format_query(passages: Sequence[Passage]) -> str:
    if not passages:
        return "No search results found."
    return "\n\n".join(
        f"Doc {number} (Title: {title})\n{text}" for number, (title, text) in enumerate(passages, start=1)
    )
