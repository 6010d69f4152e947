"""SGLang engine on a CPU, with a model whose output head is tied to its embedding. The last test kills the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_loop.errors import ServerDied, WeightsError
from agent_loop.servers.sglang import SGLangServer
from agent_loop.types import SamplingParams
from tests.engines.common import (
    assert_matches_the_reference,
    changed_weights,
    load_into,
    load_reference,
    make_model_folder,
    prompts,
)
from tests.engines.sglang_case import scheduler_of, started

pytestmark = pytest.mark.timeout(600)
Engine = tuple[SGLangServer, asyncio.Runner]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("sglang") / "tied", is_tied=True)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with started(model_path, model__device="cpu", rollout__weight_transfer="disk") as found:
        yield found


@pytest.mark.parametrize("given", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
def test_a_tied_weight_can_be_published_under_either_name_or_both(
    engine: Engine, model_path: Path, given: tuple[str, ...], tmp_path: Path
) -> None:
    server, runner = engine
    reference = load_reference(model_path)
    weights = changed_weights(reference, seed=len(given) + given.index(given[-1]))
    load_into(reference, weights)
    tied = weights.pop(EMBEDDING)
    published = [*weights.items(), *((name, tied) for name in given)]
    version = runner.run(server.health()).weight_version + 1
    runner.run(server.update_weights(published, weight_version=version))
    reference.save_pretrained(tmp_path / "fresh")
    runner.run(assert_matches_the_reference(server, load_reference(tmp_path / "fresh")))


def test_a_tied_weight_with_two_values_is_refused(engine: Engine, model_path: Path) -> None:
    server, runner = engine
    weights = changed_weights(load_reference(model_path), seed=7)
    with pytest.raises(WeightsError, match="different values"):
        runner.run(
            server.update_weights([*weights.items(), (HEAD, weights[EMBEDDING] + 1)], weight_version=99)
        )


def test_killing_the_scheduler_fails_all_64_requests_at_once_and_ends_all_processes(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Must be the last test, because the engine is not restarted."""
    server, runner = engine
    params = SamplingParams(max_tokens=150, ignore_eos=True)

    async def generate(index: int) -> BaseException | None:
        try:
            await server.generate(prompts(1, seed=index)[0], params, f"victim-{index}")
        except ServerDied as error:
            return error
        return None

    async def kill_midway() -> tuple[list[BaseException | None], float]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(generate(index)) for index in range(64)]
            short = SamplingParams(max_tokens=5, ignore_eos=True)
            await server.generate(prompts(1)[0], short, "other")
            os.kill(scheduler_of(server._process.pid), signal.SIGKILL)
            killed = time.monotonic()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return [task.result() for task in tasks], time.monotonic() - killed

    errors, took_s = runner.run(kill_midway())
    assert took_s < 5
    for index, error in enumerate(errors):
        assert isinstance(error, ServerDied)
        assert (error.server, error.request_id) == (server.name, f"victim-{index}")
        assert "and the engine with it" in str(error)
    health = runner.run(server.health())
    assert not health.is_alive
    assert "ended" in health.detail
    with pytest.raises(ServerDied):
        runner.run(server.generate(prompts(1)[0], params, "late"))
    runner.run(server.abort("late"))
    runner.run(server.close())
    assert server._process.ended.is_set()
