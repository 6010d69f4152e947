"""Field types of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from agent_loop.chat.messages import shown_tool
from agent_loop.runtime.describe import one_line
from agent_loop.tools.json_schema import InvalidSchema, check_json_schema

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


class _Function(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^\S+$", max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Annotated[str, Field(pattern="^function$")]
    function: _Function


_TOOL = TypeAdapter(_Tool)


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if isinstance(kind, str) and kind != "function":
        raise ValueError(
            f"tools of type {one_line(kind, max_length=80)!r} are not supported; leave the tool out, or define a "
            "function that the client runs"
        )
    parameters = _TOOL.validate_python(tool).function.parameters
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


ToolSchema = Annotated[
    dict[str, Any],
    AfterValidator(_check_tool),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "pattern": r"^\S+$", "maxLength": 256},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                        "strict": {"type": ["boolean", "null"], "description": "Has no effect."},
                    },
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        }
    ),
]
"""Function schema. The order of its keys is kept, because chat templates render it."""
