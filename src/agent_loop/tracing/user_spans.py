"""Spans around user code, with verl's names and arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from agent_loop.runtime.activity import CURRENT_ACTIVITY, WaitKind, waiting_for
from agent_loop.tracing.bounded import bounded

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_IS_ON: ContextVar[bool] = ContextVar("agent_loop_user_spans", default=True)


def rollout_trace_op(function: FunctionT) -> FunctionT:
    """Record each call of a function, sync or async, as a span of the current trajectory.

    The span holds the name of the function, and its inputs and output in bounded size. Outside a rollout nothing is
    recorded, at almost no cost.
    """
    signature = inspect.signature(function)

    def details_of(args: Any, kwargs: Any) -> dict[str, Any]:
        inputs = dict(signature.bind(*args, **kwargs).arguments)
        inputs.pop("self", None)
        return {"inputs": bounded(inputs)}

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if not _is_recorded():
            return await function(*args, **kwargs)
        with _recorded(function.__qualname__, details_of(args, kwargs)) as details:
            result = await function(*args, **kwargs)
            details["output"] = bounded(result)
            return result

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_recorded():
            return function(*args, **kwargs)
        with _recorded(function.__qualname__, details_of(args, kwargs)) as details:
            result = function(*args, **kwargs)
            details["output"] = bounded(result)
            return result

    return cast(FunctionT, call_async if inspect.iscoroutinefunction(function) else call)


@contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Generator[None]:
    """Record a span with these attributes around a block of code in the current trajectory.

    Args:
        trace: False disables `rollout_trace_op` and `rollout_trace_attr` inside the block.
    """
    if not trace:
        token = _IS_ON.set(False)
        try:
            yield
        finally:
            _IS_ON.reset(token)
        return
    if not _is_recorded():
        yield
        return
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n}
    attributes = {key: value for key, value in given.items() if value is not None} | {"validate": validate}
    with _recorded(name, {"attributes": attributes}):
        yield


def _is_recorded() -> bool:
    return CURRENT_ACTIVITY.get() is not None and _IS_ON.get()


@contextmanager
def _recorded(name: str, details: dict[str, Any]) -> Generator[dict[str, Any]]:
    with waiting_for(WaitKind.USER, name, details=details):
        try:
            yield details
        except BaseException as error:
            details["error"] = bounded(f"{type(error).__name__}: {error}")
            raise
