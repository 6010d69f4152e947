"""`agent-loop sft`: train a model on complete conversations."""

from __future__ import annotations

import os
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
from agent_loop.cli.train import EXIT_INTERRUPTED
from agent_loop.cli.verbosity import VERBOSITY, print_hint
from agent_loop.config import Config
from agent_loop.runtime.event_loop import run_to_end

if TYPE_CHECKING:
    from agent_loop.checks.before_start import Checks


def sft_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    resume: ResumeOption = False,
    resume_from: ResumeFromOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train a model on complete conversations, or on stored trajectories (supervised fine-tuning).

    Conversations are messages in the OpenAI form, with tools. The tokens of the assistant's turns are trained, as a
    rollout would sample them. The folder of a run in `sft.files` trains on the tokens that its model sampled. Ctrl-C
    finishes the step, writes a checkpoint and stops.

    Examples:

        agent-loop sft config.yaml sft.files=[chats.jsonl] sft.epochs=2 actor.lr=1e-5

        agent-loop sft config.yaml sft.files=[runs/train] "sft.where=[reward>=1]" sft.best_of_group=1

        agent-loop sft config.yaml --dry-run

        agent-loop sft config.yaml --resume
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
    from agent_loop.training.rank_process import run_rank
    from agent_loop.training.ranks import is_nonzero_rank
    from agent_loop.training.supervised import SupervisedTrainer
    from agent_loop.training.supervised.settings import supervised_config

    if is_nonzero_rank():
        run_rank(supervised_config(settings), local_rank=int(os.environ["LOCAL_RANK"]))
        return
    trainer = SupervisedTrainer(
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
    from agent_loop.checks.before_supervised import supervised_checks  # late: as above

    return supervised_checks(settings, resumes=resumes, overwrites=overwrites, is_thorough=is_thorough)
