"""Writes small tasks in Harbor's form."""

from __future__ import annotations

from pathlib import Path


def write_task(folder: Path, *, task_toml: str = "", instruction: str = "Write 42 to answer.txt.") -> Path:
    """Write a valid task and return its folder."""
    files = {
        "task.toml": task_toml,
        "instruction.md": instruction,
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/sh\necho 42 > answer.txt\n",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder
