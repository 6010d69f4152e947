"""Client of SGLang's HTTP API, and of a running SGLang server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from packaging.specifiers import SpecifierSet

from agent_loop.errors import BadServerReply, ConfigError, ServerError, WeightsError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.base import Ability, ServerSpec, refuse_unknown_options
from agent_loop.servers.engine_client import (
    CLOSED,
    CONTROL_TIMEOUT_S,
    HEALTH_TIMEOUT_S,
    EngineClient,
    EngineLoad,
    RunningRequest,
    as_version,
    stamped,
)
from agent_loop.servers.http import HttpClient, HttpStatusError, reading
from agent_loop.servers.process import EngineProcess
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.publishing import WeightPublisher, local_folder
from agent_loop.servers.scores import TokenScores, checked_text, scores_of_no_token
from agent_loop.servers.sglang.options import CONTEXT_MARGIN, SUPPORTED
from agent_loop.servers.sglang.requests import (
    CONSTRAINT_ABILITIES,
    SAMPLING_ABILITIES,
    check_params,
    generate_body,
    needs_own_stop,
    read_reply,
    read_scores,
    schema_errors,
    score_body,
)
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk

if TYPE_CHECKING:
    from agent_loop.weights.handle import WeightHandle

OPTIONS = ("api_key", "weights_folder")
"""Keys of `engine_kwargs`: the server's API key, and a folder for new weights that both processes can access."""
ABORT_TIMEOUT_S = 10.0
SLEEP_TAGS = ("kv_cache", "weights")
PROBE_IDS = (0, 1, 2, 3)
PROBE_TOLERANCE = 1e-2


class SGLangEngine(EngineClient):
    """Base of `SGLangClient` and `SGLangServer`.

    An update takes running requests out of the batch, empties the prefix cache, loads the weights, and resumes the
    requests. Their context is prefilled again under the new weights, which counts as a preemption. SGLang could also
    keep the old cache and resume faster. The tokens of the current step would then have the wrong weight version, and
    the cache could not be emptied.
    """

    abilities = frozenset(
        {
            *SAMPLING_ABILITIES,
            *CONSTRAINT_ABILITIES,
            Ability.STREAMING,
            Ability.PREFIX_REUSE,
            Ability.WEIGHT_UPDATE,
            Ability.UPDATE_IN_FLIGHT,
            Ability.SCORE,
        }
    )
    _limits: PromptLimits

    def __init__(
        self,
        spec: ServerSpec,
        http: HttpClient,
        *,
        publisher: WeightPublisher,
        process: EngineProcess | None = None,
    ) -> None:
        super().__init__(spec.name, http, process=process)
        self._spec = spec
        self._publisher = publisher
        self._may_send = asyncio.Event()
        """Cleared during a weight update."""
        self._may_send.set()
        self._released: set[str] = set()
        """Tags of the memory that `sleep` released."""

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        """Yield the completion in chunks. See `AsyncServerBase.stream`.

        Tokens after a weight update come in one chunk at the end, when SGLang reports the weight version of each token.
        """
        self._refuse_if_unusable(request_id)
        check_params(sampling_params, abilities=self.abilities, server=self.name)
        room = self._limits.check(request_id, prompt_ids=prompt_ids, attachments=attachments)
        if sampling_params.max_tokens is not None:
            room = min(room, sampling_params.max_tokens)
        with self._running_as(request_id, new_rid()) as running, schema_errors(sampling_params):
            if not await self._send(running):
                yield TokenChunk([], [], weight_version=self._weight_version, stop_reason="aborted")
                return
            body = generate_body(prompt_ids, sampling_params, rid=running.id, max_new_tokens=room)
            stops = frozenset(sampling_params.stop_token_ids if needs_own_stop(sampling_params) else ())
            replies = self._replies(body, running, stops, request_id)
            async with (
                self._typed_errors(request_id),
                aclosing(stamped(replies, current_version=lambda: self._weight_version)) as chunks,
            ):
                async for chunk in chunks:
                    is_exact = Ability.LOG_PROBS in self.abilities
                    yield chunk if is_exact else replace(chunk, logprobs=None, extras={})

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        self._refuse_if_unusable()
        limits = self._limits
        text = checked_text(
            token_ids,
            start=start,
            top_logprobs=top_logprobs,
            server=self.name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
        )
        num_top = min(top_logprobs, limits.vocab_size)
        if start == len(text):
            return scores_of_no_token(num_top)
        with self._running_as(f"score-{next(self._numbers)}", new_rid()) as running:
            if not await self._send(running):
                raise ServerError("the request was aborted", server=self.name)
            body = score_body(text, start=start, num_top=num_top, rid=running.id)
            async with self._typed_errors(""), self._aborting_if_cancelled(running):
                reply = await self._http.post_json("/generate", body)
        return read_scores(reply, token_ids=text, start=start, num_top=num_top, server=self.name)

    async def close(self) -> None:
        for running in list(self._running.values()):
            if running.is_sent and not self._trouble:
                with suppress(ServerError):
                    await self._send_abort(running)
        await super().close()

    async def _inspect(self, *, has_scaled_logprobs: bool | None = None) -> None:
        """Find out what the server offers."""
        timeout_s, url = self._spec.start_timeout_s, self._http.url
        info = cast(Mapping[str, Any], await self._http.get_json("/server_info", timeout_s=timeout_s))
        model = cast(Mapping[str, Any], await self._http.get_json("/model_info", timeout_s=timeout_s))
        version = str(info.get("version"))
        if not SpecifierSet(SUPPORTED, prereleases=True).contains(version):
            raise ConfigError(f"{url} runs SGLang {version}, but only {SUPPORTED} is supported")
        config = _read_config(local_folder(self._spec.model))
        architectures = model.get("architectures")
        if config and architectures and config.get("architectures") != architectures:
            raise ConfigError(
                f"{url} runs a {architectures}, but model.path is a {config.get('architectures')}; start it "
                f"with --model-path {self._spec.model.path}"
            )
        longest = int(info.get("max_req_input_len") or 0)
        if longest and longest < self._spec.max_model_len:
            raise ConfigError(
                f"{url} accepts prompts below {longest} tokens, but rollout.prompt_length and "
                f"rollout.response_length add up to {self._spec.max_model_len}; start it with "
                f"--context-length {self._spec.max_model_len + CONTEXT_MARGIN} or more"
            )
        self._limits = PromptLimits(
            server=self.name,
            max_model_len=self._spec.max_model_len,
            vocab_size=int(
                config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 2**31
            ),
        )
        self._weight_version = as_version(model.get("weight_version"))
        if not info.get("skip_tokenizer_init") and info.get("grammar_backend") != "none":
            self.abilities |= {Ability.JSON_SCHEMA}
        if info.get("enable_deterministic_inference"):
            self.abilities |= {Ability.SEED}
        if info.get("enable_memory_saver") and info.get("enable_weights_cpu_backup"):
            self.abilities |= {Ability.SLEEP}
        if has_scaled_logprobs is None:
            has_scaled_logprobs = await self._has_scaled_logprobs()
        if not has_scaled_logprobs:
            self.abilities -= SAMPLING_ABILITIES

    async def _has_scaled_logprobs(self) -> bool:
        """Return whether log-probs are of the scaled logits: temperature 2 halves the difference of two tokens."""
        gaps: list[list[float]] = []
        for temperature in (1.0, 2.0):
            body = {
                "input_ids": [*PROBE_IDS],
                "sampling_params": {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True},
                "return_logprob": True,
                "token_ids_logprob": [*PROBE_IDS],
                "rid": f"agent-loop-probe-{temperature:g}",
                "stream": False,
            }
            reply = await self._http.post_json("/generate", body)
            with reading(reply, server=self.name):
                found = [float(entry[0]) for entry in reply["meta_info"]["output_token_ids_logprobs"][0]]
            gaps.append([after - before for before, after in itertools.pairwise(found)])
        return all(abs(hot * 2 - plain) < PROBE_TOLERANCE for plain, hot in zip(*gaps, strict=True))

    @property
    def _has_cache(self) -> bool:
        """Whether there is a prefix cache to empty. `sleep` on a GPU frees the cache."""
        return "kv_cache" not in self._released

    def _mixed(self, why: str) -> ServerError:
        """Stop using an engine that has a part of the new weights. Return the error to raise."""
        self._trouble = f"its weights are partly old and partly new ({why}); start the server again"
        return ServerError(self._trouble, server=self.name)

    async def _send(self, running: RunningRequest) -> bool:
        """Wait until a request may be sent. Return False if it was aborted before."""
        await self._may_send.wait()
        running.is_sent = not running.is_aborted
        return running.is_sent

    async def _replies(
        self, body: dict[str, Any], running: RunningRequest, stops: frozenset[int], request_id: str
    ) -> AsyncGenerator[tuple[TokenChunk, Sequence[int]]]:
        """Yield chunks of a completion with weight versions, and cut it after the first of `stops`."""
        num_read, is_cut = 0, False
        events = self._http.stream_events("/generate", body, request_id=request_id)
        async with self._aborting_if_cancelled(running), aclosing(events):
            async for event in events:
                chunk, versions = read_reply(
                    event, num_seen=num_read, server=self.name, request_id=request_id
                )
                num_read += len(chunk.token_ids)
                running.is_known = True
                is_last = chunk.stop_reason is not None
                ends = [place for place, token in enumerate(chunk.token_ids, 1) if token in stops]
                if is_cut or ends:
                    kept = chunk.part(0, 0 if is_cut else ends[0])
                    counts = (chunk.num_preempted, chunk.num_cached_tokens)
                    chunk = replace(
                        kept,
                        stop_reason="stop" if is_last else None,
                        num_preempted=counts[0],
                        num_cached_tokens=counts[1],
                    )
                    if not is_cut and not is_last:
                        await self._send_abort(running)
                    is_cut = True
                yield chunk, versions
                if is_last:
                    return
        raise BadServerReply(
            "SGLang's stream ended before the completion did", server=self.name, request_id=request_id
        )

    async def _send_abort(self, running: RunningRequest) -> None:
        await self._http.post_json("/abort_request", {"rid": running.id}, timeout_s=ABORT_TIMEOUT_S)

    @asynccontextmanager
    async def _aborting_if_cancelled(self, running: RunningRequest) -> AsyncGenerator[None]:
        """Abort the request if the body raises, because the server checks for lost clients only every few seconds."""
        try:
            yield
        except BaseException:
            if self._trouble != CLOSED:
                with suppress(ServerError, TimeoutError):
                    await run_shielded(lambda: self._send_abort(running), timeout_s=ABORT_TIMEOUT_S)
            raise

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        await self._resume(self._released & {"weights"})
        self._may_send.clear()
        try:
            await self._post("/pause_generation", {"mode": "retract"})
            yield
        finally:
            try:
                await run_shielded(
                    lambda: self._post("/continue_generation", {}), timeout_s=CONTROL_TIMEOUT_S
                )
            finally:
                self._may_send.set()

    async def _report_load(self) -> EngineLoad:
        await self._http.get_json("/server_info", timeout_s=HEALTH_TIMEOUT_S)
        reply = await self._http.get_json("/v1/loads", timeout_s=HEALTH_TIMEOUT_S)
        shares = [float(load["token_usage"]) for load in reply["loads"]]
        return EngineLoad(kv_cache_share=max(shares, default=None))

    async def _allocate(self) -> None:
        await self._resume(self._released)

    async def _release(self) -> None:
        tags = [tag for tag in SLEEP_TAGS if tag not in self._released]
        await self._post("/release_memory_occupation", {"tags": tags})
        self._released.update(tags)

    async def _resume(self, tags: Iterable[str]) -> None:
        """Allocate memory again that `sleep` released."""
        tags = sorted(tags)
        if tags:
            await self._post("/resume_memory_occupation", {"tags": tags})
            self._released.difference_update(tags)


class SGLangClient(SGLangEngine):
    """Client of `python -m sglang.launch_server`, with token ids in and out. `engine_kwargs` accepts an `api_key`.

    New weights are sent as files (`/update_weights_from_disk`). If the server is on another machine, set
    `weights_folder` to a folder that both machines can access. Only one client may update the weights: tokens of
    streams may otherwise get the previous weight version.

    Log-probs are `log_softmax(logits / temperature)`. If the server returns other log-probs, which `start` finds out,
    completions have none.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a client that is not connected."""
        if spec.url is None:
            raise ConfigError("a SGLang client needs the URL of its server; set rollout.server_urls")
        refuse_unknown_options(spec.engine_kwargs, known=OPTIONS)
        if spec.weight_transfer not in ("auto", "disk"):
            raise ConfigError(
                f"rollout.weight_transfer is {spec.weight_transfer}, but a running SGLang server loads "
                "weights only from disk; set disk or auto"
            )
        folder, key = spec.engine_kwargs.get("weights_folder"), spec.engine_kwargs.get("api_key")
        super().__init__(
            spec,
            HttpClient(
                spec.url,
                server=spec.name,
                timeout_s=CONTROL_TIMEOUT_S,
                headers={"Authorization": f"Bearer {key}"} if key else None,
            ),
            publisher=WeightPublisher(
                spec.model,
                transfer="disk",
                is_same_host=False,
                num_receivers=1,
                folder=Path(str(folder)) if folder else None,
                as_checkpoints=True,
            ),
        )

    async def start(self) -> None:
        try:
            await self._inspect()
        except BaseException:
            await self._http.close()
            raise
        self._trouble = ""

    async def _load(self, handle: WeightHandle) -> None:
        """Load the weights into the paused engine, empty its cache, and set its weight version."""
        body = {
            "model_path": str(handle.source["folder"]),
            "weight_version": str(handle.weight_version),
            "flush_cache": self._has_cache,
        }
        try:
            await self._post("/update_weights_from_disk", body)
        except HttpStatusError as error:
            if "Rolling back" in str(error):  # SGLang rolls back to the files that it failed to load
                raise self._mixed(str(error)) from error
            raise WeightsError(
                f"{self._http.url} did not load the weights of version {handle.weight_version}: {error}; check that "
                "it can read the folder, or set rollout.engine_kwargs.weights_folder to a folder that it can read"
            ) from error


def new_rid() -> str:
    """Return a new id of a request. All ids have one length, because SGLang aborts all requests whose ids start with a
    given id."""
    return uuid4().hex


def _read_config(folder: Path | None) -> dict[str, Any]:
    """Read the model's configuration. Return an empty dict if the model is not on this machine."""
    try:
        return cast(
            dict[str, Any], json.loads(((folder or Path()) / "config.json").read_text(encoding="utf-8"))
        )
    except (OSError, ValueError):
        return {}
