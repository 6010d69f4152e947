"""Client of vLLM's HTTP API, and of a running vLLM server."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from agent_loop.errors import (
    BadPrompt,
    BadServerReply,
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
from agent_loop.servers.base import Ability, ServerSpec, refuse_unknown_options
from agent_loop.servers.engine_client import (
    CONTROL_TIMEOUT_S,
    HEALTH_TIMEOUT_S,
    EngineClient,
    EngineLoad,
    RunningRequest,
    as_version,
    stamped,
)
from agent_loop.servers.http import HttpClient, HttpStatusError, reading
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores, checked_text, read_prompt_logprobs, scores_of_no_token
from agent_loop.servers.vllm.limits import ModelInfo, VLLMRequestLimits
from agent_loop.servers.vllm.logprobs import (
    CONSTRAINT_ABILITIES,
    NUM_TOKENS,
    SAMPLING_ABILITIES,
    LogProbs,
    identify_logprobs,
)
from agent_loop.servers.vllm.logprobs import num_logprobs as num_logprobs_of
from agent_loop.servers.vllm.options import SUPPORTED, WORKER_EXTENSION
from agent_loop.servers.vllm.replies import cached_tokens, read_stream, top_tokens
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk

if TYPE_CHECKING:
    from agent_loop.weights.handle import WeightHandle

KNOWN_OPTIONS = ("served_model_name",)
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
PROBE_PROMPT = [1, 2, 3]
GENERATE = "/inference/v1/generate"
ENGINE_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to the ids of requests of its generate endpoint."""
GENERATE_TIMEOUT_S = 3600.0
PROBE_TIMEOUT_S = 60.0
GAUGE = re.compile(r"^vllm:(kv_cache_usage_perc|num_requests_waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Capabilities of a running vLLM."""

    model: str
    """The server's name for the model."""
    logprobs: LogProbs
    reports_cached_tokens: bool
    workers: Sequence[Mapping[str, Any]]
    """Descriptions of the workers, if the server has our worker extension and vLLM's development mode, which is needed
    to call it. Weights can be published then."""
    weight_version: int = 0
    max_model_len: int | None = None
    """Context length; None if the server does not report it."""

    @property
    def abilities(self) -> frozenset[Ability]:
        found = {Ability.SEED, Ability.STREAMING, Ability.SCORE, *CONSTRAINT_ABILITIES}
        if self.logprobs in (LogProbs.SCALED, LogProbs.PROCESSED):
            found |= SAMPLING_ABILITIES
        if self.reports_cached_tokens:
            found.add(Ability.PREFIX_REUSE)
        if self.workers:
            found |= {Ability.WEIGHT_UPDATE, Ability.UPDATE_IN_FLIGHT}
        return frozenset(found)


class VLLMEngine(EngineClient):
    """Base of `VLLMClient` and `VLLMServer`."""

    _how_to_update = (
        f"start it with VLLM_SERVER_DEV_MODE=1 in its environment and --worker-extension-cls "
        f"{WORKER_EXTENSION}"
    )
    _spec: ServerSpec
    _info: EngineInfo
    _limits: VLLMRequestLimits

    def _set_info(self, info: EngineInfo, model: ModelInfo, *, is_same_host: bool) -> None:
        """Prepare for requests and weights. Called by `start`."""
        spec = self._spec
        self._info, self._weight_version, self.abilities = info, info.weight_version, info.abilities
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
        self._refuse_if_unusable(request_id)
        sampling = self._limits.sampling(
            request_id, prompt_ids=prompt_ids, params=sampling_params, attachments=attachments
        )
        with self._running_as(request_id, f"{request_id}-{self.name}-{next(self._numbers)}") as running:
            body: dict[str, Any] = {
                "request_id": running.id,
                "model": self._info.model,
                "token_ids": prompt_ids.tolist(),
                "sampling_params": {"detokenize": False, **sampling},
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            running.is_sent = True
            async with self._typed_errors(request_id):
                replies = read_stream(
                    self._http.stream_events(GENERATE, body, request_id=request_id),
                    params=sampling_params,
                    has_logprobs=self._info.logprobs.are_exact(sampling_params),
                    server=self.name,
                    request_id=request_id,
                )
                async with aclosing(stamped(replies, current_version=lambda: self._weight_version)) as chunks:
                    async for chunk in chunks:
                        running.is_known = True
                        yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        self._refuse_if_unusable()
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

    async def _send_abort(self, running: RunningRequest) -> None:
        await self._http.post_json(
            "/inference/v1/abort_requests", {"request_ids": [ENGINE_PREFIX + running.id]}
        )

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        await self._post("/pause?mode=keep&clear_cache=true", {})
        try:
            yield
        finally:
            await run_shielded(lambda: self._post("/resume", {}), timeout_s=CONTROL_TIMEOUT_S)

    async def _load(self, handle: WeightHandle) -> None:
        call = {"method": "agent_loop_load_weights", "args": [handle.to_json()]}
        results: Sequence[Mapping[str, Any]] = (await self._post("/collective_rpc", call))["results"]
        errors = [result for result in results if "error" in result]
        if errors and len(errors) == len(results) and all(error["is_unchanged"] for error in errors):
            raise WeightsError(errors[0]["error"])
        if errors:
            self._mixed_weights = (
                f"loading new weights failed half-way ({errors[0]['error']}), so the engine has a mix of old and new "
                "weights; publish again, or start another server"
            )
            raise ServerError(self._mixed_weights, server=self.name)
        self._mixed_weights = ""
        await self._set_weight_version(handle.weight_version)

    async def _report_load(self) -> EngineLoad:
        await self._http.get_json("/health", timeout_s=HEALTH_TIMEOUT_S)
        try:
            return read_load(await self._http.get_text("/metrics", timeout_s=HEALTH_TIMEOUT_S))
        except HttpStatusError:  # a server without a metrics page
            return EngineLoad()

    async def _cause_of(self, error: ServerError, request_id: str) -> Exception:
        """Return the cause of an HTTP error. A server whose engine died still responds for a moment."""
        if not isinstance(error, HttpStatusError):
            return error
        try:
            await self._http.get_json("/health", timeout_s=HEALTH_TIMEOUT_S)
        except ServerError as why:
            return ServerDied(
                f"{self._http.url} is not healthy any more ({why}); see its log, and start another server",
                server=self.name,
                request_id=request_id,
            )
        if error.status == 400 and request_id:
            return SamplingParamsError(f"vLLM refuses the request: {error}")
        return error

    async def _prepare_workers(self) -> list[dict[str, Any]]:
        """Switch workers with our extension to exact log-probs, and return their descriptions."""
        for result in await self._call_workers("agent_loop_scale_logprobs"):
            if "error" in result:
                raise ConfigError(f"vLLM cannot return exact log-probs: {result['error']}")
        return await self._call_workers("agent_loop_hello")

    async def _call_workers(self, method: str) -> list[dict[str, Any]]:
        reply = await self._http.post_json("/collective_rpc", {"method": method}, timeout_s=PROBE_TIMEOUT_S)
        with reading(reply, server=self.name):
            return [dict[str, Any](result) for result in reply["results"]]

    async def _set_weight_version(self, version: int) -> None:
        """Set the weight version that the engine records for each token that it samples from now on."""
        body = {"new_version": str(version)}
        await self._http.post_json("/update_weight_version", body, timeout_s=PROBE_TIMEOUT_S)


class VLLMClient(VLLMEngine):
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
        self._spec = spec
        super().__init__(spec.name, HttpClient(spec.url, server=spec.name, timeout_s=GENERATE_TIMEOUT_S))

    async def start(self) -> None:
        """Connect, and check that the server fits the configuration."""
        spec = self._spec
        try:
            model = await run_in_thread(ModelInfo.read, spec.model)
            info = await run_bounded(self._inspect, timeout_s=spec.start_timeout_s)
        except DeadlineExpired as error:
            await self._http.close()
            raise ServerTimeout(
                f"{self._http.url} {error} to answer; check that the server runs, or raise rollout.start_timeout_s",
                server=self.name,
            ) from None
        except BaseException:
            await self._http.close()
            raise
        self._set_info(info, model, is_same_host=urlsplit(self._http.url).hostname in LOCAL_HOSTS)
        self._trouble = ""

    async def _inspect(self) -> EngineInfo:
        """Find out what a server offers. If the server has our worker extension, switch it to exact log-probs."""
        await self._check_version()
        model, max_model_len = await self._find_model()
        workers: list[dict[str, Any]] = []
        version = 0
        if await self._has_extension():
            workers = await self._prepare_workers()
            info = await self._http.get_json("/weight_info", timeout_s=PROBE_TIMEOUT_S)
            with reading(info, server=self.name):
                version = as_version(info.get("weight_version"))
            await self._set_weight_version(version)
        num_logprobs = max(NUM_TOKENS, num_logprobs_of(self._spec.sampling))
        plain = await self._probe(model, num_logprobs=num_logprobs, temperature=1.0, top_k=-1)
        hot_top_1 = await self._probe(model, num_logprobs=num_logprobs, temperature=2.0, top_k=1)
        with reading((plain, hot_top_1), server=self.name):
            found = [
                dict(top_tokens(reply["choices"][0]["logprobs"]["content"][0]))
                for reply in (plain, hot_top_1)
            ]
        return EngineInfo(
            model=model,
            logprobs=identify_logprobs(*found),
            reports_cached_tokens=cached_tokens(plain) is not None,
            workers=workers,
            weight_version=version,
            max_model_len=max_model_len,
        )

    async def _check_version(self) -> None:
        try:
            version = str((await self._http.get_json("/version", timeout_s=PROBE_TIMEOUT_S))["version"])
            is_supported = SpecifierSet(SUPPORTED, prereleases=True).contains(version)
        except (HttpStatusError, BadServerReply, InvalidVersion, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._http.url} does not report a version of vLLM ({error}); give the URL of a vLLM server, "
                "without /v1"
            ) from error
        if not is_supported:
            raise ConfigError(
                f"{self._http.url} runs vLLM {version}, but only {SUPPORTED} is supported; install that version "
                "there"
            )

    async def _find_model(self) -> tuple[str, int | None]:
        """Return the server's name for the model, and its context length if the server reports it."""
        reply = await self._http.get_json("/v1/models", timeout_s=PROBE_TIMEOUT_S)
        with reading(reply, server=self.name):
            served = [dict[str, Any](entry) for entry in reply["data"]]
        wanted = self._spec.engine_kwargs.get("served_model_name")
        base = PurePath(self._spec.model.path).name
        for entry in served:
            names = (str(entry.get("id")), str(entry.get("root")))
            if wanted in names or (wanted is None and base in [PurePath(name).name for name in names]):
                longest = entry.get("max_model_len")
                if longest is not None and int(longest) < self._spec.max_model_len:
                    raise ConfigError(
                        f"{self._http.url} accepts contexts of {longest} tokens, but rollout.prompt_length and "
                        f"rollout.response_length add up to {self._spec.max_model_len}; start it with --max-model-len "
                        f"{self._spec.max_model_len}, or lower them"
                    )
                return names[0], None if longest is None else int(longest)
        have = ", ".join(repr(entry.get("id")) for entry in served)
        raise ConfigError(
            f"{self._http.url} serves {have}, not {wanted or base!r}; start it with the model in model.path, or, "
            "if it is the same model under another name, set rollout.engine_kwargs.served_model_name to that name"
        )

    async def _has_extension(self) -> bool:
        """Return whether our worker extension is loaded and can be called.

        The workers are not asked, because an engine dies if they are called with an unknown method.
        """
        try:
            info = await self._http.get_json("/server_info?config_format=json", timeout_s=PROBE_TIMEOUT_S)
            return info["vllm_config"]["parallel_config"]["worker_extension_cls"] == WORKER_EXTENSION
        except (HttpStatusError, BadServerReply, KeyError, TypeError):
            return False  # vLLM without its development mode has no such page

    async def _probe(
        self, model: str, *, num_logprobs: int, temperature: float, top_k: int
    ) -> dict[str, Any]:
        body = {
            "model": model,
            "token_ids": PROBE_PROMPT,
            "sampling_params": {
                "temperature": temperature,
                "top_k": top_k,
                "max_tokens": 1,
                "seed": 0,
                "logprobs": num_logprobs,
                "ignore_eos": True,
            },
        }
        try:
            return await self._http.post_json(GENERATE, body, request_id="probe", timeout_s=PROBE_TIMEOUT_S)
        except HttpStatusError as error:
            if error.status == 400 and num_logprobs > NUM_TOKENS:
                raise ConfigError(
                    f"{self._http.url} does not return {num_logprobs} log-probs per token ({error}); start it with "
                    f"--max-logprobs {num_logprobs}, or lower the number that the rollout asks for"
                ) from error
            if error.status != 404:
                raise
            raise ConfigError(
                f"{self._http.url} has no {GENERATE}, the endpoint for token ids; start it with --enable-scale-out"
            ) from error


def read_load(page: str) -> EngineLoad:
    """Read a metrics page in the text format of Prometheus. The share is that of the fullest engine."""
    values: dict[str, list[float]] = {"kv_cache_usage_perc": [], "num_requests_waiting": []}
    for name, value in GAUGE.findall(page):
        values[name].append(float(value))
    return EngineLoad(
        kv_cache_share=max(values["kv_cache_usage_perc"], default=None),
        num_waiting=round(sum(values["num_requests_waiting"])),
    )
