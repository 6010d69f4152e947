"""Weights of one update for all servers of a pool, which share one offer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.threads import run_in_thread
from agent_loop.weights.adapted import AdaptedWeights

if TYPE_CHECKING:
    from torch import Tensor

    from agent_loop.weights.handle import WeightHandle
    from agent_loop.weights.sender import WeightSender

COPY_TIMEOUT_S = 3600.0
"""Seconds that copying weights may take after its caller was cancelled."""

SenderPool = dict[Hashable, "WeightSender"]
"""Senders that the servers of a pool share, by `WeightSender.sharing_key`."""


class SharedWeights(Iterable[tuple[str, "Tensor"]], Sized):
    """Weights of one update for several servers, which can be iterated repeatedly.

    A server in this process iterates over the weights. A server whose engine runs in another process calls `offered`,
    which opens an offer for the first server and returns its handle to the others. Use it with `async with`, and exit
    the context when all servers are done, which closes the offers.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], *, senders: SenderPool | None = None) -> None:
        """Collect the weights of an iterable.

        Args:
            weights: Names and tensors. `AdaptedWeights` are kept as they are.
            senders: Senders of earlier updates, which are reused with their memory. New senders are added. A closed
                sender is replaced by that of the next server.
        """
        self._weights = weights if isinstance(weights, AdaptedWeights) else tuple(weights)
        self._senders = {} if senders is None else senders
        self._handles: dict[Hashable, WeightHandle] = {}
        self._locks: dict[Hashable, asyncio.Lock] = {}
        self._offers = AsyncExitStack()

    @property
    def adapted(self) -> AdaptedWeights | None:
        return self._weights if isinstance(self._weights, AdaptedWeights) else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    async def offer_once(self, sender: WeightSender, *, weight_version: int) -> WeightHandle:
        """Return the offer that all senders with the same `sharing_key` share. The first call opens it."""
        key = sender.sharing_key
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._handles:
                shared_sender = self._senders.get(key)
                if shared_sender is None or shared_sender.is_closed:
                    shared_sender = self._senders[key] = sender
                offer = _in_threads(shared_sender.offer(self._weights, weight_version=weight_version))
                self._handles[key] = await self._offers.enter_async_context(offer)
        return self._handles[key]

    async def __aenter__(self) -> SharedWeights:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        await self._offers.__aexit__(kind, error, trace)


def adapted_weights(weights: Iterable[tuple[str, Tensor]]) -> AdaptedWeights | None:
    """Return the weights as `AdaptedWeights` if they have adapters, shared or not, else None."""
    if isinstance(weights, SharedWeights):
        return weights.adapted
    return weights if isinstance(weights, AdaptedWeights) else None


@asynccontextmanager
async def offered(
    weights: Iterable[tuple[str, Tensor]], *, sender: WeightSender, weight_version: int
) -> AsyncGenerator[WeightHandle]:
    """Offer weights without blocking the event loop. The servers of a pool share one offer."""
    if isinstance(weights, SharedWeights) and sender.sharing_key is not None:
        yield await weights.offer_once(sender, weight_version=weight_version)
        return
    async with _in_threads(sender.offer(weights, weight_version=weight_version)) as handle:
        yield handle


@asynccontextmanager
async def _in_threads(offer: AbstractContextManager[WeightHandle]) -> AsyncGenerator[WeightHandle]:
    """Enter and exit an offer's context in threads. If entering is cancelled, the context is exited first."""
    handles: list[WeightHandle] = []
    try:
        await _finish_in_thread(lambda: handles.append(offer.__enter__()))
        yield handles[0]
    except BaseException as error:
        if handles:
            details = (type(error), error, error.__traceback__)
            await _finish_in_thread(lambda: offer.__exit__(*details))
        raise
    await _finish_in_thread(lambda: offer.__exit__(None, None, None))


async def _finish_in_thread(work: Callable[[], object]) -> None:
    await run_shielded(lambda: run_in_thread(work), timeout_s=COPY_TIMEOUT_S)
