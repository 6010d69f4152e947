"""Kill servers, workers and nodes at random, many times: `python -m tests.distributed.fault_runs --runs 20`.

Each run is a tool rollout of 512 rows on 4 server actors and 4 workers. During the run, one to three processes or nodes
are killed with SIGKILL. The trajectories are compared, token by token, with those of a run in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from agent_loop.rollout.journal import StepKey, open_journal
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.trajectory import Trajectory
from tests.distributed.cluster import NODE, ClusterHarness, cluster_of
from tests.distributed.project import make_config, make_project, rows, set_latency
from tests.rollout.journaled import records_of

NUM_ROWS = 512


def tokens_of(trajectory: Trajectory) -> tuple[object, ...]:
    output = trajectory.output
    logprobs = output.response_logprobs
    return (
        trajectory.trajectory_id,
        output.prompt_ids.tobytes(),
        output.response_ids.tobytes(),
        output.response_mask.tobytes(),
        None if logprobs is None else logprobs.tobytes(),
        str(output.stop_reason),
        trajectory.reward,
    )


async def reference(folder: Path) -> list[tuple[object, ...]]:
    async with AgentLoopManager.from_config(make_config(folder, runtime="local", script="answer")) as manager:
        return [tokens_of(trajectory) for trajectory in await manager.run(rows(NUM_ROWS))]


class RandomFaults:
    """Faults of one run, chosen by a random generator."""

    def __init__(self, harness: ClusterHarness, *, seed: int) -> None:
        self._harness = harness
        self._random = random.Random(seed)
        self.done: list[str] = []

    async def run(self) -> None:
        for _ in range(self._random.choice([1, 1, 2, 3])):
            await asyncio.sleep(self._random.uniform(0, 1.5))
            what = self._random.choice(["server", "worker", "node"])
            index = self._random.randrange(4)
            self.done.append(what if what == "node" else f"{what} {index}")
            match what:
                case "server":
                    await self._harness.kill_server(index)
                case "worker":
                    await self._harness.kill_worker(index)
                case _:
                    self._harness.cluster.add_node(**NODE)
                    await self._harness.kill_node()


async def run_journaled(
    harness: ClusterHarness, faults: RandomFaults, *, after: int
) -> tuple[list[Trajectory], int]:
    """Return the trajectories, and the number of turns that were recorded twice, which must be 0."""
    work, path = rows(NUM_ROWS), harness.folder / "step.journal"
    key = StepKey.of(work, step=1, weight_version=0, num_samples=1, settings={})
    async with open_journal(path, key=key, rows=work, resume=False) as journal:
        trajectories = await harness.run(work, breaks=faults.run, after=after, journal=journal)
    places = Counter((r["row"], *r["at"], r["is"]) for r in records_of(path.read_bytes()) if "at" in r)
    return trajectories, sum(count - 1 for count in places.values())


def fault_run(harness: ClusterHarness, expected: list[tuple[object, ...]], *, seed: int) -> str | None:
    """Run rows with faults, with a journal if the seed is odd. Return what is wrong with the result, if anything is."""
    faults, after = RandomFaults(harness, seed=seed), seed % 300
    started, num_repeated = time.perf_counter(), 0
    if seed % 2:
        trajectories, num_repeated = harness.runner.run(run_journaled(harness, faults, after=after))
    else:
        trajectories = harness.runner.run(harness.run(rows(NUM_ROWS), breaks=faults.run, after=after))
    seconds = time.perf_counter() - started
    found = [tokens_of(trajectory) for trajectory in trajectories]
    held = {name: count for name, count in harness.runner.run(harness.held()).items() if count}
    same = sum(a == b for a, b in zip(found, expected, strict=False))
    killed = ", ".join(faults.done) or "nothing"
    print(f"run {seed}: killed {killed}; {len(found)} rows, {same} the same, {seconds:.1f} s")
    if found != expected:
        wrong = next((a, b) for a, b in zip(trajectories, expected, strict=False) if tokens_of(a) != b)
        return (
            f"{len(found)} rows, {same} the same; first: {wrong[0].trajectory_id} {wrong[0].output.failure}"
        )
    if num_repeated:
        return f"{num_repeated} turns were recorded twice"
    return f"not cleaned up: {held}" if held else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = make_project(Path(name))
        expected = asyncio.run(reference(folder))
        set_latency(folder, 0.3)
        with (
            cluster_of(3) as cluster,
            ClusterHarness(make_config(folder), folder=folder, cluster=cluster) as harness,
        ):
            num_failed = 0
            for seed in range(arguments.first, arguments.first + arguments.runs):
                error = fault_run(harness, expected, seed=seed)
                num_failed += error is not None
                if error is not None:
                    print(f"run {seed}: {error}")
                harness.runner.run(harness.recovered())
    print(f"{arguments.runs} runs of {NUM_ROWS} rows, {num_failed} with lost, repeated or changed rows")
    if num_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
