"""`agent-loop demo`: train an example, from random weights to an agent."""

from __future__ import annotations

import filecmp
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.verbosity import print_line
from agent_loop.errors import ConfigError, did_you_mean

DEFAULT = "two_hop_lookup"
EXAMPLES = "examples"
"""Name of the folder with the examples: beside this file in an installed package, else at the root of the checkout."""
UNWANTED = shutil.ignore_patterns("__pycache__", "recipes", "tasks", "gsm8k", "retool", "search_r1")
"""Files that are not part of the examples of this command."""


def demo_command(
    name: Annotated[str | None, typer.Argument(help=f"The example; by default {DEFAULT}.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings that replace those of the example's `config.yaml`."
        ),
    ] = None,
    *,
    lists: Annotated[bool, typer.Option("--list", help="List the examples and what each needs.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the example's code, the model, the run and the report.",
            show_default="runs/NAME, or runs/demo without a name",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of training.", show_default="those of the example")
    ] = None,
    skip_report: Annotated[bool, typer.Option("--skip-report", help="Write no report.html.")] = False,
) -> None:
    """Train an example: a tiny model learns a format and a bad habit, and unlearns the habit from rewards.

    The default example takes about two minutes on one core. It ends with a report, a run for `agent-loop view`, and
    exit code 1 if training missed its target. The code of the example is copied to `--out`.

    Examples:

        agent-loop demo

        agent-loop demo --list

        agent-loop demo calculator --seed 3 actor.lr=1e-4
    """
    source = examples_folder()
    if name is not None and "=" in name:  # only settings were given
        name, settings = None, [name, *(settings or [])]
    sys.path.insert(0, str(source.parent))
    catalog = importlib.import_module(f"{EXAMPLES}.catalog")
    console = Console()
    if lists:
        _print_list(catalog.RECIPES, console=console)
        return
    example = name or DEFAULT
    if example not in catalog.RECIPES:
        raise ConfigError(
            f"there is no example {example!r}{did_you_mean(example, catalog.RECIPES)}; "
            "`agent-loop demo --list` lists them"
        )
    folder = (out or Path("runs") / (name or "demo")).resolve()
    copy_examples(source, folder / EXAMPLES, console=console)
    sys.path[0] = str(folder)
    for module in [module for module in sys.modules if module.partition(".")[0] == EXAMPLES]:
        del sys.modules[module]  # the copy is run, and not what was imported for the list
    importlib.invalidate_caches()
    os.chdir(folder)  # the settings name files by their paths from there
    run: Any = importlib.import_module(f"{EXAMPLES}.run")
    options = ["--out", str(folder), "--seed", str(seed)]
    options += [] if steps is None else ["--steps", str(steps)]
    options += ["--skip-report"] if skip_report else []
    status = run.main([example, *options, *(settings or [])])
    if status:
        raise typer.Exit(status)
    print_line(
        console,
        f"\nThe code is in {folder / EXAMPLES / example}. A task of your own: agent-loop init my_task",
    )


def examples_folder() -> Path:
    """Return the folder with the examples."""
    here = Path(__file__).parent
    for folder in (here / EXAMPLES, here.parents[2] / EXAMPLES):
        if (folder / "catalog.py").is_file():
            return folder
    raise ConfigError(
        f"this installation has no examples at {here / EXAMPLES}; install agent-loop from its wheel"
    )


def copy_examples(source: Path, target: Path, *, console: Console) -> None:
    """Copy the examples. Files that exist already are kept, and those that differ are named."""
    edited: list[str] = []

    def copy(file: str, to: str) -> str:
        if Path(to).exists():
            if not filecmp.cmp(file, to, shallow=False):
                edited.append(to)
            return to
        return shutil.copyfile(file, to)

    shutil.copytree(source, target, ignore=UNWANTED, dirs_exist_ok=True, copy_function=copy)
    if edited:
        print_line(console, f"uses {', '.join(edited)} as found; another --out gives the package's own")


def _print_list(recipes: Any, *, console: Console) -> None:
    width = max(map(len, recipes)) + 2
    for name, recipe in recipes.items():
        print_line(console, f"{name:{width}}{recipe.about}")
        if recipe.needs:
            print_line(console, " " * width + f"needs: {recipe.needs}")
