"""Rewriting of chat templates, so that their searches for control tokens work on masked text."""

from __future__ import annotations

import re
from collections.abc import Callable

_LITERAL = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_TAG = re.compile(rf"\{{#.*?#\}}|\{{[{{%](?:{_LITERAL}|[^'\"])*?[%}}]\}}", re.DOTALL)
_STRING = re.compile(_LITERAL, re.DOTALL)
_METHODS = (
    "split|rsplit|partition|rpartition|startswith|endswith|removeprefix|removesuffix|find|rfind|index|rindex"
    "|count|replace"
)
_CALL = re.compile(rf"(?P<join>\.)\s*(?:{_METHODS})\s*\(\s*$|(?P<filter>\|)\s*replace\s*\(\s*$")
_IN = re.compile(r"\s*(?:not\s+)?in\s+(?=[A-Za-z_(])")
_NAME = re.compile(r"\s*[A-Za-z_]\w*|(?=\()")
_MORE = re.compile(r"\s*\.\s*\w+")
_OPENING = ("(", "[")


def searching_masked_text(chat_template: str, *, mask: Callable[[str], str]) -> str:
    """Return the template with its searches changed to work on masked text.

    Templates extract reasoning from an assistant's content: `'</think>' in content`, `content.split('</think>')`. The
    rewritten template first replaces the string in the searched text by its masked form, and then searches for the
    masked form. So a text that the template copies contains no control token.

    Args:
        chat_template: The source of a Jinja template.
        mask: Applied to the strings.
    """

    def rewritten(tag: re.Match[str]) -> str:
        return tag[0] if tag[0].startswith("{#") else _with_masked_searches(tag[0], mask)

    return _TAG.sub(rewritten, chat_template)


def _with_masked_searches(code: str, mask: Callable[[str], str]) -> str:
    """Return the rewritten code of one tag. Changes start at the end, so that earlier positions stay valid."""
    for found in reversed(list(_STRING.finditer(code))):
        masked = mask(found[0])
        if masked == found[0]:
            continue
        (start, end), replaced = found.span(), f"replace({found[0]}, {masked})"
        if (call := _CALL.search(code, 0, start)) is not None:
            join = call["join"] or call["filter"]
            before, opening = code[: call.start()], code[call.start() : start]
            code = f"{before}{join}{replaced}{opening}{masked}{code[end:]}"
        elif (word := _IN.match(code, end)) is not None:
            operand_end = _operand_end(code, word.end())
            code = f"{code[:start]}{masked}{code[end:operand_end]}|{replaced}{code[operand_end:]}"
    return code


def _operand_end(code: str, start: int) -> int:
    """Return the end of an operand: a name or a parenthesis, and the attributes, items and calls after it."""
    name = _NAME.match(code, start)
    end = start if name is None else name.end()
    while True:
        if (more := _MORE.match(code, end)) is not None:
            end = more.end()
        elif code[end : end + 1] in _OPENING:
            end = _closed(code, end)
        else:
            return end


def _closed(code: str, start: int) -> int:
    """Return the position after the bracket that closes the bracket at `start`."""
    depth, position = 0, start
    while position < len(code):
        if (string := _STRING.match(code, position)) is not None:
            position = string.end()
            continue
        depth += (code[position] in "([") - (code[position] in ")]")
        position += 1
        if not depth:
            break
    return position
