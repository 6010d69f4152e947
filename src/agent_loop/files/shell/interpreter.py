"""Read the commands that a shell script would run, with their arguments expanded. No program is run."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_loop.errors import ConfigError
from agent_loop.files.shell.conditions import holds
from agent_loop.files.shell.expansion import Expander, Variables
from agent_loop.files.shell.lexer import Token, tokenize
from agent_loop.files.shell.statements import Statements

MAX_STEPS = 100_000
"""Number of commands after which a script is considered endless."""
MAX_CHARACTERS = 1_000_000
"""Longest value of a variable."""
MAX_DEPTH = 20
"""Depth of functions and of scripts in arguments (`bash -c`)."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.DOTALL)
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
_IGNORED = frozenset(
    {
        "set",
        "ulimit",
        "exit",
        "return",
        "trap",
        "wait",
        "source",
        ".",
        "exec",
        "cd",
        "unset",
        "read",
        "true",
        ":",
    }
)
_SHELLS = frozenset({"bash", "sh", "zsh"})


@dataclass(frozen=True, slots=True)
class ScriptReading:
    """Commands of a script, and what could not be known without running it."""

    commands: Sequence[Sequence[str]]
    """Programs with their arguments, in order. Assignments, builtins and functions are not among them."""
    unset: Sequence[str]
    """Variables that are read and have no value."""
    not_run: Sequence[str]
    """Commands whose output is unknown. It is taken to be empty."""


def read_script(
    text: str, *, name: str, arguments: Sequence[str] = (), environment: Mapping[str, str]
) -> ScriptReading:
    """Return the commands of a script. Only variables, arrays, arithmetic, tests and control flow are evaluated.

    Args:
        name: Path of the script, which is `$0`.
        arguments: Arguments of the script, which are `$@`.
        environment: Variables that are set at the start.

    Raises:
        ConfigError: The script is not valid, or does not end.
    """
    variables = Variables({key: [value] for key, value in environment.items()}, arguments, name)
    shell = _Shell(variables)
    shell.run(text)
    return ScriptReading(shell.commands, list(variables.unset), list(shell.not_run))


@dataclass(slots=True)
class _Shell:
    """State of a script."""

    variables: Variables
    commands: list[list[str]] = field(default_factory=list[list[str]])
    not_run: dict[str, None] = field(default_factory=dict[str, None])
    functions: dict[str, list[Token]] = field(default_factory=dict[str, list[Token]])
    output: list[str] | None = None
    """Output of the command in `$(...)` that is being evaluated."""
    steps: int = 0
    depth: int = 0

    def run(self, text: str) -> bool:
        return self.run_tokens(tokenize(text))

    def run_tokens(self, tokens: Sequence[Token]) -> bool:
        if self.depth >= MAX_DEPTH:
            raise ConfigError(f"the script calls itself more than {MAX_DEPTH} deep")
        self.depth += 1
        try:
            return Statements(
                tokens,
                expander=Expander(self.variables, run=self.output_of),
                variables=self.variables,
                functions=self.functions,
                simple=self.simple,
            ).run()
        finally:
            self.depth -= 1

    def output_of(self, text: str) -> str:
        """Return the output of the command in `$(...)`; empty if a program would have to run."""
        saved, self.output = self.output, []
        known, folder = len(self.commands), self.variables.values.get("PWD")
        try:
            tokens = tokenize(text)
            if any(token.text == "|" for token in tokens):
                self.not_run[" ".join(text.split())] = None
                return ""
            self.run_tokens(tokens)
            if len(self.commands) > known and not self.output:
                self.not_run[" ".join(text.split())] = None
            del self.commands[known:]
            return "\n".join(self.output)
        finally:
            self.output = saved
            if folder is not None:
                self.variables.values["PWD"] = folder

    def simple(self, words: Sequence[str]) -> bool:
        """Run a simple command: assignments, then a builtin, a function, or a program that is recorded."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise ConfigError(f"the script runs more than {MAX_STEPS} commands; is one of its loops endless?")
        words = list(words)
        expander = Expander(self.variables, run=self.output_of)
        assignments: list[str] = []
        while words and _ASSIGNMENT.match(words[0]):
            assignments.append(words.pop(0))
        if words and words[0] in _DECLARATIONS:
            assignments += [word for word in words[1:] if _ASSIGNMENT.match(word)]
            words = []
        argv = [text for word in words for text in expander.fields(word)]
        for assignment in assignments:
            if not argv:
                self._assign(assignment, expander)
        return self._call(argv) if argv else True

    def _assign(self, text: str, expander: Expander) -> None:
        found = _ASSIGNMENT.match(text)
        if found is None:
            return
        name, index, is_append = found.group(1), found.group(2), bool(found.group(3))
        value, old = text[found.end() :], self.variables.values.get(name, [])
        if value.startswith("(") and value.endswith(")"):
            words = [token.text for token in tokenize(value[1:-1]) if token.is_word]
            elements = [field for word in words for field in expander.fields(word)]
            self.variables.values[name] = [*old, *elements] if is_append else elements
        elif index is not None:
            self.variables.values[name] = [*old, expander.text(value)]
        else:
            if max(map(len, [*self.variables.values.get(name, []), ""])) > MAX_CHARACTERS:
                raise ConfigError(
                    f"the variable {name} of the script has more than {MAX_CHARACTERS} characters"
                )
            before = "".join(old[:1]) if is_append else ""
            self.variables.values[name] = [before + expander.text(value), *(old[1:] if is_append else [])]

    def _call(self, argv: list[str]) -> bool:
        name = argv[0]
        if name in ("[", "test"):
            return holds(argv[1:-1] if name == "[" else argv[1:])
        if name in self.functions:
            saved, self.variables.arguments = self.variables.arguments, argv[1:]
            try:
                return self.run_tokens(self.functions[name])
            finally:
                self.variables.arguments = saved
        if name == "eval" or (name in _SHELLS and "-c" in argv[1:-1]):
            return self.run(" ".join(argv[1:]) if name == "eval" else argv[argv.index("-c") + 1])
        if name == "shift":
            self.variables.arguments = self.variables.arguments[int(argv[1]) if len(argv) > 1 else 1 :]
        elif name == "set" and "--" in argv:
            self.variables.arguments = argv[argv.index("--") + 1 :]
        elif name == "cd" and self.output is not None:
            self.variables.values["PWD"] = [_joined(self._folder(), argv[-1])]
        elif name == "false":
            return False
        elif name in _IGNORED:
            return True
        elif self.output is not None and name in _PRINTERS:
            self.output.append(_PRINTERS[name](argv[1:], self._folder()))
        elif name not in ("echo", "printf"):
            self.commands.append(argv)
            return self.output is None and name not in ("command", "which")
        return True

    def _folder(self) -> str:
        return "".join(self.variables.values.get("PWD", [os.getcwd()])[:1])


def _joined(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _last(arguments: Sequence[str]) -> str:
    return next((argument for argument in reversed(arguments) if not argument.startswith("-")), "")


_PRINTERS: Mapping[str, Callable[[Sequence[str], str], str]] = {
    "echo": lambda arguments, _: " ".join(a for a in arguments if a not in ("-n", "-e")),
    "printf": lambda arguments, _: (
        " ".join(arguments[1:]) if arguments[:1] == ["%s"] else "".join(arguments[:1])
    ),
    "pwd": lambda _, folder: folder,
    "dirname": lambda arguments, _: posixpath.dirname(_last(arguments)) or ".",
    "basename": lambda arguments, _: posixpath.basename((arguments or [""])[0].rstrip("/")).removesuffix(
        arguments[1] if len(arguments) > 1 else "\0"
    ),
    "realpath": lambda arguments, folder: _joined(folder, _last(arguments)),
    "readlink": lambda arguments, folder: _joined(folder, _last(arguments)),
    "date": lambda arguments, _: time.strftime(_last(arguments).lstrip("+") or "%c"),
}
"""Programs whose output is known."""
