"""The trainer: loads the parts that a configuration names, and trains the policy on its own rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs
from rich.console import Console

from agent_loop.config import Config
from agent_loop.distributed import create_manager
from agent_loop.errors import CheckpointError, ConfigError, RolloutError, TrainingError
from agent_loop.rollout.batch import assemble, timing_metrics
from agent_loop.rollout.components import load_template
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_row_files
from agent_loop.runtime.garbage_collection import frozen_objects, infrequent_collections
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.columns import Learned
from agent_loop.storage.writer import TrajectoryKeeper
from agent_loop.training import metrics as names
from agent_loop.training.advantages.estimate import check_groups, estimator_needs
from agent_loop.training.distillation.scoring import open_scoring
from agent_loop.training.distillation.teachers import Teachers, open_teachers, refuse_other_teachers
from agent_loop.training.evaluation.scores import Evaluation, summarise
from agent_loop.training.learner import learned_of
from agent_loop.training.loggers import make_loggers
from agent_loop.training.losses.policy import load_policy_loss
from agent_loop.training.manifest import DataManifest
from agent_loop.training.monitor import (
    Monitor,
    refuse_truncated_sampling,
    refuse_without_reward,
    why_unlearnable,
)
from agent_loop.training.progress import without_progress_of_transformers
from agent_loop.training.ranks import seeing_own_devices
from agent_loop.training.rollouts import StepRollout, StepRollouts, TakeRollout, rollouts_ahead
from agent_loop.training.row_selection import RowSelector, max_staleness
from agent_loop.training.run import SFT_SPLIT, Run, TrainResult, claimed_folder, open_run
from agent_loop.training.step_metrics import (
    data_sources,
    feedback_metrics,
    replay_metrics,
    rollout_metrics,
    source_metrics,
)
from agent_loop.training.supervised.examples import ExampleSampler, load_examples
from agent_loop.training.timing import time_shares
from agent_loop.types import Row


def with_total_steps(config: Config, *, num_rows: int) -> Config:
    """Return the configuration with `trainer.total_steps` for its `trainer.total_epochs`, if it has any."""
    epochs = config.trainer.total_epochs
    if epochs is None:
        return config
    steps = max(1, num_rows // config.data.train_batch_size * epochs)
    trainer = config.trainer.model_copy(update={"total_steps": steps})
    return config.model_copy(update={"trainer": trainer})


class PPOTrainer:
    """Trainer of one run. Single use.

    Args:
        config: All settings.
        manager: Manager that runs the rollouts, which stays open. None creates one from the configuration and closes
            it at the end.
        resume: True resumes from the last checkpoint in `trainer.run_dir`, or from the journals if the run was killed
            before its first checkpoint. `auto` does the same, and starts a new run if there is neither. A path resumes
            from that checkpoint, or from the last checkpoint of that run, at the step after it.
        overwrite: Allow a new run to remove the files of an earlier run in `trainer.run_dir`.
        console: Console that shows the progress; None is standard output.
    """

    def __init__(
        self,
        config: Config,
        *,
        manager: AgentLoopManager | None = None,
        resume: bool | str = False,
        overwrite: bool = False,
        console: Console | None = None,
    ) -> None:
        self._config = config
        self._manager = manager
        self._resume = resume
        self._overwrite = overwrite
        self._console = console

    async def fit(self) -> TrainResult:
        """Train until `trainer.total_steps`, or until Ctrl-C.

        The first Ctrl-C abandons a rollout in progress and waits for an update in progress, then writes a checkpoint
        of the last complete step. The second Ctrl-C ends at once and writes nothing.

        Raises:
            ConfigError: A setting does not fit, or the run folder belongs to another run.
            JournalError: The journal of a step cannot be written.
            ChatTemplateError: The model's chat template cannot write the conversations of this run.
            CheckpointError: There is nothing to resume from, or it is damaged.
            DataError: The data cannot be read.
            OutputError: The run folder cannot be written, or another process trains in it.
            RolloutError: Too many trajectories failed. A checkpoint of the last complete step is written.
            AlgorithmError: The advantage estimator or the policy loss failed.
            TrainingError: The first step has nothing to learn from: no trajectory with sampled tokens is scored.
            ProcessGroupError: One of several processes ended.
        """
        config = self._config
        refuse_truncated_sampling(config)
        load_policy_loss(config.actor.policy_loss)
        check_groups(config)
        selector, val_rows, manifests = _load_data(config, has_manager=self._manager is not None)
        config = with_total_steps(config, num_rows=len(selector.rows))
        supervised = await run_in_thread(_load_supervised, config, self._manager, manifests)
        own_tokenizer = None if self._manager is None else self._manager.template.tokenizer
        await run_in_thread(refuse_other_teachers, config, tokenizer=own_tokenizer)
        loggers = make_loggers(config)
        async with AsyncExitStack() as stack:
            stack.enter_context(without_progress_of_transformers())
            stack.enter_context(seeing_own_devices(config))
            start = stack.enter_context(
                claimed_folder(config, resume=self._resume, overwrite=self._overwrite, manifests=manifests)
            )
            manager = self._manager or await stack.enter_async_context(create_manager(config))
            manager.check_rows(selector.rows)
            manager.check_rows(val_rows)
            if estimator_needs(config.algorithm.adv_estimator).forks:
                manager.check_forks()
            teachers = await stack.enter_async_context(open_teachers(config, template=manager.template))
            run = await stack.enter_async_context(
                open_run(
                    config,
                    start,
                    tokenizer=manager.template.tokenizer,
                    manifests=manifests,
                    loggers=loggers,
                    console=self._console,
                    selector=selector,
                )
            )
            keeper = stack.enter_context(
                TrajectoryKeeper(
                    Path(config.trainer.run_dir),
                    num_steps=config.trainer.keep_trajectories,
                    success_threshold=config.reward.success_threshold,
                    report=run.progress.say,
                )
            )
            keeper.keep_vocabulary(manager.template.tokenizer)
            stack.enter_context(frozen_objects())
            stack.enter_context(infrequent_collections())
            loop = TrainingLoop(
                run=run,
                manager=manager,
                selector=selector,
                val_rows=val_rows,
                keeper=keeper,
                supervised=supervised,
                teachers=teachers,
            )
            return await loop.train()


@dataclass(kw_only=True, slots=True, eq=False)
class TrainingLoop:
    """Loop over training steps. Single use.

    The weight version is the number of completed steps. Servers and checkpoints get only weights of completed steps.
    """

    run: Run
    manager: AgentLoopManager
    selector: RowSelector
    val_rows: Sequence[Row]
    keeper: TrajectoryKeeper
    supervised: ExampleSampler | None
    teachers: Teachers | None
    _config: Config = field(init=False)
    _is_first_step: bool = True
    _evaluation: Evaluation | None = None
    _sources: Sequence[str] = field(init=False)
    _rollouts: StepRollouts = field(init=False)
    _monitor: Monitor = field(init=False)

    def __post_init__(self) -> None:
        self._config = self.run.config
        self._sources = data_sources(self.selector.rows)
        self._rollouts = StepRollouts(self.run, self.manager, self.selector)
        self._monitor = Monitor(
            max_dead_steps=self._config.trainer.max_dead_steps, report=self.run.progress.say
        )

    async def train(self) -> TrainResult:
        """Train to the end of the run."""
        run, metrics = self.run, dict[str, float]()
        # Servers have the weights of the model's files.
        if run.start.checkpoint is not None or self._config.model.base_bits:
            await self._publish()
        if run.start.checkpoint is None and self._config.trainer.val_before_train:
            found = await self._validate()
            run.writer.write(0, found)
            if (success := found.get(f"{names.VALIDATION}{names.SUCCESS_SHARE}")) is not None:
                run.progress.say(f"before training  val success {success:.1%}")
        run.progress.start(completed_steps=run.completed)
        try:
            async with AsyncExitStack() as stack:
                staleness = max_staleness(self._config)
                if staleness:  # the servers have their own devices, so they stay awake
                    await stack.enter_async_context(self.manager.awake())
                ahead = rollouts_ahead(
                    self._roll_out, max_staleness=staleness, last_step=self._config.trainer.total_steps
                )
                take = await stack.enter_async_context(ahead)
                while not run.is_over:
                    metrics = await self._step(take) or metrics
        except RolloutError:
            try:
                await run.save()
            except CheckpointError as error:  # the first error is the reason why the run ends
                run.progress.say(str(error))
            raise
        return await run.finish(metrics, evaluation=self._evaluation)

    async def _step(self, take: TakeRollout) -> dict[str, float] | None:
        """Run one step and return its metrics; None if the rollout was abandoned."""
        run, config, version = self.run, self._config, self.run.completed
        step = version + 1
        run.clock.start_step()

        # 1. Wait for the rollout of this step. Rollouts of later steps may be running.
        with run.clock.phase("rollout"):
            rollout = await run.interrupt.unless_requested(take(step))
        if rollout is None:
            return None
        trajectories = rollout.trajectories

        # 2. A run that has nothing to learn from stops at its first step.
        if self._is_first_step and (rollout.lessons is None or rollout.lessons.is_empty):
            reason = why_unlearnable(trajectories)
            if reason is not None:  # its cause can be found in the trajectories
                self.keeper.keep(trajectories, step=step, split="train", weight_version=version)
                raise TrainingError(f"step {step} has nothing to learn from: {reason}")

        # 3. Learn: advantages and update. This completes the step; Ctrl-C waits for it.
        metrics = self._rollout_metrics(rollout)
        with run.clock.phase("update"):
            learned_metrics, learned = await run_in_thread(self._learn, rollout)
            learned_metrics |= await run_in_thread(self._supervise, step)
        metrics |= learned_metrics
        self.keeper.keep(trajectories, step=step, split="train", weight_version=version, learned=learned)
        run.completed, self._is_first_step = step, False
        self._rollouts.complete(step, rollout)
        metrics[names.DEAD_STEPS] = float(self._monitor.add(trajectories, metrics, step=step))

        # 4. Publish the weights, so that later completions are sampled from this policy.
        if not run.interrupt.is_requested:
            await self._publish()

        # 5. Evaluate, report, save. A run that has learned nothing for many steps stops.
        if run.is_due(config.trainer.val_every):
            metrics |= await self._validate()
        num_tokens = metrics.get(names.MODEL_TOKENS, 0.0) + metrics.get(names.FORK_TOKENS, 0.0)
        metrics[names.TOKENS_PER_SECOND] = num_tokens / max(rollout.seconds, 1e-9)
        metrics[names.UNSTORED_FILES] = float(self.keeper.num_failed)
        metrics |= run.clock.metrics()
        shares, time_spent = time_shares(trajectories, phases=run.clock.seconds(), label=f"step={step}")
        run.writer.write(step, metrics | shares)
        run.progress.end_step(step, metrics, time_spent=time_spent)
        error = self._monitor.error(step=step)
        if error is not None or run.is_due(config.trainer.save_every):
            await run.save()
        if error is not None:
            raise error
        return metrics

    async def _roll_out(self, step: int) -> StepRollout:
        """Run the rollout of a step, and have its trajectories scored by their teachers as they end."""
        if self.teachers is None:
            return await self._rollouts.run(step)
        async with open_scoring(self.teachers, report=self.run.progress.say) as scoring:
            rollout = await self._rollouts.run(step, on_trajectory=scoring.begin)
            trajectories = [*rollout.trained, *rollout.forked.branches]
            lessons = await scoring.finish(trajectories, label=f"step {step}")
            return replace(rollout, lessons=lessons)

    def _rollout_metrics(self, rollout: StepRollout) -> dict[str, float]:
        trajectories, version = rollout.trajectories, self.run.completed
        threshold = self._config.reward.success_threshold
        return {
            **rollout_metrics(trajectories, success_threshold=threshold, weight_version=version),
            **source_metrics(trajectories, sources=self._sources, success_threshold=threshold),
            **timing_metrics(trajectories),
            **feedback_metrics(trajectories),
            **rollout.metrics,
            **replay_metrics(rollout.replayed, weight_version=version),
        }

    def _learn(self, rollout: StepRollout) -> tuple[dict[str, float], list[Learned]]:
        """Train on a rollout. Called in a thread."""
        branches = rollout.forked.branches
        # A trajectory with branches is one itself, so that shared tokens are trained once.
        forked = {(branch.group, branch.rollout) for branch in branches}
        trained = [
            structs.replace(t, branch=0) if (t.group, t.rollout) in forked else t for t in rollout.trained
        ]
        rows = [*trained, *branches]
        batch = assemble(rows, pad_token_id=self.manager.template.pad_token_id)
        lessons = rollout.lessons
        if lessons is not None:
            lessons.add_columns(batch)
        metrics = self.run.learner.learn(batch, baseline_rewards=rollout.baseline_rewards)
        metrics |= {} if lessons is None else lessons.metrics()
        return metrics, learned_of(batch, rollout.trajectories)

    def _supervise(self, step: int) -> dict[str, float]:
        """Take the supervised optimiser step after a step, if one is due. Called in a thread."""
        every = self._config.sft.every
        if self.supervised is None or every is None or step % every:
            return {}
        return self.run.learner.supervise(self.supervised.batch(step // every), advances_schedule=False)

    async def _publish(self) -> None:
        with self.run.clock.phase("publish"):
            weights = await run_in_thread(self.run.learner.weights)
            await self.manager.update_weights(weights, weight_version=self.run.completed)

    async def _validate(self) -> dict[str, float]:
        """Evaluate on the validation rows and return the metrics; empty if the evaluation was abandoned."""
        run, step, n = self.run, self.run.completed, self._config.rollout.val.n
        with (
            run.clock.phase("validate"),
            run.progress.rollout(num_trajectories=len(self.val_rows) * n) as note,
        ):
            trajectories = await run.interrupt.unless_requested(
                self.manager.run(
                    self.val_rows, n=n, validate=True, on_trajectory=note, label=f"val/step={step}"
                )
            )
        if trajectories is None:
            return {}
        self.keeper.keep(trajectories, step=step, split="val", weight_version=step)
        threshold = self._config.reward.success_threshold
        self._evaluation = summarise(trajectories, success_threshold=threshold)
        return self._evaluation.metrics()


def _load_data(
    config: Config, *, has_manager: bool
) -> tuple[RowSelector, list[Row], dict[str, DataManifest]]:
    """Load the rows, and return a manifest of their files by split.

    If the caller passed a manager, its rewards may come from code that the configuration does not name.
    """
    data = config.data
    if not data.train_files:
        raise ConfigError("data.train_files is empty; give at least one file, or file.py:function")
    wants_validation = config.trainer.val_every is not None or config.trainer.val_before_train
    if wants_validation and not data.val_files:
        raise ConfigError(
            "validation is switched on but data.val_files is empty; give it rows, or unset trainer.val_every"
        )
    files = load_row_files(data.train_files, prompt_key=data.prompt_key, workspace=data.workspace)
    manifests = {"train": DataManifest.of(files)}
    rows = [row for file in files for row in file.rows]
    if not has_manager and not config.distillation.teachers:
        refuse_without_reward(config, rows)
    selector = RowSelector(rows, config)
    val_rows: list[Row] = []
    if wants_validation:
        val_files = load_row_files(data.val_files, prompt_key=data.prompt_key, workspace=data.workspace)
        manifests["val"] = DataManifest.of(val_files)
        val_rows += [row for file in val_files for row in file.rows][: data.val_max_rows]
    return selector, val_rows, manifests


def _load_supervised(
    config: Config, manager: AgentLoopManager | None, manifests: dict[str, DataManifest]
) -> ExampleSampler | None:
    """Return the sampler of the supervised steps, and add a manifest of their files; None without such steps."""
    if config.sft.every is None:
        return None
    if not config.sft.files:
        raise ConfigError("sft.every is set but sft.files is empty; give conversations, or unset sft.every")
    template = load_template(config) if manager is None else manager.template
    examples = load_examples(config.sft.files, config=config.sft, template=template)
    manifests[SFT_SPLIT] = examples.manifest
    return ExampleSampler(
        examples, config=config.sft, seed=config.data.seed, pad_token_id=template.pad_token_id
    )
