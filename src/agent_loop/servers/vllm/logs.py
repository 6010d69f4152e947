"""The engine's log, kept in a file so that errors can end with its last lines."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 65536
FIRST_ERROR = re.compile(r"^[\w.]*(Error|Exception): ")
"""The last line of a traceback."""


class EngineLog:
    """A folder with the log of one engine: its own processes and its client write to one file."""

    def __init__(self, server: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"agent-loop-{server}-".replace("/", "-")))
        self.path = self._folder / "engine.log"
        self.config_path = self._folder / "logging.json"
        """A `logging.config.dictConfig` for the engine's processes."""
        self.config_path.write_text(
            json.dumps(
                {
                    "version": 1,
                    "disable_existing_loggers": False,
                    "formatters": {
                        "engine": {"format": "%(levelname)s %(asctime)s %(processName)s] %(message)s"}
                    },
                    "handlers": {
                        "file": {
                            "class": "logging.FileHandler",
                            "filename": str(self.path),
                            "formatter": "engine",
                            "encoding": "utf-8",
                        }
                    },
                    "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
                }
            )
        )

    def tail(self) -> str:
        """The last lines, as the end of an error message; empty if there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        if not lines:
            return ""
        # What went wrong first is often far above what broke in consequence.
        first = next((line for line in lines if FIRST_ERROR.match(line)), "")
        told = f"; the first error in its log is {first!r}" if first else ""
        return f"{told}; its log ({self.path}) ends with:\n" + "\n".join(lines[-TAIL_LINES:])

    def remove(self) -> None:
        """Deletes the folder. The log of an engine that failed is left for the user to read."""
        shutil.rmtree(self._folder, ignore_errors=True)
