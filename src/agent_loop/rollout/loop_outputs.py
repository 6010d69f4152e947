"""Validation and completion of the outputs that loops return, before they are scored, stored and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from numbers import Integral
from typing import Any, cast

import numpy as np
from msgspec import Struct, structs

from agent_loop.errors import EpisodeError
from agent_loop.loops.base import LoopContext
from agent_loop.runtime.describe import describe_value
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.runtime.user_values import plain_mapping
from agent_loop.servers.completion_memory import CompletionMemory
from agent_loop.servers.reply_check import LOG_PROB_ROUNDING
from agent_loop.trajectory import (
    UNKNOWN_VERSION,
    AgentLoopOutput,
    Feedback,
    Incident,
    IncidentKind,
    Segment,
)
from agent_loop.types import IntArray, Message, Origin, Row, StopReason

MAX_INT32 = 2**31 - 1
ENDED_OTHERWISE = (StopReason.FAILED, StopReason.CANCELLED, StopReason.DEADLINE)
"""Stop reasons that a later truncation of the response does not replace."""


class LoopOutputs(Struct, frozen=True):
    """Validator of the outputs of one loop. It also fills in missing fields.

    The output of an episode is returned unchanged. An output that a loop built from token lists is truncated at the
    limits. Its weight versions and missing log-probs come from the completions that the loop received, and its
    messages are decoded from the tokens.
    """

    context: LoopContext
    row: Row
    completions: CompletionMemory

    def accept(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Return the output, ready to be scored."""
        limits = self.context.limits
        num_prompt_tokens = sum([len(s.token_ids) for s in output.segments if s.origin is Origin.PROMPT])
        num_response_tokens = sum([len(s.token_ids) for s in output.segments]) - num_prompt_tokens
        output = _checked(output, num_response_tokens=num_response_tokens)
        if output.segments and not num_prompt_tokens and output.failure is None:
            raise EpisodeError("prompt_ids is empty; give the tokens of the prompt that the model got")
        if output.segments:
            _check_ids(output.segments, vocab_size=self.context.template.vocab_size)
        if num_prompt_tokens > limits.prompt_length:
            output = self._with_prompt_limit(output, num_prompt_tokens)
        if output.segments and num_response_tokens > limits.response_length:
            output = _cut(output, num_response_tokens, max_tokens=limits.response_length)
        if UNKNOWN_VERSION in [segment.weight_version for segment in output.segments]:
            output = self._with_versions(output)
        if output.segments and not output.messages:
            output = replace(output, messages=self._messages(output))
        return output

    def _with_prompt_limit(self, output: AgentLoopOutput, num_tokens: int) -> AgentLoopOutput:
        """Truncate the prompt, or drop all tokens if `truncate_prompt` is "no". `Episode` does the same."""
        max_tokens, truncate = self.context.limits.prompt_length, self.context.limits.truncate_prompt
        detail = f"the prompt has {num_tokens} tokens, over prompt_length {max_tokens}"
        if truncate == "no":
            incident = Incident(
                IncidentKind.TRUNCATED_PROMPT, f"{detail}; the trajectory's tokens were dropped"
            )
            return replace(
                output,
                segments=(),
                messages=output.messages or self.row["raw_prompt"],
                feedback=[_placed(feedback, num_tokens=0) for feedback in output.feedback],
                stop_reason=_reason(output, StopReason.PROMPT_LENGTH),
                incidents=(*output.incidents, incident),
            )
        if output.attachments:
            raise EpisodeError(
                f"{detail}, and has images or videos, which cannot be truncated; pass messages to self.episode instead"
            )
        prompt = output.prompt_ids[-max_tokens:] if truncate == "left" else output.prompt_ids[:max_tokens]
        incident = Incident(IncidentKind.TRUNCATED_PROMPT, f"{detail}; truncated on the {truncate}")
        return replace(
            output,
            segments=(Segment(prompt, Origin.PROMPT), *output.response_segments),
            incidents=(*output.incidents, incident),
        )

    def _with_versions(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Set the weight version of each sampled token, and its log-prob if it has none, from the completions."""
        segments: list[Segment] = []
        context = np.concatenate([segment.token_ids for segment in output.segments])
        end = num_unmatched = 0
        for segment in output.segments:
            start, end = end, end + len(segment)
            if segment.weight_version != UNKNOWN_VERSION:
                segments.append(segment)
                continue
            pieces, unmatched = self._pieces(segment, context=context, start=start)
            segments += pieces
            num_unmatched += unmatched
        changes: dict[str, Any] = {"segments": segments}
        if num_unmatched and self.completions.last_version is not None:
            detail = (
                f"{num_unmatched} tokens that response_mask marks as the model's are in no completion that the loop "
                "received"
            )
            incident = Incident(IncidentKind.UNMATCHED_TOKENS, detail)
            changes["incidents"] = (*output.incidents, incident)
        return replace(output, **changes)

    def _pieces(self, segment: Segment, *, context: IntArray, start: int) -> tuple[list[Segment], int]:
        """Split a model segment, which begins at `start` of the context, into pieces of one weight version each.

        Return the pieces, and the number of their tokens that are not in any completion.
        """
        ids, end = segment.token_ids, start + len(segment)
        pieces: list[Segment] = []
        position, num_unmatched = start, 0
        while position < end:
            found = self.completions.recognise(ids[position - start :], context=context[:position])
            if found is None:
                next_position = position + self.completions.next_start(ids[position - start :])
                num_unmatched += next_position - position
                version = self.completions.last_version
                version = self.context.server_manager.pool.weight_version if version is None else version
                piece = segment.part(position - start, next_position - start)
                pieces.append(structs.replace(piece, weight_version=version))
                position = next_position
                continue
            for known in found:
                piece = structs.replace(
                    segment.part(position - start, position - start + len(known)),
                    weight_version=known.weight_version,
                    extras=known.extras,
                )
                if piece.logprobs is None:
                    piece = structs.replace(piece, logprobs=known.logprobs)
                pieces.append(piece)
                position += len(known)
        return pieces, num_unmatched

    def _messages(self, output: AgentLoopOutput) -> list[Message]:
        """Decode the conversation from its tokens."""
        messages = self._prompt_messages(output.prompt_ids)
        context = output.prompt_ids
        for is_model, run in groupby(
            output.response_segments, key=lambda segment: segment.origin is Origin.MODEL
        ):
            ids = np.concatenate([segment.token_ids for segment in run])
            if is_model:
                parsed = self.context.template.parse(
                    ids, tools=output.tool_schemas, context=context, stopped=True
                )
                messages.append(parsed.as_message())
            else:
                messages.append({"role": "tool", "content": self.context.template.decode(ids)})
            context = ids
        return messages

    def _prompt_messages(self, prompt_ids: IntArray) -> list[Message]:
        """Return the row's messages if the prompt contains their texts in order, else the prompt as one message."""
        if not len(prompt_ids):
            return []
        text, position = self.context.template.decode(prompt_ids), 0
        messages: Sequence[Message] = self.row["raw_prompt"]
        for message in messages:
            content = message.get("content")
            stripped = content.strip() if isinstance(content, str) else None
            position = -1 if stripped is None else text.find(stripped, position)
            if position < 0:
                return [{"role": "user", "content": text}]
            position += len(stripped or "")
        return list(messages)


def listed_outputs(returned: Any, *, loop_name: str) -> list[AgentLoopOutput]:
    """Return the list of outputs that a loop's `run` returned."""
    outputs = cast(list[Any], returned) if isinstance(returned, list) else []
    if outputs and all(isinstance(output, AgentLoopOutput) for output in outputs):
        return outputs
    raise EpisodeError(
        f"{loop_name}.run returned {describe_value(returned)}; return an AgentLoopOutput, or a list of them"
    )


def _checked(output: AgentLoopOutput, *, num_response_tokens: int) -> AgentLoopOutput:
    """Return the output with fields of the declared types."""
    num_turns: Any = output.num_turns
    if not isinstance(num_turns, Integral) or not 0 <= int(num_turns) <= MAX_INT32:
        raise EpisodeError(f"num_turns is {describe_value(num_turns)}; give an int, 0 or more")
    if output.stop_reason not in list(StopReason):
        raise EpisodeError(
            f"stop_reason is {describe_value(output.stop_reason)}; give one of {', '.join(StopReason)}"
        )
    for segment in output.segments:
        _check_segment(segment)
    for feedback in output.feedback:
        if feedback.place is not None and not 0 <= feedback.place < num_response_tokens:
            raise EpisodeError(
                f"feedback.place is {feedback.place}, and the response has {num_response_tokens} tokens; give the "
                "index of the last token of its turn, or None"
            )
        if feedback.reward is not None:
            _reward(feedback.reward, name="the reward of a turn")
    messages: tuple[Any, ...] = output.messages
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(cast(Any, message).get("role"), str):
            raise EpisodeError(f"messages holds {describe_value(message)}; give dicts with role and content")
    reward = output.reward_score
    fields: dict[str, Any] = {
        "num_turns": int(num_turns),
        "stop_reason": StopReason(output.stop_reason),
        "reward_score": None if reward is None else _reward(reward, name="reward_score"),
    }
    if any(type(getattr(output, name)) is not type(value) for name, value in fields.items()):
        output = replace(output, **fields)
    if not output.extra_fields:
        return output
    return output.with_only_extra_fields(plain_mapping(output.extra_fields, where="extra_fields of the loop"))


def _check_segment(segment: Segment) -> None:
    if segment.logprobs is not None:
        bad = segment.logprobs[~((segment.logprobs > -np.inf) & (segment.logprobs <= LOG_PROB_ROUNDING))]
        if len(bad):
            raise EpisodeError(
                f"response_logprobs holds {bad[0]}; give log-probs, which are finite and at most 0"
            )
    version: Any = segment.weight_version
    if version is not None and (type(version) is not int or not UNKNOWN_VERSION <= version <= MAX_INT32):
        raise EpisodeError(f"weight_version is {describe_value(version)}; give an int, 0 or more")


def _check_ids(segments: Iterable[Segment], *, vocab_size: int) -> None:
    """Check that all token ids are in the model's vocabulary. Training would raise an IndexError for other ids."""
    for segment in segments:
        ids = segment.token_ids
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise EpisodeError(
                f"the token ids of a segment have shape {list(ids.shape)} and type {ids.dtype}; give a flat int32 array"
            )
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise EpisodeError(
                f"a {segment.origin} segment holds token ids from {ids.min()} to {ids.max()}; the model's ids are 0 "
                f"to {vocab_size - 1}"
            )


def _cut(output: AgentLoopOutput, num_tokens: int, *, max_tokens: int) -> AgentLoopOutput:
    """Drop the response tokens beyond `max_tokens`."""
    segments: list[Segment] = []
    left = max_tokens
    for segment in output.segments:
        if segment.origin is Origin.PROMPT:
            segments.append(segment)
        elif left > 0:
            segments.append(segment if len(segment) <= left else _head(segment, left))
            left -= len(segment)
    incident = Incident(
        IncidentKind.TRUNCATED_RESPONSE,
        f"the loop returned {num_tokens} response tokens, over response_length {max_tokens}; the rest was dropped",
    )
    return replace(
        output,
        segments=segments,
        feedback=[_placed(feedback, num_tokens=max_tokens) for feedback in output.feedback],
        stop_reason=_reason(output, StopReason.RESPONSE_LENGTH),
        incidents=(*output.incidents, incident),
    )


def _reason(output: AgentLoopOutput, reason: StopReason) -> StopReason:
    return output.stop_reason if output.stop_reason in ENDED_OTHERWISE else reason


def _placed(feedback: Feedback, *, num_tokens: int) -> Feedback:
    """Return the feedback, without `place` if that token was dropped."""
    if feedback.place is None or feedback.place < num_tokens:
        return feedback
    return structs.replace(feedback, place=None)


def _head(segment: Segment, num_tokens: int) -> Segment:
    attachments = tuple(attachment for attachment in segment.attachments if attachment.end <= num_tokens)
    return structs.replace(segment.part(0, num_tokens), attachments=attachments)


def _reward(given: Any, *, name: str) -> float:
    reward = as_reward(given)
    if reward is None:
        raise EpisodeError(f"{name} is {describe_value(given)}; give a finite number, or None {REWARD_LIMIT}")
    return reward
