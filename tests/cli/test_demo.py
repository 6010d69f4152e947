"""`agent-loop demo`, in a checkout and from a wheel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from examples.catalog import RECIPES
from tests.cli.installed import installed, run_line
from tests.cli.test_cli import Command, command

assert command  # (fixtures)
assert installed
ROOT = Path(__file__).parents[2]


def test_the_list_names_every_example_and_what_it_needs(command: Command) -> None:
    result = command("demo", "--list")
    assert result.exit_code == 0, result.err
    for name, recipe in RECIPES.items():
        assert re.search(rf"^{name} +{re.escape(recipe.about)}$", result.out, flags=re.MULTILINE)
        assert recipe.needs in result.out


def test_a_misspelled_example_is_refused_before_anything_is_written(command: Command) -> None:
    result = command("demo", "calculater")
    assert result.exit_code == 2
    assert "did you mean 'calculator'?" in result.err
    assert "agent-loop demo --list" in result.err
    assert not Path("runs").exists()


def test_make_demo_is_the_command() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert planned.stdout.splitlines()[-1].endswith("/agent-loop demo")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_package_runs_the_demo_and_a_new_task(tmp_path: Path, installed: Path) -> None:
    first = run_line("agent-loop demo --steps 2", cwd=tmp_path, installed=installed, status=1)
    assert "NOT passed" in first  # two steps are too few
    made = tmp_path / "runs" / "demo"
    assert (made / "report.html").is_file()
    assert (made / "examples" / "two_hop_lookup" / "task.py").is_file()
    assert "2 trajectories" in run_line(
        "agent-loop show train --step 2 --limit 2", cwd=made, installed=installed
    )

    (made / "examples" / "two_hop_lookup" / "README.md").write_text("mine", encoding="utf-8")
    again = run_line(
        "agent-loop demo trainer.total_steps=1 --skip-report", cwd=tmp_path, installed=installed, status=1
    )
    assert "README.md as found" in " ".join(again.split())
    assert (made / "examples" / "two_hop_lookup" / "README.md").read_text(encoding="utf-8") == "mine"

    run_line("agent-loop init shelf", cwd=tmp_path, installed=installed)
    run_line(
        "agent-loop train config.yaml trainer.total_steps=2", cwd=tmp_path / "shelf", installed=installed
    )
    assert "Examples" in run_line("agent-loop view --help", cwd=tmp_path, installed=installed)
    page = tmp_path / "page.html"
    run_line(f"agent-loop view . --export {page}", cwd=tmp_path / "shelf", installed=installed)
    assert "<html" in page.read_text(encoding="utf-8")
