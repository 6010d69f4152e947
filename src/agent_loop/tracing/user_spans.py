"""Spans that users put around their own code, in the form that verl gives them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from agent_loop.runtime.activity import CURRENT, WaitKind, waiting_for
from agent_loop.tracing.bounded import bounded

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_IS_ON: ContextVar[bool] = ContextVar("agent_loop_user_spans", default=True)


def rollout_trace_op(function: FunctionT) -> FunctionT:
    """Records each call of a function, async or not, as a span of the trajectory for which it is made: its name, and
    inputs and output in bounded size. Outside of a rollout it costs next to nothing and records nothing."""
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
    """A span of the running trajectory around a piece of code, with these attributes.

    Args:
        trace: False records nothing of what `rollout_trace_op` and this would record inside of it.
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
    return CURRENT.get() is not None and _IS_ON.get()


@contextmanager
def _recorded(name: str, details: dict[str, Any]) -> Generator[dict[str, Any]]:
    with waiting_for(WaitKind.USER, name, details=details):
        try:
            yield details
        except BaseException as error:
            details["error"] = bounded(f"{type(error).__name__}: {error}")
            raise
