"""Kinds of failures: what is a failure of infrastructure, and what is a bug."""

from __future__ import annotations

from http.client import IncompleteRead

import aiohttp
import httpx
import openai
import pytest

from agent_loop.errors import (
    EnvironmentBug,
    EnvironmentUnavailable,
    RewardError,
    RewardUnavailable,
    ServerDied,
    ToolBug,
    WorkspaceError,
)
from agent_loop.rollout.failures import failure_of
from agent_loop.runtime.isolated_task import Abandoned
from agent_loop.trajectory import FailureKind

REQUEST = httpx.Request("POST", "http://127.0.0.1/")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "is_retried"),
    [
        (EnvironmentUnavailable("down"), FailureKind.ENVIRONMENT, True),
        (caused(EnvironmentBug("x"), ConnectionRefusedError()), FailureKind.ENVIRONMENT, True),
        (caused(EnvironmentBug("x"), ZeroDivisionError()), FailureKind.CODE, False),
        (WorkspaceError("killed"), FailureKind.WORKSPACE, True),
        (caused(RewardError("x"), RewardUnavailable("judge is down")), FailureKind.REWARD, True),
        (caused(RewardError("x"), TimeoutError()), FailureKind.REWARD, True),
        (caused(RewardError("x"), IncompleteRead(b"")), FailureKind.REWARD, True),
        (caused(RewardError("x"), aiohttp.ServerDisconnectedError()), FailureKind.REWARD, True),
        (caused(RewardError("x"), aiohttp.ClientPayloadError()), FailureKind.REWARD, True),
        (caused(RewardError("x"), httpx.ConnectError("refused")), FailureKind.REWARD, True),
        (caused(RewardError("x"), httpx.RemoteProtocolError("disconnected")), FailureKind.REWARD, True),
        (caused(EnvironmentBug("x"), httpx.ReadTimeout("slow")), FailureKind.ENVIRONMENT, True),
        (caused(RewardError("x"), openai.APIConnectionError(request=REQUEST)), FailureKind.REWARD, True),
        (caused(RewardError("x"), openai.APITimeoutError(REQUEST)), FailureKind.REWARD, True),
        (caused(RewardError("x"), httpx.UnsupportedProtocol("ftp")), FailureKind.CODE, False),
        (caused(RewardError("x"), httpx.InvalidURL("?")), FailureKind.CODE, False),
        (caused(RewardError("x"), Abandoned("still runs")), FailureKind.CODE, False),
        (caused(ToolBug("x"), ConnectionResetError()), FailureKind.CODE, False),
        (ServerDied("gone"), FailureKind.SERVER, False),
    ],
)
def test_only_what_may_succeed_at_another_time_is_retried(
    error: Exception, kind: FailureKind, is_retried: bool
) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.is_retried) == (kind, is_retried)
    assert failure.is_infrastructure == (kind is not FailureKind.CODE)
