"""Loading of objects that a configuration names as `file.py:name`, `module:name` or `module.name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.runtime.describe import short_traceback

USER_MODULE = "agent_loop_user_"
"""Start of the names of modules that were imported from a file."""
_REMEDIES = {
    "starlette": 'agent programs need: pip install "agent-loop[serve]"',
    "uvicorn": 'agent programs need: pip install "agent-loop[serve]"',
    "verl": "import verl's names from agent_loop.integrations.verl (docs/from-verl.md)",
}
"""Remedy in the error for a missing package, by its name."""


def load_object(reference: str, *, key: str) -> Any:
    """Return the object that a reference names.

    Args:
        reference: `path/to/file.py:name`, `package.module:name` or `package.module.name`.
        key: The setting with the reference, for errors.
    """
    source, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    if not source or not name:
        raise ConfigError(f"{key} is {reference!r}; give file.py:name or module:name")
    module = load_module(source, key=key)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            raise ConfigError(
                f"{key} is {reference!r}: {source} has no {name!r}{did_you_mean(name, _names(module))}"
            )
        target = getattr(target, part)
    return target


def load_module(source: str, *, key: str) -> ModuleType:
    """Import a module by its dotted name, or a file by its path. A file is imported once.

    A file may import modules of its folder, which is appended to `sys.path`.
    """
    try:
        return _import(source, key=key)
    except ConfigError:
        raise
    except Exception as error:
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        remedy = f"; {_REMEDIES[missing]}" if missing in _REMEDIES else ""
        raise ConfigError(
            f"{key}: importing {source} raised {type(error).__name__}: {error}{_place(error)}{remedy}"
        ) from error


def import_extra(module: str, *, extra: str, by: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Dotted name of the module.
        extra: Extra that installs the package, as `vision` in `agent-loop[vision]`.
        by: Feature that needs the package, for the error.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f'{by} needs {module}: pip install "agent-loop[{extra}]" ({error})') from error


class _SourceLoader(SourceFileLoader):
    """Compiles a file at each import. Cached bytecode would hide an edit of the same length in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(source: str, *, key: str) -> ModuleType:
    return _import_file(Path(source), key=key) if source.endswith(".py") else importlib.import_module(source)


def _import_file(path: Path, *, key: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{key}: file {str(path)!r} does not exist")
    name = f"{USER_MODULE}{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # the loader gives one
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(error: Exception) -> str:
    """Return the line of user code that raised, for the end of a message."""
    if isinstance(error, SyntaxError):
        return ""  # its message has the line
    file, *code = [line.strip() for line in short_traceback("".join(traceback.format_exception(error)))[:2]]
    return f" ({file}: {code[0]})" if file.startswith("File ") and code else ""


def _names(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]
