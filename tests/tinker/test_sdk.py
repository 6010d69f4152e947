"""The real SDK against a server in a process of its own, which is killed while it trains."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.timeout(600),
]
START_S = 240


class Server:
    """Server in a process of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = ["--as", "tiny", "--port", str(self.port), "--dir", str(folder), "--deterministic"]
        self._command = [sys.executable, "-m", "agent_loop", "tinker", str(model), *options]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        for _ in range(2 * START_S):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5)
                return
            time.sleep(0.5)
        raise TimeoutError("the server did not start")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[Server, Any]]:
    tinker = pytest.importorskip("tinker")
    server = Server(model, folder)
    os.environ |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    try:
        yield server, tinker.ServiceClient()
    finally:
        server.kill()


def datum(ids: list[int]) -> Any:
    from tinker import types

    inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


def test_training_checkpoints_and_sampling(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path / "run") as (_, service):
        from tinker import types

        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        ids = client.get_tokenizer().encode("What is 3 plus 1? It is 4.")
        losses: list[float] = []
        for _ in range(6):
            result = client.forward_backward([datum(ids), datum(ids[:4])], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            losses.append(result.result().metrics["loss:sum"])
        assert losses[-1] < 0.5 * losses[0]

        def custom(data: Any, logprobs: Any) -> Any:
            loss = -sum(each.sum() for each in logprobs)
            return loss, {"length": float(len(data))}

        metrics = client.forward_backward_custom([datum(ids)], custom).result().metrics
        assert metrics["surrogate_loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)

        path = client.save_state("saved").result().path
        loaded = service.create_training_client_from_state(path).result()
        both = [each.forward([datum(ids)], "cross_entropy").result().metrics for each in (client, loaded)]
        assert both[0] == both[1]

        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(ids[:5])
        params = types.SamplingParams(max_tokens=6, stop=[])
        sampled = sampler.sample(prompt, 2, params, topk_sample_logprobs=2).result().sequences
        for sequence in sampled:
            assert len(sequence.tokens) == 6
            whole = ids[:5] + list(sequence.tokens)
            scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
            assert scored[0] is None
            trained = client.forward([datum(whole)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
            np.testing.assert_allclose(scored[5:], sequence.logprobs, atol=1e-4)
            np.testing.assert_allclose(trained.to_numpy(), scored[1:], atol=1e-4)


def test_a_client_does_not_notice_that_the_server_was_killed(model_folder: Path, tmp_path: Path) -> None:
    with serving(model_folder, tmp_path / "run") as (server, service):
        from tinker import types

        def train(*, is_killed: bool) -> list[Any]:
            client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
            found: list[Any] = []
            for step in range(6):
                result = client.forward_backward([datum([5, 9, 30, 31, 8])], "cross_entropy")
                taken = client.optim_step(types.AdamParams(learning_rate=5e-3))
                if is_killed and step in (1, 4):
                    server.kill()
                    server.start()
                output = result.result().loss_fn_outputs[0]["logprobs"].to_numpy().tobytes()
                found.append((output, taken.result().metrics))
            return found

        assert train(is_killed=True) == train(is_killed=False)
