"""A client's end of what goes between it and one server: few messages, each with all there is to say."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from functools import partial

from agent_loop.distributed.pace import Pace
from agent_loop.distributed.wire import Ask, LineLost, Post, Reply, Response
from agent_loop.runtime.describe import describe_error

END_WITHIN_S = 0.1
"""Sessions that ended wait so long for something else to travel with."""


class Mailbox:
    """Asks a server for completions, and tells it which are not wanted any more and which sessions ended.

    Each post is an exchange: the server holds it until it has answers. A mailbox posts when it has something to say, or
    when it waits for answers and nothing that it posted is held.

    Args:
        open_line: Begins anew at the server, which ends whatever this client had there; gives the line's name. Raises
            `LineLost`.
        exchange: Carries a packed post, and brings a packed reply. Raises `LineLost`.
        on_reply: Told of each reply.
    """

    def __init__(
        self,
        *,
        open_line: Callable[[], Awaitable[str]],
        exchange: Callable[[bytes], Awaitable[bytes]],
        on_reply: Callable[[Reply], None],
    ) -> None:
        self._open_line = open_line
        self._exchange = exchange
        self._on_reply = on_reply
        self._line = ""
        self._opening: asyncio.Task[None] | None = None
        self._num_posted = 0
        self._held: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[Response]] = {}
        self._asks: dict[int, Ask] = {}
        self._cancelled: list[int] = []
        self._ended: list[str] = []
        self._telling: asyncio.TimerHandle | None = None
        self._pace = Pace(self._post_if_due)

    async def ask(self, ask: Ask) -> Response:
        """What the server says to it. Cancelling it has the server end what it does for it.

        Raises:
            LineLost: There will be no answer.
        """
        loop = asyncio.get_running_loop()
        asked_at, waiting = loop.time(), loop.create_future()
        self._waiting[ask.call] = waiting
        self._asks[ask.call] = ask
        self._pace.ask()
        try:
            response = await waiting
            self._pace.note(loop.time() - asked_at)
            return response
        finally:
            del self._waiting[ask.call]
            was_posted = self._asks.pop(ask.call, None) is None
            if was_posted and waiting.cancelled() and self._line:
                self._cancelled.append(ask.call)
                self._pace.ask()

    def end(self, session: str) -> None:
        """Tells the server, with the next post, that no turn of a session will follow."""
        if self._line:
            self._ended.append(session)
            if self._telling is None:
                self._telling = asyncio.get_running_loop().call_later(END_WITHIN_S, self._pace.ask)

    async def settled(self) -> None:
        """Waits until the server has done all that it was told so far.

        Raises:
            LineLost: It is gone, and with it what was to be ended.
        """
        if self._line:
            await asyncio.shield(self._post(is_urgent=True))
            if self._held and not self._waiting:
                await asyncio.wait(self._held)

    def _post_if_due(self) -> None:
        if not self._line:
            if self._asks and self._opening is None:
                self._opening = asyncio.create_task(self._open())
        elif self._asks or self._cancelled or self._ended or (self._waiting and not self._held):
            self._post()

    async def _open(self) -> None:
        try:
            self._line, self._num_posted = await self._open_line(), 0
        except Exception as error:  # noqa: BLE001  (told to whoever waits for an answer)
            self._asks.clear()
            self._break(error)
        finally:
            self._opening = None
        self._pace.ask()

    def _post(self, *, is_urgent: bool = False) -> asyncio.Task[None]:
        """Posts all there is."""
        asks = list(self._asks.values())
        post = Post(self._line, self._num_posted, asks, self._cancelled, self._ended, is_urgent)
        self._num_posted += 1
        self._asks.clear()
        self._forget_told()
        task = asyncio.create_task(self._exchange_on(self._line, pickle.dumps(post, protocol=5)))
        self._held.add(task)
        task.add_done_callback(partial(self._note_end, self._line))
        return task

    async def _exchange_on(self, line: str, packed: bytes) -> None:
        reply: Reply = pickle.loads(await self._exchange(packed))
        if line == self._line:
            for call, response in reply.responses:
                waiting = self._waiting.get(call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(response)
            self._on_reply(reply)

    def _note_end(self, line: str, exchange: asyncio.Task[None]) -> None:
        self._held.discard(exchange)
        error = None if exchange.cancelled() else exchange.exception()
        if line == self._line:
            if error is not None:
                self._break(error)
            self._pace.ask()

    def _break(self, error: BaseException) -> None:
        """What was posted will not be answered. What was not opens another line."""
        self._line = ""
        self._forget_told()
        reason = str(error) if isinstance(error, LineLost) else describe_error(error)
        for call, waiting in self._waiting.items():
            if call not in self._asks and not waiting.done():
                waiting.set_exception(LineLost(reason))

    def _forget_told(self) -> None:
        self._cancelled, self._ended = [], []
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
