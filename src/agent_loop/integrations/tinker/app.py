"""The HTTP application of `agent-loop tinker`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import zstandard
from msgspec import DecodeError, Struct, json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agent_loop.errors import AgentLoopError
from agent_loop.integrations.tinker.adapters import LoraSettings, read_lora
from agent_loop.integrations.tinker.journal import SAMPLE, Reply, Request
from agent_loop.integrations.tinker.losses import load_loss
from agent_loop.integrations.tinker.messages import read_training_data
from agent_loop.integrations.tinker.samplers import SampleRequest
from agent_loop.integrations.tinker.service import (
    SAMPLER,
    SCHEME,
    TRAINING,
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    Service,
    folder_of,
)
from agent_loop.serve.middleware import MISDIRECTED, HostGuard
from agent_loop.serve.routes import check_api_key, route

StructT = TypeVar("StructT", bound=Struct)
Handler = Callable[[HttpRequest], Awaitable[Response]]
POLL_S = 30.0
"""Seconds that a request for a result waits. Clients wait 45 s."""
MAX_BODY_BYTES = 256 * 2**20
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,  # the gradients of chunks are added in their order
    "proto_compress_fwdbwd": True,
    "sample_enable_stuck_detection": False,  # a laptop may take minutes for a batch
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
}
"""Flags of the SDK."""


class CreateSamplingSession(Struct, frozen=True):
    """Request for a sampling session."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfClient(Struct, frozen=True):
    """Request about a training client."""

    model_id: str


class OfPath(Struct, frozen=True):
    """Request about a checkpoint."""

    tinker_path: str


class Retrieve(Struct, frozen=True):
    """Request for the reply to an earlier request."""

    request_id: str


def create_app(service: Service, *, hosts: Iterable[str] | None, api_key: str | None = None) -> Starlette:
    """Return an ASGI application that serves the Tinker API.

    Args:
        service: Open service.
        hosts: Host names that requests may use; None allows any.
        api_key: Key that clients must send; None accepts any.
    """
    api = _Api(service)
    posts: dict[str, Handler] = {
        "client/config": api.client_config,
        "create_session": api.create_session,
        "session_heartbeat": partial(_constant, value={"type": "session_heartbeat"}),
        "sessions/{session}/finish": api.finish_session,
        "telemetry": partial(_constant, value={"status": "accepted"}),
        "create_model": api.create_model,
        "get_info": api.get_info,
        "weights_info": api.weights_info,
        "forward_backward": api.forward_backward,
        "optim_step": api.optim_step,
        "save_weights": partial(api.save_weights, kind="save_weights"),
        "save_weights_for_sampler": partial(api.save_weights, kind="save_weights_for_sampler"),
        "load_weights": api.load_weights,
        "create_sampling_session": api.create_sampling_session,
        "asample": api.sample,
        "retrieve_future": api.retrieve,
        "cancel_future": partial(_constant, value={}),
    }
    gets: dict[str, Handler] = {
        "healthz": partial(_constant, value={"status": "ok"}),
        "get_server_capabilities": api.capabilities,
        "samplers/{sampler}": api.sampler,
        "training_runs": api.training_runs,
        "training_runs/{client}": api.training_run,
        "training_runs/{client}/checkpoints": api.checkpoints,
    }

    def checked(handler: Handler) -> Handler:
        async def handle(request: HttpRequest) -> Response:
            if api_key is not None:
                check_api_key(request, api_key)
            return await handler(request)

        return handle

    app = Starlette(
        routes=[
            *(route("POST", f"/api/v1/{path}", checked(handler)) for path, handler in posts.items()),
            *(route("GET", f"/api/v1/{path}", checked(handler)) for path, handler in gets.items()),
        ],
        exception_handlers={AgentLoopError: _refuse, DecodeError: _refuse},
        middleware=[Middleware(HostGuard, hosts=hosts, refuse=_refuse_host)],
    )
    app.state.stopping = asyncio.Event()
    return app


class _Api:
    """Handlers of the routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def client_config(self, request: HttpRequest) -> Response:
        return _json(CLIENT_CONFIG)

    async def create_session(self, request: HttpRequest) -> Response:
        return _json({"type": "create_session", "session_id": uuid4().hex})

    async def finish_session(self, request: HttpRequest) -> Response:
        self._service.end_session(request.path_params["session"])
        return _json({"type": "session_finish"})

    async def capabilities(self, request: HttpRequest) -> Response:
        base = self._service.base
        model = {
            "model_name": self._service.base_model,
            "max_context_length": base.max_positions,
            "trainable": True,
            "sampleable": True,
        }
        return _json({"supported_models": [model]})

    async def create_model(self, request: HttpRequest) -> Response:
        body, create = await _read(request, CreateModel)
        create.check(self._service.base_model)
        return self._submit(f"{create.session_id}:train:{create.model_seq_id}", 0, "create_model", body)

    async def get_info(self, request: HttpRequest) -> Response:
        _, about = await _read(request, OfClient)
        lora, name = self._service.lora(about.model_id), self._service.base_model
        return _json(
            {
                "type": "get_info",
                "model_data": {"model_name": name, "tokenizer_id": self._service.base.path},
                "model_id": about.model_id,
                "is_lora": True,
                "lora_rank": lora.rank,
                "model_name": name,
            }
        )

    async def weights_info(self, request: HttpRequest) -> Response:
        _, about = await _read(request, OfPath)
        lora = read_lora(folder_of(self._service.root, about.tinker_path))
        fields = {name: getattr(lora, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return _json(
            {"base_model": self._service.base_model, "is_lora": True, "lora_rank": lora.rank, **fields}
        )

    async def forward_backward(self, request: HttpRequest) -> Response:
        body = await _body(request)
        data = read_training_data(body)
        load_loss(data.loss_name, data.loss_settings)
        return self._submit(data.model_id, data.number, "forward_backward", body)

    async def optim_step(self, request: HttpRequest) -> Response:
        body, step = await _read(request, OptimStep)
        return self._submit(step.model_id, step.seq_id, "optim_step", body)

    async def save_weights(self, request: HttpRequest, *, kind: str) -> Response:
        body, save = await _read(request, SaveWeights)
        save.check()
        return self._submit(save.model_id, save.seq_id, kind, body)

    async def load_weights(self, request: HttpRequest) -> Response:
        body, load = await _read(request, LoadWeights)
        folder_of(self._service.root, load.path)
        return self._submit(load.client, load.seq_id or 0, "load_weights", body)

    async def create_sampling_session(self, request: HttpRequest) -> Response:
        _, create = await _read(request, CreateSamplingSession)
        sampler = f"{create.session_id}:sample:{create.sampling_session_seq_id}"
        self._service.create_sampler(sampler, path=create.model_path)
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler})

    async def sampler(self, request: HttpRequest) -> Response:
        sampler = request.path_params["sampler"]
        path = self._service.sampler_weights(sampler) or None
        return _json({"sampler_id": sampler, "base_model": self._service.base_model, "model_path": path})

    async def sample(self, request: HttpRequest) -> Response:
        body, sample = await _read(request, SampleRequest)
        sample.check()
        self._service.sampler_weights(sample.sampling_session_id)
        owner, number = sample.sampling_session_id, sample.seq_id
        sequences = [f"{owner}:{number}:{n}" for n in range(sample.num_samples)]
        return self._submit(owner, number, SAMPLE, body, sample_sequence_ids=sequences)

    async def retrieve(self, request: HttpRequest) -> Response:
        _, retrieve = await _read(request, Retrieve)
        try:
            reply = await self._service.reply(retrieve.request_id, timeout_s=POLL_S)
        except KeyError:
            return _json({"error": f"there is no request {retrieve.request_id!r}"}, status=410)
        if reply is None:
            return _json(
                {"type": "try_again", "request_id": retrieve.request_id, "queue_state": "active"}, status=408
            )
        return _reply(reply)

    async def training_runs(self, request: HttpRequest) -> Response:
        runs = [self._run(client) for client in self._service.clients]
        return _json(
            {"training_runs": runs, "cursor": {"offset": 0, "limit": len(runs), "total_count": len(runs)}}
        )

    async def training_run(self, request: HttpRequest) -> Response:
        return _json(self._run(request.path_params["client"]))

    async def checkpoints(self, request: HttpRequest) -> Response:
        client = request.path_params["client"]
        self._service.lora(client)
        found: list[dict[str, Any]] = []
        for kind, name in ((TRAINING, "training"), (SAMPLER, "sampler")):
            for folder in sorted((self._service.root / client / kind).glob("[!.]*")):
                checkpoint: dict[str, Any] = {
                    "checkpoint_id": f"{kind}/{folder.name}",
                    "checkpoint_type": name,
                    "time": datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat(),
                    "tinker_path": f"{SCHEME}{client}/{kind}/{folder.name}",
                }
                found.append(checkpoint)
        return _json({"checkpoints": found})

    def _run(self, client: str) -> dict[str, Any]:
        lora: LoraSettings = self._service.lora(client)
        folder = self._service.root / client
        changed = folder.stat().st_mtime if folder.exists() else self._service.root.stat().st_mtime
        return {
            "training_run_id": client,
            "base_model": self._service.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": lora.rank,
            "last_request_time": datetime.fromtimestamp(changed, UTC).isoformat(),
        }

    def _submit(self, owner: str, number: int, kind: str, body: bytes, **more: Any) -> Response:
        request = Request(f"{owner}:{number}", owner, kind, body)
        self._service.submit(request)
        fields = {"request_id": request.id} | more
        return _json(fields if kind == SAMPLE else fields | {"model_id": owner})


async def _constant(request: HttpRequest, *, value: dict[str, Any]) -> Response:
    return _json(value)


async def _read(request: HttpRequest, kind: type[StructT]) -> tuple[bytes, StructT]:
    """Return the body of a request, and what it says."""
    body = await _body(request)
    return body, json.decode(body, type=kind)


async def _body(request: HttpRequest) -> bytes:
    body = await request.body()
    if request.headers.get("content-encoding") == "zstd":
        try:
            body = zstandard.ZstdDecompressor().decompress(body, max_output_size=MAX_BODY_BYTES)
        except zstandard.ZstdError as error:
            raise HTTPException(400, f"the body cannot be decompressed: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes; send fewer rows at once")
    return body


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(json.encode(value), status_code=status, media_type="application/json")


def _reply(reply: Reply) -> Response:
    return Response(reply.body, media_type="application/x-protobuf" if reply.is_proto else "application/json")


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    return _json({"error": str(error)}, status=400)


def _refuse_host(request: HttpRequest, message: str) -> Response:
    return _json({"error": f"{message}; allow it with --allowed-host"}, status=MISDIRECTED)
