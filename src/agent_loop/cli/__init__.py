"""Command line of `agent-loop`: one file per command."""

from __future__ import annotations

import errno
import sys
import traceback

import typer
from rich.console import Console

from agent_loop import __version__
from agent_loop.cli.check import check_app
from agent_loop.cli.compare import compare_command
from agent_loop.cli.config_show import config_app
from agent_loop.cli.demo import demo_command
from agent_loop.cli.doctor import doctor_command
from agent_loop.cli.eval import eval_command
from agent_loop.cli.export import export_command
from agent_loop.cli.from_verl import from_verl_command
from agent_loop.cli.init import init_command
from agent_loop.cli.make_model import make_model_command
from agent_loop.cli.plan import plan_command
from agent_loop.cli.replay import replay_command
from agent_loop.cli.rescore import rescore_command
from agent_loop.cli.rollout import rollout_command
from agent_loop.cli.serve import serve_command
from agent_loop.cli.show import show_command
from agent_loop.cli.tasks import tasks_app
from agent_loop.cli.tinker import tinker_command
from agent_loop.cli.traces import traces_command
from agent_loop.cli.train import sft_command, train_command
from agent_loop.cli.verbosity import VERBOSITY, add_verbosity, print_line
from agent_loop.cli.verify_template import verify_template_command
from agent_loop.cli.view import view_command
from agent_loop.errors import AgentLoopError

app = typer.Typer(
    name="agent-loop",
    help="Multi-turn, tool-using rollouts for reinforcement learning, exact to the token.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("demo")(demo_command)
app.command("init")(init_command)
app.command("train")(train_command)
app.command("sft")(sft_command)
app.command("make-model")(make_model_command)
app.command("plan")(plan_command)
app.command("rollout")(rollout_command)
app.command("eval")(eval_command)
app.command("compare")(compare_command)
app.command("export")(export_command)
app.command("show")(show_command)
app.command("traces")(traces_command)
app.command("rescore")(rescore_command)
app.command("replay")(replay_command)
app.command("serve")(serve_command)
app.command("tinker")(tinker_command)
app.command("verify-template")(verify_template_command)
app.add_typer(config_app, name="config")
app.add_typer(check_app, name="check")
app.add_typer(tasks_app, name="tasks")
app.command("view")(view_command)
app.command("doctor")(doctor_command)
app.command("from-verl")(from_verl_command)
add_verbosity(app)


def main() -> None:
    """Run the command line.

    An `AgentLoopError`, or an `OSError` about a file or a full disk, is printed without a traceback and ends with exit
    code 2. With `-v`, the traceback is printed too.
    """
    try:
        app()
    except AgentLoopError as error:
        _show(error, str(error))
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:
            named = f"{str(error.filename)!r} cannot be used ({error.strerror}); give another path, or fix this one"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            named = (
                f"a file cannot be written ({error.strerror}); free the disk, or give a path on another one"
            )
        else:
            raise
        _show(error, named)
        sys.exit(2)


def _show(error: Exception, message: str) -> None:
    if VERBOSITY.verbose:
        traceback.print_exception(error)
    console = Console(stderr=True)
    console.print(f"[bold red]{type(error).__name__}[/]", end=": ")
    print_line(console, message)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"agent-loop {__version__}")
        raise typer.Exit


@app.callback()
def _options(  # pyright: ignore[reportUnusedFunction]
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass
