from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.viewer import export
from agent_loop.viewer.export import write_export


def parts_of(text: str) -> dict[str, bytes]:
    found = re.findall(r'<script type="application/octet-stream" id="([\w-]+)">([\w+/=]*)</script>', text)
    return {name: gzip.decompress(base64.b64decode(data)) for name, data in found}


def test_the_file_contains_the_newest_trajectories_in_full_and_states_what_is_omitted(
    run_folder: Path, tmp_path: Path
) -> None:
    summary = write_export(run_folder, target=tmp_path / "x.html", max_trajectories=20)
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    parts = parts_of(text)
    head = json.loads(parts["data-head"])
    assert "102 trajectories, 20 in full" in summary
    assert "20 of 102 trajectories" in head["omitted"]
    assert list(head["timelines"]) == ["train 6", "train 5"]
    assert len(head["metrics"]["lines"]) == 6
    assert str(run_folder.parent) not in text
    assert {f"data-trajectory-{place}" for place in range(20)} < parts.keys()


def test_a_small_run_is_exported_completely(run_folder: Path, tmp_path: Path) -> None:
    write_export(run_folder, target=tmp_path / "x.html", max_trajectories=200)
    head = json.loads(parts_of((tmp_path / "x.html").read_text(encoding="utf-8"))["data-head"])
    assert head["omitted"] == ""


def test_the_file_is_bounded(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_ROWS", 40)
    monkeypatch.setattr(export, "MAX_BYTES", 60_000)
    summary = write_export(run_folder, target=tmp_path / "x.html", max_trajectories=200)
    assert "the newest 34 of 102 trajectories" in summary
    parts = parts_of((tmp_path / "x.html").read_text(encoding="utf-8"))
    head = parts.pop("data-head")
    assert sum(map(len, parts.values())) < 60_000
    assert 0 < len(json.loads(head)["trajectories"]) < 34


def test_a_file_that_cannot_be_written_is_an_error(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_export(run_folder, target=Path("/proc/x.html"), max_trajectories=1)
