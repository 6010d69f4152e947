"""The supervised trainer: trains a model on complete conversations and on stored trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.console import Console

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config
from agent_loop.rollout.components import load_template
from agent_loop.runtime.threads import run_in_thread
from agent_loop.training import metrics as names
from agent_loop.training.loggers import make_loggers
from agent_loop.training.progress import without_progress_of_transformers
from agent_loop.training.run import (
    SFT_SPLIT,
    SFT_VAL_SPLIT,
    SOURCES,
    Run,
    TrainResult,
    claimed_folder,
    open_run,
)
from agent_loop.training.supervised.examples import Examples, ExampleSampler, batches, load_examples
from agent_loop.training.supervised.sources import supervised_config


class SupervisedTrainer:
    """Supervised trainer of one run. Single use. The arguments are those of `PPOTrainer`.

    Settings of rollouts, rewards and advantages have no effect.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: bool | str = False,
        overwrite: bool = False,
        console: Console | None = None,
    ) -> None:
        self._config = supervised_config(config)
        self._resume = resume
        self._overwrite = overwrite
        self._console = console

    async def fit(self) -> TrainResult:
        """Train until the last step, or until Ctrl-C, which finishes the step and writes a checkpoint.

        The errors are those of `PPOTrainer.fit`. It raises a DataError if a conversation is not valid.
        """
        config = self._config
        loggers = make_loggers(config)
        template = await run_in_thread(load_template, config)
        splits = await run_in_thread(_load_splits, config, template)
        sampler = ExampleSampler(
            splits[SFT_SPLIT], config=config.sft, seed=config.data.seed, pad_token_id=template.pad_token_id
        )
        if config.sft.epochs is not None:
            total_steps = sampler.num_steps(config.sft.epochs)
            trainer = config.trainer.model_copy(update={"total_steps": total_steps})
            config = config.model_copy(update={"trainer": trainer})
        manifests = {split: examples.manifest for split, examples in splits.items()}
        async with AsyncExitStack() as stack:
            stack.enter_context(without_progress_of_transformers())
            start = stack.enter_context(
                claimed_folder(config, resume=self._resume, overwrite=self._overwrite, manifests=manifests)
            )
            run = await stack.enter_async_context(
                open_run(
                    config,
                    start,
                    tokenizer=template.tokenizer,
                    manifests=manifests,
                    loggers=loggers,
                    console=self._console,
                )
            )
            return await _Loop(run, splits, sampler, pad_token_id=template.pad_token_id).train()


@dataclass(slots=True, eq=False)
class _Loop:
    """Loop over the steps of a supervised run. Single use."""

    run: Run
    splits: Mapping[str, Examples]
    sampler: ExampleSampler
    pad_token_id: int

    async def train(self) -> TrainResult:
        """Train to the end of the run."""
        run, metrics = self.run, dict[str, float]()
        self._describe()
        if run.start.checkpoint is None and run.config.trainer.val_before_train:
            run.writer.write(0, await self._validate())
        run.progress.start(completed_steps=run.completed)
        while not run.is_over:
            metrics = await self._step(run.completed + 1)
        return await run.finish(metrics)

    async def _step(self, step: int) -> dict[str, float]:
        run, trainer = self.run, self.run.config.trainer
        run.clock.start_step()
        batch = self.sampler.batch(step)
        with run.clock.phase("update"):
            metrics = await run_in_thread(run.learner.supervise, batch)
        run.completed = step
        if run.is_due(trainer.val_every):
            metrics |= await self._validate()
        num_tokens = float(batch["attention_mask"].sum())
        metrics[names.TOKENS_PER_SECOND] = num_tokens / max(run.clock.seconds()["update"], 1e-9)
        metrics |= run.clock.metrics()
        run.writer.write(step, metrics)
        run.progress.end_step(step, metrics)
        if run.is_due(trainer.save_every):
            await run.save()
        return metrics

    async def _validate(self) -> dict[str, float]:
        """Return the loss on the validation examples; empty without any."""
        if SFT_VAL_SPLIT not in self.splits:
            return {}
        with self.run.clock.phase("validate"):
            return {names.SFT_VALIDATION_LOSS: await run_in_thread(self._validation_loss)}

    def _validation_loss(self) -> float:
        total, num_tokens = 0.0, 0
        for batch in batches(
            self.splits[SFT_VAL_SPLIT].trajectories,
            batch_size=self.run.config.sft.batch_size,
            pad_token_id=self.pad_token_id,
        ):
            mask_BR = batch["response_mask"].bool()
            total -= float(self.run.learner.logprobs(batch)[mask_BR].double().sum())
            num_tokens += int(mask_BR.sum())
        return total / max(num_tokens, 1)

    def _describe(self) -> None:
        max_tokens = self.run.config.sft.max_tokens
        for split, examples in self.splits.items():
            left_out = f"; {examples.num_overlong} longer than sft.max_tokens={max_tokens} are left out"
            self.run.progress.say(
                f"{SOURCES[split]}: {len(examples.trajectories)} examples with {examples.num_trained_tokens} trained "
                f"tokens{left_out if examples.num_overlong else ''}"
            )


def _load_splits(config: Config, template: ChatTemplate) -> dict[str, Examples]:
    sources = {SFT_SPLIT: config.sft.files, SFT_VAL_SPLIT: config.sft.val_files}
    return {
        split: load_examples(files, config=config.sft, template=template)
        for split, files in sources.items()
        if files
    }
