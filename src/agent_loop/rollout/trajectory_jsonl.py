"""Write trajectories as JSON lines, with all tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec import structs

from agent_loop.chat.sources import without_pixels
from agent_loop.storage.json_text import described_row, to_json
from agent_loop.storage.whole_file import whole_file
from agent_loop.trajectory import Segment, Trajectory


def to_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as plain JSON values.

    `row` holds the columns of the row, with descriptions in place of the prompt's images.

    `segments` holds the segments in order, each with `origin` and `token_ids`. Segments of the model also have
    `logprobs`, `weight_version` and, if the server returned any, `extras` (nested lists by name, one entry per token).
    Segments with images have `attachments`: the `kind`, `start`, `num_tokens` and the shapes of the features of each,
    without the pixels.
    """
    output = trajectory.output
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group": trajectory.group,
        "rollout": trajectory.rollout,
        "branch": trajectory.branch,
        "row": described_row(trajectory.row),
        "stop_reason": str(output.stop_reason),
        "reward": trajectory.reward,
        "reward_extra": dict(trajectory.reward_extra),
        "tool_rewards": list(output.tool_rewards),
        "turn_scores": list(output.turn_scores),
        "feedback": [structs.asdict(feedback) for feedback in output.feedback],
        "num_turns": output.num_turns,
        "messages": [without_pixels(message) for message in output.messages],
        "incidents": [
            {"kind": str(incident.kind), "detail": incident.detail, "assistant_turn": incident.assistant_turn}
            for incident in output.incidents
        ],
        "failure": output.failure and structs.asdict(output.failure),
        "metrics": structs.asdict(output.metrics),
        "segments": [_segment(segment) for segment in output.segments],
        "extra_fields": dict(output.extra_fields),
    }


def write_records(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write one line per trajectory, all of them or none.

    Values without a JSON form are written as text, numbers that are not finite as null, and lone surrogates as U+FFFD.

    Raises:
        OSError: The file cannot be written. An existing file is unchanged.
    """
    with whole_file(path) as temporary, writing_records(temporary) as write:
        for trajectory in trajectories:
            write(trajectory)


@contextmanager
def writing_records(path: Path) -> Generator[Callable[[Trajectory], None]]:
    """Create or empty a file, and yield a function that appends the line of a trajectory. Each line is flushed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("w", encoding="utf-8", buffering=1)

    def write(trajectory: Trajectory) -> None:
        file.write(to_json(to_record(trajectory)) + "\n")

    try:
        yield write
    except BaseException:
        with suppress(OSError):  # closing fails too if a write failed, and the error of the write says more
            file.close()
        raise
    file.close()


def _segment(segment: Segment) -> dict[str, Any]:
    record: dict[str, Any] = {"origin": str(segment.origin), "token_ids": segment.token_ids.tolist()}
    if segment.weight_version is not None:
        record["weight_version"] = segment.weight_version
        record["logprobs"] = None if segment.logprobs is None else segment.logprobs.tolist()
    if segment.extras:
        record["extras"] = {name: array.tolist() for name, array in segment.extras.items()}
    if segment.attachments:
        record["attachments"] = [
            {
                "kind": attachment.kind,
                "start": attachment.start,
                "num_tokens": attachment.num_tokens,
                "features": {name: list(array.shape) for name, array in attachment.features.items()},
            }
            for attachment in segment.attachments
        ]
    return record
