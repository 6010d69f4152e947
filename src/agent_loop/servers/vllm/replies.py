"""Reader of replies of `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from operator import itemgetter
from typing import Any

from agent_loop.servers.engine_client import token_versions
from agent_loop.servers.http import FINISH_REASONS, HttpStatusError, reading
from agent_loop.types import SamplingParams, TokenChunk, top_logprob_arrays


async def read_stream(
    events: AsyncGenerator[Any], *, params: SamplingParams, has_logprobs: bool, server: str, request_id: str
) -> AsyncGenerator[tuple[TokenChunk, Sequence[int]]]:
    """Yield the chunks of a completion, each with the weight versions that vLLM reports: of all tokens, in the last.

    The last chunk is held until the usage comes, which has the number of cached tokens.

    Args:
        params: Sampling parameters of the request.
        has_logprobs: Whether the log-probs equal `TokenOutput.log_probs` as defined.
    """
    last: tuple[TokenChunk, Sequence[int]] | None = None
    async with aclosing(events):
        async for event in events:
            with reading(event, server=server, request_id=request_id):
                if "error" in event:
                    raise HttpStatusError(
                        f"vLLM failed the request: {event['error']['message']}",
                        status=int(event["error"].get("code") or 500),
                        server=server,
                        request_id=request_id,
                    )
                chunk = read_chunk(event, params=params, has_logprobs=has_logprobs)
                spans: Any = event["choices"][0].get("weight_versions") if event["choices"] else ()
                versions = token_versions(spans)
            if chunk is None:
                if last is not None:
                    last = replace(last[0], num_cached_tokens=cached_tokens(event)), last[1]
            elif chunk.stop_reason is None:
                yield chunk, versions
            else:
                # vLLM reports no preemptions. Each weight update preempts the requests in flight.
                num_preempted = max(0, len(set(versions)) - 1)
                last = replace(chunk, num_preempted=num_preempted), versions
    if last is not None:
        yield last


def read_chunk(event: Any, *, params: SamplingParams, has_logprobs: bool) -> TokenChunk | None:
    """Read the tokens of an event; None if it has only the usage. Its errors are those of `reading`."""
    if not event["choices"]:
        return None
    choice: Any = event["choices"][0]
    tokens: list[Any] = choice["token_ids"] or []
    token_ids = [int(token) for token in tokens]
    logprobs: dict[str, Any] = choice["logprobs"] or {}
    entries: list[dict[str, Any]] = logprobs.get("content") or []
    if [int(entry["token_id"]) for entry in entries] != token_ids:
        raise ValueError(f"log-probs of other tokens than the {len(token_ids)} of the completion")
    reason = choice["finish_reason"]
    chunk = TokenChunk(
        token_ids, logprobs=None, stop_reason=None if reason is None else FINISH_REASONS[reason]
    )
    if not has_logprobs:
        return chunk
    # The sampled token comes first, wherever it ranks.
    top = [top_tokens(entry)[: params.top_logprobs] for entry in entries if params.top_logprobs]
    return replace(
        chunk,
        logprobs=[float(entry["logprob"]) for entry in entries],
        extras=top_logprob_arrays(
            [[token for token, _ in each] for each in top],
            [[logprob for _, logprob in each] for each in top],
            num_top=params.top_logprobs,
        )
        if top
        else {},
    )


def top_tokens(entry: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the likeliest candidates for a token, with their log-probs."""
    found = [(int(each["token_id"]), float(each["logprob"])) for each in entry["top_logprobs"]]
    return sorted(found, key=itemgetter(1), reverse=True)


def cached_tokens(reply: Mapping[str, Any]) -> int | None:
    """Return the number of prompt tokens that were cached; None if vLLM does not report it."""
    usage: Any = reply.get("usage") or {}
    details: Any = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens")
