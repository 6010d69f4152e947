"""vLLM's `AsyncLLM` inside this process. Its engine runs in child processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from agent_loop.errors import AgentLoopError, ConfigError, SamplingParamsError, ServerError
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.packages import import_engine, require_version
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores, checked_scores, checked_text, scores_of_no_token
from agent_loop.servers.vllm.core import EngineCore
from agent_loop.servers.vllm.launch import EngineLauncher
from agent_loop.servers.vllm.limits import ModelInfo, VLLMRequest, VLLMRequestLimits, VLLMRequests
from agent_loop.servers.vllm.loading import mixed_weights
from agent_loop.servers.vllm.logprobs import (
    CONSTRAINT_ABILITIES,
    NUM_TOKENS,
    PROBE_HOT_TOP_1,
    PROBE_PLAIN,
    SAMPLING_ABILITIES,
    LogProbs,
    identify_logprobs,
)
from agent_loop.servers.vllm.logs import EngineLog
from agent_loop.servers.vllm.options import PACKAGE, SUPPORTED, engine_options
from agent_loop.servers.vllm.outputs import read_part
from agent_loop.servers.vllm.scores import read_flat_scores, score_sampling
from agent_loop.servers.vllm.stamps import UnstampedChunk, stamp, stamped
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

if TYPE_CHECKING:
    import torch

NOT_STARTED = "the server was not started; await start() first"
CLOSED = "the server was closed; start another server"
PROBE_PROMPT = (1, 2, 3)


class VLLMServer(AsyncServerBase):
    """Server that runs vLLM's `AsyncLLM`. `engine_kwargs` are fields of vLLM's `AsyncEngineArgs`.

    Log-probs are `log_softmax(logits / temperature)` before top-k and top-p, and at temperature 1 for greedy
    completions. vLLM itself has no such mode. A worker extension replaces the last stage of vLLM's sampler, and `start`
    checks that the log-probs are right.

    `update_weights` pauses the engine and empties its caches. Requests in flight keep their tokens. Their context is
    prefilled again under the new weights, which counts as a preemption. vLLM records the weight version of each token.

    `sleep` frees the KV cache and moves the weights to host memory (vLLM's level 1) if `engine_kwargs` has
    `enable_sleep_mode: true` and the engine runs on a GPU. vLLM for CPUs has no sleep mode: the server refuses requests
    while asleep, frees nothing, and does not claim `Ability.SLEEP`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a server. The engine is started by `start`.

        Raises:
            ConfigError: vLLM is missing or has an unsupported version, or an option does not fit.
        """
        require_version(PACKAGE, supported=SUPPORTED)
        self.name = spec.name
        self.abilities = frozenset(
            {
                *SAMPLING_ABILITIES,
                *CONSTRAINT_ABILITIES,
                Ability.SEED,
                Ability.STREAMING,
                Ability.PREFIX_REUSE,
                Ability.WEIGHT_UPDATE,
                Ability.UPDATE_IN_FLIGHT,
                Ability.SCORE,
            }
        )
        self._spec = spec
        self._options = engine_options(spec)
        if self._options.get("skip_tokenizer_init"):
            self.abilities -= {Ability.JSON_SCHEMA}
        self._publisher = WeightPublisher(
            spec.model,
            transfer=spec.weight_transfer,
            is_same_host=True,
            num_receivers=int(self._options.get("tensor_parallel_size", 1))
            * int(self._options.get("pipeline_parallel_size", 1)),
        )
        self._calls = VLLMRequests(spec.name)
        self._score_numbers = count()
        self._control = asyncio.Lock()
        self._weight_version = 0
        self._is_asleep = False
        self._are_weights_awake = True
        self._trouble = NOT_STARTED
        self._mixed_weights = ""
        self._core: EngineCore | None = None
        self._log: EngineLog | None = None
        self._limits: VLLMRequestLimits | None = None
        self._vllm: Any = None

    @classmethod
    def create(cls, spec: ServerSpec) -> VLLMServer:
        """Create a server for `rollout.engine: vllm`."""
        return cls(spec)

    async def start(self) -> None:
        model = await run_in_thread(ModelInfo.read, self._spec.model)
        self._limits = VLLMRequestLimits(
            server=self.name, max_model_len=self._spec.max_model_len, model=model, abilities=self.abilities
        )
        self._log = EngineLog(self.name)
        self._options["max_model_len"] = model.context_for_scores(self._spec.max_model_len)
        launcher = EngineLauncher(self.name, options=self._options, log=self._log, devices=self._spec.devices)
        llm = await launcher.launch(timeout_s=self._spec.start_timeout_s)
        self._core = EngineCore(llm, server=self.name, log=self._log, scheduler=launcher.scheduler)
        self._vllm = import_engine("vllm", package=PACKAGE, supported=SUPPORTED)
        self._trouble = ""
        try:
            await self._prepare(self._core)
        except BaseException:
            await self.close()
            raise

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        core = self._ready_core(request_id)
        sampling = self._request_limits.sampling(
            request_id, prompt_ids=prompt_ids, params=sampling_params, attachments=attachments
        )
        with self._calls.enter(request_id) as call, self._typed_errors(core, request_id):
            last: Any = None
            async for last in self._generate(core, call, prompt_ids, sampling, kind="FINAL_ONLY"):  # noqa: B007
                pass
            part = self._read(call, last, sampling_params)
            return TokenOutput.from_chunks(stamp(part))

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        core = self._ready_core(request_id)
        sampling = self._request_limits.sampling(
            request_id, prompt_ids=prompt_ids, params=sampling_params, attachments=attachments
        )
        with self._calls.enter(request_id) as call, self._typed_errors(core, request_id):
            outputs = self._generate(core, call, prompt_ids, sampling, kind="DELTA")
            parts = self._parts(call, outputs, sampling_params)
            async with aclosing(stamped(parts, current_version=lambda: self._weight_version)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        core = self._ready_core("")
        vocab_size, longest = self._request_limits.model.vocab_size, int(self._options["max_model_len"]) - 1
        text = checked_text(
            token_ids,
            start=start,
            top_logprobs=top_logprobs,
            server=self.name,
            vocab_size=vocab_size,
            max_model_len=longest,
        )
        num_top = min(top_logprobs, vocab_size)
        limit = int(self._options["max_logprobs"])
        sampling = score_sampling(num_top, max_logprobs=limit, server=self.name)
        if start == len(text):
            return scores_of_no_token(num_top)
        request_id = f"score-{next(self._score_numbers)}"
        with self._calls.enter(request_id) as call, self._typed_errors(core, request_id):
            last: Any = None
            async for last in self._generate(core, call, text, sampling, kind="FINAL_ONLY"):  # noqa: B007
                pass
            if self._core is None or last.prompt_logprobs is None:
                raise ServerError("vLLM aborted the request", server=self.name)
            scores = read_flat_scores(
                last.prompt_logprobs, token_ids=text, start=start, num_top=num_top, server=self.name
            )
        return checked_scores(
            scores,
            num_scores=len(text) - start,
            top_logprobs=num_top,
            server=self.name,
            vocab_size=vocab_size,
        )

    async def abort(self, request_id: str) -> None:
        if self._core is not None and self._calls.get(request_id) is not None:
            await self._core.llm.abort(request_id)

    def end_session(self, request_id: str) -> None:
        """Do nothing. vLLM evicts the oldest prefixes when it needs their memory."""

    async def wake_up(self) -> None:
        async with self._control:
            core = self._live_core()
            if self._is_asleep and Ability.SLEEP in self.abilities:
                tags = ["kv_cache"] if self._are_weights_awake else None
                await core.call(core.llm.wake_up(tags))
                self._are_weights_awake = True
            self._is_asleep = False

    async def sleep(self) -> None:
        async with self._control:
            core = self._live_core()
            if self._calls:
                raise ServerError(
                    f"{len(self._calls)} requests are still running; await or abort them before sleep()",
                    server=self.name,
                )
            if not self._is_asleep and Ability.SLEEP in self.abilities:
                await core.call(core.llm.sleep(level=1, mode="abort"))
                self._are_weights_awake = False
            self._is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._control:
            core = self._live_core()
            async with self._publisher.offer(weights, weight_version=weight_version) as handle:
                if not self._are_weights_awake:
                    await core.call(core.llm.wake_up(["weights"]))
                    self._are_weights_awake = True
                # An engine that is asleep on a GPU is paused already, and pausing it needs its cache.
                is_paused = self._is_asleep and Ability.SLEEP in self.abilities
                async with nullcontext() if is_paused else core.paused():
                    await self._load(core, handle.to_json())
                    await core.call(core.llm.update_weight_version(str(weight_version)))
                    self._weight_version = weight_version

    async def health(self) -> ServerHealth:
        detail = self._trouble or self._mixed_weights
        if self._core is not None and self._core.is_dead and not detail:
            detail = str(self._core.died())
        unfinished = 0 if detail or self._core is None else len(self._calls)
        running = 0 if self._core is None else self._core.num_running(unfinished)
        return ServerHealth(
            is_alive=not detail,
            num_running=running,
            num_waiting=unfinished - running,
            weight_version=self._weight_version,
            detail=detail,
            kv_cache_share=None if self._core is None else self._core.kv_cache_share,
        )

    async def close(self) -> None:
        core, self._core, self._trouble = self._core, None, CLOSED
        self._publisher.close()
        if core is not None:
            was_alive = not core.is_dead
            with suppress(Exception):  # if the engine dies at this moment, its requests fail without an abort
                await core.llm.abort([call.request_id for call in self._calls.all])
            await core.stop()
            if was_alive and self._log is not None:
                self._log.remove()

    async def _prepare(self, core: EngineCore) -> None:
        """Switch the workers to exact log-probs, and check the log-probs.

        Raises:
            ConfigError: The log-probs are not exact.
        """
        await core.call(
            core.llm.get_supported_tasks()
        )  # vLLM caches the result, so that requests do not wait for it
        workers = await core.call_workers("agent_loop_hello")
        for result in await core.call_workers("agent_loop_scale_logprobs"):
            if "error" in result:
                raise ConfigError(f"vLLM cannot return exact log-probs: {result['error']}")
        await core.call(core.llm.update_weight_version("0"))
        plain = await self._probe(core, PROBE_PLAIN)
        found = identify_logprobs(plain, await self._probe(core, PROBE_HOT_TOP_1))
        if found not in (LogProbs.SCALED, LogProbs.UNKNOWN):
            raise ConfigError(
                f"vLLM returns {found} log-probs although the worker extension was loaded; report this with the "
                "version of vLLM and rollout.engine_kwargs"
            )
        if self._options.get("enable_sleep_mode") and all(worker["device"] == "cuda" for worker in workers):
            self.abilities |= {Ability.SLEEP}

    async def _probe(self, core: EngineCore, params: SamplingParams) -> dict[int, float]:
        prompt_ids = as_token_ids(PROBE_PROMPT)
        sampling = self._request_limits.sampling(
            "probe", prompt_ids=prompt_ids, params=params, attachments=()
        )
        sampling |= {"logprobs": NUM_TOKENS, "flat_logprobs": False}
        with self._calls.enter("probe") as call, self._typed_errors(core, "probe"):
            last: Any = None
            async for last in self._generate(core, call, prompt_ids, sampling, kind="FINAL_ONLY"):  # noqa: B007
                pass
        return {token: entry.logprob for token, entry in last.outputs[0].logprobs[0].items()}

    def _generate(
        self,
        core: EngineCore,
        call: VLLMRequest,
        prompt_ids: IntArray,
        sampling: Mapping[str, Any],
        *,
        kind: str,
    ) -> AsyncGenerator[Any]:
        """Return vLLM's generator of outputs.

        The generator awaits nothing before the engine's client knows the request, so an abort always finds it.
        """
        options: dict[str, Any] = {"flat_logprobs": True, "detokenize": False, **sampling}
        if "structured_outputs" in options:
            constraint: Any = self._vllm.sampling_params.StructuredOutputsParams
            options["structured_outputs"] = constraint(json=options["structured_outputs"]["json"])
        output_kind = getattr(self._vllm.sampling_params.RequestOutputKind, kind)
        return core.llm.generate(
            {"type": "token", "prompt_token_ids": prompt_ids.tolist()},
            self._vllm.SamplingParams(output_kind=output_kind, **options),
            call.request_id,
        )

    async def _load(self, core: EngineCore, handle: str) -> None:
        results = await core.call_workers("agent_loop_load_weights", handle)
        self._mixed_weights = mixed_weights(results)
        if self._mixed_weights:
            raise ServerError(self._mixed_weights, server=self.name)

    @property
    def _request_limits(self) -> VLLMRequestLimits:
        assert self._limits is not None, "checked by _ready_core"
        return self._limits

    def _live_core(self, request_id: str = "") -> EngineCore:
        if self._core is None:
            raise ServerError(self._trouble, server=self.name, request_id=request_id)
        if self._core.is_dead:
            raise self._core.died(request_id)
        return self._core

    def _ready_core(self, request_id: str) -> EngineCore:
        core = self._live_core(request_id)
        trouble = "the server is asleep; call wake_up first" if self._is_asleep else self._mixed_weights
        if trouble:
            raise ServerError(trouble, server=self.name, request_id=request_id)
        return core

    @contextmanager
    def _typed_errors(self, core: EngineCore, request_id: str) -> Generator[None]:
        try:
            yield
        except (AgentLoopError, GeneratorExit):
            raise
        except Exception as error:
            if self._core is None:
                raise ServerError(CLOSED, server=self.name, request_id=request_id) from error
            if core.is_dead:
                raise core.died(request_id) from error
            if type(error).__name__ == "VLLMValidationError":
                raise SamplingParamsError(f"vLLM refuses the request: {error}") from error
            raise ServerError(
                f"vLLM failed the request ({describe_error(error)})", server=self.name, request_id=request_id
            ) from error

    async def _parts(
        self, call: VLLMRequest, outputs: AsyncGenerator[Any], params: SamplingParams
    ) -> AsyncGenerator[UnstampedChunk]:
        async with aclosing(outputs):
            async for output in outputs:
                yield self._read(call, output, params)

    def _read(self, call: VLLMRequest, output: Any, params: SamplingParams) -> UnstampedChunk:
        if self._core is None:
            raise ServerError(CLOSED, server=self.name, request_id=call.request_id)
        return read_part(
            output, call=call, server=self.name, weight_version=self._weight_version, params=params
        )
