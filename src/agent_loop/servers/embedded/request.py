"""Requests of the embedded engine: validation, and the tokens sampled so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent_loop.errors import BadPrompt, SamplingParamsError
from agent_loop.servers.embedded.grammar import Grammar
from agent_loop.servers.embedded.sampling import Penalties, SampledRow, uniform_at, uniform_stream
from agent_loop.servers.embedded.vision import (
    VISION_MODELS,
    FeaturesError,
    PromptImages,
    build_prompt_images,
)
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import (
    IntArray,
    SamplingParams,
    ServerStopReason,
    TokenChunk,
    TokenOutput,
    as_token_ids,
    stacked_arrays,
)

LOWEST_TEMPERATURE = 1e-4
"""Smallest temperature at which logits divided by it can be represented in float32."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the requests that an engine accepts."""

    prompt: PromptLimits
    eos_token_ids: frozenset[int]
    image_token_id: int | None = None
    """Token id of the model's image placeholders; None if images are not supported."""
    counts_in_3d: bool = False
    """Whether the model's positions are time, height and width."""

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end a completion."""
        return frozenset(params.stop_token_ids) | (
            frozenset[int]() if params.ignore_eos else self.eos_token_ids
        )


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request and the tokens sampled for it. Only the engine's thread writes to it."""

    request_id: str
    prompt_ids: IntArray
    """Shape [num_tokens]. Placeholders of images are replaced by `PromptImages.cache_keys`."""
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    seed: int | None
    """Seed of the request; None until the engine derives one."""
    images: PromptImages | None = None
    grammar: Grammar | None = None
    """Position in the schema of `params.json_schema`, which the server sets before it submits the request."""
    penalties: Penalties | None = None
    num_sampled: int = 0
    """Number of tokens that the engine has sampled for this request."""
    new_tokens: list[tuple[int, SampledRow]] = field(default_factory=list[tuple[int, SampledRow]])
    """Weight versions and tokens that were not delivered to the caller yet."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were in the cache when the request was admitted."""

    submitted_at: float = field(default_factory=time.monotonic)
    prefill_s: float | None = None
    """Seconds from `submitted_at` to the first token, until they are delivered with it."""
    _stream: int | None = None

    @property
    def sampled_before(self) -> list[int]:
        """Tokens of the completion that were sampled before an interruption."""
        return self.prompt_ids[len(self.prompt_ids) - self.params.num_sampled :].tolist()

    def draw(self) -> float:
        """Return the uniform random number for the next token, which depends only on the seed and the token's index."""
        if self.params.temperature == 0:
            return 0.0
        if self._stream is None:
            assert self.seed is not None, "the engine derives a seed for requests without one"
            self._stream = uniform_stream(self.seed)
        return uniform_at(self._stream, self.params.num_sampled + self.num_sampled)

    def append(self, row: SampledRow, *, weight_version: int) -> ServerStopReason | None:
        """Append a sampled token. Return the stop reason if the completion ends with it, else None."""
        if not self.num_sampled:
            self.prefill_s = time.monotonic() - self.submitted_at
        self.num_sampled += 1
        self.new_tokens.append((weight_version, row))
        token_id = row.token_id
        if self.penalties is not None:
            self.penalties.accept(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
            if self.grammar.is_over:
                return "stop"
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if self.num_sampled >= self.max_new_tokens else None

    def take_new_chunks(self) -> list[TokenChunk]:
        """Return the tokens since the last call, as one chunk per weight version."""
        new, self.new_tokens = self.new_tokens, []
        chunks: list[TokenChunk] = []
        for version, run in groupby(new, key=itemgetter(0)):
            rows = [row for _, row in run]
            chunks.append(
                TokenChunk(
                    [row.token_id for row in rows],
                    [row.logprob for row in rows],
                    weight_version=version,
                    prefill_s=self.prefill_s,
                    extras=stacked_arrays([row.extras for row in rows]),
                )
            )
            self.prefill_s = None
        return chunks

    def take_last_chunks(self, stop_reason: ServerStopReason, *, weight_version: int) -> list[TokenChunk]:
        """Return the tokens since the last call. The last chunk has the stop reason."""
        end = TokenChunk(
            [],
            [],
            weight_version=weight_version,
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens,
        )
        return list(TokenOutput.from_chunks([*self.take_new_chunks(), end]).chunks)


class ScoredRows(NamedTuple):
    """Scores of consecutive tokens of a text, on the CPU."""

    logprobs: Tensor
    """Shape [rows]."""
    top_ids: Tensor
    """Shape [rows, K]."""
    top_logprobs: Tensor
    """Shape [rows, K]."""
    is_finite: bool
    """False if a row's logits contain NaN or positive infinity."""


@dataclass(slots=True, eq=False)
class ScoreRequest:
    """A text to score, and its scores so far. It is computed in chunks, without a slot, in the engine's thread."""

    token_ids: IntArray
    """The whole text, shape [num_tokens], at least `start` + 1 tokens."""
    start: int
    """Index of the first token to score."""
    num_top: int
    """Number of likeliest tokens at each place."""
    tokens: IntArray = field(init=False)
    """Tokens to compute: all but the last one, which predicts nothing that is asked for."""
    num_computed: int = 0
    cache: Any = None
    """The backend's cache of the computed tokens; None before the first chunk."""
    rows: list[ScoredRows] = field(default_factory=list[ScoredRows])
    request_id: str = ""
    """Empty: a score has no session."""

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids.copy()  # torch reads writable arrays only
        self.tokens = self.token_ids[:-1]

    @property
    def first(self) -> int:
        """Index of the first token after which the logits are needed."""
        return self.start - 1

    @property
    def num_left(self) -> int:
        """Number of tokens that are not computed."""
        return len(self.tokens) - self.num_computed

    def restart(self) -> None:
        """Drop the computed tokens and their scores."""
        self.num_computed, self.cache = 0, None
        self.rows.clear()

    def scores(self) -> TokenScores:
        """Return the scores of the whole text."""
        logprobs = torch.cat([rows.logprobs for rows in self.rows]).numpy()
        if not self.num_top:
            return TokenScores(logprobs)
        return TokenScores(
            logprobs,
            torch.cat([rows.top_ids for rows in self.rows]).numpy().astype(np.int32),
            torch.cat([rows.top_logprobs for rows in self.rows]).numpy(),
        )


def build_request(
    request_id: str,
    *,
    prompt_ids: IntArray,
    params: SamplingParams,
    limits: EngineLimits,
    attachments: Sequence[Attachment] = (),
) -> EngineRequest:
    """Validate the arguments of a request and build the request."""
    prompt_ids = as_token_ids(prompt_ids)
    room = limits.prompt.check(request_id, prompt_ids=prompt_ids)

    def bad_prompt(message: str) -> BadPrompt:
        return BadPrompt(message, server=limits.prompt.server, request_id=request_id)

    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise SamplingParamsError(
            f"temperature is {params.temperature}; give 0 (greedy) or at least {LOWEST_TEMPERATURE}"
        )
    if params.num_sampled >= len(prompt_ids):
        raise bad_prompt(
            f"num_sampled is {params.num_sampled}, but the prompt has {len(prompt_ids)} tokens; give the tokens before "
            "the completion too"
        )
    images = None
    if attachments:
        if limits.image_token_id is None:
            raise bad_prompt(
                f"the request has {len(attachments)} attachments, but this model takes none; the embedded server "
                f"supports images for {', '.join(sorted(VISION_MODELS))}"
            )
        try:
            images = build_prompt_images(
                prompt_ids,
                attachments,
                image_token_id=limits.image_token_id,
                counts_in_3d=limits.counts_in_3d,
            )
        except FeaturesError as error:
            raise bad_prompt(str(error)) from error
    return EngineRequest(
        request_id=request_id,
        prompt_ids=prompt_ids if images is None else images.cache_keys,
        images=images,
        params=params,
        penalties=Penalties.of(params, prompt_ids if images is None else images.cache_keys),
        stop_token_ids=limits.stop_token_ids(params),
        max_new_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
        seed=params.seed,
    )
