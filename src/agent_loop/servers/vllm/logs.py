"""Log file of the engine, whose last lines are quoted in errors."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 65536
FIRST_ERROR = re.compile(r"^[\w.]*(Error|Exception): ")
"""Last line of a traceback."""


class EngineLog:
    """Folder with the log of one engine. The engine's processes and its client write to the same file."""

    def __init__(self, server: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"agent-loop-{server}-".replace("/", "-")))
        self.path = self._folder / "engine.log"
        self.config_path = self._folder / "logging.json"
        """File with a `logging.config.dictConfig` for the engine's processes."""
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
        """Return the last lines, as the end of an error message; empty if there are none."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        if not lines:
            return ""
        # The first error, which caused the later ones, is often far above the last lines.
        first = next((line for line in lines if FIRST_ERROR.match(line)), "")
        cause = f"; the first error in its log is {first!r}" if first else ""
        return f"{cause}; its log ({self.path}) ends with:\n" + "\n".join(lines[-TAIL_LINES:])

    def remove(self) -> None:
        """Delete the folder. Not called for an engine that failed, so that the user can read its log."""
        shutil.rmtree(self._folder, ignore_errors=True)
