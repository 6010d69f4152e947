"""Process of `SGLangServer`: runs SGLang's HTTP server with options from a file."""

from __future__ import annotations

import json
from pathlib import Path

from agent_loop.servers.packages import import_engine
from agent_loop.servers.process import end_with_children, refuse_option
from agent_loop.servers.sglang.options import SUPPORTED


def main(options_file: str) -> None:
    """Serve until the process is terminated."""
    options = json.loads(Path(options_file).read_text(encoding="utf-8"))
    launch = import_engine("sglang.launch_server", package="sglang", supported=SUPPORTED)
    arguments = import_engine("sglang.srt.server_args", package="sglang", supported=SUPPORTED)
    try:
        server_args = arguments.ServerArgs(**options)
    except (TypeError, ValueError, AssertionError) as error:
        refuse_option(error)
    end_with_children()
    launch.run_server(server_args)
