"""`agent-loop train`: train a model on rollouts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    ConfigArgument,
    OverridesArgument,
    OverwriteOption,
    ResumeFromOption,
    ResumeOption,
    read_config,
)
from agent_loop.cli.dry_run import DryRunOption, check_training
from agent_loop.cli.verbosity import VERBOSITY, print_hint
from agent_loop.config import Config
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.checks.before_start import Checks

EXIT_INTERRUPTED = 130


def train_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    resume: ResumeOption = False,
    resume_from: ResumeFromOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train a model with reinforcement learning on rollouts of agent loops.

    Each step samples rows, runs agent loops, computes rewards and advantages, updates the model and sends the new
    weights to the servers. Ctrl-C finishes the step, writes a checkpoint and stops; a second Ctrl-C stops immediately.

    Examples:

        agent-loop train config.yaml

        agent-loop train config.yaml actor.lr=1e-5 rollout.n=16 trainer.run_dir=runs/second

        agent-loop train config.yaml --dry-run

        agent-loop train config.yaml --resume trainer.total_steps=200

        agent-loop train config.yaml trainer.num_processes=4

        torchrun --nproc-per-node 4 -m agent_loop train config.yaml
    """
    settings = read_config(config, overrides)
    if check_training(
        partial(_checks, settings, overwrites=overwrite, is_thorough=dry_run),
        resume=resume,
        resume_from=resume_from,
        overwrite=overwrite,
        is_dry_run=dry_run,
    ):
        return

    # late: keeps `--help` and config errors quick
    from agent_loop.training.ppo_trainer import PPOTrainer
    from agent_loop.training.rank_process import run_rank
    from agent_loop.training.ranks import is_nonzero_rank, seeing_own_devices

    if is_nonzero_rank():
        with seeing_own_devices(settings) as local_rank:
            run_rank(settings, local_rank=local_rank)
        return
    trainer = PPOTrainer(
        settings,
        resume=str(resume_from) if resume_from else resume and "auto",
        overwrite=overwrite,
        console=Console(quiet=VERBOSITY.quiet),
    )
    result = run_to_end(trainer.fit())
    if result.is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    typer.echo(f"the run is in {result.run_dir}")
    print_hint(
        Console(),
        f"look at it with: agent-loop view {result.run_dir}; "
        f"export the model with: agent-loop export {result.run_dir} --out FOLDER",
    )


def _checks(settings: Config, resumes: bool, *, overwrites: bool, is_thorough: bool) -> Checks:
    from agent_loop.checks.before_start import PlannedRun, checks_of  # late: as above

    wants_validation = settings.trainer.val_every is not None or settings.trainer.val_before_train
    sources = {"data.train_files": settings.data.train_files}
    if wants_validation:
        sources["data.val_files"] = settings.data.val_files
    run = PlannedRun(
        settings,
        sources=sources,
        trains=True,
        resumes=resumes,
        overwrites=overwrites,
        is_thorough=is_thorough,
    )
    return checks_of(run)
