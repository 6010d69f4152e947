"""The notebook runs from its first cell to its last, in a kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

source, target, folder = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, target)
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_stored_notebook_has_no_outputs() -> None:
    assert [cell for cell in code_cells(NOTEBOOK) if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_cell_runs_and_shows_progress_and_trajectories(tmp_path: Path) -> None:
    target = tmp_path / "executed.ipynb"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(target), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = [output for cell in code_cells(target) for output in cell["outputs"]]
    pages = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    assert any("trajectories 16/16" in page for page in pages)
    assert sum("<details>" in page for page in pages) == 1
    assert sum("log-prob -" in page for page in pages) == 3
    printed = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stderr")
    assert "Loading weights" not in printed  # (the kernel's own bars would break the page)
    assert "ipywidgets for Jupyter" not in printed
