"""The process in which an engine lives: `python -m agent_loop.servers.sglang.host FD`.

`sgl.Engine` takes over its process: it sets signal handlers, the start method of multiprocessing and the event loop's
policy, keeps its configuration in globals, and when a scheduler is in trouble it kills its whole process tree, itself
included. In a process of its own it may.
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
from agent_loop.servers.sglang.versions import SUPPORTED
from agent_loop.servers.sglang.wire import HEADER, Frame, FrameProtocol

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
"""What SGLang's own HTTP server makes of the bodies that it is sent under these paths."""


def main(fd: int) -> None:
    """Starts the engine that the first frame describes, and answers calls until the other side goes away."""
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    connection = socket.socket(fileno=fd)
    _, _, kwargs = pickle.loads(_read(connection, HEADER.unpack(_read(connection, HEADER.size))[0]))
    entry = import_engine("sglang.srt.entrypoints.engine", package="sglang", supported=SUPPORTED)
    try:
        arguments = entry.ServerArgs(**kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        refusal = pickle.dumps(("refused", 0, str(error)))
        connection.sendall(HEADER.pack(len(refusal)) + refusal)
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
        desk = _Desk(engine.tokenizer_manager, group)
        connection.setblocking(False)
        _, protocol = await loop.create_unix_connection(
            lambda: FrameProtocol(on_frame=desk.take, on_end=is_over.set), sock=connection
        )
        desk.reply = protocol.send
        for pid in engine.get_all_child_pids():
            loop.add_reader(os.pidfd_open(pid), partial(_end_with, pid))
        protocol.send(Frame("ready", 0, _describe(engine)))
        await is_over.wait()
        desk.cancel_all()


def _watch_parent(pid: int) -> None:
    """Ends the whole session with the process that it serves, even while the engine comes up and reads nothing."""
    while os.getppid() == pid:
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _end_with(pid: int) -> None:
    """Without one of its processes an engine answers nothing more, and does not always notice."""
    print(f"SGLang's process {pid} ended, and the engine with it", file=sys.stderr, flush=True)
    os._exit(1)


def _describe(engine: Any) -> dict[str, Any]:
    return {
        "vocab_size": engine.tokenizer_manager.model_config.vocab_size,
        "max_req_input_len": engine.tokenizer_manager.max_req_input_len,
        "pids": [os.getpid(), *engine.get_all_child_pids()],
    }


class _Desk:
    """Answers the calls that come in, all at once."""

    def __init__(self, manager: Any, group: asyncio.TaskGroup) -> None:
        self._manager = manager
        self._group = group
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._structs = import_engine("sglang.srt.managers.io_struct", package="sglang", supported=SUPPORTED)
        self.reply: Any = None

    def take(self, frame: Frame) -> None:
        if frame.kind == "cancel":
            task = self._tasks.get(frame.call)
            if task is not None:
                task.cancel()
            return
        task = self._tasks[frame.call] = self._group.create_task(self._answer(frame))
        task.add_done_callback(lambda _: self._tasks.pop(frame.call, None))

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _answer(self, frame: Frame) -> None:
        path, body = frame.value
        try:
            if path == "/generate":
                value = await self._generate(frame.call, body)
            else:
                value = await self._control(path, body)
        except Exception as error:  # noqa: BLE001  (goes to the other process, which raises it there)
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
            raise SystemExit("nobody is there to serve")
        data += part
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
