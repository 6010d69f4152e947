"""Tests of the SGLang servers without SGLang: their parts, and the client with a fake of SGLang's HTTP API."""

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
from msgspec import structs

from agent_loop.config import ModelConfig
from agent_loop.errors import BadServerReply, ConfigError, SamplingParamsError, ServerError
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.engine_client import stamp
from agent_loop.servers.sglang import SGLangClient, loader
from agent_loop.servers.sglang.requests import (
    CONSTRAINT_ABILITIES,
    check_params,
    generate_body,
    needs_own_stop,
    read_reply,
    read_scores,
    schema_errors,
    score_body,
)
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput, as_token_ids
from agent_loop.weights.sender import WeightSender
from tests.servers.harness import http_server
from tests.servers.tiny_embedded import tiny_model

PROMPT = np.array([5, 6, 7], dtype=np.int32)


def event(
    token_ids: list[int],
    *,
    total: int | None = None,
    finish: dict[str, Any] | None = None,
    versions: list[tuple[str, int, int]] | None = None,
    **meta: Any,
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
            **meta,
        },
    }


def read(reply: Any, *, num_seen: int = 0) -> Any:
    return read_reply(reply, num_seen=num_seen, server="s", request_id="r")


def joined(*events: dict[str, Any]) -> TokenOutput:
    num_read, chunks = 0, list[TokenChunk]()
    for each in events:
        chunk, versions = read(each, num_seen=num_read)
        chunks += stamp(chunk, first=num_read, weight_versions=versions)
        num_read += len(chunk.token_ids)
    return TokenOutput.from_chunks(chunks)


# -- replies -----------------------------------------------------------------------------------------------------------


def test_a_cumulative_and_an_incremental_stream_are_read_alike() -> None:
    last: dict[str, Any] = {"finish": {"type": "stop", "matched": 4}, "versions": [("3", 0, 3)]}
    output = joined(event([2]), event([2, 3]), event([2, 3, 4], **last))
    assert output == joined(event([2], total=1), event([3], total=2), event([4], total=3, **last))
    assert (output.token_ids, output.stop_reason, output.weight_version) == ([2, 3, 4], "stop", 3)
    assert output.log_probs == pytest.approx([-0.2, -0.3, -0.4])
    assert (output.num_preempted, output.num_cached_tokens) == (1, 2)


def test_tokens_have_the_weight_version_that_sampled_them() -> None:
    versions = [("7", 0, 3), ("8", 3, 4)]
    output = joined(event([1, 2, 3, 4], finish={"type": "length", "length": 4}, versions=versions))
    assert [(c.weight_version, len(c.token_ids)) for c in output.chunks] == [(7, 3), (8, 1)]
    assert (output.weight_version, output.stop_reason) == (8, "length")


@pytest.mark.parametrize(
    "invalid",
    [
        None,
        {"meta_info": {}, "output_ids": []},
        event([1], total=5),
        event([1], finish={"type": "coffee"}),
        {**event([1]), "output_ids": [2]},
    ],
)
def test_an_invalid_reply_is_refused_with_the_name_of_the_request(invalid: Any) -> None:
    with pytest.raises(BadServerReply, match="server s request r"):
        read(invalid)


def test_a_request_that_the_engine_aborts_with_an_error_fails() -> None:
    with pytest.raises(ServerError, match="out of memory"):
        read(event([], finish={"type": "abort", "message": "out of memory", "status_code": 500}))
    with pytest.raises(ServerError, match="too long"):
        read({"error": {"message": "too long"}})


def test_a_grammar_that_sglang_cannot_compile_is_the_fault_of_the_request() -> None:
    finish = {"type": "abort", "message": "Failed to compile json grammar: bad", "status_code": 400}
    # SGLang reports log-probs for no token of such a request.
    reply = event([5], finish=finish, output_token_logprobs=[])
    refused = pytest.raises(SamplingParamsError, match="json grammar: bad; fix the schema")
    with refused, schema_errors(SamplingParams(json_schema="{}")):
        read(reply)
    with pytest.raises(ServerError), schema_errors(SamplingParams()):
        read(reply)


def test_the_likeliest_tokens_are_requested_and_read_with_the_sampled_tokens() -> None:
    for num_top in (0, 2):
        params = SamplingParams(top_logprobs=num_top)
        body = generate_body(PROMPT, params, rid="r", max_new_tokens=3)
        assert body.get("top_logprobs_num", 0) == num_top
    top = [[[-0.1 * n, n, None], [-0.2 * n, n + 10, None]] for n in range(1, 5)]
    finish = {"type": "length"}
    rest = event([1, 2, 3, 4], finish=finish, output_top_logprobs=top)
    output = joined(event([1, 2], output_top_logprobs=top[:2]), rest)
    assert output.extras["top_token_ids"].tolist() == [[1, 11], [2, 12], [3, 13], [4, 14]]
    assert output.extras["top_logprobs"][3].tolist() == pytest.approx([-0.4, -0.8])
    with pytest.raises(BadServerReply):
        joined(event([1, 2, 3, 4], finish=finish, output_top_logprobs=[*top[:3], top[3][:1]]))


# -- parameters --------------------------------------------------------------------------------------------------------


def sampling(params: SamplingParams) -> dict[str, Any]:
    return generate_body(PROMPT, params, rid="x", max_new_tokens=4)["sampling_params"]


def test_top_k_of_one_keeps_the_temperature_of_the_logprobs() -> None:
    sent = sampling(SamplingParams(temperature=0.7, top_k=1))
    assert (sent["top_k"], sent["temperature"]) == (-1, 0.7)
    assert sent["top_p"] < 1e-3


def test_schemas_penalties_and_min_p_are_sent_under_the_names_of_sglang() -> None:
    sent = {"json_schema": "{}", "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_p": 0.1}
    params = SamplingParams(**sent)
    assert sent.items() <= sampling(params).items()
    assert not sent.keys() & sampling(SamplingParams()).keys()
    check_params(params, abilities=CONSTRAINT_ABILITIES | {Ability.JSON_SCHEMA}, server="sglang-0")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(repetition_penalty=1.1), "repetition_penalty"),
        (SamplingParams(temperature=1e-6), "temperature"),
        (SamplingParams(json_schema="{}"), "skip_tokenizer_init=false"),
        (SamplingParams(seed=1), "seed"),
        (SamplingParams(json_schema="{}", ignore_eos=True), "leave out one"),
        (structs.replace(SamplingParams(json_schema="{}"), num_sampled=2), "begin with the request"),
    ],
)
def test_parameters_that_sglang_cannot_honour_exactly_are_refused_by_name(
    params: SamplingParams, message: str
) -> None:
    has_tokenizer = "skip_tokenizer_init" not in message
    abilities = CONSTRAINT_ABILITIES | ({Ability.JSON_SCHEMA} if has_tokenizer else set())
    with pytest.raises(SamplingParamsError, match=message):
        check_params(params, abilities=abilities, server="sglang-0")


def test_stop_tokens_are_found_by_the_client_if_the_end_token_is_ignored() -> None:
    assert needs_own_stop(SamplingParams(ignore_eos=True, stop_token_ids=(3,)))
    assert not needs_own_stop(SamplingParams(stop_token_ids=(3,)))


# -- scores ------------------------------------------------------------------------------------------------------------

TEXT = as_token_ids([4, 5, 6])


def scores_reply(entries: Any, *, top: Any = None, finish: Any = None) -> dict[str, Any]:
    meta = {"input_token_logprobs": entries, "input_top_logprobs": top, "finish_reason": finish}
    return {"output_ids": [], "meta_info": meta}


def scores_of(reply: Any, *, start: int = 1, num_top: int = 1) -> Any:
    return read_scores(reply, token_ids=TEXT, start=start, num_top=num_top, server="s")


def test_scores_are_asked_for_one_token_more_because_the_first_has_no_log_prob() -> None:
    body = score_body(TEXT, start=2, num_top=1, rid="r")
    assert (body["logprob_start_len"], body["top_logprobs_num"]) == (1, 1)
    reply = scores_reply([[None, 5, None], [-0.5, 6, None]], top=[None, [[-0.25, 8, None]]])
    scores = scores_of(reply, start=2)
    assert (scores.logprobs.tolist(), scores.logprobs.dtype) == ([-0.5], np.float32)
    assert (scores.top_ids.tolist(), scores.top_logprobs.tolist()) == ([[8]], [[-0.25]])
    # SGLang may write the last id of the vocabulary as 0.
    last_as_0 = scores_reply([[None, 4], [-1.0, 5], [-0.5, 0]])
    assert scores_of(last_as_0, num_top=0).logprobs.tolist() == [-1.0, -0.5]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([], BadServerReply),
        (scores_reply([[None, 4], [-1.0, 0], [-0.5, 6]]), BadServerReply),
        (scores_reply([[None, 4], [-0.5, 5]]), BadServerReply),
        (scores_reply([[None, 4], [None, 5], [-0.5, 6]]), BadServerReply),
        (scores_reply([[None, 4], [-1.0, 5], [-0.5, 6]], top=[None, [[-1.0, 5]]]), BadServerReply),
        (scores_reply([], finish={"type": "abort", "message": "too long"}), ServerError),
        ({"error": {"message": "no memory"}}, ServerError),
    ],
)
def test_a_reply_without_the_log_probs_is_an_error(reply: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        scores_of(reply)
    assert type(caught.value) is error


# -- the client --------------------------------------------------------------------------------------------------------


def spec(path: str = "m", url: str | None = "http://127.0.0.1:1", **changes: Any) -> ServerSpec:
    return ServerSpec("sglang-0", ModelConfig(path=path), max_model_len=64, url=url, **changes)


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
    async with http_server(fake.answer) as url:
        client = SGLangClient.create(spec(str(tmp_path), url))
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
    model = FakeModel()

    def load(into: FakeModel) -> list[tuple[str, bool]]:
        loader.load(into, pickle.loads(base64.b64decode(payload)))
        return loader.read_reports(tmp_path)

    with WeightSender("shared_memory") as sender, sender.offer(weights.items(), weight_version=4) as handle:
        payload = loader.payload(handle.to_json(), report_folder=tmp_path)
        assert load(model) == [("", False)]
        assert load(FakeModel(fails=True)) == [("ValueError: no room", True)]
    assert all(torch.equal(model.loaded[name], weight) for name, weight in weights.items())
    ((error, is_mixed),) = load(model)  # the offer has ended
    assert error
    assert not is_mixed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": None}, "server_urls"),
        ({"engine_kwargs": {"apikey": "x"}}, "did you mean 'api_key'"),
        ({"weight_transfer": "shared_memory"}, "shared_memory"),
    ],
)
def test_a_client_refuses_options_of_an_engine(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SGLangClient.create(spec(**changes))


async def test_a_server_that_was_not_started_refuses_and_can_be_closed() -> None:
    server = SGLangClient.create(spec())
    with pytest.raises(ServerError, match="not started"):
        await server.generate(PROMPT, SamplingParams(), "r")
    assert not (await server.health()).is_alive
    await server.close()
    with pytest.raises(ServerError, match="closed"):
        await server.generate(PROMPT, SamplingParams(), "r")
