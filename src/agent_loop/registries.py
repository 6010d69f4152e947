"""Registries of user code: functions and classes named by decorators, by `file.py:name`, or in YAML lists."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from agent_loop.config import Section, parse_section
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import read_yaml, shown
from agent_loop.loading import load_object
from agent_loop.runtime.describe import describe_error

EntryT = TypeVar("EntryT", bound=Section)
BaseT = TypeVar("BaseT")


@dataclass(frozen=True, slots=True)
class RegisteredFunction:
    """Function that a setting selects."""

    name: str
    """Value of the setting, for errors."""
    function: Callable[..., Any]
    """The function, or an instance of the class."""


@dataclass(frozen=True, slots=True)
class FunctionRegistry:
    """Functions by name, for a setting that takes a registered name, `file.py:name` or `module:name`.

    An entry may also be a class, which is constructed without arguments. Its instance is called as the function.
    """

    kind: str
    """Kind of the functions, for messages: `advantage estimator`."""
    key: str
    """Name of the setting: `algorithm.adv_estimator`."""
    _functions: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    _options: dict[int, tuple[Callable[..., Any], Any]] = field(
        default_factory=dict[int, tuple[Callable[..., Any], Any]]
    )
    """Options by the function's `id`, because callable objects may be unhashable. The function is stored too, so that
    its id is not reused."""

    def add(self, name: str, function: Callable[..., Any], *, options: Any = None) -> None:
        """Register a function under a name, with options that `options_of` returns.

        A function that has the name already is replaced, with a warning. A built-in function does not replace a user's
        function.
        """
        known, what = self._functions.get(name), f"{self.kind} {name!r}"
        is_built_in = getattr(function, "__module__", "").startswith("agent_loop.")
        if known is not None and is_built_in:
            warn_if_replaced(function, known, what=what, stacklevel=4)
        else:
            warn_if_replaced(known, function, what=what, stacklevel=4)
            self._functions[name] = function
        self._options[id(function)] = function, options

    def has(self, name: str) -> bool:
        """Return whether a function is registered under a name."""
        return name in self._functions

    def options_of(self, reference: str) -> Any:
        """Return the options of a function's decorator; None if the function has none."""
        return self._options.get(id(self._find(reference)), (None, None))[1]

    def load(self, reference: str, *, example: str) -> RegisteredFunction:
        """Return the function that a setting names.

        Args:
            reference: A registered name, `file.py:name` or `module:name`.
            example: Parameters of the call, for example `rewards, *, config`.
        """
        function = self._find(reference)
        where = f"{self.key} is {reference!r}"
        if isinstance(function, type):
            function = construct(cast(Callable[[], Callable[..., Any]], function), where=self.key)
        if not callable(function):
            raise ConfigError(f"{where}, an object of type {type(function).__name__}; name a function")
        _check_signature(function, example=example, where=f"{where}, which")
        return RegisteredFunction(reference, function)

    def _find(self, reference: str) -> Callable[..., Any]:
        if reference in self._functions:
            return self._functions[reference]
        if ":" in reference:
            return load_object(reference, key=self.key)
        raise ConfigError(
            f"{self.key} is {reference!r}: unknown {self.kind}{did_you_mean(reference, self._functions)}; "
            "give file.py:name for a function of your own"
        )


def warn_if_replaced(
    known: Callable[..., Any] | str | None, by: Callable[..., Any], *, what: str, stacklevel: int = 3
) -> None:
    """Warn that a registered class or function is replaced.

    There is no warning if the same class or function is registered again, for example because its module was imported
    twice.

    Args:
        known: The class or function that has the name already, or its full name; None if the name is free.
        by: The class or function that gets the name.
        what: Description of the name, for the message: `agent loop 'tool_agent'`.
        stacklevel: Number of frames up to the caller of the decorator, which the warning refers to.
    """
    before = known if isinstance(known, str) or known is None else _full_name(known)
    if before is not None and before != _full_name(by):
        warnings.warn(f"{what} was {before}; {_full_name(by)} replaces it", stacklevel=stacklevel)


def read_entries(path: str | Path, *, entry_type: type[EntryT], list_key: str, key: str) -> list[EntryT]:
    """Return the entries of the list under `list_key` in a YAML file. OmegaConf's `${...}` are resolved.

    Args:
        path: YAML file, relative to the working directory.
        entry_type: Section that each entry is parsed as.
        list_key: The only key that the file may contain.
        key: Setting that names the file, for the error.
    """
    content = read_yaml(path, what=f"{key}: file", resolve=True)
    entries: Any = cast(dict[str, Any], content).get(list_key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path} has no list under {list_key!r}; begin the file with `{list_key}:`")
    for name in cast(dict[str, Any], content):
        if name != list_key:
            raise ConfigError(f"{path}: unknown key {name!r}{did_you_mean(name, [list_key])}")
    return [
        _parse_entry(entry, entry_type=entry_type, where=f"{path}: {list_key}[{index}]")
        for index, entry in enumerate(cast(list[Any], entries))
    ]


def load_class(reference: str, *, base: type[BaseT], key: str) -> type[BaseT]:
    """Return the class that a reference names."""
    loaded = load_object(reference, key=key)
    if not isinstance(loaded, type):
        raise ConfigError(
            f"{key} is {reference!r}, an object of type {type(loaded).__name__}; "
            f"name a subclass of {base.__name__}"
        )
    if not issubclass(loaded, base):
        raise ConfigError(
            f"{key} is {reference!r}, which is not a subclass of {base.__name__}; derive it from {base.__name__}"
        )
    return loaded


def construct(make: Callable[..., BaseT], *args: Any, where: str) -> BaseT:
    """Construct an object of a user's class."""
    try:
        return make(*args)
    except Exception as error:
        name = getattr(make, "__name__", repr(make))
        if isinstance(error, ConfigError):
            raise ConfigError(f"{where}: constructing {name} raised ConfigError: {error}") from error
        raise ConfigError(f"{where}: constructing {name} raised {describe_error(error)}") from error


def _check_signature(function: Callable[..., Any], *, example: str, where: str) -> None:
    """Raise a ConfigError if a function cannot be called with the parameters of the example."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function has no signature
        return
    positional, _, keywords = example.partition(", *, ")
    try:
        signature.bind(*positional.split(", "), **dict.fromkeys(keywords.split(", ")))
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"{where} has the signature {name}{signature}: {error}; define it as {name}({example})"
        ) from None


def _full_name(named: Callable[..., Any]) -> str:
    return f"{named.__module__}.{getattr(named, '__qualname__', repr(named))}"


def _parse_entry(entry: Any, *, entry_type: type[EntryT], where: str) -> EntryT:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {shown(entry)}; give keys: {', '.join(entry_type.model_fields)}")
    return parse_section(entry_type, cast(Mapping[str, Any], entry), where=where)
