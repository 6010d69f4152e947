"""Base class of servers with verl's interface: lists of token ids, and chat requests from Starlette."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import BadServerReply, ConfigError
from agent_loop.runtime.describe import describe_value
from agent_loop.servers import base
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class AsyncServerBase(base.AsyncServerBase):
    """`agent_loop.AsyncServerBase` with verl's interface.

    A subclass defines `generate(prompt_ids: list[int], sampling_params: dict, request_id: str)`, which returns a list
    of response ids or a `TokenOutput`. All other methods have defaults.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "generate" in vars(cls):
            cast(Any, cls).generate = _adapt_generate(vars(cls)["generate"])

    async def chat_completion(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, raw_request: Request, *, template: ChatTemplate | None = None
    ) -> Response:
        """Return the response to an OpenAI chat request: JSON, or an event stream if the request sets `stream`.

        Args:
            raw_request: The HTTP request.
            template: Chat template of the model; by default the template that `AgentLoopManager` set.
        """
        from agent_loop.serve.routes import chat_response  # late: needs the extra `serve`

        template = template or self.template
        if template is None:
            raise ConfigError(
                f"chat_completion of {self.name} needs the model's chat template; pass template=, set "
                "server.template, or give the server to an AgentLoopManager"
            )
        return await chat_response(raw_request, template=template, sampler=self)


def _adapt_generate(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[TokenOutput]]:
    """Return a `generate` that calls verl's form with lists and dicts, and returns a `TokenOutput`."""

    @wraps(generate)
    async def generate_with_lists(
        self: AsyncServerBase,
        prompt_ids: IntArray | Sequence[int],
        sampling_params: SamplingParams | dict[str, Any],
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
        **more: Any,
    ) -> TokenOutput:
        params = SamplingParams.parse(sampling_params)
        if attachments:
            more["attachments"] = attachments
        returned = await generate(
            self, list(map(int, prompt_ids)), structs.asdict(params), request_id, **more
        )
        if isinstance(returned, TokenOutput):
            return returned
        if not isinstance(returned, (list, tuple)):
            raise BadServerReply(
                f"generate returned {describe_value(returned)}; return a list of token ids, or a TokenOutput",
                server=self.name,
                request_id=request_id,
            )
        ids = list(cast("Sequence[int]", returned))
        is_cut = params.max_tokens is not None and len(ids) >= params.max_tokens
        return TokenOutput(ids, None, "length" if is_cut else "stop")

    return generate_with_lists
