"""Run the conformance checks on a server."""

from __future__ import annotations

from itertools import count

from agent_loop.checks.server.checked_server import CheckedServer
from agent_loop.checks.server.control import CONTROL_CHECKS
from agent_loop.checks.server.generation import GENERATION_CHECKS
from agent_loop.checks.server.reference import Reference
from agent_loop.checks.server.scores import SCORE_CHECKS
from agent_loop.errors import ConfigError
from agent_loop.servers.base import AsyncServerBase
from agent_loop.testing.conformance import CheckReport, CheckSuite, OnResult

SERVER_CHECKS = CheckSuite([*GENERATION_CHECKS.checks, *SCORE_CHECKS.checks, *CONTROL_CHECKS.checks])
MIN_MODEL_LEN = 64


async def check_server(
    server: AsyncServerBase,
    *,
    max_model_len: int,
    vocab_size: int | None = None,
    reference: Reference | None = None,
    tolerance: float = 1e-3,
    timeout_s: float = 120.0,
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that a started server follows the contract of `AsyncServerBase` and has the abilities that it claims.

    The server must be idle, and is closed at the end. Its weights are changed during the checks, and restored. The
    checks of an ability that the server does not claim are skipped.

    Args:
        max_model_len: Longest context of the server in tokens; at least 64.
        vocab_size: Prompts use token ids below this. Defaults to that of the reference.
        reference: Model that the server runs. With None, checks that compare with a reference are skipped.
        tolerance: Largest accepted difference of log-probs, in nats: about 1e-3 for float32, 0.1 for bfloat16.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: Both `vocab_size` and `reference` are None, or `max_model_len` is too small.
    """
    if vocab_size is None and reference is None:
        raise ConfigError("check_server needs to know the vocabulary; give vocab_size or a reference")
    if max_model_len < MIN_MODEL_LEN:
        raise ConfigError(f"max_model_len is {max_model_len}; the checks need at least {MIN_MODEL_LEN}")
    subject = CheckedServer(
        server=server,
        vocab_size=vocab_size or (reference.vocab_size if reference else 0),
        max_model_len=max_model_len,
        reference=reference,
        tolerance=tolerance,
        long_tokens=max_model_len - 24,
        _sessions=count(),
    )
    return await SERVER_CHECKS.run(
        subject, name=f"server {server.name!r}", timeout_s=timeout_s, on_result=on_result
    )
