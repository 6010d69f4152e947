"""Control flow of a shell script."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Sequence

from agent_loop.errors import ConfigError
from agent_loop.files.shell.conditions import holds
from agent_loop.files.shell.expansion import Expander, Variables, arithmetic
from agent_loop.files.shell.lexer import NEWLINE, REDIRECTIONS, Token


class Statements:
    """Statements of a script. With `active=False`, a statement is only skipped.

    Args:
        tokens: Tokens of the script.
        expander: Expands words.
        variables: Variables, which loops set.
        functions: Functions by name, which definitions add.
        simple: Runs a simple command, and returns whether it succeeded.
    """

    def __init__(
        self,
        tokens: Sequence[Token],
        *,
        expander: Expander,
        variables: Variables,
        functions: dict[str, list[Token]],
        simple: Callable[[Sequence[str]], bool],
    ) -> None:
        self._tokens = tokens
        self._expander = expander
        self._variables = variables
        self._functions = functions
        self._run_simple = simple
        self._at = 0

    def _peek(self, ahead: int = 0) -> str:
        return self._tokens[self._at + ahead].text if self._at + ahead < len(self._tokens) else ""

    def _is_word(self) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at].is_word

    def _next(self) -> str:
        token = self._peek()
        self._at += 1
        return token

    def _accept(self, *texts: str) -> bool:
        if self._at < len(self._tokens) and self._peek() in texts:
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        while self._accept(NEWLINE, ";"):
            pass
        if not self._accept(text):
            line = self._tokens[min(self._at, len(self._tokens) - 1)].line if self._tokens else 1
            raise ConfigError(f"line {line} of the script has {self._peek()!r}, where {text!r} belongs")

    def run(self, *, stop: Collection[str] = (), active: bool = True) -> bool:
        """Run statements up to a word of `stop`, and return whether the last one succeeded.

        Raises:
            ConfigError: A word such as `fi` is missing.
        """
        status = True
        while self._at < len(self._tokens):
            if self._accept(NEWLINE, ";", "&"):
                continue
            if self._peek() in stop:
                break
            before = self._at
            status = self._and_or(active=active)
            self._at += self._at == before  # a stray operator
        return status

    def _and_or(self, *, active: bool) -> bool:
        status = self._pipeline(active=active)
        while self._peek() in ("&&", "||"):
            wants = self._next() == "&&"
            while self._accept(NEWLINE):
                pass
            runs = active and status is wants
            result = self._pipeline(active=runs)
            status = result if runs else status
        return status

    def _pipeline(self, *, active: bool) -> bool:
        is_negated = self._accept("!")
        status = self._command(active=active)
        while self._accept("|", "|&"):
            while self._accept(NEWLINE):
                pass
            self._command(active=active)
        return status is not is_negated

    def _command(self, *, active: bool) -> bool:
        word = self._peek()
        if word == "(" and self._peek(1) == "(":
            return self._arithmetic_command(active=active)
        compound = {
            "if": self._if, "for": self._for, "select": self._for, "while": self._while, "until": self._while,
            "case": self._case, "{": self._group, "(": self._group, "[[": self._test, "function": self._function,
        }.get(word)  # fmt: skip
        if compound is None and self._is_word() and self._peek(1) == "(" and self._peek(2) == ")":
            compound = self._function
        if compound is None:
            return self._simple(active=active)
        status = compound(active=active)
        self._skip_redirections()
        return status

    def _skip_redirections(self) -> None:
        while self._peek() in REDIRECTIONS and not self._is_word():
            self._at += 2

    def _simple(self, *, active: bool) -> bool:
        words: list[str] = []
        while self._at < len(self._tokens):
            if self._is_word():
                words.append(self._next())
            elif self._peek() in REDIRECTIONS:
                self._skip_redirections()
            else:
                break
        return self._run_simple(words) if active and words else True

    def _if(self, *, active: bool) -> bool:
        is_done = False
        while self._accept("if", "elif"):
            runs = active and not is_done
            holds_here = self.run(stop=("then",), active=runs) and runs
            self._expect("then")
            self.run(stop=("elif", "else", "fi"), active=holds_here)
            is_done = is_done or holds_here
        if self._accept("else"):
            self.run(stop=("fi",), active=active and not is_done)
        self._expect("fi")
        return True

    def _for(self, *, active: bool) -> bool:
        self._at += 1
        name, elements = self._next(), list(self._variables.arguments)
        if name == "(":  # for ((...))
            while self._at < len(self._tokens) and self._peek() != "do":
                self._at += 1
            elements = list[str]()
        elif self._accept("in"):
            elements = list[str]()
            while self._is_word():
                word = self._next()
                elements += self._expander.fields(word) if active else ()
        self._expect("do")
        start = self._at
        for element in elements if active else ():
            self._at = start
            self._variables.values[name] = [element]
            self.run(stop=("done",), active=True)
        self._at = start
        self.run(stop=("done",), active=False)
        self._expect("done")
        return True

    def _while(self, *, active: bool) -> bool:
        self._at += 1
        self.run(stop=("do",), active=False)
        self._expect("do")
        self.run(stop=("done",), active=False)
        self._expect("done")
        return True

    def _case(self, *, active: bool) -> bool:
        self._at += 1
        word = self._expander.text(self._next())
        self._expect("in")
        is_done = False
        while self._at < len(self._tokens):
            while self._accept(NEWLINE, ";", ";;", "("):
                pass
            if self._accept("esac"):
                break
            patterns: list[str] = []
            while self._at < len(self._tokens) and not self._accept(")"):
                text = self._next()
                patterns += [self._expander.text(text)] if text != "|" else []
            runs = active and not is_done and any(fnmatch.fnmatchcase(word, p) for p in patterns)
            self.run(stop=(";;", ";;&", "esac"), active=runs)
            is_done = is_done or runs
        return True

    def _group(self, *, active: bool) -> bool:
        end = "}" if self._next() == "{" else ")"
        status = self.run(stop=(end,), active=active)
        self._expect(end)
        return status

    def _function(self, *, active: bool) -> bool:
        self._accept("function")
        name = self._next()
        if self._accept("("):
            self._expect(")")
        while self._accept(NEWLINE):
            pass
        start = self._at
        self._command(active=False)
        if active:
            self._functions[name] = list(self._tokens[start : self._at])
        return True

    def _arithmetic_command(self, *, active: bool) -> bool:
        depth, texts = 0, list[str]()
        while self._at < len(self._tokens):
            text = self._next()
            depth += (text == "(") - (text == ")")
            texts.append(text)
            if not depth:
                break
        return not active or arithmetic(" ".join(texts[2:-2]), self._variables) != 0

    def _test(self, *, active: bool) -> bool:
        self._at += 1
        words: list[str] = []
        while self._at < len(self._tokens) and not self._accept("]]"):
            token = self._next()
            if token != NEWLINE:
                words.append(self._expander.text(token) if active else token)
        return holds(words) if active else True
