"""Tasks that user code starts: a SystemExit that one of them raises does not end the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.isolated_task import refusal_of


@contextmanager
def containing_tasks() -> Generator[None]:
    """Convert SystemExit and KeyboardInterrupt of tasks that a trajectory's code starts to RuntimeError.

    It applies to tasks that start in the body, on the running event loop. Contexts may overlap. asyncio raises these
    two exceptions out of the event loop, which would end every trajectory. Callbacks of `call_soon` and similar
    functions are not covered.
    """
    loop = asyncio.get_running_loop()
    factory = _FACTORIES.get(loop)
    if factory is None:
        factory = _FACTORIES[loop] = _TaskFactory(loop.get_task_factory())
        loop.set_task_factory(factory)
    factory.num_users += 1
    try:
        yield
    finally:
        factory.num_users -= 1
        if not factory.num_users:
            del _FACTORIES[loop]
            if loop.get_task_factory() is factory:
                loop.set_task_factory(factory.previous)


class _TaskFactory:
    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.num_users = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Future[Any]:
        if IncidentCollector.current() is not None:
            coro = _Contained(coro)
        if self.previous is not None:
            return self.previous(loop, coro, **kwargs)
        return asyncio.Task(coro, loop=loop, **kwargs)


class _Contained(Coroutine[Any, Any, Any]):
    """Coroutine that raises RuntimeError if the wrapped coroutine raises an exception that would end the event loop."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(refusal_of(error)) from error

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None, /) -> Any:
        try:
            if value is None and traceback is None:
                return self._coroutine.throw(kind)
            return self._coroutine.throw(kind, value, traceback)
        except (SystemExit, KeyboardInterrupt) as error:
            raise RuntimeError(refusal_of(error)) from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


_FACTORIES: WeakKeyDictionary[asyncio.AbstractEventLoop, _TaskFactory] = WeakKeyDictionary()
