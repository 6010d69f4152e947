"""Folders of training runs with given metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

Line = Mapping[str, float | None]


def write_run(folder: Path, *, seed: int | None, lines: Sequence[Line]) -> Path:
    """Write the metrics and the configuration of a run, and return its folder. Lines without a step are numbered."""
    folder.mkdir(parents=True)
    numbered = ({"step": number, **line} for number, line in enumerate(lines, start=1))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in numbered), encoding="utf-8"
    )
    if seed is not None:
        config = {"data": {"seed": 99}, "trainer": {"seed": seed}}
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def write_rewards(folder: Path, *, seed: int | None, rewards: Sequence[float | None]) -> Path:
    """Write a run with these mean rewards, from step 1 on."""
    return write_run(folder, seed=seed, lines=[{"reward/mean": reward} for reward in rewards])
