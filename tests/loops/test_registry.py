"""Registration of agent loops by decorator, file and YAML list."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.errors import ConfigError, DataError
from agent_loop.loops import SingleTurnAgentLoop, registry
from agent_loop.loops.registry import LoopRegistry, register

LOOPS = """
from agent_loop import AgentLoopBase, register

class Patient(AgentLoopBase):
    def __init__(self, context, tries=1):
        super().__init__(context)
        self.tries = tries

    async def run(self, sampling_params, **row):
        raise NotImplementedError

@register("from_a_file")
class FromAFile(Patient):
    pass
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the loops that a test registered when the test ends."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.fixture
def loops_file(tmp_path: Path) -> Path:
    file = tmp_path / "loops.py"
    file.write_text(LOOPS, encoding="utf-8")
    return file


def test_importing_a_file_registers_its_loops(loops_file: Path) -> None:
    assert LoopRegistry(loop_files=[str(loops_file)]).get("from_a_file").loop_class.__name__ == "FromAFile"


def test_a_yaml_file_names_loops_and_their_constructor_arguments(loops_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "loops.yaml"
    config.write_text(f"- {{name: patient, _target_: '{loops_file}:Patient', tries: 5}}\n", encoding="utf-8")
    entry = LoopRegistry(config_path=str(config)).get("patient")
    assert entry.loop_class.__name__ == "Patient"
    assert entry.kwargs == {"tries": 5}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: x", "must hold a list"),
        ("- {name: x}", "needs the keys name and _target_"),
        ("- {name: x, _target_: 'os.path:join'}", "AgentLoopBase"),
        ("- [", "not valid YAML"),
    ],
)
def test_an_invalid_yaml_file_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    config = tmp_path / "loops.yaml"
    config.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        LoopRegistry(config_path=str(config))


def test_an_unknown_loop_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match="did you mean 'tool_agent'"):
        LoopRegistry().get("tool_agnt")


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("tool_agent", "agent_loop.loops.tool_agent.ToolAgentLoop"),
        ("agent_program", "agent_loop.serve.program.AgentProgramLoop"),
    ],
)
def test_registering_a_name_of_the_package_again_replaces_its_loop_with_a_warning(
    name: str, before: str
) -> None:
    with pytest.warns(UserWarning, match=f"agent loop {name!r} was {before}; .*Other replaces it") as warned:

        @register(name)
        class Other(SingleTurnAgentLoop):
            pass

    assert LoopRegistry().get(name).loop_class is Other
    assert warned[0].filename == __file__
