"""Journal of a rollout on a cluster: no turn is lost when a worker dies, and no step when the driver dies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_loop.recording.record import RecordKind, RecordPosition
from agent_loop.rollout.journal import StepKey, open_journal
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.cli.test_crash import (
    calls_per_rollout,
    killed_when,
    make_scripted_project,
    read,
    run,
    tokens_by_row,
)
from tests.distributed.cluster import ClusterHarness
from tests.distributed.project import OTHER_PROJECTS, make_config, make_project, rows, set_latency

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), OTHER_PROJECTS]
ON_RAY = [
    "trainer.runtime=ray",
    "trainer.ray.num_cpus_per_server=0.01",
    "trainer.ray.num_cpus_per_worker=0.01",
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Generator[ClusterHarness]:
    folder = make_project(tmp_path_factory.mktemp("project"))
    config = make_config(folder, script="random_answer", num_servers=2, num_workers=2)
    with ClusterHarness(config, folder=folder, cluster=None) as harness:
        yield harness


def key_of(work: list[dict[str, Any]]) -> StepKey:
    return StepKey.of(work, step=1, weight_version=0, num_samples=1, settings={})


def test_cancelled_rows_are_resumed_from_their_partial_outputs(harness: ClusterHarness) -> None:
    """The model never samples the same completion twice."""
    set_latency(harness.folder, 0.8)
    work = [{**row, "agent_name": "partial_tool_agent"} for row in rows(16)]

    async def cancel_when_one_has_ended() -> None:
        harness.manager.cancel_all()

    async def main() -> tuple[list[Trajectory], list[Trajectory]]:
        first = await harness.run(work, breaks=cancel_when_one_has_ended)
        return first, await harness.run(work, earlier=first)

    first, second = harness.runner.run(main())
    cancelled = [t for t in first if t.output.stop_reason is StopReason.CANCELLED]
    assert len(cancelled) > 4
    assert all(t.output.extra_fields["is_cancel"] for t in cancelled)
    assert {t.output.stop_reason for t in second} == {StopReason.ANSWERED}
    for before, after in zip(first, second, strict=True):
        num_tokens = len(before.output.response_ids)
        assert before.output.response_ids.tolist() == after.output.response_ids[:num_tokens].tolist()
    assert not any(harness.runner.run(harness.held()).values())


def test_rows_of_a_killed_worker_resume_from_their_last_turn(harness: ClusterHarness, tmp_path: Path) -> None:
    """The model never samples the same completion twice, so that a repeated turn is detected."""
    set_latency(harness.folder, 0.8)
    work, path = rows(64), tmp_path / "step.journal"

    async def main() -> list[Trajectory]:
        async with open_journal(path, key=key_of(work), rows=work, resume=False) as journal:
            return await harness.run(work, breaks=kill_in_the_middle, journal=journal)

    async def kill_in_the_middle() -> None:
        await wait_for_records(path, RecordKind.OBSERVATION, 40)
        await harness.kill_worker()

    trajectories = harness.runner.run(main())
    records = read(path)
    asked = Counter((r["row"], RecordPosition(*r["at"]), r["is"]) for r in records if "at" in r)
    assert set(asked.values()) == {1}
    assert RecordKind.RESTART not in {record["is"] for record in records}
    tokens = tokens_by_row(records)
    assert {t.trajectory_id: all_tokens(t) for t in trajectories} == tokens
    assert len(tokens) == 64
    assert not any(harness.runner.run(harness.held()).values())


async def wait_for_records(path: Path, kind: RecordKind, count: int) -> None:
    """Wait until the journal has at least `count` records of a kind."""
    while sum(record["is"] == kind for record in read(path)) < count:  # noqa: ASYNC110  (another thread writes it)
        await asyncio.sleep(0.05)


def all_tokens(trajectory: Trajectory) -> list[int]:
    return [token for segment in trajectory.output.segments for token in segment.token_ids.tolist()]


def test_a_cancelled_rollout_resumes_from_its_journal(harness: ClusterHarness, tmp_path: Path) -> None:
    set_latency(harness.folder, 0.5)
    work, path = rows(24), tmp_path / "step.journal"

    async def cut_short() -> None:
        async with (
            open_journal(path, key=key_of(work), rows=work, resume=False) as journal,
            asyncio.TaskGroup() as group,
        ):
            running = group.create_task(harness.manager.run(work, journal=journal))
            await wait_for_records(path, RecordKind.END, 4)
            running.cancel()

    async def resumed() -> list[Trajectory]:
        async with open_journal(path, key=key_of(work), rows=work, resume=True) as journal:
            return await harness.manager.run(work, journal=journal)

    with suppress(asyncio.CancelledError):
        harness.runner.run(cut_short())
    before = tokens_by_row(read(path))
    after = {t.trajectory_id: all_tokens(t) for t in harness.runner.run(resumed())}
    assert len(after) == 24
    assert all(after[row][: len(tokens)] == tokens for row, tokens in before.items())


def test_a_driver_that_was_killed_resumes_on_another_cluster(tmp_path: Path) -> None:
    make_scripted_project(tmp_path, hang="135")
    journal = tmp_path / "out.jsonl.journal"
    command = ["rollout", "config.yaml", *ON_RAY, "--out", "out.jsonl"]
    with killed_when(
        command, tmp_path, journal=journal, counts={RecordKind.END: 6, RecordKind.OBSERVATION: 12}
    ):
        recorded = tokens_by_row(read(journal))
        ended = {record["row"] for record in read(journal) if record["is"] == RecordKind.END}
        (tmp_path / "hang").unlink()
        run([*command, "--resume"], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    after = {line["trajectory_id"]: line["prompt_ids"] + line["response_ids"] for line in lines}
    assert sorted(after) == sorted(recorded) == [f"group={g}/rollout={r}" for g in range(6) for r in range(2)]
    assert all(after[row][: len(tokens)] == tokens for row, tokens in recorded.items())
    assert all(after[row] == recorded[row] for row in ended)
    assert len(ended) == 6
    assert calls_per_rollout(tmp_path) == dict.fromkeys("012345", 2)
