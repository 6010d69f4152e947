"""Training clients and sampling sessions of a server: their queues, their checkpoints, and their journal."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, json

from agent_loop.errors import AgentLoopError, CheckpointError, RequestError
from agent_loop.integrations.tinker.adapters import (
    AdamSettings,
    AdapterTrainer,
    BaseModel,
    LoraSettings,
    read_lora,
)
from agent_loop.integrations.tinker.journal import SAMPLE, Journal, Reply, Request
from agent_loop.integrations.tinker.losses import load_loss
from agent_loop.integrations.tinker.messages import read_training_data, write_outputs
from agent_loop.integrations.tinker.samplers import SampleRequest, Samplers
from agent_loop.runtime.concurrency import BackgroundTasks
from agent_loop.runtime.threads import OneThread
from agent_loop.seeds import derived_seed

logger = logging.getLogger(__name__)
SCHEME = "tinker://"
TRAINING, SAMPLER = "weights", "sampler_weights"
"""Kinds of checkpoints: second parts of their paths."""
MAX_UNNAMED_SNAPSHOTS = 8
"""Snapshots of a client that only a sampling session names. Older ones are removed."""
UNNAMED = "unnamed-"
"""Start of the names of snapshots that the client did not name."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
"""Names of checkpoints and of training clients."""


class CreateModel(Struct, frozen=True):
    """Request for a training client."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: dict[str, Any] = {}

    def check(self, base_model: str) -> None:
        """Refuse what the server does not have."""
        if self.optimizer_config.get("type", "adamw") != "adamw":
            raise RequestError("optimizer_config: this server has adamw; leave it out")
        if self.base_model != base_model:
            raise RequestError(
                f"base_model: this server has {base_model!r}, and not {self.base_model!r}; start it with "
                f"--as {self.base_model}"
            )


class OptimStep(Struct, frozen=True):
    """Request for a step of the optimiser."""

    model_id: str
    seq_id: int
    adam_params: AdamSettings


class SaveWeights(Struct, frozen=True):
    """Request for a checkpoint of a training client, with or without the state of its optimiser."""

    model_id: str
    seq_id: int
    path: str | None = None
    overwrite: bool = False
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"

    def check(self) -> None:
        """Refuse what the server does not have, and names that are not those of a folder."""
        if self.kind != "snapshot":
            raise RequestError(f"kind is {self.kind!r}; this server has snapshots; leave it out")
        if self.path is not None and not NAME.fullmatch(self.path):
            raise RequestError(f"path is {self.path!r}; give letters, digits, dots, dashes and underscores")


class LoadWeights(Struct, frozen=True):
    """Request to load a checkpoint, into a training client or into a new one."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None

    @property
    def client(self) -> str:
        """Name of the training client."""
        return self.model_id or f"{self.session_id}:train:{self.model_seq_id}"


class TrainingClient:
    """Adapters of one client. Executes its requests in their order, in one thread."""

    def __init__(self, name: str, *, base: BaseModel, root: Path) -> None:
        self.name = name
        self.trainer: AdapterTrainer | None = None
        self.is_new = True
        """Whether no request was executed in this process, so that an earlier state has to be restored first."""
        self.has_gradient = False
        """Whether a backward pass came after the last step. Such a state is not saved."""
        self._base = base
        self._root = root

    def restore(self, lora: LoraSettings, *, state: int, requests: Sequence[Request]) -> None:
        """Load the saved state, and repeat the requests after it. Their replies are known."""
        if state:
            self._create(lora).load(self._state_folder(state), has_optimizer=True)
        for request in requests:
            if request.kind in ("create_model", "forward_backward", "optim_step", "load_weights"):
                try:
                    self.execute(request)
                except AgentLoopError:
                    logger.debug("request %s failed again", request.id)

    def execute(self, request: Request) -> Reply:
        """Execute a request and return its reply."""
        execute: Callable[[bytes], Reply] = getattr(self, f"_{request.kind}")
        return execute(request.body)

    def save_state(self, number: int) -> None:
        """Save the state after a request, in place of an earlier one."""
        with _new_folder(self._state_folder(number)) as folder:
            self._trainer.save(folder, has_optimizer=True)

    def remove_states(self, *, before: int) -> None:
        """Remove the states after earlier requests."""
        for folder in (self._root / self.name).glob("state-*"):
            if int(folder.name.partition("-")[2]) < before:
                shutil.rmtree(folder)

    @property
    def can_be_saved(self) -> bool:
        """Whether a saved state would be complete."""
        return self.trainer is not None and not self.has_gradient

    @property
    def _trainer(self) -> AdapterTrainer:
        if self.trainer is None:
            raise RequestError(f"there is no training client {self.name!r}; create it first")
        return self.trainer

    def _create(self, lora: LoraSettings) -> AdapterTrainer:
        self.trainer = AdapterTrainer(self._base, lora, seed=derived_seed(self.name))
        return self.trainer

    def _create_model(self, body: bytes) -> Reply:
        self._create(json.decode(body, type=CreateModel).lora_config or LoraSettings())
        return _reply(type="create_model", model_id=self.name)

    def _forward_backward(self, body: bytes) -> Reply:
        request = read_training_data(body)
        loss = load_loss(request.loss_name, request.loss_settings)
        has_backward = not request.is_forward_only
        self.has_gradient |= has_backward
        logprobs, value = self._trainer.forward(request.data, loss, has_backward=has_backward)
        return Reply(write_outputs(logprobs, metrics={"loss:sum": value}), is_proto=True)

    def _optim_step(self, body: bytes) -> Reply:
        metrics = self._trainer.step(json.decode(body, type=OptimStep).adam_params)
        self.has_gradient = False
        return _reply(metrics=metrics)

    def _save_weights(self, body: bytes) -> Reply:
        request = json.decode(body, type=SaveWeights)
        path = self._save(request, TRAINING, name=request.path or f"{request.seq_id:06}")
        return _reply(type="save_weights", path=path)

    def _save_weights_for_sampler(self, body: bytes) -> Reply:
        request = json.decode(body, type=SaveWeights)
        sampler = None
        if request.sampling_session_seq_id is not None:
            sampler = f"{self.name.partition(':')[0]}:sample:{request.sampling_session_seq_id}"
        path = self._save(request, SAMPLER, name=request.path or f"{UNNAMED}{request.seq_id:08}")
        self._remove_old_snapshots()
        return _reply(type="save_weights_for_sampler", path=path, sampling_session_id=sampler)

    def _load_weights(self, body: bytes) -> Reply:
        request = json.decode(body, type=LoadWeights)
        folder = folder_of(self._root, request.path)
        if request.session_id is not None:
            self._create(read_lora(folder))
        self._trainer.load(folder, has_optimizer=request.optimizer)
        self.has_gradient = False
        return _reply(type="load_weights", path=request.path, model_id=self.name)

    def _save(self, request: SaveWeights, kind: str, *, name: str) -> str:
        folder = self._root / self.name / kind / name
        if folder.exists() and request.path is not None and not request.overwrite and kind == TRAINING:
            raise CheckpointError(
                f"there is a checkpoint {name!r} of this client; give another name, or set overwrite"
            )
        with _new_folder(folder) as new:
            self._trainer.save(new, has_optimizer=kind == TRAINING)
        return f"{SCHEME}{self.name}/{kind}/{name}"

    def _remove_old_snapshots(self) -> None:
        unnamed = sorted((self._root / self.name / SAMPLER).glob(f"{UNNAMED}*"))
        for folder in unnamed[:-MAX_UNNAMED_SNAPSHOTS]:
            shutil.rmtree(folder)

    def _state_folder(self, number: int) -> Path:
        return self._root / self.name / f"state-{number}"


class Service:
    """State of a server: training clients, sampling sessions, and the replies that clients fetch later."""

    def __init__(
        self,
        root: Path,
        *,
        base: BaseModel,
        base_model: str,
        samplers: Samplers,
        save_every_s: float = 30.0,
    ) -> None:
        """Open the journal.

        Args:
            root: Folder of the journal, of the states of clients and of the checkpoints.
            base: Model whose adapters are trained.
            base_model: Name that clients call it.
            samplers: Engines that sample.
            save_every_s: Seconds of work after which the state of a client is saved. A restart repeats what came after.
        """
        self.base = base
        self.base_model = base_model
        self.root = root
        self._samplers = samplers
        self._save_every_s = save_every_s
        self._journal = Journal(root / "journal.sqlite")
        self._thread = OneThread("tinker")
        self._tasks = BackgroundTasks()
        self._queues: dict[str, asyncio.Queue[Request | None]] = {}
        self._pending: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Service]:
        """Continue the requests that an earlier process has not answered, and execute requests until exit."""
        try:
            for request in self._journal.unanswered():
                self._start(request)
            yield self
        finally:
            await self._tasks.close()
            self._thread.shutdown()
            await self._samplers.close()
            self._journal.close()

    @property
    def clients(self) -> Sequence[str]:
        """Names of all training clients."""
        return self._journal.clients()

    def lora(self, client: str) -> LoraSettings:
        """Return the settings of a training client."""
        found = self._journal.client(client)
        if found is None:
            raise RequestError(f"there is no training client {client!r}; create it first")
        return json.decode(found[0], type=LoraSettings)

    def sampler_weights(self, sampler: str) -> str:
        """Return the path of the weights of a sampling session; empty for the base model."""
        weights = self._journal.sampler(sampler)
        if weights is None:
            raise RequestError(f"there is no sampling session {sampler!r}; create it first")
        return weights

    def create_sampler(self, sampler: str, *, path: str | None) -> None:
        """Add a sampling session for a checkpoint, or for the base model."""
        if path is not None:
            folder_of(self.root, path)
        self._journal.set_sampler(sampler, path or "")

    def submit(self, request: Request) -> None:
        """Start a request. A request that was sent again is not started again."""
        added = self._journal.add(request)
        if added is not None:
            self._start(added)

    async def reply(self, request_id: str, *, timeout_s: float) -> Reply | None:
        """Wait for the reply to a request. Return None if it takes longer.

        Raises:
            KeyError: The request is not known.
        """
        if (pending := self._pending.get(request_id)) is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await pending.wait()
            except TimeoutError:
                return None
        reply = self._journal.reply(request_id)
        if reply is None:
            raise KeyError(request_id)
        return reply

    def end_session(self, session: str) -> None:
        """Free the memory of a session's training clients. A later request restores them."""
        for client, queue in list(self._queues.items()):
            if client.startswith(f"{session}:"):
                queue.put_nowait(None)
                del self._queues[client]

    def _start(self, request: Request) -> None:
        self._pending[request.id] = asyncio.Event()
        if request.kind == SAMPLE:
            self._tasks.start(self._sample(request))
            return
        if request.owner not in self._queues:
            queue = self._queues[request.owner] = asyncio.Queue[Request | None]()
            self._tasks.start(self._train(request.owner, queue))
        self._queues[request.owner].put_nowait(request)

    async def _sample(self, request: Request) -> None:
        async def sample() -> Reply:
            path = self.sampler_weights(request.owner)
            given = json.decode(request.body, type=SampleRequest)
            folder = folder_of(self.root, path) if path else None
            return Reply(await self._samplers.sample(given, weights=folder, name=request.id), is_proto=True)

        await self._answer(request, sample())

    async def _train(self, name: str, queue: asyncio.Queue[Request | None]) -> None:
        """Execute the requests of a training client. Clients take turns in the thread, one request at a time."""
        client = TrainingClient(name, base=self.base, root=self.root)
        last, work_s = 0, 0.0
        while (request := await queue.get()) is not None:
            started, last = time.monotonic(), request.number
            is_done = await self._answer(request, self._execute(client, request))
            work_s += time.monotonic() - started
            is_loaded = is_done and request.kind == "load_weights"
            if client.can_be_saved and (is_loaded or work_s > self._save_every_s):
                await self._save_state(client, last)
                work_s = 0.0
        if last and client.can_be_saved:
            await self._save_state(client, last)

    async def _execute(self, client: TrainingClient, request: Request) -> Reply:
        known = self._journal.client(client.name)
        if client.is_new and known is not None:
            requests = self._journal.answered(client.name, after=known[1])
            lora = json.decode(known[0], type=LoraSettings)
            await self._thread.run(client.restore, lora, state=known[1], requests=requests)
        client.is_new = False
        reply = await self._thread.run(client.execute, request)
        if request.kind in ("create_model", "load_weights") and client.trainer is not None:
            self._journal.add_client(client.name, json.encode(client.trainer.lora))
        if request.kind == "save_weights_for_sampler":
            saved = json.decode(reply.body)
            if saved["sampling_session_id"] is not None:
                self._journal.set_sampler(saved["sampling_session_id"], saved["path"])
        return reply

    async def _answer(self, request: Request, call: Coroutine[Any, Any, Reply]) -> bool:
        """Store the reply of a call, or its error. Return whether it succeeded."""
        try:
            reply, is_done = await call, True
        except AgentLoopError as error:
            reply, is_done = _reply(error=str(error), category="user"), False
        except Exception as error:
            logger.exception("request %s failed", request.id)
            message = f"internal error: {type(error).__name__}: {error}; the server's log has the traceback"
            reply, is_done = _reply(error=message, category="server"), False
        self._journal.set_reply(request, reply)
        self._pending.pop(request.id).set()
        return is_done

    async def _save_state(self, client: TrainingClient, number: int) -> None:
        await self._thread.run(client.save_state, number)
        self._journal.set_state(client.name, number)
        await self._thread.run(client.remove_states, before=number)


def folder_of(root: Path, path: str) -> Path:
    """Return the folder of a checkpoint by its path, `tinker://CLIENT/KIND/NAME`."""
    parts = path.removeprefix(SCHEME).split("/")
    is_path = path.startswith(SCHEME) and len(parts) == 3 and parts[1] in (TRAINING, SAMPLER)
    if not is_path or not all(NAME.fullmatch(part) for part in parts):
        raise CheckpointError(
            f"{path!r} is not the path of a checkpoint; give tinker://CLIENT/{TRAINING}/NAME"
        )
    folder = root.joinpath(*parts)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {path!r}")
    return folder


@contextmanager
def _new_folder(folder: Path) -> Generator[Path]:
    """Yield a temporary folder that takes the place of `folder` when the block ends."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _reply(**fields: Any) -> Reply:
    return Reply(json.encode(fields))
