"""Tokens of an assistant turn whose text is known, as a model would sample them."""

from __future__ import annotations

from collections.abc import Sequence

from agent_loop.chat.template import ChatTemplate


def completion_ids(template: ChatTemplate, rendered: str, *, next_id: int) -> list[int]:
    """Return the tokens of a completion: those of a rendered text, up to the token at which a model would stop.

    Args:
        template: The template that rendered the text.
        rendered: The text after the generation prompt, with the close of the turn, as `template.renderer` returns it.
        next_id: The first token that a reply would add after the text. If the template does not close turns, the model
            stops at this token.
    """
    ids = template.encoder.encode(rendered)
    stop = _stop(template, ids)
    if stop is not None:
        return ids[: stop + 1]
    return [*ids, next_id] if next_id in template.end_ids else ids


def _stop(template: ChatTemplate, ids: Sequence[int]) -> int | None:
    """Return the position of the first of the end tokens that close the turn, or None if there are none."""
    stop = None
    for position in range(len(ids) - 1, -1, -1):
        if ids[position] in template.end_ids:
            stop = position
        elif template.decode([ids[position]]).strip():
            break
    return stop
