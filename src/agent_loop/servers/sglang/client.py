"""Client of a running SGLang server."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from packaging.specifiers import SpecifierSet

from agent_loop.errors import (
    BadServerReply,
    ConfigError,
    ServerDied,
    ServerError,
    WeightsError,
)
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.base import Ability, ServerSpec, refuse_unknown_options
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.sglang.options import CONTEXT_MARGIN
from agent_loop.servers.sglang.requests import SAMPLING_ABILITIES
from agent_loop.servers.sglang.server import CONTROL_TIMEOUT_S, SGLangBase, SGLangConnection
from agent_loop.servers.sglang.versions import SUPPORTED

if TYPE_CHECKING:
    from agent_loop.weights import WeightHandle

OPTIONS = ("api_key", "weights_folder")
"""Keys of `engine_kwargs`: the server's API key, and a folder for new weights that both processes can access."""
GET_PATHS = ("/server_info", "/model_info", "/v1/loads")
ABORT_TIMEOUT_S = 10.0
PROBE_IDS = (0, 1, 2, 3)
PROBE_TOLERANCE = 1e-2


class SGLangClient(SGLangBase):
    """Client of `python -m sglang.launch_server`, with token ids in and out. `engine_kwargs` accepts an `api_key`.

    New weights are sent as files (`/update_weights_from_disk`). If the server is on another machine, set
    `weights_folder` to a folder that both machines can access. Only one client may update the weights: tokens of
    streams may otherwise get the previous weight version.

    Log-probs are `log_softmax(logits / temperature)`. If the server returns other log-probs, which `start` finds out,
    completions have none.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a client that is not connected.

        Raises:
            ConfigError: There is no URL, or an option is unknown.
        """
        if spec.url is None:
            raise ConfigError("a SGLang client needs the URL of its server; set rollout.server_urls")
        refuse_unknown_options(spec.engine_kwargs, known=OPTIONS)
        if spec.weight_transfer not in ("auto", "disk"):
            raise ConfigError(
                f"rollout.weight_transfer is {spec.weight_transfer}, but a running SGLang server loads "
                "weights only from disk; set disk or auto"
            )
        folder = spec.engine_kwargs.get("weights_folder")
        super().__init__(
            spec,
            publisher=WeightPublisher(
                spec.model,
                transfer="disk",
                is_same_host=False,
                num_receivers=1,
                folder=Path(str(folder)) if folder else None,
                as_checkpoints=True,
            ),
            takes_seeds=False,
        )
        self._url = spec.url

    @classmethod
    def create(cls, spec: ServerSpec) -> SGLangClient:
        """Create a client for `rollout.engine: sglang` with `rollout.server_urls`."""
        return cls(spec)

    async def start(self) -> None:
        key = self._spec.engine_kwargs.get("api_key")
        client = HttpClient(
            self._url,
            server=self.name,
            timeout_s=CONTROL_TIMEOUT_S,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        connection = HttpConnection(client, server=self.name)
        try:
            await self._inspect(connection)
        except BaseException:
            await client.close()
            raise
        self._connection, self._trouble = connection, ""

    async def close(self) -> None:
        for running in self._running.all:
            if running.is_sent and self._connection is not None:
                with suppress(ServerError):
                    await self._connection.call(
                        "/abort_request", {"rid": running.rid}, timeout_s=ABORT_TIMEOUT_S
                    )
        await super().close()

    async def _inspect(self, connection: SGLangConnection) -> None:
        """Find out what the server offers.

        Raises:
            ConfigError: The server has an unsupported version or another model, or its context is too short.
        """
        timeout_s = self._spec.start_timeout_s
        info = cast(Mapping[str, Any], await connection.call("/server_info", {}, timeout_s=timeout_s))
        model = cast(Mapping[str, Any], await connection.call("/model_info", {}, timeout_s=timeout_s))
        version = str(info.get("version"))
        if not SpecifierSet(SUPPORTED, prereleases=True).contains(version):
            raise ConfigError(f"{self._url} runs SGLang {version}, but only {SUPPORTED} is supported")
        config = _read_config(self._spec.model.path)
        architectures = model.get("architectures")
        if config and architectures and config.get("architectures") != architectures:
            raise ConfigError(
                f"{self._url} runs a {architectures}, but model.path is a {config.get('architectures')}; start it "
                f"with --model-path {self._spec.model.path}"
            )
        longest = int(info.get("max_req_input_len") or 0)
        if longest and longest < self._spec.max_model_len:
            raise ConfigError(
                f"{self._url} accepts prompts below {longest} tokens, but rollout.prompt_length and "
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
        seen = str(model.get("weight_version"))
        self._weight_version = int(seen) if seen.isdecimal() else 0
        if not info.get("skip_tokenizer_init") and info.get("grammar_backend") != "none":
            self.abilities |= {Ability.JSON_SCHEMA}
        if info.get("enable_deterministic_inference"):
            self.abilities |= {Ability.SEED}
        if info.get("enable_memory_saver") and info.get("enable_weights_cpu_backup"):
            self.abilities |= {Ability.SLEEP}
        if not await _has_scaled_logprobs(connection):
            self.abilities -= SAMPLING_ABILITIES

    async def _load(self, connection: SGLangConnection, handle: WeightHandle) -> None:
        body = {
            "model_path": str(handle.source["folder"]),
            "weight_version": str(handle.weight_version),
            "flush_cache": self._has_cache,
        }
        try:
            await connection.call("/update_weights_from_disk", body, timeout_s=CONTROL_TIMEOUT_S)
        except HttpStatusError as error:
            if "Rolling back" in str(error):  # SGLang rolls back to the files that it failed to load
                raise self._mixed(str(error)) from error
            raise WeightsError(
                f"{self._url} did not load the weights of version {handle.weight_version}: {error}; check that it can "
                "read the folder, or set rollout.engine_kwargs.weights_folder to a folder that it can read"
            ) from error


class HttpConnection:
    """Connection to SGLang's HTTP server.

    A request that is cancelled is aborted explicitly, because the server checks for lost clients only every few
    seconds.
    """

    def __init__(self, client: HttpClient, *, server: str) -> None:
        self._client = client
        self._server = server
        self._is_closed = False

    async def call(
        self, path: str, body: Mapping[str, Any], *, request_id: str = "", timeout_s: float | None = None
    ) -> Any:
        if path in GET_PATHS:
            return await self._client.get_json(path, timeout_s=timeout_s)
        async with self._abort_if_cancelled(path, body, request_id):
            return await self._client.post_json(path, body, request_id=request_id, timeout_s=timeout_s)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, request_id: str = ""
    ) -> AsyncGenerator[Any]:
        async with (
            self._abort_if_cancelled(path, body, request_id),
            aclosing(self._client.stream_events(path, body, request_id=request_id)) as events,
        ):
            async for event in events:
                yield event

    async def close(self) -> None:
        self._is_closed = True
        await self._client.close()

    @asynccontextmanager
    async def _abort_if_cancelled(
        self, path: str, body: Mapping[str, Any], request_id: str
    ) -> AsyncGenerator[None]:
        """Abort the request at the server if the body ends with an exception."""
        try:
            yield
        except BaseException as error:
            if self._is_closed and isinstance(error, Exception):
                raise ServerDied(
                    "the server was closed during the request", server=self._server, request_id=request_id
                ) from error
            if path == "/generate" and not self._is_closed:
                await self._abort(body["rid"])
            raise

    async def _abort(self, rid: str) -> None:
        with suppress(ServerError, TimeoutError):
            await run_shielded(
                lambda: self._client.post_json("/abort_request", {"rid": rid}), timeout_s=ABORT_TIMEOUT_S
            )


async def _has_scaled_logprobs(connection: SGLangConnection) -> bool:
    """Return whether log-probs are of the scaled logits: temperature 2 halves the difference between two tokens."""
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
        reply = await connection.call("/generate", body)
        try:
            found = [float(entry[0]) for entry in reply["meta_info"]["output_token_ids_logprobs"][0]]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise BadServerReply(f"SGLang's reply to a probe has no log-probs: {error!r}") from error
        gaps.append([after - before for before, after in itertools.pairwise(found)])
    return all(abs(hot * 2 - plain) < PROBE_TOLERANCE for plain, hot in zip(*gaps, strict=True))


def _read_config(path: str) -> dict[str, Any]:
    """Read the model's configuration. Return an empty dict if `path` is not a local folder."""
    try:
        return cast(dict[str, Any], json.loads((Path(path) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
