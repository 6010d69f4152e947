"""The exceptions, named after the boundary at which things went wrong.

Every message says what is wrong, what was found, and what to do. The command line prints an `AgentLoopError`
without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_loop.token_chunks import TokenChunk


class AgentLoopError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(AgentLoopError):
    """A setting is unknown, missing or out of range."""


class DataError(AgentLoopError):
    """A data file, or a row of it, is not what the run needs."""


class SamplingParamsError(AgentLoopError):
    """A sampling parameter is unknown, out of range, or not offered by the server."""


class RequestError(AgentLoopError):
    """A request for a completion asks for something unknown, out of range or not offered."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of the request that is at fault."""
        self.code = code
        """What programs tell it by."""


class ChatTemplateError(AgentLoopError):
    """A chat template cannot render or bridge the conversation."""


class EpisodeError(AgentLoopError):
    """An episode or a trajectory record was used against its contract."""


class ToolError(AgentLoopError):
    """Raised by a tool to tell the model that the call did not work; the episode goes on."""


class ToolUnavailable(ToolError):
    """What a tool needs could not be reached, broke off or was too busy: the same call may work later."""


class ToolBug(AgentLoopError):
    """A tool raised something else than `ToolError`, or broke its contract; the episode fails."""


class SandboxError(AgentLoopError):
    """A sandbox could not be started, or ended by itself."""


class InteractionBug(AgentLoopError):
    """An interaction raised, broke its contract or took too long; the episode fails."""


class InteractionUnavailable(AgentLoopError):
    """What an interaction needs could not be reached, or refused to answer; the episode fails."""


class EnvironmentBug(AgentLoopError):
    """An environment's `reset` or `get_reward` raised, broke its contract or took too long; the episode fails."""


class ContractError(AgentLoopError):
    """A conformance suite found that something does not keep its contract."""


class RewardError(AgentLoopError):
    """A reward function raised, took too long, or returned something else than a number or a mapping."""


class ServerError(AgentLoopError):
    """An LLM server refused or failed a request; `__cause__` is what the engine raised, if it raised."""

    def __init__(self, message: str, *, server: str = "", request_id: str = "") -> None:
        where = " ".join(
            part for part in (server and f"server {server}", request_id and f"request {request_id}") if part
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.server = server
        self.request_id = request_id


class BadPrompt(ServerError):
    """The prompt is empty, longer than the model takes, or holds ids or attachments that the model does not know."""


class ServerDied(ServerError):
    """The engine's process ended, or it cannot be reached any more: this server answers nothing from here on.

    `chunks` holds what it is known to have sampled of the completion."""

    def __init__(
        self, message: str, *, server: str = "", request_id: str = "", chunks: Sequence[TokenChunk] = ()
    ) -> None:
        super().__init__(message, server=server, request_id=request_id)
        self.chunks = chunks


class ServerTimeout(ServerError):
    """The server did not come up, or did not answer, within its time limit."""


class BadServerReply(ServerError):
    """The engine answered something that is no completion of what it was asked."""


class RolloutError(AgentLoopError):
    """Too many trajectories of a batch failed."""


class TrainingError(AgentLoopError):
    """The rollout of a step holds nothing to learn from."""


class AlgorithmError(AgentLoopError):
    """An advantage estimator or a policy loss raised, or returned values that cannot be trained on."""


class WeightsError(AgentLoopError):
    """Published weights do not fit the server's model."""


class ProcessGroupError(AgentLoopError):
    """One of the processes that train together ended while the others were running."""


class OutputError(AgentLoopError):
    """A file or folder of a run cannot be written, or another process is writing it."""


class JournalError(AgentLoopError):
    """The journal of a rollout cannot be written or read, or is of another rollout."""


class CheckpointError(AgentLoopError):
    """A checkpoint is missing, damaged, or of another run."""


def did_you_mean(got: str, options: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the list of options if none is near."""
    options = sorted(options)
    near = difflib.get_close_matches(got, options, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are: {', '.join(options)}" if options else ""
