"""Check which fast ways of computing a model give the log-probs of its plain forward."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch

from agent_loop.checks.reference import Reference
from agent_loop.rollout.batch import assemble
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.model_types import (
    can_pad,
    can_share_prefixes,
    logit_scaling,
    proved_cache,
    short_window,
    unseen_window,
)
from agent_loop.testing.conformance import (
    CheckReport,
    CheckSkipped,
    CheckSuite,
    OnResult,
    require,
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
Compared: TypeAlias = tuple[list[Any], list[Any]]
"""Log-probs of texts, and those of plain forwards."""
SHORT_TEXT = 64
"""Tokens of the longest text for a model without a window in its context."""


Way: TypeAlias = Callable[["CheckedModel"], Awaitable[Compared]]
"""Way of computing the model."""


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

    async def compare(self, way: Way, *, is_used: bool) -> str:
        """Return the largest difference between the log-probs of a way and those of plain forwards.

        Fail the check if they differ by more than rounding or the way raises; skip it if the way is not used.
        """
        try:
            found, expected = await way(self)
        except Exception as error:
            if is_used:
                raise
            raise CheckSkipped(f"not used for this type: {error}") from error
        difference = _largest(found, expected)
        measured = f"log-probs differ by {difference:.2g}, rounding is up to {self.tolerance:.2g}"
        if is_used:
            require(difference <= self.tolerance, measured)
            return measured
        if not difference <= self.tolerance:
            raise CheckSkipped(f"not used for this type: {measured}")
        return f"not used for this type, but exact: {measured}"

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
    is_shared = proved == "shared" and unseen_window(model, length=max_model_len) is None
    ways: list[tuple[str, Way, bool]] = [
        ("a token does not depend on the tokens after it", _cut, True),
        ("cache=shared is exact", partial(_converse, cache="shared"), is_shared),
        ("cache=per_request is exact", partial(_converse, cache="per_request"), proved != "none"),
        ("cache=none is exact", partial(_converse, cache="none"), True),
        ("the head in blocks is exact", partial(_train, layout="alone"), logit_scaling(model) is not None),
        ("padded rows are exact", partial(_train, layout="padded"), can_pad(model)),
        ("share_prefixes is exact", partial(_train, layout="tree"), can_share_prefixes(model)),
    ]
    suite = CheckSuite(
        {name: partial(CheckedModel.compare, way=way, is_used=is_used) for name, way, is_used in ways}
    )
    subject = CheckedModel(model, max_model_len)
    return await suite.run(
        subject, name=f"model {type(model).__name__!r}", timeout_s=timeout_s, on_result=on_result
    )


async def _cut(subject: CheckedModel) -> Compared:
    """Return the log-probs of texts without their last token."""
    reference = Reference(subject.model)

    def compute() -> Compared:
        found = [reference.logprobs(text[:-NUM_SAMPLED], text[-NUM_SAMPLED:-1]) for text in subject.texts]
        return found, [each[:-1] for each in subject.expected]

    return await run_in_thread(compute)


async def _converse(subject: CheckedModel, *, cache: Any) -> Compared:
    """Return the log-probs of two turns of several sessions at once."""
    config = EmbeddedConfig(max_model_len=subject.max_model_len, max_slots=NUM_ROWS, cache=cache)
    server = EmbeddedServer(copy.deepcopy(subject.model), config=config, eos_token_ids=())
    reference, found, expected = Reference(subject.model), list[Any](), list[Any]()

    async def converse(number: int) -> None:
        prompt = subject.texts[number]
        for turn in range(2):
            params = SamplingParams(max_tokens=NUM_SAMPLED, seed=number)
            output = await server.generate(np.array(prompt, dtype=np.int32), params, f"session-{number}")
            expected.append(await run_in_thread(reference.logprobs, prompt, output.token_ids))
            found.append(np.array(output.log_probs))
            prompt = [*prompt, *output.token_ids, *subject.texts[0][: turn + 1]]

    try:
        await run_together(map(converse, range(NUM_ROWS)))
    finally:
        await server.close()
    return found, expected


async def _train(subject: CheckedModel, *, layout: Layout) -> Compared:
    """Return the log-probs of a training batch."""
    model = copy.deepcopy(subject.model)
    rows = [
        AgentLoopOutput(
            prompt_ids=text[:-NUM_SAMPLED], response_ids=text[-NUM_SAMPLED:], response_mask=[1] * NUM_SAMPLED
        )
        for text in subject.texts
    ]
    batch = assemble([Trajectory(row, {}, 0, n, 0.0, {}) for n, row in enumerate(rows)], pad_token_id=0)

    @torch.no_grad()
    def compute() -> Compared:
        if layout == "tree":
            use_tree_attention(model)
        found: list[Any] = [None] * NUM_ROWS
        max_tokens, numbers = NUM_ROWS * subject.max_model_len, torch.arange(NUM_ROWS)
        for part in micro_batches(
            batch, rows=numbers, max_tokens=max_tokens, device=model.device, layout=layout
        ):
            logprobs_BR = response_logprobs(model, part, temperature=1.0).sampled_BR.float().cpu().numpy()
            for row, logprobs_R in zip(part.rows_B, logprobs_BR, strict=True):
                found[int(row)] = logprobs_R
        return found, subject.expected

    return await run_in_thread(compute)


def _largest(found: list[Any], expected: list[Any]) -> float:
    """Return the largest difference of log-probs. Those of improbable tokens count less, as does their rounding."""
    return max(
        float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b) / 10)))
        for a, b in zip(found, expected, strict=True)
    )
