"""Request model of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agent_loop.completions.fields import FiniteFloat, Ignored, Only, RequestModel

Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Additional output. Only the first two have an effect, because the others belong to hosted tools."""
MetadataText = Annotated[str, Field(max_length=512)]
SummaryKind = Literal["auto", "concise", "detailed"]


class ReasoningOptions(RequestModel):
    """How the model reasons, and how its reasoning is returned."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    """Same as `reasoning_effort` of chat requests."""
    summary: SummaryKind | None = None
    """If set, the whole reasoning is returned as the summary instead of as content."""
    generate_summary: SummaryKind | None = None
    """Older name of `summary`."""
    context: Annotated[Any, Only("auto", "all_turns")] = None
    """Reasoning of earlier turns stays in the conversation as far as the client sends it."""
    mode: Annotated[Any, Only("standard")] = None


class TextOptions(RequestModel):
    """Format of the text."""

    format: dict[str, Any] | None = None
    """Object with a `type`: `text`, `json_object`, or `json_schema` with `name`, `schema` and `strict`."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect."""


class ResponsesStreamOptions(RequestModel):
    """Options of a stream."""

    include_obfuscation: Ignored = None


class ResponsesRequest(RequestModel):
    """Body of `/v1/responses`."""

    names_here = {  # noqa: RUF012  (pydantic's ClassVar of the base class)
        "functions": "tools",
        "logprobs": 'include: ["message.output_text.logprobs"]',
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "system": "instructions",
        "verbosity": "text.verbosity",
    }

    model: str
    input: str | list[dict[str, Any]] | None = None
    """Text of a user message, or items: messages, calls, outputs of calls, reasoning and references to stored items."""
    instructions: str | None = None
    """System message before the conversation. Instructions of the previous response are not carried over."""
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    """Stored response that this request continues."""
    store: bool | None = None
    """Store the response, so that later requests can name it; true by default."""
    background: bool | None = None
    """Return at once; the response is retrieved later."""
    include: list[Includable] | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of type `function`, `custom`, or `namespace`, which groups functions."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Annotated[Any, Only("disabled")] = None
    metadata: Annotated[dict[str, MetadataText], Field(max_length=16)] | None = None
    """Returned unchanged."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None

    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None
    max_tool_calls: Ignored = None
    """Limits the calls of hosted tools only, which are not supported."""
    client_metadata: Ignored = None

    conversation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    context_management: Annotated[Any, Only([])] = None
    moderation: Annotated[Any, Only()] = None
    access_programs: Annotated[Any, Only()] = None
    background_options: Annotated[Any, Only()] = None
    image: Annotated[Any, Only()] = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_reasoning_summary(self) -> bool:
        options = self.reasoning
        return options is not None and bool(options.summary or options.generate_summary)

    def includes(self, name: Includable) -> bool:
        """Return whether the response should include this additional output."""
        return name in (self.include or ())
