"""Reader of replies of `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from agent_loop.errors import BadServerReply
from agent_loop.runtime.describe import one_line
from agent_loop.servers.prompt_logprobs import read_prompt_logprobs
from agent_loop.servers.scores import TokenScores
from agent_loop.servers.vllm.logprobs import read_content
from agent_loop.servers.vllm.outputs import STOP_REASONS
from agent_loop.servers.vllm.stamps import UnstampedChunk, VersionSpan, stamp
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

DEFAULTS = SamplingParams()


class ReplyReader:
    """Reads completions and their parts from JSON, and refuses invalid replies."""

    def __init__(self, server: str) -> None:
        self._server = server

    def chunk(
        self,
        reply: Any,
        *,
        request_id: str,
        weight_version: int,
        has_logprobs: bool,
        params: SamplingParams = DEFAULTS,
    ) -> TokenChunk:
        """Read the tokens of one part of a stream, or of a whole completion.

        Args:
            weight_version: Weight version of the chunk.
            has_logprobs: Whether the log-probs in the reply equal `TokenOutput.log_probs` as defined.
            params: Sampling parameters of the request.

        Raises:
            BadServerReply: The reply is not a completion.
        """
        try:
            choice = cast(dict[str, Any], reply["choices"][0])
            token_ids = [int(token) for token in choice["token_ids"] or ()]
            found = cast("dict[str, Any]", choice["logprobs"] or {})
            entries = cast(list[dict[str, Any]], found.get("content") or [])
            reason = cast("str | None", choice["finish_reason"])
            scored = read_content(entries, params=params)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._bad(f"a reply contains no completion ({error!r})", reply, request_id) from error
        if scored.token_ids != token_ids:
            why = f"log-probs are for {len(scored.token_ids)} tokens instead of {len(token_ids)}"
            raise self._bad(why, reply, request_id)
        if reason is not None and reason not in STOP_REASONS:
            raise self._bad(f"the completion ended with {reason!r}", reply, request_id)
        return TokenChunk(
            token_ids=token_ids,
            logprobs=scored.logprobs if has_logprobs else None,
            weight_version=weight_version,
            stop_reason=None if reason is None else STOP_REASONS[reason],
            num_cached_tokens=cached_tokens(reply),
            extras=scored.extras if has_logprobs else {},
        )

    def part(
        self,
        event: Any,
        *,
        request_id: str,
        weight_version: int,
        has_logprobs: bool,
        params: SamplingParams = DEFAULTS,
    ) -> UnstampedChunk:
        """Read one part of a stream. See `chunk`."""
        chunk = self.chunk(
            event,
            request_id=request_id,
            weight_version=weight_version,
            has_logprobs=has_logprobs,
            params=params,
        )
        return UnstampedChunk(chunk, spans=self._spans(event, request_id, default=weight_version))

    def output(
        self,
        reply: Any,
        *,
        request_id: str,
        weight_version: int,
        has_logprobs: bool,
        params: SamplingParams = DEFAULTS,
    ) -> TokenOutput:
        """Read a whole completion, with the weight versions that the engine reports. See `chunk`."""
        part = self.part(
            reply,
            request_id=request_id,
            weight_version=weight_version,
            has_logprobs=has_logprobs,
            params=params,
        )
        # The server reports no preemptions. Each weight update preempts the requests in flight.
        preempted = TokenChunk([], [], num_preempted=max(0, len(part.spans) - 1))
        return TokenOutput.from_chunks([preempted, *stamp(part)])

    def top_tokens(self, reply: Any, *, request_id: str) -> dict[int, float]:
        """Read the likeliest candidates for the first token, with their log-probs.

        Raises:
            BadServerReply: The reply has no candidates.
        """
        try:
            entries = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return {int(entry["token_id"]): float(entry["logprob"]) for entry in entries}
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise self._bad(f"a reply contains no log-probs ({error!r})", reply, request_id) from error

    def scores(self, reply: Any, *, token_ids: IntArray, start: int, num_top: int) -> TokenScores:
        """Read the log-probs of a prompt. See `read_prompt_logprobs`.

        Raises:
            BadServerReply: The reply has no log-probs of this prompt.
        """
        try:
            return read_prompt_logprobs(
                reply["prompt_logprobs"], token_ids=token_ids, start=start, top_logprobs=num_top
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._bad(f"a reply contains no log-probs of the prompt ({error!r})", reply, "") from error

    def _spans(self, reply: Any, request_id: str, *, default: int) -> list[VersionSpan]:
        try:
            return [
                VersionSpan(
                    as_version(span["version"], default=default), int(span["end"]) - int(span["start"])
                )
                for span in reply["choices"][0].get("weight_versions") or ()
            ]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._bad(f"weight_versions cannot be read ({error!r})", reply, request_id) from error

    def _bad(self, what: str, reply: Any, request_id: str) -> BadServerReply:
        return BadServerReply(
            f"{what}: {one_line(str(reply), max_length=200)}", server=self._server, request_id=request_id
        )


def cached_tokens(reply: Mapping[str, Any]) -> int | None:
    """Return the number of prompt tokens that were cached; None if vLLM does not report it."""
    try:
        usage: Any = reply.get("usage") or {}
        details: Any = usage.get("prompt_tokens_details") or {}
        return details.get("cached_tokens")
    except AttributeError:  # the completion is not lost because of an invalid statistic
        return None


def as_version(label: Any, *, default: int) -> int:
    """Return the number in vLLM's label of a weight version; the default if the label is not a number."""
    return int(label) if isinstance(label, str) and label.isdecimal() else default
