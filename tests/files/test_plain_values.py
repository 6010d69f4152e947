from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json, parse_override, read_yaml, shown

MANY_DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("7\n", "it holds the single value '7'"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "nested too deeply|exceeded maximum nesting depth"),
        ("a: 1\nb: 2\na: 3\n", "key 'a' is there twice at line 1 column 1"),
        (f"a: {MANY_DIGITS}", "an integer of thousands of digits"),
        ("? [1, 2]\n: 3", "found unhashable key at line 1 column 3"),
        ("a: [", "at line 2 column 1|at line 1 column"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
    ids=range(7),
)
def test_invalid_yaml_raises_an_error_that_names_the_file(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint) as raised:
        read_yaml(path, what="tool file")
    assert str(raised.value).startswith(f"tool file {str(path)!r} ")
    assert "\n" not in str(raised.value)


def test_words_that_only_yaml_1_1_reads_as_other_values_are_text(tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_text(
        "on: {enum: [NO, SE, 'é'], is_open: true, at: 12:30, base: &base off}\ncopy: *base\nn: 1e-4\n"
    )
    expected = {"enum": ["NO", "SE", "é"], "is_open": True, "at": "12:30", "base": "off"}
    assert read_yaml(path, what="tool file") == {"on": expected, "copy": "off", "n": 1e-4}
    assert parse_override("a.b=no") == {"a": {"b": "no"}}
    assert parse_override("a=[NO, 'x, y', true]") == {"a": ["NO", "x, y", True]}


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_path_that_is_not_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="give the path of a YAML file"):
        read_yaml(tmp_path / name, what="tool file")


def test_aliases_and_merge_keys_are_expanded(tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    path.write_text("a: &a {x: 1, y: [2]}\nb: *a\nc: {<<: *a, x: 3}\n", encoding="utf-8")
    same = {"x": 1, "y": [2]}
    assert read_yaml(path, what="tool file") == {"a": same, "b": same, "c": {"x": 3, "y": [2]}}


@pytest.mark.parametrize(
    "override",
    ["a", "=1", "a=[", "a=" + "[" * 20_000, f"a={MANY_DIGITS}", "a=!!set {1}", "a={null: 1}"],
    ids=range(7),
)
def test_an_invalid_override_raises_an_error_of_one_line(override: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_override(override)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[" * 100_000, "nested too deeply"),
        (MANY_DIGITS, "an integer of thousands of digits"),
        ('{"a": }', "Expecting value at column 7"),
        ('{"a":\n}', "Expecting value at line 2 column 1"),
    ],
    ids=range(4),
)
def test_invalid_json_raises_an_error_that_names_the_fault(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_json(text)


def test_any_value_can_be_described() -> None:
    assert shown(1 << 20_000).startswith("<a int that cannot be shown")
    assert len(shown("x" * 10_000)) <= 200
