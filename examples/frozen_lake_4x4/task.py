"""Task: walk over Gymnasium's standard frozen lake. The demonstrations are those of the random lakes."""

from __future__ import annotations

from examples.frozen_lake.task import demonstrations as demonstrations
