from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.interactions.registry import load_interactions

INTERACTIONS = """
from agent_loop.interactions.base import BaseInteraction

class Tutor(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "", 0.0, {}

class Abstract(BaseInteraction):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "users.py").write_text(INTERACTIONS)
    return tmp_path


def load_yaml(folder: Path, text: str) -> list[str]:
    path = folder / "interactions.yaml"
    path.write_text(text.replace("FOLDER", str(folder)))
    return [
        f"{name}: {type(loaded).__name__} {loaded.config}" for name, loaded in load_interactions(path).items()
    ]


def test_each_entry_becomes_an_interaction_that_knows_its_name(folder: Path) -> None:
    text = "interaction: [{name: tutor, class_name: 'FOLDER/users.py:Tutor', config: {level: 2}}]"
    assert load_yaml(folder, text) == ["tutor: Tutor {'level': 2, 'name': 'tutor'}"]


def test_without_a_path_there_are_none() -> None:
    assert load_interactions(None) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("interactions: []", "no list under 'interaction'"),
        ("interaction: [{class_name: 'FOLDER/users.py:Tutor'}]", "name"),
        ("interaction: [{name: a, class_name: 'FOLDER/users.py:Tuto'}]", "did you mean 'Tutor'"),
        ("interaction: [{name: a, class_name: 'pathlib.Path'}]", "no subclass of BaseInteraction"),
        (
            "interaction: [{name: a, class_name: 'FOLDER/users.py:Abstract'}]",
            "making a Abstract raised TypeError",
        ),
        (
            "interaction: [{name: a, class_name: 'FOLDER/users.py:Tutor'}, {name: a, class_name: x.Y}]",
            r"interaction\[1\]: there is another interaction named 'a'",
        ),
    ],
)
def test_a_faulty_file_is_refused_with_the_fault(folder: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_yaml(folder, text)
