"""Scores of texts by any of several servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from agent_loop.errors import ServerDied, ServerError
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.scores import TokenScores, checked_scores, checked_text
from agent_loop.types import TokenIds


class TextScorer:
    """Sends each text to the server with the fewest texts, and to another one if that server dies.

    Args:
        servers: Returns the servers that can take requests.
        vocab_size: Number of rows of the model's embedding; None if unknown.
    """

    def __init__(
        self, servers: Callable[[], Sequence[AsyncServerBase]], *, vocab_size: int | None = None
    ) -> None:
        self._servers = servers
        self._vocab_size = vocab_size
        self._num_running: Counter[str] = Counter()

    async def score(self, token_ids: TokenIds, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        """Return the checked scores of a text. See `AsyncServerBase.score`.

        Raises:
            ServerError: No server can score, or the server failed.
            ServerDied: All servers that can score have died.
            BadServerReply: The reply of the server does not fit the text.
        """
        text = checked_text(
            token_ids, start=start, top_logprobs=top_logprobs, server="", vocab_size=self._vocab_size
        )
        left = [server for server in self._servers() if Ability.SCORE in server.abilities]
        if not left:
            raise ServerError(
                "no server can score the tokens of a text; use a server with the ability 'score', such as embedded, "
                "vllm or sglang"
            )
        while True:
            server = min(left, key=lambda server: self._num_running[server.name])
            self._num_running[server.name] += 1
            try:
                reply = await server.score(text, start=start, top_logprobs=top_logprobs)
            except ServerDied:
                left.remove(server)
                if not left:
                    raise
                continue
            finally:
                self._num_running[server.name] -= 1
            return checked_scores(
                reply,
                num_scores=len(text) - start,
                top_logprobs=top_logprobs,
                server=server.name,
                vocab_size=self._vocab_size,
            )
