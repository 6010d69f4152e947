"""Description of a fork, as its process receives it."""

from __future__ import annotations

import msgspec


class ForkJob(msgspec.Struct, frozen=True, kw_only=True):
    """A fork to run."""

    file: str
    """Parquet file with the trajectory."""
    split: str
    step: int
    trajectory_id: str
    turn: int
    """Turn of the model that gets the text; 1 is the first."""
    text: str
    """Text of the turn, with the control tokens of tool calls. The end of the turn may be left out."""
    config: str
    """YAML file with the settings of the run."""
    server_url: str | None
    """Server of the model; None is the engine of the settings."""
    out: str
    """Parquet file to write the fork to."""
