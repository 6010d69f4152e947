"""Scores of texts by vLLM: the log-probs of a prompt, for which one further token is sampled."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent_loop.errors import BadPrompt, BadServerReply
from agent_loop.servers.scores import TokenScores
from agent_loop.types import IntArray


def score_sampling(num_top: int, *, max_logprobs: int, server: str) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a score. vLLM does not use its prefix cache for such a request.

    Args:
        num_top: Number of likeliest tokens at each place.
        max_logprobs: vLLM's limit of that number; -1 is no limit.
        server: Name of the server in errors.

    Raises:
        BadPrompt: The limit is too low.
    """
    if 0 <= max_logprobs < num_top:
        raise BadPrompt(
            f"top_logprobs is {num_top}, but engine_kwargs.max_logprobs is {max_logprobs}; leave max_logprobs out, or "
            f"set it to {num_top}",
            server=server,
        )
    return {
        "prompt_logprobs": num_top,
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }


def read_flat_scores(flat: Any, *, token_ids: IntArray, start: int, num_top: int, server: str) -> TokenScores:
    """Read the `FlatLogprobs` of a prompt, which have the prompt's own token of each position first.

    Args:
        flat: Log-probs of all positions, none for the first.
        token_ids: The whole text.
        start: Index of the first token to read.
        num_top: Number of likeliest tokens at each place.
        server: Name of the server in errors.

    Raises:
        BadServerReply: The log-probs are those of other tokens.
    """
    shape = (len(token_ids) - 1, 1 + num_top)
    ids, logprobs = np.array(flat.token_ids, np.int32), np.array(flat.logprobs, np.float32)
    if ids.size != shape[0] * shape[1] or logprobs.size != ids.size:
        raise BadServerReply(
            f"vLLM returned {ids.size} log-probs of a prompt, not {shape[0]} x {shape[1]}", server=server
        )
    ids, logprobs = ids.reshape(shape)[start - 1 :], logprobs.reshape(shape)[start - 1 :]
    if (ids[:, 0] != token_ids[start:]).any():
        raise BadServerReply("vLLM returned log-probs of another prompt", server=server)
    if not num_top:
        return TokenScores(logprobs[:, 0])
    return TokenScores(logprobs[:, 0], ids[:, 1:], logprobs[:, 1:])
