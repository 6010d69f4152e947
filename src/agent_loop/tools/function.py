"""Turns a Python function into a tool."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from agent_loop.errors import ToolError
from agent_loop.runtime.boundary import OnReplay, call_function
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.signature import arguments_model, function_schema

P = ParamSpec("P")
R = TypeVar("R")


@overload
def function_tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def function_tool(
    *,
    name: str | None = None,
    description: str | None = None,
    on_replay: OnReplay | str = OnReplay.RECORDED,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def function_tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    on_replay: OnReplay | str = OnReplay.RECORDED,
) -> Any:
    """Makes a tool of a function: `@function_tool`, or `@function_tool(name=..., description=...)`.

    The model is shown the function's name, its docstring up to `Args:`, and for each parameter the type, the
    description in `Args:` and the default. Arguments arrive as the annotated types (enums, dataclasses and pydantic
    models too). One function serves many trajectories at once: keep state in a `BaseTool` subclass instead.

    An async function runs on the event loop. Any other runs in a thread of its own, so it may block; it must be safe
    to run in several threads, and one that passes its time limit goes on in its thread unheard.

    The model is answered with what the function returns: a str as it is, None as an empty text, a `ToolResponse` as it
    is, anything else as JSON, or as `str()` gives it where JSON has no form for it. Raise `ToolError` to tell the
    model that the call did not work; any other exception fails the trajectory as a bug.

    Args:
        function: The function, where the decorator is used bare.
        name: The tool's name; the function's own if None.
        description: What the model reads; the docstring's if None.
        on_replay: What becomes of recorded calls when a trajectory is run again after a crash; by default the
            recorded answer is given, which is right for a function without state or effects. A function with effects
            says `"once"`.

    Raises:
        ConfigError: There is no docstring, a parameter has no annotation, or it cannot be given by name.
    """

    def decorate(function: Callable[P, R]) -> FunctionTool[P, R]:
        return FunctionTool(function, name=name, description=description, on_replay=on_replay)

    return decorate if function is None else decorate(function)


class FunctionTool(BaseTool, Generic[P, R]):
    """A function as a tool; still callable as the function. See `function_tool`."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        on_replay: OnReplay | str = OnReplay.RECORDED,
    ) -> None:
        super().__init__(config={}, tool_schema=function_schema(function, name=name, description=description))
        self.on_replay = OnReplay(on_replay)
        self.function = function
        is_async = inspect.iscoroutinefunction(function)
        self._call: Callable[..., Any] = function if is_async else functools.partial(call_function, function)
        model = arguments_model(function)
        self._validator = model.__pydantic_validator__  # `model_validate` takes three times as long
        self._names = {field: str(info.alias) for field, info in model.model_fields.items()}
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Calls the function."""
        result = await self._call(**self._read_arguments(parameters))
        return result if isinstance(result, ToolResponse) else ToolResponse(text=_as_text(result)), None, {}

    def _read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            read = self._validator.validate_python(parameters)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
            raise ToolError("; ".join(faults)) from error
        return {self._names[field]: getattr(read, field) for field in read.model_fields_set}


def _as_text(result: Any) -> str:
    if result is None:
        return ""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=to_jsonable_python)
    except (TypeError, ValueError):
        return str(result)
