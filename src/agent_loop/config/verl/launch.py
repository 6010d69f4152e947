"""Commands that start verl's trainer, in launch scripts and configuration files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import merge_mappings, parse_override, read_yaml, shown
from agent_loop.files.shell import read_script

_KEY = re.compile(
    r"[+~]{0,2}(actor_rollout_ref|algorithm|data|trainer|critic|reward_model|reward|model)(\.\w+)+(=|$)"
)
_PROGRAM = re.compile(r"(verl|recipe)[\w.]*|[\w./-]+\.py")
_CONFIG_OPTIONS = {"--config-path": "path", "-cp": "path", "--config-name": "name", "-cn": "name"}
_OTHER_TRAINERS = {
    "sft": "verl's supervised training; write the sft section of a config.yaml, and run agent-loop sft",
    "generation": "verl's generation; run agent-loop rollout",
    "main_eval": "verl's evaluation; run agent-loop eval",
}


@dataclass(frozen=True, slots=True)
class VerlLaunch:
    """Settings of one start of verl's trainer."""

    program: str
    """Module or file, such as `verl.trainer.main_ppo`; empty for a configuration file."""
    values: Mapping[str, Any]
    """Settings under verl's names, in nested mappings."""
    notes: Sequence[str] = field(default=())
    """Lines for the user about values that the script does not contain."""


def read_launches(
    path: Path, *, arguments: Sequence[str] = (), environment: Mapping[str, str]
) -> list[VerlLaunch]:
    """Return the starts of verl's trainer in a launch script, or the settings in a YAML file.

    Args:
        arguments: Arguments of the script. For a YAML file, `key=value` settings.
        environment: Environment variables of the script.

    Raises:
        ConfigError: The file is missing or not valid, or starts something else.
    """
    if path.suffix in (".yaml", ".yml"):
        given = read_yaml(path, what="config file")
        if not isinstance(given, Mapping) or not _is_verl(cast(Mapping[str, Any], given)):
            raise ConfigError(
                f"{str(path)!r} is not a configuration of verl: it has no section actor_rollout_ref; give the YAML "
                "that verl's trainer reads, or a launch script"
            )
        values = merge_mappings(cast(Mapping[str, Any], given), _parse(arguments))
        return [VerlLaunch("", *_resolve(values))]
    if not path.is_file():
        raise ConfigError(f"launch script {str(path)!r} does not exist; give a shell script or a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"launch script {str(path)!r} cannot be read as text: {error}") from error
    reading = read_script(text, name=str(path), arguments=arguments, environment=environment)
    launches = [_launch(argv, path, environment) for argv in reading.commands if any(map(_KEY.match, argv))]
    if not launches:
        programs = ", ".join(dict.fromkeys(argv[0] for argv in reading.commands)) or "no program at all"
        raise ConfigError(
            f"{str(path)!r} does not start verl's trainer: no command has settings such as "
            f"actor_rollout_ref.model.path=...; it runs {shown(programs)}"
        )
    notes = [f"the variable {name} has no value" for name in reading.unset]
    notes += [f"the output of $({shown(command)}) is taken to be empty" for command in reading.not_run]
    return [VerlLaunch(found.program, found.values, [*found.notes, *notes]) for found in launches]


def _is_verl(values: Mapping[str, Any]) -> bool:
    return "actor_rollout_ref" in values or ("data" in values and "trainer" in values)


def _launch(argv: Sequence[str], path: Path, environment: Mapping[str, str]) -> VerlLaunch:
    start = next(number for number, text in enumerate(argv) if _KEY.match(text))
    programs = [text for text in argv[:start] if _PROGRAM.fullmatch(text)]
    program = programs[-1] if programs else argv[0]
    for part, what in _OTHER_TRAINERS.items():
        if part in program:
            raise ConfigError(f"{str(path)!r} starts {program}, which is {what}")
    options = _config_options(argv)
    notes: list[str] = []
    values: Mapping[str, Any] = {}
    name = options.get("name")
    if name is not None and not (name.endswith("_trainer") and "path" not in options):
        found = _find_config(options.get("path", ""), name, script=path, environment=environment)
        if found is None:
            notes.append(
                f"the configuration {name!r} in {options.get('path', '')!r} was not found, so its settings are missing"
            )
        else:
            values = cast(Mapping[str, Any], read_yaml(found, what="config file"))
    resolved, unresolved = _resolve(merge_mappings(values, _parse(argv)))
    return VerlLaunch(program, resolved, [*notes, *unresolved])


def _config_options(argv: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for number, text in enumerate(argv):
        name, equals, value = text.partition("=")
        if name in _CONFIG_OPTIONS:
            options[_CONFIG_OPTIONS[name]] = value if equals else "".join(argv[number + 1 : number + 2])
    return options


def _find_config(folder: str, name: str, *, script: Path, environment: Mapping[str, str]) -> Path | None:
    """Return the configuration that a command names, in the folder of the command or one above the script."""
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    here = environment.get("PWD", "")
    relative = folder.removeprefix(here).lstrip("/") if here and folder.startswith(here) else folder
    places = [Path(folder), *(parent / relative for parent in script.resolve().parents)]
    return next((place / file for place in places if (place / file).is_file()), None)


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings among the arguments of a command."""
    values: dict[str, Any] = {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[+]{0,2}[a-z_]\w*([.@]\w[\w@/-]*)*", key):
            continue
        try:
            parsed = parse_override(f"{key.lstrip('+')}={value}")
        except ConfigError:
            parsed = parse_override(f"{key.lstrip('+')}={value!r}")
        values = merge_mappings(values, parsed)
    return values


def _resolve(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Resolve `${...}` in the values. A value that cannot be resolved is left out, with a note."""
    plain = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
    if "${" not in repr(plain):
        return plain, []
    tree, notes = OmegaConf.create(plain), list[str]()

    def resolved(node: Any, name: str) -> Any:
        if isinstance(node, Mapping):
            found = {
                key: resolved(inner, f"{name}.{key}" if name else str(key))
                for key, inner in cast(Mapping[str, Any], node).items()
            }
            return {key: inner for key, inner in found.items() if inner is not _MISSING}
        if isinstance(node, str) and "${" in node:
            try:
                value: Any = OmegaConf.select(tree, name)
            except OmegaConfBaseException:
                notes.append(f"{name} is {shown(node)}, which cannot be resolved, so it is left out")
                return _MISSING
            return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        return node

    return cast(dict[str, Any], resolved(plain, "")), notes


_MISSING = object()
