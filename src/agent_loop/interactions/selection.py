"""The interaction that a row chooses among those that are configured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agent_loop.errors import DataError, did_you_mean


def read_interaction_name(
    interaction_kwargs: Mapping[str, Any] | None, *, known: Collection[str], where: str
) -> str | None:
    """Return the interaction that a row's `interaction_kwargs` name, or None if the row takes part in none.

    Data sets hold arguments without a name in rows that only call tools. Without a configured interaction those
    arguments mean nothing. A table in which other rows have an interaction holds None in every field.

    Raises:
        DataError: The name is missing although interactions are configured, or no interaction has it.
    """
    given = {key: value for key, value in (interaction_kwargs or {}).items() if value is not None}
    if not given or ("name" not in given and not known):
        return None
    if "name" not in given:
        names = ", ".join(map(repr, known))
        raise DataError(
            f"{where} has no name, and the configured interactions are {names}; name one of them, or leave "
            f"{where.rpartition(' ')[2]} out of rows without an interaction"
        )
    name = str(given["name"])
    if name in known:
        return name
    if known:
        raise DataError(f"{where}.name is {name!r}: no such interaction{did_you_mean(name, known)}")
    raise DataError(
        f"{where}.name is {name!r}, but no interaction is configured; set "
        "rollout.multi_turn.interaction_config_path, or leave the name out"
    )
