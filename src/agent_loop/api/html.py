"""HTML of trajectories for notebooks: messages, and tokens coloured by origin and log-prob."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence

from agent_loop.trajectory import Segment, Trajectory
from agent_loop.types import Message, Origin

MAX_SHOWN = 50
"""Trajectories on a page."""
MAX_TEXT = 80
"""Characters of an answer in the table."""
LOGPROB_COLOURS = ((-0.1, "#d3f0d3"), (-1.0, "#f7efb5"), (-3.0, "#f9d4a6"), (-math.inf, "#f5b5b5"))
"""Lower bounds of log-probs, and the background of sampled tokens above them."""
ORIGIN_COLOURS = {
    Origin.PROMPT: "#eeeeee",
    Origin.TOOL: "#d6e4fb",
    Origin.INTERACTION: "#d2eef0",
    Origin.PREFIX: "#e3d9f5",
    Origin.MODEL: "#d3f0d3",
}


def batch_html(trajectories: Sequence[Trajectory], *, tokens: Mapping[int, str]) -> str:
    """Return a table of trajectories, each of which unfolds to its messages and tokens.

    Args:
        trajectories: The trajectories; the first `MAX_SHOWN` are shown.
        tokens: Text of each token id.
    """
    shown = "".join(_unfolding(each, tokens=tokens) for each in trajectories[:MAX_SHOWN])
    more = len(trajectories) - MAX_SHOWN
    rest = f"<p>and {more} more</p>" if more > 0 else ""
    return _page(shown + rest)


def trajectory_html(trajectory: Trajectory, *, tokens: Mapping[int, str]) -> str:
    """Return the reward and messages of a trajectory, and below them its tokens with log-probs in their tooltips.

    Args:
        trajectory: The trajectory.
        tokens: Text of each token id.
    """
    return _page(f"<p>{html.escape(summary(trajectory))}</p>{_body(trajectory, tokens=tokens)}")


def _page(body: str) -> str:
    return f'<div style="color: #1c1e21; background: #ffffff; padding: 4px">{body}{_legend()}</div>'


def _body(trajectory: Trajectory, *, tokens: Mapping[int, str]) -> str:
    messages = "".join(_message(message) for message in trajectory.output.messages)
    pieces = "".join(
        piece for segment in trajectory.output.segments for piece in _tokens(segment, tokens=tokens)
    )
    style = "white-space: pre-wrap; word-break: break-all; font-family: monospace; line-height: 1.6"
    return f'{messages}<div style="{style}">{pieces}</div>'


def _unfolding(trajectory: Trajectory, *, tokens: Mapping[int, str]) -> str:
    head, body = html.escape(summary(trajectory)), _body(trajectory, tokens=tokens)
    return f"<details><summary>{head}</summary>{body}</details>"


def summary(trajectory: Trajectory) -> str:
    """Return the id, reward, stop reason and answer of a trajectory in one line."""
    output = trajectory.output
    reward = "not scored" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    answer = output.answer if len(output.answer) <= MAX_TEXT else output.answer[:MAX_TEXT] + "…"
    return f"{trajectory.trajectory_id} · {reward} · {output.stop_reason} · {answer}"


def _message(message: Message) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
    calls = "".join(
        f"\n{json.dumps(call.get('function', call), ensure_ascii=False, default=str)}"
        for call in message.get("tool_calls") or ()
    )
    role, body = html.escape(str(message.get("role"))), html.escape((text or "") + calls)
    return f'<div style="white-space: pre-wrap; margin: 2px 0"><b>{role}</b> {body}</div>'


def _tokens(segment: Segment, *, tokens: Mapping[int, str]) -> Iterator[str]:
    for index, token_id in enumerate(segment.token_ids.tolist()):
        colour, title = ORIGIN_COLOURS[segment.origin], f"{token_id}, {segment.origin}"
        if segment.logprobs is not None and segment.origin is Origin.MODEL:
            logprob = float(segment.logprobs[index])
            colour = next(each for bound, each in LOGPROB_COLOURS if logprob >= bound)
            title += f", log-prob {logprob:.3f} ({math.exp(logprob):.1%})"
        text = html.escape(tokens.get(token_id, f"[{token_id}]")).replace("\n", "↵\n")
        yield f'<span style="background: {colour}" title="{html.escape(title)}">{text}</span>'


def _legend() -> str:
    origins = [
        (str(origin), colour) for origin, colour in ORIGIN_COLOURS.items() if origin is not Origin.MODEL
    ]
    bounds = [
        (f"log-prob >= {bound:g}" if math.isfinite(bound) else "below", colour)
        for bound, colour in LOGPROB_COLOURS
    ]
    return (
        "<p>"
        + " ".join(
            f'<span style="background: {colour}">{html.escape(name)}</span>'
            for name, colour in [*origins, *bounds]
        )
        + "</p>"
    )
