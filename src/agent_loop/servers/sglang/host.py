"""Process of an engine: `python -m agent_loop.servers.sglang.host FD`.

`sgl.Engine` needs a process of its own. It sets signal handlers, the start method of multiprocessing and the event
loop's policy, and keeps its configuration in globals. If a scheduler fails, it kills its whole process tree, including
itself.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from agent_loop.servers.packages import import_engine
from agent_loop.servers.sglang.frames import HEADER, Frame, FrameProtocol
from agent_loop.servers.sglang.versions import SUPPORTED

PARENT_POLL_S = 1.0
REQUEST_CLASSES = {
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
"""Class that SGLang's HTTP server creates from the JSON body, for each path."""


def main(fd: int) -> None:
    """Start the engine that the first frame describes, and run calls until the connection ends."""
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    connection = socket.socket(fileno=fd)
    _, _, kwargs = pickle.loads(_read(connection, HEADER.unpack(_read(connection, HEADER.size))[0]))
    entry = import_engine("sglang.srt.entrypoints.engine", package="sglang", supported=SUPPORTED)
    try:
        arguments = entry.ServerArgs(**kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        refused = pickle.dumps(("refused", 0, str(error)))
        connection.sendall(HEADER.pack(len(refused)) + refused)
        return
    engine = entry.Engine(server_args=arguments)
    try:
        asyncio.run(_serve(engine, connection))
    finally:
        engine.shutdown()


async def _serve(engine: Any, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        handler = _CallHandler(engine.tokenizer_manager, group)
        connection.setblocking(False)
        _, protocol = await loop.create_unix_connection(
            lambda: FrameProtocol(on_frame=handler.handle, on_end=is_over.set), sock=connection
        )
        handler.reply = protocol.send
        for pid in engine.get_all_child_pids():
            loop.add_reader(os.pidfd_open(pid), partial(_exit_with, pid))
        protocol.send(Frame("ready", 0, _describe(engine)))
        await is_over.wait()
        handler.cancel_all()


def _watch_parent(pid: int) -> None:
    """Kill the whole process group when the parent process ends, also while the engine starts and reads no frames."""
    while os.getppid() == pid:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _exit_with(pid: int) -> None:
    """Exit because a process of the engine ended: the engine does not respond any more, and may not notice it."""
    print(f"SGLang's process {pid} ended, and the engine with it", file=sys.stderr, flush=True)
    os._exit(1)


def _describe(engine: Any) -> dict[str, Any]:
    return {
        "vocab_size": engine.tokenizer_manager.model_config.vocab_size,
        "max_req_input_len": engine.tokenizer_manager.max_req_input_len,
        "pids": [os.getpid(), *engine.get_all_child_pids()],
    }


class _CallHandler:
    """Runs calls concurrently and sends their replies."""

    def __init__(self, manager: Any, group: asyncio.TaskGroup) -> None:
        self._manager = manager
        self._group = group
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._structs = import_engine("sglang.srt.managers.io_struct", package="sglang", supported=SUPPORTED)
        self.reply: Any = None

    def handle(self, frame: Frame) -> None:
        if frame.kind == "cancel":
            task = self._tasks.get(frame.call)
            if task is not None:
                task.cancel()
            return
        task = self._tasks[frame.call] = self._group.create_task(self._run(frame))
        task.add_done_callback(lambda _: self._tasks.pop(frame.call, None))

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _run(self, frame: Frame) -> None:
        path, body = frame.value
        try:
            if path == "/generate":
                value = await self._generate(frame.call, body)
            else:
                value = await self._control(path, body)
        except Exception as error:  # noqa: BLE001  (sent to the parent process, which raises it)
            self.reply(Frame("error", frame.call, str(getattr(error, "detail", "") or error or type(error))))
        else:
            self.reply(Frame("end", frame.call, value))

    async def _generate(self, call: int, body: Mapping[str, Any]) -> Any:
        parts = self._manager.generate_request(self._structs.GenerateReqInput(**body), None)
        try:
            if not body["stream"]:
                return await anext(parts)
            async for part in parts:
                self.reply(Frame("part", call, part))
        finally:
            await parts.aclose()

    async def _control(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/abort_request":
            return self._manager.abort_request(rid=body["rid"])
        if path == "/server_info":
            return {"internal_states": await self._manager.get_internal_state()}
        if path == "/v1/loads":
            loads = await self._manager.get_loads(include=["core"])
            return {"loads": [load.to_dict({"core"}) for load in loads]}
        request = getattr(self._structs, REQUEST_CLASSES[path])(**body)
        result = await getattr(self._manager, path.removeprefix("/"))(request)
        if isinstance(result, tuple):
            success, message = cast(tuple[bool, str], result)
            return {"success": success, "message": message}
        return None


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise SystemExit("the parent process closed the connection")
        data += part
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
