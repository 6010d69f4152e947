"""Pool of the servers of a run: completions with failover, health, and calls to all servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from agent_loop.errors import FatalRequest, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.runtime.concurrency import run_shielded, run_together, running_in_background
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.balancer import LoadBalancer, SlotGrant, SlotRequest
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth
from agent_loop.servers.in_flight import InFlightRequest, Lease
from agent_loop.servers.reply_check import checked_health
from agent_loop.types import TokenOutput
from agent_loop.weights.shared import SenderPool, SharedWeights

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 10.0
"""Time limit of a health check. A server that does not reply in time is lost."""
HEALTH_EVERY_S = 5.0
"""Interval between health checks."""
RESTART_CHECK_EVERY_S = 0.5
"""How often lost servers are checked while a call to all servers waits for one of them."""
ABORT_TIMEOUT_S = 10.0
MAX_SERVERS_LOST = 2
"""A request during which this many servers died fails: the request may be what kills them."""
MAX_LOSSES_OF_RESTARTING = 5
"""The same number where servers are restarted, since a request may then notice one death more than once."""


class _RequestAborted(Exception):
    """The request was aborted while it was queued."""


class ServerUsage(Struct, frozen=True):
    """Totals over the completions that a pool's servers returned."""

    num_turns: int = 0
    """Number of completions."""
    num_sampled_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Number of context tokens that a server computed again, after a cache eviction or a preemption."""

    def plus(self, other: ServerUsage, *, sign: int = 1) -> ServerUsage:
        """Return the sum of both totals."""
        return ServerUsage(
            num_turns=self.num_turns + sign * other.num_turns,
            num_sampled_tokens=self.num_sampled_tokens + sign * other.num_sampled_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens + sign * other.num_recomputed_tokens,
        )

    def since(self, earlier: ServerUsage) -> ServerUsage:
        """Return the difference to an earlier total."""
        return self.plus(earlier, sign=-1)


class ServerPool:
    """Servers behind one balancer.

    A server that dies leaves the pool. It rejoins once its health check passes and it has the pool's weights.
    """

    def __init__(
        self,
        servers: Iterable[AsyncServerBase],
        *,
        balancer: LoadBalancer | None = None,
        restart_timeout_s: float = 0.0,
    ) -> None:
        """Create a pool that does not start its servers.

        Args:
            balancer: Balancer without servers; None is a `LoadBalancer` with its defaults.
            restart_timeout_s: How long requests stay queued for a server to rejoin when every server is lost. Applies
                only if one of the servers `restarts`. 0 fails the requests at once.
        """
        self.balancer = balancer or LoadBalancer()
        self.weight_version = 0
        self.num_failovers = 0
        """Number of in-flight requests that lost their server."""
        self._servers: dict[str, AsyncServerBase] = {}
        self.lost: dict[str, str] = {}
        """Reason of each lost server."""
        self._sessions_left: dict[str, list[str]] = {}
        """Sessions that each lost server may still hold."""
        self.usage = ServerUsage()
        """Totals over all completions since the pool was created."""
        self.healths: dict[str, ServerHealth] = {}
        """Last health report of each server."""
        self._queued: dict[str, asyncio.Future[SlotGrant]] = {}
        """Queued requests, by id."""
        self._leases: dict[str, Lease] = {}
        """Granted leases, by the id of the slot request."""
        self._weight_senders: SenderPool = {}
        self._numbers = count()
        self._restart_timeout_s = restart_timeout_s
        self._has_server = asyncio.Event()
        """Set while a server is left."""
        for server in servers:
            self._join(server)

    @property
    def servers(self) -> Sequence[AsyncServerBase]:
        """All servers, lost ones included."""
        return tuple(self._servers.values())

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    def all_have(self, ability: Ability) -> bool:
        """Return whether all servers have an ability."""
        return all(ability in server.abilities for server in self._servers.values())

    @property
    def expects_restarts(self) -> bool:
        """Whether requests wait for a server to rejoin when every server is lost."""
        return self._restart_timeout_s > 0 and any(server.restarts for server in self.servers)

    @property
    def num_waiting(self) -> float:
        """Requests that are queued here or in a server, according to the last health reports."""
        return self.balancer.num_queued + self.balancer.num_leases - self.num_running

    @property
    def num_running(self) -> float:
        """Requests in the batches of the servers, according to the last health reports."""
        healths = self._available_healths
        num_waiting = sum(health.num_waiting for health in healths)
        share = num_waiting / max(num_waiting + sum(health.num_running for health in healths), 1)
        return (1 - share) * self.balancer.num_leases

    @property
    def kv_cache_share(self) -> float | None:
        """Mean share of the KV cache in use, over the servers that report it; None if none reports it."""
        shares = [
            health.kv_cache_share for health in self._available_healths if health.kv_cache_share is not None
        ]
        return sum(shares) / len(shares) if shares else None

    @property
    def kv_cache_demand(self) -> float | None:
        """Share of the KV caches that the contexts of all sessions would need.

        None if no server reports its KV cache use, or no request is running.
        """
        share, running = self.kv_cache_share, self.balancer.num_running_tokens
        return None if share is None or not running else share * self.balancer.num_session_tokens / running

    # -- one request -----------------------------------------------------------------------------------------------

    async def complete(self, request: InFlightRequest, *, timeout_s: float | None) -> TokenOutput:
        """Sample a request under a lease on a server. If that server dies, another one samples the rest.

        The balancer chooses the server; the request is queued while no server has a free slot. The lease is released
        in any case. A server that dies leaves the pool.

        Raises:
            ServerDied: The server died, and no other is left or rejoined in time.
            FatalRequest: The server died, and so did others before it during this request.
            ServerTimeout: The time limit passed.
            BadServerReply: See `Lease.sample`.
        """
        while not request.is_finished:
            lease = Lease(request, self._slot_request(request), timeout_s=timeout_s)
            try:
                try:
                    await self._acquire(lease)
                    await lease.sample()
                finally:
                    self._release(lease)
            except _RequestAborted:
                request.abort()
            except ServerDied as error:
                await self._note_death(lease, error)
                may_resume = bool(self.balancer.servers) or (bool(error.server) and self.expects_restarts)
                if not request.is_finished and not may_resume:
                    raise
        return request.output

    def _slot_request(self, request: InFlightRequest) -> SlotRequest:
        session = request.session
        return SlotRequest(
            f"{session}/{next(self._numbers)}",
            session,
            num_prompt_tokens=len(request.prompt_ids) + request.num_tokens,
            max_tokens=request.params.max_tokens,
        )

    async def _acquire(self, lease: Lease) -> None:
        """Grant the lease a server; queue the request while all servers are full."""
        wanted = lease.slot_request
        if not self.balancer.servers:
            await self._wait_for_server(wanted.session, ends_at=lease.ends_at)
        grant = self.balancer.acquire(wanted) or await self._wait_in_queue(wanted, ends_at=lease.ends_at)
        if grant.server in self.lost:  # the server was lost after it was granted
            raise ServerDied(self.lost[grant.server], server=grant.server, request_id=wanted.session)
        lease.server, lease.num_known_tokens = self._servers[grant.server], grant.num_known_tokens
        self._leases[wanted.id] = lease
        if grant.moved_from is not None:
            self._end_session_on(grant.moved_from, wanted.session)

    def _release(self, lease: Lease) -> None:
        """Free the slot, or remove the request from the queue. Grant free slots to queued requests."""
        wanted, output = lease.slot_request, lease.output
        self._leases.pop(wanted.id, None)
        num_new_tokens = None if output is None else len(output.token_ids)
        self._deliver(self.balancer.release(wanted.id, num_new_tokens=num_new_tokens))
        if output is not None:
            num_cached = output.num_cached_tokens
            num_dropped = 0 if num_cached is None else max(lease.num_known_tokens - num_cached, 0)
            num_recomputed = num_dropped + output.num_preempted * wanted.num_prompt_tokens
            self.usage = self.usage.plus(ServerUsage(1, len(output.token_ids), num_recomputed))

    async def _note_death(self, lease: Lease, error: ServerDied) -> None:
        """Keep the tokens of a server that died. Check the others, which may have died at the same time."""
        request, server = lease.request, lease.server
        if server is not None:
            self.mark_lost(server.name, reason=str(error))
            request.add_partial(error.chunks, server=server.name)
            request.num_servers_lost += 1
            request.note_interruption()
        limit = MAX_LOSSES_OF_RESTARTING if self.expects_restarts else MAX_SERVERS_LOST
        if request.num_servers_lost == limit and not request.is_finished:
            raise FatalRequest(
                f"{limit} servers died during this request, so no other gets it; the last one: {error}",
                request_id=request.session,
            ) from None
        if server is not None:
            await run_together(self._check_server(self._servers[name]) for name in self.balancer.servers)

    async def _wait_in_queue(self, wanted: SlotRequest, *, ends_at: float | None) -> SlotGrant:
        future = self._queued[wanted.id] = asyncio.get_running_loop().create_future()
        timeout = asyncio.timeout_at(ends_at)
        try:
            with waiting_for(WaitKind.QUEUE):
                async with timeout:
                    return await future
        except TimeoutError:
            if not timeout.expired():
                raise
            raise ServerTimeout(
                f"all {len(self.balancer.servers)} servers were full for rollout.request_timeout_s; raise it, add "
                "servers, or lower rollout.max_concurrent",
                request_id=wanted.session,
            ) from None
        finally:
            del self._queued[wanted.id]

    async def _wait_for_server(self, session: str = "", *, ends_at: float | None = None) -> None:
        """Wait until a lost server rejoins."""
        if not self.expects_restarts:
            raise self._no_server_left(session)
        restart_ends_at = asyncio.get_running_loop().time() + self._restart_timeout_s
        try:
            with waiting_for(WaitKind.QUEUE):
                async with asyncio.timeout_at(min(restart_ends_at, ends_at or restart_ends_at)):
                    await self._has_server.wait()
        except TimeoutError:
            raise self._no_server_left(session) from None

    def _deliver(self, grants: Sequence[SlotGrant]) -> None:
        """Resolve the futures of queued requests that were granted a slot."""
        for grant in grants:
            future = self._queued.get(grant.request.id)
            if future is None or future.done():  # the request left the queue in this step of the event loop
                self._deliver(self.balancer.release(grant.request.id))
            else:
                future.set_result(grant)

    async def abort(self, session: str) -> None:
        """Abort the running completion of a session, or its queued request."""
        for request_id, future in self._queued.items():
            if request_id.rpartition("/")[0] == session and not future.done():
                future.set_exception(_RequestAborted())
                return
        server = self._server_of(session)
        if server is not None:
            await run_bounded(partial(server.abort, session), timeout_s=ABORT_TIMEOUT_S)

    def end_session(self, session: str) -> None:
        """End a session: no further turn will follow."""
        server = self._server_of(session)
        self.balancer.end_session(session)
        if server is not None:
            self._end_session_on(server.name, session)

    # -- health ----------------------------------------------------------------------------------------------------

    def mark_lost(self, name: str, *, reason: str) -> None:
        """Remove a server from balancing. Its requests raise `ServerDied`; its sessions move to other servers."""
        if name in self.lost:
            return
        logger.warning("server %s is lost: %s", name, reason)
        self.lost[name] = reason
        self._sessions_left[name] = self.balancer.remove_server(name)
        for request_id, lease in list(self._leases.items()):
            if lease.server is self._servers[name]:
                del self._leases[request_id]
                self.num_failovers += 1
                lease.lose_server(reason)
        if self.balancer.servers:
            self._deliver(self.balancer.grant_free_slots())
            return
        self._has_server.clear()
        for future in self._queued.values():  # they wait for a server to rejoin, or fail
            if not future.done():
                future.set_exception(ServerDied(reason, server=name))

    @asynccontextmanager
    async def watching(self) -> AsyncGenerator[None]:
        """Check the health of every server periodically while the body runs. Lost servers are checked first."""

        async def watch() -> None:
            await run_together(self._check_server(self._servers[name]) for name in list(self.lost))
            while True:
                await asyncio.sleep(HEALTH_EVERY_S)
                await run_together(self._check_server(server) for server in self.servers)

        async with running_in_background(watch()):
            yield

    async def health(self) -> list[ServerHealth]:
        """Return the health of each server. A server that does not reply counts as not alive."""
        return await run_together(self._health_of(server) for server in self.servers)

    # -- all servers at once ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all engines."""
        try:
            await run_together(server.start() for server in self.servers)
        except BaseException:
            await run_shielded(self.close, timeout_s=CLOSE_TIMEOUT_S)
            raise
        for server in self.servers:
            self.balancer.remove_server(server.name)
            self._join(server)

    async def wake_up(self) -> None:
        """Make all servers ready to generate."""
        await self._call_all(lambda server: server.wake_up())

    async def sleep(self) -> None:
        """Free the KV caches of all servers and give their devices to the trainer."""
        await self._call_all(lambda server: server.sleep())

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Replace the weights of all servers. Servers whose engine runs in another process share one copy.

        Lost servers that are alive again rejoin first.
        """
        for name in list(self.lost):
            if (await self._health_of(self._servers[name])).is_alive:
                self._rejoin(name)
        async with SharedWeights(weights, senders=self._weight_senders) as shared:
            await self._call_all(
                lambda server: server.update_weights(shared, weight_version=weight_version), at_version=False
            )
        self.weight_version = weight_version

    async def close(self) -> None:
        """Close all servers."""
        await run_together(server.close() for server in self.servers)

    # -- internals -------------------------------------------------------------------------------------------------

    def _join(self, server: AsyncServerBase) -> None:
        granted = self.balancer.add_server(server.name, max_in_flight=server.max_concurrent)
        self._servers[server.name] = server
        self._has_server.set()
        self._deliver(granted)

    def _rejoin(self, name: str) -> None:
        logger.warning("server %s has rejoined", name)
        del self.lost[name]
        for session in self._sessions_left.pop(name):  # they have moved to other servers, or ended
            self._end_session_on(name, session)
        self._join(self._servers[name])

    @property
    def _available_healths(self) -> list[ServerHealth]:
        """Last health reports of the servers that are not lost."""
        return [health for name, health in self.healths.items() if name not in self.lost]

    def _server_of(self, session: str) -> AsyncServerBase | None:
        name = self.balancer.server_of(session)
        return None if name is None else self._servers[name]

    def _end_session_on(self, name: str, session: str) -> None:
        """End a session on a server. Errors are logged and not raised."""
        server = self._servers.get(name)
        if server is None or name in self.lost:
            return
        try:
            server.end_session(session)
        except ServerError as error:
            logger.debug("server %s could not end session %s: %s", name, session, error)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the session has ended even if a server's code fails)
            logger.warning(
                "server %s: end_session raised %s; it may only raise ServerError",
                name,
                describe_error(error),
            )

    async def _call_all(
        self, call: Callable[[AsyncServerBase], Coroutine[Any, Any, None]], *, at_version: bool = True
    ) -> None:
        """Call all servers that are not lost, concurrently. A server that dies during the call is lost.

        When every server is lost and one may rejoin, waits for that server and calls it.
        """

        async def call_one(server: AsyncServerBase) -> None:
            try:
                await call(server)
            except ServerDied as error:
                self.mark_lost(server.name, reason=str(error))

        async def check_until_one_rejoins() -> None:
            while not self.balancer.servers:
                await asyncio.sleep(RESTART_CHECK_EVERY_S)
                await run_together(self._check_server(each, at_version=at_version) for each in self.servers)

        while True:
            await run_together(call_one(server) for server in self.servers if server.name not in self.lost)
            if self.balancer.servers:
                return
            async with running_in_background(check_until_one_rejoins()):
                await self._wait_for_server()

    async def _check_server(self, server: AsyncServerBase, *, at_version: bool = True) -> None:
        """Check the health of a server. Mark the server as lost, or let it rejoin."""
        health = await self._health_of(server)
        has_version = not at_version or health.weight_version == self.weight_version
        if not health.is_alive:
            self.mark_lost(server.name, reason=health.detail or "its health report says that it is not alive")
        elif server.name in self.lost and has_version:
            self._rejoin(server.name)

    async def _health_of(self, server: AsyncServerBase) -> ServerHealth:
        try:
            health = checked_health(await run_bounded(server.health, timeout_s=HEALTH_TIMEOUT_S))
        except DeadlineExpired as error:
            return _not_alive(f"the health check {error}")
        except Exception as error:  # noqa: BLE001  (a server whose health check fails in any way is not alive)
            return _not_alive(describe_error(error))
        self.healths[server.name] = health
        return health

    def _no_server_left(self, session: str) -> ServerDied:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.lost.items())
        return ServerDied(f"no server is left ({reasons or 'the pool has no servers'})", request_id=session)


def _not_alive(detail: str) -> ServerHealth:
    return ServerHealth(is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=detail)
