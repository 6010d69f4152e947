"""Options that all `agent-loop check` commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from agent_loop.cli.arguments import finite

EXIT_FAILED = 1
CheckTimeoutOption = Annotated[
    float, typer.Option(min=0, callback=finite, help="Time limit of each check, in seconds.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
