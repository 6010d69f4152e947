"""`agent-loop check`: one command for each kind of object with a contract."""

from __future__ import annotations

import typer

from agent_loop.cli.check.interaction import check_interaction_command
from agent_loop.cli.check.model import check_model_command
from agent_loop.cli.check.sandbox import check_sandbox_command
from agent_loop.cli.check.server import check_server_command
from agent_loop.cli.check.tasks import check_tasks_command
from agent_loop.cli.check.tool import check_tool_command

check_app = typer.Typer(
    help="Check that a server, a tool or an interaction follows its contract, how a model may be computed, what "
    "isolates code on this machine, or that tasks can be used.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
check_app.command("server")(check_server_command)
check_app.command("model")(check_model_command)
check_app.command("tool")(check_tool_command)
check_app.command("interaction")(check_interaction_command)
check_app.command("sandbox")(check_sandbox_command)
check_app.command("tasks")(check_tasks_command)
