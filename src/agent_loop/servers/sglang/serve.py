"""Process of `SGLangServer`: runs SGLang's HTTP server with options from a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

from agent_loop.servers.packages import import_engine
from agent_loop.servers.process import refuse_option
from agent_loop.servers.sglang.options import SUPPORTED

POLL_S = 0.5


def main(options_file: str) -> None:
    """Serve until the process is terminated."""
    options = json.loads(Path(options_file).read_text(encoding="utf-8"))
    launch = import_engine("sglang.launch_server", package="sglang", supported=SUPPORTED)
    arguments = import_engine("sglang.srt.server_args", package="sglang", supported=SUPPORTED)
    try:
        server_args = arguments.ServerArgs(**options)
    except (TypeError, ValueError, AssertionError) as error:
        refuse_option(error)
    threading.Thread(target=_end_with_children, daemon=True).start()
    launch.run_server(server_args)


def _end_with_children() -> None:
    """End this process with the first of the engine's processes: SGLang may not notice its end."""
    seen: set[Any] = set()
    while True:
        seen.update(multiprocessing.active_children())
        for child in seen:
            if child.exitcode is not None:
                print(f"SGLang's process {child.pid} ended, and the engine with it", flush=True)
                os._exit(1)
        time.sleep(POLL_S)
