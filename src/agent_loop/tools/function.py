"""Tools made from Python functions."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from agent_loop.errors import ToolError
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.user_code import call_function
from agent_loop.tools.base import ArgumentChecking, BaseTool, ToolResponse
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
    check_arguments: ArgumentChecking | str = ArgumentChecking.STRICT,
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def function_tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    on_replay: OnReplay | str = OnReplay.RECORDED,
    check_arguments: ArgumentChecking | str = ArgumentChecking.STRICT,
) -> Any:
    """Turn a function into a tool: `@function_tool`, or `@function_tool(name=..., description=...)`.

    The model is shown the function's name, its docstring up to `Args:`, and for each parameter the type, the
    description in `Args:` and the default. Arguments are converted to the annotated types, including enums,
    dataclasses and pydantic models. One function serves many trajectories concurrently: for state, write a subclass of
    `BaseTool` instead.

    An async function runs on the event loop. A sync function runs in its own thread, so it may block, and must be
    thread-safe. A sync function that exceeds its time limit continues in its thread, and its result is discarded.

    The model reads what the function returns: a str unchanged, None as empty text, a `ToolResponse` unchanged, and
    anything else as JSON, or as `str()` formats it if it has no JSON form. Raise `ToolError` to report to the model
    that the call failed; any other exception fails the trajectory as a bug.

    Args:
        function: The function, where the decorator is used without arguments.
        name: The tool's name; the function's name if None.
        description: The description that the model reads; the docstring's if None.
        on_replay: What happens to recorded calls when a trajectory is resumed after a crash. By default the recorded
            response is reused, which is right for a function without state or effects. Use `"once"` for a function
            with effects.
        check_arguments: How arguments are checked against the schema before the conversion: `"strict"`, `"coerce"`, or
            `"off"`.

    Raises:
        ConfigError: The docstring is missing, or a parameter has no annotation or cannot be passed by name.
    """

    make: Any = functools.partial(
        FunctionTool, name=name, description=description, on_replay=on_replay, check_arguments=check_arguments
    )
    return make if function is None else make(function)


class FunctionTool(BaseTool, Generic[P, R]):
    """Tool made from a function, which can still be called as the function. See `function_tool`."""

    def __init__(
        self,
        function: Callable[P, R],
        *,
        name: str | None = None,
        description: str | None = None,
        on_replay: OnReplay | str = OnReplay.RECORDED,
        check_arguments: ArgumentChecking | str = ArgumentChecking.STRICT,
    ) -> None:
        super().__init__(config={}, tool_schema=function_schema(function, name=name, description=description))
        self.on_replay = OnReplay(on_replay)
        self.check_arguments = check_arguments
        self.function = function
        self._arguments_model = arguments_model(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Call the function with the converted arguments."""
        result = await call_function(self.function, **self._read_arguments(parameters))
        return result if isinstance(result, ToolResponse) else ToolResponse(text=_as_text(result)), None, {}

    def _read_arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        model = self._arguments_model
        try:
            read = model.model_validate(parameters)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
            raise ToolError("; ".join(faults)) from error
        return {str(model.model_fields[name].alias): getattr(read, name) for name in read.model_fields_set}


def _as_text(result: Any) -> str:
    if result is None:
        return ""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=to_jsonable_python)
    except (TypeError, ValueError):
        return str(result)
