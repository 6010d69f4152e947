"""Field types of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from agent_loop.chat.messages import shown_tool
from agent_loop.errors import RequestError, UnsupportedParameter, did_you_mean
from agent_loop.runtime.describe import one_line
from agent_loop.tools.json_schema import InvalidSchema, check_json_schema
from agent_loop.types import SamplingParams

MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
MAX_STOPS = 16


class RequestModel(BaseModel):
    """Base class of request models. Unknown fields are refused, because ignoring a field may change the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    names_here: ClassVar[Mapping[str, str]] = {}
    """Fields of this model, by what other APIs call them. Errors about unknown fields suggest them."""


UNSUPPORTED = "unsupported"
"""Type of the validation error for a value that is known and not supported."""


class Only:
    """Annotation of a known parameter that is not supported. Only values that have no effect are accepted.

    Args:
        neutral: Accepted values, besides null.
    """

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"enum": [None, *self._neutral]}

    def _checked(self, value: Any) -> Any:
        if value is not None and not any(_is_same(value, allowed) for allowed in self._neutral):
            instead = f" or give {json.dumps(self._neutral[0])}" if self._neutral else ""
            raise PydanticCustomError(
                UNSUPPORTED,
                "{message}",
                {"message": f"{_shown(value)} is not supported; leave it out{instead}"},
            )
        return value


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true is not equal to 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _shown(value: Any) -> str:
    return one_line(json.dumps(value, default=repr), max_length=80)


Ignored = Annotated[Any, WithJsonSchema({})]
"""Field that is accepted and has no effect."""


class _Function(RequestModel):
    name: Annotated[str, Field(pattern=r"^\S+$", max_length=256)]
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
    """Name of a tool."""

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


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, Mapping):
        return str(cast(Mapping[str, Any], choice).get("type"))
    return str(getattr(choice, "type", "str"))


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("str")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice",
        custom_error_message='give "auto", "none", "required", or an object of type "function" or "allowed_tools"',
    ),
]


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
    """Schema of a JSON answer."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[
        dict[str, Any],
        AfterValidator(_checked_schema),
        WithJsonSchema({"type": "object"}),
        Field(alias="schema"),
    ]
    strict: bool | None = None
    """Has no effect: an answer always has to match the schema."""


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")
]


MAX_TOP_LOGPROBS = 20
RequestModelT = TypeVar("RequestModelT", bound=RequestModel)


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None
    """End the stream with a chunk that holds the token counts."""
    include_obfuscation: Ignored = None


class SamplingRequest(RequestModel):
    """Fields of both chat and text completion requests."""

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

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    logit_bias: Annotated[Any, Only({})] = None
    best_of: Annotated[Any, Only(1)] = None

    @classmethod
    def read(cls, body: Mapping[str, Any] | Self) -> Self:
        """Return the request of a mapping. Raises `RequestError` if a field is unknown, missing or not valid."""
        return body if isinstance(body, cls) else read_part(cls, body)

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


class ChatMessage(RequestModel):
    """Message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    """Text, or content parts of type `text`, or `image_url` with a data URL."""
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Tool calls of an assistant message, as in the response."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Reasoning of an assistant message."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    audio: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only({})] = None

    @model_validator(mode="before")
    @classmethod
    def _read_assistant(cls, value: Any) -> Any:
        """Ignore unknown fields of assistant messages, which agent frameworks add."""
        if not isinstance(value, dict) or cast(Any, value).get("role") != "assistant":
            return cast(Any, value)
        given = cast(dict[str, Any], value)
        fields = {name: each for name, each in given.items() if name in cls.model_fields}
        if fields.get("reasoning") and not fields.get("reasoning_content"):
            fields["reasoning_content"] = fields["reasoning"]
        return fields


class ChatCompletionRequest(SamplingRequest):
    """Body of `/v1/chat/completions`."""

    names_here = {
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
    modalities: Annotated[Any, Only(["text"])] = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Has no effect, because no chat template knows it."""
    prediction: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only()] = None
    web_search_options: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("auto", "none")] = None

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
    echo: Annotated[Any, Only(False)] = None
    suffix: Annotated[Any, Only("")] = None

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


def read_part(model: type[RequestModelT], value: Any, *, where: str = "") -> RequestModelT:
    """Validate a request or a part of it, and return it.

    Args:
        model: Model of the value.
        value: JSON value.
        where: Path of the value in the request, for errors.
    """
    try:
        return model.model_validate(value)
    except ValidationError as invalid:
        error = request_error(cast(Sequence[Mapping[str, Any]], invalid.errors()), known=model)
        if not where:
            raise error from None
        name = f"{where}.{error.param}" if error.param else where
        text = str(error).replace(error.param or "the body", name, 1)
        raise type(error)(text, param=name) from None


def request_error(faults: Sequence[Mapping[str, Any]], *, known: type[RequestModel]) -> RequestError:
    """Return the first of pydantic's errors as a `RequestError` that tells the client what to change."""
    fault = _most_specific(faults)
    path = fault_path(fault)
    name = _dotted(path)
    if fault["type"] == "extra_forbidden":
        return UnsupportedParameter(f"unknown parameter {name!r}{_suggestion(path, known=known)}", param=name)
    if fault["type"] == "missing":
        return RequestError(f"{name or 'the body'} is missing; give it", param=name or None)
    message = str(fault["msg"]).removeprefix("Value error, ")
    kind = UnsupportedParameter if fault["type"] == UNSUPPORTED else RequestError
    return kind(f"{name or 'the body'}: {message[:1].lower()}{message[1:]}", param=name or None)


def _suggestion(path: Sequence[Any], *, known: type[RequestModel]) -> str:
    """Return what to send instead of an unknown field."""
    if len(path) > 1:
        return ""
    name = str(path[0])
    if name in known.names_here:
        return f"; here it is {known.names_here[name]}"
    return did_you_mean(name, known.model_fields)


def parameter_of(error: RequestError) -> str:
    """Return the name of the top-level field of a request that an error is about; "" if there is none."""
    return re.split(r"[.\[]", error.param or "", maxsplit=1)[0]


def _most_specific(faults: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first error. For a value of a union, return the error of the type that fits best."""
    first_path = fault_path(faults[0])
    same_value = [fault for fault in faults if fault_path(fault)[: len(first_path)] == first_path]
    return max(
        same_value, key=lambda fault: (len(fault_path(fault)), not str(fault["type"]).endswith("_type"))
    )


def fault_path(fault: Mapping[str, Any]) -> list[Any]:
    """Return the path of the field with the error, without the names of a union's types."""
    path: list[Any] = [part for part in fault["loc"] if part != "body"]
    is_unknown = fault["type"] == "extra_forbidden"
    above, last = (path[:-1], path[-1:]) if is_unknown else (path, [])  # an unknown field may have any name
    fields = [p for p in above if isinstance(p, int) or (str(p).isidentifier() and p not in _BRANCHES)]
    # The tag of a union has the name of its only field: `json_schema.json_schema`.
    return [p for p, before in zip(fields, [None, *fields], strict=False) if p != before] + last


def _dotted(path: Sequence[Any]) -> str:
    """Format a path, for example as `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


_BRANCHES = {"str", "dict", "int", "bool"}
