"""Validation of requests: field types, and the error that tells the client what to change."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from agent_loop.errors import RequestError, UnsupportedParameter, did_you_mean
from agent_loop.runtime.describe import one_line

UNSUPPORTED = "unsupported"
"""Type of the validation error for a value that is known and not supported."""
MAX_STOPS = 16

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^\S+$", max_length=256)]


class RequestModel(BaseModel):
    """Base class of request models. Unknown fields are refused, because ignoring a field may change the result."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    names_here: ClassVar[Mapping[str, str]] = {}
    """Fields of this model, by what other APIs call them. Errors about unknown fields suggest them."""
    ignored: ClassVar[Collection[str]] = ()
    """Fields that are accepted and have no effect."""

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = cast(dict[str, Any], value)
        return {name: each for name, each in given.items() if each is not None and name not in cls.ignored}

    @classmethod
    def read(cls, body: Mapping[str, Any] | Self) -> Self:
        """Return the request of a mapping. Raises `RequestError` if a field is unknown, missing or not valid."""
        if isinstance(body, cls):
            return body
        try:
            return cls.model_validate(body)
        except ValidationError as invalid:
            raise Fault.of(invalid, body, known=cls).error from None

    @classmethod
    @contextmanager
    def naming_errors(cls) -> Generator[None]:
        """Give errors about the translated chat request the names that its parameters have here."""
        try:
            yield
        except RequestError as error:
            name = parameter_of(error)
            if error.param is not None and name in cls.names_here:
                param = cls.names_here[name] + error.param.removeprefix(name)
                error.args = (str(error).replace(error.param, param, 1),)
                error.param = param
            raise

    def as_json(self) -> dict[str, Any]:
        """Return the fields that the client gave."""
        return self.model_dump(by_alias=True, exclude_unset=True)


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping without the values that are None."""
    return {name: value for name, value in values.items() if value is not None}


def only(*neutral: Any) -> AfterValidator:
    """Return the annotation of a parameter that is not supported, except for values that have no effect."""

    def check(value: Any) -> Any:
        # Unlike in Python, true is not equal to 1.
        if value is None or (type(value), value) in [(type(allowed), allowed) for allowed in neutral]:
            return value
        shown = one_line(json.dumps(value, default=repr), max_length=80)
        instead = f" or give {json.dumps(neutral[0])}" if neutral else ""
        raise unsupported(f"{shown} is not supported; leave it out{instead}")

    return AfterValidator(check)


def unsupported(message: str, *, wish: str = "") -> PydanticCustomError:
    """Return the validation error for a value that is known and not supported.

    Args:
        message: The message, without the name of the field.
        wish: Name under which a part of a parameter, such as one of several tools, may be dropped.
    """
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message, "wish": wish})


def _check_image_url(url: str) -> str:
    # Paths and other URLs are refused: they would make this machine read its files or send requests.
    if not url.startswith("data:"):
        raise ValueError("only images inside the request are supported; give a data URL")
    return url


DataUrl = Annotated[str, AfterValidator(_check_image_url)]


# -- errors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """The first of pydantic's errors about a request."""

    error: RequestError
    """Tells the client what to change."""
    path: Sequence[str | int]
    """Path of the field in the body."""
    wish: str
    """Name under which a part of a parameter, such as one of several tools, may be dropped; "" if it has none."""
    is_missing: bool

    @classmethod
    def of(cls, invalid: ValidationError, body: Any, *, known: type[RequestModel]) -> Fault:
        """Return the fault of a request, which has the fields of `known`."""
        first, path = _most_specific(invalid, body)
        wish = str(first.get("ctx", {}).get("wish", ""))
        return cls(_error_of(first, path, known=known), path, wish, first["type"] == "missing")


def _error_of(
    fault: Mapping[str, Any], path: Sequence[str | int], *, known: type[RequestModel]
) -> RequestError:
    name = _dotted(path)
    if fault["type"] == "extra_forbidden":
        return UnsupportedParameter(f"unknown parameter {name!r}{_suggestion(path, known=known)}", param=name)
    if fault["type"] == "missing":
        return RequestError(f"{name or 'the body'} is missing; give it", param=name or None)
    message = str(fault["msg"]).removeprefix("Value error, ")
    if fault["type"] == "union_tag_invalid":
        tag, expected = fault["ctx"]["tag"], fault["ctx"]["expected_tags"].replace("'", "")
        message = f"type {one_line(tag, max_length=80)} is not supported here; give {expected}"
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


def _most_specific(invalid: ValidationError, body: Any) -> tuple[Mapping[str, Any], list[str | int]]:
    """Return the first error and its path. For a value of a union, return those of the type that fits best."""
    faults = [(fault, _path_of(fault, body)) for fault in cast(Sequence[Mapping[str, Any]], invalid.errors())]
    first_path = faults[0][1]
    same_value = [(fault, path) for fault, path in faults if path[: len(first_path)] == first_path]

    def fit(each: tuple[Mapping[str, Any], list[str | int]]) -> tuple[int, bool, bool]:
        kind = str(each[0]["type"])
        return len(each[1]), not kind.endswith("_type"), kind.startswith("union_tag")

    return max(same_value, key=fit)


def _path_of(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """Return the path of the field with the error in the body, without the names of a union's types."""
    path: list[str | int] = []
    *above, last = fault["loc"] or ("",)
    is_tag_known = False
    for part in above:
        fields = cast(Mapping[Any, Any], body if isinstance(body, Mapping) else {})
        if not is_tag_known and part in (fields.get("type"), fields.get("role")):
            is_tag_known = True  # a field may have the same name: {"type": "text", "text": ...}
        elif isinstance(part, int) or part in fields:
            path.append(part)
            body, is_tag_known = cast(Any, body)[part], False
    if fault["type"] == "missing" or isinstance(last, int) or (isinstance(body, Mapping) and last in body):
        path.append(last)
    return path


def _dotted(path: Sequence[str | int]) -> str:
    """Format a path, for example as `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
