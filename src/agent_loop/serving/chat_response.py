"""Responses to single OpenAI chat requests, for use inside another web application."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.chat import chat_completion, stream_chat_completion
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.sampling import Sampler
from agent_loop.errors import AgentLoopError
from agent_loop.serving.errors import (
    CLIENT_CLOSED_REQUEST,
    error_json_response,
    error_response_of,
    make_error,
    status_of,
)
from agent_loop.serving.streams import ClientConnection, ClientDisconnected, stream_response


async def chat_response(raw_request: Request, *, template: ChatTemplate, sampler: Sampler) -> Response:
    """Respond to a chat request with JSON, or with server-sent events if the request asks for a stream.

    Each request has its own session, which ends with the request. Errors become OpenAI error responses with the
    matching status. The completion is aborted if the client disconnects.

    Args:
        raw_request: The HTTP request.
        template: Chat template of the model.
        sampler: A server, or the `sampler` of an `AsyncLLMServerManager`.
    """
    try:
        request = ChatCompletionRequest.read(await _body_of(raw_request))
        connection = ClientConnection(raw_request.receive, asyncio.Event())
        if request.stream:
            chunks = stream_chat_completion(request, template=template, sampler=sampler)
            return await stream_response(chunks, connection=connection)
        completion = await connection.run(chat_completion(request, template=template, sampler=sampler))
    except AgentLoopError as error:
        return error_json_response(error_response_of(error), status=status_of(error))
    except HTTPException as error:
        status = error.status_code
        return error_json_response(make_error(str(error.detail), status=status), status=status)
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(from_json(completion.model_dump_json()))


async def _body_of(raw_request: Request) -> Any:
    try:
        return from_json(await raw_request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error
