"""Tests of the client of a running vLLM server, with a fake of vLLM's HTTP API on a local port."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agent_loop.config import ModelConfig
from agent_loop.errors import BadServerReply, ConfigError, ServerDied, ServerError, WeightsError
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.vllm import VLLMClient
from agent_loop.servers.vllm.logprobs import CONSTRAINT_ABILITIES
from agent_loop.types import SamplingParams, as_token_ids
from tests.servers.tiny_embedded import tiny_model

LOGITS = {4: 2.0, 5: 0.5, 6: -1.0}
PROMPT = as_token_ids([1, 2, 3])
USAGE = {"choices": [], "usage": {"prompt_tokens": 3}}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(eos_token_id=7).save_pretrained(path)
    return path


class FakeVLLM:
    """Fake vLLM server that always samples token 4, with vLLM's raw log-probs."""

    def __init__(self, **changes: Any) -> None:
        self.version: str | None = "0.32.0"
        self.max_model_len = 64
        self.has_scale_out = True
        self.is_healthy = True
        self.reply: Any = None
        """JSON that is returned instead of a completion, if it is not None."""
        self.requests: list[dict[str, Any]] = []
        for name, value in changes.items():
            setattr(self, name, value)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/version" if self.version:
                return web.json_response({"version": self.version})
            case "/v1/models":
                model = {"id": "tiny", "root": "/models/tiny", "max_model_len": self.max_model_len}
                return web.json_response({"data": [model]})
            case "/health" if self.is_healthy:
                return web.Response()
            case "/inference/v1/generate" if self.has_scale_out:
                return self._generate(await request.json())
            case "/health":
                return web.Response(status=503)
            case _:
                return web.Response(status=404)

    def _generate(self, body: dict[str, Any]) -> web.Response:
        self.requests.append(body)
        if not body.get("stream"):
            return web.json_response(self._completion())
        if not self.is_healthy:
            return web.Response(status=500, text="EngineDeadError")
        events = [self.reply] if self.reply is not None else [self._completion(), USAGE]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text + "data: [DONE]\n\n", content_type="text/event-stream")

    def _completion(self) -> dict[str, Any]:
        total = math.log(sum(map(math.exp, LOGITS.values())))
        top = [{"token_id": token, "logprob": value - total} for token, value in LOGITS.items()]
        content = [{**top[0], "top_logprobs": top}]
        choice = {
            "index": 0,
            "token_ids": [4],
            "logprobs": {"content": content},
            "finish_reason": "length",
            "weight_versions": [{"version": "default", "start": 0, "end": 1}],
        }
        return {"choices": [choice]}


@asynccontextmanager
async def client_of(
    fake: FakeVLLM, model_path: Path, *, engine_kwargs: Mapping[str, Any] | None = None
) -> AsyncGenerator[VLLMClient]:
    """Yield a client that has not been started."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    spec = ServerSpec(
        name="vllm-0",
        model=ModelConfig(path=str(model_path)),
        max_model_len=64,
        url=f"http://{host}:{port}",
        engine_kwargs=engine_kwargs or {},
    )
    client = VLLMClient.create(spec)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "0.9.1"}, r"runs vLLM 0\.9\.1, but only"),
        ({"version": None}, "does not report a version of vLLM"),
        ({"max_model_len": 32}, "start it with --max-model-len 64"),
        ({"has_scale_out": False}, "start it with --enable-scale-out"),
    ],
)
async def test_an_unsuitable_server_is_refused_with_a_remedy(
    model_path: Path, changes: dict[str, Any], message: str
) -> None:
    async with client_of(FakeVLLM(**changes), model_path) as client:
        with pytest.raises(ConfigError, match=message):
            await client.start()


async def test_a_server_of_another_model_is_refused_unless_the_model_is_named(
    model_path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    tiny_model().save_pretrained(other)

    async with client_of(FakeVLLM(), other) as client:
        with pytest.raises(ConfigError, match="serves 'tiny', not 'other'"):
            await client.start()
    async with client_of(FakeVLLM(), other, engine_kwargs={"served_model_name": "tiny"}) as client:
        await client.start()


def test_an_unknown_option_is_refused(model_path: Path) -> None:
    spec = ServerSpec(
        name="vllm-0",
        model=ModelConfig(path=str(model_path)),
        max_model_len=64,
        url="http://localhost:1",
        engine_kwargs={"served_model": "x"},
    )
    with pytest.raises(ConfigError, match="did you mean 'served_model_name'"):
        VLLMClient.create(spec)


async def test_raw_logprobs_are_returned_only_if_they_are_exact(model_path: Path) -> None:
    fake = FakeVLLM()
    async with client_of(fake, model_path) as client:
        await client.start()
        assert client.abilities == {Ability.SEED, Ability.STREAMING, Ability.SCORE, *CONSTRAINT_ABILITIES}
        exact = await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")
        other = await client.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.5), "a")
        assert (exact.token_ids, exact.stop_reason, exact.weight_version) == ([4], "length", 0)
        assert exact.log_probs is not None
        assert other.log_probs is None
        sampling = fake.requests[-1]["sampling_params"]
        assert (sampling["temperature"], sampling["stop_token_ids"]) == (0.5, [7])


async def test_weights_are_refused_without_the_worker_extension_and_the_error_names_the_flags(
    model_path: Path,
) -> None:
    async with client_of(FakeVLLM(), model_path) as client:
        await client.start()
        with pytest.raises(WeightsError, match=r"VLLM_SERVER_DEV_MODE=1 .* --worker-extension-cls"):
            await client.update_weights([], weight_version=1)


async def test_a_dead_engine_behind_a_live_http_server_raises_server_died(model_path: Path) -> None:
    fake = FakeVLLM()
    async with client_of(fake, model_path) as client:
        await client.start()
        fake.is_healthy = False
        with pytest.raises(ServerDied, match=r"server vllm-0 request a: .* is not healthy any more"):
            await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")
        assert not (await client.health()).is_alive


async def test_an_invalid_reply_raises_an_error_and_the_session_can_continue(model_path: Path) -> None:
    fake = FakeVLLM()
    async with client_of(fake, model_path) as client:
        await client.start()
        fake.reply = {"choices": "none"}
        with pytest.raises(BadServerReply, match="server vllm-0 request a"):
            await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")
        fake.reply = None
        assert (await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")).token_ids == [4]
        await client.sleep()
        with pytest.raises(ServerError, match="asleep"):
            await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")
        await client.close()
        with pytest.raises(ServerError, match="closed"):
            await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")
