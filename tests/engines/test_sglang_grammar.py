"""SGLang engine with a tokenizer: completions under JSON schemas, penalties and min-p."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_loop.errors import SamplingParamsError
from agent_loop.servers.sglang import SGLangServer
from agent_loop.types import SamplingParams, TokenOutput
from tests.engines.common import (
    LETTERS,
    LOG_PROB_TOLERANCE,
    MAX_ATTEMPTS,
    SCHEMA,
    assert_are_letters,
    assert_logprobs_are_of_the_allowed_tokens,
    assert_penalties_give_log_probs_of_the_penalised_logits,
    changed_weights,
    largest_difference,
    load_into,
    load_reference,
    make_model_folder,
    prompts,
)
from tests.engines.sglang_case import started

pytestmark = pytest.mark.timeout(600)
Engine = tuple[SGLangServer, asyncio.Runner]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "untied", is_tied=False)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with started(model_path, rollout__engine_kwargs__skip_tokenizer_init="false") as found:
        yield found


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_under_a_schema_are_of_the_allowed_tokens(
    engine: Engine, model_path: Path, temperature: float
) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    runner.run(
        assert_logprobs_are_of_the_allowed_tokens(server, reference, model_path, temperature=temperature)
    )


def test_penalties_give_log_probs_of_the_penalised_logits(engine: Engine, model_path: Path) -> None:
    """SGLang prepares a step before it knows the token of the step before."""
    server, runner = engine
    reference = load_reference(model_path)
    runner.run(
        assert_penalties_give_log_probs_of_the_penalised_logits(
            server, reference, has_repetition=False, counts_late=True
        )
    )


def test_logprobs_are_those_before_min_p(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    prompt = prompts(1, seed=12)[0]
    params = SamplingParams(temperature=0.8, min_p=0.3, max_tokens=24, ignore_eos=True)
    output = runner.run(server.generate(prompt, params, "min-p"))
    difference = largest_difference(load_reference(model_path), prompt, output, temperature=0.8)
    assert difference < LOG_PROB_TOLERANCE


def test_an_invalid_schema_is_refused_and_the_engine_runs_on(engine: Engine) -> None:
    server, runner = engine
    prompt = prompts(1)[0]
    with pytest.raises(SamplingParamsError, match="SGLang refuses json_schema"):
        runner.run(server.generate(prompt, SamplingParams(json_schema='{"type": "nonsense"}'), "bad"))
    assert runner.run(server.generate(prompt, SamplingParams(json_schema=SCHEMA), "good")).token_ids


def test_a_weight_update_in_the_middle_keeps_the_position_in_the_schema(
    engine: Engine, model_path: Path
) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    params = SamplingParams(json_schema=LETTERS, max_tokens=150)

    async def main(version: int) -> list[TokenOutput]:
        weights = changed_weights(reference, seed=13 + version)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(server.generate(prompt, params, f"update-{number}"))
                for number, prompt in enumerate(prompts(16, seed=13))
            ]
            await server.update_weights(list(weights.items()), weight_version=version)
        load_into(reference, weights)
        return [task.result() for task in tasks]

    # A schema bounds the completions, which may end before the update.
    for version in range(1, 1 + MAX_ATTEMPTS):
        outputs = runner.run(main(version))
        assert_are_letters(model_path, outputs)
        if any(len(output.chunks) == 2 for output in outputs):
            return
    pytest.fail("no update took place in the middle of a completion")
