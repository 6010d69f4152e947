"""Print one trajectory, turn by turn or token by token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rich.console import Console
from rich.text import Text

from agent_loop.storage.vocabulary import Piece, text_of

ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
ORIGIN_STYLES = {"prompt": "dim", "tool": "yellow", "interaction": "cyan", "prefix": "blue", "model": "green"}
LOG_PROB_STYLES = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "bold red"))
"""Lower bounds of log-probs, and the colours of sampled tokens above them."""
TIMES = ("admission", "queue", "generate", "prefill", "tool", "interaction", "reward", "encode", "other")


def print_trajectory(
    row: Mapping[str, Any], console: Console, *, pieces: Sequence[Piece] | None, tokens: bool
) -> None:
    """Print a row of `StoredRun.trajectory`.

    Args:
        pieces: Text of each token; None prints token ids.
        tokens: Print token by token instead of turn by turn.
    """
    _print_text(console, _head(row), style="bold")
    if tokens:
        print_tokens(row, console, pieces=pieces)
    else:
        _print_turns(row, console)
    if row["failure"] is not None:
        _print_text(
            console, f"\nfailed: {row['failure']}\n{row['failure_traceback'] or ''}".rstrip(), style="red"
        )
    _print_text(console, f"\n{_time_line(row)}", style="dim")


def print_tokens(row: Mapping[str, Any], console: Console, *, pieces: Sequence[Piece] | None) -> None:
    """Print each token, coloured by origin, or by log-prob if the model sampled it."""
    legend = Text("prompt", ORIGIN_STYLES["prompt"])
    for origin in ("tool", "interaction", "prefix"):
        legend.append(f"  {origin}", ORIGIN_STYLES[origin])
    for bound, style in LOG_PROB_STYLES[:-1]:
        legend.append(f"  log-prob >= {bound:g}", style)
    legend.append("  below", LOG_PROB_STYLES[-1][1])
    console.print(legend)
    ids, logprobs = [*row["prompt_ids"], *row["response_ids"]], row["response_logprobs"]
    shown, position = Text(), 0
    for segment in row["segments"]:
        for token in ids[position : position + segment["num_tokens"]]:
            style = ORIGIN_STYLES[segment["origin"]]
            if segment["origin"] == "model" and logprobs is not None:
                style = _logprob_style(float(logprobs[position - len(row["prompt_ids"])]))
            shown.append(f"{token} " if pieces is None else text_of([int(token)], pieces), style)
            position += 1
    console.print(shown, soft_wrap=True)


def _print_turns(row: Mapping[str, Any], console: Console) -> None:
    """Print messages, each turn followed by its incidents."""
    incidents, feedback = json.loads(row["incidents"]), json.loads(row["feedback"])
    of_tools = iter([each for each in feedback if each["origin"] == "tool"])
    of_interaction = iter([each for each in feedback if each["origin"] == "interaction"])
    num_turns = 0
    for message in json.loads(row["messages"]):
        role = message["role"]
        if role == "assistant":
            _print_incidents([each for each in incidents if each["assistant_turn"] == num_turns], console)
            num_turns += 1
        _print_message(message, console)
        if role == "tool" and message.get("name"):
            _print_feedback(next(of_tools, None), console)
        elif role == "user" and num_turns:
            _print_feedback(next(of_interaction, None), console)
    _print_incidents([each for each in incidents if each["assistant_turn"] >= num_turns], console)


def _print_message(message: Mapping[str, Any], console: Console) -> None:
    role, name = message["role"], message.get("name")
    _print_text(console, f"\n-- {role}" + (f" {name}" if name else ""), style=ROLE_STYLES.get(role, "white"))
    if message.get("reasoning_content"):
        _print_text(console, str(message["reasoning_content"]), style="dim italic")
    _print_text(console, _content(message))
    for call in message.get("tool_calls") or ():
        _print_text(console, f"-> {_call(call)}", style="bold yellow")


def _print_feedback(feedback: Mapping[str, Any] | None, console: Console) -> None:
    if feedback is None:
        return
    parts = [f"{name} {feedback[name]}" for name in ("reward", "incident") if feedback[name] is not None]
    parts += [f"{name}: {value}" for name, value in feedback["extra"].items()]
    if parts:
        _print_text(console, f"   ({', '.join(parts)})", style="dim")


def _print_incidents(incidents: Iterable[Mapping[str, Any]], console: Console) -> None:
    for incident in incidents:
        _print_text(console, f"!  {incident['kind']}: {incident['detail']}", style="red")


def _head(row: Mapping[str, Any]) -> str:
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    advantage = "" if row["advantage"] is None else f", advantage {row['advantage']:+.3f}"
    versions = sorted({s["weight_version"] for s in row["segments"] if s["weight_version"] is not None})
    extra = "".join(f", {name}: {value}" for name, value in json.loads(row["reward_extra"]).items())
    return (
        f"{row['split']} step {row['step']}  {row['trajectory_id']}  {reward}{extra}{advantage}  {row['stop_reason']}  "
        f"{row['prompt_length']} + {row['response_length']} tokens, {row['num_model_tokens']} sampled"
        + (f" (weights {', '.join(map(str, versions))})" if versions else "")
    )


def _time_line(row: Mapping[str, Any]) -> str:
    if row["seconds"] is None:
        return "time: not measured"
    spent = [f"{name} {row[f'{name}_s']:.2f}" for name in TIMES if row[f"{name}_s"]]
    return f"time: {row['seconds']:.2f} s: {', '.join(spent)}"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = cast(list[Any], content)
    return "\n".join(
        str(cast(dict[str, Any], part).get("text", part)) if isinstance(part, dict) else str(part)
        for part in parts
    )


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name', '')}({written})"


def _logprob_style(logprob: float) -> str:
    return next((style for bound, style in LOG_PROB_STYLES if logprob >= bound), "")


def _print_text(console: Console, text: str, *, style: str = "") -> None:
    if text:
        console.print(Text(text, style), soft_wrap=True)
