"""`AsyncServerBase` for the embedded engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from os import PathLike
from typing import Any

import torch

from agent_loop.config import parse_options
from agent_loop.errors import BadPrompt, ConfigError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import (
    Ability,
    AsyncServerBase,
    ServerHealth,
    ServerSpec,
    refuse_params_of_request,
    refuse_unknown_options,
)
from agent_loop.servers.embedded.config import CONTEXT, EmbeddedConfig
from agent_loop.servers.embedded.engine import EmbeddedEngine, EngineStats
from agent_loop.servers.embedded.grammar import GrammarCompiler
from agent_loop.servers.embedded.model_types import proved_cache, unseen_window
from agent_loop.servers.embedded.per_request_backend import PerRequestBackend
from agent_loop.servers.embedded.request import EngineLimits, ScoreRequest, build_request
from agent_loop.servers.embedded.runner import ModelRunner, text_config_of
from agent_loop.servers.embedded.sampling import SAMPLING_ABILITIES
from agent_loop.servers.embedded.shared_cache_backend import CacheKind, SharedCacheBackend
from agent_loop.servers.embedded.thread import EngineThread
from agent_loop.servers.embedded.vision import auto_model_class
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.scores import TokenScores, checked_text, scores_of_no_token
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk

NO_CONFIG = EmbeddedConfig()
logger = logging.getLogger(__name__)
ABILITIES = frozenset(
    {
        *SAMPLING_ABILITIES,
        Ability.PENALTIES,
        Ability.STREAMING,
        Ability.PREFIX_REUSE,
        Ability.WEIGHT_UPDATE,
        Ability.UPDATE_IN_FLIGHT,
        Ability.SLEEP,
        Ability.ATTACHMENTS,
        Ability.SCORE,
    }
)


class EmbeddedServer(AsyncServerBase):
    """Runs a `transformers` causal model in a thread of this process.

    The server takes ownership of the model: it moves the model to the device, replaces its attention, and overwrites
    its weights in `update_weights`. Give a copy if other code needs the model. `close` restores the attention.

    Log-probs are `log_softmax(logits / temperature)` before top-k and top-p; greedy completions have the log-probs of
    temperature 1. Requests are never preempted.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str = "embedded-0",
        config: EmbeddedConfig = NO_CONFIG,
        eos_token_ids: Iterable[int] | None = None,
        tokenizer_path: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Choose a backend for the model and start the engine's thread.

        Args:
            model: A `transformers.PreTrainedModel` with a language-model head.
            name: Name of the server in errors and logs.
            config: Settings of the engine.
            eos_token_ids: Tokens that end a completion; by default those of the model's generation config.
            tokenizer_path: Folder or hub name of the tokenizer, for `json_schema`; None does not offer `json_schema`.
            trust_remote_code: Whether the tokenizer may run its own code.
        """
        self.name = name
        self.abilities = ABILITIES
        self.max_concurrent = config.max_slots
        runner = ModelRunner(model, config=config)
        try:
            self._limits = EngineLimits(
                prompt=PromptLimits(name, config.max_model_len, runner.vocab_size),
                image_token_id=runner.image_token_id,
                counts_in_3d=runner.counts_in_3d,
                eos_token_ids=_eos_token_ids(model) if eos_token_ids is None else frozenset(eos_token_ids),
            )
            backend = _choose_backend(runner, config=config, server=name)
        except ConfigError:
            runner.restore_attention()
            raise
        self.cache_kind: CacheKind = backend.kind
        """Kind of the chosen backend: see `EmbeddedConfig.cache`."""
        if backend.kind != "shared":
            self._limits = replace(self._limits, image_token_id=None)
            self.abilities -= {Ability.ATTACHMENTS}
        if not backend.resumes_turns:
            self.abilities -= {Ability.PREFIX_REUSE}
        self._compiler: GrammarCompiler | None = None
        if tokenizer_path is not None and GrammarCompiler.is_available(tokenizer_path):
            self._compiler = GrammarCompiler(
                tokenizer_path,
                vocab_size=runner.vocab_size,
                eos_token_ids=self._limits.eos_token_ids,
                trust_remote_code=trust_remote_code,
            )
            self.abilities |= {Ability.JSON_SCHEMA}
        self._engine = EmbeddedEngine(runner, backend, config=config, server=name)
        self._thread = EngineThread(self._engine, name=name, num_threads=config.num_threads)
        # Also called at the interpreter's exit, which would otherwise kill the thread during a forward.
        self._stop = weakref.finalize(self, self._thread.stop)

    @classmethod
    def create(cls, spec: ServerSpec) -> EmbeddedServer:
        """Create the server for `rollout.engine: embedded`. `engine_kwargs` are fields of `EmbeddedConfig`."""
        return cls.from_pretrained(
            spec.model.path,
            name=spec.name,
            config=embedded_config(spec),
            tokenizer_path=spec.model.tokenizer_path,
            trust_remote_code=spec.model.trust_remote_code,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        *,
        name: str = "embedded-0",
        config: EmbeddedConfig = NO_CONFIG,
        eos_token_ids: Iterable[int] | None = None,
        tokenizer_path: str | None = None,
        trust_remote_code: bool = False,
    ) -> EmbeddedServer:
        """Load a model from a directory, or by its name on the hub, and create its server.

        The tokenizer is at `path` too, unless `tokenizer_path` is given.
        """
        try:
            loader = auto_model_class(path, trust_remote_code=trust_remote_code)
            model = loader.from_pretrained(path, dtype=config.dtype, trust_remote_code=trust_remote_code)
        except OSError as error:
            raise ConfigError(
                f"no model can be loaded from {str(path)!r} ({error}); give a directory that `save_pretrained` wrote"
            ) from error
        return cls(
            model,
            name=name,
            config=config,
            eos_token_ids=eos_token_ids,
            tokenizer_path=tokenizer_path or str(path),
            trust_remote_code=trust_remote_code,
        )

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine since its start."""
        return replace(self._engine.stats)

    @property
    def cache_bytes(self) -> int:
        """Memory of the KV cache in bytes; 0 while asleep."""
        return self._engine.backend.num_bytes

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        refuse_params_of_request(sampling_params, abilities=self.abilities, server=self.name)
        request = build_request(
            request_id,
            prompt_ids=prompt_ids,
            params=sampling_params,
            limits=self._limits,
            attachments=attachments,
        )
        if sampling_params.json_schema and self._compiler is not None:
            request.grammar = await run_in_thread(
                self._compiler.grammar,
                sampling_params.json_schema,
                stop_token_ids=request.stop_token_ids,
                sampled=request.sampled_before,
            )
        async with aclosing(self._thread.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        limits = self._limits.prompt
        text = checked_text(
            token_ids,
            start=start,
            top_logprobs=top_logprobs,
            server=self.name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
        )
        if self._limits.image_token_id is not None and (text == self._limits.image_token_id).any():
            raise BadPrompt(
                "the text to score has placeholders of images, which score does not take; score texts without images",
                server=self.name,
            )
        num_top = min(top_logprobs, limits.vocab_size)
        if start == len(text):
            return scores_of_no_token(num_top)
        return await self._thread.score(ScoreRequest(text, start=start, num_top=num_top))

    async def abort(self, request_id: str) -> None:
        if self._thread.end_reason is None:
            await self._thread.call(lambda engine: engine.abort_session(request_id))

    def end_session(self, request_id: str) -> None:
        self._thread.notify(lambda engine: engine.end_session(request_id))

    async def wake_up(self) -> None:
        await self._thread.call(lambda engine: engine.wake_up())

    async def sleep(self) -> None:
        await self._thread.call(lambda engine: engine.sleep())

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        collected = dict(weights)
        await self._thread.call(
            lambda engine: engine.update_weights(collected, weight_version=weight_version)
        )

    async def health(self) -> ServerHealth:
        reason = self._thread.end_reason
        return ServerHealth(
            is_alive=reason is None,
            num_running=self._engine.num_running,
            num_waiting=self._engine.num_waiting,
            weight_version=self._engine.weight_version,
            detail=reason or "",
            kv_cache_share=self._engine.kv_cache_share,
        )

    async def close(self) -> None:
        await run_in_thread(self._stop)


def embedded_config(spec: ServerSpec) -> EmbeddedConfig:
    """Return the engine's settings for a server specification."""
    if spec.deterministic and spec.engine_kwargs.get("deterministic", True) is not True:
        raise ConfigError(
            f"rollout.engine_kwargs.deterministic is {spec.engine_kwargs['deterministic']!r}, but "
            "rollout.deterministic is true; remove one of the two"
        )
    options: dict[str, Any] = {
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "device": spec.model.device,
        "dtype": spec.model.dtype,
        "deterministic": spec.deterministic,
        **spec.engine_kwargs,
    }
    refuse_unknown_options(options, known=[field.name for field in fields(EmbeddedConfig)])
    return parse_options(EmbeddedConfig, options, where="rollout.engine_kwargs")


def _choose_backend(
    runner: ModelRunner, *, config: EmbeddedConfig, server: str
) -> SharedCacheBackend | PerRequestBackend:
    """Return the fastest backend that the table of model types has for a model, or the one of `config.cache`."""
    model, kind = runner.model, config.cache
    proved = proved_cache(model)
    reason = (
        "" if proved == "shared" else f"the type {model.config.model_type} is not proved for a shared cache"
    )
    if kind == "shared" or (kind == "auto" and proved == "shared" and not config.deterministic):
        window = unseen_window(model, length=config.max_model_len)
        try:
            if window is not None:
                raise ConfigError(
                    f"its sliding window of {window} tokens is shorter than {CONTEXT} of {config.max_model_len} tokens"
                )
            return SharedCacheBackend(runner, config=config)
        except ConfigError as error:
            if kind == "shared":
                raise ConfigError(
                    f"{type(model).__name__} is not supported by rollout.engine_kwargs.cache=shared ({error}); leave "
                    "it out, or use another server"
                ) from error
            reason = str(error)
    if kind == "auto":
        kind = "none" if proved == "none" else "per_request"
        if reason and not config.deterministic:
            logger.warning(
                "server %s: %s runs one request at a time with %s, which is slower with many requests (%s)",
                server,
                type(model).__name__,
                "no cache" if kind == "none" else "a cache per request",
                reason,
            )
    resumes_turns = kind == "per_request" and proved in ("shared", "turns") and not config.deterministic
    return PerRequestBackend(runner, config=config, kind=kind, resumes_turns=resumes_turns)


def _eos_token_ids(model: Any) -> frozenset[int]:
    for holder in (getattr(model, "generation_config", None), model.config, text_config_of(model.config)):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
