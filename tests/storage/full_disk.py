"""Program that stores trajectories under a limit on file sizes: `python -m tests.storage.full_disk FOLDER`."""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path

from agent_loop.storage.writer import TrajectoryKeeper
from tests.storage.samples import solved


def main(folder: Path) -> None:
    """Print the number of failed files and the reported errors as JSON."""
    with TrajectoryKeeper(folder) as keeper:
        keeper.keep([solved()], step=1, split="train", weight_version=0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    reports: list[str] = []
    with TrajectoryKeeper(folder, report=reports.append) as keeper:
        for step in (1, 2):
            keeper.keep([solved()], step=step, split="train", weight_version=step - 1)
    print(json.dumps([keeper.num_failed, reports]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
