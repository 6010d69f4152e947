"""The tool `calculator`: parses arithmetic, never evaluates it as Python, and limits time and size."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from agent_loop.errors import ToolError
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import BaseTool, ToolResponse

Number: TypeAlias = int | float

MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Maximum size of an integer, including intermediate results; about 1,200 decimal digits."""
MAX_SCALE = 1000
"""Largest argument of `comb`, `factorial` and `perm`, and largest number of digits for `round`."""

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
        """Evaluate the expression."""
        return ToolResponse(text=calculate(str(parameters["expression"]))), None, {}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression: an integer in full, any other number to 12 digits."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(
            f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's, of odd spellings such as `1or 2`
            tree = ast.parse(expression.strip().translate(_SPELLINGS), mode="eval")
        value = _value(tree.body)
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression: {error.msg}") from error
    except (ValueError, TypeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


_SPELLINGS = str.maketrans(
    {"\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-", "\N{MIDDLE DOT}": "*"}
)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value):
            return _checked(value)
        case ast.Name(name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _checked(_OPERATIONS[type(operation)](_value(left), _value(right)))
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _checked(_called(name, [_value(argument) for argument in arguments]))
        case ast.BinOp(op=ast.BitXor()):
            raise ToolError("^ is not a power here; write **")
        case ast.Tuple():
            raise ToolError("write numbers without commas, as in 1000000")
        case ast.Name(name):
            raise ToolError(f"unknown name {name!r}; the constants are {', '.join(_CONSTANTS)}")
        case ast.Call():
            raise ToolError(
                f"{ast.unparse(node)!r} does not call one of the known functions {', '.join(_FUNCTIONS)}"
            )
        case _:
            raise ToolError(f"{ast.unparse(node)!r} is not arithmetic")


def _called(name: str, arguments: list[Number]) -> Any:
    limited = arguments[1:] if name == "round" else arguments if name in ("comb", "factorial", "perm") else []
    if any(abs(argument) > MAX_SCALE for argument in limited):
        raise ToolError(f"{name} takes numbers up to {MAX_SCALE}")
    return _FUNCTIONS[name](*arguments)


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base not in (-1, 0, 1):
        num_bits = abs(exponent) * (base.bit_length() - 1)
        if num_bits > MAX_BITS and exponent < 0:
            return 0.0
        if num_bits > MAX_BITS:
            raise ToolError(f"the result is too large: over {MAX_BITS} bits")
    return base**exponent


def _checked(value: Any) -> Number:
    """Return a value if it is a real number within the size limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        what = "a complex number" if isinstance(value, complex) else repr(value)
        raise ToolError(f"{what} is not a real number")
    if not math.isfinite(value) if isinstance(value, float) else value.bit_length() > MAX_BITS:
        raise ToolError(f"the result is too large: infinite, or over {MAX_BITS} bits")
    return value


_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
    ast.Pow: _power,
}
_CONSTANTS: Mapping[str, Number] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, max, min, round)},
    **{name: function for name, function in vars(math).items() if callable(function) and name[0] != "_"},
}
