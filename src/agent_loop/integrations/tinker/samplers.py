"""Sampling from snapshots of adapters, with a few engines that each hold the weights of one snapshot at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from msgspec import Struct

from agent_loop.errors import RequestError
from agent_loop.integrations.tinker.adapters import BaseModel
from agent_loop.integrations.tinker.messages import EMPTY_LOGPROB, SampledSequence, write_samples
from agent_loop.runtime.threads import run_in_thread
from agent_loop.seeds import derived_seed
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scores import TokenScores
from agent_loop.types import FloatArray, IntArray, SamplingParams, TokenOutput


class Chunk(Struct, frozen=True):
    """Part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Struct, frozen=True):
    """Prompt of a request."""

    chunks: list[Chunk]


class Sampling(Struct, frozen=True):
    """Sampling parameters of a request."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(Struct, frozen=True):
    """Request for completions, and for the log-probs of a prompt."""

    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: str
    seq_id: int
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: dict[str, object] | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def check(self) -> None:
        """Refuse what the server does not have."""
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
            if getattr(self, name):
                raise RequestError(f"{name}: this server does not have it; leave it out")
        if any(chunk.type != "encoded_text" for chunk in self.prompt.chunks):
            raise RequestError("prompt: this server takes text only, and no images or audio")
        if not self.token_ids:
            raise RequestError("prompt: it is empty; send at least one token")

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def params(self, seed: int) -> SamplingParams:
        """Return the parameters of one completion. Stop tokens take the place of the model's end tokens."""
        given = self.sampling_params
        stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k or -1,
            max_tokens=given.max_tokens,
            seed=seed,
            stop=tuple(stop for stop in stops if isinstance(stop, str)),
            stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
            ignore_eos=given.stop is not None,
            top_logprobs=self.topk_sample_logprobs,
        )


@dataclass(slots=True, eq=False)
class _Engine:
    """Engine with the weights of one snapshot."""

    manager: AsyncLLMServerManager | None = None
    weights: Path | None = None
    """Folder of the adapters that it has or will have; None is the base."""
    loaded: Path | None = None
    num_users: int = 0
    last_used: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Samplers:
    """Engines for all snapshots. A request waits while all engines sample from other snapshots."""

    def __init__(
        self,
        base: BaseModel,
        *,
        config: EmbeddedConfig,
        max_engines: int,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._base = base
        self._config = config
        self._max_engines = max_engines
        self._decode = decode
        self._engines: list[_Engine] = []
        self._queue: deque[object] = deque()
        self._changed = asyncio.Condition()
        self._numbers = count(1)

    async def close(self) -> None:
        for engine in self._engines:
            if engine.manager is not None:
                await engine.manager.pool.close()

    async def sample(self, request: SampleRequest, *, weights: Path | None, name: str) -> bytes:
        """Return the samples of a request as a message. Seeds depend on the request's seed, or else on its name."""
        prompt_ids = request.token_ids
        async with self._engine(weights) as manager:
            outputs, scores = await asyncio.gather(
                asyncio.gather(
                    *(
                        self._complete(manager, request, f"{name}/{number}")
                        for number in range(request.num_samples)
                    )
                ),
                _score(manager, request),
            )
        sequences = [
            SampledSequence(
                output.token_ids,
                output.log_probs or [],
                "length" if output.stop_reason == "length" else "stop",
                _top_of(output) if request.topk_sample_logprobs else None,
            )
            for output in outputs
        ]
        if scores is None:
            return write_samples(sequences)
        logprobs, top = _over_prompt(scores, num_tokens=len(prompt_ids))
        return write_samples(
            sequences,
            prompt_logprobs=logprobs if request.prompt_logprobs else None,
            top_of_prompt=top if request.topk_prompt_logprobs else None,
        )

    async def _complete(
        self, manager: AsyncLLMServerManager, request: SampleRequest, name: str
    ) -> TokenOutput:
        given = request.sampling_params.seed
        number = name.rpartition("/")[2]
        params = request.params(derived_seed(name) if given is None else derived_seed(given, number))
        try:
            return await manager.generate(name, prompt_ids=request.token_ids, sampling_params=params)
        finally:
            manager.end_session(name)

    @asynccontextmanager
    async def _engine(self, weights: Path | None) -> AsyncGenerator[AsyncLLMServerManager]:
        """Lease an engine with these weights. Requests are served in the order of their arrival."""
        turn = object()
        self._queue.append(turn)
        try:
            async with self._changed:
                while self._queue[0] is not turn or (engine := self._claim(weights)) is None:
                    await self._changed.wait()
        finally:
            self._queue.remove(turn)
            await self._notify()
        try:
            async with engine.lock:
                manager = await self._ready(engine, weights)
            yield manager
        finally:
            engine.num_users -= 1
            engine.last_used = next(self._numbers)
            await self._notify()

    def _claim(self, weights: Path | None) -> _Engine | None:
        """Return the engine with these weights, or a new one, or one that nobody uses; None if all are in use."""
        engine = next((each for each in self._engines if each.weights == weights), None)
        if engine is None and len(self._engines) < self._max_engines:
            engine = _Engine()
            self._engines.append(engine)
        if engine is None:
            idle = [each for each in self._engines if not each.num_users]
            engine = min(idle, key=lambda each: each.last_used, default=None)
        if engine is not None:
            engine.weights = weights
            engine.num_users += 1
        return engine

    async def _ready(self, engine: _Engine, weights: Path | None) -> AsyncLLMServerManager:
        """Create the engine's server if it has none, and load the weights if it has others."""
        if engine.manager is None:
            server = await run_in_thread(self._new_server, f"sampler-{self._engines.index(engine)}")
            engine.manager = AsyncLLMServerManager(
                [server], vocab_size=self._base.vocab_size, decode=self._decode
            )
            await engine.manager.pool.start()
        if engine.loaded != weights:
            tensors = await run_in_thread(lambda: list(self._base.adapted_weights(weights)))
            await engine.manager.pool.update_weights(tensors, weight_version=next(self._numbers))
            engine.loaded = weights
        return engine.manager

    def _new_server(self, name: str) -> EmbeddedServer:
        return EmbeddedServer(deepcopy(self._base.model), name=name, config=self._config)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _score(manager: AsyncLLMServerManager, request: SampleRequest) -> TokenScores | None:
    if not request.prompt_logprobs and not request.topk_prompt_logprobs:
        return None
    prompt_ids = request.token_ids
    start = 1 if request.prompt_logprobs_last_n is None else len(prompt_ids) - request.prompt_logprobs_last_n
    return await manager.score(prompt_ids, start=max(1, start), top_logprobs=request.topk_prompt_logprobs)


def _over_prompt(
    scores: TokenScores, *, num_tokens: int
) -> tuple[FloatArray, tuple[IntArray, FloatArray] | None]:
    """Return scores at all tokens of a prompt: NaN, or empty cells, at the first ones, which have none."""
    first = num_tokens - len(scores.logprobs)
    logprobs = np.full(num_tokens, np.nan, np.float32)
    logprobs[first:] = scores.logprobs
    if scores.top_ids is None or scores.top_logprobs is None:
        return logprobs, None
    shape = (num_tokens, scores.top_ids.shape[1])
    ids, top_logprobs = np.zeros(shape, np.int32), np.full(shape, EMPTY_LOGPROB, np.float32)
    ids[first:], top_logprobs[first:] = scores.top_ids, scores.top_logprobs
    return logprobs, (ids, top_logprobs)


def _top_of(output: TokenOutput) -> tuple[IntArray, FloatArray]:
    return output.extras["top_token_ids"], output.extras["top_logprobs"]
