"""Selection of a row's interaction among the configured ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agent_loop.errors import DataError, did_you_mean


def read_interaction_name(
    interaction_kwargs: Mapping[str, Any] | None, *, known: Collection[str], where: str
) -> str | None:
    """Return the name of the interaction in a row's `interaction_kwargs`, or None if the row has no interaction.

    Arguments without a name are ignored if no interaction is configured: some data sets have them in rows that only
    call tools. Fields that are None are ignored: a table has them in rows without an interaction.

    Raises:
        DataError: The name is missing although interactions are configured, or it is unknown.
    """
    given = {key: value for key, value in (interaction_kwargs or {}).items() if value is not None}
    if not given or ("name" not in given and not known):
        return None
    if "name" not in given:
        names = ", ".join(map(repr, known))
        raise DataError(
            f"{where} has no name, and the configured interactions are {names}; name one of them, or omit "
            f"{where.rpartition(' ')[2]} in rows without an interaction"
        )
    name = str(given["name"])
    if name in known:
        return name
    if known:
        raise DataError(f"{where}.name is {name!r}, which is not configured{did_you_mean(name, known)}")
    raise DataError(
        f"{where}.name is {name!r}, but no interaction is configured; set "
        "rollout.multi_turn.interaction_config_path, or remove the name"
    )
