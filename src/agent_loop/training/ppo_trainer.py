"""The trainer: loads the parts that a configuration names, and trains the policy on its own rollouts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from agent_loop.config import Config
from agent_loop.distributed import create_manager
from agent_loop.errors import ConfigError
from agent_loop.rollout.components import load_template
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_row_files
from agent_loop.runtime.garbage_collection import frozen_objects, infrequent_collections
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.writer import TrajectoryKeeper
from agent_loop.training.advantages.estimate import check_groups, estimator_needs
from agent_loop.training.distillation.teachers import open_teachers, refuse_other_teachers
from agent_loop.training.loggers import make_loggers
from agent_loop.training.loop import TrainingLoop
from agent_loop.training.losses.policy import load_policy_loss
from agent_loop.training.manifest import DataManifest
from agent_loop.training.monitor import refuse_truncated_sampling, refuse_without_reward
from agent_loop.training.progress import without_progress_of_transformers
from agent_loop.training.ranks import seeing_own_devices
from agent_loop.training.row_selection import RowSelector
from agent_loop.training.run import SFT_SPLIT, TrainResult, claimed_folder, open_run
from agent_loop.training.supervised.examples import ExampleSampler, load_examples
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
