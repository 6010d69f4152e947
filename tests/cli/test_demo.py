"""`agent-loop demo`, in a checkout and from a wheel."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.cli.demo import copy_examples, examples_folder
from examples.catalog import RECIPES
from tests.cli.installed import installed, run_line
from tests.cli.project import Command

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


def test_a_copy_keeps_files_that_were_edited_and_names_them(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    copy_examples(examples_folder(), tmp_path, console=console)
    (tmp_path / "calculator" / "task.py").write_text("edited", encoding="utf-8")
    assert not (tmp_path / "gsm8k").exists()
    copy_examples(examples_folder(), tmp_path, console=console)
    assert (tmp_path / "calculator" / "task.py").read_text(encoding="utf-8") == "edited"
    assert isinstance(console.file, io.StringIO)
    [note] = console.file.getvalue().splitlines()
    assert note.startswith(f"uses {tmp_path / 'calculator' / 'task.py'} as found")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_installed_package_runs_the_demo_and_a_new_task(tmp_path: Path, installed: Path) -> None:
    first = run_line("agent-loop demo --steps 2", cwd=tmp_path, installed=installed, status=1)
    assert "NOT passed" in first  # two steps are too few
    made = tmp_path / "runs" / "demo"
    assert (made / "report.html").is_file()
    assert (made / "examples" / "two_hop_lookup" / "task.py").is_file()
    assert "128 trajectories" in run_line(
        "agent-loop show train --step 2 --limit 2", cwd=made, installed=installed
    )

    run_line("agent-loop init shelf", cwd=tmp_path, installed=installed)
    run_line(
        "agent-loop train config.yaml trainer.total_steps=2", cwd=tmp_path / "shelf", installed=installed
    )
    assert "Examples" in run_line("agent-loop view --help", cwd=tmp_path, installed=installed)
    page = tmp_path / "page.html"
    run_line(f"agent-loop view . --export {page}", cwd=tmp_path / "shelf", installed=installed)
    assert "<html" in page.read_text(encoding="utf-8")
