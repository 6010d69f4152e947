"""Check that this machine isolates the code of the python tool."""

from __future__ import annotations

from agent_loop.errors import AgentLoopError
from agent_loop.testing.conformance import CheckFailed, CheckReport, CheckSuite, OnResult
from agent_loop.tools.sandbox.probe import find_escapes
from agent_loop.tools.sandbox.settings import SandboxSettings


async def check_sandbox(
    settings: SandboxSettings, *, timeout_s: float = 60.0, on_result: OnResult | None = None
) -> CheckReport:
    """Run one sandbox whose code attempts what it must not be able to do.

    Args:
        timeout_s: Time limit of the check.
        on_result: Called with the result as soon as it is known.
    """
    suite = CheckSuite({"code in the sandbox cannot escape": _isolates})
    return await suite.run(settings, name="sandbox", timeout_s=timeout_s, on_result=on_result)


async def _isolates(settings: SandboxSettings) -> str:
    try:
        escapes = await find_escapes(settings)
    except AgentLoopError as error:
        raise CheckFailed(str(error)) from error
    if escapes and not settings.allow_weaker_isolation:
        raise CheckFailed(f"code in it {', '.join(escapes)}")
    return f"allowed: code in it {', '.join(escapes)}" if escapes else ""
