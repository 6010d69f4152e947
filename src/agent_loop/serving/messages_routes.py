"""Routes of the Anthropic Messages API."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from agent_loop.completions.anthropic.errors import messages_error_event
from agent_loop.completions.anthropic.events import EventWriter
from agent_loop.completions.anthropic.messages import to_message, to_token_count
from agent_loop.completions.anthropic.requests import CountTokensRequest, MessagesRequest
from agent_loop.completions.anthropic.translation import to_chat_request
from agent_loop.completions.chat import chat_completion, count_prompt_tokens, stream_chat_completion
from agent_loop.serving.pool_requests import PoolRequests, SessionHeader
from agent_loop.serving.route_declarations import add_messages_routes
from agent_loop.serving.streams import EventFormat, json_response


class MessagesRoutes:
    """Messages, and counts of their tokens."""

    def __init__(self, requests: PoolRequests) -> None:
        self._requests = requests
        self._served = requests.served

    def add_to(self, router: APIRouter) -> None:
        """Add the routes to the router of requests that need the API key."""
        add_messages_routes(router, create=self._messages, count_tokens=self._count_tokens)

    async def _messages(
        self, body: MessagesRequest, request: Request, session: SessionHeader = None
    ) -> Response:
        """Complete a conversation of the Anthropic Messages API."""
        chat = to_chat_request(body, template=self._served.template)
        self._served.check_tools(chat)
        writer = EventWriter(body)
        return await self._requests.respond(
            chat,
            request,
            session,
            complete=chat_completion,
            stream=stream_chat_completion,
            to_response=partial(to_message, request=body),
            events=EventFormat(write=writer.write, write_error=messages_error_event, end=writer.end),
        )

    async def _count_tokens(self, body: CountTokensRequest) -> Response:
        """Count the tokens of a conversation's prompt."""
        self._served.check_name(body.model)
        template = self._served.template
        num_tokens = await count_prompt_tokens(to_chat_request(body, template=template), template=template)
        return json_response(to_token_count(num_tokens, request=body))
