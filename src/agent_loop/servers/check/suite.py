"""Runs the checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from agent_loop.errors import ConfigError
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.check.control import CONTROL_CHECKS
from agent_loop.servers.check.generation import GENERATION_CHECKS
from agent_loop.servers.check.reference import Reference
from agent_loop.servers.check.report import CheckReport
from agent_loop.servers.check.subject import Check, Subject
from agent_loop.testing.checks import CheckResult, CheckSkipped, run_checks

CHECKS = (*GENERATION_CHECKS, *CONTROL_CHECKS)


async def check_server(
    server: AsyncServerBase,
    *,
    max_model_len: int,
    vocab_size: int | None = None,
    reference: Reference | None = None,
    tolerance: float = 1e-3,
    timeout_s: float = 120.0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> CheckReport:
    """Holds a started server against the contract of `AsyncServerBase` and against the abilities that it claims.

    It must be idle, and is closed at the end. Its weights are changed on the way, and set back.

    Args:
        max_model_len: Tokens of the longest context that the server takes; at least 64.
        vocab_size: Token ids in prompts are below it; by default that of the reference.
        reference: The model that the server runs; None leaves out what needs one.
        tolerance: Of log-probs, in nats: about 1e-3 for float32, 0.1 for bfloat16.
        timeout_s: Of each check. One that takes longer has failed.
        on_result: Told of each result as it comes.

    Raises:
        ConfigError: There is neither a vocabulary size nor a reference, or `max_model_len` is too small.
    """
    if vocab_size is None and reference is None:
        raise ConfigError("check_server needs to know the vocabulary; give vocab_size or a reference")
    if max_model_len < 64:
        raise ConfigError(f"max_model_len is {max_model_len}; the checks need at least 64")
    subject = Subject(
        server=server,
        vocab_size=vocab_size or (reference.vocab_size if reference else 0),
        max_model_len=max_model_len,
        reference=reference,
        tolerance=tolerance,
        long_tokens=max_model_len - 24,
        _sessions=count(),
    )
    checks = {check.name: partial(_run, check, subject) for check in CHECKS}
    results = await run_checks(checks, timeout_s=timeout_s, on_result=on_result)
    return CheckReport(server.name, results)


async def _run(check: Check, subject: Subject) -> str | None:
    if check.ability is not None and check.ability not in subject.server.abilities:
        raise CheckSkipped(f"the server does not claim {check.ability}")
    method = check.method
    if method is not None and getattr(type(subject.server), method) is getattr(AsyncServerBase, method):
        raise CheckSkipped(f"the server does not define {method}")
    if check.needs_reference and subject.reference is None:
        raise CheckSkipped("needs a reference")
    return await check.run(subject)
