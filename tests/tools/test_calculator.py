from __future__ import annotations

import ast
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.errors import ToolError
from agent_loop.tools.calculator import MAX_CHARACTERS, calculate


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("(3 + 4) * sqrt(16)", "28"),
        ("7 // 2 + 7 % 3 - -2 ** 2", "8"),
        ("0.1 + 0.2", "0.3"),
        ("6 / 3", "2"),
        ("3 \N{MULTIPLICATION SIGN} 4 \N{DIVISION SIGN} 2 \N{MINUS SIGN} 1", "5"),
        ("max(2, 3, min(9, 8))", "8"),
        ("round(2.567, 1)", "2.6"),
        ("factorial(20)", "2432902008176640000"),
        ("cos(pi)", "-1"),
        ("log(e ** 2)", "2"),
        ("1_000 + 0x10", "1016"),
    ],
)
def test_arithmetic(expression: str, answer: str) -> None:
    assert calculate(expression) == answer


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9", "too large"),
        ("factorial(100000)", "numbers up to"),
        ("exp(1000)", "math range error"),
        ("1e308 * 10", "too large"),
        ("round(1, 10 ** 9)", "numbers up to"),
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("2 ^ 3", "write [*][*]"),
        ("1,000 + 1", "without commas"),
        ("1 +", "not an arithmetic expression"),
        ("\0", "null bytes"),
        ("x + 1", "constants are pi, e"),
        ("'a' * 3", "not a real number"),
        ("1 if 2 else 3", "not arithmetic"),
        ("max()", "no value"),
        ("max(1, key=2)", "does not call one of the known functions"),
        ("__import__('os').system('x')", "does not call one of the known functions"),
        ("-" * 999 + "1", "has no value"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression|has no value"),
        ("1" * (MAX_CHARACTERS + 1), "characters"),
    ],
)
def test_an_expression_without_a_value_is_an_error_at_once(expression: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(ToolError, match=message):
        calculate(expression)
    assert time.process_time() - started < 0.2


numbers = st.integers(0, 10**6).map(str) | st.floats(0, 1e6).map(repr)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" + ", " - ", " * "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        inner.map("abs({})".format),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(expressions)
def test_results_agree_with_python(expression: str) -> None:
    assert float(calculate(expression)) == pytest.approx(eval(expression), rel=1e-11)


names = st.sampled_from(["sqrt", "factorial", "comb", "max", "round", "exp", "pi", "open", "__import__"])
pieces = st.lists(
    numbers | names | st.sampled_from([*"+-*/%()., ^!'[]{}:=", "**", "//", " if ", "lambda"]), max_size=25
)


@settings(deadline=None)
@given(st.text(max_size=60) | pieces.map("".join))
def test_any_text_quickly_gives_a_finite_number_or_an_error(text: str) -> None:
    started = time.process_time()
    try:
        value = ast.literal_eval(calculate(text))
    except ToolError:
        pass
    else:
        assert math.isfinite(value) if isinstance(value, float) else value.bit_length() <= 4096
    assert time.process_time() - started < 0.5
