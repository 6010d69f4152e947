"""The HTTP application of `agent-loop serve`: the OpenAI and Anthropic APIs in front of a pool of servers."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import BadPrompt, RequestError
from agent_loop.serve.chat import count_prompt_tokens, sample_chat
from agent_loop.serve.chat_replies import TextWriter
from agent_loop.serve.chat_requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from agent_loop.serve.completions import ReplyChunk, Sampler
from agent_loop.serve.errors import UnknownModel
from agent_loop.serve.metrics import CONTENT_TYPE, Metrics, health_of
from agent_loop.serve.responses_requests import CallRecord
from agent_loop.serve.routes import Completer, check_api_key, model_app, model_card, read_json, route
from agent_loop.serve.streams import ClientConnection, json_response, reply
from agent_loop.serve.text import prompts_of, sample_text, score_prompts
from agent_loop.serve.wishes import Wishes
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.types import IntArray

SamplingRequestT = TypeVar("SamplingRequestT", bound=SamplingRequest)
MAX_SESSIONS = 4096
"""Maximum number of idle sessions that clients named."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and how an application serves it."""

    manager: AsyncLLMServerManager
    """Servers of the model. The caller starts and closes their pool."""
    template: ChatTemplate
    model: str
    """Name of the model in requests."""
    max_model_len: int | None = None
    """Maximum context length in tokens; None leaves the check to the servers."""
    api_key: str | None = None
    """API key that clients must send; None allows requests without a key."""
    hosts: frozenset[str] | None = None
    """Host names that requests may use; None allows any. See `answered_hosts`."""
    why_no_tools: str = ""
    """Reason why requests with tools are refused; empty if tools are supported."""
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, name: str) -> None:
        """Raise `UnknownModel` if a request names another model."""
        if name != self.model:
            message = f"there is no model {name!r}; this server has {self.model!r}"
            raise UnknownModel(message, param="model", code="model_not_found")

    def check_prompt(self, prompt_ids: IntArray) -> None:
        """Raise `BadPrompt` if a prompt leaves no room for a sampled token."""
        longest = self.max_model_len
        if longest is not None and len(prompt_ids) >= longest:
            raise BadPrompt(
                f"the prompt has {len(prompt_ids)} tokens, but the limit is {longest - 1}, because the context of "
                f"{longest} tokens must have room for a sampled token; shorten the prompt"
            )


def create_app(served: ServedModel) -> Starlette:
    """Return an ASGI application that serves the OpenAI and Anthropic APIs from a pool of servers."""
    pool_app = _PoolApp(served)
    return model_app(
        pool_app.open,
        hosts=served.hosts,
        more=pool_app.more_routes,
        observe=pool_app.metrics.observe,
    )


class _PoolApp:
    """State that all requests share."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.metrics = Metrics()
        self.calls = CallRecord()
        self.sessions = _SessionTable(served.manager)

    def more_routes(self, stopping: asyncio.Event) -> list[Route]:
        """Return the routes besides those of the chat APIs."""
        return [
            route("POST", "/v1/completions", partial(self._complete_text, stopping=stopping)),
            route("GET", "/health", self._health),
            route("GET", "/metrics", self._metrics_text),
        ]

    def open(self, request: Request) -> Completer:
        """Check the API key and the session's name of a request."""
        session = self._session_of(request)
        return Completer(
            self.served.template,
            self.calls,
            partial(self._sample_chat, session=session),
            self._count_tokens,
            self._model_card,
            Wishes(are_offered=False),
        )

    def _session_of(self, request: Request) -> str | None:
        if self.served.api_key is not None:
            check_api_key(request, self.served.api_key)
        session = request.headers.get("x-session-id")
        if session is not None and not 1 <= len(session) <= 256:
            raise RequestError("x-session-id: give between 1 and 256 characters", param="x-session-id")
        return session

    def _model_card(self, name: str | None) -> Mapping[str, Any]:
        served = self.served
        if name is not None:
            served.check_name(name)
        return model_card(served.model, created=served.created, max_model_len=served.max_model_len)

    async def _count_tokens(self, chat: ChatCompletionRequest) -> int:
        self.served.check_name(chat.model)
        return await count_prompt_tokens(chat, template=self.served.template)

    def _sample_chat(self, chat: ChatCompletionRequest, *, session: str | None) -> AsyncGenerator[ReplyChunk]:
        served = self.served
        if chat.tools_in_use and served.why_no_tools:
            raise RequestError(f"tools: {served.why_no_tools}", param="tools")
        served.check_name(chat.model)
        sample = partial(
            sample_chat, template=served.template, sampler=served.manager, check_prompt=served.check_prompt
        )
        return self._in_session(chat, sample, session=session)

    async def _in_session(
        self,
        body: SamplingRequestT,
        sample: Callable[[SamplingRequestT], AsyncGenerator[ReplyChunk]],
        *,
        session: str | None,
    ) -> AsyncGenerator[ReplyChunk]:
        """Sample in the session that the client names."""
        with self.sessions.use(session or body.session_id) as session_id:
            chunks = sample(body.model_copy(update={"session_id": session_id}))
            async with aclosing(self.metrics.counted(chunks, is_streamed=body.stream)) as counted:
                async for chunk in counted:
                    yield chunk

    async def _complete_text(self, request: Request, *, stopping: asyncio.Event) -> Response:
        """Complete a text or token ids, or score them."""
        session, served = self._session_of(request), self.served
        template, manager = served.template, served.manager
        body = CompletionRequest.read(await read_json(request))
        served.check_name(body.model)
        connection = ClientConnection(request.receive, stopping)
        if body.is_scored:
            limit = served.max_model_len
            scored = await connection.run(
                score_prompts(body, template=template, manager=manager, max_model_len=limit)
            )
            self.metrics.prompt_tokens.inc(scored["usage"]["prompt_tokens"])
            return json_response(scored)
        prompts = prompts_of(body, template=template)
        for prompt in prompts:
            served.check_prompt(prompt)
        writer = TextWriter(body, template, num_prompt_tokens=sum(map(len, prompts)))
        sample = partial(sample_text, prompts=prompts, template=template, sampler=manager)
        chunks = self._in_session(body, sample, session=session)
        return await reply(chunks, connection=connection, writer=writer, is_streamed=body.stream)

    async def _health(self, request: Request) -> Response:
        """Report the health and load of each server."""
        servers = await health_of(self.served.manager.pool)
        is_ok = all(server["is_alive"] for server in servers)
        body = {"status": "ok" if is_ok else "down", "servers": servers}
        return json_response(body, status=200 if is_ok else 503)

    async def _metrics_text(self, request: Request) -> Response:
        """Return metrics for Prometheus."""
        text = self.metrics.render(await health_of(self.served.manager.pool))
        return Response(text, media_type=CONTENT_TYPE)


class _SessionTable:
    """Sessions named by clients. Requests of one session go to the same server, which has their prefix in its cache.

    The least recently used session is ended when there are too many.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._busy: set[str] = set()

    @contextmanager
    def use(self, name: str | None) -> Generator[str | None]:
        """Yield the session id of a name, and mark the session as busy until exit.

        Yields None if there is no name, or if another request is using the session. Such a request is sampled in its
        own session, because a session takes one request at a time.
        """
        if name is None or name in self._busy:
            yield None
            return
        self._idle.pop(name, None)
        self._busy.add(name)
        try:
            yield f"named-{name}"
        finally:
            self._busy.discard(name)
            self._idle[name] = None
            if len(self._idle) > MAX_SESSIONS:
                oldest, _ = self._idle.popitem(last=False)
                self._sampler.end_session(f"named-{oldest}")
