"""A place on a server: what a request holds while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from agent_loop.errors import SamplingParamsError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.time_scope import TimeScope, clock_of
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.policy import Request
from agent_loop.servers.reply_check import bad_reply
from agent_loop.types import TokenOutput

ResultT = TypeVar("ResultT")


class Place:
    """A place on a server for one completion. Single use.

    Args:
        request: The completion.
        timeout_s: How long the request may take, its time in line included; None is no limit.
    """

    server: AsyncServerBase
    """Once it is given out, as are the others."""
    granted_at: float | None = None
    """In the event loop's time."""
    num_known_tokens: int = 0
    """Of the prompt, those that the server has computed or sampled before."""
    output: TokenOutput | None = None
    """What the server made, once it is there."""
    _scope: TimeScope | None = None
    _loss: ServerDied | None = None

    def __init__(self, request: Request, *, timeout_s: float | None) -> None:
        self.request = request
        self.clock = clock_of(asyncio.get_running_loop())
        self.ends_at = None if timeout_s is None else self.clock() + timeout_s
        self._timeout_s = timeout_s or 0.0
        self._details: dict[str, Any] = {"num_prompt_tokens": request.num_prompt_tokens}

    def give(self, server: AsyncServerBase, *, num_known_tokens: int) -> None:
        """Of the pool: this is the place."""
        self.server, self.num_known_tokens = server, num_known_tokens
        self.granted_at = self.clock()

    async def run(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Await a call to the server until it ends, the request's time is over, or the server is lost.

        The call runs in a task of its own: whatever the server does with its task changes nothing here.

        Raises:
            ServerTimeout: The request's time is over.
            ServerDied: The server was given up.
            BadServerReply: The server raised something that is neither a `ServerError` nor a `SamplingParamsError`.
        """
        if self._loss is not None:
            raise self._loss
        scope = self._scope = TimeScope(self.ends_at)
        try:
            with waiting_for(WaitKind.GENERATE, self.server.name, details=self._details), scope:
                return await run_bounded(call, timeout_s=None, name=f"server {self.server.name!r}")
        except (ServerError, SamplingParamsError):
            raise
        except Exception as error:
            if scope.has_expired:
                raise self._loss or self._timeout() from None
            raise bad_reply(
                f"it raised {describe_error(error)}",
                server=self.server.name,
                request_id=self.request.session,
            ) from error
        finally:
            self._scope = None

    def _timeout(self) -> ServerTimeout:
        return ServerTimeout(
            f"the completion took longer than {self._timeout_s:g} s; raise rollout.request_timeout_s, or see what "
            "holds the server up",
            server=self.server.name,
            request_id=self.request.session,
        )

    def fill(self, output: TokenOutput) -> None:
        """This is what the server made."""
        self.output = output
        self._details |= {
            "num_tokens": len(output.token_ids),
            "num_cached_tokens": output.num_cached_tokens,
            "num_preempted": output.num_preempted,
            "prefill_s": output.prefill_s,
        }

    def lose(self, reason: str) -> None:
        """Has the running call fail."""
        self._loss = ServerDied(reason, server=self.server.name, request_id=self.request.session)
        if self._scope is not None:
            self._scope.move(asyncio.get_running_loop().time())
