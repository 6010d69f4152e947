"""Expansion of the variables, arrays and arithmetic in a word of a shell script."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.files.shell.lexer import end_of_bracket

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(?P<name>[A-Za-z_]\w*|[0-9@*#?]+)(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)", re.DOTALL)
_OPERATIONS: Mapping[type, Callable[[Any, Any], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(slots=True)
class Variables:
    """Variables of a script, and the names that it reads before they are set."""

    values: dict[str, list[str]]
    """A plain variable is a list of one string."""
    arguments: Sequence[str] = ()
    script: str = ""
    unset: dict[str, None] = field(default_factory=dict[str, None])

    def elements(self, name: str) -> list[str]:
        """Return the elements of an array, the arguments of the script, or the value of a variable."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [str(len(self.arguments))]
        if name in ("?", "$", "!", "-"):
            return ["0"]
        if name == "0":
            return [self.script]
        if name.isdigit():
            return list(self.arguments[int(name) - 1 : int(name)])
        if name == "BASH_SOURCE":
            return [self.script]
        return self.values.get(name, [])

    def is_set(self, name: str) -> bool:
        """Return whether the name has a value."""
        return name in ("@", "*", "BASH_SOURCE") or bool(self.elements(name)) or name in self.values

    def number(self, name: str) -> int:
        """Return the value of a variable in an arithmetic expression; 0 if it has none."""
        text = " ".join(self.elements(name)) or "0"
        return int(text) if re.fullmatch(r"-?\d+", text) else arithmetic(text, self)


class Expander:
    """Expands words with the variables of a script.

    Args:
        variables: Variables of the script.
        run: Returns the output of the command in `$(...)`.
    """

    def __init__(self, variables: Variables, *, run: Callable[[str], str]) -> None:
        self._variables = variables
        self._run = run

    def fields(self, word: str) -> list[str]:
        """Return the fields of a word: usually one, none for an unset variable, one for each element of an array."""
        fields: list[str] = [""]
        is_present = is_empty_array = False
        for text, is_quoted, elements in self._pieces(word):
            if elements is None:
                fields[-1] += text
                is_present = is_present or is_quoted or bool(text)
                continue
            parts = elements if is_quoted else [part for element in elements for part in element.split()]
            is_empty_array = is_empty_array or (is_quoted and not elements)
            for number, part in enumerate(parts):
                if number:
                    fields.append("")
                fields[-1] += part
                is_present = True
        return fields if is_present and not (is_empty_array and fields == [""]) else []

    def text(self, word: str) -> str:
        """Return a word as one string, as in an assignment."""
        return "".join(text if parts is None else " ".join(parts) for text, _, parts in self._pieces(word))

    def _pieces(self, word: str) -> list[tuple[str, bool, list[str] | None]]:
        """Return the pieces of a word: the text, whether it is quoted, and the elements of an expansion."""
        pieces: list[tuple[str, bool, list[str] | None]] = []
        at, is_quoted = 0, False
        while at < len(word):
            char = word[at]
            if char == '"':
                is_quoted = not is_quoted
                pieces.append(("", True, None))
                at += 1
            elif char == "'" and not is_quoted:
                end = word.find("'", at + 1)
                pieces.append((word[at + 1 : end], True, None))
                at = end + 1
            elif word.startswith("$'", at) and not is_quoted:
                end = word.find("'", at + 2)
                pieces.append((word[at + 2 : end], True, None))
                at = end + 1
            elif char == "\\":
                escaped = word[at + 1 : at + 2]
                keeps = is_quoted and escaped not in ('"', "\\", "$", "`", "\n")
                pieces.append(("" if escaped == "\n" else (char if keeps else "") + escaped, True, None))
                at += 2
            elif char in "$`":
                expansion, at = self._expansion(word, at)
                elements = [expansion] if isinstance(expansion, str) else expansion
                pieces.append(("", is_quoted, elements))
            else:
                pieces.append((char, is_quoted, None))
                at += 1
        return pieces

    def _expansion(self, word: str, at: int) -> tuple[str | list[str], int]:
        """Return the value of the expansion at `at`, and its end. An array gives a list."""
        if word[at] == "`":
            end = word.find("`", at + 1)
            return self._run(word[at + 1 : end]).rstrip("\n"), end + 1
        if word.startswith("$((", at):
            end = end_of_bracket(word, at + 1, "()")
            return str(arithmetic(self.text(word[at + 3 : end - 2]), self._variables)), end
        if word.startswith("$(", at):
            end = end_of_bracket(word, at + 1, "()")
            return self._run(word[at + 2 : end - 1]).rstrip("\n"), end
        if word.startswith("${", at):
            end = end_of_bracket(word, at + 1, "{}")
            return self._parameter(word[at + 2 : end - 1]), end
        name = _NAME.match(word, at + 1)
        if name is None:
            return "$", at + 1
        return self._value(name.group()), name.end()

    def _value(self, name: str) -> str | list[str]:
        elements = self._variables.elements(name)
        if name in ("@", "*"):
            return elements
        if not self._variables.is_set(name):
            self._variables.unset[name] = None
        return elements[0] if elements else ""

    def _parameter(self, expression: str) -> str | list[str]:
        """Return the value of the text between `${` and `}`."""
        if expression.startswith("#") and len(expression) > 1:
            name = expression[1:].partition("[")[0]
            elements = self._variables.elements(name)
            return str(len(elements) if "[" in expression or name in "@*" else len("".join(elements[:1])))
        if expression.startswith("!"):
            return self._value("".join(self._variables.elements(expression[1:])[:1]) or "_")
        found = _PARAMETER.fullmatch(expression)
        if found is None:
            return ""
        name, index, rest = found.group("name"), found.group("index"), found.group("rest")
        if index in ("@", "*") or name in ("@", "*"):
            elements = self._variables.elements(name)
            if rest and not elements:
                return self._default(name, rest)
            return elements
        if index is not None:
            elements = self._variables.elements(name)
            number = arithmetic(self.text(index), self._variables)
            return elements[number] if -len(elements) <= number < len(elements) else ""
        return self._default(name, rest) if rest else self._value(name)

    def _default(self, name: str, rest: str) -> str:
        """Apply the operation after the name of a parameter, such as `:-default`, to its value."""
        value = "".join(self._variables.elements(name)[:1])
        is_empty_unset = rest.startswith(":") and rest[1:2] in "-=?+"
        operation, argument = (rest[1:2], rest[2:]) if is_empty_unset else (rest[:1], rest[1:])
        is_set = bool(value) if is_empty_unset else self._variables.is_set(name)
        if operation in ("-", "=", "?"):
            if is_set:
                return value
            if operation == "?":
                self._variables.unset[name] = None
                return ""
            default = self.text(argument)
            if operation == "=":
                self._variables.values[name] = [default]
            return default
        if operation == "+":
            return self.text(argument) if is_set else ""
        if not self._variables.is_set(name):
            self._variables.unset[name] = None
        return _edited(value, rest, text=self.text, variables=self._variables)


def _edited(value: str, rest: str, *, text: Callable[[str], str], variables: Variables) -> str:
    """Apply a removal, replacement, change of case or slice to a value."""
    if rest[0] in "#%":
        pattern, from_start = text(rest.lstrip("#%")), rest[0] == "#"
        ends = [value[:n] if from_start else value[n:] for n in range(len(value) + 1)]
        matching = [end for end in ends if fnmatch.fnmatchcase(end, pattern)]
        if not matching:
            return value
        longest = rest[:2] in ("##", "%%")
        end = max(matching, key=len) if longest else min(matching, key=len)
        return value[len(end) :] if from_start else value[: len(value) - len(end)]
    if rest[0] == "/":
        old, _, new = rest.lstrip("/").partition("/")
        return value.replace(text(old), text(new), -1 if rest.startswith("//") else 1)
    if rest[0] in ",^":
        return value.lower() if rest[0] == "," else value.upper()
    if rest[0] == ":":
        start, _, length = rest[1:].partition(":")
        first = arithmetic(text(start), variables)
        return value[first:] if not length else value[first:][: arithmetic(text(length), variables)]
    return value


def arithmetic(expression: str, variables: Variables) -> int:
    """Return the value of an integer expression; 0 if it is something else."""
    source = expression.replace("/", "//").replace("////", "//").replace("&&", " and ").replace("||", " or ")
    source = (
        re.sub(r"\$\{?(\w+)\}?", r"\1", source).replace("!=", "≠").replace("!", " not ").replace("≠", "!=")
    )
    try:
        value = _evaluate(ast.parse(source.strip() or "0", mode="eval").body, variables)
        return value if abs(value) < 2**63 else 0
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError):
        return 0


def _evaluate(node: ast.expr, variables: Variables) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return variables.number(node.id)
    if isinstance(node, ast.UnaryOp):
        value = _evaluate(node.operand, variables)
        return (
            int(not value)
            if isinstance(node.op, ast.Not)
            else -value
            if isinstance(node.op, ast.USub)
            else value
        )
    if isinstance(node, ast.BinOp):
        operate = _OPERATIONS[type(node.op)]
        return operate(_evaluate(node.left, variables), _evaluate(node.right, variables))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        compare = _OPERATIONS[type(node.ops[0])]
        return int(compare(_evaluate(node.left, variables), _evaluate(node.comparators[0], variables)))
    if isinstance(node, ast.BoolOp):
        values = [bool(_evaluate(value, variables)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("not an integer expression")
