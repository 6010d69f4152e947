"""The tool `calculator`: parses arithmetic, never evaluates it as Python, and limits time and size."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from agent_loop.errors import ToolError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse

Number: TypeAlias = int | float

MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Maximum size of an integer, including intermediate results; about 1,200 decimal digits."""
MAX_SCALE = 1000
"""Largest argument of `comb`, `factorial` and `perm`, and largest number of digits for `round`."""
SIGNIFICANT_DIGITS = 12
"""Digits of a result that is not an integer."""

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": (
            "Evaluates an arithmetic expression: + - * / // % ** and parentheses; abs, ceil, comb, cos, exp, "
            "factorial, floor, gcd, lcm, log, log10, log2, max, min, perm, round, sin, sqrt, tan and their inverses; "
            "pi and e."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "For example: (3 + 4) * sqrt(16)"}
            },
            "required": ["expression"],
        },
    },
}


class CalculatorTool(BaseTool):
    """Tool that evaluates an arithmetic expression."""

    tool_schema: dict[str, Any] = SCHEMA
    on_replay = OnReplay.RECORDED

    def __init__(self, config: Mapping[str, Any] = {}, tool_schema: Mapping[str, Any] = SCHEMA) -> None:
        super().__init__(config, tool_schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Evaluate the expression.

        Raises:
            ToolError: The expression cannot be parsed, has no real value, or its value is too large.
        """
        return ToolResponse(text=format_number(calculate(str(parameters["expression"])))), None, {}


def calculate(expression: str) -> Number:
    """Return the value of an arithmetic expression.

    Raises:
        ToolError: The expression cannot be parsed or has no real value, or a result on the way is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(
            f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    text = expression.strip().translate(_SPELLINGS)
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's, of odd spellings such as `1or 2`
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"{expression!r} is not an arithmetic expression: {reason}") from error
    try:
        return _value(tree.body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error
    except RecursionError as error:
        raise ToolError("the expression is nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from error


def format_number(value: Number) -> str:
    """Format an integer exactly, and any other number to `SIGNIFICANT_DIGITS`."""
    return str(value) if isinstance(value, int) else f"{value:.{SIGNIFICANT_DIGITS}g}"


_SPELLINGS = str.maketrans(
    {"\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-", "\N{MIDDLE DOT}": "*"}
)


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant):
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        operand = _value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        return _binary(node)
    if isinstance(node, ast.Name):
        if node.id in _CONSTANTS:
            return _CONSTANTS[node.id]
        raise ToolError(f"unknown name {node.id!r}; the constants are {', '.join(_CONSTANTS)}")
    if isinstance(node, ast.Call):
        return _call(node)
    if isinstance(node, ast.Tuple):
        raise ToolError("write numbers without commas, as in 1000000")
    raise ToolError(f"{ast.unparse(node)!r} is not arithmetic")


def _binary(node: ast.BinOp) -> Number:
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow):
        return _checked(_power(left, right))
    if isinstance(node.op, ast.BitXor):
        raise ToolError("^ is not a power here; write **")
    if type(node.op) not in _OPERATIONS:
        raise ToolError(f"{ast.unparse(node)!r} is not arithmetic")
    return _checked(_OPERATIONS[type(node.op)](left, right))


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base not in (-1, 0, 1):
        num_bits = abs(exponent) * (base.bit_length() - 1)
        if num_bits > MAX_BITS and exponent < 0:
            return 0.0
        if num_bits > MAX_BITS:
            raise ToolError(f"the result is too large: over {MAX_BITS} bits")
    return base**exponent


def _call(node: ast.Call) -> Number:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in _FUNCTIONS or node.keywords:
        raise ToolError(
            f"{ast.unparse(node)!r} does not call one of the known functions {', '.join(_FUNCTIONS)}"
        )
    arguments = [_value(argument) for argument in node.args]
    if name in ("comb", "factorial", "perm") and any(abs(argument) > MAX_SCALE for argument in arguments):
        raise ToolError(f"{name} takes numbers up to {MAX_SCALE}")
    if name == "round" and len(arguments) > 1 and abs(arguments[1]) > MAX_SCALE:
        raise ToolError(f"round takes up to {MAX_SCALE} digits")
    return _checked(_FUNCTIONS[name](*arguments))


def _checked(value: Any) -> Number:
    """Return a value if it is a real number within the size limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        what = "a complex number" if isinstance(value, complex) else repr(value)
        raise ToolError(f"{what} is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError(f"the result is too large: over {MAX_BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large or not a number")
    return value


_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
}
_CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": round,
    **{
        name: cast(Callable[..., Any], getattr(math, name))
        for name in [
            "acos",
            "asin",
            "atan",
            "atan2",
            "ceil",
            "comb",
            "cos",
            "degrees",
            "exp",
            "factorial",
            "floor",
            "gcd",
            "hypot",
            "lcm",
            "log",
            "log10",
            "log2",
            "perm",
            "radians",
            "sin",
            "sqrt",
            "tan",
        ]
    },
}
