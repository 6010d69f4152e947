"""Display of progress in a terminal and in plain output."""

from __future__ import annotations

import io

from rich.console import Console

from agent_loop.training import metrics as names
from agent_loop.training.progress import Progress

METRICS = {
    names.REWARD_MEAN: 0.4123,
    names.SUCCESS_SHARE: 0.25,
    names.NUM_TURNS_MEAN: 4.0,
    names.RESPONSE_LENGTH_MEAN: 88.4,
    names.TOKENS_PER_SECOND: 812.3,
}


def test_outside_a_terminal_each_step_is_one_plain_line() -> None:
    output = io.StringIO()
    console = Console(file=output, width=40)
    with Progress(total_steps=4, console=console) as progress:
        progress.start(completed_steps=0)
        progress.end_step(1, METRICS)
        progress.end_step(2, {**METRICS, f"{names.VALIDATION}{names.SUCCESS_SHARE}": 0.9})

    first, second = output.getvalue().splitlines()
    assert first == "step 1/4  reward 0.412  success 25.0%  turns 4.0  response 88  tokens/s 812  eta 0:00:00"
    assert "val success 90.0%" in second


def test_in_a_terminal_live_bars_count_steps_and_trajectories_below_the_lines() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with Progress(total_steps=4, console=console) as progress:
        progress.start(completed_steps=0)
        with progress.rollout(num_trajectories=8) as note:
            note(object())
            progress.end_step(1, METRICS, time_spent="time: decode 100%")
            progress.say("a line that stays")

    text = output.getvalue()
    for part in ("step 1/4", "0/8", "reward 0.412", "decode 100%", "a line that stays"):
        assert part in text
