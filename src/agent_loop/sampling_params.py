"""Sampling parameters of one completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Any, cast

from msgspec import Struct, structs

from agent_loop.errors import SamplingParamsError, did_you_mean


class SamplingParams(Struct, frozen=True):
    """Sampling parameters of one completion. Loops pass plain mappings; servers receive this class."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """Maximum number of candidates; -1 is no limit."""
    max_tokens: int | None = None
    """Maximum number of new tokens; None is the server's limit."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the model's end tokens. A sampled stop token is returned."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion, one text or several. The completion ends with the first token that completes one
    of them, and contains it. Works with every engine: the client of the servers decodes the tokens and aborts the
    request. Servers themselves refuse it."""
    seed: int | None = None
    """Makes this completion reproducible, independent of concurrent requests."""
    ignore_eos: bool = False
    """Continue after the model's end tokens. `stop_token_ids` still end the completion."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative logits, of tokens in the prompt and the completion. 1.0 is none.
    Penalties need `Ability.PENALTIES`. Log-probs are those of the penalised logits, which trainers do not compute."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the completion has it."""
    min_p: float = 0.0
    """Candidates with less than this share of the likeliest candidate's probability are removed; 0 removes none. Needs
    `Ability.MIN_P`. As for top-p, log-probs are those before the removal."""
    json_schema: str = ""
    """JSON text of a schema that the whole completion must match; "" is none. `{"type": "object"}` allows any object.
    The grammar removes all other tokens before sampling, and log-probs are those of the remaining ones. Stop tokens are
    allowed where the text is complete. Needs `Ability.JSON_SCHEMA`."""
    num_sampled: int = 0
    """Number of tokens at the end of the prompt that were sampled before this completion was interrupted. A server with
    `Ability.FREE_SEEDS` then samples the tokens that it would have sampled without the interruption."""
    top_logprobs: int = 0
    """Number k of the likeliest tokens to return for each sampled token. The completion then has the extras
    `top_token_ids`, int32, and `top_logprobs`, float32, both [num_tokens, k], likeliest first. They are the k largest
    of `log_softmax(logits / temperature)`, before top-k and top-p, as for `TokenChunk.logprobs`; temperature 1 for
    greedy completions. The sampled token need not be among them. Servers need `Ability.TOP_LOGPROBS`."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < inf:
            raise SamplingParamsError(
                f"temperature is {self.temperature}; give 0 (greedy) or more, and finite"
            )
        if not 0 < self.top_p <= 1:
            raise SamplingParamsError(f"top_p is {self.top_p}; give more than 0 and at most 1")
        if self.top_k == 0 or self.top_k < -1:
            raise SamplingParamsError(f"top_k is {self.top_k}; give -1 (no limit) or at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SamplingParamsError(f"max_tokens is {self.max_tokens}; give at least 1, or None")
        if not all(isinstance(text, str) and text for text in cast(tuple[Any, ...], self.stop)):
            raise SamplingParamsError(f"stop is {self.stop!r:.80}; give texts that are not empty")
        if self.num_sampled < 0:
            raise SamplingParamsError(f"num_sampled is {self.num_sampled}; give 0 or more")
        if self.top_logprobs < 0:
            raise SamplingParamsError(f"top_logprobs is {self.top_logprobs}; give 0 (none) or more")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise SamplingParamsError(f"{name} is {getattr(self, name)}; give 0 (none), or from -2 to 2")
        if not 0 <= self.min_p <= 1:
            raise SamplingParamsError(f"min_p is {self.min_p}; give 0 (none), or at most 1")
        if self.json_schema:
            _check_json(self.json_schema)
        if not 0 < self.repetition_penalty < inf:
            raise SamplingParamsError(
                f"repetition_penalty is {self.repetition_penalty}; give 1.0 (none) or another finite number above 0"
            )

    @classmethod
    def parse(cls, params: Mapping[str, Any] | SamplingParams) -> SamplingParams:
        """Return the parameters in a mapping.

        Raises:
            SamplingParamsError: A key is unknown or a value is out of range.
        """
        if isinstance(params, SamplingParams):
            return params
        known = cls.__struct_fields__
        for key in params:
            if key not in known:
                raise SamplingParamsError(f"unknown sampling parameter {key!r}{did_you_mean(key, known)}")
        values = dict(params)
        try:
            values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
            stop = values.get("stop")
            values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
            return cls(**values)
        except TypeError as error:
            raise SamplingParamsError(f"sampling parameters are {values!r}: {error}; give numbers") from error

    def limited(self, max_tokens: int, *, more_stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
        """Return the same parameters with another `max_tokens` and more stop tokens.

        Raises:
            SamplingParamsError: `max_tokens` is less than 1.
        """
        return structs.replace(
            self, max_tokens=max_tokens, stop_token_ids=self.stop_token_ids + more_stop_token_ids
        )

    def after(self, num_sampled: int) -> SamplingParams:
        """Return the parameters for the rest of a completion, of which `num_sampled` tokens were sampled."""
        return structs.replace(
            self,
            max_tokens=None if self.max_tokens is None else self.max_tokens - num_sampled,
            num_sampled=self.num_sampled + num_sampled,
        )


@lru_cache(maxsize=256)
def _check_json(json_schema: str) -> None:
    """Check that a schema is the JSON text of an object. Engines check the schema itself."""
    try:
        schema = json.loads(json_schema)
    except (ValueError, TypeError) as error:
        raise SamplingParamsError(
            f"json_schema is {json_schema!r:.80}, which is not JSON ({error}); give the JSON text of a schema"
        ) from error
    if not isinstance(schema, dict):
        raise SamplingParamsError(
            f'json_schema is {json_schema!r:.80}; give the JSON text of an object, such as {{"type": "object"}}'
        )
