"""Settings of workspaces, as a row's column `workspace` or the argument of a loop or tool gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from agent_loop.config.validation import parse_section
from agent_loop.config.values import Name, Positive, PositiveSeconds, Section
from agent_loop.errors import ConfigError
from agent_loop.runtime.describe import describe_value

Network = Literal["gateway", "none", "host"]
Size = Annotated[str, Field(pattern=r"^[0-9]+[bkmgBKMG]?$")]
"""Bytes with an optional unit, such as `512m`."""


class GitSettings(Section):
    """A git repository at a commit."""

    url: Name
    """URL or path of the repository. It is cloned once per process; commits that the clone has need no network."""
    commit: str = "HEAD"
    """Commit, tag or branch to check out."""


class ContainerSettings(Section):
    """A container of Podman or Docker."""

    runtime: Literal["podman", "docker"] = "podman"
    image: str = ""
    """Name of an image."""
    dockerfile: str = ""
    """Folder with a Dockerfile, or the path of a Dockerfile, instead of `image`. Built once for each content."""
    build_args: dict[str, str] = {}
    """Arguments of the build."""
    network: Network = "gateway"
    """What programs inside reach: nothing but the gateway, nothing at all, or the network of the host."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Number of CPUs, such as 0.5."""
    memory: Size | None = None
    """Memory, such as `512m`."""
    pids: Positive | None = None
    """Number of processes and threads."""
    lifetime_s: PositiveSeconds = 86_400.0
    """Time after which the container ends by itself, even if the process that started it is gone."""
    mounts: tuple[str, ...] = ()
    """Bind mounts `host_path:path[:ro]`."""
    user: str = ""
    """User of commands, `name` or `uid[:gid]`. Empty is the image's user."""
    folder: str = ""
    """Working folder. Empty is the image's, or `/workspace` if the image has none."""
    env: dict[str, str] = {}
    """Environment variables of commands."""
    pool: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of containers that are started ahead. A container is used by one trajectory."""
    runtime_args: tuple[str, ...] = ()
    """Arguments before the runtime's subcommand, such as `--runtime=runc`."""
    run_args: tuple[str, ...] = ()
    """Further arguments of `run`, such as `--ulimit=nofile=1024:1024`."""
    build_options: tuple[str, ...] = ()
    """Further arguments of `build`, such as `--network=none`."""

    @model_validator(mode="after")
    def _check_image(self) -> ContainerSettings:
        if bool(self.image) == bool(self.dockerfile):
            raise ValueError("give one of image and dockerfile")
        if self.folder and not self.folder.startswith("/"):
            raise ValueError(f"folder is {self.folder!r}; give an absolute path")
        return self


class CheckSettings(Section):
    """How the result of a trajectory is judged."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, run in the workspace after the agent has ended."""
    files: str = ""
    """File or folder that is put into the workspace before the command runs, where the agent did not see it."""
    files_to: str = ""
    """Path in the workspace where `files` are put. Empty is the working folder."""
    folder: str = ""
    """Working folder of the command. Empty is the workspace's."""
    env: dict[str, str] = {}
    """Environment variables of the command."""
    reward_file: str = ""
    """File in the workspace that the command writes: a number, or a JSON object with `reward`. Without it, the reward
    is 1.0 for exit status 0, and 0.0 otherwise."""
    timeout_s: PositiveSeconds = 600.0
    """Time limit of the command. A command that exceeds it is a failure without a reward."""


class WorkspaceSettings(Section):
    """A workspace: one of `folder`, `git`, `container` and `provider`; without any of them, an empty folder.

    `folder` or `git` may be given with `container` or `provider`; the files are then copied into its working folder.
    """

    folder: str = ""
    """Folder that is copied for each trajectory."""
    git: GitSettings | None = None
    container: ContainerSettings | None = None
    provider: str = ""
    """Class of a provider, `file.py:Class` or `module:Class`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the provider's class."""
    env: dict[str, str] = {}
    """Environment variables of commands."""
    check: CheckSettings | None = None
    start_timeout_s: PositiveSeconds = 600.0
    """Time limit for starting the workspace, including the build of an image."""

    @model_validator(mode="after")
    def _check_kind(self) -> WorkspaceSettings:
        if bool(self.folder) + (self.git is not None) > 1:
            raise ValueError("give one of folder and git")
        if (self.container is not None) + bool(self.provider) > 1:
            raise ValueError("give one of container and provider")
        if self.options and not self.provider:
            raise ValueError("options are those of a provider; name it in provider")
        return self


def read_workspace(value: Any, *, where: str = "workspace") -> WorkspaceSettings:
    """Validate the settings of a workspace.

    Args:
        value: A mapping, or its JSON text. Keys with the value None count as absent, since tables have a value of every
            field in every row.
        where: Name of the setting or column in errors.
    """
    if isinstance(value, WorkspaceSettings):
        return value
    return parse_section(WorkspaceSettings, workspace_mapping(value, where=where), where=where)


def workspace_mapping(value: Any, *, where: str) -> dict[str, Any]:
    """Return settings that are not validated yet as a mapping, from a mapping or its JSON text, without nulls."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{where} is text, but not valid JSON ({error}); give a mapping") from error
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where} is {describe_value(value)}; give a mapping, such as {{'folder': 'path/to/folder'}}"
        )
    return _without_nulls(cast(Mapping[str, Any], value))


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }
