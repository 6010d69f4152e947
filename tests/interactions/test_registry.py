from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.interactions.registry import load_interactions
from tests.test_public_api import run_python

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


def test_each_entry_becomes_an_interaction_with_its_name_in_the_config(folder: Path) -> None:
    text = "interaction: [{name: tutor, class_name: 'FOLDER/users.py:Tutor', config: {level: 2}}]"
    assert load_yaml(folder, text) == ["tutor: Tutor {'level': 2, 'name': 'tutor'}"]


def test_an_interaction_without_a_name_is_named_after_its_class(folder: Path) -> None:
    text = "interaction: [{class_name: 'FOLDER/users.py:Tutor'}, {class_name: gsm8k}]"
    assert load_yaml(folder, text) == [
        "tutor: Tutor {'name': 'tutor'}",
        "gsm8k: Gsm8kInteraction {'name': 'gsm8k'}",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("interactions: []", "no list under 'interaction'"),
        ("interaction: [{name: a}]", "key 'class_name' is missing"),
        ("interaction: [{class_name: gsm8}]", "not a built-in interaction; did you mean 'gsm8k'"),
        (
            "interaction: [{class_name: gsm8k, config: {attempts: 3}}]",
            "constructing Gsm8kInteraction raised ConfigError: config of interaction 'gsm8k': unknown key 'attempts'",
        ),
        ("interaction: [{name: a, class_name: 'FOLDER/users.py:Tuto'}]", "did you mean 'Tutor'"),
        ("interaction: [{name: a, class_name: 'pathlib.Path'}]", "not a subclass of BaseInteraction"),
        (
            "interaction: [{name: a, class_name: 'FOLDER/users.py:Abstract'}]",
            "constructing Abstract raised TypeError",
        ),
        (
            "interaction: [{name: a, class_name: 'FOLDER/users.py:Tutor'}, {name: a, class_name: gsm8k}]",
            r"interaction\[1\]: there is another interaction named 'a'",
        ),
    ],
)
def test_an_invalid_file_raises_an_error_that_names_the_fault(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_yaml(folder, text)


def test_the_registry_imports_no_optional_dependency() -> None:
    loaded = run_python(
        """
        import sys
        import agent_loop.interactions.registry, agent_loop.loops, agent_loop.checks.instances
        print(sorted({"gymnasium", "openai", "torch", "transformers"} & set(sys.modules)))
        """
    )
    assert loaded == "[]"
