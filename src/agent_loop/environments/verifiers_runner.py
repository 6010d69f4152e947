"""Program that runs an environment of verifiers. It runs in an interpreter that has verifiers, without this package.

Its arguments are `rows` or `serve`, and the environment as JSON. `rows` prints one JSON object per task. `serve` prints
a line once the environment is ready, and then runs one rollout per connection to a Unix socket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import types
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT = "agent_loop_chat"
"""Id of the harness of seats that name none."""
BUILT_IN_CHAT = "null"
"""Id of the harness of verifiers with the same chat loop. It starts `uv` and a process for every reply."""
END_S = 5.0
"""Seconds that an environment has to close."""
LIMIT = "this conversation is over"
"""Part of the error with which the gateway refuses a turn beyond a limit of the rollout."""


class SeatError(Exception):
    """The seats of an environment do not fit a trajectory, which has one policy."""


def main() -> None:
    """Run the program."""
    sys.path.pop(0)  # the folder of this file, whose modules would hide others of the same name
    mode, argument = sys.argv[1:]
    spec = json.loads(argument)
    if mode == "rows":
        print_rows(spec)
        return
    # Whatever an environment prints goes to standard error, so that standard output holds the one line alone.
    ready = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(serve(spec, ready))


def print_rows(spec: dict[str, Any]) -> None:
    """Print the tasks of an environment, one JSON object per line."""
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    environment = Environment(spec)
    if spec["size"] is None and not environment.taskset.bounded:
        raise ValueError(f"{spec['env']} has endless tasks; give their number with size")
    for task in environment.taskset:
        print(json.dumps(environment.row(task)), file=rows, flush=True)


async def serve(spec: dict[str, Any], ready: Any) -> None:
    """Run rollouts until the parent closes standard input, or ends."""
    this = asyncio.current_task()
    assert this is not None
    threading.Thread(target=_cancel_at_end_of_input, args=(this,), daemon=True).start()
    environment = Environment(spec)
    async with environment.env.serving():
        server = await asyncio.start_unix_server(environment.answer, spec["socket"], limit=2**26)
        print("ready", file=ready, flush=True)
        await server.serve_forever()


class Environment:
    """An environment of verifiers, with its tasks."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.vf: Any = importlib.import_module("verifiers.v1")
        _add_chat_harness(self.vf)
        self.env = self.vf.load_environment(self._config(_plugin_id(spec["env"]), dict(spec["settings"])))
        self.taskset = self.env.taskset
        self._tasks: list[Any] = []
        self._rest = iter(self.taskset)

    def row(self, task: Any) -> dict[str, Any]:
        """Return the columns of a task."""
        to_message = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
        data = task.data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = data.prompt or ""
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [to_message(message) for message in prompt]
        )
        return {"messages": [*system, *messages], "index": data.idx, "key": task.key, "name": data.name}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the rollout that one line asks for, and write its result as one line. A closed connection cancels it."""
        request = json.loads(await reader.readline())
        rollout = asyncio.ensure_future(self._result(request))
        closed = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait({rollout, closed}, return_when=asyncio.FIRST_COMPLETED)
            if rollout.done():
                writer.write(json.dumps(rollout.result()).encode() + b"\n")
                await writer.drain()
        finally:
            for task in (rollout, closed):
                task.cancel()
            await asyncio.wait({rollout, closed})
            writer.close()

    async def _result(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._rollout(request)
        except Exception as error:  # noqa: BLE001  (reported to the trajectory)
            return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}

    async def _rollout(self, request: dict[str, Any]) -> dict[str, Any]:
        task = self._task(request["index"], key=request["key"])
        variable = f"AGENT_LOOP_KEY_{uuid.uuid4().hex}"
        os.environ[variable] = request["api_key"]
        try:
            client = self.vf.EvalClientConfig(base_url=request["base_url"], api_key_var=variable)
            seats = Seats(request["base_url"])
            context = self.vf.ModelContext(model="agent-loop", client=client)
            episode = await self.env.run_episode(task, context, on_trace=seats.check)
        finally:
            del os.environ[variable]
        if seats.problem:
            raise SeatError(seats.problem)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            last = errors[-1] if errors else None
            text = f"{last.type}: {last.message}" if last else "the episode failed without an error"
            return {"error": text, "traceback": "\n".join(e.traceback or e.message for e in errors)}
        return _score(next(trace for trace in episode.traces if trace.id == seats.trace_id))

    def _task(self, index: int, *, key: str) -> Any:
        self._tasks += itertools.islice(self._rest, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks) or self._tasks[index].key != key:
            raise ValueError(
                f"task {index} of the environment is not the row's task; its version or settings have changed: "
                "create the rows again"
            )
        return self._tasks[index]

    def _config(self, taskset: str, settings: dict[str, Any]) -> Any:
        """Return the configuration, in which seats without a harness chat, and no seat runs in a sandbox of a cloud."""
        vf = self.vf
        settings["taskset"] = {**settings.get("taskset", {}), "id": taskset}
        for name, field in vf.env_config_type(taskset, settings.get("id", "")).model_fields.items():
            if not isinstance(field.default, vf.AgentConfig):
                continue
            seat = dict(settings.get(name, {}))
            own = field.default.harness.id if field.default.harness else ""
            has_bundled = vf.default_harness_id(taskset) == taskset
            harness = seat.get("harness") or {"id": own or ("" if has_bundled else CHAT)}
            if harness.get("id"):
                seat["harness"] = {**harness, "id": CHAT} if harness["id"] == BUILT_IN_CHAT else harness
            if "runtime" not in field.default.model_fields_set:
                seat.setdefault("runtime", {"type": "subprocess"})
            settings[name] = seat
        return vf.resolve_env_config(settings)


class Seats:
    """Finds the run of an episode whose model is the policy. There must be exactly one."""

    def __init__(self, base_url: str) -> None:
        self.trace_id = ""
        self.problem = ""
        self._base_url = base_url

    def check(self, trace: Any) -> None:
        """Check a run of an agent that starts."""
        agent = trace.agent
        if agent.config.client.base_url != self._base_url:
            return
        if not agent.trainable:
            self.problem = (
                f"the seat {agent.name!r} is not trained and would be played by the policy; give it a model of its "
                f"own: {agent.name}.client.base_url and {agent.name}.model"
            )
        elif self.trace_id:
            self.problem = (
                f"the policy would play the seat {agent.name!r} besides another run; a trajectory has one policy: "
                "give all other seats a model of their own (SEAT.client.base_url and SEAT.model)"
            )
        if self.problem:
            raise SeatError(self.problem)
        self.trace_id = trace.id


def _score(trace: Any) -> dict[str, Any]:
    """Return the reward of a run, its parts and its metrics. Without reward functions there is no reward."""
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    result = {**metrics, **parts, "stop_condition": trace.stop_condition}
    return {"result": {**result, "reward": trace.reward} if parts else result}


def _add_chat_harness(vf: Any) -> None:
    """Register the harness `CHAT`: the chat loop of verifiers, run in this process.

    The harness ends its run when a limit of the rollout refuses a further turn, so that the run is scored.
    """
    null: Any = importlib.import_module("verifiers.v1.harnesses.null")
    launch: Any = importlib.import_module("verifiers.v1.harnesses.utils.launch")
    openai: Any = importlib.import_module("openai")
    code = compile(launch.CHAT_PROGRAM_SOURCE, "<chat program of verifiers>", "exec")

    async def prepare(self: Any, runtime: Any) -> None:
        del self, runtime

    async def run(
        self: Any,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        del trace, runtime
        system, prompt = self.resolve_prompt(data)
        arguments = argparse.Namespace(
            base_url=endpoint,
            api_key=secret,
            model=ctx.model,
            system_prompt=system or "",
            prompt=prompt if isinstance(prompt, str) else "",
            initial_messages_file=_messages_file([] if isinstance(prompt, str) else prompt or []),
            mcp_config=_mcp_config(mcp_urls, timeout=self.config.tool_timeout),
            tool_interception_url=tool_interception_url or "",
            bash=False,
            edit=False,
            search=False,
            serper_key="",
            compaction=False,
            summarize_at_tokens=None,
        )
        program: dict[str, Any] = {"__name__": CHAT}
        exec(code, program)
        program["parse_args"] = lambda: arguments
        with contextlib.suppress(_LimitReached):
            try:
                await program["main"]()
            except openai.APIStatusError as error:
                if LIMIT not in str(error):
                    raise
                raise _LimitReached from error
        return vf.ProgramResult(0, "", "")

    module = types.ModuleType(CHAT)
    harness = type("ChatHarness", (null.NullHarness,), {"setup": prepare, "launch": run})
    module.__dict__.update(ChatHarness=harness, __all__=["ChatHarness"])
    sys.modules[CHAT] = module


class _LimitReached(Exception):
    pass


def _messages_file(messages: Iterable[Any]) -> str:
    """Write messages to a file, which the chat program removes. Return its path, or "" without messages."""
    to_message = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    values = [to_message(message) for message in messages]
    if not values:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(values, file)
    return file.name


def _mcp_config(urls: dict[str, str], *, timeout: float) -> str:
    servers = {name: {"url": url, "timeout": timeout} for name, url in urls.items()}
    return json.dumps({"mcpServers": servers}) if servers else ""


def _plugin_id(name: str) -> str:
    """Return the id of an environment. The folder of a file becomes importable, also for the servers of its tools."""
    if not name.endswith(".py"):
        return name
    path = Path(name).resolve()
    sys.path.insert(0, str(path.parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path.parent), os.environ.get("PYTHONPATH")]))
    return path.stem


def _cancel_at_end_of_input(task: asyncio.Task[None]) -> None:
    sys.stdin.read()
    with contextlib.suppress(RuntimeError):  # the event loop has ended already
        task.get_loop().call_soon_threadsafe(task.cancel)
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    main()
