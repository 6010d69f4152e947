"""Keeps trajectories where no file may grow, in a process of its own: `python -m tests.storage.full_disk FOLDER`."""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from agent_loop.storage.keeper import TrajectoryKeeper
from tests.storage.samples import solved


def main(folder: Path) -> None:
    """Prints how many files failed, and what was said."""
    with TrajectoryKeeper(folder) as keeper:
        keeper.keep([solved()], step=1, split="train", weight_version=0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    said: list[str] = []
    with TrajectoryKeeper(folder, say=said.append) as keeper:
        for step in (1, 2):
            keeper.keep([solved()], step=step, split="train", weight_version=step - 1)
    print(json.dumps([keeper.num_failed, said]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
