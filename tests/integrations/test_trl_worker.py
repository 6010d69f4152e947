"""Tests of the rollout worker for `AsyncGRPOTrainer`, without a trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from agent_loop.errors import ConfigError, RolloutError
from agent_loop.integrations.trl import AgentLoopRolloutWorker
from agent_loop.integrations.trl.worker import MAX_LOST_GROUPS_IN_A_ROW
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from tests.helpers import text_reply, tool_call_reply
from tests.integrations.scripted import rollouts_with, says_hello, text_of

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'"),
]
PATIENCE_S = 20.0


def async_args(**changes: Any) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig  # late: takes seconds

    limits: dict[str, Any] = {"num_generations": 2, "max_inflight_tasks": 4, "max_completion_length": 96}
    return AsyncGRPOConfig(
        output_dir="unused", use_cpu=True, bf16=False, report_to=[], **{**limits, **changes}
    )


@contextmanager
def working(
    script: Callable[[ScriptedRequest], ScriptedReply] = says_hello,
    *,
    rows: Sequence[Mapping[str, Any]] = ({"prompt": "row 0", "worth": 1},),
    **args: Any,
) -> Iterator[tuple[AgentLoopRolloutWorker, ScriptedServer]]:
    """Start a worker, and stop it after the body."""
    rollouts, server = rollouts_with(script)
    with rollouts:
        worker = rollouts.worker(rows, args=async_args(**args))
        worker.start()
        yield worker, server
        worker.stop()


def never(request: ScriptedRequest) -> ScriptedReply:
    return text_reply("never", latency_s=math.inf)


def take(worker: AgentLoopRolloutWorker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=PATIENCE_S) for _ in range(count)]


def wait_for(condition: Any) -> None:
    """Wait for a condition in real time, because the worker runs in a thread."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def health_error(worker: AgentLoopRolloutWorker) -> str:
    try:
        worker.check_health(1e9)
    except RolloutError as error:
        return str(error)
    return ""


def test_a_sample_has_the_tokens_and_the_logprobs_of_the_sampled_tokens() -> None:
    def script(request: ScriptedRequest) -> ScriptedReply:
        return tool_call_reply("shelf_of", part=4) if request.turn == 0 else text_reply("there")

    with working(script) as (worker, _):
        sample, other = take(worker, 2)
    assert sample.group_id == other.group_id  # (of the two in flight, either may end first)
    assert sample.input_ids.shape == sample.completion_mask.shape == sample.old_log_probs.shape
    assert ((sample.old_log_probs != 0) == (sample.completion_mask == 1)).all()
    by_model = text_of(sample.input_ids[sample.completion_mask == 1].tolist())
    assert "shelf_of" in by_model
    assert "shelf 5" not in by_model
    assert "shelf 5" in text_of(sample.input_ids.tolist())
    assert [message["role"] for message in sample.completion] == ["assistant", "tool", "assistant"]
    assert sample.metrics["reward"] == 1


def test_advantages_compare_within_the_group_and_failed_trajectories_are_left_out() -> None:
    numbers = count(1)

    def script(request: ScriptedRequest) -> ScriptedReply:
        number = next(numbers)
        return text_reply("hello" * number, error="the engine broke" if number % 4 == 2 else None)

    with working(script, num_generations=4) as (worker, _):
        samples = take(worker, 3)
    assert {sample.group_id for sample in samples} == {0}
    assert sum(sample.advantage for sample in samples) == pytest.approx(0, abs=1e-5)


def test_samples_in_flight_and_in_the_buffer_stay_within_the_limit() -> None:
    rows = [{"prompt": f"row {worth}", "worth": worth} for worth in (1, 2, 3)]
    with working(rows=rows, max_inflight_tasks=6) as (worker, server):
        wait_for(lambda: worker.rollout_buffer.qsize() == 6)
        assert len(server.requests) == 6
        take(worker, 2)
        wait_for(lambda: worker.rollout_buffer.qsize() == 6)
    assert len(server.requests) == 8


def test_weights_are_published_as_the_version_that_the_trainer_counts_next() -> None:
    rollouts, _ = rollouts_with()
    with rollouts:
        worker = rollouts.worker([{"prompt": "hi"}], args=async_args())
        transfer = worker.weight_transfer
        transfer.init_weight_transfer()
        transfer.pause()
        transfer.send_weights(iter([("weight", torch.zeros(2))]))
        transfer.resume()
        worker.update_model_version(1)
        worker.start()
        (sample, _) = take(worker, 2)
        worker.stop()
        transfer.destroy()
    assert sample.model_version == 1


def test_a_stalled_worker_is_reported_and_stopping_cancels_trajectories_in_flight() -> None:
    with working(never) as (worker, server):
        wait_for(lambda: server.num_running == 4)
        worker.check_health(60)
        with pytest.raises(RolloutError, match="no trajectory has ended for"):
            worker.check_health(0)
        worker.stop()
        assert server.num_running == 0
        assert server.num_sessions == 0
        with pytest.raises(RolloutError, match="it was stopped"):
            worker.check_health(1e9)


def test_closing_the_rollouts_ends_a_running_worker() -> None:
    rollouts, server = rollouts_with(never)
    with rollouts:
        worker = rollouts.worker([{"prompt": "hi"}], args=async_args())
        worker.start()
        wait_for(lambda: server.num_running == 4)
    worker.stop()
    assert server.num_running == 0


def test_one_broken_row_is_skipped_and_counted_and_too_many_in_a_row_end_the_worker() -> None:
    broken = {"prompt": "hi", "is_broken": True}
    with working(rows=[{"prompt": "a"}, {"prompt": "b"}, broken]) as (worker, _):
        samples = take(worker, 12)
    assert len({sample.group_id for sample in samples}) == 6
    assert worker.metrics_queue.get_nowait() == {"agent_loop/lost_groups_total": 1.0}
    with working(rows=[broken]) as (worker, _):
        wait_for(lambda: "this row has no right answer" in health_error(worker))
        assert worker.rollout_buffer.empty()
    assert worker.metrics_queue.qsize() == MAX_LOST_GROUPS_IN_A_ROW


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7}, "make them equal"),
        ({"max_completion_length": 64}, "max_completion_length is 64"),
    ],
)
def test_arguments_that_contradict_the_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), working(**changes):
        pass


def test_worker_and_weight_transfer_implement_the_trainers_protocols() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol, WeightTransferProtocol

    def missing(thing: Any, protocol: Any) -> list[str]:
        names = {*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))}
        return sorted(name for name in names if not hasattr(thing, name))

    with working() as (worker, _):
        assert not missing(worker, RolloutWorkerProtocol)
        assert not missing(worker.weight_transfer, WeightTransferProtocol)
