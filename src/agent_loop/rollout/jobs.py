"""Jobs of a run: one per trajectory, with its number and its seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.config import RolloutConfig
from agent_loop.recording.recorded_responses import RecordedResponses
from agent_loop.recording.row_log import RowLog
from agent_loop.rollout.forks import Fork
from agent_loop.seeds import derived_seed
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Row


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One trajectory to run."""

    row: Row
    group: int
    rollout: int
    sampling_params: Mapping[str, Any]
    log: RowLog | None = None
    """Log of its turns. None if no journal is kept."""
    label: str = ""
    """Label of its run. Labels distinguish runs that overlap in time."""
    partial_output: AgentLoopOutput | None = None
    """Output of an earlier, cancelled run of this job. Passed to the loop's `run`."""
    seed: int | None = None
    """Seed from which the seeds of its completions are derived. None leaves seeding to the servers."""
    recorded: RecordedResponses | None = None
    """Responses that are replayed before the loop continues live. None starts from the prompt."""
    environment_seed: int | None = None
    """Seed of tools and interactions. None is `seed`."""

    @property
    def job_id(self) -> str:
        """Name of the job, unique within its run: its group and its rollout."""
        return f"group={self.group}/rollout={self.rollout}"

    @property
    def columns(self) -> Row:
        """Keyword arguments of the loop's `run`."""
        return (
            self.row if self.partial_output is None else {**self.row, "partial_output": self.partial_output}
        )

    @property
    def trajectory_id(self) -> str:
        return f"{self.label}/{self.job_id}" if self.label else self.job_id


class JobFactory:
    """Makes the jobs of runs, and counts the runs of each label so that every run gets seeds of its own."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._num_runs: Counter[tuple[str, bool]] = Counter()
        """Number of runs by label and by whether the run is a validation."""

    def make(
        self,
        rows: Sequence[Row],
        *,
        n: int | None,
        validate: bool,
        label: str = "",
        greedy: bool = False,
        is_resumed: bool = False,
    ) -> list[Job]:
        """Return the jobs of a run, ordered by row, then sample."""
        config = self._config
        kind = (label, validate)
        if not is_resumed or not self._num_runs[kind]:
            self._num_runs[kind] += 1
        seed = self._seed(label, validate=validate)
        n = n or (config.val.n if validate else config.n)
        params = config.sampling_params(validate=validate)
        if greedy:
            params["temperature"] = 0.0
        return [
            Job(row, group, rollout, params, label=label, seed=derived_seed(seed, group, rollout))
            for group, row in enumerate(rows)
            for rollout in range(n)
        ]

    def make_forks(self, forks: Sequence[Fork], *, n: int, label: str) -> list[Job]:
        """Return the jobs of continuations, ordered by fork. The group of a job is the index of its fork.

        Tools and interactions get the seeds that they had in the trajectory that is forked.
        """
        self._num_runs[label, False] += 1
        seed, params = self._seed(label, validate=False), self._config.sampling_params()
        return [
            Job(
                fork.trajectory.row,
                group,
                rollout,
                params,
                label=label,
                seed=derived_seed(seed, group, rollout),
                recorded=fork.recorded,
                environment_seed=derived_seed(
                    self._seed(fork.label, validate=False), fork.group, fork.trajectory.rollout
                ),
            )
            for group, fork in enumerate(forks)
            for rollout in range(n)
        ]

    def _seed(self, label: str, *, validate: bool) -> int:
        """Return the seed of the newest run with a label."""
        return derived_seed(self._config.seed, label, validate, self._num_runs[label, validate])
