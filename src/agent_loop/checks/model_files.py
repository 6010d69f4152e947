"""Checks of a model's files and its chat template, without loading either."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agent_loop.config import Config
from agent_loop.errors import ChatTemplateError, ConfigError, did_you_mean
from agent_loop.files.file_kinds import MODEL, kind_of, model_in
from agent_loop.files.plain_values import parse_json
from agent_loop.planning.sizes import CONFIG_FILE, hub_folder

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of transformers, which jinja2 does not know."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""Files of which a tokenizer has at least one."""
NOT_HERE = "not on this machine; it will be loaded from the hub"


def check_model(config: Config, *, loads_weights: bool = True) -> str:
    """Return where the model is.

    Args:
        config: The configuration.
        loads_weights: Whether the run loads the model, and not only its tokenizer.

    Raises:
        ConfigError: There is no such folder, and the name is not that of a model of the hub; or files are missing.
    """
    model = config.model
    folder = _folder(model.path, key="model.path")
    if folder is None:
        return f"{model.path}, {NOT_HERE}"
    if loads_weights and not (folder / CONFIG_FILE).is_file():
        inner = model_in(folder)
        such_as = f", such as {str(inner)!r}" if inner is not None else ""
        raise ConfigError(
            f"model.path is {model.path!r}, which has no {CONFIG_FILE}; give the folder of a model{such_as}"
        )
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    tokenizer = _folder(model.tokenizer_path or model.path, key=key)
    if tokenizer is not None and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key} is {model.tokenizer_path or model.path!r}, where there is no tokenizer ({TOKENIZER_FILES[0]}); set "
            "model.tokenizer_path to a folder or a hub name with one"
        )
    return str(folder)


def check_template(config: Config) -> str:
    """Return where the chat template is."""
    path = config.model.chat_template_path
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(f"model.chat_template_path is {path!r}: no such file")
        return _compiled(Path(path).read_text(encoding="utf-8"), where=path)
    name = config.model.tokenizer_path or config.model.path
    key = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
    folder = _folder(name, key=key)
    if folder is None:
        return NOT_HERE
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _compiled(file.read_text(encoding="utf-8"), where=str(file))
    texts = [_template_in(folder / name) for name in ("tokenizer_config.json", "chat_template.json")]
    text = next(filter(None, texts), None)
    if text is None:
        raise ChatTemplateError(
            f"the tokenizer in {str(folder)!r} has no chat template; set model.chat_template_path to a Jinja file"
        )
    return _compiled(text, where=str(folder))


def _folder(name: str, *, key: str) -> Path | None:
    """Return the folder of a model; None if its name is one of the hub that is not on this machine."""
    if not name:
        raise ConfigError(f"{key} is not set; give a folder or a hub name with a model and its tokenizer")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{key} is {name!r}, which is a file; give the folder of a model")
    cached = hub_folder(name)
    if cached is not None:
        return cached
    if HUB_NAME.fullmatch(name) and not name.startswith("."):
        return None
    beside = path.parent if path.parent.is_dir() else Path()
    models = [str(each) for each in beside.iterdir() if kind_of(each) is MODEL]
    raise ConfigError(
        f"{key} is {name!r}, which is neither a folder nor a hub name such as Qwen/Qwen3-0.6B; give the folder of a "
        f"model{did_you_mean(name, models)}"
    )


def _template_in(file: Path) -> str | None:
    """Return the chat template in a JSON file of a tokenizer: a text, or one of several by name."""
    try:
        values: Any = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    template: Any = cast(dict[str, Any], values).get("chat_template") if isinstance(values, dict) else None
    if isinstance(template, list):
        named = {each["name"]: each["template"] for each in cast(list[dict[str, str]], template)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None


def _compiled(text: str, *, where: str) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    )
    try:
        environment.parse(GENERATION.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template of {where} is not valid Jinja: {error.message} at line {error.lineno}"
        ) from error
    return where
