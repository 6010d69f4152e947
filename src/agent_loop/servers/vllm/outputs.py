"""Reader of the outputs of `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_loop.errors import BadServerReply
from agent_loop.servers.vllm.limits import VLLMRequest
from agent_loop.servers.vllm.logprobs import read_flat
from agent_loop.servers.vllm.stamps import UnstampedChunk, VersionSpan
from agent_loop.types import SamplingParams, ServerStopReason, TokenChunk

STOP_REASONS: Mapping[str, ServerStopReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""vLLM's finish reasons. All others are failures."""


def read_part(
    output: Any, *, call: VLLMRequest, server: str, weight_version: int, params: SamplingParams
) -> UnstampedChunk:
    """Read a `RequestOutput` with flat log-probs.

    Raises:
        BadServerReply: The output is not a completion.
    """
    completion = output.outputs[0]
    reason = completion.finish_reason
    if reason is not None and reason not in STOP_REASONS:
        raise BadServerReply(
            f"vLLM ended the completion with {reason!r}; see its log",
            server=server,
            request_id=call.request_id,
        )
    token_ids = list(completion.token_ids)
    try:
        scored = read_flat(completion.logprobs, params=params)
    except ValueError as error:
        raise BadServerReply(str(error), server=server, request_id=call.request_id) from error
    if token_ids != scored.token_ids:
        raise BadServerReply(
            f"vLLM returned log-probs of {len(scored.token_ids)} tokens for {len(token_ids)} tokens",
            server=server,
            request_id=call.request_id,
        )
    num_preempted = 0 if output.metrics is None else output.metrics.num_preemptions
    num_new, call.num_preempted = num_preempted - call.num_preempted, num_preempted
    chunk = TokenChunk(
        token_ids=token_ids,
        logprobs=scored.logprobs,
        weight_version=weight_version,
        stop_reason=None if reason is None else STOP_REASONS[reason],
        num_preempted=num_new,
        num_cached_tokens=None if reason is None else output.num_cached_tokens,
        extras=scored.extras,
    )
    spans = [VersionSpan(int(s.version), s.end - s.start) for s in completion.weight_versions or ()]
    return UnstampedChunk(chunk, spans=spans)
