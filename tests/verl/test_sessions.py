"""Leases of verl's balancer for the sessions of trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.cli.project import save_model
from tests.helpers import call_text
from tests.verl.harness import ScriptedClient, batch_of, run_ours, verl_config

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


class InProcess:
    """An object with the call syntax of a Ray actor, which counts its calls."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return Method(self, name)


class Method:
    def __init__(self, actor: InProcess, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, **arguments: Any) -> Any:
        self._actor.calls.append(self._name)
        result = getattr(self._actor._wrapped, self._name)(**arguments)
        return result if hasattr(result, "__await__") else Result(result)


class Result:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self._value
        yield


def test_a_trajectory_acquires_a_server_once_and_releases_it(tmp_path: Path) -> None:
    config = verl_config(
        save_model(tmp_path),
        multi_turn__tool_config_path=str(Path(__file__).parent / "counter_tool.yaml"),
        agent__default_agent_loop="tool_agent",
    )

    def reply(text: str) -> str:
        if "user\nbreak" in text:
            raise RuntimeError("the server is gone")
        called = "<tool_response>" in text
        return "done<|im_end|>" if called else f"{call_text('count', step=1)}<|im_end|>"

    server = InProcess(ScriptedClient(reply))
    router = GlobalRequestLoadBalancer({"a": server})
    balancer = InProcess(router)
    batch = batch_of(["x", "break", "y"])
    output = run_ours(config, LLMServerClient(config, load_balancer_handle=balancer), batch)
    assert output.non_tensor_batch["__num_turns__"].tolist()[::2] == [4, 4]
    assert server.calls == ["generate"] * 5
    assert balancer.calls.count("acquire_server") == balancer.calls.count("release_server") == 3
    assert router.get_total_inflight() == 0
