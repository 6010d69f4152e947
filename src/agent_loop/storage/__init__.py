"""Trajectories on disk, one Parquet file per step. A name imports its module when it is used; most import pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agent_loop.storage.columns import SCHEMA, Learned, to_trajectory
    from agent_loop.storage.run import StoredFile, StoredRun
    from agent_loop.storage.schema import SCHEMA_VERSION
    from agent_loop.storage.vocabulary import pieces_of, read_vocabulary, text_of, write_vocabulary
    from agent_loop.storage.writer import write_trajectories

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "Learned",
    "StoredFile",
    "StoredRun",
    "pieces_of",
    "read_vocabulary",
    "text_of",
    "to_trajectory",
    "write_trajectories",
    "write_vocabulary",
]

_MODULE_OF = {
    "SCHEMA": "columns",
    "SCHEMA_VERSION": "schema",
    "Learned": "columns",
    "StoredFile": "run",
    "StoredRun": "run",
    "pieces_of": "vocabulary",
    "read_vocabulary": "vocabulary",
    "text_of": "vocabulary",
    "to_trajectory": "columns",
    "write_trajectories": "writer",
    "write_vocabulary": "vocabulary",
}


__getattr__ = lazy_exports(__name__, _MODULE_OF)
