"""Base class of tools whose calls are HTTP requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.tools.web.client import WebClient
from agent_loop.tools.web.operation import Operation


class RequestTool(BaseTool):
    """Tool that sends one request per call and returns the response.

    A read-only request may be sent twice and is retried. For any other request, `on_replay` is `once` unless the
    entry in the registry sets it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tool_schema: Mapping[str, Any],
        *,
        operation: Operation,
        client: WebClient,
    ) -> None:
        super().__init__(config, tool_schema)
        self.on_replay, self.retries = operation.on_replay, operation.retries
        self._operation = operation
        self._client = client

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Send the request.

        Raises:
            ToolUnavailable: The service is unavailable; see `Operation.send`.
            ToolError: The request failed; see `Operation.send`.
        """
        text = await self._operation.send(parameters, client=self._client, instance_id=instance_id)
        return ToolResponse(text=text), None, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._client.release(instance_id)
