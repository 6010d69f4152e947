"""Parts of the SGLang servers that can be tested without SGLang."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec import structs

from agent_loop.config import ModelConfig
from agent_loop.errors import (
    BadServerReply,
    ConfigError,
    SamplingParamsError,
    ServerError,
    WeightsError,
)
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.engine_client import stamp
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.sglang import SGLangClient, loader
from agent_loop.servers.sglang.requests import (
    CONSTRAINT_ABILITIES,
    check_params,
    generate_body,
    needs_own_stop,
    read_reply,
    schema_errors,
)
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput, as_token_ids
from agent_loop.weights.sender import WeightSender
from tests.servers.tiny_embedded import tiny_model

PROMPT = np.array([5, 6, 7], dtype=np.int32)


def event(
    token_ids: list[int],
    *,
    total: int | None = None,
    finish: dict[str, Any] | None = None,
    versions: list[tuple[str, int, int]] | None = None,
) -> dict[str, Any]:
    """Return a reply in SGLang's format."""
    return {
        "output_ids": token_ids,
        "meta_info": {
            "finish_reason": finish,
            "completion_tokens": len(token_ids) if total is None else total,
            "output_token_logprobs": [[-0.1 * token, token, None] for token in token_ids],
            "weight_version": "3",
            "weight_versions": [
                {"version": version, "start": start, "end": end} for version, start, end in versions or ()
            ],
            "num_retractions": 1,
            "cached_tokens": 2,
        },
    }


def joined(events: list[dict[str, Any]]) -> TokenOutput:
    num_read, chunks = 0, list[TokenChunk]()
    for each in events:
        chunk, versions = read_reply(each, num_seen=num_read, server="s", request_id="r")
        chunks += stamp(chunk, first=num_read, weight_versions=versions)
        num_read += len(chunk.token_ids)
    return TokenOutput.from_chunks(chunks)


def test_a_cumulative_and_an_incremental_stream_are_read_alike() -> None:
    stop = {"type": "stop", "matched": 4}
    versions = [("3", 0, 3)]
    cumulative = [event([2]), event([2, 3]), event([2, 3, 4], finish=stop, versions=versions)]
    incremental = [
        event([2], total=1),
        event([3], total=2),
        event([4], total=3, finish=stop, versions=versions),
    ]
    output = joined(cumulative)
    assert output == joined(incremental)
    assert (output.token_ids, output.stop_reason, output.weight_version) == ([2, 3, 4], "stop", 3)
    assert output.log_probs == pytest.approx([-0.2, -0.3, -0.4])
    assert (output.num_preempted, output.num_cached_tokens) == (1, 2)


def test_tokens_have_the_weight_version_that_sampled_them() -> None:
    finish = {"type": "length", "length": 4}
    whole = event([1, 2, 3, 4], finish=finish, versions=[("7", 0, 3), ("8", 3, 4)])
    output = joined([whole])
    assert [(c.weight_version, len(c.token_ids)) for c in output.chunks] == [(7, 3), (8, 1)]
    assert (output.weight_version, output.stop_reason) == (8, "length")


@pytest.mark.parametrize(
    "invalid",
    [
        None,
        [],
        {},
        {"meta_info": {}, "output_ids": []},
        event([1], total=5),
        event([1], finish={"type": "coffee"}),
        {**event([1]), "output_ids": [2]},
    ],
)
def test_an_invalid_reply_is_refused_with_the_name_of_the_request(invalid: Any) -> None:
    with pytest.raises(BadServerReply, match="server s request r"):
        read_reply(invalid, num_seen=0, server="s", request_id="r")


def test_a_request_that_the_engine_aborts_with_an_error_fails() -> None:
    finish = {"type": "abort", "message": "out of memory", "status_code": 500}
    with pytest.raises(ServerError, match="out of memory"):
        read_reply(event([], finish=finish), num_seen=0, server="s", request_id="r")
    with pytest.raises(ServerError, match="too long"):
        read_reply({"error": {"message": "too long"}}, num_seen=0, server="s", request_id="r")


def test_top_k_of_one_keeps_the_temperature_of_the_logprobs() -> None:
    params = SamplingParams(temperature=0.7, top_k=1)
    sampling = generate_body(PROMPT, params, rid="x", max_new_tokens=4)["sampling_params"]
    assert (sampling["top_k"], sampling["temperature"]) == (-1, 0.7)
    assert sampling["top_p"] < 1e-3


def test_parameters_that_sglang_returns_inexact_logprobs_for_are_refused_by_name() -> None:
    for params, name in (
        (SamplingParams(repetition_penalty=1.1), "repetition_penalty"),
        (SamplingParams(temperature=1e-6), "temperature"),
        (SamplingParams(json_schema="{}"), "skip_tokenizer_init=false"),
        (SamplingParams(seed=1), "seed"),
    ):
        with pytest.raises(SamplingParamsError, match=name):
            check_params(params, abilities=CONSTRAINT_ABILITIES, server="sglang-0")
    assert needs_own_stop(SamplingParams(ignore_eos=True, stop_token_ids=(3,)))
    assert not needs_own_stop(SamplingParams(stop_token_ids=(3,)))


class FakeSGLang:
    """Fake of SGLang's HTTP API whose weight updates last until `may_load` is set."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.loads, self.may_load = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else {}
        if request.path == "/generate" and not body["stream"]:  # a probe of the log-probs
            gaps = [[-each / body["sampling_params"]["temperature"], each] for each in range(4)]
            return web.json_response({"meta_info": {"output_token_ids_logprobs": [gaps]}})
        self.paths.append(request.path)
        if request.path == "/update_weights_from_disk":
            self.loads.set()
            await self.may_load.wait()
        if request.path == "/generate":
            return web.Response(text=f"data: {json.dumps(event([4], finish={'type': 'stop'}))}\n\n")
        return web.json_response({"version": "0.5.23", "weight_version": "0", "loads": []})


async def test_no_request_is_sent_during_a_weight_update_and_an_aborted_one_is_never_sent(
    tmp_path: Path,
) -> None:
    model, fake = tiny_model(), FakeSGLang()
    model.save_pretrained(tmp_path)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    async with TestServer(app) as http:
        client = SGLangClient.create(spec(url=str(http.make_url("/")), model=ModelConfig(path=str(tmp_path))))
        await client.start()
        async with asyncio.TaskGroup() as group:
            update = group.create_task(client.update_weights(model.named_parameters(), weight_version=3))
            await fake.loads.wait()
            waiting, aborted = (
                group.create_task(client.generate(PROMPT, SamplingParams(), name)) for name in "ab"
            )
            await asyncio.sleep(0)
            await client.abort("b")
            assert (await client.health()).num_waiting == 2
            assert "/generate" not in fake.paths
            fake.may_load.set()
            await update
        assert (waiting.result().token_ids, waiting.result().weight_version) == ([4], 3)
        assert (aborted.result().token_ids, aborted.result().stop_reason) == ([], "aborted")
        assert fake.paths.count("/generate") == 1
        await client.close()


class FakeModel:
    """Stub of a SGLang model, which loads weights."""

    def __init__(self, *, fails: bool = False) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self._fails = fails

    def parameters(self) -> Any:
        return iter([torch.zeros(1)])

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            self.loaded[name] = weight.clone()
            if self._fails:
                raise ValueError("no room")


def test_the_loader_loads_published_weights_and_reports_the_result(tmp_path: Path) -> None:
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    with WeightSender("shared_memory") as sender, sender.offer(weights.items(), weight_version=4) as handle:
        payload = loader.payload(handle.to_json(), report_folder=tmp_path)
        model, broken = FakeModel(), FakeModel(fails=True)
        loader.load(model, _named(payload))
        assert loader.read_reports(tmp_path) == [("", False)]
        loader.load(broken, _named(payload))
        assert loader.read_reports(tmp_path) == [("ValueError: no room", True)]
    assert all(torch.equal(model.loaded[name], weight) for name, weight in weights.items())
    loader.load(model, _named(payload))
    ((error, is_mixed),) = loader.read_reports(tmp_path)
    assert error
    assert not is_mixed


def _named(payload: str) -> Any:
    return pickle.loads(base64.b64decode(payload))


def spec(**changes: Any) -> ServerSpec:
    return ServerSpec(**{"name": "sglang-0", "model": ModelConfig(path="m"), "max_model_len": 64, **changes})


def test_a_client_refuses_options_of_an_engine() -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="server_urls"):
        SGLangClient.create(spec())
    with pytest.raises(ConfigError, match="did you mean 'api_key'"):
        SGLangClient.create(spec(url=url, engine_kwargs={"apikey": "x"}))
    with pytest.raises(ConfigError, match="shared_memory"):
        SGLangClient.create(spec(url=url, weight_transfer="shared_memory"))


async def test_a_server_that_was_not_started_refuses_and_can_be_closed() -> None:
    server = SGLangClient.create(spec(url="http://127.0.0.1:1"))
    with pytest.raises(ServerError, match="not started"):
        await server.generate(PROMPT, SamplingParams(), "r")
    assert not (await server.health()).is_alive
    await server.close()
    with pytest.raises(ServerError, match="closed"):
        await server.generate(PROMPT, SamplingParams(), "r")


def test_weights_of_a_model_without_local_files_are_refused() -> None:
    async def scenario() -> None:
        publisher = WeightPublisher(
            ModelConfig(path="no/such-model"), transfer="auto", is_same_host=True, num_receivers=1
        )
        async with publisher.offer([("a", torch.ones(2))], weight_version=1):
            pass

    with pytest.raises(WeightsError, match="not on this machine"):
        asyncio.run(scenario())


def test_the_likeliest_tokens_are_requested_and_read_with_the_sampled_tokens() -> None:
    params = SamplingParams(top_logprobs=2)
    body = generate_body(as_token_ids([1]), params, rid="r", max_new_tokens=3)
    assert body["top_logprobs_num"] == 2
    assert "top_logprobs_num" not in generate_body(
        as_token_ids([1]), SamplingParams(), rid="r", max_new_tokens=3
    )
    top = [[[-0.1 * n, n, None], [-0.2 * n, n + 10, None]] for n in range(1, 5)]
    first, rest = event([1, 2]), event([1, 2, 3, 4], finish={"type": "length"})
    first["meta_info"]["output_top_logprobs"], rest["meta_info"]["output_top_logprobs"] = top[:2], top
    output = joined([first, rest])
    assert output.extras["top_token_ids"].tolist() == [[1, 11], [2, 12], [3, 13], [4, 14]]
    assert output.extras["top_logprobs"][3].tolist() == pytest.approx([-0.4, -0.8])
    rest["meta_info"]["output_top_logprobs"] = [*top[:3], top[3][:1]]
    with pytest.raises(BadServerReply):
        joined([rest])


def test_schemas_penalties_and_min_p_are_sent_under_the_names_of_sglang() -> None:
    params = SamplingParams(json_schema="{}", presence_penalty=0.5, frequency_penalty=-0.5, min_p=0.1)
    sampling = generate_body(PROMPT, params, rid="x", max_new_tokens=4)["sampling_params"]
    sent = {"json_schema": "{}", "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_p": 0.1}
    assert sent.items() <= sampling.items()
    plain = generate_body(PROMPT, SamplingParams(), rid="x", max_new_tokens=4)
    assert not sent.keys() & plain["sampling_params"].keys()
    abilities = CONSTRAINT_ABILITIES | {Ability.JSON_SCHEMA}
    check_params(params, abilities=abilities, server="sglang-0")
    for refused, message in (
        (structs.replace(params, ignore_eos=True), "leave out one"),
        (structs.replace(params, num_sampled=2), "begin with the request"),
    ):
        with pytest.raises(SamplingParamsError, match=message):
            check_params(refused, abilities=abilities, server="sglang-0")


def test_a_grammar_that_sglang_cannot_compile_is_the_fault_of_the_request() -> None:
    finish = {"type": "abort", "message": "Failed to compile json grammar: bad", "status_code": 400}
    reply = event([5], finish=finish)
    # SGLang reports log-probs for no token of such a request.
    reply["meta_info"]["output_token_logprobs"] = []
    refused = pytest.raises(SamplingParamsError, match="json grammar: bad; fix the schema")
    with refused, schema_errors(SamplingParams(json_schema="{}")):
        read_reply(reply, num_seen=0, server="s", request_id="r")
    with pytest.raises(ServerError), schema_errors(SamplingParams()):
        read_reply(reply, num_seen=0, server="s", request_id="r")
