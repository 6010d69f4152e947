"""The top of a rollout: rows in, trajectories or a batch of tensors out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.verify import require_template
from agent_loop.config import Config, RolloutConfig
from agent_loop.errors import DataError, did_you_mean
from agent_loop.interactions.selection import read_interaction_name
from agent_loop.loops import ToolAgentLoop
from agent_loop.rewards.function import BatchRewardFunction, RewardFunction
from agent_loop.rollout.earlier import divide
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.first_groups import FirstGroups
from agent_loop.rollout.group_scoring import GroupScoring
from agent_loop.rollout.journal.step import StepJournal
from agent_loop.rollout.parts import (
    load_context,
    load_loops,
    load_reward_function,
    load_template,
    make_gate,
    make_server_manager,
    make_worker,
)
from agent_loop.rollout.reports import Reports
from agent_loop.rollout.rows import refuse_bad_columns
from agent_loop.rollout.worker import AgentLoopWorker, Job
from agent_loop.rollout.workers import LocalWorkers, Workers
from agent_loop.runtime.collector import rare_collections
from agent_loop.runtime.concurrency import run_shielded, run_until, running_beside
from agent_loop.runtime.threads import run_in_thread
from agent_loop.seeds import derived_seed
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.factory import create_servers
from agent_loop.tools.selection import read_selection
from agent_loop.tracing.tracer import with_trace_names
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

if TYPE_CHECKING:
    import torch

    from agent_loop.rollout.batch import RolloutBatch

CLOSE_TIMEOUT_S = 30.0
LARGE_BATCH = 100_000
"""Tokens, padded to the limits: from here on, a batch takes milliseconds to assemble, which the event loop is spared.
In a thread it takes 1.4 times as long, since another core has none of it in its caches."""


class AgentLoopManager:
    """Owns the servers and the workers of a run.

    Args:
        config: Limits, sampling and names of loops, tools and interactions.
        servers: The LLM servers; closed with the manager.
        template: The model's chat template.
        reward: Scores trajectories that have no reward of their own. The manager itself calls a `BatchRewardFunction`,
            wherever its workers are; the workers made here call any other.
        workers: Who runs the loops; None makes `rollout.agent.num_workers` in this process. Closed with the manager.
        settings: The settings of the run outside `config`, for loops that read them, as verl's do.

    Raises:
        ConfigError: A loop, tool or interaction that the config names does not exist or cannot be loaded.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        servers: Sequence[AsyncServerBase],
        template: ChatTemplate,
        reward: RewardFunction | BatchRewardFunction | None = None,
        workers: Workers | None = None,
        settings: Config | None = None,
    ) -> None:
        self.config = config
        self.template = template
        for server in servers:
            server.template = server.template or template
        self.server_manager = make_server_manager(config, servers, vocab_size=template.vocab_size)
        self._context = load_context(
            config, server_manager=self.server_manager, template=template, settings=settings
        )
        self._loops = load_loops(config)
        self._batch_reward = reward if isinstance(reward, BatchRewardFunction) else None
        self._workers = workers or LocalWorkers(self._make_local_workers(reward))
        self.reports = Reports(
            config, template=template, pool=self.server_manager.pool, workers=self._workers
        )
        self._num_runs: Counter[tuple[str, bool]] = Counter()
        """By label, in training and in validation."""
        self._waking = asyncio.Lock()
        self._num_awake = 0

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Loads everything that a configuration names.

        Raises:
            ConfigError: Something named does not exist or does not fit.
            ChatTemplateError: The model's chat template cannot write the conversations of this run.
        """
        template, reward = load_template(config), load_reward_function(config)
        multi_turn = config.rollout.multi_turn
        require_template(template, tools=multi_turn.has_tools)
        servers = create_servers(config.model, rollout=config.rollout)
        rollout = with_trace_names(config)
        return cls(rollout, servers=servers, template=template, reward=reward, settings=config)

    async def generate_sequences(
        self, rows: Sequence[Row], *, n: int | None = None, validate: bool = False
    ) -> RolloutBatch:
        """Runs `n` trajectories per row and assembles them.

        Args:
            rows: Any number of them, each with `raw_prompt`.
            n: Trajectories per row; None is `rollout.n` (`rollout.val.n` in validation).
            validate: Sample as `rollout.val` says.

        Returns:
            A `tensordict.TensorDict` with one row per trajectory, ordered by row, then sample; `batch["timing"]` holds
            the timing metrics. See `agent_loop.rollout.batch` for the fields, and `agent_loop.rollout.jagged` for those
            of `rollout.pad_to=none`.

        Raises:
            RolloutError: More trajectories failed than `rollout.max_failed_share` allows.
        """
        with rare_collections():  # (the next one finds the batch alone, not all that it was made of)
            return await self._generate_sequences(rows, n=n, validate=validate)

    async def _generate_sequences(
        self, rows: Sequence[Row], *, n: int | None, validate: bool
    ) -> RolloutBatch:
        # late: needs torch; running loops does not
        from agent_loop.rollout.batch import assemble, timing_metrics
        from agent_loop.rollout.jagged import assemble_jagged

        config = self.config
        trajectories = await self.run(rows, n=n, validate=validate)
        make = partial(assemble_jagged, trajectories)
        if config.pad_to != "none":
            fixed = config.pad_to == "limits"
            make = partial(
                assemble,
                trajectories,
                pad_token_id=self.template.pad_token_id,
                prompt_width=config.prompt_length if fixed else None,
                response_width=config.response_length if fixed else None,
            )
        is_large = len(trajectories) * (config.prompt_length + config.response_length) > LARGE_BATCH
        batch = await run_in_thread(make) if is_large else make()
        batch.set_non_tensor("timing", timing_metrics(trajectories))
        return batch

    async def run(
        self,
        rows: Sequence[Row],
        *,
        n: int | None = None,
        validate: bool = False,
        num_groups: int | None = None,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        journal: StepJournal | None = None,
        label: str = "",
        greedy: bool = False,
        earlier: Iterable[Trajectory] = (),
    ) -> list[Trajectory]:
        """Runs `n` trajectories per row, ordered by row, then sample.

        Where seeds cost the servers nothing, those of the completions follow from `rollout.seed`, the label, how many
        runs had this label before, the place of the row in `rows`, the sample, and the tokens before the completion. A
        run with `earlier` has those of the run before it.

        Cancelling it cancels every trajectory; when it returns or raises nothing of it runs any more. Several may run
        at once, each with a label of its own.

        Args:
            num_groups: Return as soon as all trajectories of so many rows have ended, with those rows' alone; what
                still runs is cancelled. None waits for all.
            on_trajectory: Told of each trajectory as it ends.
            journal: Keeps the turns, and has those of a run that was killed: what ended there is not run again, what
                did not goes on from its last turn.
            label: Becomes the beginning of the trajectories' names, which `cancel` takes and the log says.
            greedy: Sample the most probable token each time, whatever the settings say.
            earlier: What an earlier run of the same rows returned: those of its trajectories that were not cancelled
                are returned as they are; of the others, those of `AsyncPartialToolAgentLoop` go on where they were.

        Raises:
            DataError: A row names a loop, tool or interaction that does not exist; nothing was run.
            RolloutError: More trajectories failed than `rollout.max_failed_share` allows.
            JournalError: The journal cannot be written.
        """
        earlier = list(earlier)
        jobs = self._jobs(rows, n=n, validate=validate, label=label, greedy=greedy, is_first_part=not earlier)
        on_trajectory = self.reports.tracing.telling(rows, label=label, validate=validate, then=on_trajectory)
        outcome = None if journal is None else journal.outcome()
        if outcome is not None:
            _tell(outcome, on_trajectory)
            return outcome
        if num_groups is None or num_groups >= len(rows):
            trajectories = await self._run_jobs(
                jobs, on_trajectory=on_trajectory, journal=journal, earlier=earlier
            )
        else:
            trajectories = await self._run_first(
                jobs,
                num_groups=num_groups,
                size=len(jobs) // len(rows),
                on_trajectory=on_trajectory,
                journal=journal,
                earlier=earlier,
            )
        if journal is not None:
            await journal.complete(trajectories)
        return trajectories

    async def _run_first(
        self,
        jobs: Sequence[Job],
        *,
        num_groups: int,
        size: int,
        on_trajectory: Callable[[Trajectory], None] | None,
        journal: StepJournal | None,
        earlier: Iterable[Trajectory],
    ) -> list[Trajectory]:
        """Runs until so many groups are complete."""
        first = FirstGroups(num_groups, size=size)

        def note(trajectory: Trajectory) -> None:
            if first.add(trajectory) and on_trajectory is not None:
                on_trajectory(trajectory)

        running = self._run_jobs(jobs, on_trajectory=note, journal=journal, earlier=earlier)
        await run_until(running, first.are_complete)
        return first.trajectories

    def check_rows(self, rows: Iterable[Row]) -> None:
        """Check that what the rows name exists. `run` does this for its own rows; a training does it for all at once.

        Raises:
            DataError: A row names a loop, tool or interaction that does not exist, or is missing a name.
        """
        methods = [name for factory in self._context.environments.values() for name in factory.schemas]
        known = {*self._context.tools, *methods}
        for number, row in enumerate(rows):
            self._check_row(row, number=number, known=known)

    async def stream(
        self, rows: Sequence[Row], *, n: int | None = None, validate: bool = False
    ) -> AsyncGenerator[Trajectory]:
        """Runs `n` trajectories per row and yields each as it ends.

        Leaving the iteration, as with `contextlib.aclosing`, cancels what still runs.

        Raises:
            DataError, RolloutError: As `run`.
        """
        jobs = self._jobs(rows, n=n, validate=validate)
        ended: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        tell = self.reports.tracing.telling(rows, label="", validate=validate, then=ended.put_nowait)

        async def run_all() -> None:
            try:
                await self._run_jobs(jobs, on_trajectory=tell)
            finally:
                ended.put_nowait(None)

        async with running_beside(run_all()):
            while (trajectory := await ended.get()) is not None:
                yield trajectory

    def cancel(self, trajectory_id: str) -> bool:
        """Ends one running trajectory with `cancelled`, its tokens kept; tells whether it was running."""
        return self._workers.cancel(trajectory_id)

    def cancel_all(self) -> None:
        """Ends every trajectory of the present runs with `cancelled`, its tokens kept; `run(earlier=...)` goes on with
        those of `AsyncPartialToolAgentLoop`. Loops that work on token ids instead of episodes do not notice."""
        self._workers.cancel_all()

    @asynccontextmanager
    async def awake(self) -> AsyncGenerator[None]:
        """Servers that `rollout.free_cache_engine` puts to sleep are ready meanwhile. They wake up when the first of
        those who need them comes, and sleep when the last has gone."""
        if not self.config.free_cache_engine:
            yield
            return
        async with self._waking:
            if not self._num_awake:
                await self.wake_up()
            self._num_awake += 1
        try:
            yield
        finally:
            await run_shielded(self._no_longer_needed, timeout_s=CLOSE_TIMEOUT_S)

    async def wake_up(self) -> None:
        """Makes the servers ready: weights on the device, KV cache allocated."""
        await self.server_manager.wake_up()

    async def sleep(self) -> None:
        """Frees the servers' KV caches and gives their devices to the trainer."""
        await self.server_manager.sleep()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Publishes new weights to all servers.

        Raises:
            WeightsError: They do not fit the servers' model; nothing was changed.
        """
        await self.server_manager.update_weights(weights, weight_version=weight_version)
        await self._workers.set_weight_version(weight_version)

    async def start(self) -> None:
        """Brings the servers' engines up; `async with` does it.

        Raises:
            ServerError: One did not come up.
        """
        await self.server_manager.start()
        try:
            await self._workers.start()
            self.reports.start()
        except BaseException:
            await run_shielded(self.close, timeout_s=CLOSE_TIMEOUT_S)
            raise

    async def close(self) -> None:
        """Ends the workers and the servers."""
        try:
            await self._workers.close()
        finally:
            try:
                await self.server_manager.close()
            finally:
                await self.reports.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        timeout_s = CLOSE_TIMEOUT_S + self.config.trace.flush_timeout_s
        await run_shielded(self.close, timeout_s=timeout_s)

    async def _no_longer_needed(self) -> None:
        async with self._waking:
            self._num_awake -= 1
            if not self._num_awake:
                await self.sleep()

    def _make_local_workers(
        self, reward: RewardFunction | BatchRewardFunction | None
    ) -> list[AgentLoopWorker]:
        """Workers in this process; where the servers bound what is in flight, they bound it for all together."""
        is_shared = self.config.max_concurrent == "auto"
        gate = make_gate("auto", pool=self.server_manager.pool) if is_shared else None
        return [
            make_worker(self.config, context=self._context, loops=self._loops, reward=reward, gate=gate)
            for _ in range(self.config.agent.num_workers)
        ]

    def _jobs(
        self,
        rows: Sequence[Row],
        *,
        n: int | None,
        validate: bool,
        label: str = "",
        greedy: bool = False,
        is_first_part: bool = True,
    ) -> list[Job]:
        self.check_rows(rows)
        kind = (label, validate)
        if is_first_part or not self._num_runs[kind]:
            self._num_runs[kind] += 1
        seed = derived_seed(self.config.seed, label, validate, self._num_runs[kind])
        n = n or (self.config.val.n if validate else self.config.n)
        params = {**self._sampling_params(validate=validate), **({"temperature": 0.0} if greedy else {})}
        return [
            Job(row, group, rollout, params, label=label, seed=derived_seed(seed, group, rollout))
            for group, row in enumerate(rows)
            for rollout in range(n)
        ]

    async def _run_jobs(
        self,
        jobs: Sequence[Job],
        *,
        on_trajectory: Callable[[Trajectory], None] | None,
        journal: StepJournal | None = None,
        earlier: Iterable[Trajectory] = (),
    ) -> list[Trajectory]:
        budget = FailureBudget(num_trajectories=len(jobs), max_share=self.config.max_failed_share)
        ended: list[Trajectory] = []
        rest = jobs
        if journal is not None:
            ended, rest = journal.divide(rest)
        over, rest = divide(rest, earlier)
        ended += over
        if self._batch_reward is None:
            _tell(ended, on_trajectory)
            with self.reports.counting(len(rest), then=on_trajectory) as note:
                ran = await self._run_workers(rest, budget=budget, on_trajectory=note)
            return _in_order([*ended, *ran]) if ended else ran
        running = {(job.group, job.rollout) for job in rest}
        with self.reports.counting(len(rest), then=on_trajectory) as note:

            def tell(trajectory: Trajectory) -> None:
                is_new = (trajectory.group, trajectory.rollout) in running
                _tell([trajectory], note if is_new else on_trajectory)

            scoring = GroupScoring(
                self._batch_reward, jobs=jobs, budget=budget, journal=journal, on_trajectory=tell
            )
            async with scoring.running():
                _tell(ended, scoring.add)
                await self._run_workers(rest, budget=budget, on_trajectory=scoring.add)
        return _in_order(scoring.trajectories)

    async def _run_workers(
        self,
        jobs: Sequence[Job],
        *,
        budget: FailureBudget,
        on_trajectory: Callable[[Trajectory], None] | None,
    ) -> list[Trajectory]:
        if not jobs:
            return []
        async with self.awake(), self.server_manager.watching():
            return await self._workers.run(jobs, budget=budget, on_trajectory=on_trajectory)

    def _check_row(self, row: Row, *, number: int, known: Collection[str]) -> None:
        """Args: known: The names of all tools, those of environments included."""
        if "raw_prompt" not in row:
            raise DataError(f"row {number} has no raw_prompt; its columns are {', '.join(sorted(row))}")
        refuse_bad_columns(row, where=f"row {number}")
        agent_name = str(row.get("agent_name") or self.config.agent.default_agent_loop)
        loop_class = self._loops.get(agent_name, where=f"row {number}: agent_name").loop_class
        if kwargs := row.get("tools_kwargs"):
            _refuse_unknown(kwargs, self._context.tools, f"row {number}: tools_kwargs")
        if "tool_selection" in row:
            read_selection(row["tool_selection"], known=known, where=f"row {number}: tool_selection")
        interaction_kwargs: Mapping[str, Any] = row.get("interaction_kwargs") or {}
        if issubclass(loop_class, ToolAgentLoop) or interaction_kwargs.get("name") is not None:
            where = f"row {number}: interaction_kwargs"
            read_interaction_name(interaction_kwargs, known=self._context.interactions, where=where)

    def _sampling_params(self, *, validate: bool) -> Mapping[str, Any]:
        source = self.config.val if validate else self.config
        params: dict[str, Any] = {
            "temperature": source.temperature,
            "top_p": source.top_p,
            "top_k": source.top_k,
            "repetition_penalty": 1.0,  # (none; code written for verl reads the key)
        }
        max_tokens = self.config.val.max_turn_tokens if validate else None
        return params if max_tokens is None else params | {"max_tokens": max_tokens}


def _in_order(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.group, t.rollout, t.branch or 0))


def _tell(trajectories: Iterable[Trajectory], on_trajectory: Callable[[Trajectory], None] | None) -> None:
    if on_trajectory is not None:
        for trajectory in trajectories:
            on_trajectory(trajectory)


def _refuse_unknown(names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise DataError(f"{where}: there is no {name!r}{did_you_mean(name, known)}")
