from __future__ import annotations

import subprocess
import sys
import textwrap

import agent_loop

PUBLIC_NAMES = {
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AgentState",
    "AsyncLLMServerManager",
    "AsyncPartialToolAgentLoop",
    "AsyncServerBase",
    "BaseInteraction",
    "BaseTool",
    "ChatTemplate",
    "Episode",
    "ScriptedServer",
    "Segment",
    "SingleTurnAgentLoop",
    "StopReason",
    "TokenOutput",
    "ToolAgentLoop",
    "ToolParser",
    "ToolResponse",
    "advantage_estimator",
    "function_tool",
    "policy_loss",
    "register",
}


def run_python(code: str) -> str:
    """Run code in a new interpreter and return its standard output."""
    command = [sys.executable, "-W", "error::DeprecationWarning:agent_loop", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_public_names_are_complete_importable_and_documented() -> None:
    assert set(agent_loop.__all__) == PUBLIC_NAMES
    assert set(dir(agent_loop)) == PUBLIC_NAMES | {"__version__"}
    for name in PUBLIC_NAMES:
        assert getattr(agent_loop, name).__doc__, f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(agent_loop, "AgentLop")


def test_importing_the_package_loads_no_heavy_library() -> None:
    loaded = run_python(
        """
        import sys
        import agent_loop
        print(sorted({"torch", "ray", "transformers", "tensordict", "numpy"} & set(sys.modules)))
        """
    )
    assert loaded == "[]"


def test_importing_the_package_takes_less_than_a_third_of_a_second() -> None:
    code = """
        import time
        started = time.process_time()
        import agent_loop
        print(time.process_time() - started)
        """
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def test_importing_the_classes_of_loops_tools_and_estimators_loads_no_heavy_library() -> None:
    loaded = run_python(
        """
        import sys
        from agent_loop import AgentLoopBase, AgentLoopWorker, BaseTool, ScriptedServer, function_tool, register
        from agent_loop import advantage_estimator, policy_loss
        print(sorted({"torch", "ray", "transformers", "tensordict"} & set(sys.modules)))
        """
    )
    assert loaded == "[]"
