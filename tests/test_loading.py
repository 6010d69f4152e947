from __future__ import annotations

import os.path
import sys
from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.loading import load_module, load_object


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
