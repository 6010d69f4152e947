"""The public names, what importing them loads, import cycles, and loading objects of users."""

from __future__ import annotations

import os.path
import subprocess
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import agent_loop
from agent_loop.errors import ConfigError
from agent_loop.loading import load_module, load_object

NAMES = """
    AgentLoopBase AgentLoopManager AgentLoopOutput AgentLoopWorker AgentState AsyncLLMServerManager
    AsyncPartialToolAgentLoop AsyncServerBase BaseInteraction BaseTool ChatTemplate Episode ScriptedServer Segment
    SingleTurnAgentLoop StopReason TokenOutput ToolAgentLoop ToolParser ToolResponse advantage_estimator function_tool
    policy_loss register
"""
PUBLIC_NAMES = set(NAMES.split())


def run_python(code: str) -> str:
    """Run code in a new interpreter and return its standard output."""
    command = [sys.executable, "-W", "error::DeprecationWarning:agent_loop", "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_public_names_are_complete_importable_and_documented() -> None:
    assert set(agent_loop.__all__) == PUBLIC_NAMES
    assert set(dir(agent_loop)) == PUBLIC_NAMES | {"__version__"}
    for name in PUBLIC_NAMES:
        assert getattr(agent_loop, name).__doc__, f"{name} has no docstring"
    assert not hasattr(agent_loop, "AgentLop")


HEAVY = {"torch", "ray", "transformers", "tensordict"}


def test_importing_the_package_and_its_classes_loads_no_heavy_library() -> None:
    code = f"""
        import sys
        import agent_loop
        print(sorted({HEAVY | {"numpy"}} & set(sys.modules)))
        from agent_loop import AgentLoopBase, AgentLoopWorker, BaseTool, ScriptedServer, function_tool, register
        from agent_loop import advantage_estimator, policy_loss
        print(sorted({HEAVY} & set(sys.modules)))
        """
    assert run_python(code).splitlines() == ["[]", "[]"]


def test_modules_import_each_other_without_cycles() -> None:
    graph = grimp.build_graph("agent_loop", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_file_is_imported_once_and_its_names_resolve(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("class Outer:\n    inner = 3\nmarker = object()\n", encoding="utf-8")
    first = load_object(f"{file}:marker", key="k")
    assert load_object(f"{file}:marker", key="k") is first
    assert load_object(f"{file}:Outer.inner", key="k") == 3


@pytest.mark.parametrize("reference", ["os.path:join", "os.path.join"])
def test_a_name_follows_its_module_after_a_colon_or_a_dot(reference: str) -> None:
    assert load_object(reference, key="k") is os.path.join


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("nowhere.py:f", "does not exist"),
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError"),
        ("os.path:joyn", "did you mean 'join'"),
        ("join", "give file.py:name or module:name"),
        ("os.path:", "give file.py:name or module:name"),
    ],
)
def test_an_object_that_cannot_be_loaded_raises_an_error_that_names_the_key(
    reference: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"reward\.function.*{complaint}"):
        load_object(reference, key="reward.function")


def test_a_file_that_raises_can_be_fixed_and_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.py raised ZeroDivisionError"):
        load_module(str(file), key="k")
    file.write_text("x = 1\n", encoding="utf-8")
    assert load_module(str(file), key="k").x == 1


def test_a_file_imports_the_modules_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_the_task.py").write_text("number = 7\n", encoding="utf-8")
    (tmp_path / "task.py").write_text("from beside_the_task import number\n", encoding="utf-8")
    assert load_object(f"{tmp_path / 'task.py'}:number", key="k") == 7


def test_modules_of_the_folder_of_a_file_hide_no_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "colorsys.py").write_text("raise AssertionError\n", encoding="utf-8")
    (tmp_path / "task.py").write_text("from colorsys import rgb_to_hsv\n", encoding="utf-8")
    assert load_object(f"{tmp_path / 'task.py'}:rgb_to_hsv", key="k")(0, 0, 0) == (0.0, 0.0, 0)
