"""Parser of Google-style docstrings."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?|Warnings?|See Also|References):$"
)
_ARGUMENT_SECTIONS = ("Args", "Arguments", "Parameters")
_ARGUMENT = re.compile(r"\*{0,2}(?P<name>\w+)\s*(\(.*?\))?:\s*(?P<text>.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """Parsed docstring of a function."""

    description: str
    """The text before the first section."""
    arguments: dict[str, str]
    """Descriptions in the section `Args:`, by name."""


def parse_docstring(docstring: str) -> Docstring:
    """Parse the description and the `Args:` section. Other sections are ignored."""
    sections: dict[str, list[str]] = {"": []}
    lines = sections[""]
    for line in inspect.cleandoc(docstring).splitlines():
        header = _SECTION.match(line)
        if header is None:
            lines.append(line)
        else:
            lines = sections.setdefault(header[1], [])
    arguments: dict[str, str] = {}
    for name in _ARGUMENT_SECTIONS:
        arguments |= _parse_arguments(sections.get(name, []))
    return Docstring("\n".join(sections[""]).strip(), arguments)


def _parse_arguments(lines: list[str]) -> dict[str, str]:
    """Parse the entries of a section. An entry starts at the indentation of the first; deeper lines continue it."""
    texts: dict[str, list[str]] = {}
    entry: list[str] = []
    lines = inspect.cleandoc("\n".join(["", *lines])).splitlines()
    for line in lines:
        argument = _ARGUMENT.match(line)
        if argument is not None:
            entry = texts[argument["name"]] = [argument["text"]]
        else:
            entry.append(line.strip())
    return {name: " ".join(" ".join(text).split()) for name, text in texts.items()}
