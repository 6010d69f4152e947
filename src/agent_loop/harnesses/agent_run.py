"""What a harness knows about one run of its agent, and what it reads from its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_loop.errors import DataError
from agent_loop.interactions.swapped_roles import text_of
from agent_loop.runtime.child_process import CommandResult
from agent_loop.runtime.describe import describe_value, one_line
from agent_loop.serve.program import ProgramFailed
from agent_loop.types import Message, Row

MAX_ERROR = 300
"""Characters of an agent's error that are kept in a failure's first line."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run of an agent. All paths and URLs are as the agent sees them."""

    task: str
    """Text of the row's messages."""
    folder: str
    """Working folder."""
    home: str
    """Home folder of this run alone, outside of the working folder. Removed at the end."""
    base_url: str
    """Base URL of the OpenAI API."""
    api_key: str
    model: str
    """Name of the model. The model in training answers to any name."""
    context_length: int
    """Number of tokens that a conversation may have."""
    max_turn_tokens: int
    """Number of tokens that a completion may have."""

    @property
    def anthropic_base_url(self) -> str:
        """Base URL of the Anthropic Messages API, without `/v1`, which Anthropic clients add."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """Command that runs an agent."""

    arguments: Sequence[str]
    """Arguments after the name of the program."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, in addition to the workspace's and `HOME`."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts of files by their path in the home folder, such as settings."""
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended."""

    answer: str = ""
    """Final message of the agent, if it reports one."""
    gave_up: str = ""
    """Why the agent gave up by itself, for example at its own limit of turns. Its trajectory is scored."""
    error: str = ""
    """Why the program failed for another reason, such as a failed request. Its trajectory fails and is not scored."""


class AgentFailed(ProgramFailed):
    """The program of an agent failed, apart from what the model did."""

    def __init__(self, name: str, error: str, result: CommandResult) -> None:
        text = f"{name} failed: {one_line(error, max_length=MAX_ERROR)}"
        super().__init__(text, traceback="\n".join([error, result.stdout, result.stderr]).strip())


def exit_error(result: CommandResult) -> str:
    """Return the error of a program by its exit status and the end of its output; empty if the status is 0."""
    code = result.exit_code
    if code == 0:
        return ""
    how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
    output = result.stderr.strip() or result.stdout.strip()
    return ": ".join([how, *output.splitlines()[-1:]])


def task_of(row: Row, *, where: str = "the row") -> str:
    """Return the text of the row's messages, as the task of an agent."""
    messages: Sequence[Message] = row.get("raw_prompt") or ()
    texts = [text_of(message) for message in messages]
    for index, message in enumerate(messages):
        if message["role"] not in ("system", "user"):
            raise DataError(
                f"{where}: raw_prompt[{index}] has the role {message['role']!r}; an agent's task consists of "
                "messages of the system and the user"
            )
        if not isinstance(message.get("content"), str) and not texts[index]:
            raise DataError(
                f"{where}: raw_prompt[{index}].content is {describe_value(message.get('content'))}; an agent's task is "
                "text"
            )
    task = "\n\n".join(text for text in texts if text)
    if not task:
        raise DataError(f"{where}: raw_prompt has no text; give the task of the agent as a user message")
    return task
