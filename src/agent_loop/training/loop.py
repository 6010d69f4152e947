"""Training loop: roll out, learn, publish the weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config
from agent_loop.errors import CheckpointError, RolloutError, TrainingError
from agent_loop.rollout.batch import assemble, timing_metrics
from agent_loop.rollout.journal.folder import JournalFolder
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.columns import Learned
from agent_loop.storage.writer import TrajectoryKeeper
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import Checkpoint, save_checkpoint
from agent_loop.training.distillation.scoring import open_scoring
from agent_loop.training.distillation.teachers import Teachers
from agent_loop.training.evaluation.scores import Evaluation, summarise
from agent_loop.training.forked import with_branches
from agent_loop.training.interrupt import Interrupt
from agent_loop.training.learner import Learner, learned_of
from agent_loop.training.manifest import DataManifest
from agent_loop.training.metrics import MetricsWriter
from agent_loop.training.monitor import DeadSteps, EarlyWarnings, refuse_without_lesson
from agent_loop.training.progress import Progress
from agent_loop.training.rollouts import Rollouts, RolloutsAhead, StepRollout, StepRollouts, max_staleness
from agent_loop.training.row_selection import RowSelector
from agent_loop.training.run_folder import TrainResult, config_values
from agent_loop.training.step_metrics import (
    data_sources,
    drift_metrics,
    feedback_metrics,
    replay_metrics,
    rollout_metrics,
    source_metrics,
)
from agent_loop.training.supervised.examples import ExampleSampler
from agent_loop.training.timing import StepClock, TimeShares, time_shares
from agent_loop.types import Row


@dataclass(kw_only=True, slots=True, eq=False)
class TrainingLoop:
    """Loop over training steps. Single use.

    The weight version is the number of completed steps. Servers and checkpoints get only weights of completed steps.
    """

    config: Config
    manager: Rollouts
    learner: Learner
    selector: RowSelector
    val_rows: Sequence[Row]
    writer: MetricsWriter
    progress: Progress
    clock: StepClock
    interrupt: Interrupt
    journals: JournalFolder | None
    keeper: TrajectoryKeeper
    manifests: Mapping[str, DataManifest]
    supervised: ExampleSampler | None
    teachers: Teachers | None
    _completed: int = 0
    _is_first_step: bool = True
    _time: TimeShares | None = None
    _saved: Path | None = None
    """The last checkpoint."""
    _saved_step: int | None = None
    _evaluation: Evaluation | None = None
    _sources: Sequence[str] = field(init=False)
    _rollouts: StepRollouts = field(init=False)
    _dead_steps: DeadSteps = field(init=False)
    _early_warnings: EarlyWarnings = field(init=False)

    def __post_init__(self) -> None:
        self._sources = data_sources(self.selector.rows)
        self._rollouts = StepRollouts(
            self.config, self.manager, self.selector, self.progress, journals=self.journals
        )
        self._dead_steps = DeadSteps(limit=self.config.trainer.max_dead_steps, report=self.progress.say)
        self._early_warnings = EarlyWarnings(report=self.progress.say)

    async def run(self, checkpoint: Checkpoint | None) -> TrainResult:
        """Train from a checkpoint that the learner has loaded, or from the start."""
        metrics: Mapping[str, float] = {}
        total_steps = self.config.trainer.total_steps
        if checkpoint is not None:
            self._completed = self._saved_step = checkpoint.step
            self._saved = checkpoint.path
            self._drop_journals()
        # Servers have the weights of the model's files.
        if checkpoint is not None or self.config.model.base_bits:
            await self._publish()
        if checkpoint is None and self.config.trainer.val_before_train:
            found = await self._validate()
            self.writer.write(0, found)
            if (success := found.get(f"{names.VALIDATION}{names.SUCCESS_SHARE}")) is not None:
                self.progress.say(f"before training  val success {success:.1%}")
        self.progress.start(completed_steps=self._completed)
        try:
            async with self._rollouts_ahead() as ahead:
                while self._completed < total_steps and not self.interrupt.is_requested:
                    metrics = await self._step(ahead) or metrics
        except RolloutError:
            try:
                await self._save()
            except CheckpointError as error:  # the first error is the reason why the run ends
                self.progress.say(str(error))
            raise
        if self._time is not None:
            self.progress.say(f"all steps  {self._time}")
        is_interrupted = self._completed < total_steps
        if is_interrupted:
            await self._save()
            self.progress.say(f"stopped after step {self._completed}; resume to continue from {self._saved}")
        return TrainResult(
            step=self._completed,
            is_interrupted=is_interrupted,
            run_dir=Path(self.config.trainer.run_dir),
            checkpoint=self._saved,
            metrics=metrics,
            evaluation=self._evaluation,
        )

    @asynccontextmanager
    async def _rollouts_ahead(self) -> AsyncGenerator[RolloutsAhead[StepRollout]]:
        staleness = max_staleness(self.config)
        async with AsyncExitStack() as stack:
            if staleness:  # the servers have their own devices, so they stay awake
                await stack.enter_async_context(self.manager.awake())
            ahead = RolloutsAhead(
                self._roll_out, max_staleness=staleness, last_step=self.config.trainer.total_steps
            )
            yield await stack.enter_async_context(ahead)

    async def _step(self, ahead: RolloutsAhead[StepRollout]) -> dict[str, float] | None:
        """Run one step and return its metrics; None if the rollout was abandoned."""
        step = self._completed + 1
        self.clock.start_step()

        # 1. Wait for the rollout of this step. Rollouts of later steps may be running.
        rollout = await self._take(step, ahead)
        if rollout is None:
            return None
        trajectories = rollout.trajectories

        # 2. Compute the rollout metrics. A run that has nothing to learn from stops at its first step.
        if self._is_first_step and (rollout.lessons is None or rollout.lessons.is_empty):
            try:
                refuse_without_lesson(trajectories, step=step)
            except TrainingError:  # the cause can be found in the trajectories
                self.keeper.keep(trajectories, step=step, split="train", weight_version=self._completed)
                raise
        threshold = self.config.reward.success_threshold
        metrics = rollout_metrics(trajectories, success_threshold=threshold, weight_version=self._completed)
        metrics |= source_metrics(trajectories, sources=self._sources, success_threshold=threshold)
        metrics |= timing_metrics(trajectories) | feedback_metrics(trajectories)
        metrics |= rollout.metrics
        metrics |= rollout.forked.metrics
        metrics |= replay_metrics(rollout.replayed, weight_version=self._completed)
        if isinstance(self.manager.template, ChatTemplate):
            metrics |= drift_metrics(trajectories, template=self.manager.template)

        # 3. Learn. This completes the step; Ctrl-C waits for it.
        with self.clock.phase("update"):
            learned_metrics, learned = await run_in_thread(self._learn, rollout)
            learned_metrics |= await run_in_thread(self._supervise, step)
        metrics |= learned_metrics
        self.keeper.keep(
            trajectories, step=step, split="train", weight_version=self._completed, learned=learned
        )
        self._completed, self._is_first_step = step, False
        self._rollouts.complete(step, rollout)
        metrics[names.DEAD_STEPS] = float(self._dead_steps.add(trajectories, metrics, step=step))
        self._early_warnings.add(metrics, step=step)

        # 4. Publish the weights, so that later completions are sampled from this policy.
        if not self.interrupt.is_requested:
            await self._publish()

        # 5. Evaluate, report, save. A run that has learned nothing for many steps stops.
        if self._is_due(self.config.trainer.val_every):
            metrics |= await self._validate()
        metrics[names.DROPPED_GROUPS] = float(rollout.num_dropped_groups)
        num_tokens = metrics.get(names.MODEL_TOKENS, 0.0) + metrics.get(names.FORK_TOKENS, 0.0)
        metrics |= self._timings(rollout, num_tokens=num_tokens)
        metrics[names.UNSTORED_FILES] = float(self.keeper.num_failed)
        time = time_shares(trajectories, phases=self.clock.seconds(), label=f"step={step}")
        self._time = time if self._time is None else self._time.plus(time)
        self.writer.write(step, metrics | time.metrics())
        self.progress.end_step(step, metrics, time_spent=str(time))
        is_over = self._dead_steps.are_too_many
        if is_over or self._is_due(self.config.trainer.save_every):
            await self._save()
        if is_over:
            raise self._dead_steps.error(step=step)
        return metrics

    async def _roll_out(self, step: int) -> StepRollout:
        """Run the rollout of a step, and have its trajectories scored by their teachers as they end."""
        if self.teachers is None:
            return await self._rollouts.run(step)
        async with open_scoring(self.teachers, report=self.progress.say) as scoring:
            rollout = await self._rollouts.run(step, on_trajectory=scoring.begin)
            trajectories = [*rollout.trained, *rollout.forked.branches]
            lessons = await scoring.finish(trajectories, label=f"step {step}")
            return replace(rollout, lessons=lessons)

    async def _take(self, step: int, ahead: RolloutsAhead[StepRollout]) -> StepRollout | None:
        rollout: StepRollout | None = None
        with self.clock.phase("rollout"):
            async with self.interrupt.abandoning():
                rollout = await ahead.take(step)
        return rollout

    def _drop_journals(self) -> None:
        """Drop the journals of completed steps, whose result is in the checkpoint."""
        if self.journals is not None:
            self.journals.drop_through(self._completed)

    def _learn(self, rollout: StepRollout) -> tuple[dict[str, float], list[Learned]]:
        """Train on a rollout. Called in a thread."""
        trained, branches = rollout.trained, rollout.forked.branches
        rows = [*with_branches(trained, branches), *branches]
        batch = assemble(rows, pad_token_id=self.manager.template.pad_token_id)
        lessons = rollout.lessons
        if lessons is not None:
            lessons.add_columns(batch)
        metrics = self.learner.learn(batch, baseline_rewards=rollout.baseline_rewards)
        metrics |= {} if lessons is None else lessons.metrics()
        return metrics, learned_of(batch, rollout.trajectories)

    def _supervise(self, step: int) -> dict[str, float]:
        """Take the supervised optimiser step after a step, if one is due. Called in a thread."""
        every = self.config.sft.every
        if self.supervised is None or every is None or step % every:
            return {}
        return self.learner.supervise(self.supervised.batch(step // every), advances_schedule=False)

    async def _publish(self) -> None:
        with self.clock.phase("publish"):
            weights = await run_in_thread(self.learner.weights)
            await self.manager.update_weights(weights, weight_version=self._completed)

    async def _validate(self) -> dict[str, float]:
        """Evaluate on the validation rows and return the metrics; empty if the evaluation was abandoned."""
        n, num_rows = self.config.rollout.val.n, len(self.val_rows)
        with self.clock.phase("validate"), self.progress.rollout(num_trajectories=num_rows * n) as note:
            async with self.interrupt.abandoning():
                trajectories = await self.manager.run(
                    self.val_rows,
                    n=n,
                    validate=True,
                    on_trajectory=note,
                    label=f"val/step={self._completed}",
                )
                self.keeper.keep(
                    trajectories, step=self._completed, split="val", weight_version=self._completed
                )
                self._evaluation = summarise(
                    trajectories, success_threshold=self.config.reward.success_threshold
                )
                return self._evaluation.metrics()
        return {}

    async def _save(self) -> None:
        """Save a checkpoint of the last completed step, unless it is already saved."""
        if self._saved_step == self._completed:
            return
        with self.clock.phase("save"):
            self._saved = await run_in_thread(
                save_checkpoint,
                Path(self.config.trainer.run_dir),
                step=self._completed,
                weight_version=self._completed,
                learner=self.learner,
                tokenizer=self.manager.template.tokenizer,
                config=config_values(self.config),
                rows=self.manifests,
                selector=self.selector,
                keep=self.config.trainer.keep_checkpoints,
            )
        self._saved_step = self._completed
        self._drop_journals()

    def _is_due(self, every: int | None) -> bool:
        """Return whether the last completed step is an `every`-th step or the last one."""
        is_last = self._completed == self.config.trainer.total_steps
        return every is not None and (is_last or self._completed % every == 0)

    def _timings(self, rollout: StepRollout, *, num_tokens: float) -> dict[str, float]:
        timings = {f"{names.SECONDS}{phase}": value for phase, value in self.clock.seconds().items()}
        return timings | {names.TOKENS_PER_SECOND: num_tokens / max(rollout.seconds, 1e-9)}
