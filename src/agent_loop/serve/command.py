"""The command `agent-loop serve`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.markup import escape

from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.planning.devices import assign, visible_devices
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.serve.app import ServedModel, create_app
from agent_loop.serve.middleware import answered_hosts
from agent_loop.serve.process import base_url, listening_socket, run_app
from agent_loop.servers.factory import create_servers
from agent_loop.servers.manager import AsyncLLMServerManager

CLOSE_TIMEOUT_S = 60.0


async def serve(
    config: Config,
    *,
    name: str,
    host: str,
    port: int,
    api_key: str | None,
    console: Console,
    allowed_hosts: Sequence[str] = (),
) -> int | None:
    """Start the servers of a configuration and serve requests until SIGINT or SIGTERM."""
    rollout = config.rollout
    # The port comes first, so that a taken port is reported before the model is loaded.
    with listening_socket(host, port) as listener:
        template, why_no_tools = _load_template(config)
        servers = create_servers(
            config.model,
            rollout=rollout,
            placement=config.placement,
            assignment=assign(config, devices=visible_devices(), trains=False),
        )
        manager = AsyncLLMServerManager(
            servers, request_timeout_s=rollout.request_timeout_s, vocab_size=template.vocab_size
        )
        await manager.pool.start()
        try:
            await manager.pool.wake_up()
            served = ServedModel(
                manager=manager,
                template=template,
                model=name,
                max_model_len=rollout.prompt_length + rollout.response_length,
                api_key=api_key,
                hosts=answered_hosts(host, more=allowed_hosts),
                why_no_tools=why_no_tools,
            )
            url = base_url(listener, host=host)
            console.print(
                _greeting(served, url=url, num_servers=len(servers)), highlight=False, soft_wrap=True
            )
            async with manager.pool.watching():
                stopped_by = await run_app(create_app(served), listener=listener, report=console.print)
        finally:
            await run_shielded(manager.pool.close, timeout_s=CLOSE_TIMEOUT_S)
    console.print("stopped")
    return stopped_by


def _load_template(config: Config) -> tuple[ChatTemplate, str]:
    """Return the model's chat template, and the reason why it does not support tools; empty if it does."""
    load = partial(
        load_chat_template,
        config.model.tokenizer_path or config.model.path,
        chat_template_path=config.model.chat_template_path,
        trust_remote_code=config.model.trust_remote_code,
        encoder=config.model.encoder,
        model_path=config.model.path,
        variables=config.model.chat_template_kwargs,
    )
    tool_format = config.rollout.multi_turn.format
    try:
        return load(tool_parser=tool_format), ""
    except ConfigError as error:
        if tool_format != "auto":
            raise
        return load(tool_parser="hermes"), f"the model's format of tool calls is not known ({error})"


def _greeting(served: ServedModel, *, url: str, num_servers: int) -> str:
    servers = "1 server" if num_servers == 1 else f"{num_servers} servers"
    no_tools = f"\n[yellow]without tools[/]: {escape(served.why_no_tools)}" if served.why_no_tools else ""
    key = "the key" if served.api_key else "-"
    return (
        f"{escape(served.model)} on {servers}, contexts of {served.max_model_len} tokens{no_tools}\n"
        f"base_url: [bold]{url}[/]\n\n"
        f"    client = openai.OpenAI(base_url={url!r}, api_key={key!r})\n"
        f"    client.chat.completions.create(model={escape(repr(served.model))}, "
        'messages=[{"role": "user", "content": "Hello"}])\n\n'
        "Ctrl-C stops it."
    )
