"""Trajectories on disk, one Parquet file per step. Importing this package imports pyarrow."""

from agent_loop.storage.columns import Learned
from agent_loop.storage.reading import to_trajectory
from agent_loop.storage.run import StoredFile, StoredRun
from agent_loop.storage.schema import SCHEMA, SCHEMA_VERSION
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
