"""Judges' replies by the content of their requests, in memory and in a file."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_error

logger = logging.getLogger(__name__)

MAX_REPLIES = 100_000
"""Number of replies in memory. Each further reply replaces the oldest one."""


class JudgeCache:
    """Replies by the hash of their requests.

    The file has one JSON object per line and is only appended to, so several processes on a machine can share it. A
    line that a crash cut is skipped.

    Args:
        path: File that keeps the replies for later runs. None keeps replies in memory only.

    Raises:
        ConfigError: The file cannot be read or created.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._replies: dict[str, str] = {}
        self._has_failed = False
        if path is None:
            return
        try:
            self._load(path)
        except OSError as error:
            raise ConfigError(
                f"cache is {str(path)!r}, which cannot be opened ({describe_error(error)}); name another file"
            ) from error

    def get(self, key: str) -> str | None:
        """Return the reply to a request, or None if it is unknown."""
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> None:
        """Keep a reply. A file that cannot be written is logged once, and the reply stays in memory."""
        self._keep(key, reply)
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "reply": reply}) + "\n")
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "judges' replies cannot be written to %s: %s", self._path, describe_error(error)
                )
            self._has_failed = True

    def _load(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        line = "\n"
        with path.open("a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            for line in file:
                self._read(line)
            if not line.endswith("\n"):
                file.write("\n")

    def _read(self, line: str) -> None:
        try:
            values: Any = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(values, dict):
            fields = cast("dict[str, Any]", values)
            key, reply = fields.get("key"), fields.get("reply")
            if isinstance(key, str) and isinstance(reply, str):
                self._keep(key, reply)

    def _keep(self, key: str, reply: str) -> None:
        if key not in self._replies and len(self._replies) >= MAX_REPLIES:
            del self._replies[next(iter(self._replies))]
        self._replies[key] = reply


def cache_key(request: Any) -> str:
    """Return the hash of a request. The request consists of JSON values."""
    text = json.dumps(request, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
