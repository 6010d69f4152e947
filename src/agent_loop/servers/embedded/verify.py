"""Verification at start-up that a backend gives the log-probs of the model's plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.backend import ComputationBackend
from agent_loop.servers.embedded.config import CONTEXT
from agent_loop.servers.embedded.length_limits import LengthLimit, length_limits
from agent_loop.servers.embedded.request import EngineLimits, EngineRequest, build_request
from agent_loop.servers.embedded.rounding import rounding_tolerance
from agent_loop.servers.embedded.runner import ModelRunner, text_config_of
from agent_loop.types import SamplingParams

PROMPT_LENGTHS = (7, 4)
TOKENS_PER_TURN = 3
TOKENS_BETWEEN_TURNS = 2
TEXT_TOKEN_PREFIXES = ("pad_", "eos_", "bos_", "sep_", "cls_", "mask_", "unk_", "decoder_start_")
"""Prefixes of the names of special tokens that may occur in a completion."""
TOKENS_AFTER_PROMPT = 2 * TOKENS_PER_TURN + TOKENS_BETWEEN_TURNS


@dataclass(slots=True)
class Conversation:
    """Random tokens of two turns, and the expected log-probs of the tokens that play the sampled ones."""

    prompt: list[int]
    turns: tuple[list[int], list[int]]
    """Tokens that count as sampled, per turn."""
    between: list[int]
    """Tokens between the two turns."""
    expected: list[Tensor] = field(default_factory=list[Tensor])
    """Log-probs of the whole vocabulary before each token of a turn, per turn, [tokens, vocab]."""

    @property
    def token_ids(self) -> list[int]:
        first, second = self.turns
        return [*self.prompt, *first, *self.between, *second]

    def context(self, turn: int) -> list[int]:
        """Return the prompt of a turn."""
        return [*self.prompt, *self.turns[0], *self.between] if turn else self.prompt


@dataclass(frozen=True, slots=True)
class Verification:
    """Conversations with expected log-probs to verify the backends of one model with."""

    conversations: tuple[Conversation, ...]
    tolerance: float

    def check(self, backend: ComputationBackend, *, limits: EngineLimits) -> None:
        """Compute both turns of all conversations as an engine does, and compare the log-probs.

        Raises:
            ConfigError: The log-probs differ from those of the plain forward.
        """
        for turn in range(2):
            got = _run_turn(backend, self.conversations, turn=turn, limits=limits)
            for conversation, logprobs_TV in zip(self.conversations, got, strict=True):
                worst = largest_difference(logprobs_TV, expected_TV=conversation.expected[turn])
                if not worst <= self.tolerance:
                    raise ConfigError(
                        f"its log-probs differ from a plain forward by {worst:.3g} (tolerance {self.tolerance:.3g}) "
                        f"after a prompt of {len(conversation.context(turn))} tokens"
                    )
        for number in range(len(self.conversations)):
            backend.end_session(_session(number))


def prepare_verification(runner: ModelRunner, *, limits: EngineLimits) -> Verification:
    """Compute expected log-probs with the model's plain forward, across each length at which its computation changes.

    Raises:
        ConfigError: The context is too short, or the forward fails. Or the log-probs of a token depend on the tokens
            after it, on chance or on earlier sequences, so that a trainer cannot reproduce them.
    """
    needed = max(PROMPT_LENGTHS) + TOKENS_AFTER_PROMPT
    if limits.max_model_len < needed:
        raise ConfigError(
            f"{CONTEXT} is {limits.max_model_len} tokens, too short to verify the model; give at least {needed}, "
            "or set rollout.engine_kwargs.verify=false"
        )
    name, random = type(runner.model).__name__, Random(0)
    lengths = _prompt_lengths(length_limits(runner.model.config), max_model_len=limits.max_model_len)
    special, reserved = _special_tokens(runner.model.config)
    vocabulary = [token for token in range(limits.vocab_size) if token not in reserved]
    conversations = (
        _conversation_of_special(
            [token for token in special if token in vocabulary],
            random,
            vocabulary=vocabulary,
            longest_prompt=limits.max_model_len - TOKENS_AFTER_PROMPT,
        ),
        *(_conversation(length, random, vocabulary=vocabulary) for length in lengths),
    )
    try:
        tolerance = rounding_tolerance(
            runner.model, token_ids=conversations[-1].token_ids, plain_logits=runner.plain_logits
        )
        # Longest first: some models permanently switch to another attention at the first short sequence.
        differences = [_expect(conversation, runner) for conversation in reversed(conversations)][::-1]
        differences[-1] = max(differences[-1], _change_since(conversations[-1], runner))
    except Exception as error:  # the model's code may raise anything
        raise ConfigError(
            f"{name} cannot be served: its forward fails with {type(error).__name__}: {error}"
        ) from error
    longest_exact = 0
    for conversation, difference in zip(conversations, differences, strict=True):
        num_tokens = len(conversation.token_ids)
        if not difference <= tolerance:
            advice = f"; set {CONTEXT} to at most {longest_exact} tokens" if longest_exact else ""
            raise ConfigError(
                f"{name} cannot be served: its log-probs of a token depend on the tokens after it, on chance, or on "
                f"earlier sequences (two forwards of {num_tokens} and fewer tokens differ by {difference:.3g}), so "
                f"a trainer could not reproduce them{advice}"
            )
        longest_exact = max(longest_exact, num_tokens)
    return Verification(conversations, tolerance)


def largest_difference(logprobs: Tensor, *, expected_TV: Tensor) -> float:
    """Return the largest difference between two sets of log-probs, [tokens, vocab], or NaN if one of them has NaN.

    Differences of improbable tokens count less, because the rounding of a log-prob grows with its size. Minus infinity
    in both sets counts as equal.
    """
    difference = (logprobs - expected_TV).abs() / (expected_TV.abs() / 10).clamp(min=1.0)
    return float(difference.masked_fill_(logprobs.isneginf() & expected_TV.isneginf(), 0.0).max())


def _prompt_lengths(crossed: Sequence[LengthLimit], *, max_model_len: int) -> list[int]:
    """Return prompt lengths just below each limit, so that a turn crosses it, and lengths beyond and far beyond it."""
    longest = max_model_len - TOKENS_AFTER_PROMPT
    lengths: set[int] = set(PROMPT_LENGTHS)
    for limit in {limit.length for limit in crossed if limit.length < max_model_len}:
        for length in (limit - 1, limit + TOKENS_PER_TURN, 2 * limit + TOKENS_PER_TURN):
            lengths.add(min(max(length, 1), longest))
    return sorted(lengths)


def _special_tokens(config: Any) -> tuple[list[int], set[Any]]:
    """Return the special tokens for text in the configuration, padding first, and the set of the other special
    tokens."""
    named: dict[str, list[Any]] = {}
    for part in (config, text_config_of(config)):
        for name, value in cast(dict[str, Any], part.to_dict()).items():
            if name.endswith(("_token_id", "_token_index")):
                named[name] = cast(list[Any], value) if isinstance(value, list) else [value]
    of_text = [name for prefix in TEXT_TOKEN_PREFIXES for name in named if name.startswith(prefix)]
    special = dict.fromkeys(token for name in of_text for token in named.pop(name))
    return list(special), {token for tokens in named.values() for token in tokens} - set(special)


def _conversation(length: int, random: Random, *, vocabulary: Sequence[int]) -> Conversation:
    def tokens(count: int) -> list[int]:
        return random.choices(vocabulary, k=count)

    return Conversation(
        prompt=tokens(length),
        turns=(tokens(TOKENS_PER_TURN), tokens(TOKENS_PER_TURN)),
        between=tokens(TOKENS_BETWEEN_TURNS),
    )


def _conversation_of_special(
    special: Sequence[int], random: Random, *, vocabulary: Sequence[int], longest_prompt: int
) -> Conversation:
    """Return a conversation with special tokens between random ones, in the prompt and among the sampled tokens."""
    each = cycle(special or vocabulary)

    def tokens(count: int) -> list[int]:
        return [next(each) if index % 2 else random.choice(vocabulary) for index in range(count)]

    prompt = tokens(min(max(max(PROMPT_LENGTHS), 2 * len(special)), longest_prompt))
    each = cycle(special or vocabulary)  # start over with the first, which now counts as sampled
    first = [next(each), *tokens(TOKENS_PER_TURN - 1)]
    return Conversation(prompt, (first, tokens(TOKENS_PER_TURN)), between=tokens(TOKENS_BETWEEN_TURNS))


def _expect(conversation: Conversation, runner: ModelRunner) -> float:
    """Compute the expected log-probs of a conversation. Return how much they depend on the tokens that follow."""
    whole = conversation.token_ids
    first = len(conversation.prompt) - 1
    logprobs_TV = _logprobs(runner.plain_logits(whole, first=first))
    differs_by = 0.0
    for turn in range(2):
        context = conversation.context(turn)
        start = len(context) - 1 - first
        expected_TV = logprobs_TV[start : start + TOKENS_PER_TURN]
        conversation.expected.append(expected_TV)
        alone_TV = _logprobs(runner.plain_logits(context, first=len(context) - 1))
        differs_by = max(differs_by, largest_difference(alone_TV, expected_TV=expected_TV[:1]))
    return differs_by


def _change_since(conversation: Conversation, runner: ModelRunner) -> float:
    """Compute log-probs of a conversation again. Return how much they depend on the sequences computed since."""
    last = len(conversation.prompt) - 1
    again_TV = _logprobs(runner.plain_logits(conversation.prompt, first=last))
    return largest_difference(again_TV, expected_TV=conversation.expected[0][:1])


def _run_turn(
    backend: ComputationBackend, conversations: Sequence[Conversation], *, turn: int, limits: EngineLimits
) -> list[Tensor]:
    """Compute a turn of all conversations. Return the log-probs before each token, per conversation, [tokens,
    vocab]."""
    params = SamplingParams(max_tokens=TOKENS_PER_TURN, ignore_eos=True)
    requests = [
        build_request(
            _session(number),
            prompt_ids=np.asarray(conversation.context(turn), dtype=np.int32),
            params=params,
            limits=limits,
        )
        for number, conversation in enumerate(conversations)
    ]
    got: dict[EngineRequest, list[Tensor]] = {request: [] for request in requests}
    sampled = {r: c.turns[turn] for r, c in zip(requests, conversations, strict=True)}
    waiting, running = list(requests), 0
    while waiting or running:
        while waiting and backend.has_room and backend.admit(waiting[0]):
            waiting.pop(0)
            running += 1
        output = backend.step()
        for request, logits in zip(output.requests, output.logits, strict=True):
            rows = got[request]
            rows.append(_logprobs(logits))
            if len(rows) == TOKENS_PER_TURN:
                backend.release(request)
                running -= 1
            else:
                backend.append(request, sampled[request][len(rows) - 1])
    return [torch.stack(rows) for rows in got.values()]


def _logprobs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1)


def _session(number: int) -> str:
    return f"verify-{number}"
