"""What a server has for its clients, and how they are served. All of it belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from agent_loop.distributed.contexts import HeldContexts, UnknownContext, token_bytes
from agent_loop.distributed.line import Line
from agent_loop.distributed.progress import Parts, pack_unfinished
from agent_loop.distributed.wire import (
    Ask,
    LineLost,
    PackedCompletion,
    Post,
    Refusal,
    Reply,
    Resend,
    Response,
)
from agent_loop.errors import AgentLoopError, ServerDied, ServerError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.in_flight import InFlightRequest
from agent_loop.servers.reply_check import bad_reply
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, TokenChunk


@dataclass(slots=True, eq=False)
class _Running:
    line: Line
    call: int
    task: asyncio.Task[Response]
    chunks: list[TokenChunk]
    """What it has so far, where the server tells."""
    is_wanted: bool = True


class Serving:
    """One server and its clients: their lines, the contexts of their sessions, the completions that run.

    Args:
        server: It is up.
    """

    def __init__(self, server: AsyncServerBase) -> None:
        self.server = server
        self._contexts = HeldContexts()
        self._lines: dict[str, Line] = {}
        self._running: dict[tuple[str, int], _Running] = {}
        self._num_running_of: Counter[str] = Counter()
        self._dropped: set[str] = set()

    async def open_line(self, client: str) -> str:
        """Begins anew with a client, whose earlier line ends with all it had here. Gives the line's name.

        Raises:
            LineLost: The client was given up.
        """
        if client in self._dropped:
            raise LineLost("the client was taken for dead")
        self._end_all_of(client)
        name = uuid4().hex
        self._lines[name] = Line(client, take=self._take)
        return name

    async def exchange(self, post: Post) -> Reply:
        """Takes a post, and holds it until there are answers.

        Raises:
            LineLost: There is no such line any more.
        """
        line = self._lines.get(post.line)
        if line is None:
            raise LineLost("it was started again")
        responses = await line.exchange(post)
        return Reply(responses, self.num_others(line.client))

    async def drop_client(self, client: str) -> None:
        """Ends whatever a client that died had here."""
        self._dropped.add(client)
        self._end_all_of(client)

    def num_others(self, client: str) -> int:
        """Requests that run for other clients."""
        return len(self._running) - self._num_running_of[client]

    def parts(self, client: str, num_known: Mapping[int, int]) -> Parts:
        """What a client's running completions have beyond the chunks of each that it knows."""
        parts: dict[int, tuple[int, PackedCompletion]] = {}
        for call, num_chunks in num_known.items():
            running = self._running.get((client, call))
            if running is not None and len(running.chunks) > num_chunks:
                parts[call] = len(running.chunks), pack_unfinished(running.chunks[num_chunks:])
        return parts

    def inspect(self) -> dict[str, int]:
        """What is held: all zero when nobody is served."""
        return {
            "contexts": len(self._contexts),
            "running": len(self._running),
            "clients": sum(self._num_running_of.values()),
            "posts": sum(line.num_held for line in self._lines.values()),
        }

    def _take(self, line: Line, post: Post) -> None:
        """Does what a client says."""
        for call in post.cancelled:
            running = self._running.get((line.client, call))
            if running is not None:
                self._cancel(running)
        for session in post.ended:
            self._contexts.end(session)
        if post.ended:
            # Behind the steps in which completions that were cancelled just now hear of it.
            asyncio.get_running_loop().call_soon(self._end_in_engine, post.ended)
        for ask in post.asks:
            self._begin(line, ask)

    def _begin(self, line: Line, ask: Ask) -> None:
        try:
            prompt_ids, attachments = self._contexts.extend(ask.session, ask.delta, client=line.client)
        except UnknownContext:
            line.answer(ask.call, Resend())
            return
        chunks: list[TokenChunk] = []
        task = asyncio.create_task(self._complete(ask, prompt_ids, attachments, chunks=chunks))
        running = self._running[line.client, ask.call] = _Running(line, ask.call, task, chunks)
        self._num_running_of[line.client] += 1
        task.add_done_callback(partial(self._note_end, running))

    async def _complete(
        self,
        ask: Ask,
        prompt_ids: IntArray,
        attachments: tuple[Attachment, ...],
        *,
        chunks: list[TokenChunk],
    ) -> Response:
        """A completion, or why there is none. Args: chunks: Gets its parts as they come."""
        request = InFlightRequest(
            ask.sampling_params, prompt_ids, ask.session, attachments, on_chunk=chunks.append
        )
        streams = Ability.STREAMING in self.server.abilities
        sample = request.stream_from if streams else request.generate_from
        name = f"server {self.server.name!r}"
        try:
            output = await run_bounded(partial(sample, self.server), timeout_s=None, name=name)
        except AgentLoopError as error:
            if isinstance(error, ServerDied):
                error.chunks = chunks
            return Refusal.pack(error)
        except Exception as error:  # noqa: BLE001  (an engine's bug fails this completion, at the client)
            why = f"it raised {describe_error(error)}"
            return Refusal.pack(bad_reply(why, server=self.server.name, request_id=ask.session))
        self._contexts.append(ask.session, token_bytes(output.token_ids))
        return PackedCompletion.pack(output)

    def _note_end(self, running: _Running, task: asyncio.Task[Response]) -> None:
        client = running.line.client
        del self._running[client, running.call]
        self._num_running_of[client] -= 1
        if running.is_wanted:
            is_cancelled = task.cancelled()
            response = self._refusal("the engine cancelled it") if is_cancelled else task.result()
            running.line.answer(running.call, response)

    def _cancel(self, running: _Running) -> None:
        """Ends a completion that nobody waits for any more."""
        if running.is_wanted:
            running.is_wanted = False
            running.task.cancel()
            running.line.give_up(running.call)

    def _refusal(self, why: str, session: str = "") -> Refusal:
        return Refusal.pack(ServerError(why, server=self.server.name, request_id=session))

    def _end_all_of(self, client: str) -> None:
        for running in list(self._running.values()):
            if running.line.client == client:
                self._cancel(running)
        for name in [name for name, line in self._lines.items() if line.client == client]:
            self._lines.pop(name).close()
        sessions = self._contexts.sessions_of(client)
        self._contexts.drop_client(client)
        self._end_in_engine(sessions)

    def _end_in_engine(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            with suppress(ServerError):
                self.server.end_session(session)
