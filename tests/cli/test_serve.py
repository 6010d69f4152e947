from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from agent_loop.serve.process import listening_socket
from tests.cli.project import AGENT_LOOP, Command, make_project
from tests.helpers import user

COMMAND = [*AGENT_LOOP, "serve"]

pytestmark = pytest.mark.slow


@dataclass
class ServeProcess:
    process: subprocess.Popen[str]
    url: str = ""
    output: str = ""

    def read_until(self, start: str) -> None:
        """Read the output of the process up to the first line that starts with `start`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            self.url = line.removeprefix("base_url: ").strip() if line.startswith("base_url: ") else self.url
            if line.startswith(start):
                return
        raise AssertionError(f"no line starts with {start!r}: {self.output}")


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[ServeProcess]:
    """Run `agent-loop serve` on a free port until the body ends."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        served = ServeProcess(process)
        served.read_until("Ctrl-C")
        yield served
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    return folder


def test_a_model_is_served_until_ctrl_c_even_in_the_middle_of_a_stream(project: Path) -> None:
    options = ["rollout.num_servers=2", "--max-model-len", "4096", "rollout.engine_kwargs.max_slots=4"]
    with running(project, "model", *options) as served:
        assert "model on 2 servers, contexts of 4096 tokens" in served.output
        with openai.OpenAI(base_url=served.url, api_key="-", max_retries=0) as client:
            reply = client.chat.completions.create(model="model", messages=user("hi"), max_tokens=4)
            assert 1 <= reply.usage.completion_tokens <= 4
            stream = client.completions.create(
                model="model", prompt="hi", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            parts = iter(stream)
            next(parts)
            served.process.send_signal(signal.SIGINT)
            served.read_until("stopping; in-flight requests have")
            next(parts)
            served.process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="is stopping"):
                list(parts)
            output, _ = served.process.communicate(timeout=30)
        assert served.process.returncode == 130, output
        assert "Traceback" not in output
        assert "aborting in-flight requests" in output
        assert output.strip().endswith("stopped")


def test_an_occupied_port_is_reported_before_the_model_loads(shell: Command) -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        result = shell("serve", "no-model", "--port", port, exit_code=2)
    assert f"127.0.0.1:{port} is not available (Address already in use); give another --port" in result.err


def test_without_options_the_context_length_is_that_of_the_model(project: Path, tmp_path: Path) -> None:
    model = tmp_path / "short"
    shutil.copytree(project / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300}))
    with running(tmp_path, "short") as served:
        assert "short on 1 server, contexts of 300 tokens" in served.output
