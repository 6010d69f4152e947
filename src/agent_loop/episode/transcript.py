"""Messages and tokens of an episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.template import ChatTemplate
from agent_loop.episode.ledger import TokenLedger
from agent_loop.episode.turns import Completion, EpisodeMark
from agent_loop.runtime.activity import WaitKind, waiting_for
from agent_loop.trajectory import Incident, IncidentKind
from agent_loop.trajectory.copying import copied
from agent_loop.types import Message, Origin, SamplingParams, TokenIds, TokenOutput, ToolCall


class Transcript:
    """Messages of one episode, their tokens, and the number of turns. Only the episode changes a transcript."""

    def __init__(
        self,
        messages: Sequence[Message],
        *,
        template: ChatTemplate,
        tool_schemas: Sequence[Mapping[str, Any]],
    ) -> None:
        self.messages: list[Message] = copied(list(messages))
        self.ledger = TokenLedger()
        self.tool_schemas = tool_schemas
        self.assistant_turns = 0
        self.user_turns = 0
        self.incidents: list[Incident] = []
        self._template = template
        self._last_calls: Sequence[ToolCall] = ()
        self.turn_start = 0
        """Number of tokens before the last assistant turn."""

    def mark(self, *, num_feedback: int, log_position: int) -> EpisodeMark:
        """Return the current position."""
        return EpisodeMark(
            num_tokens=len(self.ledger),
            num_messages=len(self.messages),
            assistant_turns=self.assistant_turns,
            user_turns=self.user_turns,
            last_calls=self._last_calls,
            turn_start=self.turn_start,
            last_message=self.messages[-1] if self.messages else None,
            num_feedback=num_feedback,
            log_position=log_position,
        )

    def fork(self, at: EpisodeMark) -> Transcript:
        """Return a copy that ends at an earlier position."""
        messages = self.messages[: at.num_messages]
        if messages and at.last_message is not None:
            messages[-1] = at.last_message  # the turn may have been continued since
        fork = Transcript(messages, template=self._template, tool_schemas=self.tool_schemas)
        fork.ledger = self.ledger.fork(at.num_tokens)
        fork.assistant_turns, fork.user_turns = at.assistant_turns, at.user_turns
        fork._last_calls, fork.turn_start = at.last_calls, at.turn_start
        return fork

    def note(self, kind: IncidentKind, detail: str) -> None:
        """Record an incident."""
        self.incidents.append(Incident(kind, detail, self.assistant_turns))

    def encoded_prompt(self) -> Awaitable[Encoded]:
        """Encode the messages as the first prompt."""
        encode = partial(self._template.open_encoded, self.messages, tools=self.tool_schemas)
        return self._encoded(self.messages, encode)

    def encoded_reply(self, messages: Sequence[Message]) -> Awaitable[Encoded]:
        """Encode the tokens that the messages add after the last turn."""
        last, calls = self.ledger.last_token_id, self._last_calls
        encode = partial(self._template.bridge_encoded, messages, last_token_id=last, calls=calls)
        return self._encoded(messages, encode)

    def add_prompt(self, encoded: Encoded, *, max_tokens: int, truncate: str) -> bool:
        """Add the first prompt and return whether it was added."""
        num_tokens = len(encoded.token_ids)
        if num_tokens > max_tokens:
            detail = f"the prompt has {num_tokens} tokens, over prompt_length {max_tokens}"
            if truncate == "no":
                self.note(IncidentKind.TRUNCATED_PROMPT, f"{detail}; the prompt was not used")
                return False
            self.note(IncidentKind.TRUNCATED_PROMPT, f"{detail}; cut on the {truncate}")
            encoded = encoded.last(max_tokens) if truncate == "left" else encoded.first(max_tokens)
        self.ledger.append(encoded.token_ids, origin=Origin.PROMPT, attachments=encoded.attachments)
        return True

    @property
    def ends_in_open_turn(self) -> bool:
        """Whether the last tokens were sampled, and do not end the assistant's turn."""
        segments = self.ledger.segments()
        is_sampled = bool(segments) and segments[-1].origin is Origin.MODEL
        return is_sampled and self.ledger.last_token_id not in self._template.end_ids

    def add_turn(
        self,
        sampled: TokenOutput,
        *,
        params: SamplingParams,
        prefix: TokenIds = (),
        continues_turn: bool = False,
    ) -> Completion:
        """Append the sampled tokens, parse the turn, and return it."""
        ledger = self.ledger
        if not continues_turn:
            self.turn_start = len(ledger)
        if len(prefix):
            ledger.append(prefix, origin=Origin.PREFIX)
        ledger.append_completion(sampled)
        start = self.turn_start
        is_sampled = not len(prefix) and not continues_turn
        token_ids = sampled.token_ids if is_sampled else ledger.context[start:]
        is_cut = sampled.stop_reason != "stop"
        parsed = self._template.parse(
            token_ids,
            tools=self.tool_schemas,
            context=ledger.context[:start],
            stopped=not is_cut and not self._is_wanted(ledger.last_token_id, params),
        )
        self.assistant_turns += 1
        if continues_turn:
            self.messages.pop()
        self.messages.append(parsed.as_message())
        self._last_calls = parsed.tool_calls
        if is_cut:
            self.note(IncidentKind.CUT_TURN, f"{sampled.stop_reason} after {len(sampled.token_ids)} tokens")
        return Completion(sampled, parsed, is_cut)

    def _is_wanted(self, token_id: int | None, params: SamplingParams) -> bool:
        """Return whether the parameters end the turn at this token."""
        if token_id is None or token_id in params.stop_token_ids:
            return True
        text = self._template.decode([token_id]) if params.stop else ""
        return any(text in stop or stop in text for stop in params.stop)

    def add_reply(self, messages: Sequence[Message], encoded: Encoded, *, max_tokens: int) -> bool:
        """Add a reply to the model, and return whether its tokens were added.

        The tokens of a reply with more than `max_tokens` are not added, so that the model does not see the reply.
        """
        self.messages += copied(list(messages))
        num_tokens = len(encoded.token_ids)
        if num_tokens > max_tokens:
            self.note(
                IncidentKind.DROPPED_OBSERVATION,
                f"the reply has {num_tokens} tokens, and {max_tokens} are left; the reply was not used",
            )
            return False
        roles = [message["role"] for message in messages]
        origin = Origin.TOOL if "tool" in roles else Origin.INTERACTION
        self.ledger.append(encoded.token_ids, origin=origin, attachments=encoded.attachments)
        self.user_turns += 1
        return True

    async def _encoded(self, messages: Sequence[Message], encode: Callable[..., Encoded]) -> Encoded:
        """Encode the messages, reading their images and videos first."""
        if self._template.media_kinds:
            with waiting_for(WaitKind.ENCODE):
                encode = partial(encode, read=await self._template.read(messages))
        return encode()
