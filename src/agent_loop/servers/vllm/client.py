"""Client of a running vLLM server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agent_loop.errors import BadPrompt, ConfigError, ServerDied, ServerError, ServerTimeout
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.threads import run_in_thread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth, ServerSpec, refuse_unknown_options
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores, checked_scores, checked_text, scores_of_no_token
from agent_loop.servers.vllm.limits import ModelInfo, VLLMRequest, VLLMRequestLimits, VLLMRequests
from agent_loop.servers.vllm.loading import mixed_weights
from agent_loop.servers.vllm.logprobs import CONSTRAINT_ABILITIES, SAMPLING_ABILITIES, LogProbs
from agent_loop.servers.vllm.remote import FOR_WEIGHTS, GENERATE, RemoteServerInfo, inspect_server
from agent_loop.servers.vllm.replies import ReplyReader
from agent_loop.servers.vllm.scores import score_sampling
from agent_loop.servers.vllm.stamps import UnstampedChunk, stamped
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch

ABORT = "/inference/v1/abort_requests"
ENGINE_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to the ids of requests of its generate endpoint."""
ABORT_INTERVAL_S = 0.1
"""An abort that arrives before its request has no effect, so it is repeated until the request has ended."""
GENERATE_TIMEOUT_S = 3600.0
CONTROL_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 10.0
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
KNOWN_OPTIONS = ("served_model_name",)
NOT_STARTED = "the server was not started; await start() first"
CLOSED = "the connection to the server was closed; create another client"


_GAUGE = re.compile(r"^vllm:(kv_cache_usage_perc|num_requests_waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gauges:
    """Load after the engine's last step."""

    kv_cache_share: float | None = None
    """Share of the KV cache that running requests hold, of the fullest engine; None if the page does not have it."""
    num_waiting: int = 0
    """Queued requests of all clients."""

    @classmethod
    def read(cls, page: str) -> Gauges:
        """Read a metrics page in the text format of Prometheus."""
        values: dict[str, list[float]] = {"kv_cache_usage_perc": [], "num_requests_waiting": []}
        for name, value in _GAUGE.findall(page):
            values[name].append(float(value))
        return cls(
            kv_cache_share=max(values["kv_cache_usage_perc"], default=None),
            num_waiting=round(sum(values["num_requests_waiting"])),
        )


class VLLMClient(AsyncServerBase):
    """Client of `vllm serve`. The server must run with `--enable-scale-out`, for token ids in and out.

    The other `abilities` depend on how the server was started:

    - With our worker extension and vLLM's development mode (`VLLM_SERVER_DEV_MODE=1`): exact log-probs for all sampling
      parameters, and weight updates, also of requests in flight.
    - Without them: no weight updates, and log-probs only where vLLM's own are exact, else None. They are exact at
      temperatures 0 and 1 in vLLM's default mode, and without top-k and top-p with
      `--logprobs-mode processed_logprobs`.
    - With `--enable-prompt-tokens-details`: the number of prompt tokens that were cached.

    `engine_kwargs` accepts `served_model_name`, the server's name for the model. The server may have other users:
    `sleep` frees nothing, and `close` does not stop the server.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a client that is not connected.

        Raises:
            ConfigError: There is no URL, or an option is unknown.
        """
        refuse_unknown_options(spec.engine_kwargs, known=KNOWN_OPTIONS)
        if spec.url is None:
            raise ConfigError("rollout.server_urls is empty; give the URL of a vLLM server")
        self.name = spec.name
        self._spec = spec
        self._http = HttpClient(spec.url, server=spec.name, timeout_s=GENERATE_TIMEOUT_S)
        self._read = ReplyReader(spec.name)
        self._calls = VLLMRequests(spec.name)
        self._numbers = count()
        self._control = asyncio.Lock()
        self._weight_version = 0
        self._is_asleep = False
        self._trouble = NOT_STARTED
        self._mixed_weights = ""
        self._info: RemoteServerInfo | None = None
        self._limits: VLLMRequestLimits | None = None
        self._publisher: WeightPublisher | None = None

    @classmethod
    def create(cls, spec: ServerSpec) -> VLLMClient:
        """Create a client for `rollout.engine: vllm` with `rollout.server_urls`."""
        return cls(spec)

    async def start(self) -> None:
        """Connect, and check that the server fits the configuration.

        Raises:
            ConfigError: The server does not fit.
            ServerError: The server cannot be reached.
        """
        spec = self._spec
        try:
            model = await run_in_thread(ModelInfo.read, spec.model)
            info = await run_bounded(
                lambda: inspect_server(self._http, spec=spec), timeout_s=spec.start_timeout_s
            )
        except DeadlineExpired as error:
            await self._http.close()
            raise ServerTimeout(
                f"{self._http.url} {error} to answer; check that the server runs, or raise rollout.start_timeout_s",
                server=self.name,
            ) from None
        except BaseException:
            await self._http.close()
            raise
        self._info, self._weight_version, self._trouble = info, info.weight_version, ""
        self.abilities = _abilities(info)
        self._limits = VLLMRequestLimits(
            server=self.name, max_model_len=spec.max_model_len, model=model, abilities=self.abilities
        )
        if info.takes_weights:
            self._publisher = WeightPublisher(
                spec.model,
                transfer=spec.weight_transfer,
                is_same_host=urlsplit(self._http.url).hostname in LOCAL_HOSTS,
                num_receivers=info.num_workers,
            )

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        with self._call(request_id, prompt_ids, sampling_params, attachments) as (call, body):
            async with self._typed_errors(request_id):
                reply = await self._http.post_json(GENERATE, body, request_id=request_id)
            return self._read.output(
                reply,
                request_id=call.request_id,
                weight_version=self._weight_version,
                has_logprobs=self._are_exact(sampling_params),
                params=sampling_params,
            )

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        with self._call(request_id, prompt_ids, sampling_params, attachments) as (_, body):
            async with self._typed_errors(request_id):
                parts = self._parts(body, request_id, params=sampling_params)
                async with aclosing(stamped(parts, current_version=lambda: self._weight_version)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        if self._limits is None or self._info is None or self._trouble:
            raise ServerError(self._trouble or NOT_STARTED, server=self.name)
        vocab_size, context = self._limits.model.vocab_size, self._info.max_model_len
        text = checked_text(
            token_ids,
            start=start,
            top_logprobs=top_logprobs,
            server=self.name,
            vocab_size=vocab_size,
            max_model_len=None if context is None else context - 1,  # vLLM samples one further token
        )
        num_top = min(top_logprobs, vocab_size)
        if start == len(text):
            return scores_of_no_token(num_top)
        body = {
            "model": self._info.model,
            "token_ids": text.tolist(),
            "sampling_params": score_sampling(num_top, max_logprobs=-1, server=self.name),
        }
        async with self._typed_errors(""):
            try:
                reply = await self._http.post_json(GENERATE, body)
            except HttpStatusError as error:
                if error.status == 400 and "prompt logprobs" in str(error):
                    raise BadPrompt(
                        f"{error}; start it with --max-logprobs {num_top}", server=self.name
                    ) from error
                raise
        scores = self._read.scores(reply, token_ids=text, start=start, num_top=num_top)
        return checked_scores(
            scores,
            num_scores=len(text) - start,
            top_logprobs=num_top,
            server=self.name,
            vocab_size=vocab_size,
        )

    async def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        while call is not None and not call.is_over:
            await self._http.post_json(ABORT, {"request_ids": [ENGINE_PREFIX + call.engine_request_id]})
            await asyncio.sleep(ABORT_INTERVAL_S)

    def end_session(self, request_id: str) -> None:
        """Do nothing. vLLM evicts the oldest prefixes when it needs their memory."""

    async def wake_up(self) -> None:
        self._is_asleep = False

    async def sleep(self) -> None:
        """Refuse requests until `wake_up`. Frees no memory, because the server may have other users."""
        if self._calls:
            raise ServerError(
                f"{len(self._calls)} requests are still running; await or abort them before sleep()",
                server=self.name,
            )
        self._is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        if self._publisher is None:
            raise ServerError(
                f"{self._http.url} accepts no weights; start it with {FOR_WEIGHTS}", server=self.name
            )
        publisher = self._publisher
        async with (
            self._control,
            publisher.offer(weights, weight_version=weight_version) as handle,
            self._paused(),
        ):
            await self._load(handle.to_json())
            await self._control_call("/update_weight_version", {"new_version": str(weight_version)})
            self._weight_version = weight_version

    async def health(self) -> ServerHealth:
        detail = self._trouble or self._mixed_weights
        gauges = Gauges()
        if not detail:
            try:
                await self._http.get_json("/health", timeout_s=HEALTH_TIMEOUT_S)
                gauges = await self._gauges()
            except ServerError as error:
                detail = str(error)
        num_calls = 0 if detail else len(self._calls)
        num_waiting = min(gauges.num_waiting, num_calls)
        return ServerHealth(
            is_alive=not detail,
            num_running=num_calls - num_waiting,
            num_waiting=num_waiting,
            weight_version=self._weight_version,
            detail=detail,
            kv_cache_share=gauges.kv_cache_share,
        )

    async def _gauges(self) -> Gauges:
        try:
            return Gauges.read(await self._http.get_text("/metrics", timeout_s=HEALTH_TIMEOUT_S))
        except HttpStatusError:  # a server without a metrics page
            return Gauges()

    async def close(self) -> None:
        """Close the connections, which aborts the requests in flight. The server continues to run."""
        self._trouble = CLOSED
        if self._publisher is not None:
            self._publisher.close()
        await self._http.close()

    @contextmanager
    def _call(
        self,
        request_id: str,
        prompt_ids: IntArray,
        params: SamplingParams,
        attachments: Sequence[Attachment],
    ) -> Generator[tuple[VLLMRequest, dict[str, Any]]]:
        """Register a request while the body runs. Yield the request and its JSON."""
        trouble = self._trouble or self._mixed_weights
        if not trouble and self._is_asleep:
            trouble = "the server is asleep; call wake_up first"
        if trouble or self._limits is None or self._info is None:
            raise ServerError(trouble or NOT_STARTED, server=self.name, request_id=request_id)
        sampling = self._limits.sampling(
            request_id, prompt_ids=prompt_ids, params=params, attachments=attachments
        )
        with self._calls.enter(request_id) as call:
            call.engine_request_id = f"{request_id}-{self.name}-{next(self._numbers)}"
            yield (
                call,
                {
                    "request_id": call.engine_request_id,
                    "model": self._info.model,
                    "token_ids": prompt_ids.tolist(),
                    "sampling_params": {"detokenize": False, **sampling},
                },
            )

    async def _parts(
        self, body: dict[str, Any], request_id: str, *, params: SamplingParams
    ) -> AsyncGenerator[UnstampedChunk]:
        events = self._http.stream_events(GENERATE, {**body, "stream": True}, request_id=request_id)
        async with aclosing(events):
            async for event in events:
                yield self._read.part(
                    event,
                    request_id=request_id,
                    weight_version=self._weight_version,
                    has_logprobs=self._are_exact(params),
                    params=params,
                )

    def _are_exact(self, params: SamplingParams) -> bool:
        return self._info is not None and self._info.logprobs.are_exact(params)

    @asynccontextmanager
    async def _typed_errors(self, request_id: str) -> AsyncGenerator[None]:
        """Raise `ServerDied` for HTTP errors of a server whose engine died: it still responds for a moment."""
        try:
            yield
        except (HttpStatusError, ServerDied) as error:
            if self._trouble:
                raise ServerError(self._trouble, server=self.name, request_id=request_id) from error
            if isinstance(error, ServerDied) or error.status < 500:
                raise
            try:
                await self._http.get_json("/health", timeout_s=HEALTH_TIMEOUT_S)
            except ServerError as why:
                raise ServerDied(
                    f"{self._http.url} is not healthy any more ({why}); see its log, and start another server",
                    server=self.name,
                    request_id=request_id,
                ) from error
            raise

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the engine while the body runs. Requests in flight are kept, and all caches are emptied."""
        await self._control_call("/pause?mode=keep&clear_cache=true", {})
        try:
            yield
        finally:
            await run_shielded(lambda: self._control_call("/resume", {}), timeout_s=CONTROL_TIMEOUT_S)

    async def _load(self, handle: str) -> None:
        reply = await self._control_call(
            "/collective_rpc", {"method": "agent_loop_load_weights", "args": [handle]}
        )
        self._mixed_weights = mixed_weights(reply["results"])
        if self._mixed_weights:
            raise ServerError(self._mixed_weights, server=self.name)

    async def _control_call(self, path: str, body: dict[str, Any]) -> Any:
        return await self._http.post_json(path, body, timeout_s=CONTROL_TIMEOUT_S)


def _abilities(info: RemoteServerInfo) -> frozenset[Ability]:
    found = {Ability.SEED, Ability.STREAMING, Ability.SCORE, *CONSTRAINT_ABILITIES}
    if info.logprobs in (LogProbs.SCALED, LogProbs.PROCESSED):
        found |= SAMPLING_ABILITIES
    if info.reports_cached_tokens:
        found.add(Ability.PREFIX_REUSE)
    if info.takes_weights:
        found |= {Ability.WEIGHT_UPDATE, Ability.UPDATE_IN_FLIGHT}
    return frozenset(found)
