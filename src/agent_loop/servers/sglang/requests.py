"""Bodies and replies of SGLang's `/generate`, for completions and for scores of texts."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from agent_loop.errors import SamplingParamsError, ServerError
from agent_loop.servers.base import Ability, refuse_params_of_request
from agent_loop.servers.engine_client import as_version, token_versions
from agent_loop.servers.http import FINISH_REASONS, reading
from agent_loop.servers.scores import TokenScores
from agent_loop.types import (
    IntArray,
    SamplingParams,
    TokenArrays,
    TokenChunk,
    top_logprob_arrays,
)

SAMPLING_ABILITIES = frozenset({Ability.LOG_PROBS, Ability.TOP_LOGPROBS})
"""Abilities of a SGLang with exact log-probs."""
CONSTRAINT_ABILITIES = frozenset({Ability.PENALTIES, Ability.MIN_P})
"""Abilities of every SGLang. Log-probs are those after penalties and grammars, and before min-p."""
LOWEST_TEMPERATURE = 1e-4
"""Lower temperatures overflow the logits in float32, and SGLang treats them as greedy."""
GREEDY_TOP_P = 1e-6
"""Value of `top_p` that leaves one candidate."""


def check_params(params: SamplingParams, *, abilities: frozenset[Ability], server: str) -> None:
    """Check sampling parameters."""
    if params.repetition_penalty != 1.0:
        raise SamplingParamsError(
            f"repetition_penalty is {params.repetition_penalty}; SGLang servers offer only 1.0 (none), because SGLang "
            "does not count the tokens of the prompt; use presence_penalty or frequency_penalty"
        )
    if params.json_schema and Ability.JSON_SCHEMA not in abilities:
        raise SamplingParamsError(
            "json_schema is set, but SGLang runs without a tokenizer; set "
            "rollout.engine_kwargs.skip_tokenizer_init=false, or leave it out"
        )
    refuse_params_of_request(params, abilities=abilities, server=server, resumes_schemas=False)
    if params.json_schema and params.ignore_eos:
        raise SamplingParamsError(
            "json_schema and ignore_eos are set, but SGLang's grammars end with the model's end token; leave out one"
        )
    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise SamplingParamsError(
            f"temperature is {params.temperature}; give 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    if params.seed is not None and Ability.SEED not in abilities:
        raise SamplingParamsError(
            f"seed is {params.seed}, but SGLang uses seeds of requests only with "
            "rollout.engine_kwargs.enable_deterministic_inference=true; set it, or set no seed"
        )


@contextmanager
def schema_errors(params: SamplingParams) -> Generator[None]:
    """Raise `SamplingParamsError` for a schema that SGLang cannot compile, which it reports as a failed request."""
    try:
        yield
    except ServerError as error:
        if not params.json_schema or "grammar" not in str(error):
            raise
        raise SamplingParamsError(f"SGLang refuses json_schema: {error}; fix the schema") from error


def needs_own_stop(params: SamplingParams) -> bool:
    """Return whether the completion must be cut at stop tokens here: SGLang's `ignore_eos` ignores them as well."""
    return params.ignore_eos and bool(params.stop_token_ids)


def generate_body(
    prompt_ids: IntArray, params: SamplingParams, *, rid: str, max_new_tokens: int
) -> dict[str, Any]:
    """Return the JSON body of a request to `/generate`.

    With `top_k` 1, SGLang samples greedily and returns log-probs at temperature 1, unless another request in the batch
    is not greedy. A tiny `top_p` samples the same token and keeps the temperature.
    """
    is_scaled_argmax = params.top_k == 1 and params.temperature not in (0.0, 1.0)
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": GREEDY_TOP_P if is_scaled_argmax else params.top_p,
        "top_k": -1 if is_scaled_argmax else params.top_k,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": list(params.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    optional = {
        "sampling_seed": (params.seed, None),
        "presence_penalty": (params.presence_penalty, 0.0),
        "frequency_penalty": (params.frequency_penalty, 0.0),
        "min_p": (params.min_p, 0.0),
        "json_schema": (params.json_schema, ""),
    }
    sampling |= {name: value for name, (value, default) in optional.items() if value != default}
    top = {"top_logprobs_num": params.top_logprobs} if params.top_logprobs else {}
    return top | {
        "rid": rid,
        "input_ids": prompt_ids.tolist(),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }


def read_reply(
    event: Any, *, num_seen: int, server: str, request_id: str
) -> tuple[TokenChunk, Sequence[int]]:
    """Return the new tokens of a reply, cumulative or incremental, and the weight version of each token.

    The last reply has the version of every token of the completion. Earlier replies have the current version.

    Args:
        num_seen: Number of tokens in the replies before it.
    """
    with reading(event, server=server, request_id=request_id):
        if "error" in event:
            raise ServerError(f"SGLang failed: {event['error']}", server=server, request_id=request_id)
        meta: Mapping[str, Any] = event["meta_info"]
        finish: Mapping[str, Any] | None = meta["finish_reason"]
        if finish and finish["type"] == "abort" and finish.get("status_code"):
            # Its tokens, if it has any, lack log-probs.
            raise ServerError(
                f"SGLang aborted the request: {finish.get('message')}", server=server, request_id=request_id
            )
        num_new = int(meta["completion_tokens"]) - num_seen
        token_ids = [int(token) for token in event["output_ids"]]
        scored = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
        if not 0 <= num_new <= min(len(token_ids), len(scored)):
            raise ValueError(f"{num_new} new tokens, but {len(token_ids)} ids and {len(scored)} log-probs")
        token_ids, scored = token_ids[len(token_ids) - num_new :], scored[len(scored) - num_new :]
        if [token for _, token in scored] != token_ids:
            raise ValueError("log-probs of other tokens")
        is_last = finish is not None
        chunk = TokenChunk(
            token_ids=token_ids,
            logprobs=[logprob for logprob, _ in scored],
            stop_reason=FINISH_REASONS[finish["type"]] if finish is not None else None,
            num_preempted=int(meta.get("num_retractions") or 0) if is_last else 0,
            num_cached_tokens=meta.get("cached_tokens") if is_last else None,
            extras=_top_logprobs(meta.get("output_top_logprobs"), num_new=num_new),
        )
        return chunk, token_versions(meta.get("weight_versions")) or [as_version(meta.get("weight_version"))]


def _top_logprobs(entries: Any, *, num_new: int) -> TokenArrays:
    """Return the likeliest tokens of the last `num_new` tokens. Each entry begins with log-prob and token id."""
    new = entries[len(entries) - num_new :] if entries and num_new > 0 else ()
    if not new:
        return {}
    return top_logprob_arrays(
        [[int(each[1]) for each in entry] for entry in new],
        [[float(each[0]) for each in entry] for entry in new],
        num_top=len(new[0]),
    )


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
    """Read the log-probs of a prompt. Entries begin with a log-prob and a token id, and the first has no log-prob."""
    with reading(reply, server=server):
        if "error" in reply:
            raise ServerError(f"SGLang failed: {reply['error']}", server=server)
        meta: Mapping[str, Any] = reply["meta_info"]
        finish: Any = meta["finish_reason"]
        if finish is not None and finish.get("type") == "abort":
            raise ServerError(f"SGLang aborted the request: {finish.get('message')}", server=server)
        entries: Sequence[Any] = meta["input_token_logprobs"][1:]
        if not _are_ids([int(entry[1]) for entry in entries], token_ids[start:].tolist()):
            raise ValueError(f"{len(entries)} log-probs of other tokens")
        logprobs = np.array([float(entry[0]) for entry in entries], np.float32)
        if not num_top:
            return TokenScores(logprobs)
        places: Sequence[Any] = meta["input_top_logprobs"][1:]
        shape = (len(entries), num_top)
        return TokenScores(
            logprobs,
            np.array([[int(each[1]) for each in place] for place in places], np.int32).reshape(shape),
            np.array([[float(each[0]) for each in place] for place in places], np.float32).reshape(shape),
        )


def _are_ids(given: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether a reply is about these tokens. SGLang writes the last id of the vocabulary as 0."""
    differing = {(got, want) for got, want in zip(given, wanted, strict=False) if got != want}
    return len(given) == len(wanted) and (not differing or differing == {(0, max(wanted))})
