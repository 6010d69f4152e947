"""Proves at start-up that the engine computes what the model computes."""

from __future__ import annotations

from random import Random

import numpy as np
import torch

from agent_loop.errors import ConfigError, ServerError
from agent_loop.servers.embedded.config import CONTEXT
from agent_loop.servers.embedded.engine import Engine
from agent_loop.servers.embedded.request import RequestLimits, build_request
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.types import SamplingParams

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference of a log-prob that is rounding, by type."""
TOLERANCE_OF_SHORT_TYPES = 0.25
PROMPT_LENGTHS = (7, 4)
NEW_TOKENS = 3
TOKENS_BETWEEN_TURNS = 2


def verify_engine(engine: Engine, *, runner: ModelRunner, limits: RequestLimits) -> None:
    """Samples from random prompts of two sessions, two turns each, and compares log-probs with a plain forward.

    Raises:
        ConfigError: They differ: the model computes attention in a way that the engine does not know.
    """
    random = Random(0)
    contexts = [[random.randrange(limits.vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]
    needed = max(PROMPT_LENGTHS) + 2 * NEW_TOKENS + TOKENS_BETWEEN_TURNS
    if limits.max_model_len < needed:
        raise ConfigError(
            f"{CONTEXT} is {limits.max_model_len} tokens, too short to verify the model with; give at least {needed}, "
            "or set rollout.engine_kwargs.verify=false"
        )
    for turn in range(2):
        worst = _largest_difference(engine, runner=runner, contexts=contexts, limits=limits, seed=turn)
        tolerance = TOLERANCE.get(runner.dtype, TOLERANCE_OF_SHORT_TYPES)
        if not worst <= tolerance:
            raise ConfigError(
                f"{type(runner.model).__name__} is not supported by the embedded server: its log-probs differ from a "
                f"plain forward by {worst:.3g} (tolerance {tolerance}); use another server"
            )
        for context in contexts:
            context += [random.randrange(limits.vocab_size) for _ in range(TOKENS_BETWEEN_TURNS)]


def _largest_difference(
    engine: Engine, *, runner: ModelRunner, contexts: list[list[int]], limits: RequestLimits, seed: int
) -> float:
    """Runs one turn of each session to its end, and extends the contexts by what was sampled."""
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=seed)
    requests = [
        build_request(
            f"verify-{i}", prompt_ids=np.asarray(context, dtype=np.int32), params=params, limits=limits
        )
        for i, context in enumerate(contexts)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    worst = 0.0
    outcomes = dict(engine.take_finished())
    for request, context in zip(requests, contexts, strict=True):
        outcome = outcomes[request]
        if isinstance(outcome, ServerError):
            raise ConfigError(f"{type(runner.model).__name__} fails its verification: {outcome}") from outcome
        first = len(context) - 1
        context += outcome.token_ids
        expected_TV = runner.plain_log_probs(context[:-1])[first:]
        expected_T = expected_TV.gather(
            1, torch.tensor(outcome.token_ids, device=expected_TV.device)[:, None]
        )
        got_T = torch.tensor(outcome.log_probs, device=expected_TV.device)[:, None]
        worst = max(worst, float((expected_T - got_T).abs().max()))
    return worst
