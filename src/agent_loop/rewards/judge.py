"""Judges: models at endpoints with OpenAI's chat completions that answer questions about trajectories."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from pydantic import Field

from agent_loop.config import NotNegative, Positive, PositiveSeconds, Section, Temperature, Tokens
from agent_loop.config.values import read_api_key
from agent_loop.errors import RewardUnavailable
from agent_loop.loading import import_extra
from agent_loop.rewards.judge_cache import JudgeCache, cache_key
from agent_loop.rewards.judge_questions import Question, UnreadableReply, Verdict
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.runtime.describe import describe_error

MAX_RETRY_DELAY_S = 60.0
"""Longest delay between two attempts. The client waits as long as the endpoint's `Retry-After` demands, up to this."""
CLOSE_TIMEOUT_S = 5.0
REFUSED = (400, 422)
"""Statuses by which endpoints refuse a field of a request."""
MALFORMED = (ValueError, AttributeError, IndexError, TypeError)
"""Errors from responses that are not JSON, or lack a field."""
IN_CACHE_KEY = {"model", "base_url", "temperature", "max_tokens", "json_schema", "extra_body"}
"""Settings that can change a reply."""


class JudgeSettings(Section):
    """Settings of a judge: a model at an endpoint with OpenAI's chat completions, such as `agent-loop serve`."""

    model: str
    """Name of the model at the endpoint."""
    base_url: str | None = None
    """URL such as `http://host:8000/v1`. None uses the environment variable OPENAI_BASE_URL, or OpenAI's API."""
    api_key_env: str | None = None
    """Environment variable that holds the API key. None if the endpoint needs no key."""
    temperature: Temperature | None = None
    """Sampling temperature. None uses the endpoint's default."""
    max_tokens: Tokens | None = 512
    """Maximum number of tokens in one reply. None uses the endpoint's default."""
    json_schema: bool = True
    """Send the form of the reply as `response_format`. Set to false if the endpoint refuses it."""
    max_concurrent: Positive = 16
    """Maximum number of concurrent requests to this judge from one process."""
    timeout_s: PositiveSeconds = 60.0
    """Time limit for one attempt."""
    max_retries: NotNegative = 3
    """Number of retries after a connection error, a timeout, or a status such as 429 or 500. The delay between attempts
    grows."""
    extra_body: dict[str, Any] = Field(default={})
    """Additional fields of each request."""


class Judge:
    """Client of one judge.

    All calls that run at the same time share one client, which is closed when the last of them ends.

    Args:
        settings: The model and its endpoint.
        cache: Keeps the replies. May be shared with other judges.

    Raises:
        ConfigError: The client is not installed, or the API key is not set.
    """

    def __init__(self, settings: JudgeSettings, *, cache: JudgeCache) -> None:
        self.name = f"judge {settings.model!r} at {settings.base_url or 'the default endpoint'}"
        self._settings = settings
        self._cache = cache
        self._openai = import_extra("openai", extra="simulated-user", by="a judge")
        self._key = read_api_key(settings.api_key_env)
        self._certificates = ssl.create_default_context()  # takes 50 ms, which no later client repeats
        self._num_calls = 0
        self._client: Any = None
        """None if no call is running."""
        self._slots = asyncio.Semaphore()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """Locks of the questions that are being asked."""

    async def ask(self, question: Question) -> Verdict:
        """Return the judge's verdict. A reply that cannot be read is asked for once more.

        Raises:
            RewardUnavailable: The endpoint failed, or both replies cannot be read.
        """
        identity = self._settings.model_dump(mode="json", include=IN_CACHE_KEY)
        key = cache_key([identity, question.messages, question.schema])
        verdict = self._cached(key, question)
        if verdict is not None:
            return verdict
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with self._calling(), lock:  # an equal question waits for the reply
            verdict = self._cached(key, question)
            if verdict is not None:
                return verdict
            async with self._slots:
                return await self._ask(key, question)

    def _cached(self, key: str, question: Question) -> Verdict | None:
        reply = self._cache.get(key)
        try:
            return None if reply is None else question.read(reply)
        except UnreadableReply:  # the file is from outside
            return None

    async def _ask(self, key: str, question: Question) -> Verdict:
        reply = await self._reply(question)
        try:
            verdict = question.read(reply)
        except UnreadableReply as first:
            reply = await self._reply(
                question, complaint=f"An earlier reply {first}. Reply with the JSON object alone."
            )
            try:
                verdict = question.read(reply)
            except UnreadableReply as error:
                raise RewardUnavailable(
                    f"{self.name} was asked twice: its reply {error}; raise max_tokens if replies are cut, or use "
                    "json_schema or a stronger model"
                ) from error
        self._cache.put(key, reply)
        return verdict

    async def _reply(self, question: Question, *, complaint: str = "") -> str:
        """Return the text of a completion; empty if the completion has none."""
        settings = self._settings
        messages = question.messages
        if complaint:
            *before, last = messages
            messages = [*before, {**last, "content": f"{last['content']}\n\n{complaint}"}]
        schema = {"name": "verdict", "schema": question.schema, "strict": True}
        optional = {
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "response_format": {"type": "json_schema", "json_schema": schema}
            if settings.json_schema
            else None,
            "extra_body": settings.extra_body or None,
        }
        given = {name: value for name, value in optional.items() if value is not None}
        limit_s = (settings.max_retries + 1) * (settings.timeout_s + MAX_RETRY_DELAY_S)
        try:
            async with asyncio.timeout(limit_s):  # the client's own limit does not end a reply that trickles
                completion: Any = await self._client.chat.completions.create(
                    model=settings.model, messages=messages, **given
                )
            text: Any = completion.choices[0].message.content
        except (self._openai.APIError, TimeoutError, *MALFORMED) as error:
            remedy = "check that the endpoint serves this model"
            if settings.json_schema and getattr(error, "status_code", None) in REFUSED:
                remedy += ", and set json_schema: false if it has no structured output"
            raise RewardUnavailable(
                f"{self.name} returned no completion: {describe_error(error)}; {remedy}"
            ) from error
        return text if isinstance(text, str) else ""

    @asynccontextmanager
    async def _calling(self) -> AsyncGenerator[None]:
        """Keep the client open in the body."""
        if self._num_calls == 0:
            settings = self._settings
            self._slots = asyncio.Semaphore(settings.max_concurrent)
            self._client = self._openai.AsyncOpenAI(
                api_key=self._key,
                base_url=settings.base_url,
                timeout=settings.timeout_s,
                max_retries=settings.max_retries,
                http_client=self._openai.DefaultAsyncHttpxClient(verify=self._certificates),
            )
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                client, self._client = self._client, None
                await run_shielded(client.close, timeout_s=CLOSE_TIMEOUT_S)
