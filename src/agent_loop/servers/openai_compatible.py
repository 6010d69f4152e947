"""Client of servers with OpenAI's completions API that accept and return token ids."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from agent_loop.config import parse_section
from agent_loop.errors import (
    BadPrompt,
    BadServerReply,
    ConfigError,
    ServerError,
)
from agent_loop.runtime.describe import describe_error
from agent_loop.servers.base import (
    Ability,
    ServerSpec,
    refuse_params_of_request,
)
from agent_loop.servers.engine_client import HEALTH_TIMEOUT_S, EngineClient, EngineLoad, RunningRequest
from agent_loop.servers.http import FINISH_REASONS, HttpClient, HttpStatusError, reading
from agent_loop.servers.scores import TokenScores, checked_text, read_prompt_logprobs, scores_of_no_token
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import (
    IntArray,
    SamplingParams,
    TokenChunk,
    as_token_ids,
)

logger = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
ABORTED: Mapping[str, Any] = {"choices": [{"token_ids": [], "finish_reason": "abort"}]}


class OpenAIOptions(BaseModel):
    """Options of this engine in `rollout.engine_kwargs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    served_model_name: str | None = None
    api_key_env: str | None = None
    logprobs: Literal["scaled"] | None = None
    offers: tuple[Literal["json_schema", "penalties", "min_p"], ...] = ()
    """Abilities of the server that the API cannot tell. `json_schema` is sent as `response_format`."""


class OpenAIServer(EngineClient):
    """Client of `/v1/completions` that sends and receives token ids.

    The server is managed elsewhere: weight updates are not supported, `sleep` only refuses requests, and `close` does
    not affect it.
    `abort` closes the connection, which makes the server stop the completion, and keeps the tokens so far.
    """

    _how_to_update = "set rollout.engine to vllm or sglang if the server is one of these"

    def __init__(
        self,
        url: str,
        *,
        name: str = "openai-0",
        options: OpenAIOptions | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Create a client that is not connected."""
        options = options or OpenAIOptions()
        self.abilities = frozenset({Ability.STREAMING, Ability.SEED})
        if options.logprobs == "scaled":
            self.abilities |= {Ability.LOG_PROBS}
        self.abilities |= {Ability(name) for name in options.offers}
        key = os.environ.get(options.api_key_env or "", "")
        if options.api_key_env and not key:
            raise ConfigError(
                f"rollout.engine_kwargs.api_key_env is {options.api_key_env!r}, but that variable is not set"
            )
        headers = {"Authorization": f"Bearer {key}"} if key else None
        http = HttpClient(url.removesuffix("/v1"), server=name, timeout_s=timeout_s, headers=headers)
        super().__init__(name, http)
        self._model = options.served_model_name
        self._scopes: dict[str, asyncio.Timeout] = {}
        """Timeout scopes of the running completions. `abort` expires the scope."""
        self._score_max_tokens = 0
        """Value of `max_tokens` with which the server scores prompts: vLLM samples at least one token."""
        self._why_no_scores = ""

    @classmethod
    def create(cls, spec: ServerSpec) -> OpenAIServer:
        """Create a client for `rollout.engine: openai` with one of `rollout.server_urls`."""
        assert spec.url is not None
        options = parse_section(OpenAIOptions, spec.engine_kwargs, where="rollout.engine_kwargs")
        return cls(spec.url, name=spec.name, options=options)

    async def start(self) -> None:
        """Find the model, and check that the server returns token ids."""
        served = await self._http.get_json("/v1/models")
        with reading(served, server=self.name):
            names = [str(model["id"]) for model in served.get("data", [])]
        if self._model is None and names:
            self._model = names[0]
        if self._model not in names:
            raise ConfigError(
                f"{self._http.url} serves {', '.join(names) or 'no model'}, not {self._model!r}; set "
                "rollout.engine_kwargs.served_model_name"
            )
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [1],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        try:
            response = await self._http.post_json(COMPLETIONS, body)
        except HttpStatusError as error:
            raise ConfigError(
                f"{self._http.url} rejects a prompt of token ids ({error}); use a server that accepts and returns "
                "token ids"
            ) from error
        if Ability.JSON_SCHEMA in self.abilities:
            try:
                await self._http.post_json(COMPLETIONS, {**body, "response_format": _response_format("{}")})
            except HttpStatusError as error:
                raise ConfigError(
                    f"{self._http.url} rejects response_format ({error}); remove json_schema from "
                    "rollout.engine_kwargs.offers"
                ) from error
        with reading(response, server=self.name):
            returns_ids = response["choices"][0].get("token_ids") is not None
        if not returns_ids:
            raise ConfigError(
                f"{self._http.url} does not return token_ids, so its text would have to be encoded again; use a "
                "server that accepts and returns token ids"
            )
        await self._find_scores()
        self._trouble = ""

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        self._refuse_if_unusable(request_id)
        body = self._body(prompt_ids, sampling_params, request_id, attachments)
        with self._running_as(request_id, request_id) as running:
            # `abort` needs no repetition, because it closes the connection.
            running.is_sent = running.is_known = True
            async with self._typed_errors(request_id), aclosing(self._events(body, request_id)) as events:
                async for event in events:
                    chunk = self._read(event, request_id)
                    if chunk is not None:
                        yield chunk
                        if chunk.stop_reason is not None:
                            return
        raise BadServerReply(
            "the stream ended without a stop reason", server=self.name, request_id=request_id
        )

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        self._refuse_if_unusable()
        if self._why_no_scores:
            raise ServerError(self._why_no_scores, server=self.name)
        text = checked_text(token_ids, start=start, top_logprobs=top_logprobs, server=self.name)
        if start == len(text):
            return scores_of_no_token(top_logprobs)
        async with self._typed_errors(""):
            reply = await self._http.post_json(COMPLETIONS, self._score_body(text.tolist(), top_logprobs))
        return self._read_scores(reply, text, start=start, top_logprobs=top_logprobs)

    async def _send_abort(self, running: RunningRequest) -> None:
        self._scopes[running.id].reschedule(asyncio.get_running_loop().time())

    async def _report_load(self) -> EngineLoad:
        await self._http.get_json("/v1/models", timeout_s=HEALTH_TIMEOUT_S)
        return EngineLoad()

    async def _cause_of(self, error: ServerError, request_id: str) -> Exception:
        if isinstance(error, HttpStatusError) and error.status in (400, 413, 422):
            return BadPrompt(str(error), server=self.name, request_id=request_id)
        return error

    async def _find_scores(self) -> None:
        """Ask whether the server returns the log-probs of a prompt. If it does not, `score` says what it answered."""
        refusals: list[str] = []
        for self._score_max_tokens in (0, 1):
            try:
                reply = await self._http.post_json(COMPLETIONS, self._score_body([1, 1], 0))
                self._read_scores(reply, as_token_ids([1, 1]), start=1, top_logprobs=0)
            except (HttpStatusError, BadServerReply) as error:
                refusals.append(f"with max_tokens={self._score_max_tokens}: {describe_error(error)}")
            else:
                self.abilities |= {Ability.SCORE}
                return
        self._why_no_scores = (
            f"{self._http.url} does not return prompt_logprobs, so it cannot be a teacher "
            f"({'; '.join(refusals)}); use agent-loop serve, or a server that is compatible with vLLM"
        )
        logger.info("server %s: %s", self.name, self._why_no_scores)

    def _score_body(self, token_ids: list[int], top_logprobs: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": self._score_max_tokens,
            "prompt_logprobs": top_logprobs,
            "temperature": 1.0,
        }

    def _read_scores(self, reply: Any, text: IntArray, *, start: int, top_logprobs: int) -> TokenScores:
        with reading(reply, server=self.name):
            entries = reply["choices"][0]["prompt_logprobs"]
            return read_prompt_logprobs(entries, token_ids=text, start=start, top_logprobs=top_logprobs)

    async def _events(self, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Any]:
        """Yield the events of the server. After an abort, yield an event with the finish reason `abort`."""
        async with aclosing(self._http.stream_events(COMPLETIONS, body, request_id=request_id)) as events:
            while True:
                scope = self._scopes[request_id] = asyncio.timeout(None)
                try:
                    async with scope:
                        event = await anext(events, None)
                except TimeoutError:
                    if not scope.expired():
                        raise
                    yield ABORTED
                    return
                if event is None:
                    return
                yield event

    def _body(
        self,
        prompt_ids: IntArray,
        params: SamplingParams,
        request_id: str,
        attachments: Sequence[Attachment],
    ) -> dict[str, Any]:
        problem = ""
        if attachments:
            problem = f"the request has {len(attachments)} attachments, but this server accepts text only"
        elif len(prompt_ids) == 0:
            problem = "the prompt is empty; give at least one token"
        if problem:
            raise BadPrompt(problem, server=self.name, request_id=request_id)
        refuse_params_of_request(params, abilities=self.abilities, server=self.name, resumes_schemas=False)
        wanted: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt_ids.tolist(),
            "stream": True,
            "return_token_ids": True,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": params.seed,
        }
        optional: dict[str, tuple[Any, Any]] = {
            "top_p": (params.top_p, 1.0),
            "top_k": (params.top_k, -1),
            "stop_token_ids": (list(params.stop_token_ids), []),
            "ignore_eos": (params.ignore_eos, False),
            "presence_penalty": (params.presence_penalty, 0.0),
            "frequency_penalty": (params.frequency_penalty, 0.0),
            "repetition_penalty": (params.repetition_penalty, 1.0),
            "min_p": (params.min_p, 0.0),
            "logprobs": (0 if Ability.LOG_PROBS in self.abilities else None, None),
        }
        if params.json_schema:
            wanted["response_format"] = _response_format(params.json_schema)
        wanted |= {key: value for key, (value, default) in optional.items() if value != default}
        return {key: value for key, value in wanted.items() if value is not None}

    def _read(self, event: Any, request_id: str) -> TokenChunk | None:
        """Return the chunk of an event, or None for an event without one, such as the final usage."""
        with reading(event, server=self.name, request_id=request_id):
            if "error" in event:
                raise ServerError(
                    f"the server failed: {event['error']}", server=self.name, request_id=request_id
                )
            if not event["choices"]:
                return None
            choice = event["choices"][0]
            token_ids = [int(token) for token in choice.get("token_ids") or ()]
            logprobs = None
            if Ability.LOG_PROBS in self.abilities:
                given: Any = choice["logprobs"]["token_logprobs"] if token_ids else ()
                logprobs = [float(logprob) for logprob in given]
                if len(logprobs) != len(token_ids):
                    raise ValueError(f"{len(token_ids)} token ids with {len(logprobs)} log-probs")
            reason: str | None = choice.get("finish_reason")
            stop_reason = None if reason is None else FINISH_REASONS[reason]
            return TokenChunk(token_ids, logprobs, stop_reason=stop_reason)


def _response_format(json_schema: str) -> dict[str, Any]:
    """Return a schema in the form of OpenAI's API."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "completion", "schema": json.loads(json_schema), "strict": True},
    }
