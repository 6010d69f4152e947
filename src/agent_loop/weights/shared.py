"""One offer for all servers of a pool, instead of one each."""

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
"""Bounds the copying of weights that nobody waits for any more."""

SenderPool = dict[Hashable, "WeightSender"]
"""Senders that a pool of servers has shared, by `WeightSender.sharing_key`."""


class SharedWeights(Iterable[tuple[str, "Tensor"]], Sized):
    """The weights of one update, for several servers: can be iterated as often as needed.

    A server in this process iterates. A server whose engine is elsewhere calls `offered`, which makes an offer for
    the first one and gives its handle to the others. Opened with `async with`, and left when all servers are done;
    that ends the offers.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]], *, senders: SenderPool | None = None) -> None:
        """Reads the iterator to its end.

        Args:
            weights: Names and tensors. `AdaptedWeights` stay what they are.
            senders: Those of earlier updates: used again, so that they reuse their memory, and added to. A closed one
                is replaced by that of the next server that asks.
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
        """The handle of the offer that all senders of this kind share; made by the first caller.

        Raises:
            WeightsError: See `WeightSender.offer`.
        """
        key = sender.sharing_key
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._handles:
                kept = self._senders.get(key)
                if kept is None or kept.is_closed:
                    kept = self._senders[key] = sender
                offer = _OpenOffer(kept.offer(self._weights, weight_version=weight_version))
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
    """What a server was given, if it is a base and factors, shared or not."""
    if isinstance(weights, SharedWeights):
        return weights.adapted
    return weights if isinstance(weights, AdaptedWeights) else None


@asynccontextmanager
async def offered(
    weights: Iterable[tuple[str, Tensor]], *, sender: WeightSender, weight_version: int
) -> AsyncGenerator[WeightHandle]:
    """Offers weights while the event loop goes on; the servers of a pool share one offer.

    Args:
        weights: As `AsyncServerBase.update_weights` got them.
        sender: The caller's own; if the weights are shared, that of another server may do the work.
        weight_version: Travels with them.

    Raises:
        WeightsError: See `WeightSender.offer`.
    """
    if isinstance(weights, SharedWeights) and sender.sharing_key is not None:
        yield await weights.offer_once(sender, weight_version=weight_version)
        return
    async with _OpenOffer(sender.offer(weights, weight_version=weight_version)) as handle:
        yield handle


class _OpenOffer:
    """Enters and leaves an offer in threads. Cancelled while entering, it leaves before the cancellation goes on."""

    def __init__(self, offer: AbstractContextManager[WeightHandle]) -> None:
        self._offer = offer
        self._handle: WeightHandle | None = None

    async def __aenter__(self) -> WeightHandle:
        def enter() -> None:
            self._handle = self._offer.__enter__()

        try:
            await _finish_in_thread(enter)
        except BaseException as error:
            if self._handle is not None:
                await self.__aexit__(type(error), error, error.__traceback__)
            raise
        assert self._handle is not None
        return self._handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _finish_in_thread(lambda: self._offer.__exit__(kind, error, trace))


async def _finish_in_thread(work: Callable[[], object]) -> None:
    await run_shielded(lambda: run_in_thread(work), timeout_s=COPY_TIMEOUT_S)
