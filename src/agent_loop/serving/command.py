"""A pool from a configuration, served until it is told to stop."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.runtime.concurrency import run_shielded
from agent_loop.servers.factory import create_servers
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.serving.app import ServedModel, create_app
from agent_loop.serving.hosts import answered_hosts
from agent_loop.serving.process import base_url, listening_socket, run_app

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
    """Starts the servers of a configuration and answers requests until a signal comes, which is returned.

    Args:
        name: Of the model, to clients.
        allowed_hosts: Host names to answer to, beside `host` and those of this machine.

    Raises:
        ConfigError: The port is taken, or the configuration does not fit.
        ServerError: An engine did not come up.
    """
    rollout = config.rollout
    with listening_socket(
        host, port
    ) as listener:  # first, so that a taken port is not told after minutes of loading
        template, why_no_tools = _template_of(config)
        servers = create_servers(config.model, rollout=rollout)
        pool = AsyncLLMServerManager(
            servers, request_timeout_s=rollout.request_timeout_s, vocab_size=template.vocab_size
        )
        await pool.start()
        try:
            await pool.wake_up()
            served = ServedModel(
                pool=pool,
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
            async with pool.watching():
                stopped_by = await run_app(create_app(served), listener=listener, tell=console.print)
        finally:
            await run_shielded(pool.close, timeout_s=CLOSE_TIMEOUT_S)
    console.print("stopped")
    return stopped_by


def _template_of(config: Config) -> tuple[ChatTemplate, str]:
    """The model's chat template, and why it is of no use with tools; empty if it is."""
    tool_format = config.rollout.multi_turn.format
    template = load_chat_template(
        config.model.tokenizer_path or config.model.path,
        tool_parser="hermes" if tool_format == "auto" else tool_format,
        chat_template_path=config.model.chat_template_path,
        trust_remote_code=config.model.trust_remote_code,
        encoder=config.model.encoder,
        model_path=config.model.path,
    )
    if tool_format != "auto":
        return template, ""
    try:
        return ChatTemplate(
            template.tokenizer,
            tool_parser="auto",
            media=template.media,
            encoder=config.model.encoder,
            vocab_size=template.vocab_size,
        ), ""
    except ConfigError as error:
        return template, f"this server knows no format of tool calls ({error})"


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
