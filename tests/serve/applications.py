"""Helpers that run an application on a real port, in its own thread."""

from __future__ import annotations

import asyncio
import copy
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_loop.chat.template import ChatTemplate
from agent_loop.serve.app import ServedModel, create_app
from agent_loop.serve.process import AppServer, base_url, listening_socket
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.pool import ServerPool
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.types import TokenChunk
from tests.helpers import hermes_template, small_tokenizer

ResultT = TypeVar("ResultT")
MODEL = "tiny"
TIMEOUT_S = 30.0


class SpellingServer(ScriptedServer):
    """Server that sends its replies in order, token by token, and repeats the last one.

    With `hangs`, it never sends the last token.
    """

    abilities = ScriptedServer.abilities | {Ability.STREAMING}

    def __init__(self, *replies: ScriptedReply, hangs: bool = False) -> None:
        super().__init__(lambda _: replies[min(len(self.requests), len(replies)) - 1])
        self._hangs = hangs

    async def stream(
        self, prompt_ids, sampling_params, request_id, *, attachments=()
    ) -> AsyncGenerator[TokenChunk]:
        async with aclosing(super().stream(prompt_ids, sampling_params, request_id)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(0)
                if self._hangs and chunk.stop_reason is not None:
                    await self._aborts[request_id].wait()
                yield chunk


@cache
def tiny_lm() -> Any:
    """Return a random model with the vocabulary of the small tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(small_tokenizer()),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=small_tokenizer().eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).eval()


def embedded(
    name: str = "embedded-0", *, tokenizer_path: str | None = None, **settings: Any
) -> EmbeddedServer:
    """Return a server with a random model. With the path of its tokenizer, the server honours JSON schemas."""
    model = copy.deepcopy(tiny_lm())
    config = EmbeddedConfig(**{"max_model_len": 256, "max_slots": 64, **settings})
    return EmbeddedServer(model, name=name, config=config, tokenizer_path=tokenizer_path)


@dataclass(frozen=True)
class ServedApp:
    """Running application, seen from another thread."""

    url: str
    manager: AsyncLLMServerManager
    loop: asyncio.AbstractEventLoop

    def run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the application's event loop."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(TIMEOUT_S)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds on the application's event loop."""

        async def check() -> bool:
            return condition()

        ends_at = time.monotonic() + TIMEOUT_S
        while not self.run(check()):
            assert time.monotonic() < ends_at, "the condition never held"


@contextmanager
def serve_app(
    servers: Sequence[AsyncServerBase] | ServerPool,
    *,
    template: ChatTemplate | None = None,
    request_timeout_s: float | None = None,
    **options: Any,
) -> Iterator[ServedApp]:
    """Serve a pool on a free port until exit."""
    started: queue.SimpleQueue[tuple[ServedApp, AppServer] | BaseException] = queue.SimpleQueue()

    async def main() -> None:
        manager = AsyncLLMServerManager(servers, request_timeout_s=request_timeout_s)
        served = ServedModel(manager=manager, template=template or hermes_template(), model=MODEL, **options)
        app_server = AppServer(create_app(served))
        with listening_socket("127.0.0.1", 0) as listener:
            url = base_url(listener, host="127.0.0.1")
            await manager.pool.start()
            started.put((ServedApp(url, manager, asyncio.get_running_loop()), app_server))
            await app_server.serve(sockets=[listener])
            await manager.pool.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            started.put(error)
            raise

    thread = threading.Thread(target=run, name="served-app")
    thread.start()
    result = started.get(timeout=TIMEOUT_S)
    if isinstance(result, BaseException):
        raise result
    served_app, app_server = result
    try:
        yield served_app
    finally:
        app_server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
