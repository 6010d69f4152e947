"""A model and how an application serves it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.errors import RequestError
from agent_loop.servers.manager import AsyncLLMServerManager


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and how an application serves it."""

    pool: AsyncLLMServerManager
    """Servers of the model. The caller starts and closes the pool."""
    template: ChatTemplate
    model: str
    """Name of the model in requests."""
    max_model_len: int | None = None
    """Maximum context length in tokens; None leaves the check to the servers."""
    api_key: str | None = None
    """API key that clients must send; None allows requests without a key."""
    hosts: frozenset[str] | None = None
    """Host names that requests may use; None allows any. See `answered_hosts`."""
    why_no_tools: str = ""
    """Reason why requests with tools are refused; empty if tools are supported."""
    created: int = field(default_factory=lambda: int(time.time()))

    def check_name(self, name: str) -> None:
        """Check the model's name in a request.

        Raises:
            UnknownModel: The name is not the model's.
        """
        if name != self.model:
            raise UnknownModel(f"there is no model {name!r}; this server has {self.model!r}", param="model")

    def check_tools(self, request: ChatCompletionRequest) -> None:
        """Check whether the model supports the tools of a request.

        Raises:
            RequestError: The request has tools, and `why_no_tools` is set.
        """
        if request.tools_in_use and self.why_no_tools:
            raise RequestError(f"tools: {self.why_no_tools}", param="tools")


class UnknownModel(RequestError):
    """The request names a model that is not served."""
