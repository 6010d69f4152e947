"""Check which fast ways of computing a model give the log-probs of its plain forward."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any

import numpy as np
import torch

from agent_loop.checks.reference import Reference
from agent_loop.rollout.batch import assemble
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.model_types import (
    can_pad,
    can_share_prefixes,
    logit_scaling,
    proved_cache,
    short_window,
)
from agent_loop.testing.conformance import (
    Check,
    CheckFailed,
    CheckReport,
    CheckSkipped,
    CheckSuite,
    OnResult,
)
from agent_loop.training.forward import response_logprobs
from agent_loop.training.micro_batches import Layout, micro_batches
from agent_loop.training.policy import make_exact
from agent_loop.training.prefix_tree.attention import use_tree_attention
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import SamplingParams

NUM_ROWS = 6
NUM_SAMPLED = 4
TOLERANCE = 1e-3
"""Largest difference of float32 log-probs that counts as rounding, in nats."""
MARGIN = 3.0
"""Accepted difference in other types, in units of what rounding to the type does to a plain forward."""
SHORT_TEXT = 64
"""Tokens of the longest text for a model without a window in its context."""


@dataclass(frozen=True)
class CheckedModel:
    """Model, and texts of random tokens whose lengths cross its shortest window."""

    model: Any
    max_model_len: int

    @cached_property
    def texts(self) -> list[list[int]]:
        window = short_window(self.model.config, length=self.max_model_len)
        longest = min(self.max_model_len - 3 * NUM_SAMPLED, 2 * window if window else SHORT_TEXT)
        random, vocabulary = Random(0), self.model.config.get_text_config().vocab_size
        tokens = random.choices(range(3, vocabulary), k=longest)
        lengths = [longest, *(random.randrange(2, longest) for _ in range(NUM_ROWS - 1))]
        return [[*tokens[:n], *random.choices(range(3, vocabulary), k=NUM_SAMPLED)] for n in lengths]

    @cached_property
    def expected(self) -> list[Any]:
        """Log-probs of the last tokens of each text in a plain forward, each of shape [NUM_SAMPLED]."""
        return self._plain(self.model)

    @cached_property
    def tolerance(self) -> float:
        if self.model.dtype == torch.float32:
            return TOLERANCE
        exact = self._plain(copy.deepcopy(self.model).float())
        return max(TOLERANCE, MARGIN * _largest(exact, self.expected))

    def require_equal(self, found: list[Any], expected: list[Any], *, is_used: bool) -> str:
        """Return the largest difference."""
        difference = _largest(found, expected)
        measured = f"log-probs differ by {difference:.2g}, rounding is up to {self.tolerance:.2g}"
        if not difference <= self.tolerance:
            raise CheckFailed(measured) if is_used else CheckSkipped(f"not used for this type: {measured}")
        return measured if is_used else f"not used for this type, but exact: {measured}"

    def _plain(self, model: Any) -> list[Any]:
        reference = Reference(model)
        return [reference.logprobs(text[:-NUM_SAMPLED], text[-NUM_SAMPLED:]) for text in self.texts]


async def check_model(
    model: Any, *, max_model_len: int = 2048, timeout_s: float = 600.0, on_result: OnResult | None = None
) -> CheckReport:
    """Compare the caches of the embedded engine and the batches of the trainer with plain forwards of single texts.

    A check fails if the package computes models of this type in this way, and the log-probs differ by more than
    rounding. A way that is not used for the type is reported too.

    Args:
        model: A `transformers.PreTrainedModel` with a language-model head; it is not changed.
        max_model_len: Context in tokens. Windows that are shorter are crossed.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.
    """
    model = copy.deepcopy(model)
    make_exact(model, gradient_checkpointing=False)
    proved = proved_cache(model)
    is_shared = proved == "shared" and short_window(model.config, length=max_model_len) is None
    suite = CheckSuite(
        [
            Check("a token does not depend on the tokens after it", _check_causal),
            Check("cache=shared is exact", partial(_check_cache, kind="shared", is_used=is_shared)),
            Check(
                "cache=per_request is exact",
                partial(_check_cache, kind="per_request", is_used=proved != "none"),
            ),
            Check("cache=none is exact", partial(_check_cache, kind="none", is_used=True)),
            Check(
                "the head in blocks is exact",
                partial(_check_rows, layout="alone", is_used=logit_scaling(model) is not None),
            ),
            Check("padded rows are exact", partial(_check_rows, layout="padded", is_used=can_pad(model))),
            Check(
                "share_prefixes is exact",
                partial(_check_rows, layout="tree", is_used=can_share_prefixes(model)),
            ),
        ]
    )
    subject = CheckedModel(model, max_model_len)
    return await suite.run(
        subject, name=f"model {type(model).__name__!r}", timeout_s=timeout_s, on_result=on_result
    )


async def _check_causal(subject: CheckedModel) -> str:
    def compare() -> str:
        cut = [text[:-1] for text in subject.texts]
        reference = Reference(subject.model)
        found = [reference.logprobs(text[: 1 - NUM_SAMPLED], text[1 - NUM_SAMPLED :]) for text in cut]
        return subject.require_equal(found, [each[:-1] for each in subject.expected], is_used=True)

    return await run_in_thread(compare)


async def _check_cache(subject: CheckedModel, *, kind: Any, is_used: bool) -> str:
    """Compare two turns of several sessions at once."""
    config = EmbeddedConfig(max_model_len=subject.max_model_len, max_slots=NUM_ROWS, cache=kind)
    model = copy.deepcopy(subject.model)
    server = await _unless_unused(lambda: EmbeddedServer(model, config=config, eos_token_ids=()), is_used)
    reference = Reference(subject.model)
    found: list[Any] = []
    expected: list[Any] = []

    async def converse(number: int) -> None:
        prompt = subject.texts[number]
        for turn in range(2):
            params = SamplingParams(max_tokens=NUM_SAMPLED, seed=number)
            output = await server.generate(np.array(prompt, dtype=np.int32), params, f"session-{number}")
            plain = await run_in_thread(partial(reference.logprobs, prompt, list(output.token_ids)))
            found.append(np.array(output.log_probs))
            expected.append(plain)
            prompt = [*prompt, *output.token_ids, *subject.texts[0][: turn + 1]]

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_ROWS):
                group.create_task(converse(number))
    finally:
        await server.close()
    return subject.require_equal(found, expected, is_used=is_used)


async def _check_rows(subject: CheckedModel, *, layout: Layout, is_used: bool) -> str:
    """Compare the log-probs of a training batch."""
    model = copy.deepcopy(subject.model)
    if layout == "tree":
        await _unless_unused(lambda: use_tree_attention(model), is_used)
    rows = [
        AgentLoopOutput(
            prompt_ids=text[:-NUM_SAMPLED], response_ids=text[-NUM_SAMPLED:], response_mask=[1] * NUM_SAMPLED
        )
        for text in subject.texts
    ]
    batch = assemble([Trajectory(row, {}, 0, n, 0.0, {}) for n, row in enumerate(rows)], pad_token_id=0)

    @torch.no_grad()
    def compute() -> list[Any]:
        found: list[Any] = [None] * NUM_ROWS
        for part in micro_batches(
            batch,
            rows=torch.arange(NUM_ROWS),
            max_tokens=NUM_ROWS * subject.max_model_len,
            device=model.device,
            layout=layout,
        ):
            logprobs_BR = response_logprobs(model, part, temperature=1.0).sampled_BR.float().cpu().numpy()
            for row, logprobs_R in zip(part.rows_B, logprobs_BR, strict=True):
                found[int(row)] = logprobs_R
        return found

    found = await _unless_unused(compute, is_used)
    return subject.require_equal(found, subject.expected, is_used=is_used)


async def _unless_unused(compute: Callable[[], Any], is_used: bool) -> Any:
    """Return the result of a function. If it raises and the package does not use this way, skip the check."""
    try:
        return await run_in_thread(compute)
    except Exception as error:
        if is_used:
            raise
        raise CheckSkipped(f"not used for this type: {error}") from error


def _largest(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference of log-probs. Those of improbable tokens count less, as does their rounding."""
    return max(
        float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b) / 10)))
        for a, b in zip(found, expected, strict=True)
    )
