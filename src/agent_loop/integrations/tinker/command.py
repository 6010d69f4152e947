"""The command `agent-loop tinker`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from transformers import AutoTokenizer

from agent_loop.integrations.tinker.adapters import BaseModel
from agent_loop.integrations.tinker.app import create_app
from agent_loop.integrations.tinker.samplers import Samplers
from agent_loop.integrations.tinker.service import Service
from agent_loop.runtime.threads import run_in_thread
from agent_loop.serve.middleware import answered_hosts
from agent_loop.serve.process import base_url, listening_socket, run_app
from agent_loop.servers.embedded import EmbeddedConfig
from agent_loop.storage.exclusive import exclusive_folder
from agent_loop.training.progress import without_progress_of_transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerOptions:
    """Options of the command."""

    model: str
    """Folder or hub name."""
    name: str
    """Name of the model in requests."""
    folder: Path
    host: str
    port: int
    api_key: str | None
    allowed_hosts: Sequence[str]
    engines: int
    max_model_len: int
    deterministic: bool


async def serve(options: TinkerOptions, *, console: Console) -> int | None:
    """Load the model and serve requests until SIGINT or SIGTERM. Return that signal."""
    with (
        listening_socket(options.host, options.port) as listener,
        exclusive_folder(options.folder, name="--dir"),
        without_progress_of_transformers(),
    ):
        base = await run_in_thread(BaseModel, options.model)
        config = EmbeddedConfig(
            max_model_len=min(options.max_model_len, base.max_positions), deterministic=options.deterministic
        )
        tokenizer = await run_in_thread(cast(Any, AutoTokenizer).from_pretrained, options.model)
        samplers = Samplers(base, config=config, max_engines=options.engines, decode=tokenizer.decode)
        service = Service(options.folder, base=base, base_model=options.name, samplers=samplers)
        url = base_url(listener, host=options.host).removesuffix("/v1")
        async with service.open():
            console.print(
                f"{options.model} as {options.name}, checkpoints in {options.folder}\n\n"
                f"export TINKER_BASE_URL={url}\n"
                f"export TINKER_API_KEY={'YOUR_KEY' if options.api_key else 'tml-local'}\n",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )
            app = create_app(
                service,
                hosts=answered_hosts(options.host, more=options.allowed_hosts),
                api_key=options.api_key,
            )
            stopped_by = await run_app(app, listener=listener, report=console.print)
    console.print("stopped")
    return stopped_by
