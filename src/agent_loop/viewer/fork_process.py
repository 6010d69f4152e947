"""Process that forks a trajectory: replays the turns before one, takes a text as that turn, and continues live.

Reads a `ForkJob` as JSON from standard input. An error is one line on standard error, with the exit code 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, load_config
from agent_loop.errors import AgentLoopError, DataError
from agent_loop.recording.recorded_responses import RecordedResponses, extract_responses
from agent_loop.rollout.components import load_template
from agent_loop.rollout.replay import replay_trajectory
from agent_loop.runtime.describe import one_line
from agent_loop.runtime.event_loop import run_to_end
from agent_loop.storage.columns import to_trajectory
from agent_loop.storage.run import StoredRun
from agent_loop.storage.writer import write_trajectories
from agent_loop.training.checkpoint import list_checkpoints
from agent_loop.training.export import evaluated_model
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import TokenOutput
from agent_loop.viewer.forks import ForkJob

MAX_MESSAGE = 600
TOKEN_ENGINES = frozenset({"sglang"})
"""Engines whose servers take token ids in their own form alone. Others have `/v1/completions`, which changes nothing in
the server."""


def run_fork(job: ForkJob) -> None:
    """Run a fork and write its trajectory."""
    config = load_config(Path(job.config))
    config = load_config(Path(job.config), overrides=_overrides(config, job))
    stored = StoredRun(Path(job.file)).trajectory(job.split, job.step, job.id)
    old = to_trajectory(stored)
    recorded = _with_text(extract_responses(old), job, config)
    fork, *_ = run_to_end(replay_trajectory(config, old, recorded=recorded, continue_live=True))
    write_trajectories(
        Path(job.out),
        [fork],
        step=job.step,
        split=job.split,
        success_threshold=config.reward.success_threshold,
    )


def _overrides(config: Config, job: ForkJob) -> Sequence[str]:
    """Return the settings of the server, and of the model: the run's last checkpoint, if it has any."""
    run_dir = Path(job.config).parent
    model = [f"model.path={evaluated_model(run_dir)}"] if list_checkpoints(run_dir) else []
    if job.server_url is None:
        return ["rollout.num_servers=1", *model]
    urls = f"rollout.server_urls=[{job.server_url}]"
    if config.rollout.engine in TOKEN_ENGINES:
        return [urls]
    kept = [] if config.rollout.engine == "openai" else ["rollout.engine_kwargs={}"]
    return [urls, "rollout.engine=openai", *kept, *model]


def _with_text(recorded: RecordedResponses, job: ForkJob, config: Config) -> RecordedResponses:
    """Return the responses before the turn, and the text as the completion of the turn."""
    num_turns = len(recorded.completions)
    if not 1 <= job.turn <= num_turns:
        raise DataError(f"turn {job.turn} does not exist; {job.id} has {num_turns} turns of the model")
    template = load_template(config)
    turn = recorded.completions[job.turn - 1]
    sampled = decode_completion(turn).token_ids
    if job.text != template.decode(sampled):  # unedited text may encode to other tokens
        turn = encode_completion(TokenOutput(_edited(job.text, template, sampled=sampled), None, "stop"))
    before = recorded.before(job.turn)
    return replace(before, completions=[*before.completions, turn])


def _edited(text: str, template: ChatTemplate, *, sampled: Sequence[int]) -> list[int]:
    """Return the tokens of an edited turn, with the end of the turn."""
    ids = template.encoder.encode(text)
    if not ids or ids[-1] not in template.end_ids:
        ends = [*sampled[-1:], *sorted(template.end_ids)]
        ids += [end for end in ends if end in template.end_ids][:1]
    return ids


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ForkJob)
    try:
        run_fork(job)
    except (AgentLoopError, ValueError) as error:
        print(one_line(str(error), max_length=MAX_MESSAGE), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
