"""SGLang engine on a CPU, with untied weights: tokens, log-probs, streams, aborts, weight updates, conformance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.checks import Reference, check_server
from agent_loop.errors import ServerError
from agent_loop.servers.base import Ability
from agent_loop.servers.sglang import SGLangServer
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput
from tests.engines.common import (
    LOG_PROB_TOLERANCE,
    MAX_MODEL_LEN,
    TOP_LOGPROBS_CASES,
    adapted_weights_of,
    assert_matches_the_reference,
    assert_scores_are_those_of_the_reference,
    assert_top_logprobs_of_the_reference,
    changed_weights,
    generate_all,
    generate_and_stream,
    largest_difference,
    load_into,
    load_reference,
    make_model_folder,
    prompts,
    reference_logprobs,
)
from tests.engines.sglang_case import is_running, started

pytestmark = pytest.mark.timeout(600)
Engine = tuple[SGLangServer, asyncio.Runner]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("sglang") / "untied", is_tied=False)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with started(model_path, model__device="cpu") as found:
        yield found
        pid = found[0]._process.pid
    assert pid is not None
    assert not is_running(pid)


def test_scores_are_those_of_the_reference_beside_completions_too(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    all_prompts, params = prompts(8, seed=11), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

    async def main() -> None:
        await assert_scores_are_those_of_the_reference(server, reference)
        alone = await generate_all(server, all_prompts, params, prefix="alone")
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(generate_all(server, all_prompts, params, prefix="beside"))
            await assert_scores_are_those_of_the_reference(server, reference)
            cancelled = group.create_task(server.score(prompts(1, length=100)[0]))
            await asyncio.sleep(0)
            cancelled.cancel()
        assert [output.token_ids for output in beside.result()] == [output.token_ids for output in alone]
        assert (await server.health()).num_running == 0

    runner.run(main())


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_k": 1},
    ],
)
def test_logprobs_are_of_the_scaled_distribution_before_top_k_and_top_p(
    engine: Engine, model_path: Path, params: dict[str, Any]
) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    all_prompts = prompts(8, seed=3)
    sampling = SamplingParams(**params, max_tokens=24, ignore_eos=True)
    outputs = runner.run(generate_all(server, all_prompts, sampling))
    for prompt, output in zip(all_prompts, outputs, strict=True):
        difference = largest_difference(reference, prompt, output, temperature=params["temperature"])
        assert difference < LOG_PROB_TOLERANCE


@pytest.mark.parametrize("params", [*TOP_LOGPROBS_CASES, {"temperature": 0.7, "top_k": 1}])
def test_the_likeliest_tokens_are_those_of_the_scaled_distribution(
    engine: Engine, model_path: Path, params: dict[str, Any]
) -> None:
    server, runner = engine
    reference, prompt = load_reference(model_path), prompts(1, seed=5)[0]
    sampling = SamplingParams(**params, max_tokens=16, ignore_eos=True, top_logprobs=7)
    for output in runner.run(generate_and_stream(server, prompt, sampling)):
        assert_top_logprobs_of_the_reference(
            reference, prompt, output, num_top=7, temperature=params["temperature"]
        )


def test_ignoring_the_end_token_does_not_ignore_stop_tokens(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    (prompt,) = prompts(1, seed=5)
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    whole = runner.run(server.generate(prompt, free, "free")).token_ids
    place = max(whole.index(token) for token in whole)
    stopping = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(whole[place],))
    output = runner.run(server.generate(prompt, stopping, "stopping"))
    assert output.token_ids == whole[: place + 1]
    assert output.stop_reason == "stop"
    assert largest_difference(load_reference(model_path), prompt, output, temperature=0) < LOG_PROB_TOLERANCE


def test_an_abort_by_the_reader_of_the_stream_does_not_wait_for_its_end(engine: Engine) -> None:
    server, runner = engine

    async def read() -> TokenOutput:
        chunks: list[TokenChunk] = []
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        async for chunk in server.stream(prompts(1)[0], params, "own stream"):
            if not chunks:
                async with asyncio.timeout(30):
                    await server.abort("own stream")
            chunks.append(chunk)
        return TokenOutput.from_chunks(chunks)

    output = runner.run(read())
    assert output.stop_reason in ("aborted", "length")  # a small model may end before the abort arrives


def test_an_engine_that_is_asleep_on_a_cpu_refuses_requests_and_does_not_claim_to_free_memory(
    engine: Engine,
) -> None:
    server, runner = engine
    assert Ability.SLEEP not in server.abilities
    runner.run(server.sleep())
    with pytest.raises(ServerError, match="asleep"):
        runner.run(server.generate(prompts(1)[0], SamplingParams(max_tokens=2), "asleep"))
    runner.run(server.wake_up())


def test_a_request_in_flight_continues_with_new_weights_and_each_token_has_its_version(
    engine: Engine, model_path: Path
) -> None:
    server, runner = engine
    version = runner.run(server.health()).weight_version
    old, new = load_reference(model_path), load_reference(model_path)
    weights = changed_weights(old, seed=11)
    load_into(new, weights)
    (prompt,) = prompts(1, seed=8)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)

    async def update_midway() -> TokenOutput:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.generate(prompt, params, "in flight"))
            short = SamplingParams(max_tokens=20, ignore_eos=True)
            await server.generate(prompts(1, seed=9)[0], short, "other")
            await server.update_weights(weights.items(), weight_version=version + 1)
        return task.result()

    output = runner.run(update_midway())
    assert [chunk.weight_version for chunk in output.chunks] == [version, version + 1]
    before = len(output.chunks[0].token_ids)
    assert len(output.token_ids) == 150
    assert output.num_preempted == 1
    context = np.concatenate([prompt, np.asarray(output.token_ids[:before], dtype=np.int32)])
    expected = [
        *reference_logprobs(old, prompt, output.token_ids[:before]),
        *reference_logprobs(new, context, output.token_ids[before:]),
    ]
    np.testing.assert_allclose(output.log_probs, expected, atol=LOG_PROB_TOLERANCE)
    runner.run(server.update_weights(dict(old.named_parameters()).items(), weight_version=version + 2))
    runner.run(assert_matches_the_reference(server, old))


def test_completions_match_a_fresh_load_after_each_update(
    engine: Engine, model_path: Path, tmp_path: Path
) -> None:
    server, runner = engine
    for version in (11, 12):
        reference = load_reference(model_path)
        weights = changed_weights(reference, seed=version)
        runner.run(server.update_weights(weights.items(), weight_version=version))
        load_into(reference, weights)
        reference.save_pretrained(tmp_path / str(version))
        fresh = load_reference(tmp_path / str(version))
        runner.run(assert_matches_the_reference(server, fresh))
        assert runner.run(server.health()).weight_version == version
    runner.run(
        server.update_weights(dict(load_reference(model_path).named_parameters()).items(), weight_version=13)
    )


def test_completions_match_the_merged_model_after_updates_of_adapters(
    engine: Engine, model_path: Path
) -> None:
    server, runner = engine
    base, merged = load_reference(model_path), load_reference(model_path)
    for version in (15, 16):
        weights = adapted_weights_of(base, seed=version, base_id="adapted")
        runner.run(server.update_weights(weights, weight_version=version))
        load_into(merged, dict(weights))
        runner.run(assert_matches_the_reference(server, merged))
    runner.run(server.update_weights(base.named_parameters(), weight_version=17))


@pytest.mark.parametrize("asleep", [False, True])
def test_a_prefix_is_cached_until_the_weights_change(engine: Engine, model_path: Path, asleep: bool) -> None:
    server, runner = engine
    (prompt,) = prompts(1, seed=21 + asleep, length=60)
    params = SamplingParams(temperature=0, max_tokens=2)
    runner.run(server.generate(prompt, params, "first"))
    assert (runner.run(server.generate(prompt, params, "second")).num_cached_tokens or 0) > 50
    weights = dict(load_reference(model_path).named_parameters())
    if asleep:
        runner.run(server.sleep())
    runner.run(server.update_weights(weights.items(), weight_version=20 + asleep))
    runner.run(server.wake_up())
    assert runner.run(server.generate(prompt, params, "third")).num_cached_tokens == 0


def test_the_server_keeps_the_contract_of_servers(engine: Engine, model_path: Path) -> None:
    """Must be the last test, because the suite closes the server."""
    server, runner = engine
    reference = Reference.load(model_path)
    report = runner.run(check_server(server, max_model_len=MAX_MODEL_LEN, reference=reference))
    report.raise_if_failed()
