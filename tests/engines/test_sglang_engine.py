"""One real SGLang engine on a CPU, weights not tied: tokens, log-probs, streams, aborts, updates, conformance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.checks import Reference, check_server
from agent_loop.errors import SamplingParamsError, ServerError, WeightsError
from agent_loop.servers.base import Ability
from agent_loop.servers.sglang import SGLangServer
from agent_loop.types import SamplingParams, TokenOutput
from tests.engines.common import (
    LOG_PROB_TOLERANCE,
    MAX_MODEL_LEN,
    TOP_LOGPROBS_CASES,
    adapted_weights_of,
    assert_says_what_the_reference_says,
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
        pids = found[0].pids
    assert not [pid for pid in pids if is_running(pid)]


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
def test_logprobs_are_of_the_scaled_distribution_before_any_cut(
    engine: Engine, model_path: Path, params: dict[str, Any]
) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    asked = prompts(8, seed=3)
    wanted = SamplingParams(**params, max_tokens=24, ignore_eos=True)
    outputs = runner.run(generate_all(server, asked, wanted))
    for prompt, output in zip(asked, outputs, strict=True):
        difference = largest_difference(reference, prompt, output, temperature=params["temperature"])
        assert difference < LOG_PROB_TOLERANCE


@pytest.mark.parametrize("params", [*TOP_LOGPROBS_CASES, {"temperature": 0.7, "top_k": 1}])
def test_the_likeliest_tokens_are_those_of_the_scaled_distribution(
    engine: Engine, model_path: Path, params: dict[str, Any]
) -> None:
    server, runner = engine
    reference, prompt = load_reference(model_path), prompts(1, seed=5)[0]
    wanted = SamplingParams(**params, max_tokens=16, ignore_eos=True, top_logprobs=7)
    for output in runner.run(generate_and_stream(server, prompt, wanted)):
        assert_top_logprobs_of_the_reference(
            reference, prompt, output, num_top=7, temperature=params["temperature"]
        )


def test_requests_of_all_kinds_in_one_batch_keep_their_own_logprobs(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    asked = prompts(4, seed=4)
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=1, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.3, top_p=0.8, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True),
    ]

    async def ask() -> list[TokenOutput]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(server.generate(prompt, params, f"kind{index}"))
                for index, (prompt, params) in enumerate(zip(asked, kinds, strict=True))
            ]
        return [task.result() for task in tasks]

    for prompt, params, output in zip(asked, kinds, runner.run(ask()), strict=True):
        difference = largest_difference(reference, prompt, output, temperature=params.temperature)
        assert difference < LOG_PROB_TOLERANCE


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


def test_a_seed_is_refused_because_the_attention_of_cpus_is_not_deterministic_to_sglang(
    engine: Engine,
) -> None:
    server, runner = engine
    assert Ability.SEED not in server.abilities
    with pytest.raises(SamplingParamsError, match="enable_deterministic_inference"):
        runner.run(server.generate(prompts(1)[0], SamplingParams(seed=3, max_tokens=2), "seeded"))


def test_an_abort_keeps_the_tokens_so_far(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    (prompt,) = prompts(1, seed=6)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)

    async def abort_midway() -> TokenOutput:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(server.generate(prompt, params, "aborted"))
            other = prompts(1, seed=7)[0]
            await server.generate(other, SamplingParams(max_tokens=20, ignore_eos=True), "beside")
            assert 0 < ((await server.health()).kv_cache_share or 0) < 1
            await server.abort("aborted")
        return task.result()

    output = runner.run(abort_midway())
    assert output.stop_reason == "aborted"
    assert 0 < len(output.token_ids) < 150
    assert largest_difference(load_reference(model_path), prompt, output, temperature=0) < LOG_PROB_TOLERANCE


def test_sleeping_refuses_requests_but_a_cpu_engine_frees_nothing_and_claims_nothing(engine: Engine) -> None:
    server, runner = engine
    assert Ability.SLEEP not in server.abilities
    runner.run(server.sleep())
    with pytest.raises(ServerError, match="asleep"):
        runner.run(server.generate(prompts(1)[0], SamplingParams(max_tokens=2), "asleep"))
    runner.run(server.wake_up())


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_in_flight_goes_on_under_new_weights_and_each_token_is_stamped_with_its_own(
    engine: Engine, model_path: Path, streams: bool
) -> None:
    server, runner = engine
    version = runner.run(server.health()).weight_version
    old, new = load_reference(model_path), load_reference(model_path)
    weights = changed_weights(old, seed=11)
    load_into(new, weights)
    (prompt,) = prompts(1, seed=8)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)

    async def ask() -> TokenOutput:
        if not streams:
            return await server.generate(prompt, params, "flying")
        return TokenOutput.from_chunks([chunk async for chunk in server.stream(prompt, params, "flying")])

    async def update_midway() -> TokenOutput:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask())
            short = SamplingParams(max_tokens=20, ignore_eos=True)
            await server.generate(prompts(1, seed=9)[0], short, "beside")
            await server.update_weights(weights.items(), weight_version=version + 1)
        return task.result()

    output = runner.run(update_midway())
    assert [chunk.weight_version for chunk in output.chunks] == [version, version + 1]
    before = len(output.chunks[0].token_ids)
    assert len(output.token_ids) == 150
    assert output.num_preempted == 1
    context = np.concatenate([prompt, np.asarray(output.token_ids[:before], dtype=np.int32)])
    wanted = [
        *reference_logprobs(old, prompt, output.token_ids[:before]),
        *reference_logprobs(new, context, output.token_ids[before:]),
    ]
    np.testing.assert_allclose(output.log_probs, wanted, atol=LOG_PROB_TOLERANCE)
    runner.run(server.update_weights(dict(old.named_parameters()).items(), weight_version=version + 2))
    runner.run(assert_says_what_the_reference_says(server, old))


def test_after_each_update_it_says_what_a_fresh_load_says(
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
        runner.run(assert_says_what_the_reference_says(server, fresh))
        assert runner.run(server.health()).weight_version == version
    runner.run(
        server.update_weights(dict(load_reference(model_path).named_parameters()).items(), weight_version=13)
    )


def test_after_updates_of_adapters_alone_it_says_what_the_merged_model_says(
    engine: Engine, model_path: Path
) -> None:
    server, runner = engine
    base, merged = load_reference(model_path), load_reference(model_path)
    for version in (15, 16):
        weights = adapted_weights_of(base, seed=version, base_id="adapted")
        runner.run(server.update_weights(weights, weight_version=version))
        load_into(merged, dict(weights))
        runner.run(assert_says_what_the_reference_says(server, merged))
    runner.run(server.update_weights(base.named_parameters(), weight_version=17))


def test_weights_that_do_not_fit_change_nothing(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    weights = changed_weights(reference, seed=5)
    first, *rest = weights.items()
    for wrong in (
        rest,
        [*weights.items(), ("model.nothing.weight", first[1])],
        [(first[0], first[1][:5]), *rest],
    ):
        with pytest.raises(WeightsError):
            runner.run(server.update_weights(wrong, weight_version=99))
    runner.run(assert_says_what_the_reference_says(server, reference))
    assert runner.run(server.health()).weight_version != 99


@pytest.mark.parametrize("asleep", [False, True])
def test_a_prefix_that_was_computed_once_is_not_computed_again_unless_weights_changed(
    engine: Engine, model_path: Path, asleep: bool
) -> None:
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


def test_it_keeps_the_contract_of_servers(engine: Engine, model_path: Path) -> None:
    """Last: the suite closes the server."""
    server, runner = engine
    reference = Reference.load(model_path)
    report = runner.run(check_server(server, max_model_len=MAX_MODEL_LEN, reference=reference))
    report.raise_if_failed()
