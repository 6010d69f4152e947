"""The workspace of a task: its container, and the tests that judge the result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agent_loop.environments.harbor.folders import ENVIRONMENT
from agent_loop.environments.harbor.task import HarborTask
from agent_loop.errors import ConfigError, DataError
from agent_loop.files.plain_values import merge_mappings
from agent_loop.workspaces.settings import read_workspace

TESTS_FOLDER = "/tests"
SOLUTION_FOLDER = "/solution"
LOG_FOLDER = "/logs/verifier"
TEST_OUTPUT = f"{LOG_FOLDER}/test-stdout.txt"
REWARD_FILE = f"{LOG_FOLDER}/reward"
_TEST_SCRIPT = f"""\
mkdir -p {LOG_FOLDER} /logs/agent /logs/artifacts
rm -f {LOG_FOLDER}/reward.txt {LOG_FOLDER}/reward.json {REWARD_FILE}
chmod +x {TESTS_FOLDER}/test.sh
{TESTS_FOLDER}/test.sh > {TEST_OUTPUT} 2>&1
if [ -e {LOG_FOLDER}/reward.json ]; then cp {LOG_FOLDER}/reward.json {REWARD_FILE}
elif [ -e {LOG_FOLDER}/reward.txt ]; then cp {LOG_FOLDER}/reward.txt {REWARD_FILE}
else tail -c 2000 {TEST_OUTPUT} >&2; exit 1
fi
"""
"""Runs the tests. `reward.json` comes before `reward.txt`. Their exit status does not matter, their reward does."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def task_workspace(task: HarborTask, *, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task's workspace.

    Args:
        task: The task.
        settings: Settings that are merged over those of the task. If they name a `provider`, its class gets the
            settings of the container as the argument `container`.

    Raises:
        ConfigError: The settings are wrong.
        DataError: A variable of the task has no value, or a key of `task.toml` has a value that containers do not take.
    """
    environment, verifier = task.file.environment, task.file.verifier
    container: dict[str, Any] = {
        "cpus": environment.cpus,
        "memory": None if environment.memory_limit_mb is None else f"{environment.memory_limit_mb}m",
        "env": resolve_variables(environment.env, task=task, settings=settings),
        "folder": environment.workdir,
        "image": environment.docker_image,
    }
    if environment.docker_image is None:
        container["dockerfile"] = str(task.folder / ENVIRONMENT)
    check = {
        "command": ["sh", "-c", _TEST_SCRIPT],
        "files": str(task.tests),
        "files_to": TESTS_FOLDER,
        "env": resolve_variables(verifier.env, task=task, settings=settings),
        "reward_file": REWARD_FILE,
        "timeout_s": verifier.timeout_sec,
    }
    given = {
        "container": _without_empty(container),
        "check": _without_empty(check),
        "start_timeout_s": environment.build_timeout_sec,
    }
    try:
        read_workspace(given)
    except ConfigError as error:
        raise DataError(f"task {str(task.folder)!r}: {error}") from error
    merged = merge_mappings(given, settings)
    if merged.get("provider"):
        options: Mapping[str, Any] = merged.get("options") or {}
        merged["options"] = {**options, "container": merged.pop("container")}
    elif not merged.get("container"):
        raise ConfigError(
            "data.workspace takes the container from tasks, whose tests would write to this machine; leave container "
            "as it is, or name a provider"
        )
    read_workspace(merged, where="data.workspace")
    return merged


def resolve_variables(
    env: Mapping[str, str], *, task: HarborTask, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced.

    The values come from `container.env` of the settings, never from the environment of this process, whose secrets a
    task could name.

    Raises:
        DataError: A variable has neither a value nor a default.
    """
    container: Mapping[str, Any] = settings.get("container") or {}
    given: Mapping[str, Any] = container.get("env") or {}

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = given.get(name, default)
        if found is None:
            raise DataError(
                f"task {str(task.folder)!r} needs the variable {name}; give it as container.env.{name} in "
                "data.workspace"
            )
        return str(found)

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}
