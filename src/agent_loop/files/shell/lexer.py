"""Split a shell script into words and operators."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent_loop.errors import ConfigError

OPERATORS = (
    ";;&", "<<-", "<<<", "&>>", ";;", "&&", "||", "|&", "<<", ">>", ">&", "<&", "&>", ">|", "<>", ";", "&", "|", "<",
    ">", "(", ")",
)  # fmt: skip
"""Operators, longest first."""
REDIRECTIONS = frozenset({"<<-", "<<<", "&>>", "<<", ">>", ">&", "<&", "&>", ">|", "<>", "<", ">"})
NEWLINE = "\n"
_BREAKS = frozenset(" \t\n;&|<>()")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")


@dataclass(frozen=True, slots=True)
class Token:
    """A word with its quotes and expansions as written, or an operator."""

    text: str
    is_word: bool
    line: int


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a script. Comments and here-documents are left out.

    Raises:
        ConfigError: A quote or a bracket is not closed.
    """
    tokens: list[Token] = []
    delimiters: list[str] = []
    at, line = 0, 1
    while at < len(text):
        char = text[at]
        if char == "\\" and text[at + 1 : at + 2] == "\n":
            at, line = at + 2, line + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = _find(text, "\n", at)
        elif char == "\n":
            tokens.append(Token(NEWLINE, is_word=False, line=line))
            at, line = at + 1, line + 1
            for delimiter in delimiters:
                end = _end_of_document(text, at, delimiter)
                line += text.count("\n", at, end)
                at = end
            delimiters.clear()
        elif operator := _operator_at(text, at):
            tokens.append(Token(operator, is_word=False, line=line))
            at += len(operator)
        else:
            end = end_of_word(text, at)
            word = text[at:end]
            if word.isdigit() and text[end : end + 1] in ("<", ">"):
                at = end  # number of a file descriptor
                continue
            tokens.append(Token(word, is_word=True, line=line))
            line += word.count("\n")
            at = end
            if len(tokens) > 1 and tokens[-2].text in ("<<", "<<-"):
                delimiters.append(word.strip("'\"\\"))
    return tokens


def _operator_at(text: str, at: int) -> str | None:
    return next((operator for operator in OPERATORS if text.startswith(operator, at)), None)


def _find(text: str, what: str, at: int) -> int:
    found = text.find(what, at)
    return len(text) if found < 0 else found


def _end_of_document(text: str, at: int, delimiter: str) -> int:
    while at < len(text):
        end = _find(text, "\n", at)
        if text[at:end].strip() == delimiter:
            return end
        at = end + 1
    return len(text)


def end_of_word(text: str, at: int) -> int:
    """Return the end of the word that starts at `at`: quotes, expansions and array literals included."""
    start = at
    while at < len(text) and text[at] not in _BREAKS:
        at = _end_of_piece(text, at)
        if text[at : at + 1] == "(" and _ARRAY.match(text[start:at]):
            at = end_of_bracket(text, at, "()")
    return at


def _end_of_piece(text: str, at: int) -> int:
    """Return the end of the character, quoted string or expansion at `at`."""
    char = text[at]
    if char == "\\":
        return min(at + 2, len(text))
    if char == "'":
        return _closed(text, "'", at + 1) + 1
    if char == '"':
        return _end_of_double_quotes(text, at + 1)
    if char == "`":
        return _closed(text, "`", at + 1) + 1
    if text.startswith("$'", at):
        return _closed(text, "'", at + 2) + 1
    if text.startswith("$(", at):
        return end_of_bracket(text, at + 1, "()")
    if text.startswith("${", at):
        return end_of_bracket(text, at + 1, "{}")
    return at + 1


def _closed(text: str, mark: str, at: int) -> int:
    found = text.find(mark, at)
    if found < 0:
        raise ConfigError(
            f"the script has a {mark} that is not closed, after {text[max(0, at - 30) : at]!r}; add it"
        )
    return found


def _end_of_double_quotes(text: str, at: int) -> int:
    start = at
    while at < len(text):
        char = text[at]
        if char == '"':
            return at + 1
        at = at + 1 if char == "'" else _end_of_piece(text, at)
    raise ConfigError(f'the script has a " that is not closed, before {text[start : start + 30]!r}; add it')


def end_of_bracket(text: str, at: int, pair: str) -> int:
    """Return the end of the bracketed text whose opening bracket is at `at`. Quoted brackets do not count.

    Raises:
        ConfigError: The bracket is not closed.
    """
    start, depth = at, 0
    while at < len(text):
        char = text[at]
        if char == "#" and pair == "()" and text[at - 1] in " \t\n(":
            at = _find(text, "\n", at)
            continue
        if char == pair[0]:
            depth += 1
        elif char == pair[1]:
            depth -= 1
            if not depth:
                return at + 1
        at = at + 1 if char in pair else _end_of_piece(text, at)
    raise ConfigError(
        f"the script has a {pair[0]} that is not closed, at {text[start : start + 30]!r}; add the {pair[1]}"
    )
