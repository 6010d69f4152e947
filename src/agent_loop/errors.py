"""Exceptions, named after the boundary at which an error occurred.

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
    """Base class of all errors that this package raises on purpose."""


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
        """The invalid field of the request."""
        self.code = code
        """Machine-readable kind of the error."""


class UnsupportedParameter(RequestError):
    """A request has a parameter that is unknown, or that cannot be honoured."""


class ChatTemplateError(AgentLoopError):
    """A chat template cannot render or bridge the conversation."""


class EpisodeError(AgentLoopError):
    """An episode or a trajectory record was used in a way that its contract does not allow."""


class ToolError(AgentLoopError):
    """Raised by a tool to report a failed call to the model. The episode continues."""


class ToolUnavailable(ToolError):
    """A resource of a tool is unreachable, was disconnected or is busy. The same call may succeed later."""


class ToolBug(AgentLoopError):
    """A tool raised an exception other than `ToolError`, or broke its contract. The episode fails."""


class SandboxError(AgentLoopError):
    """A sandbox could not be started, or terminated unexpectedly."""


class WorkspaceError(AgentLoopError):
    """A workspace could not be started, ended unexpectedly, or refused a command or a file. The trajectory fails."""


class WorkspaceFileMissing(WorkspaceError):
    """A file to copy out of a workspace does not exist there."""


class EnvironmentBug(AgentLoopError):
    """An environment or an interaction raised, broke its contract or took too long. The episode fails."""


class EnvironmentUnavailable(AgentLoopError):
    """Something that an environment depends on cannot be reached, or ended. The episode fails without a reward."""


class InteractionUnavailable(EnvironmentUnavailable):
    """A resource of an interaction is unreachable, or refused a request. The episode fails."""


class ContractError(AgentLoopError):
    """A conformance suite found a violation of a contract."""


class RewardError(AgentLoopError):
    """A reward function raised, took too long, or returned neither a number nor a mapping."""


class RewardUnavailable(RewardError):
    """Raised by a reward function if something that it needs, such as a judge, cannot be reached. The call is repeated
    as `rollout.retries` says; after that the trajectory fails without a reward."""


class ServerError(AgentLoopError):
    """An LLM server refused or failed a request. `__cause__` is the engine's exception, if there is one."""

    def __init__(self, message: str, *, server: str = "", request_id: str = "") -> None:
        where = " ".join(
            part for part in (server and f"server {server}", request_id and f"request {request_id}") if part
        )
        super().__init__(f"{where}: {message}" if where else message)
        self.server = server
        self.request_id = request_id


class BadPrompt(ServerError):
    """The prompt is empty, exceeds the model's context, or holds ids or attachments that the model does not support."""


class FatalRequest(ServerError):
    """A request during which several servers died. It is not repeated, since it may be what kills them."""


class ServerDied(ServerError):
    """The engine's process has ended or is unreachable: every later request to this server fails.

    `chunks` holds the tokens of the completion that are known to be sampled.
    """

    def __init__(
        self, message: str, *, server: str = "", request_id: str = "", chunks: Sequence[TokenChunk] = ()
    ) -> None:
        super().__init__(message, server=server, request_id=request_id)
        self.chunks = chunks


class ServerTimeout(ServerError):
    """The server did not start, or did not reply, within its time limit."""


class BadServerReply(ServerError):
    """The engine's reply is not a valid completion of the request."""


class RolloutError(AgentLoopError):
    """Too many trajectories of a batch failed."""


class TrainingError(AgentLoopError):
    """The rollout of a step gives no learning signal."""


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


MAX_LISTED = 30
"""Options that an error lists. The weights of a model are hundreds."""


def did_you_mean(got: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or the list of options if none is similar."""
    options = sorted(options)
    near = difflib.get_close_matches(got, options, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    more = f" and {len(options) - MAX_LISTED} more" if len(options) > MAX_LISTED else ""
    return f"; there are: {', '.join(options[:MAX_LISTED])}{more}" if options else ""
