"""Scores of a text: the log-probs that a model gives to its tokens, and the checks of requests and replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.errors import BadPrompt, BadServerReply
from agent_loop.types import FloatArray, IntArray, TokenIds, as_token_ids

ROUNDING = 1e-3
"""Log-probs may exceed 0 by this much from rounding; they are set to 0."""
MINUS_INFINITY = -9999.0
"""Stands for minus infinity, which JSON does not have. Lower log-probs are minus infinity too."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of the last M tokens of a text, each given all tokens before it, at temperature 1."""

    logprobs: FloatArray
    """Log-prob of each token, shape [M]."""
    top_ids: IntArray | None = None
    """Ids of the K likeliest tokens at each place, likeliest first, shape [M, K]; None if none were asked for. K is
    at most the size of the vocabulary."""
    top_logprobs: FloatArray | None = None
    """Their log-probs, shape [M, K]."""


def scores_of_no_token(top_logprobs: int) -> TokenScores:
    """Return the scores for a `start` at the end of the text."""
    none = np.zeros(0, np.float32)
    if not top_logprobs:
        return TokenScores(none)
    return TokenScores(none, np.zeros((0, top_logprobs), np.int32), np.zeros((0, top_logprobs), np.float32))


def checked_text(
    token_ids: TokenIds,
    *,
    start: int,
    top_logprobs: int,
    server: str,
    vocab_size: int | None = None,
    max_model_len: int | None = None,
) -> IntArray:
    """Return the tokens of a request for scores, shape [num_tokens]."""
    text = as_token_ids(token_ids)
    num_tokens, problem = len(text), ""
    if num_tokens == 0:
        problem = "the text to score is empty; give at least one token"
    elif max_model_len is not None and num_tokens > max_model_len:
        problem = (
            f"the text to score has {num_tokens} tokens, but the server takes {max_model_len}; shorten the text, or "
            "raise the context length of the server"
        )
    elif not 1 <= start <= num_tokens:
        problem = (
            f"start is {start}, but the text to score has {num_tokens} tokens; give 1 to {num_tokens}, because nothing "
            "predicts the first token"
        )
    elif top_logprobs < 0:
        problem = f"top_logprobs is {top_logprobs}; give 0 or more"
    elif (lowest := int(text.min())) < 0 or (vocab_size is not None and int(text.max()) >= vocab_size):
        problem = (
            f"the text to score has token id {lowest if lowest < 0 else text.max()}, which is outside the vocabulary "
            "of the model; give ids of this model's tokenizer"
        )
    if problem:
        raise BadPrompt(problem, server=server)
    return text


def checked_scores(
    reply: Any, *, num_scores: int, top_logprobs: int, server: str, vocab_size: int | None = None
) -> TokenScores:
    """Return a checked copy of a server's scores."""

    def bad(what: str) -> BadServerReply:
        return BadServerReply(
            f"its scores are invalid: {what}; fix `score` of the server, which returns TokenScores",
            server=server,
        )

    def array(name: str, shape: tuple[int, ...], kind: type[Any]) -> NDArray[Any]:
        try:
            given: NDArray[Any] = np.array(getattr(reply, name)).astype(kind, casting="same_kind")
        except (ValueError, TypeError) as error:
            raise bad(f"{name} is not an array of {kind.__name__} ({error})") from None
        if given.shape != shape:
            raise bad(f"{name} has shape {list(given.shape)}, expected {list(shape)}")
        return given

    def logprobs(name: str, shape: tuple[int, ...]) -> FloatArray:
        given = array(name, shape, np.float32)
        wrong = given[np.isnan(given) | (given > ROUNDING)]
        if len(wrong):
            raise bad(
                f"{name} has {wrong[0]}, which is not a log-prob; expected 0 or less, or minus infinity"
            )
        return np.minimum(given, np.float32(0))

    if not isinstance(reply, TokenScores):
        raise bad(f"score returned an object of type {type(reply).__name__}, not TokenScores")
    of_tokens = logprobs("logprobs", (num_scores,))
    if not top_logprobs:
        return TokenScores(of_tokens)
    num_top = min(top_logprobs, vocab_size or top_logprobs)
    if vocab_size is None and isinstance(reply.top_ids, np.ndarray):  # fewer may be all of the vocabulary
        num_top = min(num_top, *reply.top_ids.shape[1:])
    top_ids = array("top_ids", (num_scores, num_top), np.int32)
    if top_ids.size and not 0 <= int(top_ids.min()) <= int(top_ids.max()) < (vocab_size or 2**31):
        raise bad(f"top_ids has ids from {top_ids.min()} to {top_ids.max()}, outside of the vocabulary")
    return TokenScores(of_tokens, top_ids, logprobs("top_logprobs", (num_scores, num_top)))


def read_prompt_logprobs(entries: Any, *, token_ids: IntArray, start: int, top_logprobs: int) -> TokenScores:
    """Read the log-probs of a prompt from JSON.

    Each place has an object from token ids to log-probs: the likeliest tokens, and the prompt's own token.
    """
    if len(entries) != len(token_ids):
        raise ValueError(f"{len(entries)} entries for {len(token_ids)} tokens")
    logprobs: list[float] = []
    top: list[Sequence[tuple[int, float]]] = []
    for token_id, entry in zip(token_ids[start:].tolist(), entries[start:], strict=True):
        found = _entry_logprobs(entry)
        logprobs.append(found[token_id])
        top.append(sorted(found.items(), key=itemgetter(1), reverse=True)[:top_logprobs])
    scores = np.array(logprobs, np.float32)
    if not top_logprobs:
        return TokenScores(scores)
    return TokenScores(
        scores,
        np.array([[token for token, _ in place] for place in top], np.int32).reshape(len(top), -1),
        np.array([[logprob for _, logprob in place] for place in top], np.float32).reshape(len(top), -1),
    )


def _entry_logprobs(entry: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    logprobs = {int(token): float(fields["logprob"]) for token, fields in entry.items()}
    return {token: value if value > MINUS_INFINITY else -math.inf for token, value in logprobs.items()}
