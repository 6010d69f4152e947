"""SGLang engine on a CPU, with untied weights: tokens, log-probs, streams, aborts, weight updates, conformance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_loop.checks import Reference, check_server
from agent_loop.servers.base import Ability
from agent_loop.servers.sglang import SGLangServer
from agent_loop.types import SamplingParams, TokenChunk, TokenOutput
from tests.engines.common import (
    LOG_PROB_TOLERANCE,
    MAX_MODEL_LEN,
    assert_adapters_are_merged,
    largest_difference,
    load_reference,
    make_model_folder,
    prompts,
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


def test_logprobs_of_top_k_1_are_of_the_scaled_distribution(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    sampling = SamplingParams(temperature=0.7, top_k=1, max_tokens=24, ignore_eos=True)
    for prompt in prompts(2, seed=3):
        output = runner.run(server.generate(prompt, sampling, "top 1"))
        difference = largest_difference(load_reference(model_path), prompt, output, temperature=0.7)
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


def test_completions_match_the_merged_model_after_updates_of_adapters(
    engine: Engine, model_path: Path
) -> None:
    server, runner = engine
    base = load_reference(model_path)
    runner.run(assert_adapters_are_merged(server, base, first_version=15))
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
        assert Ability.SLEEP not in server.abilities  # a CPU frees no memory
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
