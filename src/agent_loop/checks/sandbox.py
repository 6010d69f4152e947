"""Check which mechanisms isolate the code of the python tool on this machine."""

from __future__ import annotations

from functools import partial

from agent_loop.errors import SandboxError
from agent_loop.runtime.threads import run_in_thread
from agent_loop.testing.conformance import Check, CheckFailed, CheckReport, CheckSuite, OnResult
from agent_loop.tools.sandbox.host import measure_isolation
from agent_loop.tools.sandbox.settings import MECHANISMS, Mechanism, SandboxSettings


async def check_sandbox(
    settings: SandboxSettings, *, timeout_s: float = 60.0, on_result: OnResult | None = None
) -> CheckReport:
    """Check every mechanism that the settings allow, best first.

    Each check runs one sandbox whose code attempts what it must not be able to do. The check passes if the mechanism
    isolates enough for the python tool, which uses the first such mechanism. A machine rarely supports all of them.

    Args:
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.
    """
    mechanisms = MECHANISMS if settings.mechanism == "auto" else (settings.mechanism,)
    suite = CheckSuite([Check(name, partial(_check_mechanism, mechanism=name)) for name in mechanisms])
    return await suite.run(settings, name="sandbox", timeout_s=timeout_s, on_result=on_result)


async def _check_mechanism(settings: SandboxSettings, *, mechanism: Mechanism) -> str:
    return await run_in_thread(lambda: _probe(settings, mechanism=mechanism))


def _probe(settings: SandboxSettings, *, mechanism: Mechanism) -> str:
    """Return what the mechanism isolates."""
    try:
        isolation = measure_isolation(settings, mechanism=mechanism)
    except SandboxError as error:
        raise CheckFailed(str(error)) from error
    if isolation.is_sufficient or settings.allow_weaker_isolation:
        return isolation.describe()
    raise CheckFailed(f"too weak: {isolation.describe()}")
