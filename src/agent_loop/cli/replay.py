"""`agent-loop replay`: run a stored trajectory again through its loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agent_loop.cli.arguments import (
    EXIT_FAILED,
    JSON_LINES,
    OverridesArgument,
    RunArgument,
    SplitOption,
    StepOption,
    find_run,
    read_config,
)
from agent_loop.cli.show import find_row
from agent_loop.cli.verbosity import look_at, print_hint, print_line
from agent_loop.errors import ConfigError, DataError
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.columns import to_trajectory
from agent_loop.storage.json_lines import write_lines
from agent_loop.storage.metrics_file import CONFIG_FILE
from agent_loop.storage.run import StoredRun
from agent_loop.storage.vocabulary import Piece, text_of
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason

ENDED_FROM_OUTSIDE = (StopReason.FAILED, StopReason.CANCELLED, StopReason.DEADLINE)
"""Stop reasons that a replay does not reproduce."""


def replay_command(
    run: RunArgument,
    row: Annotated[str, typer.Argument(metavar="ROW", help="Trajectory, as in `group=3/rollout=1`.")],
    overrides: OverridesArgument = None,
    *,
    step: StepOption = None,
    split: SplitOption = None,
    from_turn: Annotated[
        int | None,
        typer.Option(
            "--from-turn", min=1, help="First turn that the model samples again; 1 is its first turn."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file; by default the `config.yaml` of the run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File for the new trajectory (.parquet or .jsonl).")
    ] = None,
) -> None:
    """Run a stored trajectory again: the real loop, template and parsers, with recorded completions and tool replies.

    Prints whether the tokens are the same, or else where they first differ, with exit code 1. No model and no tool is
    called. With `--from-turn`, the turns before that one are replayed. The model of the configuration then continues
    with real tools, whose state is restored as their `on_replay` declares.

    Examples:

        agent-loop replay runs/train group=3/rollout=1 --step 12

        agent-loop replay runs/train group=3/rollout=1 model.chat_template_path=new.jinja

        agent-loop replay runs/train group=3/rollout=1 --from-turn 2 rollout.temperature=0 --out again.parquet
    """

    # late: keeps `--help` quick
    from agent_loop.recording.recorded_responses import extract_responses
    from agent_loop.rollout.replay import replay_trajectory

    stored, console = StoredRun(find_run(run)), Console()
    file = config or stored.folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"there is no {str(file)!r} with the settings of the run; give them with --config")
    settings = read_config(file, overrides)
    found = find_row(stored, row, split=split, step=step)
    old = to_trajectory(found)
    recorded = extract_responses(old)
    last = len(recorded.completions) + 1
    if from_turn is not None and from_turn > last:
        raise DataError(
            f"--from-turn is {from_turn}, but {row} can continue at turn {last} at the latest; give at most {last}"
        )
    is_live = from_turn is not None
    responses = recorded if from_turn is None else recorded.before(from_turn)
    new = run_to_end(replay_trajectory(settings, old, recorded=responses, continue_live=is_live))[0]
    if from_turn is None:
        is_good = _compare(old, new, console, pieces=stored.vocabulary())
    else:
        is_good = new.output.failure is None
        _print_both(old, new, console, from_turn=from_turn)
    if out is not None:
        where: dict[str, Any] = {"step": found["step"], "split": found["split"]}
        write = write_lines if out.suffix in JSON_LINES else write_trajectories
        write(out, [new], **where)
        print_line(console, f"new trajectory written to {out}")
        print_hint(console, look_at(out))
    if not is_good:
        raise typer.Exit(EXIT_FAILED)


def _compare(old: Trajectory, new: Trajectory, console: Console, *, pieces: Sequence[Piece] | None) -> bool:
    """Print where two trajectories differ, and return whether they are the same."""
    from agent_loop.recording.recorded_responses import first_difference  # late: keeps `--help` quick

    def show(token_ids: Sequence[int]) -> str:
        return f"{list(token_ids)}" + ("" if pieces is None else f"  {text_of(token_ids, pieces)!r}")

    name, num_tokens = old.trajectory_id, sum(map(len, old.output.segments))
    ended, ends = old.output.stop_reason, new.output.stop_reason
    difference = first_difference(old.output, new.output)
    if difference is not None:
        where = f"token {difference.index} of {num_tokens} on ({difference.where})"
        print_line(console, f"{name} differs from {where}")
        print_line(console, f"  recorded: {show(difference.old)}")
        print_line(console, f"  now:      {show(difference.new)}")
    if ended is not ends:
        print_line(console, f"{name} ended with {ended}, and now ends with {ends}")
        print_line(console, f"  {new.output.failure.error}" if new.output.failure is not None else "")
    is_same = difference is None and (ended is ends or ended in ENDED_FROM_OUTSIDE)
    if is_same:
        num_turns = old.output.num_assistant_turns
        print_line(console, f"{name} is identical: {num_tokens} tokens, {num_turns} turns of the model")
    return is_same


def _print_both(old: Trajectory, new: Trajectory, console: Console, *, from_turn: int) -> None:
    table = Table("", "recorded", "now", box=None)
    outputs = [old.output, new.output]
    rewards = ("-" if each.reward is None else f"{each.reward:g}" for each in (old, new))
    table.add_row("reward", *rewards)
    table.add_row("ended with", *(str(each.stop_reason) for each in outputs))
    table.add_row("turns of the model", *(str(each.num_assistant_turns) for each in outputs))
    table.add_row("response tokens", *(str(len(each.response_ids)) for each in outputs))
    console.print(table)
    for title, output in zip(("recorded", "now"), outputs, strict=True):
        console.print(f"\n{title}, from turn {from_turn} on:", style="bold")
        num_turns = 0
        for message in output.messages:
            num_turns += message["role"] == "assistant"
            if num_turns >= from_turn:
                line = f"{message['role']}: {message.get('content') or ''}{message.get('tool_calls') or ''}"
                print_line(console, line)
    if new.output.failure is not None:
        print_line(console, new.output.failure.error, style="red")
