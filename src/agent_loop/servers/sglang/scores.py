"""Scores of texts by SGLang: the log-probs of a prompt, without a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from agent_loop.errors import BadServerReply, ServerError
from agent_loop.runtime.describe import one_line
from agent_loop.servers.scores import TokenScores
from agent_loop.types import IntArray


def score_body(token_ids: IntArray, *, start: int, num_top: int, rid: str) -> dict[str, Any]:
    """Return the JSON body of a request to `/generate` that scores a text.

    SGLang returns no log-prob of the first token that it is asked for, so it is asked for one token more.
    """
    top = {"top_logprobs_num": num_top} if num_top else {}
    return top | {
        "rid": rid,
        "input_ids": token_ids.tolist(),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "stream": False,
    }


def read_scores(reply: Any, *, token_ids: IntArray, start: int, num_top: int, server: str) -> TokenScores:
    """Read the log-probs of a prompt. Entries begin with a log-prob and a token id, and the first has no log-prob.

    Raises:
        ServerError: SGLang failed the request.
        BadServerReply: The reply has no log-probs of this prompt.
    """
    try:
        fields = cast(Mapping[str, Any], reply)
        if "error" in fields:
            raise ServerError(f"SGLang failed: {fields['error']}", server=server)
        meta: Mapping[str, Any] = fields["meta_info"]
        finish: Any = meta["finish_reason"]
        if finish is not None and finish.get("type") == "abort":
            raise ServerError(f"SGLang aborted the request: {finish.get('message')}", server=server)
        entries = cast(Sequence[Any], meta["input_token_logprobs"])[1:]
        if not _are_ids([int(entry[1]) for entry in entries], token_ids[start:].tolist()):
            raise ValueError(f"{len(entries)} log-probs of other tokens")
        logprobs = np.array([float(entry[0]) for entry in entries], np.float32)
        if not num_top:
            return TokenScores(logprobs)
        places = cast(Sequence[Any], meta["input_top_logprobs"])[1:]
        shape = (len(entries), num_top)
        return TokenScores(
            logprobs,
            np.array([[int(each[1]) for each in place] for place in places], np.int32).reshape(shape),
            np.array([[float(each[0]) for each in place] for place in places], np.float32).reshape(shape),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        shown = one_line(repr(cast(object, reply)), max_length=200)
        raise BadServerReply(
            f"SGLang's reply has no log-probs of the prompt ({error!r}): {shown}", server=server
        ) from error


def _are_ids(given: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether a reply is about these tokens. SGLang writes the last id of the vocabulary as 0."""
    differing = {(got, want) for got, want in zip(given, wanted, strict=False) if got != want}
    return len(given) == len(wanted) and (not differing or differing == {(0, max(wanted))})
