"""Bodies and replies of SGLang's `/generate`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

from agent_loop.errors import BadServerReply, SamplingParamsError, ServerError
from agent_loop.servers.base import Ability, refuse_params_of_request
from agent_loop.types import (
    IntArray,
    SamplingParams,
    ServerStopReason,
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


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """New tokens of one reply of `/generate`."""

    chunk: TokenChunk
    """The new tokens. The stop reason and the counts are set in the last reply."""
    weight_versions: list[int]
    """Version of each token of the whole completion, in the last reply. The current version, in earlier replies."""

    def chunks(self) -> list[TokenChunk]:
        """Return a completion that this reply has all tokens of, in chunks of one weight version each."""
        return stamp(self.chunk, first=0, weight_versions=self.weight_versions)


def stamp(chunk: TokenChunk, *, first: int, weight_versions: Sequence[int]) -> list[TokenChunk]:
    """Split a chunk at its weight versions.

    Args:
        first: Position of the chunk's first token in the completion.
        weight_versions: Version of each token of the completion. The last version holds for all later tokens.
    """
    num_tokens = len(chunk.token_ids)
    versions = [weight_versions[min(first + place, len(weight_versions) - 1)] for place in range(num_tokens)]
    if not versions:
        return [replace(chunk, weight_version=weight_versions[-1])]
    chunks: list[TokenChunk] = []
    start = 0
    for version, run in groupby(versions):
        end = start + len(list(run))
        chunks.append(replace(chunk.part(start, end), weight_version=version))
        start = end
    return chunks


def check_params(params: SamplingParams, *, abilities: frozenset[Ability], server: str) -> None:
    """Check sampling parameters.

    Raises:
        SamplingParamsError: SGLang does not support a parameter, or its log-probs would not be exact.
    """
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
    refuse_params_of_request(params, abilities=abilities, server=server)
    if params.json_schema and params.ignore_eos:
        raise SamplingParamsError(
            "json_schema and ignore_eos are set, but SGLang's grammars end with the model's end token; leave out one"
        )
    if params.json_schema and params.num_sampled:
        raise SamplingParamsError(
            f"json_schema is set for a completion of which {params.num_sampled} tokens were sampled before, but "
            "SGLang's grammars begin with the request; sample the completion again from its start"
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
    prompt_ids: IntArray, params: SamplingParams, *, rid: str, max_new_tokens: int, stream: bool
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
        "stream": stream,
    }


def read_reply(event: Any, *, num_seen: int, server: str, request_id: str) -> GenerateReply:
    """Read a reply, cumulative or incremental.

    Args:
        num_seen: Number of tokens in the replies before it.

    Raises:
        ServerError: The engine failed the request.
        BadServerReply: The event is not a reply of `/generate`.
    """

    def bad(why: str) -> BadServerReply:
        return BadServerReply(f"{why} in SGLang's reply", server=server, request_id=request_id)

    if isinstance(event, dict) and "error" in event:
        raise ServerError(f"SGLang failed: {event['error']}", server=server, request_id=request_id)
    try:
        fields = cast(Mapping[str, Any], event)
        meta: Mapping[str, Any] = fields["meta_info"]
        num_new = int(meta["completion_tokens"]) - num_seen
        output_ids = [int(token) for token in fields["output_ids"]]
        scored = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
        extras = _top_logprobs(meta.get("output_top_logprobs"), num_new=num_new)
        finish: Mapping[str, Any] | None = meta["finish_reason"]
        versions = _versions(meta.get("weight_versions")) or [_as_version(meta.get("weight_version"))]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise bad(f"{type(error).__name__} {error}") from error
    if not 0 <= num_new <= min(len(output_ids), len(scored)):
        raise bad(f"{num_new} new tokens, but {len(output_ids)} ids and {len(scored)} log-probs")
    token_ids = output_ids[len(output_ids) - num_new :]
    scored = scored[len(scored) - num_new :]
    if [token for _, token in scored] != token_ids:
        raise bad("log-probs of other tokens")
    if finish is not None and finish.get("type") == "abort" and finish.get("status_code"):
        raise ServerError(
            f"SGLang aborted the request: {finish.get('message')}", server=server, request_id=request_id
        )
    is_last = finish is not None
    chunk = TokenChunk(
        token_ids=token_ids,
        logprobs=[logprob for logprob, _ in scored],
        stop_reason=_stop_reason(finish, bad) if is_last else None,
        num_preempted=int(meta.get("num_retractions") or 0) if is_last else 0,
        num_cached_tokens=meta.get("cached_tokens") if is_last else None,
        extras=extras,
    )
    return GenerateReply(chunk, weight_versions=versions)


def _stop_reason(finish: Mapping[str, Any], bad: Any) -> ServerStopReason:
    match finish.get("type"):
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "aborted"
        case other:
            raise bad(f"finish reason {other!r}")


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


def _versions(spans: Any) -> list[int]:
    return [
        _as_version(span["version"])
        for span in spans or ()
        for _ in range(int(span["end"]) - int(span["start"]))
    ]


def _as_version(text: Any) -> int:
    """Return a weight version as a number. Servers that were started elsewhere name their first version `default`."""
    return int(text) if str(text).isdecimal() else 0
