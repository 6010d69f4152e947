"""Client of a running vLLM server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from agent_loop.errors import (
    BadPrompt,
    ConfigError,
    SamplingParamsError,
    ServerDied,
    ServerError,
    ServerTimeout,
    WeightsError,
)
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.threads import run_in_thread
from agent_loop.runtime.user_code import run_bounded
from agent_loop.servers.base import Ability, AsyncServerBase, ServerHealth, ServerSpec, refuse_unknown_options
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores, checked_text, read_prompt_logprobs, scores_of_no_token
from agent_loop.servers.vllm.limits import ModelInfo, VLLMRequestLimits
from agent_loop.servers.vllm.logprobs import CONSTRAINT_ABILITIES, SAMPLING_ABILITIES, LogProbs
from agent_loop.servers.vllm.remote import (
    FOR_WEIGHTS,
    GENERATE,
    RemoteServerInfo,
    inspect_server,
    set_weight_version,
)
from agent_loop.servers.vllm.replies import read_stream, reading
from agent_loop.servers.weight_versions import stamped
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk

if TYPE_CHECKING:
    import torch

ABORT = "/inference/v1/abort_requests"
ENGINE_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to the ids of requests of its generate endpoint."""
ABORT_INTERVAL_S = 0.1
"""An abort that arrives before its request has no effect, so it is repeated until the engine knows the request."""
GENERATE_TIMEOUT_S = 3600.0
CONTROL_TIMEOUT_S = 600.0
HEALTH_TIMEOUT_S = 10.0
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
KNOWN_OPTIONS = ("served_model_name",)
NOT_STARTED = "the server was not started; await start() first"
CLOSED = "the connection to the server was closed; create another server"
GAUGE = re.compile(r"^vllm:(kv_cache_usage_perc|num_requests_waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


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
        for name, value in GAUGE.findall(page):
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
        """Create a client that is not connected."""
        refuse_unknown_options(spec.engine_kwargs, known=KNOWN_OPTIONS)
        if spec.url is None:
            raise ConfigError("rollout.server_urls is empty; give the URL of a vLLM server")
        self._set_up(spec, HttpClient(spec.url, server=spec.name, timeout_s=GENERATE_TIMEOUT_S))

    def _set_up(self, spec: ServerSpec, http: HttpClient) -> None:
        self.name = spec.name
        self._spec = spec
        self._http = http
        self._engine_ids: dict[str, str] = {}
        """Ids of the requests in flight in the engine, by session."""
        self._known_to_engine: set[str] = set()
        """Ids of the requests in flight that have sampled a token."""
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
    def create(cls, spec: ServerSpec) -> Self:
        """Create a client for `rollout.engine: vllm` with `rollout.server_urls`."""
        return cls(spec)

    async def start(self) -> None:
        """Connect, and check that the server fits the configuration."""
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
        is_same_host = urlsplit(self._http.url).hostname in LOCAL_HOSTS
        self._set_info(info, model, is_same_host=is_same_host)

    def _set_info(self, info: RemoteServerInfo, model: ModelInfo, *, is_same_host: bool) -> None:
        spec = self._spec
        self._info, self._weight_version, self._trouble = info, info.weight_version, ""
        self.abilities = _abilities(info)
        self._limits = VLLMRequestLimits(
            server=self.name, max_model_len=spec.max_model_len, model=model, abilities=self.abilities
        )
        if info.workers:
            self._publisher = WeightPublisher(
                spec.model,
                transfer=spec.weight_transfer,
                is_same_host=is_same_host,
                num_receivers=len(info.workers),
            )

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        info, limits = self._usable(request_id)
        if request_id in self._engine_ids:
            raise ServerError(
                "a request of this session is already running; await or abort it first",
                server=self.name,
                request_id=request_id,
            )
        sampling = limits.sampling(
            request_id, prompt_ids=prompt_ids, params=sampling_params, attachments=attachments
        )
        engine_id = self._engine_ids[request_id] = f"{request_id}-{self.name}-{next(self._numbers)}"
        body: dict[str, Any] = {
            "request_id": engine_id,
            "model": info.model,
            "token_ids": prompt_ids.tolist(),
            "sampling_params": {"detokenize": False, **sampling},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._typed_errors(request_id):
                replies = read_stream(
                    self._http.stream_events(GENERATE, body, request_id=request_id),
                    params=sampling_params,
                    has_logprobs=info.logprobs.are_exact(sampling_params),
                    server=self.name,
                    request_id=request_id,
                )
                async with aclosing(stamped(replies, current_version=lambda: self._weight_version)) as chunks:
                    async for chunk in chunks:
                        self._known_to_engine.add(engine_id)
                        yield chunk
        finally:
            del self._engine_ids[request_id]
            self._known_to_engine.discard(engine_id)

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        info, limits = self._usable("")
        vocab_size, context = limits.model.vocab_size, info.max_model_len
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
            "model": info.model,
            "token_ids": text.tolist(),
            "sampling_params": {
                "prompt_logprobs": num_top,
                "max_tokens": 1,
                "temperature": 0.0,
                "ignore_eos": True,
                "detokenize": False,
            },
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
        with reading(reply, server=self.name):
            return read_prompt_logprobs(
                reply["prompt_logprobs"], token_ids=text, start=start, top_logprobs=num_top
            )

    async def abort(self, request_id: str) -> None:
        engine_id = self._engine_ids.get(request_id)
        while engine_id is not None and self._engine_ids.get(request_id) == engine_id:
            is_known = engine_id in self._known_to_engine
            await self._http.post_json(ABORT, {"request_ids": [ENGINE_PREFIX + engine_id]})
            if is_known:
                return
            await asyncio.sleep(ABORT_INTERVAL_S)

    async def wake_up(self) -> None:
        self._is_asleep = False

    async def sleep(self) -> None:
        """Refuse requests until `wake_up`. Frees no memory, because the server may have other users."""
        if self._engine_ids:
            raise ServerError(
                f"{len(self._engine_ids)} requests are still running; await or abort them before sleep()",
                server=self.name,
            )
        self._is_asleep = True

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        if self._trouble:
            raise ServerError(self._trouble, server=self.name)
        if self._publisher is None:
            raise ServerError(
                f"{self._http.url} accepts no weights; start it with {FOR_WEIGHTS}", server=self.name
            )
        async with (
            self._control,
            self._publisher.offer(weights, weight_version=weight_version) as handle,
            self._typed_errors(""),
            self._paused(),
        ):
            reply = await self._control_call(
                "/collective_rpc", {"method": "agent_loop_load_weights", "args": [handle.to_json()]}
            )
            self._mixed_weights = mixed_weights(reply["results"])
            if self._mixed_weights:
                raise ServerError(self._mixed_weights, server=self.name)
            await set_weight_version(self._http, weight_version)
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
        num_calls = 0 if detail else len(self._engine_ids)
        num_waiting = min(gauges.num_waiting, num_calls)
        return ServerHealth(
            is_alive=not detail,
            num_running=num_calls - num_waiting,
            num_waiting=num_waiting,
            weight_version=self._weight_version,
            detail=detail,
            kv_cache_share=gauges.kv_cache_share,
        )

    async def close(self) -> None:
        """Close the connections, which aborts the requests in flight. The server continues to run."""
        self._trouble = CLOSED
        if self._publisher is not None:
            self._publisher.close()
        await self._http.close()

    async def _gauges(self) -> Gauges:
        try:
            return Gauges.read(await self._http.get_text("/metrics", timeout_s=HEALTH_TIMEOUT_S))
        except HttpStatusError:  # a server without a metrics page
            return Gauges()

    def _usable(self, request_id: str) -> tuple[RemoteServerInfo, VLLMRequestLimits]:
        """Return what requests depend on, if the server can take one."""
        trouble = self._trouble or self._mixed_weights
        if not trouble and self._is_asleep:
            trouble = "the server is asleep; call wake_up first"
        if trouble or self._limits is None or self._info is None:
            raise ServerError(trouble or NOT_STARTED, server=self.name, request_id=request_id)
        return self._info, self._limits

    @asynccontextmanager
    async def _typed_errors(self, request_id: str) -> AsyncGenerator[None]:
        """Name the cause of HTTP errors. A server whose engine died still responds for a moment."""
        try:
            yield
        except (HttpStatusError, ServerDied) as error:
            if self._trouble:
                raise ServerError(self._trouble, server=self.name, request_id=request_id) from error
            if isinstance(error, ServerDied):
                raise
            try:
                await self._http.get_json("/health", timeout_s=HEALTH_TIMEOUT_S)
            except ServerError as why:
                raise ServerDied(
                    f"{self._http.url} is not healthy any more ({why}); see its log, and start another server",
                    server=self.name,
                    request_id=request_id,
                ) from error
            if error.status == 400 and request_id:
                raise SamplingParamsError(f"vLLM refuses the request: {error}") from error
            raise

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the engine while the body runs. Requests in flight are kept, and all caches are emptied."""
        await self._control_call("/pause?mode=keep&clear_cache=true", {})
        try:
            yield
        finally:
            await run_shielded(lambda: self._control_call("/resume", {}), timeout_s=CONTROL_TIMEOUT_S)

    async def _control_call(self, path: str, body: dict[str, Any]) -> Any:
        return await self._http.post_json(path, body, timeout_s=CONTROL_TIMEOUT_S)


def mixed_weights(results: Sequence[Mapping[str, Any]]) -> str:
    """Return why the engine has a mix of old and new weights; empty if every worker has the new weights."""
    errors = [result for result in results if "error" in result]
    if not errors:
        return ""
    if len(errors) == len(results) and all(error["is_unchanged"] for error in errors):
        raise WeightsError(errors[0]["error"])
    return (
        f"loading new weights failed half-way ({errors[0]['error']}), so the engine has a mix of old and new "
        "weights; publish again, or start another server"
    )


def _abilities(info: RemoteServerInfo) -> frozenset[Ability]:
    found = {Ability.SEED, Ability.STREAMING, Ability.SCORE, *CONSTRAINT_ABILITIES}
    if info.logprobs in (LogProbs.SCALED, LogProbs.PROCESSED):
        found |= SAMPLING_ABILITIES
    if info.reports_cached_tokens:
        found.add(Ability.PREFIX_REUSE)
    if info.workers:
        found |= {Ability.WEIGHT_UPDATE, Ability.UPDATE_IN_FLIGHT}
    return frozenset(found)
