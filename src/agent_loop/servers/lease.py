"""Lease on a server for one request."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from agent_loop.errors import SamplingParamsError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.balancer import SlotRequest
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.reply_check import bad_reply
from agent_loop.types import TokenOutput


class Lease:
    """Lease on a server for one request. Single use; `ServerPool.lease` acquires and releases it.

    Args:
        request: The completion to sample.
        slot_request: The request as the balancer sees it.
        timeout_s: Time limit of the lease, waiting in the queue included; None sets no limit.
    """

    server: AsyncServerBase
    """The leased server. Set by `grant`, like the next two fields."""
    granted_at: float | None = None
    """Time of the grant on the event loop's clock; None while the request is queued."""
    num_known_tokens: int = 0
    """Number of prompt tokens that the server has computed or sampled before."""
    output: TokenOutput | None = None
    """Tokens that this server sampled, once it has completed the request."""
    _timeout: asyncio.Timeout | None = None
    _loss: ServerDied | None = None

    def __init__(
        self, request: InFlightRequest, slot_request: SlotRequest, *, timeout_s: float | None
    ) -> None:
        self.request = request
        self.slot_request = slot_request
        self.clock = asyncio.get_running_loop().time
        self.ends_at = None if timeout_s is None else self.clock() + timeout_s
        self._timeout_s = timeout_s or 0.0

    def grant(self, server: AsyncServerBase, *, num_known_tokens: int, keeps_partial: bool) -> None:
        """Assign the server. Called by the pool.

        Args:
            keeps_partial: Whether to stream the completion, so that another server can resume it from its tokens.
        """
        self.server, self.num_known_tokens = server, num_known_tokens
        self._streams = self.request.is_streamed or (keeps_partial and Ability.STREAMING in server.abilities)
        self.granted_at = self.clock()

    async def sample(self) -> None:
        """Sample the rest of the request on the leased server.

        The server's code runs in a separate task, so that a server that mishandles its task cannot affect the caller.

        Raises:
            ServerTimeout: The time limit passed.
            ServerDied: The server died or was lost.
            BadServerReply: The reply is not a completion of the prompt, or the server raised something other than
                `ServerError` or `SamplingParamsError`.
        """
        if self._loss is not None:
            raise self._loss
        request, server = self.request, self.server
        sample = partial(request.stream_from if self._streams else request.generate_from, server)
        details: dict[str, Any] = {"num_prompt_tokens": self.slot_request.num_prompt_tokens}
        timeout = self._timeout = asyncio.timeout_at(self.ends_at)
        try:
            with waiting_for(WaitKind.GENERATE, server.name, details=details):
                async with timeout:
                    self.output = await run_bounded(sample, timeout_s=None, name=f"server {server.name!r}")
        except (ServerError, SamplingParamsError):
            raise
        except Exception as error:
            if timeout.expired():
                raise self._loss or self._time_limit_error() from None
            raise bad_reply(
                f"it raised {describe_error(error)}", server=server.name, request_id=request.session
            ) from error
        finally:
            self._timeout = None
        details |= {
            "num_tokens": len(self.output.token_ids),
            "num_cached_tokens": self.output.num_cached_tokens,
            "num_preempted": self.output.num_preempted,
            "prefill_s": self.output.prefill_s,
        }

    def lose_server(self, reason: str) -> None:
        """Make `sample` raise `ServerDied`. Called by the pool when it has lost the server."""
        self._loss = ServerDied(reason, server=self.server.name, request_id=self.request.session)
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self.clock())

    def _time_limit_error(self) -> ServerTimeout:
        return ServerTimeout(
            f"the completion took longer than {self._timeout_s:g} s; raise rollout.request_timeout_s, or check "
            "what delays the server",
            server=self.server.name,
            request_id=self.request.session,
        )
