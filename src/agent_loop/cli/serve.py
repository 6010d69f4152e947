"""`agent-loop serve`: serve a pool of LLM servers with the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agent_loop.cli.arguments import (
    EXIT_BY_SIGNAL,
    AllowedHostOption,
    HostOption,
    OverridesArgument,
    PortOption,
    refuse_no_model,
)
from agent_loop.config import Config, load_config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json
from agent_loop.runtime.event_loop import run_to_end

NEEDS = ("prometheus_client", "starlette", "uvicorn")
DEFAULT_MAX_MODEL_LEN = 2048
LENGTH_FIELDS = ("max_position_embeddings", "n_positions")
"""Fields of a model's `config.json` that hold its largest context length."""


def serve_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder or hub name.")],
    overrides: OverridesArgument = None,
    *,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            min=2,
            max=2**24,
            help="Maximum tokens of prompt and completion together.",
            show_default=f"limits of the config, or the model's limit, at most {DEFAULT_MAX_MODEL_LEN}",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="AGENT_LOOP_API_KEY",
            help="Key that clients must send. Without a key, every client is accepted.",
        ),
    ] = None,
    allowed_host: AllowedHostOption = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name", help="Model name that clients send.", show_default="name of the model"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")] = None,
) -> None:
    """Serve a model to OpenAI clients: chat with tools, completions of text or token ids, streaming, health, metrics.

    The servers are the same as those of a rollout with these settings. Ctrl-C finishes the requests in flight and
    stops; a second Ctrl-C aborts them.

    Examples:

        agent-loop serve Qwen/Qwen3-0.6B

        agent-loop serve runs/train/checkpoints/step-000080/model --port 8001 rollout.num_servers=2

        agent-loop serve Qwen/Qwen3-4B rollout.engine=vllm --max-model-len 16384 --api-key secret

        agent-loop serve my-model --config config.yaml rollout.engine_kwargs.max_slots=16
    """
    if any(find_spec(package) is None for package in NEEDS):
        raise ConfigError('agent-loop serve needs: pip install "agent-loop[serve]"')
    settings = _settings(config, overrides or (), model=model, max_model_len=max_model_len)

    from agent_loop.serve.command import serve  # late: the extra is optional, and `--help` stays quick

    stopped_by = run_to_end(
        serve(
            settings,
            name=served_model_name or _name_of(model),
            host=host,
            port=port,
            api_key=api_key,
            allowed_hosts=allowed_host or (),
            console=Console(),
        )
    )
    if stopped_by is not None:
        raise typer.Exit(EXIT_BY_SIGNAL + stopped_by)


def _settings(
    path: Path | None,
    overrides: Sequence[str],
    *,
    model: str,
    max_model_len: int | None,
) -> Config:
    options = [f"model.path={model}"]
    refuse_no_model(model)
    longest = _context_length(Path(model))
    if max_model_len is not None and longest is not None and max_model_len > longest:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model has {longest} positions; give at most {longest}"
        )
    if path is None:
        options = ["rollout.multi_turn.format=auto", *options]
        max_model_len = max_model_len or min(DEFAULT_MAX_MODEL_LEN, longest or DEFAULT_MAX_MODEL_LEN)
    if max_model_len is not None:
        # The context holds prompt and response; a prompt may use all but one token of it.
        options += [f"rollout.prompt_length={max_model_len - 1}", "rollout.response_length=1"]
    return load_config(path, overrides=[*options, *overrides])


def _context_length(model: Path) -> int | None:
    """Return the context length in the config of a model folder, or None if it has none."""
    try:
        config: Any = parse_json((model / "config.json").read_bytes())
        parts: list[Mapping[str, Any]] = [config.get("text_config") or {}, config]
        lengths = [part.get(name) for part in parts for name in LENGTH_FIELDS]
    except (OSError, ValueError, AttributeError):
        return None  # (loading the model reports what is wrong)
    return next((length for length in lengths if isinstance(length, int) and length > 1), None)


def _name_of(model: str) -> str:
    return Path(model).resolve().name if Path(model).is_dir() else model
