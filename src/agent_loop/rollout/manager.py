"""The top of a rollout: rows in, trajectories or a batch of tensors out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from agent_loop.chat.template import ChatTemplate
from agent_loop.chat.verify import require_template
from agent_loop.config import Config, RolloutConfig
from agent_loop.environments.factory import find_environment
from agent_loop.errors import DataError, did_you_mean
from agent_loop.interactions.registry import read_interaction_name
from agent_loop.loading import import_extra
from agent_loop.loops import ToolAgentLoop
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.environment_agent import EnvironmentAgentLoop
from agent_loop.loops.registry import LoopRegistry
from agent_loop.planning.devices import assign, visible_devices
from agent_loop.rewards.function import BatchRewardFunction, RewardFunction
from agent_loop.rollout.components import (
    load_context,
    load_loops,
    load_reward_function,
    load_template,
    make_gate,
    make_server_manager,
    make_worker,
)
from agent_loop.rollout.failures import FailureBudget
from agent_loop.rollout.forks import Fork, refuse_forks
from agent_loop.rollout.jobs import Job, JobFactory
from agent_loop.rollout.journal import StepJournal
from agent_loop.rollout.rows import refuse_bad_columns
from agent_loop.rollout.scoring import GroupScoring
from agent_loop.rollout.stages import (
    OnTrajectory,
    SleepingServers,
    num_groups_of,
    run_first_groups,
    split_resumed,
)
from agent_loop.rollout.worker import AgentLoopWorker, Workers
from agent_loop.runtime.concurrency import run_shielded, running_in_background
from agent_loop.runtime.garbage_collection import infrequent_collections
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import AsyncServerBase, refuse_sampling_params
from agent_loop.servers.factory import create_servers
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import read_selection
from agent_loop.tracing.tracer import Tracer, with_trace_names
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row, SamplingParams

if TYPE_CHECKING:
    import torch

    from agent_loop.rollout.batch import RolloutBatch
    from agent_loop.rollout.prometheus_metrics import RolloutMetrics

CLOSE_TIMEOUT_S = 30.0


class AgentLoopManager:
    """Owns the servers and the workers of a run.

    Args:
        config: Limits, sampling and names of loops, tools and interactions.
        servers: The LLM servers. Closed with the manager.
        template: The model's chat template.
        reward: Scores trajectories that have no reward of their own. The manager itself calls a `BatchRewardFunction`,
            wherever its workers run. A worker made here calls any other.
        workers: Run the loops. None makes one in this process. Closed with the manager.
        settings: The settings of the run outside `config`, for loops that read them, as verl's do.
        tools: Tools by name, in addition to those that `config` names. A worker made here has them.

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
        tools: Mapping[str, BaseTool] | None = None,
    ) -> None:
        self.config = config
        self.template = template
        for server in servers:
            server.template = server.template or template
        self.server_manager = make_server_manager(config, servers, vocab_size=template.vocab_size)
        context = load_context(
            config, server_manager=self.server_manager, template=template, settings=settings, tools=tools
        )
        loops = load_loops(config)
        self._context = context
        self._batch_reward = reward if isinstance(reward, BatchRewardFunction) else None
        self._local: AgentLoopWorker | None = None
        if workers is None:
            count = config.agent.num_workers
            gate = make_gate(config.max_concurrent, pool=self.server_manager.pool, num_workers=count)
            workers = self._local = make_worker(
                config, context=context, loops=loops, reward=reward, gate=gate
            )
        self._workers = workers
        self.tracing = Tracer(config, template=template)
        self.metrics = None if config.metrics_port is None else self._make_metrics()
        self._loops = loops
        self._jobs = JobFactory(config)
        self._is_colocated = settings is not None and settings.placement.colocated is not None
        self._servers = SleepingServers(self.server_manager, free_cache_engine=config.free_cache_engine)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Load everything that a configuration names.

        Raises:
            ConfigError: Something that the configuration names does not exist or does not fit.
            ChatTemplateError: The model's chat template cannot write the conversations of this run.
        """
        template, reward = load_template(config), load_reward_function(config)
        multi_turn = config.rollout.multi_turn
        require_template(template, tools=multi_turn.has_tools)
        servers = create_servers(
            config.model,
            rollout=config.rollout,
            placement=config.placement,
            assignment=assign(config, devices=visible_devices(), trains=False),
        )
        rollout = with_trace_names(config)
        return cls(rollout, servers=servers, template=template, reward=reward, settings=config)

    async def generate_sequences(
        self, rows: Sequence[Row], *, n: int | None = None, validate: bool = False
    ) -> RolloutBatch:
        """Run `n` trajectories per row and assemble them.

        Args:
            rows: Any number of rows, each with `raw_prompt`.
            n: Trajectories per row. None means `rollout.n` (`rollout.val.n` in validation).
            validate: Sample as `rollout.val` says.

        Returns:
            A `tensordict.TensorDict` with one row per trajectory, ordered by row, then sample; `batch["timing"]` holds
            the timing metrics. See `agent_loop.rollout.batch.assemble` for the fields.

        Raises:
            RolloutError: More trajectories failed than `rollout.max_failed_share` allows.
        """
        from agent_loop.rollout.batch import make_batch  # late: needs torch; running loops does not

        # The next garbage collection finds the batch alone, without the trajectories.
        with infrequent_collections():
            trajectories = await self.run(rows, n=n, validate=validate)
            make = partial(
                make_batch, trajectories, config=self.config, pad_token_id=self.template.pad_token_id
            )
            return await run_in_thread(make)

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
        """Run `n` trajectories per row, and return them ordered by row, then sample.

        If seeding costs the servers nothing, the seed of a completion is derived from `rollout.seed`, the label, the
        number of earlier runs with this label, the index of the row in `rows`, the sample, and the tokens before the
        completion. A run with `earlier` uses the seeds of the run before it.

        Cancelling a run cancels all its trajectories. Nothing of the run is in flight after it returns or raises.
        Several runs may overlap in time if their labels differ.

        Args:
            rows: Any number of rows, each with `raw_prompt`.
            n: Trajectories per row. None means `rollout.n` (`rollout.val.n` in validation).
            validate: Sample as `rollout.val` says.
            num_groups: Return as soon as this number of rows is complete, with the trajectories of these rows alone,
                and cancel the rest. None waits for all rows.
            on_trajectory: Called with each trajectory as it ends.
            journal: Records the turns, and replays the turns of a run that was killed: what ended is not run again,
                and what did not end resumes from its last turn.
            label: Prefix of the trajectories' ids, which `cancel` takes and the log shows.
            greedy: Sample the most probable token each time, regardless of the settings.
            earlier: Trajectories that an earlier run of the same rows returned. Those that were not cancelled are
                returned unchanged; cancelled trajectories of `AsyncPartialToolAgentLoop` are resumed; other cancelled
                trajectories start again.

        Raises:
            DataError: A row names a loop, tool or interaction that does not exist; nothing was run.
            RolloutError: More trajectories failed than `rollout.max_failed_share` allows.
            JournalError: The journal cannot be written.
        """
        earlier = list(earlier)
        self.check_rows(rows)
        jobs = self._jobs.make(
            rows, n=n, validate=validate, label=label, greedy=greedy, is_resumed=bool(earlier)
        )
        trace = self.tracing.trace_callback(rows, label=label, validate=validate, then=on_trajectory)
        return await self._run_jobs(
            jobs, on_trajectory=trace, num_groups=num_groups, journal=journal, earlier=earlier
        )

    async def run_forks(
        self,
        forks: Sequence[Fork],
        *,
        n: int,
        on_trajectory: Callable[[Trajectory], None] | None = None,
        journal: StepJournal | None = None,
        label: str = "",
    ) -> list[Trajectory]:
        """Sample `n` continuations of each fork, and return them ordered by fork.

        A continuation replays the responses before the fork, with tools and interactions restored as their `on_replay`
        declares, and goes on live. Its group is the index of its fork. If it is run again after a failure or a crash,
        it starts from the fork.

        Args:
            forks: The forks. Their trajectories were sampled by runs of this manager.
            n: Continuations per fork.
            on_trajectory: Called with each continuation as it ends.
            journal: Records the continuations that ended, which are not run again.
            label: Prefix of the ids of the continuations. Another one than that of the runs that are forked.
        """
        rows = [fork.trajectory.row for fork in forks]
        trace = self.tracing.trace_callback(rows, label=label, validate=False, then=on_trajectory)
        jobs = self._jobs.make_forks(forks, n=n, label=label)
        return await self._run_jobs(jobs, on_trajectory=trace, journal=journal)

    def check_forks(self) -> None:
        """Check that `run_forks` gives continuations whose rewards are right."""
        refuse_forks(self._context, has_batch_reward=self._batch_reward is not None)

    def check_rows(self, rows: Iterable[Row]) -> None:
        """Check that what the rows name exists. `run` checks its own rows; a training checks all rows at its start."""
        default = self.config.default_agent_loop
        check_rows(rows, self._context, loops=self._loops, default_agent_loop=default)

    async def stream(
        self, rows: Sequence[Row], *, n: int | None = None, validate: bool = False
    ) -> AsyncGenerator[Trajectory]:
        """Run `n` trajectories per row and yield each as it ends.

        Leaving the iteration, as with `contextlib.aclosing`, cancels the trajectories in flight.
        """
        ended: asyncio.Queue[Trajectory | None] = asyncio.Queue()

        async def run_all() -> None:
            try:
                await self.run(rows, n=n, validate=validate, on_trajectory=ended.put_nowait)
            finally:
                ended.put_nowait(None)

        async with running_in_background(run_all()):
            while (trajectory := await ended.get()) is not None:
                yield trajectory

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory with `cancelled`, its tokens kept. Return whether it was in flight."""
        return self._workers.cancel(trajectory_id)

    def cancel_all(self) -> None:
        """End every trajectory of the present runs with `cancelled`, its tokens kept.

        `run(earlier=...)` resumes those of `AsyncPartialToolAgentLoop`. Loops that work on token ids instead of
        episodes are not cancelled.
        """
        self._workers.cancel_all()

    def awake(self) -> AbstractAsyncContextManager[None]:
        """Keep the servers awake in the body, where `rollout.free_cache_engine` puts them to sleep.

        The servers wake up for the first user and sleep after the last.
        """
        return self._servers.awake()

    async def wake_up(self) -> None:
        """Make the servers ready: weights on the device, KV cache allocated."""
        await self.server_manager.pool.wake_up()

    async def sleep(self) -> None:
        """Free the servers' KV caches and give their devices to the trainer."""
        await self.server_manager.pool.sleep()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        """Publish new weights to all servers.

        Raises:
            WeightsError: They do not fit the servers' model; nothing was changed.
        """
        await self.server_manager.pool.update_weights(weights, weight_version=weight_version)
        await self._workers.set_weight_version(weight_version)

    async def start(self) -> None:
        """Start the servers' engines. Called by `async with`.

        Raises:
            ServerError: A server did not come up.
            ConfigError: A server does not offer a sampling parameter of the rollout.
        """
        await self.server_manager.pool.start()
        try:
            params = SamplingParams.parse(self.config.sampling_params())
            for server in self.server_manager.pool.servers:
                refuse_sampling_params(server, params)
            await self._workers.start()
            if self._is_colocated:
                await self.sleep()  # the trainer loads its model next
            if self.metrics is not None:
                self.metrics.start(host=self.config.metrics_host, port=self.config.metrics_port or 0)
        except BaseException:
            await run_shielded(self.close, timeout_s=CLOSE_TIMEOUT_S)
            raise

    async def close(self) -> None:
        """Close the workers, the servers, the writers of traces and the metrics."""
        try:
            await self._workers.close()
        finally:
            try:
                await self.server_manager.pool.close()
            finally:
                await run_in_thread(self.tracing.close)
                if self.metrics is not None:
                    await run_in_thread(self.metrics.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        timeout_s = CLOSE_TIMEOUT_S + self.config.trace.flush_timeout_s
        await run_shielded(self.close, timeout_s=timeout_s)

    async def _run_jobs(
        self,
        jobs: Sequence[Job],
        *,
        on_trajectory: OnTrajectory | None,
        num_groups: int | None = None,
        journal: StepJournal | None = None,
        earlier: Sequence[Trajectory] = (),
    ) -> list[Trajectory]:
        """Return the trajectories of jobs, ordered by group, then rollout."""
        report: OnTrajectory = on_trajectory or (lambda _: None)
        recorded = None if journal is None else journal.outcome()
        if recorded is not None:
            for trajectory in recorded:
                report(trajectory)
            return recorded
        run_all = partial(self._run_all, jobs, journal=journal, earlier=earlier)
        if num_groups is None or num_groups >= num_groups_of(jobs):
            trajectories = await run_all(report)
        else:
            trajectories = await run_first_groups(
                run_all, jobs=jobs, num_groups=num_groups, on_trajectory=report
            )
        if journal is not None:
            await journal.complete(trajectories)
        return trajectories

    async def _run_all(
        self,
        jobs: Sequence[Job],
        on_trajectory: OnTrajectory,
        *,
        journal: StepJournal | None,
        earlier: Sequence[Trajectory],
    ) -> list[Trajectory]:
        """Skip finished jobs, and count, score and run the remaining ones."""
        finished, remaining = ([], jobs) if journal is None else journal.divide(jobs)
        resumed, remaining = split_resumed(remaining, earlier)
        new = {(job.group, job.rollout) for job in remaining}
        budget = FailureBudget(num_trajectories=len(jobs), max_share=self.config.max_failed_share)
        counting = (
            nullcontext(on_trajectory)
            if self.metrics is None
            else self.metrics.counting(len(remaining), then=on_trajectory)
        )
        with counting as count:

            def report(trajectory: Trajectory) -> None:
                is_new = (trajectory.group, trajectory.rollout) in new
                (count if is_new else on_trajectory)(trajectory)

            scoring = GroupScoring(
                self._batch_reward,
                jobs=jobs,
                budget=budget,
                journal=journal,
                on_trajectory=report,
                retries=self.config.retries,
            )
            async with scoring.running():
                for trajectory in (*finished, *resumed):
                    scoring.add(trajectory)
                if remaining:
                    async with self._servers.awake(), self.server_manager.pool.watching():
                        await self._workers.run(remaining, budget=budget, on_trajectory=scoring.add)
        return sorted(scoring.trajectories, key=lambda t: (t.group, t.rollout, t.branch or 0))

    def _make_metrics(self) -> RolloutMetrics:
        import_extra("prometheus_client", extra="prometheus", by="rollout.metrics_port")
        from agent_loop.rollout.prometheus_metrics import RolloutMetrics  # late: optional

        return RolloutMetrics(
            self.server_manager.pool,
            gate=None if self._local is None else self._local.gate,
            num_dropped=self.tracing.num_dropped,
        )


def check_rows(
    rows: Iterable[Row], context: LoopContext, *, loops: LoopRegistry, default_agent_loop: str
) -> None:
    """Check all rows of a run."""
    for number, row in enumerate(rows):
        where = f"row {number}"
        if "raw_prompt" not in row:
            raise DataError(f"{where} has no raw_prompt; its columns are {', '.join(sorted(row))}")
        refuse_bad_columns(row, where=where)
        entry = loops.get(str(row.get("agent_name") or default_agent_loop), where=f"{where}: agent_name")
        entry.loop_class.check_row(row, entry.kwargs, where=where)
        for name in row.get("tools_kwargs") or ():
            if name not in context.tools:
                near = did_you_mean(name, context.tools)
                raise DataError(f"{where}: tools_kwargs: there is no {name!r}{near}")
        known_tools = _known_tools(row, entry.loop_class, context, where=where)
        if "tool_selection" in row and known_tools is not None:
            read_selection(row["tool_selection"], known=known_tools, where=f"{where}: tool_selection")
        interaction_kwargs: Mapping[str, Any] = row.get("interaction_kwargs") or {}
        if issubclass(entry.loop_class, ToolAgentLoop) or interaction_kwargs.get("name") is not None:
            where = f"{where}: interaction_kwargs"
            read_interaction_name(interaction_kwargs, known=context.interactions, where=where)


def _known_tools(
    row: Row, loop_class: type[AgentLoopBase], context: LoopContext, *, where: str
) -> Collection[str] | None:
    """Return the names of a row's tools, or None if they are known only after the reset of its environment."""
    if not issubclass(loop_class, EnvironmentAgentLoop):
        return context.tools
    try:
        factory = find_environment(row.get("environment"), known=context.environments)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    return None if factory.tool_names is None else {*context.tools, *factory.tool_names}
