"""Checks and completes the outputs that loops return, before they are scored, stored and trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import index
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
from agent_loop.types import FloatArray, IntArray, Message, Origin, Row, StopReason

MAX_INT32 = 2**31 - 1
PROMPT = Origin.PROMPT
"""A name of its own, since Python 3.11 looks members of enums up slowly."""
ENDED_OTHERWISE = (StopReason.FAILED, StopReason.CANCELLED, StopReason.DEADLINE)
"""Reasons that stand although the response was cut afterwards."""


class LoopOutputs(Struct, frozen=True):
    """Checks and completes what one loop returned.

    An episode's output passes as it is. One that a loop built from token lists is cut at the limits, its weight
    versions and missing log-probs are taken from the completions that the loop received, and its messages are decoded.
    """

    context: LoopContext
    row: Row
    completions: CompletionMemory

    def accept(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Return the output, ready to be scored.

        Raises:
            EpisodeError: A field holds something that no batch could take.
        """
        limits = self.context.limits
        num_prompt_tokens = sum([len(s.token_ids) for s in output.segments if s.origin is PROMPT])
        num_response_tokens = sum([len(s.token_ids) for s in output.segments]) - num_prompt_tokens
        output = _checked(output, num_response_tokens=num_response_tokens)
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
        """Drop the trajectory's tokens, or truncate the prompt if the limits say how. `Episode` does the same."""
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
                f"{detail}, and holds images or videos, which cannot be cut; give messages to self.episode instead"
            )
        prompt = output.prompt_ids[-max_tokens:] if truncate == "left" else output.prompt_ids[:max_tokens]
        incident = Incident(IncidentKind.TRUNCATED_PROMPT, f"{detail}; cut on the {truncate}")
        return replace(
            output,
            segments=(Segment(prompt, Origin.PROMPT), *output.response_segments),
            incidents=(*output.incidents, incident),
        )

    def _with_versions(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """Find the completions behind the model's tokens; give each token its version, and log-probs if it has none."""
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
        """CallAborted a model segment, which begins at `start` of the context, into pieces of one weight version each.

        Returns the pieces, and how many of their tokens no completion explains.
        """
        ids, end = segment.token_ids, start + len(segment)
        pieces: list[Segment] = []
        place, num_unmatched = start, 0
        while place < end:
            found = self.completions.recognise(ids[place - start :], context=context[:place])
            if found is None:
                next_place = place + self.completions.next_start(ids[place - start :])
                num_unmatched += next_place - place
                version = self.completions.last_version
                version = self.context.server_manager.pool.weight_version if version is None else version
                piece = segment.part(place - start, next_place - start)
                pieces.append(structs.replace(piece, weight_version=version))
                place = next_place
                continue
            for known in found:
                piece = structs.replace(
                    segment.part(place - start, place - start + len(known)),
                    weight_version=known.weight_version,
                    extras=known.extras,
                )
                if piece.logprobs is None:
                    piece = structs.replace(piece, logprobs=known.logprobs)
                pieces.append(piece)
                place += len(known)
        return pieces, num_unmatched

    def _messages(self, output: AgentLoopOutput) -> list[Message]:
        """Read the conversation from its tokens."""
        messages = self._prompt_messages(output.prompt_ids)
        context = output.prompt_ids
        for is_model, run in groupby(
            output.response_segments, key=lambda segment: segment.origin is Origin.MODEL
        ):
            ids = np.concatenate([segment.token_ids for segment in run])
            if is_model:
                parsed = self.context.template.parse(ids, tools=output.tool_schemas, context=context)
                messages.append(parsed.as_message())
            else:
                messages.append({"role": "tool", "content": self.context.template.decode(ids)})
            context = ids
        return messages

    def _prompt_messages(self, prompt_ids: IntArray) -> list[Message]:
        """Return the row's messages if the prompt says what they say, else its text as one message."""
        if not len(prompt_ids):
            return []
        text, place = self.context.template.decode(prompt_ids), 0
        messages: Sequence[Message] = self.row["raw_prompt"]
        for message in messages:
            content = message.get("content")
            words = content.strip() if isinstance(content, str) else None
            place = -1 if words is None else text.find(words, place)
            if place < 0:
                return [{"role": "user", "content": text}]
            place += len(words or "")
        return list(messages)


def listed_outputs(returned: Any, *, loop_name: str) -> list[AgentLoopOutput]:
    """Return the list of outputs that a loop's `run` returned.

    Raises:
        EpisodeError: It is not a list of outputs, or an empty one.
    """
    outputs = cast(list[Any], returned) if isinstance(returned, list) else []
    if outputs and all(isinstance(output, AgentLoopOutput) for output in outputs):
        return outputs
    raise EpisodeError(
        f"{loop_name}.run returned {describe_value(returned)}; return an AgentLoopOutput, or a list of them"
    )


def _checked(output: AgentLoopOutput, *, num_response_tokens: int) -> AgentLoopOutput:
    """Return the output with fields of the declared types.

    Raises:
        EpisodeError: A field has a wrong type or value.
    """
    if type(output.num_turns) is not int or not 0 <= output.num_turns <= MAX_INT32:
        output = replace(output, num_turns=_count(output.num_turns, name="num_turns"))
    if type(output.stop_reason) is not StopReason:
        output = replace(output, stop_reason=_stop_reason(output.stop_reason))
    if output.reward_score is not None:
        reward_score = _reward(output.reward_score, name="reward_score")
        if type(output.reward_score) is not float:
            output = replace(output, reward_score=reward_score)
    for segment in output.segments:
        if segment.logprobs is not None and not _are_logprobs(segment.logprobs):
            [bad, *_] = [
                each for each in segment.logprobs.tolist() if not -np.inf < each <= LOG_PROB_ROUNDING
            ]
            raise EpisodeError(
                f"response_logprobs holds {bad}; give log-probs, which are finite and at most 0"
            )
        version: Any = segment.weight_version
        if version is not None and (type(version) is not int or not UNKNOWN_VERSION <= version <= MAX_INT32):
            raise EpisodeError(f"weight_version is {describe_value(version)}; give an int, 0 or more")
    for feedback in output.feedback:
        if feedback.place is not None and not 0 <= feedback.place < num_response_tokens:
            raise EpisodeError(
                f"feedback has the place {feedback.place} in a response of {num_response_tokens} tokens; give the "
                "place of the last token of its turn, or None"
            )
        if feedback.reward is not None:
            _reward(feedback.reward, name="the reward of a turn")
    messages: tuple[Any, ...] = output.messages
    for message in messages:
        role = message.get("role") if hasattr(message, "get") else None
        if type(role) is not str:
            raise EpisodeError(f"messages holds {describe_value(message)}; give dicts with role and content")
    extra_fields: Mapping[Any, Any] = output.extra_fields
    for name in extra_fields:
        if not isinstance(name, str):
            raise EpisodeError(f"extra_fields has the key {describe_value(name)}; give names as text")
    if not extra_fields:
        return output
    return output.with_only_extra_fields(plain_mapping(extra_fields, where="extra_fields of the loop"))


def _check_ids(segments: Iterable[Segment], *, vocab_size: int) -> None:
    """Check that all token ids are in the model's vocabulary. Others would end the training with an IndexError.

    Raises:
        EpisodeError: A token id is outside the vocabulary.
    """
    for segment in segments:
        ids = segment.token_ids
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise EpisodeError(
                f"the token ids of a segment have shape {list(ids.shape)} and type {ids.dtype}; give a flat int32 array"
            )
        if (
            len(ids) and np.maximum.reduce(ids.view(np.uint32)) >= vocab_size
        ):  # (a negative id is a large one)
            raise EpisodeError(
                f"a {segment.origin} segment holds token ids from {ids.min()} to {ids.max()}; the model's are 0 to "
                f"{vocab_size - 1}"
            )


def _cut(output: AgentLoopOutput, num_tokens: int, *, max_tokens: int) -> AgentLoopOutput:
    """Drop what is over `response_length`."""
    segments: list[Segment] = []
    left = max_tokens
    for segment in output.segments:
        if segment.origin is PROMPT:
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
    """Return the feedback, without its place if the token there was dropped."""
    if feedback.place is None or feedback.place < num_tokens:
        return feedback
    return structs.replace(feedback, place=None)


def _head(segment: Segment, num_tokens: int) -> Segment:
    attachments = tuple(attachment for attachment in segment.attachments if attachment.end <= num_tokens)
    return structs.replace(segment.part(0, num_tokens), attachments=attachments)


def _count(number: Any, *, name: str) -> int:
    try:
        count = index(number)
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_INT32:
        raise EpisodeError(f"{name} is {describe_value(number)}; give an int, 0 or more")
    return count


def _reward(given: Any, *, name: str) -> float:
    reward = as_reward(given)
    if reward is None:
        raise EpisodeError(f"{name} is {describe_value(given)}; give a finite number, or None {REWARD_LIMIT}")
    return reward


def _are_logprobs(logprobs: FloatArray) -> bool:
    """Return whether each log-prob is finite, and above 0 by no more than rounding."""
    # (`logical_and.reduce`, since the method `all` takes a call of Python)
    return bool(np.logical_and.reduce((logprobs > -np.inf) & (logprobs <= LOG_PROB_ROUNDING)))


def _stop_reason(given: Any) -> StopReason:
    try:
        return StopReason(given)
    except ValueError:
        known = ", ".join(StopReason)
        raise EpisodeError(f"stop_reason is {describe_value(given)}; give one of {known}") from None
