"""Parts of the vLLM servers that can be tested without vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_loop.config import ModelConfig
from agent_loop.errors import BadServerReply, ConfigError, SamplingParamsError, ServerError
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.engine_client import EngineLoad, stamped
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
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput, as_token_ids
from tests.servers.tiny_embedded import tiny_model

LIMITS = VLLMRequestLimits(
    server="vllm-0", max_model_len=20, model=ModelInfo(vocab_size=50, eos_token_ids=(7, 9))
)


def spec(**engine_kwargs: Any) -> ServerSpec:
    return ServerSpec(
        name="vllm-0", model=ModelConfig(path="m"), max_model_len=64, seed=3, engine_kwargs=engine_kwargs
    )


def sampling(prompt: list[int], **params: Any) -> dict[str, Any]:
    return LIMITS.sampling(
        "r", prompt_ids=as_token_ids(prompt), params=SamplingParams(**params), attachments=()
    )


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
    ],
)
def test_an_option_that_contradicts_the_server_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_options(spec(**kwargs))


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


def test_end_tokens_are_stop_tokens_unless_ignore_eos_is_set() -> None:
    assert sampling([1], stop_token_ids=(3,))["stop_token_ids"] == [3, 7, 9]
    assert sampling([1], stop_token_ids=(3,), ignore_eos=True)["stop_token_ids"] == [3]
    assert sampling([1])["ignore_eos"] is True


@pytest.mark.parametrize("params", [{"temperature": 0.005}, {"temperature": 2.5}, {"min_p": 0.1}])
def test_parameters_that_vllm_would_round_or_return_inexact_logprobs_for_are_refused(
    params: dict[str, Any],
) -> None:
    with pytest.raises(SamplingParamsError, match="vLLM"):
        sampling([1], **params)


def test_end_tokens_are_read_from_the_models_files(tmp_path: Path) -> None:
    model = tiny_model(eos_token_id=5)
    model.generation_config.eos_token_id = [5, 6]
    model.save_pretrained(tmp_path)
    info = ModelInfo.read(ModelConfig(path=str(tmp_path)))
    assert info.eos_token_ids == (5, 6)
    with pytest.raises(ConfigError, match="no readable configuration"):
        ModelInfo.read(ModelConfig(path=str(tmp_path / "nothing")))


LOGITS = {1: 2.0, 2: 0.5, 3: -1.0}


def log_softmax(temperature: float) -> dict[int, float]:
    total = math.log(sum(math.exp(value / temperature) for value in LOGITS.values()))
    return {token: value / temperature - total for token, value in LOGITS.items()}


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
def test_logprobs_are_returned_only_where_they_are_exact(
    kind: LogProbs, params: dict[str, Any], is_exact: bool
) -> None:
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


class Sampler:
    def __init__(self) -> None:
        self.topk_topp_sampler: Any = ArgmaxStage()


def test_the_wrapped_stage_returns_logprobs_from_before_top_k() -> None:
    sampler = Sampler()
    stage = sampler.topk_topp_sampler = FullLogProbsStage.wrap(sampler)
    assert FullLogProbsStage.wrap(sampler) is stage
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    sampled, logprobs = stage(logits.clone(), {}, None, None)
    assert sampled.tolist() == [1]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1))
    assert stage.inner.logprobs_mode == "raw_logprobs"


def test_the_second_model_runner_returns_its_logits_from_before_top_k() -> None:
    def sample_random(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.argmax(-1), logits.fill_(-math.inf)

    wrapped = return_full_logits(sample_random)
    assert return_full_logits(wrapped) is wrapped
    logits = torch.tensor([[0.5, 2.0]])
    _, before = wrapped(logits.clone(), None)
    torch.testing.assert_close(before, logits)


def test_a_worker_returns_an_error_for_an_invalid_handle_and_does_not_raise() -> None:
    worker = WeightWorker()
    worker.rank, worker.model_runner = 0, SimpleNamespace(device=torch.device("cpu"))
    result = worker.agent_loop_load_weights("no handle")
    assert result["is_unchanged"] is True
    assert "weight handle" in result["error"]


def event(*token_ids: int, reason: Any = None, spans: Any = None, **changes: Any) -> dict[str, Any]:
    """Return an event of a stream in vLLM's format. The log-prob of token t is -t."""
    content = [{"token_id": token, "logprob": -float(token)} for token in token_ids]
    choice = {
        "index": 0,
        "token_ids": list(token_ids),
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": spans
        and [{"version": version, "start": start, "end": end} for version, start, end in spans],
    }
    return {"choices": [{**choice, **changes}]}


USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}


PLAIN = SamplingParams()


def read(
    *events: Any, has_logprobs: bool = True, params: SamplingParams = PLAIN
) -> list[tuple[TokenChunk, Sequence[int]]]:
    async def source() -> AsyncGenerator[Any]:
        for each in events:
            yield each

    async def main() -> list[tuple[TokenChunk, Sequence[int]]]:
        replies = read_stream(
            source(), params=params, has_logprobs=has_logprobs, server="vllm-0", request_id="r"
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


def test_without_vllm_the_error_states_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_loop.servers import process
    from agent_loop.servers.vllm import VLLMServer

    monkeypatch.setattr(process, "installed_version", lambda package: None)
    with pytest.raises(ConfigError, match=r"pip install .vllm>=0\.32"):
        VLLMServer.create(spec())
    monkeypatch.setattr(process, "installed_version", lambda package: "0.9.1")
    with pytest.raises(ConfigError, match=r"vllm 0\.9\.1 is installed, but only"):
        VLLMServer.create(spec())


def part(*token_ids: int, reason: Any = None, versions: Sequence[int] = ()) -> tuple[TokenChunk, Any]:
    return TokenChunk(list(token_ids), [-1.0] * len(token_ids), stop_reason=reason), versions


def streamed(parts: list[tuple[TokenChunk, Any]], versions: list[int]) -> list[TokenChunk]:
    """Return the chunks of a stream. Each read of the server's current version returns the next of `versions`."""
    reads = iter(versions)

    async def source() -> AsyncGenerator[tuple[TokenChunk, Any]]:
        for each in parts:
            yield each

    async def main() -> list[TokenChunk]:
        return [chunk async for chunk in stamped(source(), current_version=lambda: next(reads, versions[-1]))]

    return asyncio.run(main())


def test_a_stream_without_a_weight_update_is_not_delayed() -> None:
    chunks = streamed([part(1), part(2, 3), part(4, reason="stop", versions=[5, 5, 5, 5])], [5])
    assert [chunk.token_ids for chunk in chunks] == [[1], [2, 3], [4]]
    assert {chunk.weight_version for chunk in chunks} == {5}


def test_chunks_after_a_weight_update_wait_for_the_versions_that_the_engine_reports() -> None:
    parts = [part(1), part(2), part(3), part(4, reason="stop", versions=[5, 5, 5, 6])]
    chunks = streamed(parts, [5, 5, 6])
    assert [(chunk.token_ids, chunk.weight_version) for chunk in chunks] == [([1], 5), ([2, 3], 5), ([4], 6)]
    assert [chunk.stop_reason for chunk in chunks] == [None, None, "stop"]


def entry(token_id: int, logprob: float, **more: Any) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": logprob, **more}


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
    assert not TokenOutput.from_chunks([read(whole, params=params, has_logprobs=False)[0][0]]).extras
    for top in ([], [entry(4, -0.5)]):
        broken = [entry(4, -0.5, top_logprobs=top), content[1]]
        with pytest.raises(BadServerReply):
            read(event(4, 5, reason="stop", logprobs={"content": broken}), params=params)


def test_an_engine_is_started_with_the_number_of_logprobs_that_requests_need() -> None:
    def options(num_top: int, **kwargs: Any) -> dict[str, Any]:
        return engine_options(replace(spec(**kwargs), sampling=SamplingParams(top_logprobs=num_top)))

    assert options(20)["max_logprobs"] == -1, "no limit"
    assert options(5, max_logprobs=7)["max_logprobs"] == 7
    assert options(30, max_logprobs=-1)["max_logprobs"] == -1
    with pytest.raises(ConfigError, match="max_logprobs is 7, but this server needs 31"):
        options(30, max_logprobs=7)


def test_schemas_and_penalties_are_passed_to_vllm_under_its_names() -> None:
    limits = VLLMRequestLimits(
        server="vllm-0",
        max_model_len=20,
        model=ModelInfo(vocab_size=50, eos_token_ids=(7, 9)),
        abilities=frozenset({*SAMPLING_ABILITIES, *CONSTRAINT_ABILITIES}),
    )

    def sent(**params: Any) -> dict[str, Any]:
        return limits.sampling(
            "r", prompt_ids=as_token_ids([1, 2]), params=SamplingParams(**params), attachments=()
        )

    assert sent(json_schema="{}")["structured_outputs"] == {"json": "{}"}
    penalised = sent(presence_penalty=0.5, repetition_penalty=1.1)
    assert (penalised["presence_penalty"], penalised["repetition_penalty"]) == (0.5, 1.1)
    assert not {"structured_outputs", "presence_penalty", "frequency_penalty"} & sent().keys()
    with pytest.raises(SamplingParamsError, match="without a stop token"):
        sent(json_schema="{}", ignore_eos=True)
    with pytest.raises(SamplingParamsError, match="begin with the request"):
        sent(json_schema="{}", num_sampled=1)


def test_a_last_part_without_tokens_has_the_last_version() -> None:
    chunks = streamed([part(1), part(reason="aborted", versions=[5])], [5])
    assert [(chunk.token_ids, chunk.weight_version) for chunk in chunks] == [([1], 5), ([], 5)]
    assert streamed([part(reason="aborted")], [5])[0].weight_version == 5
