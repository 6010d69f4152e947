"""What the conformance suite found."""

from __future__ import annotations

from agent_loop.errors import ServerError
from agent_loop.testing import checks


class CheckReport(checks.CheckReport):
    """All checks of one server, which `subject` names."""

    def raise_if_failed(self) -> None:
        """Raises: ServerError: Names every check that failed, with its reason."""
        if self.failures:
            raise ServerError(self.summary, server=self.subject)
