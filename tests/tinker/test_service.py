"""The server of the Tinker API: restarts, sampling, and its replies over HTTP."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec import json

from agent_loop.integrations.tinker.adapters import BaseModel
from agent_loop.integrations.tinker.app import create_app
from agent_loop.integrations.tinker.journal import SAMPLE, Reply, Request
from agent_loop.integrations.tinker.messages import message_class
from agent_loop.integrations.tinker.samplers import Samplers
from agent_loop.integrations.tinker.service import Service
from agent_loop.serve.process import listening
from agent_loop.servers.embedded import EmbeddedConfig

CLIENT, SAMPLER = "s:train:0", "s:sample:0"
IDS = [5, 9, 30, 31, 32, 8]
LORA = {"rank": 4, "seed": 1}


@pytest.fixture(scope="module")
def base(model_folder: Path) -> BaseModel:
    return BaseModel(str(model_folder), device="cpu")


@asynccontextmanager
async def opened(root: Path, base: BaseModel, **options: Any) -> AsyncGenerator[Service]:
    config = EmbeddedConfig(max_slots=4, max_model_len=64, device="cpu", deterministic=True)
    samplers = Samplers(base, config=config, max_engines=1, decode=None)
    async with Service(root, base=base, base_model="tiny", samplers=samplers, **options).open() as service:
        yield service


def training_body(number: int, *, ids: list[int] = IDS, loss: str = "cross_entropy") -> bytes:
    message = message_class("ForwardBackwardRequest")(model_id=CLIENT, seq_id=number, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(ids[:-1], np.int32).tobytes()
    targets, weights = np.array(ids[1:], np.int64), np.ones(len(ids) - 1, np.float32)
    for key, array, dtype in (("target_tokens", targets, 2), ("weights", weights, 1)):
        tensor = datum.loss_fn_inputs.add(key=key).value
        tensor.dense, tensor.dtype = array.tobytes(), dtype
    return message.SerializeToString()


def request(number: int, kind: str, **fields: Any) -> Request:
    body = json.encode({"model_id": CLIENT, "seq_id": number, **fields})
    return Request(f"{CLIENT}:{number}", CLIENT, kind, body)


def sample_request(number: int, **fields: Any) -> Request:
    fields = {"num_samples": 2, "sampling_params": {"max_tokens": 4}, **fields}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS[:3]}]}
    body = {"prompt": prompt, "sampling_session_id": SAMPLER, "seq_id": number, **fields}
    return Request(f"{SAMPLER}:{number}", SAMPLER, SAMPLE, json.encode(body))


def requests() -> list[Request]:
    """Return the requests of a training, in which gradients of two backward passes are added up."""
    create = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
    found = [Request(f"{CLIENT}:0", CLIENT, "create_model", json.encode(create))]
    for number in range(1, 10, 3):
        found += [
            Request(f"{CLIENT}:{number}", CLIENT, "forward_backward", training_body(number)),
            Request(
                f"{CLIENT}:{number + 1}", CLIENT, "forward_backward", training_body(number + 1, ids=[7, 8, 9])
            ),
            request(number + 2, "optim_step", adam_params={"learning_rate": 0.01}),
        ]
    found.append(request(10, "save_weights", path="middle"))
    found.append(request(11, "optim_step", adam_params={"learning_rate": 0.01}))
    found.append(request(12, "load_weights", path=f"tinker://{CLIENT}/weights/middle", optimizer=True))
    found.append(Request(f"{CLIENT}:13", CLIENT, "forward_backward", training_body(13)))
    found.append(request(14, "save_weights_for_sampler", sampling_session_seq_id=0))
    found += [sample_request(0), sample_request(1, sampling_params={"max_tokens": 4, "seed": 3})]
    return found


async def reply_of(service: Service, sent: Request) -> Reply:
    service.submit(sent)
    reply = await service.reply(sent.id, timeout_s=30)
    assert reply is not None
    return reply


@pytest.mark.timeout(120)
@pytest.mark.parametrize("save_every_s", [0.0, 1e9])
async def test_a_server_that_was_killed_at_any_request_continues_to_the_last_bit(
    save_every_s: float, base: BaseModel, tmp_path: Path
) -> None:
    expected: dict[str, Reply] = {}
    images: list[Path] = []
    async with opened(tmp_path / "run", base, save_every_s=save_every_s) as service:
        for sent in requests():
            service.submit(sent)
            images.append(tmp_path / f"accepted-{len(images)}")  # what a kill leaves on the disk
            shutil.copytree(service.root, images[-1])
            expected[sent.id] = await reply_of(service, sent)
    for image in images[1::2] if save_every_s else images[::4]:
        async with opened(image, base, save_every_s=save_every_s) as service:
            for sent in requests():  # the client sends all of them again
                assert await reply_of(service, sent) == expected[sent.id], (image.name, sent.kind)


async def test_snapshots_stay_as_they_are_and_share_an_engine(base: BaseModel, tmp_path: Path) -> None:
    async with opened(tmp_path / "run", base) as service:
        for sent in requests():
            await reply_of(service, sent)
        service.create_sampler("base", path=None)
        of_base = Request("base:0", "base", SAMPLE, sample_request(0, prompt_logprobs=True).body)
        first, plain = await asyncio.gather(
            reply_of(service, sample_request(7, prompt_logprobs=True)), reply_of(service, of_base)
        )
        message = message_class("ForwardBackwardRequest").FromString(training_body(20, ids=IDS[:3]))
        message.forward_only = True
        body = message.SerializeToString()
        forward = await reply_of(service, Request(f"{CLIENT}:20", CLIENT, "forward_backward", body))
        step = request(15, "optim_step", adam_params={"learning_rate": 0.1})
        await reply_of(service, step)
        later = await reply_of(service, sample_request(8, prompt_logprobs=True))
    samples = [message_class("SampleResponse").FromString(each.body) for each in (first, later, plain)]
    prompts = [np.frombuffer(each.prompt_logprobs, np.float32)[1:] for each in samples]
    assert np.array_equal(prompts[0], prompts[1])
    assert not np.allclose(prompts[0], prompts[2], atol=1e-3)
    output = message_class("ForwardBackwardOutput").FromString(forward.body)
    logprobs = np.frombuffer(output.loss_fn_outputs[0].fields[0].value.data, np.float32)
    np.testing.assert_allclose(logprobs, prompts[0], atol=1e-5)


async def test_a_client_over_http_gets_results_and_reasons(base: BaseModel, tmp_path: Path) -> None:
    async with (
        opened(tmp_path / "run", base) as service,
        listening(create_app(service, hosts=None, api_key="tml-secret")) as url,
        aiohttp.ClientSession(headers={"X-API-Key": "tml-secret"}) as http,
    ):

        async def post(path: str, body: Any) -> tuple[int, bytes]:
            data = body if isinstance(body, bytes) else json.encode(body)
            async with http.post(f"{url}/api/v1/{path}", data=data) as response:
                return response.status, await response.read()

        async with http.post(f"{url}/api/v1/create_session", headers={"X-API-Key": "other"}) as refused:
            assert refused.status == 401
        session = json.decode((await post("create_session", {}))[1])["session_id"]
        create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": LORA}
        accepted = json.decode((await post("create_model", create))[1])
        assert accepted == json.decode((await post("create_model", create))[1])  # sent again
        status, created = await post("retrieve_future", {"request_id": accepted["request_id"]})
        assert (status, json.decode(created)["model_id"]) == (200, f"{session}:train:0")
        assert (await post("retrieve_future", {"request_id": "lost"}))[0] == 410
        status, reason = await post("forward_backward", training_body(1, loss="stable_reinforce"))
        assert status == 400
        assert b"stable_reinforce" in reason
        status, reason = await post("create_model", create | {"model_seq_id": 1, "base_model": "other"})
        assert status == 400
        assert b"--as other" in reason
