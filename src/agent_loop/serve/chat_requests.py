"""Requests of the chat completions and the text completions API."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agent_loop.chat.messages import shown_tool
from agent_loop.errors import RequestError
from agent_loop.runtime.describe import one_line
from agent_loop.serve.fields import (
    MAX_STOPS,
    DataUrl,
    FiniteFloat,
    RequestModel,
    StopText,
    ToolName,
    only,
)
from agent_loop.tools.json_schema import InvalidSchema, check_json_schema
from agent_loop.types import SamplingParams

MAX_TOKEN_ID = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]


class _Function(RequestModel):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted and ignored: calls are not constrained by a grammar."""


class _Tool(RequestModel):
    type: Literal["function"]
    function: _Function


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        raise ValueError(
            f"tools of type {one_line(kind, max_length=80)!r} are not supported; leave the tool out, or define a "
            "function that the client runs"
        )
    parameters = _Tool.model_validate(tool).function.parameters
    if parameters is not None:
        try:
            _check_schema(json.dumps(parameters))
        except (InvalidSchema, RecursionError) as error:
            raise ValueError(f"function.parameters is not a valid JSON schema: {error}") from error
    return shown_tool(tool)


@lru_cache(maxsize=1024)
def _check_schema(schema: str) -> None:
    """Check a JSON schema.

    Results are cached, because the check is the slowest part of reading a request and agents repeat their schemas.
    """
    check_json_schema(json.loads(schema))


ToolSchema = Annotated[dict[str, Any], AfterValidator(_check_tool)]
"""Function schema. The order of its keys is kept, because chat templates render it."""
ANY_OBJECT = '{"type": "object"}'
"""JSON schema of `response_format: {"type": "json_object"}`."""


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    """Tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(RequestModel):
    """Tools of the request that the model may call."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolsChoice(RequestModel):
    """Restricts the tools in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = (
    Literal["auto", "none", "required"]
    | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
)


def _named_tools(choice: ToolChoice | None) -> list[str]:
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    named = choice.allowed_tools.tools if isinstance(choice, AllowedToolsChoice) else ()
    return [tool.function.name for tool in named]


def _forces_call(choice: ToolChoice | None) -> bool:
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _checked_schema(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        check_json_schema(schema)
    except (InvalidSchema, RecursionError) as error:
        raise ValueError(f"it is not a valid JSON schema: {error}") from error
    return schema


class JsonSchemaFormat(RequestModel):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[
        dict[str, Any],
        AfterValidator(_checked_schema),
        Field(alias="schema"),
    ]
    strict: bool | None = None
    """Has no effect: an answer always has to match the schema."""


class TextFormat(RequestModel):
    type: Literal["text"]

    def as_chat(self) -> dict[str, Any]:
        return {"type": self.type}


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]

    def as_chat(self) -> dict[str, Any]:
        return {"type": self.type}


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")
]


MAX_TOP_LOGPROBS = 20


class StreamOptions(RequestModel):
    ignored = ("include_obfuscation",)

    include_usage: bool | None = None
    """End the stream with a chunk that holds the token counts."""


class SamplingRequest(RequestModel):
    """Fields of both chat and text completion requests."""

    ignored = (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    )

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """Number of completions, sampled independently."""
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Sampling temperature; 1 by default, 0 is greedy."""
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of the first completion; completion `i` has the seed `seed + i`."""
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    """Texts before which a completion ends."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Extension: number of most likely tokens to sample from; -1 and 0 mean no limit."""
    ignore_eos: bool | None = None
    """Extension: continue sampling after the model's end tokens."""
    stop_token_ids: list[TokenId] | None = None
    """Extension: token ids that end a completion, in addition to the model's end tokens."""
    return_token_ids: bool | None = None
    """Extension: return `prompt_token_ids`, and `token_ids` of each choice, exactly as received and sampled."""
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Extension: requests with the same id go to the same server. The header `x-session-id` has the same effect."""

    response_format: ResponseFormat | None = None
    """`json_schema` and `json_object` need a server that can constrain completions."""
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    """Penalty of tokens that the completion has. Penalties and `min_p` need a server that has them."""
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """Extension: factor by which tokens of the context become less likely; 1 is none."""
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    """Extension: smallest probability of a candidate, relative to the likeliest one."""

    logit_bias: Annotated[Any, only({})] = None
    best_of: Annotated[Any, only(1)] = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def json_schema(self) -> str:
        """JSON text of the schema that the completion must match; "" for any text."""
        if isinstance(self.response_format, SchemaFormat):
            return json.dumps(self.response_format.json_schema.schema_, ensure_ascii=False)
        return ANY_OBJECT if isinstance(self.response_format, JsonObjectFormat) else ""

    @property
    def num_top_logprobs(self) -> int:
        """Number of candidates whose log-probs are returned for each token."""
        return 0

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling_params(self, *, max_tokens: int | None, choice: int) -> SamplingParams:
        """Return the sampling parameters of one of the choices."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=None if self.seed is None else self.seed + choice,
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            min_p=self.min_p or 0.0,
            top_logprobs=self.num_top_logprobs,
            json_schema=self.json_schema,
        )


class LenientModel(RequestModel):
    """Part of a conversation. Unknown fields, which agent frameworks add, are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextPart(LenientModel):
    type: Literal["text"]
    text: str


class ImageUrl(LenientModel):
    url: DataUrl


class ImagePart(LenientModel):
    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(lambda url: {"url": url} if isinstance(url, str) else url)]


ContentPart: TypeAlias = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Tool calls of an assistant message, as in the response."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Reasoning of an assistant message."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    audio: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only({})] = None

    def as_message(self) -> dict[str, Any]:
        """Return the message with the fields that a `ChatTemplate` takes."""
        return {"content": None, **self.model_dump(exclude_none=True, exclude={"audio", "function_call"})}

    @model_validator(mode="before")
    @classmethod
    def _read_assistant(cls, value: Any) -> Any:
        """Ignore unknown fields of assistant messages, which agent frameworks add."""
        if not isinstance(value, dict) or cast(Any, value).get("role") != "assistant":
            return cast(Any, value)
        return {name: each for name, each in cast(dict[str, Any], value).items() if name in cls.model_fields}


class ChatCompletionRequest(SamplingRequest):
    """Body of `/v1/chat/completions`."""

    names_here = {  # noqa: RUF012  (pydantic's ClassVar of the base class)
        "input": "messages",
        "instructions": "a system message",
        "system": "a system message",
        "max_output_tokens": "max_completion_tokens",
        "reasoning": "reasoning_effort",
        "stop_sequences": "stop",
        "text": "response_format",
        "output_config": "response_format",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Older name of `max_completion_tokens`. Without either, the completion may fill the context."""
    tools: list[ToolSchema] | None = None
    tool_choice: ToolChoice | None = None
    """`required` and a named tool begin the turn with the opening of a call, which the model completes."""
    parallel_tool_calls: bool | None = None
    """With false, the completion ends after its first call."""
    continue_final_message: bool | None = None
    """Extension: continue the last message, which must be an assistant's text, instead of starting a new one."""
    add_generation_prompt: bool | None = None
    """Extension: must be the opposite of `continue_final_message`."""
    logprobs: bool | None = None
    """Return the log-prob of each sampled token: `log_softmax(logits / temperature)`."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of candidates to return for each token, with `logprobs`."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Extension: further variables of the chat template, such as `enable_thinking`."""
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    """Passed to the chat template if the template knows it, and ignored otherwise."""
    modalities: Annotated[Any, only(["text"])] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect, because no chat template knows it."""
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("auto", "none")] = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs: true")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _needs_tools(cls, choice: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        names = [tool["function"]["name"] for tool in info.data.get("tools") or ()]
        if _forces_call(choice) and not names:
            raise ValueError("it forces a call, but there are no tools; give tools, or leave it out")
        for named in _named_tools(choice):
            if named not in names:
                known = ", ".join(names) or "none"
                raise ValueError(f"it names {named!r}, which is not among the tools; they are {known}")
        return choice

    @property
    def tools_in_use(self) -> list[dict[str, Any]]:
        """Tools in the prompt; none if `tool_choice` is `none`."""
        if self.tool_choice == "none":
            return []
        allowed = _named_tools(self.tool_choice) if isinstance(self.tool_choice, AllowedToolsChoice) else None
        return [tool for tool in self.tools or () if allowed is None or tool["function"]["name"] in allowed]

    @property
    def forces_call(self) -> bool:
        """Whether the completion must be a tool call."""
        return _forces_call(self.tool_choice)

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that the completion must call; None if the model chooses one of several."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        names = [tool["function"]["name"] for tool in self.tools_in_use]
        return names[0] if self.forces_call and len(names) == 1 else None

    @property
    def has_one_call(self) -> bool:
        """Whether the completion ends after its first call."""
        return self.parallel_tool_calls is False and bool(self.tools_in_use)

    @property
    def num_top_logprobs(self) -> int:
        return self.top_logprobs or 0

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingRequest):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    """Text or token ids, or a list of either. Control tokens in a text are encoded as control tokens."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of sampled tokens; 16 by default. 0 is for `prompt_logprobs` only."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Extension: return the log-probs of the prompt's tokens at temperature 1, and this number of the likeliest tokens
    at each place. Needs `max_tokens` 0."""
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Number of candidates whose log-probs are returned for each token. 0 returns only the sampled token's."""
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None

    @property
    def is_scored(self) -> bool:
        """Whether the prompt is scored instead of completed."""
        if self.prompt_logprobs is None:
            if self.max_tokens == 0:
                raise RequestError(
                    "max_tokens is 0; give at least 1, or prompt_logprobs to score the prompt",
                    param="max_tokens",
                )
            return False
        if self.max_tokens != 0 or self.stream or self.num_choices != 1:
            raise RequestError(
                "a prompt is scored without a completion; with prompt_logprobs, set max_tokens to 0, and leave out n "
                "and stream",
                param="prompt_logprobs",
            )
        return True

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def num_top_logprobs(self) -> int:
        return 0 if isinstance(self.logprobs, bool) else self.logprobs or 0
