"""`agent-loop train`: from rows to better weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from agent_loop.cli.arguments import ConfigArgument, OverridesArgument, read_config
from agent_loop.runtime.event_loop import run_to_end

EXIT_INTERRUPTED = 130


def train_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from where the run in `trainer.run_dir` was, however it ended; begin anew if there is none.",
        ),
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            "--resume-from", help="Go on from this checkpoint, or this run's last.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Remove what another run left in `trainer.run_dir`.")
    ] = False,
) -> None:
    """Train a model on rollouts: rows, agent loops, rewards, GRPO, new weights in the servers, over and over.

    Ctrl-C stops in good order and writes a checkpoint; a second Ctrl-C stops at once.

    Examples:

        agent-loop train config.yaml

        agent-loop train config.yaml actor.lr=1e-5 rollout.n=16 trainer.run_dir=runs/second

        agent-loop train config.yaml --resume trainer.total_steps=200

        agent-loop train config.yaml trainer.num_processes=4

        torchrun --nproc-per-node 4 -m agent_loop train config.yaml
    """
    settings = read_config(config, overrides)

    # late: keeps `--help` and config errors quick
    from agent_loop.training.follower import follow
    from agent_loop.training.ppo_trainer import PPOTrainer
    from agent_loop.training.team_processes import is_follower

    if is_follower():
        follow(settings, local_rank=int(os.environ["LOCAL_RANK"]))
        return
    trainer = PPOTrainer(
        settings, resume=str(resume_from) if resume_from else resume and "auto", overwrite=overwrite
    )
    result = run_to_end(trainer.fit())
    if result.is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
