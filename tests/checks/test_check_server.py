"""The checks of servers pass the servers that run in this process, and find each kind of fault."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from agent_loop.checks import Reference, check_server
from agent_loop.checks import server as suite
from agent_loop.errors import ConfigError, ContractError, ServerError, WeightsError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.scores import TokenScores
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest, ScriptedServer
from agent_loop.testing import run_virtual
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from tests.servers.tiny_embedded import tiny_model

LENGTH = 160
VOCAB = 97


class Embedded(EmbeddedServer):
    """Embedded server without fault. Each subclass has one fault."""

    def __init__(self) -> None:
        super().__init__(make_model(), config=EmbeddedConfig(max_model_len=LENGTH))


SCHEMA_CHECK = "a completion under a schema ends where the text is complete"
"""Skipped for servers without a tokenizer."""


def make_model() -> Any:
    return tiny_model(initializer_range=0.06)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(make_model())


def test_the_embedded_server_follows_the_contract(reference: Reference) -> None:
    report = asyncio.run(check_server(Embedded(), max_model_len=LENGTH, reference=reference))
    report.raise_if_failed()
    assert report.named("skipped") == [SCHEMA_CHECK]


def complete(request: ScriptedRequest) -> ScriptedReply:
    """Return a completion in which each token depends on all earlier tokens."""
    context = request.prompt_ids.tolist()
    num_prompt = len(context)
    for _ in range(request.sampling_params.max_tokens or LENGTH - num_prompt):
        context.append((31 * sum(context) + len(context)) % VOCAB)
    tokens = context[num_prompt:]
    return ScriptedReply(token_ids=tokens, stops=False, latency_s=0.1 * len(tokens))


def test_the_scripted_server_has_the_abilities_that_it_claims() -> None:
    server = ScriptedServer(complete, vocab_size=VOCAB, max_model_len=LENGTH)
    report = run_virtual(check_server(server, max_model_len=LENGTH, vocab_size=VOCAB))
    report.raise_if_failed()
    assert len(report.named("passed")) >= 12


class LosesStopTokens(Embedded):
    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        output = await super().generate(*args, **kwargs)
        if output.stop_reason != "stop":
            return output
        return replace(output, token_ids=output.token_ids[:-1], logprobs=(output.log_probs or [])[:-1])


class ReturnsRawLogProbs(Embedded):
    async def generate(
        self, prompt_ids: IntArray, params: SamplingParams, *args: Any, **kwargs: Any
    ) -> TokenOutput:
        output = await super().generate(prompt_ids, params, *args, **kwargs)
        raw = Reference(make_model()).logprobs(prompt_ids.tolist(), output.token_ids)
        return replace(output, logprobs=raw.tolist())


class IgnoresAbort(Embedded):
    async def abort(self, request_id: str) -> None:
        pass


class IgnoresCancellation(Embedded):
    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        return await asyncio.shield(asyncio.ensure_future(super().generate(*args, **kwargs)))


class LosesUpdates(Embedded):
    async def update_weights(self, weights: Any, *, weight_version: int) -> None:
        own = Reference(make_model()).weights()
        await super().update_weights(own if list(weights) else weights, weight_version=weight_version)


class StampsOldVersions(Embedded):
    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        output = await super().generate(*args, **kwargs)
        return TokenOutput.from_chunks([replace(chunk, weight_version=0) for chunk in output.chunks])


class IgnoresInvalidWeights(Embedded):
    async def update_weights(self, weights: Any, *, weight_version: int) -> None:
        with contextlib.suppress(WeightsError):
            await super().update_weights(weights, weight_version=weight_version)


class MixesRequests(Embedded):
    num_inside = 0

    async def generate(self, prompt_ids: IntArray, *args: Any, **kwargs: Any) -> TokenOutput:
        self.num_inside += 1
        prompt_ids = prompt_ids[::-1].copy() if self.num_inside > 4 else prompt_ids
        try:
            return await super().generate(prompt_ids, *args, **kwargs)
        finally:
            self.num_inside -= 1


class IgnoresSeeds(Embedded):
    async def generate(self, ids: IntArray, params: SamplingParams, *args: Any, **kwargs: Any) -> TokenOutput:
        return await super().generate(ids, structs.replace(params, seed=None), *args, **kwargs)


class RestartsTheSeed(Embedded):
    async def generate(self, ids: IntArray, params: SamplingParams, *args: Any, **kwargs: Any) -> TokenOutput:
        return await super().generate(ids, structs.replace(params, num_sampled=0), *args, **kwargs)


class RaisesOtherErrors(Embedded):
    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        try:
            return await super().generate(*args, **kwargs)
        except ServerError as error:
            raise KeyError("no such thing") from error


class QueuesASecondRequest(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self._lines: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def generate(
        self, ids: IntArray, params: SamplingParams, request_id: str, **kwargs: Any
    ) -> TokenOutput:
        async with self._lines[request_id]:
            return await super().generate(ids, params, request_id, **kwargs)


class ScoresFromTheFirstToken(Embedded):
    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        scores = await super().score(token_ids, top_logprobs=top_logprobs)
        return TokenScores(scores.logprobs[: len(token_ids) - start], scores.top_ids, scores.top_logprobs)


class NeverWakesUp(Embedded):
    async def wake_up(self) -> None:
        pass


FAULTS: Sequence[tuple[type[Embedded], str]] = [
    (LosesStopTokens, "a stop token ends the completion and is returned"),
    (ReturnsRawLogProbs, "completions and their log-probs are those of the reference model"),
    (IgnoresAbort, "an aborted request returns the tokens sampled so far"),
    (IgnoresCancellation, "cancelling a request frees its slot"),
    (LosesUpdates, "completions after a weight update come from the new weights"),
    (StampsOldVersions, "completions after a weight update come from the new weights"),
    (IgnoresInvalidWeights, "invalid weights are refused and change nothing"),
    (MixesRequests, "concurrent requests do not affect each other"),
    (QueuesASecondRequest, "a second request of a session is refused while the first runs"),
    (IgnoresSeeds, "a seed makes a completion reproducible"),
    (RestartsTheSeed, "a resumed completion with a seed samples the same tokens"),
    (RaisesOtherErrors, "invalid requests are refused, and the server keeps running"),
    (ScoresFromTheFirstToken, "scores of a text are its log-probs, from start on and beside other requests"),
    (NeverWakesUp, "a server sleeps only without requests, refuses requests asleep, and wakes up unchanged"),
]


@pytest.mark.nightly(keep=9)
@pytest.mark.flaky(reruns=2)  # some checks compare durations, so that a busy machine can hide a fault
@pytest.mark.parametrize(
    ("faulty", "check"),
    FAULTS,
    ids=[f"{faulty.__name__}-{number}" for number, (faulty, _) in enumerate(FAULTS)],
)
def test_a_fault_is_found(
    faulty: type[Embedded], check: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "SERVER_CHECKS", suite.SERVER_CHECKS.only(check))
    report = asyncio.run(check_server(faulty(), max_model_len=LENGTH, reference=reference, timeout_s=20))
    assert [result.name for result in report.failures] == [check]


def test_a_check_that_hangs_fails() -> None:
    def hang(request: ScriptedRequest) -> ScriptedReply:
        return ScriptedReply(token_ids=[1], latency_s=math.inf)

    report = run_virtual(
        check_server(ScriptedServer(hang), max_model_len=LENGTH, vocab_size=VOCAB, timeout_s=5)
    )
    assert "it took longer than 5 s" in report.failures[0].detail
    with pytest.raises(
        ContractError, match=r"server 'scripted-0': \d+ of \d+ checks failed\n  a completion is valid"
    ):
        report.raise_if_failed()


def test_the_checks_need_a_vocabulary_and_a_long_context() -> None:
    server = ScriptedServer(complete)
    with pytest.raises(ConfigError, match="give vocab_size or a reference"):
        asyncio.run(check_server(server, max_model_len=LENGTH))
    with pytest.raises(ConfigError, match="at least 64"):
        asyncio.run(check_server(server, max_model_len=20, vocab_size=VOCAB))
