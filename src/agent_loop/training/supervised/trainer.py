"""The supervised trainer: trains a model on complete conversations and on stored trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.rollout.components import load_template
from agent_loop.runtime.threads import run_in_thread
from agent_loop.storage.exclusive import exclusive_folder
from agent_loop.training import metrics as names
from agent_loop.training.checkpoint import Checkpoint, list_checkpoints, save_checkpoint
from agent_loop.training.interrupt import Interrupt
from agent_loop.training.learner import Learner, load_learner
from agent_loop.training.loggers import make_loggers
from agent_loop.training.manifest import DataManifest
from agent_loop.training.metrics import MetricsWriter
from agent_loop.training.progress import Progress, without_progress_of_transformers
from agent_loop.training.ranks import start_process_group
from agent_loop.training.run_folder import (
    METRICS_FILE,
    SFT_SPLIT,
    SFT_VAL_SPLIT,
    TrainResult,
    check_rows_unchanged,
    check_run_folder,
    config_values,
    find_checkpoint,
    prepare_run_folder,
)
from agent_loop.training.supervised.examples import Examples, ExampleSampler, batches, load_examples
from agent_loop.training.supervised.sources import supervised_config
from agent_loop.training.timing import StepClock


class SupervisedTrainer:
    """Supervised trainer of one run. Single use.

    Args:
        config: All settings. Those of rollouts, rewards and advantages have no effect.
        resume: False, True, `auto` or a path, as in `PPOTrainer`.
        overwrite: Allow a new run to remove the files of an earlier run in `trainer.run_dir`.
        console: Console that shows the progress; None is standard output.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: bool | str = False,
        overwrite: bool = False,
        console: Console | None = None,
    ) -> None:
        if resume and overwrite:
            raise ConfigError("resume and overwrite are both set; give one of them")
        self._config = supervised_config(config)
        self._resume = resume
        self._overwrite = overwrite
        self._console = console

    async def fit(self) -> TrainResult:
        """Train until the last step, or until Ctrl-C, which finishes the step and writes a checkpoint.

        Raises:
            ConfigError: A setting does not fit, or the run folder belongs to another run.
            ChatTemplateError: The tokenizer has no chat template that can be used.
            CheckpointError: There is nothing to resume from, it is damaged, or the examples have changed.
            DataError: A conversation is not valid, or no example is left.
            OutputError: The run folder cannot be written, or another process trains in it.
            ProcessGroupError: One of several processes ended.
        """
        config, run_dir = self._config, Path(self._config.trainer.run_dir)
        async with AsyncExitStack() as stack:
            stack.enter_context(without_progress_of_transformers())
            stack.enter_context(exclusive_folder(run_dir, name="trainer.run_dir"))
            is_new = self._resume == "auto" and not list_checkpoints(run_dir)
            checkpoint = None if is_new else find_checkpoint(run_dir, resume=self._resume)
            check_run_folder(run_dir, checkpoint=checkpoint, overwrite=self._overwrite or is_new)
            template = await run_in_thread(load_template, config)
            splits = await run_in_thread(_load_splits, config, template)
            notes = checkpoint and check_rows_unchanged(
                checkpoint, _manifests(splits), allow_changed=config.data.allow_changed_rows
            )
            loggers = make_loggers(config)
            process_group = await stack.enter_async_context(start_process_group(config))
            learner = await run_in_thread(
                load_learner, config, checkpoint=checkpoint, process_group=process_group
            )
            prepare_run_folder(run_dir, config=config, checkpoint=checkpoint)
            interrupt = Interrupt()
            sampler = ExampleSampler(
                splits["train"], config=config.sft, seed=config.data.seed, pad_token_id=template.pad_token_id
            )
            epochs, clock = config.sft.epochs, StepClock()
            total_steps = config.trainer.total_steps if epochs is None else sampler.num_steps(epochs)
            loop = _Loop(
                config=config,
                total_steps=total_steps,
                learner=learner,
                splits=splits,
                sampler=sampler,
                template=template,
                writer=stack.enter_context(MetricsWriter(run_dir / METRICS_FILE, loggers=loggers)),
                clock=clock,
                progress=Progress(total_steps=total_steps, console=self._console),
            )
            stack.enter_context(interrupt.listening())
            return await loop.run(checkpoint, interrupt=interrupt, notes=notes or ())


@dataclass(kw_only=True, slots=True, eq=False)
class _Loop:
    """Loop over the steps of a supervised run. Single use."""

    config: Config
    total_steps: int
    learner: Learner
    splits: dict[str, Examples]
    sampler: ExampleSampler
    template: ChatTemplate
    writer: MetricsWriter
    clock: StepClock
    progress: Progress
    _saved: Path | None = None
    _saved_step: int | None = None

    async def run(
        self, checkpoint: Checkpoint | None, *, interrupt: Interrupt, notes: Sequence[str]
    ) -> TrainResult:
        """Train from a checkpoint that the learner has loaded, or from the start."""
        completed = 0
        metrics: dict[str, float] = {}
        with self.progress as progress:
            self._describe(self.splits)
            if checkpoint is not None:
                completed = self._saved_step = checkpoint.step
                self._saved = checkpoint.path
                progress.say(f"resuming after step {completed} from {checkpoint.path}")
                for note in notes:
                    progress.say(note)
            elif self.config.trainer.val_before_train:
                self.writer.write(0, await self._validate())
            progress.start(completed_steps=completed)
            while completed < self.total_steps and not interrupt.is_requested:
                metrics = await self._step(completed + 1)
                completed += 1
            if completed < self.total_steps:
                await self._save(completed)
                progress.say(f"stopped after step {completed}; resume to continue from {self._saved}")
        return TrainResult(
            step=completed,
            is_interrupted=completed < self.total_steps,
            run_dir=Path(self.config.trainer.run_dir),
            checkpoint=self._saved,
            metrics=metrics,
            evaluation=None,
        )

    async def _step(self, step: int) -> dict[str, float]:
        self.clock.start_step()
        with self.clock.phase("update"):
            batch = self.sampler.batch(step)
            metrics = await run_in_thread(self.learner.supervise, batch)
        if self._is_due(step, self.config.trainer.val_every):
            metrics |= await self._validate()
        seconds = self.clock.seconds()
        num_tokens = float(batch["attention_mask"].sum())
        metrics[names.TOKENS_PER_SECOND] = num_tokens / max(seconds["update"], 1e-9)
        metrics |= {f"{names.SECONDS}{phase}": value for phase, value in seconds.items()}
        self.writer.write(step, metrics)
        self.progress.end_step(step, metrics)
        if self._is_due(step, self.config.trainer.save_every):
            await self._save(step)
        return metrics

    async def _validate(self) -> dict[str, float]:
        """Return the loss on the validation examples; empty without any."""
        if "val" not in self.splits:
            return {}
        with self.clock.phase("validate"):
            return {names.SFT_VALIDATION_LOSS: await run_in_thread(self._validation_loss)}

    def _validation_loss(self) -> float:
        total, num_tokens = 0.0, 0
        for batch in batches(
            self.splits["val"].trajectories,
            batch_size=self.config.sft.batch_size,
            pad_token_id=self.template.pad_token_id,
        ):
            mask_BR = batch["response_mask"].bool()
            total -= float(self.learner.logprobs(batch)[mask_BR].double().sum())
            num_tokens += int(mask_BR.sum())
        return total / max(num_tokens, 1)

    async def _save(self, step: int) -> None:
        """Save a checkpoint of the last completed step, unless it is already saved."""
        if self._saved_step == step:
            return
        with self.clock.phase("save"):
            self._saved = await run_in_thread(
                save_checkpoint,
                Path(self.config.trainer.run_dir),
                step=step,
                weight_version=step,
                learner=self.learner,
                tokenizer=self.template.tokenizer,
                config=config_values(self.config),
                rows=_manifests(self.splits),
                keep=self.config.trainer.keep_checkpoints,
            )
        self._saved_step = step

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and (step == self.total_steps or step % every == 0)

    def _describe(self, splits: dict[str, Examples]) -> None:
        for split, examples in splits.items():
            left_out = (
                f"; {examples.num_overlong} longer than sft.max_tokens={self.config.sft.max_tokens} are left out"
                if examples.num_overlong
                else ""
            )
            self.progress.say(
                f"{split}: {len(examples.trajectories)} examples with {examples.num_trained_tokens} trained "
                f"tokens{left_out}"
            )


def _manifests(splits: Mapping[str, Examples]) -> dict[str, DataManifest]:
    """Return the manifests of the splits, by the names that a checkpoint gives them."""
    names_of_splits = {"train": SFT_SPLIT, "val": SFT_VAL_SPLIT}
    return {names_of_splits[split]: examples.manifest for split, examples in splits.items()}


def _load_splits(config: Config, template: ChatTemplate) -> dict[str, Examples]:
    sources = {"train": config.sft.files, "val": config.sft.val_files}
    return {
        split: load_examples(files, config=config.sft, template=template)
        for split, files in sources.items()
        if files
    }
