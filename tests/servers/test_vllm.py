"""Tests of the vLLM servers without vLLM: their parts, and the client with a fake of vLLM's HTTP API."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from agent_loop.config import ModelConfig
from agent_loop.errors import (
    BadServerReply,
    ConfigError,
    SamplingParamsError,
    ServerDied,
    ServerError,
    WeightsError,
)
from agent_loop.servers import process
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.engine_client import EngineLoad, stamped
from agent_loop.servers.vllm import VLLMClient, VLLMServer
from agent_loop.servers.vllm.client import read_load
from agent_loop.servers.vllm.limits import ModelInfo, VLLMRequestLimits
from agent_loop.servers.vllm.logprobs import (
    CONSTRAINT_ABILITIES,
    SAMPLING_ABILITIES,
    LogProbs,
    identify_logprobs,
)
from agent_loop.servers.vllm.options import engine_options
from agent_loop.servers.vllm.replies import read_stream
from agent_loop.servers.vllm.worker import FullLogProbsStage, WeightWorker, return_full_logits
from agent_loop.types import SamplingParams, TokenChunk, as_token_ids
from tests.servers.harness import http_server
from tests.servers.tiny_embedded import tiny_model

PROMPT = as_token_ids([1, 2, 3])
PLAIN = SamplingParams()


def spec(*, path: Path | str = "m", url: str | None = None, **engine_kwargs: Any) -> ServerSpec:
    model = ModelConfig(path=str(path))
    return ServerSpec("vllm-0", model, max_model_len=64, seed=3, url=url, engine_kwargs=engine_kwargs)


# -- options and limits ------------------------------------------------------------------------------------------------


def test_engine_kwargs_are_passed_to_vllm_with_the_options_of_the_configuration() -> None:
    options = engine_options(spec(gpu_memory_utilization=0.5, tensor_parallel_size=2))
    assert options["tensor_parallel_size"] == 2
    assert (options["model"], options["max_model_len"], options["seed"]) == ("m", 64, 3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_model_len": 128}, "rollout.prompt_length and rollout.response_length makes it 64|make"),
        ({"logprobs_mode": "raw_logprobs"}, "this server needs 'processed_logprobs'"),
        ({"enable_prefix_caching": False}, "leave it out"),
        ({"speculative_config": {}}, "log-probs of accepted drafts"),
        ({"max_logprobs": 7}, "max_logprobs is 7, but this server needs 31"),
    ],
)
def test_an_option_that_contradicts_the_server_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(replace(spec(**kwargs), sampling=SamplingParams(top_logprobs=30)))


@pytest.mark.parametrize(
    ("num_top", "kwargs", "expected"),
    [(20, {}, -1), (5, {"max_logprobs": 7}, 7), (30, {"max_logprobs": -1}, -1)],
)
def test_an_engine_is_started_with_the_number_of_logprobs_that_requests_need(
    num_top: int, kwargs: dict[str, Any], expected: int
) -> None:
    needing = replace(spec(**kwargs), sampling=SamplingParams(top_logprobs=num_top))
    assert engine_options(needing)["max_logprobs"] == expected


def test_without_vllm_the_error_states_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "installed_version", lambda package: None)
    with pytest.raises(ConfigError, match=r"pip install .vllm>=0\.32"):
        VLLMServer.create(spec())
    monkeypatch.setattr(process, "installed_version", lambda package: "0.9.1")
    with pytest.raises(ConfigError, match=r"vllm 0\.9\.1 is installed, but only"):
        VLLMServer.create(spec())


def test_the_load_is_read_from_the_metrics_page() -> None:
    page = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 7.5e-01
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
"""
    assert read_load(page) == EngineLoad(kv_cache_share=0.75, num_waiting=3)
    assert read_load("") == EngineLoad()


def test_end_tokens_are_read_from_the_models_files(tmp_path: Path) -> None:
    model = tiny_model(eos_token_id=5)
    model.generation_config.eos_token_id = [5, 6]
    model.save_pretrained(tmp_path)
    assert ModelInfo.read(ModelConfig(path=str(tmp_path))).eos_token_ids == (5, 6)
    with pytest.raises(ConfigError, match="no readable configuration"):
        ModelInfo.read(ModelConfig(path=str(tmp_path / "nothing")))


@pytest.mark.parametrize(("num_positions", "context"), [(512, 193), (193, 193), (192, 192), (0, 192)])
def test_scores_get_one_further_token_of_context_if_the_model_has_the_position(
    num_positions: int, context: int
) -> None:
    model = ModelInfo(vocab_size=9, eos_token_ids=(), num_positions=num_positions)
    assert model.context_for_scores(192) == context


def sampling(*, abilities: Any = SAMPLING_ABILITIES, **params: Any) -> dict[str, Any]:
    model = ModelInfo(vocab_size=50, eos_token_ids=(7, 9))
    limits = VLLMRequestLimits(server="vllm-0", max_model_len=20, model=model, abilities=frozenset(abilities))
    return limits.sampling("r", prompt_ids=PROMPT, params=SamplingParams(**params), attachments=())


def test_end_tokens_are_stop_tokens_unless_ignore_eos_is_set() -> None:
    assert sampling(stop_token_ids=(3,))["stop_token_ids"] == [3, 7, 9]
    assert sampling(stop_token_ids=(3,), ignore_eos=True)["stop_token_ids"] == [3]
    assert sampling()["ignore_eos"] is True


@pytest.mark.parametrize("params", [{"temperature": 0.005}, {"temperature": 2.5}, {"min_p": 0.1}])
def test_parameters_that_vllm_would_round_or_return_inexact_logprobs_for_are_refused(params: Any) -> None:
    with pytest.raises(SamplingParamsError, match="vLLM"):
        sampling(**params)


def test_schemas_and_penalties_are_passed_to_vllm_under_its_names() -> None:
    able = {*SAMPLING_ABILITIES, *CONSTRAINT_ABILITIES}
    assert sampling(abilities=able, json_schema="{}")["structured_outputs"] == {"json": "{}"}
    penalised = sampling(abilities=able, presence_penalty=0.5, repetition_penalty=1.1)
    assert (penalised["presence_penalty"], penalised["repetition_penalty"]) == (0.5, 1.1)
    absent = {"structured_outputs", "presence_penalty", "frequency_penalty"}
    assert not absent & sampling(abilities=able).keys()
    with pytest.raises(SamplingParamsError, match="without a stop token"):
        sampling(abilities=able, json_schema="{}", ignore_eos=True)
    with pytest.raises(SamplingParamsError, match="begin with the request"):
        sampling(abilities=able, json_schema="{}", num_sampled=1)


# -- log-probs ---------------------------------------------------------------------------------------------------------

LOGITS = {1: 2.0, 2: 0.5, 3: -1.0}


def log_softmax(temperature: float, logits: dict[int, float] = LOGITS) -> dict[int, float]:
    total = math.log(sum(math.exp(value / temperature) for value in logits.values()))
    return {token: value / temperature - total for token, value in logits.items()}


@pytest.mark.parametrize(
    ("hot_top_1", "kind"),
    [
        (log_softmax(2.0), LogProbs.SCALED),
        (log_softmax(1.0), LogProbs.RAW),
        ({1: 0.0, 2: -9999.0, 3: -math.inf}, LogProbs.PROCESSED),
        ({1: 0.0}, LogProbs.PROCESSED),
        (log_softmax(0.3), LogProbs.UNKNOWN),
        ({1: -1.0, 8: -2.0, 9: -3.0}, LogProbs.UNKNOWN),
    ],
)
def test_the_kind_of_logprobs_is_identified(hot_top_1: dict[int, float], kind: LogProbs) -> None:
    assert identify_logprobs(log_softmax(1.0), hot_top_1) == kind


def test_the_kind_of_logprobs_is_unknown_if_the_model_is_uncertain() -> None:
    flat = {1: -1.0, 2: -1.001}
    assert identify_logprobs(flat, flat) == LogProbs.UNKNOWN


@pytest.mark.parametrize(
    ("kind", "params", "is_exact"),
    [
        (LogProbs.SCALED, {"temperature": 0.7, "top_p": 0.5}, True),
        (LogProbs.RAW, {"temperature": 1.0, "top_p": 0.5}, True),
        (LogProbs.RAW, {"temperature": 0.0}, True),
        (LogProbs.RAW, {"temperature": 0.7}, False),
        (LogProbs.PROCESSED, {"temperature": 0.7}, True),
        (LogProbs.PROCESSED, {"temperature": 1.0, "top_p": 0.9}, False),
        (LogProbs.PROCESSED, {"temperature": 1.0, "top_k": 5}, False),
        (LogProbs.PROCESSED, {"temperature": 0.0, "top_k": 5}, True),
        (LogProbs.UNKNOWN, {}, False),
        (LogProbs.RAW, {"json_schema": "{}"}, True),
        (LogProbs.RAW, {"frequency_penalty": 0.5}, False),
        (LogProbs.PROCESSED, {"frequency_penalty": 0.5}, True),
    ],
)
def test_logprobs_are_returned_only_where_they_are_exact(kind: LogProbs, params: Any, is_exact: bool) -> None:
    assert kind.are_exact(SamplingParams(**params)) is is_exact


class ArgmaxStage(torch.nn.Module):
    """Last stage of a sampler, which samples the likeliest token and overwrites the logits."""

    def __init__(self, logprobs_mode: str = "processed_logprobs", use_fp64_gumbel: bool = False) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode

    def forward(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, None]:
        chosen = logits.argmax(-1)
        logits.fill_(-math.inf)
        return chosen, None


def test_both_samplers_return_logprobs_from_before_top_k() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    sampler = SimpleNamespace(topk_topp_sampler=ArgmaxStage())
    stage: Any = FullLogProbsStage.wrap(sampler)
    sampler.topk_topp_sampler = stage
    assert FullLogProbsStage.wrap(sampler) is stage
    sampled, logprobs = stage(logits.clone(), {}, None, None)
    assert sampled.tolist() == [1]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1))
    assert stage.inner.logprobs_mode == "raw_logprobs"

    wrapped = return_full_logits(lambda given, *args: (given.argmax(-1), given.fill_(-math.inf)))
    assert return_full_logits(wrapped) is wrapped
    _, before = wrapped(logits.clone(), None)
    torch.testing.assert_close(before, logits)


def test_a_worker_returns_an_error_for_an_invalid_handle_and_does_not_raise() -> None:
    worker = WeightWorker()
    worker.rank, worker.model_runner = 0, SimpleNamespace(device=torch.device("cpu"))
    result = worker.agent_loop_load_weights("no handle")
    assert result["is_unchanged"] is True
    assert "weight handle" in result["error"]


# -- streams -----------------------------------------------------------------------------------------------------------


def entry(token_id: int, logprob: float, **more: Any) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob, **more}


SPAN = ("version", "start", "end")


def event(*token_ids: int, reason: Any = None, spans: Any = None, **changes: Any) -> dict[str, Any]:
    """Return an event of a stream in vLLM's format. The log-prob of token t is -t."""
    choice = {
        "index": 0,
        "token_ids": list(token_ids),
        "logprobs": {"content": [entry(token, -float(token)) for token in token_ids]},
        "finish_reason": reason,
        "weight_versions": spans and [dict(zip(SPAN, each, strict=True)) for each in spans],
    }
    return {"choices": [{**choice, **changes}]}


USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}


async def each_of(values: Sequence[Any]) -> AsyncGenerator[Any]:
    for value in values:
        yield value


def read(
    *events: Any, has_logprobs: bool = True, params: SamplingParams = PLAIN
) -> list[tuple[TokenChunk, Sequence[int]]]:
    async def main() -> list[tuple[TokenChunk, Sequence[int]]]:
        replies = read_stream(
            each_of(events), params=params, has_logprobs=has_logprobs, server="vllm-0", request_id="r"
        )
        return [reply async for reply in replies]

    return asyncio.run(main())


def test_tokens_logprobs_versions_and_cached_tokens_are_read_from_a_stream() -> None:
    (first, _), (last, versions) = read(
        event(4), event(5, reason="stop", spans=[("2", 0, 1), ("3", 1, 2)]), USAGE
    )
    assert (first.token_ids, first.logprobs, first.stop_reason) == ([4], [-4.0], None)
    assert (last.token_ids, last.logprobs, last.stop_reason) == ([5], [-5.0], "stop")
    assert (last.num_cached_tokens, last.num_preempted, versions) == (32, 1, [2, 3])
    assert read(event(4, reason="abort"), has_logprobs=False)[0][0].logprobs is None
    assert read(event(reason="abort"))[0][0].stop_reason == "aborted"


@pytest.mark.parametrize(
    "invalid",
    [
        None,
        {},
        event(4, token_ids=["x"]),
        event(4, reason="error"),
        event(4, logprobs=None),
        event(4, token_ids=[6]),
        event(4, weight_versions=[{"version": "1"}]),
    ],
)
def test_an_invalid_event_is_refused_with_the_name_of_the_request(invalid: Any) -> None:
    with pytest.raises(BadServerReply, match="server vllm-0 request r"):
        read(invalid)


def test_an_error_in_a_stream_fails_the_request() -> None:
    with pytest.raises(ServerError, match="EngineDeadError"):
        read(event(4), {"error": {"message": "EngineDeadError"}})


def test_the_likeliest_tokens_exclude_a_sampled_token_with_a_lower_rank() -> None:
    content = [
        entry(4, -0.5, top_logprobs=[entry(4, -0.5), entry(8, -1.5), entry(9, -4.0)]),
        entry(5, -3.0, top_logprobs=[entry(5, -3.0), entry(6, -1.0), entry(7, -2.0)]),
    ]
    params = SamplingParams(top_logprobs=2)
    whole = event(4, 5, reason="stop", logprobs={"content": content})
    ((chunk, _),) = read(whole, params=params)
    assert chunk.logprobs == [-0.5, -3.0]
    assert chunk.extras["top_token_ids"].tolist() == [[4, 8], [6, 7]]
    assert chunk.extras["top_logprobs"].tolist() == [[-0.5, -1.5], [-1.0, -2.0]]
    assert not read(whole, params=params, has_logprobs=False)[0][0].extras
    for top in ([], [entry(4, -0.5)]):
        broken = [entry(4, -0.5, top_logprobs=top), content[1]]
        with pytest.raises(BadServerReply):
            read(event(4, 5, reason="stop", logprobs={"content": broken}), params=params)


def part(*token_ids: int, reason: Any = None, versions: Sequence[int] = ()) -> tuple[TokenChunk, Any]:
    return TokenChunk(list(token_ids), [-1.0] * len(token_ids), stop_reason=reason), versions


@pytest.mark.parametrize(
    ("parts", "versions", "expected"),
    [
        pytest.param(
            [part(1), part(2, 3), part(4, reason="stop", versions=[5, 5, 5, 5])],
            [5],
            [([1], 5), ([2, 3], 5), ([4], 5)],
            id="no update, no delay",
        ),
        pytest.param(
            [part(1), part(2), part(3), part(4, reason="stop", versions=[5, 5, 5, 6])],
            [5, 5, 6],
            [([1], 5), ([2, 3], 5), ([4], 6)],
            id="after an update, the engine's versions",
        ),
        pytest.param(
            [part(1), part(reason="aborted", versions=[5])],
            [5],
            [([1], 5), ([], 5)],
            id="no tokens at the end",
        ),
        pytest.param([part(reason="aborted")], [5], [([], 5)], id="no tokens"),
    ],
)
def test_tokens_get_the_versions_that_the_engine_reports(parts: Any, versions: Any, expected: Any) -> None:
    """Each read of the server's current version returns the next of `versions`."""
    reads = iter(versions)

    async def main() -> list[TokenChunk]:
        stream = stamped(each_of(parts), current_version=lambda: next(reads, versions[-1]))
        return [chunk async for chunk in stream]

    chunks = asyncio.run(main())
    assert [(chunk.token_ids, chunk.weight_version) for chunk in chunks] == expected
    assert [c.stop_reason for c in chunks] == [None] * (len(chunks) - 1) + [parts[-1][0].stop_reason]


# -- the client --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(eos_token_id=7).save_pretrained(path)
    return path


class FakeVLLM:
    """Fake vLLM server that always samples token 4, with vLLM's raw log-probs."""

    version: str | None = "0.32.0"
    max_model_len = 64
    has_scale_out = True
    is_healthy = True
    reply: Any = None
    """JSON that is returned instead of a completion, if it is not None."""

    def __init__(self, **changes: Any) -> None:
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
            case "/health":
                return web.Response(status=200 if self.is_healthy else 503)
            case "/inference/v1/generate" if self.has_scale_out:
                return self._generate(await request.json())
            case _:
                return web.Response(status=404)

    def _generate(self, body: dict[str, Any]) -> web.Response:
        self.requests.append(body)
        top = [entry(token + 3, logprob) for token, logprob in log_softmax(1.0).items()]
        content = [{**top[0], "top_logprobs": top}]
        completion = event(4, reason="length", spans=[("default", 0, 1)], logprobs={"content": content})
        if not body.get("stream"):
            return web.json_response(completion)
        if not self.is_healthy:
            return web.Response(status=500, text="EngineDeadError")
        events = [completion, USAGE] if self.reply is None else [self.reply]
        text = "".join(f"data: {json.dumps(each)}\n\n" for each in events)
        return web.Response(text=text + "data: [DONE]\n\n", content_type="text/event-stream")


@asynccontextmanager
async def client_of(fake: FakeVLLM, path: Path, **engine_kwargs: Any) -> AsyncGenerator[VLLMClient]:
    """Yield a client that has not been started."""
    async with http_server(fake.answer) as url:
        client = VLLMClient.create(spec(path=path, url=url, **engine_kwargs))
        try:
            yield client
        finally:
            await client.close()


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


async def test_a_server_of_another_model_is_refused_unless_the_model_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model().save_pretrained(other)
    async with client_of(FakeVLLM(), other) as client:
        with pytest.raises(ConfigError, match="serves 'tiny', not 'other'"):
            await client.start()
    async with client_of(FakeVLLM(), other, served_model_name="tiny") as client:
        await client.start()
    with pytest.raises(ConfigError, match="did you mean 'served_model_name'"):
        VLLMClient.create(spec(path=other, url="http://localhost:1", served_model="x"))


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
        with pytest.raises(WeightsError, match=r"VLLM_SERVER_DEV_MODE=1 .* --worker-extension-cls"):
            await client.update_weights([], weight_version=1)


async def test_a_request_fails_with_the_reason_and_the_session_can_continue(model_path: Path) -> None:
    fake = FakeVLLM()
    async with client_of(fake, model_path) as client:
        await client.start()

        async def ask() -> list[int]:
            return (await client.generate(PROMPT, SamplingParams(max_tokens=1), "a")).token_ids

        fake.reply = {"choices": "none"}
        with pytest.raises(BadServerReply, match="server vllm-0 request a"):
            await ask()
        fake.reply = None
        assert await ask() == [4]
        await client.sleep()
        with pytest.raises(ServerError, match="asleep"):
            await ask()
        await client.wake_up()
        fake.is_healthy = False
        with pytest.raises(ServerDied, match=r"server vllm-0 request a: .* is not healthy any more"):
            await ask()
        assert not (await client.health()).is_alive
        await client.close()
        with pytest.raises(ServerError, match="closed"):
            await ask()
