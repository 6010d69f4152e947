"""Conformance checks of servers: does an implementation of `AsyncServerBase` follow its contract?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from agent_loop.checks.reference import Reference
from agent_loop.errors import ConfigError, ServerError, WeightsError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.reply_check import ReplyCheck
from agent_loop.servers.scores import checked_scores
from agent_loop.testing.conformance import (
    CheckFailed,
    CheckFunction,
    CheckReport,
    CheckSkipped,
    CheckSuite,
    OnResult,
    require,
)
from agent_loop.types import FloatArray, SamplingParams, TokenChunk, TokenOutput, as_token_ids

MIN_MODEL_LEN = 64
LONGEST_TRUE = len("true") + 1
"""Largest number of tokens of the text, with its end token."""
POLL_S = 0.02
NUM_TRIALS = 3
"""Measurements before a check of a duration fails: other load on the machine may spoil one."""
MAX_SHARE = 0.5
"""Share of a whole completion's time in which the engine must be idle again after a request was cancelled."""
MAX_ATTEMPTS = 5
"""Attempts to find a completion that is running; those of small models end soon."""


async def check_server(
    server: AsyncServerBase,
    *,
    max_model_len: int,
    vocab_size: int | None = None,
    reference: Reference | None = None,
    tolerance: float = 1e-3,
    timeout_s: float = 120.0,
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that a started server follows the contract of `AsyncServerBase` and has the abilities that it claims.

    The server must be idle, and is closed at the end. Its weights are changed during the checks, and restored. The
    checks of an ability that the server does not claim are skipped.

    Args:
        max_model_len: Longest context of the server in tokens; at least 64.
        vocab_size: Prompts use token ids below this. Defaults to that of the reference.
        reference: Model that the server runs. With None, checks that compare with a reference are skipped.
        tolerance: Largest accepted difference of log-probs, in nats: about 1e-3 for float32, 0.1 for bfloat16.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: Both `vocab_size` and `reference` are None, or `max_model_len` is too small.
    """
    if vocab_size is None and reference is None:
        raise ConfigError("check_server needs to know the vocabulary; give vocab_size or a reference")
    if max_model_len < MIN_MODEL_LEN:
        raise ConfigError(f"max_model_len is {max_model_len}; the checks need at least {MIN_MODEL_LEN}")
    vocab_size = vocab_size or (reference.vocab_size if reference else 0)
    subject = CheckedServer(server, vocab_size, max_model_len, reference, tolerance)
    name = f"server {server.name!r}"
    return await SERVER_CHECKS.run(subject, name=name, timeout_s=timeout_s, on_result=on_result)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedServer:
    """Server under check, and the limits of the requests that it accepts."""

    server: AsyncServerBase
    vocab_size: int
    max_model_len: int
    given_reference: Reference | None
    tolerance: float
    """Largest accepted difference of log-probs, in nats."""

    @property
    def reference(self) -> Reference:
        """The reference model. The check is skipped if there is none."""
        if self.given_reference is None:
            raise CheckSkipped("needs a reference")
        return self.given_reference

    @property
    def long_tokens(self) -> int:
        """Number of tokens of a completion that is long enough to be interrupted."""
        return self.max_model_len - 24

    def prompt(self, num_tokens: int, *, seed: int = 0) -> list[int]:
        """Return random tokens, the same for the same arguments."""
        return Random(f"{seed} {num_tokens}").choices(range(self.vocab_size), k=num_tokens)

    async def generate(
        self, prompt: Sequence[int], *, session: str | None = None, **params: Any
    ) -> TokenOutput:
        """Return a valid completion. The session stays open if one is given. `params` are those of `SamplingParams`."""
        request_id = session or uuid4().hex
        try:
            output = await self.server.generate(as_token_ids(prompt), SamplingParams(**params), request_id)
        finally:
            if session is None:
                self.server.end_session(request_id)
        return self.valid(output.chunks)

    def valid(self, chunks: Sequence[TokenChunk]) -> TokenOutput:
        """Return the completion of chunks. Fail the check if a rollout would reject one of them."""
        reply_check = ReplyCheck(self.vocab_size)
        for chunk in chunks:
            reply_check.chunk(chunk, server=self.server.name, request_id="")
        return TokenOutput.from_chunks(chunks)

    async def greedy(
        self, prompt: Sequence[int], num_tokens: int, *, session: str | None = None
    ) -> TokenOutput:
        """Return a greedy completion of `num_tokens` tokens that end tokens do not stop."""
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
        return await self.generate(prompt, session=session, **params)

    async def start_long(
        self, prompt: Sequence[int], *, session: str, group: asyncio.TaskGroup
    ) -> asyncio.Task[TokenOutput]:
        """Start a completion that is long enough to be interrupted, and return its task once the engine runs it.

        The completions of a small model may all end before `health` shows them. The last attempt then returns at once.
        """
        for _ in range(MAX_ATTEMPTS):
            task = group.create_task(self.greedy(prompt, self.long_tokens, session=session))
            while not task.done():
                if (await self.server.health()).num_running:
                    return task
                await asyncio.sleep(POLL_S)
        task = group.create_task(self.greedy(prompt, self.long_tokens, session=session))
        await asyncio.sleep(0)
        return task

    async def until_idle(self) -> None:
        """Wait until no request is running or queued in the engine."""
        while True:
            health = await self.server.health()
            require(health.is_alive, f"the server died: {health.detail}")
            if health.num_running + health.num_waiting == 0:
                return
            await asyncio.sleep(POLL_S)

    async def scores(self, text: Sequence[int], *, start: int = 1) -> FloatArray:
        """Return the log-probs of a text."""
        scores = await self.server.score(as_token_ids(text), start=start)
        name, num_scores = self.server.name, len(text) - start
        return checked_scores(scores, num_scores=num_scores, top_logprobs=0, server=name).logprobs

    def require_same(self, got: list[int], wanted: list[int], *, prompt: Sequence[int], what: str) -> None:
        """Fail the check unless two greedy completions are equal, except after a near tie of the reference."""
        reason = ""
        if got != wanted and self.given_reference is not None and len(got) == len(wanted):
            reason = self.given_reference.disagreement(prompt, got)
            wanted = wanted if reason else got
        require(got == wanted, f"{what}: got {got}, not {wanted}; {reason}".rstrip("; "))

    def require_close(self, found: FloatArray | Sequence[float], wanted: FloatArray, what: str) -> float:
        """Fail the check unless log-probs are equal up to the tolerance, and return the largest difference."""
        difference = float(np.abs(np.array(found, np.float32) - wanted).max(initial=0.0))
        require(
            difference <= self.tolerance,
            f"{what} differ by up to {difference:.2g} nats; return log_softmax(logits / temperature), before top-k and "
            "top-p, and for scores at temperature 1",
        )
        return difference

    async def require_refusal(self, prompt: Sequence[int], *, session: str, what: str) -> None:
        """Fail the check unless a request raises a `ServerError` that names the server and the request."""
        try:
            await self.generate(prompt, session=session, max_tokens=2)
        except ServerError as error:
            is_named = error.server == self.server.name and error.request_id == session
            require(is_named, f"{what}: the error does not name the server and the request: {error}")
        except Exception as error:
            raise CheckFailed(f"{what}: {type(error).__name__} instead of ServerError: {error}") from error
        else:
            raise CheckFailed(f"{what} was not refused")

    def require_model(
        self, model: Reference, prompt: Sequence[int], output: TokenOutput, *, temperature: float = 0.0
    ) -> float:
        """Fail the check unless a completion is the model's. Return the largest difference of their log-probs."""
        reason = "" if temperature else model.disagreement(prompt, output.token_ids)
        require(not reason, f"version {output.weight_version}, after {len(prompt)} tokens: {reason}")
        if output.log_probs is None:
            return 0.0
        wanted = model.logprobs(prompt, output.token_ids, temperature=temperature)
        return self.require_close(output.log_probs, wanted, f"log-probs at temperature {temperature}")

    async def require_version(self, model: Reference, prompt: Sequence[int], version: int) -> float:
        """Fail the check unless completions come from `model` and carry `version`. Return the largest difference."""
        output = await self.greedy(prompt, 12)
        reported = (await self.server.health()).weight_version
        require(
            output.weight_version == reported == version,
            f"the weights have version {version}, a completion {output.weight_version}, and health() {reported}",
        )
        return self.require_model(model, prompt, output)


SERVER_CHECKS = CheckSuite[CheckedServer]()
ServerCheck = CheckFunction[CheckedServer]


def _check(
    name: str, *, ability: Ability | None = None, method: str = ""
) -> Callable[[ServerCheck], ServerCheck]:
    """Return a decorator that adds a check, which is skipped if the server lacks an ability or an optional method."""

    def add(function: ServerCheck) -> ServerCheck:
        @SERVER_CHECKS.check(name)
        async def check(subject: CheckedServer) -> str | None:
            if ability is not None and ability not in subject.server.abilities:
                raise CheckSkipped(f"the server does not claim {ability}")
            if method and getattr(type(subject.server), method) is getattr(AsyncServerBase, method):
                raise CheckSkipped(f"the server does not define {method}")
            return await function(subject)

        return check

    return add


# -- completions -------------------------------------------------------------------------------------------------------


@_check("a completion is valid, and ends at max_tokens or at the end of the context")
async def _length(subject: CheckedServer) -> None:
    for num_tokens in (1, 5):
        output = await subject.generate(subject.prompt(9), max_tokens=num_tokens, ignore_eos=True)
        got = len(output.token_ids), output.stop_reason
        require(
            got == (num_tokens, "length"), f"max_tokens is {num_tokens}, but it returned and ended with {got}"
        )
    room = 12
    output = await subject.generate(subject.prompt(subject.max_model_len - room), ignore_eos=True)
    got = len(output.token_ids), output.stop_reason
    require(
        got in ((room - 1, "length"), (room, "length")),
        f"the context has room for {room} tokens, but it returned and ended with {got} without max_tokens",
    )


@_check("a stop token ends the completion and is returned")
async def _stop_token(subject: CheckedServer) -> None:
    prompt = subject.prompt(11, seed=1)
    tokens = (await subject.greedy(prompt, 12)).token_ids
    position = max(tokens.index(token) for token in tokens)
    unseen = next(token for token in range(subject.vocab_size) if token not in tokens)
    stops = (tokens[position], unseen)
    for ignore_eos in (True, False):
        output = await subject.generate(
            prompt, temperature=0.0, max_tokens=12, stop_token_ids=stops, ignore_eos=ignore_eos
        )
        got, reason = output.token_ids, output.stop_reason
        require(reason == "stop", f"stop reason is {reason!r}, not 'stop'")
        if not ignore_eos and len(got) <= position and got == tokens[: len(got)]:
            continue  # one of the model's own end tokens came first
        subject.require_same(got, tokens[: position + 1], prompt=prompt, what=f"ignore_eos={ignore_eos}")


@_check("completions and their log-probs are those of the reference model")
async def _reference(subject: CheckedServer) -> str:
    greedy, worst, num_without = {"temperature": 0.0}, 0.0, 0
    for num_tokens, params in (
        (1, greedy),
        (17, greedy),
        (64, greedy),
        (31, {"temperature": 1.0}),
        (31, {"temperature": 0.7}),
        (31, {"temperature": 1.0, "top_p": 0.9}),
        (31, {"temperature": 0.7, "top_k": 5}),
    ):
        prompt, given = subject.prompt(min(num_tokens, subject.long_tokens)), dict[str, Any](params)
        output = await subject.generate(prompt, max_tokens=16, ignore_eos=True, **given)
        difference = subject.require_model(
            subject.reference, prompt, output, temperature=params["temperature"]
        )
        worst = max(worst, difference)
        if output.log_probs is None and Ability.LOG_PROBS in subject.server.abilities:
            require(
                len(params) > 1, f"no log-probs were returned with {params}, although the server claims them"
            )
            num_without += 1
    suffix = "; no log-probs with top-k or top-p" if num_without else ""
    return f"largest difference {worst:.1g} nats{suffix}"


@_check("the likeliest tokens and their log-probs are those of the model", ability=Ability.TOP_LOGPROBS)
async def _top_logprobs(subject: CheckedServer) -> None:
    num_top = 3
    for seed, temperature in enumerate((1.0, 0.7, 0.0)):
        prompt = subject.prompt(21, seed=seed)
        output = await subject.generate(
            prompt, max_tokens=4, ignore_eos=True, temperature=temperature, top_logprobs=num_top
        )
        top = [output.extras.get(name, np.zeros(0)) for name in ("top_token_ids", "top_logprobs")]
        shapes, shape = [each.shape for each in top], (len(output.token_ids), num_top)
        require(shapes == [shape, shape], f"top_token_ids and top_logprobs have shapes {shapes}, not {shape}")
        for place, (tokens, logprobs) in enumerate(zip(*(each.tolist() for each in top), strict=True)):
            context = [*prompt, *output.token_ids[:place]]
            wanted = [subject.reference.logprobs(context, [t], temperature=temperature)[0] for t in tokens]
            subject.require_close(logprobs, np.array(wanted), "log-probs of the likeliest tokens")
            is_ordered = len(set(tokens)) == num_top and logprobs == sorted(logprobs, reverse=True)
            require(is_ordered, f"the tokens {tokens} repeat, or their log-probs {logprobs} do not decrease")
            best = subject.reference.disagreement(context, tokens[:1])
            require(not best, f"the first of the likeliest tokens after {place} tokens: {best}")


@_check("a completion under a schema ends where the text is complete", ability=Ability.JSON_SCHEMA)
async def _json_schema(subject: CheckedServer) -> None:
    for seed in range(4):
        output = await subject.generate(
            subject.prompt(12, seed=seed), max_tokens=LONGEST_TRUE, json_schema='{"const": true}'
        )
        require(
            output.stop_reason == "stop",
            f"the schema allows only 'true', but the completion has {len(output.token_ids)} tokens and the stop "
            f"reason {output.stop_reason!r}; remove the tokens that the schema does not allow before sampling",
        )


@_check("a seed makes a completion reproducible", ability=Ability.SEED)
async def _seed(subject: CheckedServer) -> None:
    prompt = subject.prompt(13, seed=5)

    async def sample(seed: int) -> list[int]:
        return (await subject.generate(prompt, seed=seed, max_tokens=24, ignore_eos=True)).token_ids

    alone = await sample(7)
    together = await run_together(sample(seed) for seed in (7, 8, 9, 7))
    require(alone == together[0] == together[3], "the same seed gave different completions")
    require(len({tuple(tokens) for tokens in together}) > 1, "different seeds gave the same completion")


@_check("a resumed completion with a seed samples the same tokens", ability=Ability.FREE_SEEDS)
async def _continued_seed(subject: CheckedServer) -> None:
    for seed, kept in ((5, 1), (2**62 + 3, 9)):
        prompt = subject.prompt(17, seed=seed % 100)
        params: dict[str, Any] = {"seed": seed, "ignore_eos": True}
        whole = (await subject.generate(prompt, max_tokens=20, **params)).token_ids
        context = [*prompt, *whole[:kept]]
        rest = await subject.generate(context, max_tokens=20 - kept, num_sampled=kept, **params)
        what = f"resumed after {kept} tokens, it samples {rest.token_ids}, not {whole[kept:]}"
        require(rest.token_ids == whole[kept:], what)


@_check("concurrent requests do not affect each other")
async def _concurrency(subject: CheckedServer) -> None:
    prompts = [subject.prompt(5 + 3 * i, seed=i) for i in range(16)]
    together = await run_together(subject.greedy(prompt, 6 + i) for i, prompt in enumerate(prompts))
    for i, (prompt, output) in enumerate(zip(prompts, together, strict=True)):
        alone = await subject.greedy(prompt, 6 + i)
        what = f"request {i} of {len(prompts)}"
        subject.require_same(output.token_ids, alone.token_ids, prompt=prompt, what=what)


@_check("the next turn of a session sees all earlier tokens, and reuses their cache")
async def _session(subject: CheckedServer) -> str:
    half, cached = subject.max_model_len // 2, 0
    for seed, num_tokens in (
        (0, 24),
        (8, half),
        (80, half),
    ):  # a cache may evict one prefix, but not two in a row
        session, prompt = uuid4().hex, subject.prompt(num_tokens, seed=seed)
        whole = (await subject.greedy(prompt, 12)).token_ids
        await subject.greedy(prompt, 5, session=session)
        context = [*prompt, *whole[:5]]
        rest = (await subject.greedy(context, 7, session=session)).token_ids
        subject.require_same(rest, whole[5:], prompt=context, what="after 5 sampled tokens in the prompt")
        context = [*context, *rest, *subject.prompt(7, seed=7)]
        later = await subject.greedy(context, 8, session=session)
        subject.server.end_session(session)
        alone = (await subject.greedy(context, 8)).token_ids
        subject.require_same(later.token_ids, alone, prompt=context, what="the turn after other tokens")
        cached = max(cached, later.num_cached_tokens or 0)
    if Ability.PREFIX_REUSE not in subject.server.abilities:
        return "the server does not claim prefix_reuse"
    shown = f"{cached} of {half} tokens of the first prompt were cached (num_cached_tokens)"
    require(cached >= half // 2, f"only {shown}")
    return shown


@_check("a stream returns the whole completion in chunks")
async def _stream(subject: CheckedServer) -> str:
    prompt, session = subject.prompt(15, seed=10), uuid4().hex
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    chunks = [chunk async for chunk in subject.server.stream(as_token_ids(prompt), params, session)]
    subject.server.end_session(session)
    tokens, whole = subject.valid(chunks).token_ids, (await subject.greedy(prompt, 24)).token_ids
    subject.require_same(tokens, whole, prompt=prompt, what="the stream")
    reasons = [chunk.stop_reason for chunk in chunks]
    require(
        reasons == [None] * (len(chunks) - 1) + ["length"],
        f"the stop reasons of the chunks are {reasons}; set 'length' on the last one and None on the others",
    )
    if Ability.STREAMING in subject.server.abilities:
        require(len(chunks) > 1, "24 tokens were returned in a single chunk")
    return f"{len(chunks)} chunks"


@_check("scores of a text are its log-probs, from start on and beside other requests", ability=Ability.SCORE)
async def _scores(subject: CheckedServer) -> None:
    texts: list[list[int]] = []
    for seed in range(4):
        prompt = subject.prompt(19, seed=seed)
        output = await subject.greedy(prompt, 4 + 3 * seed)
        texts.append([*prompt, *output.token_ids])
        if output.log_probs is not None:
            found = await subject.scores(texts[-1], start=len(prompt))
            wanted = np.array(output.log_probs, np.float32)
            subject.require_close(found, wanted, "scores and log-probs of a completion")
    whole = await run_together(subject.scores(text) for text in texts)
    for text, scores in zip(texts, whole, strict=True):
        for start in (1, len(text) // 2, len(text) - 1):
            part = await subject.scores(text, start=start)
            what = f"log-probs of a text from start={start} on and of the whole text"
            subject.require_close(part, scores[start - 1 :], what)


# -- abort, refusal, sleep, weights, close -----------------------------------------------------------------------------


@_check("an aborted request returns the tokens sampled so far", method="abort")
async def _abort(subject: CheckedServer) -> str:
    session, prompt = uuid4().hex, subject.prompt(10, seed=20)
    await subject.server.abort("check-never-seen")  # without an effect
    got, reason = list[int](), ""
    for _ in range(MAX_ATTEMPTS):
        async with asyncio.TaskGroup() as group:
            task = await subject.start_long(prompt, session=session, group=group)
            await subject.server.abort(session)
        got, reason = task.result().token_ids, task.result().stop_reason
        if reason != "length":  # otherwise it ended by itself
            break
    require(reason == "aborted", f"stop reason is {reason!r}, not 'aborted'")
    wanted = (await subject.greedy(prompt, max(1, len(got)))).token_ids[: len(got)]
    subject.require_same(got, wanted, prompt=prompt, what="the partial completion")
    await subject.until_idle()
    await subject.greedy(prompt, 3, session=session)  # the session continues
    subject.server.end_session(session)
    return f"{len(got)} tokens kept"


@_check("cancelling a request frees its slot")
async def _cancel(subject: CheckedServer) -> str:
    clock = asyncio.get_running_loop().time
    session, prompt = uuid4().hex, subject.prompt(10, seed=22)
    started = clock()
    await subject.greedy(prompt, subject.long_tokens, session=session)
    whole_s, share = clock() - started, 1.0
    for _ in range(NUM_TRIALS):
        async with asyncio.TaskGroup() as group:
            task = await subject.start_long(prompt, session=session, group=group)
            task.cancel()
        started = clock()
        await subject.until_idle()
        idle_at = clock()
        await subject.server.health()  # its time is not that of the request
        share = min(share, max(idle_at - started - (clock() - idle_at), 0.0) / whole_s)
        if share <= MAX_SHARE:
            break
    require(
        share <= MAX_SHARE, f"the engine kept running for {share:.0%} of the time of the whole completion"
    )
    await subject.greedy(prompt, 2, session=session)  # the session continues
    subject.server.end_session(session)
    return f"idle after {share:.0%} of the time of the whole completion"


@_check("a second request of a session is refused while the first runs")
async def _second(subject: CheckedServer) -> None:
    session, prompt = uuid4().hex, subject.prompt(10, seed=23)
    what = "a second request of the session"
    # Both are sent at once: even a fast server cannot finish the first before the second arrives.
    async with asyncio.TaskGroup() as group:
        first = group.create_task(subject.greedy(prompt, subject.long_tokens, session=session))
        group.create_task(subject.require_refusal(prompt, session=session, what=what))
    require(len(first.result().token_ids) == subject.long_tokens, "the first request was cut short")
    subject.server.end_session(session)


@_check("invalid requests are refused, and the server keeps running")
async def _refusals(subject: CheckedServer) -> None:
    for what, prompt in (
        ("an empty prompt", []),
        ("a prompt longer than the context", subject.prompt(subject.max_model_len + 1, seed=24)),
        ("a token id outside the vocabulary", [1, subject.vocab_size + 7, 2]),
        ("a negative token id", [3, -1]),
    ):
        await subject.require_refusal(prompt, session=uuid4().hex, what=what)
    health = await subject.server.health()
    require(health.is_alive, f"an invalid request stopped the server: {health.detail}")
    await subject.greedy(subject.prompt(5), 2)


@_check(
    "a server sleeps only without requests, refuses requests asleep, and wakes up unchanged", method="sleep"
)
async def _sleep(subject: CheckedServer) -> None:
    prompt, session = subject.prompt(12, seed=25), uuid4().hex
    before = (await subject.greedy(prompt, 6)).token_ids
    await subject.server.sleep()
    try:
        await subject.require_refusal(prompt, session=session, what="a request while asleep")
    finally:
        await subject.server.wake_up()
    await subject.server.wake_up()
    after = (await subject.greedy(prompt, 6)).token_ids
    subject.require_same(after, before, prompt=prompt, what="after waking up")
    async with asyncio.TaskGroup() as group:
        await subject.start_long(prompt, session=session, group=group)
        try:
            await subject.server.sleep()
        except ServerError:
            pass
        else:
            await subject.server.wake_up()
            raise CheckFailed("sleep() was accepted while a request was running")
        finally:
            await subject.server.abort(session)
    subject.server.end_session(session)


@_check("completions after a weight update come from the new weights", ability=Ability.WEIGHT_UPDATE)
async def _update(subject: CheckedServer) -> str:
    reference, worst = subject.reference, 0.0
    version = (await subject.server.health()).weight_version
    # Every update uses the same prompt, which finds a KV cache that is kept across updates.
    prompt = subject.prompt(64, seed=27)
    models = (reference.shifted(seed=1), reference.shifted(seed=2), reference)
    for new_version, model in enumerate(models, start=version + 1):
        await subject.server.update_weights(model.weights(), weight_version=new_version)
        worst = max(worst, await subject.require_version(model, prompt, new_version))
    return f"largest difference {worst:.1g} nats"


@_check("invalid weights are refused and change nothing", ability=Ability.WEIGHT_UPDATE)
async def _bad_weights(subject: CheckedServer) -> None:
    version = (await subject.server.health()).weight_version
    other = subject.reference.shifted(seed=3).weights()
    name, first = other[0]
    for what, weights in (
        ("an unknown name", [*other, ("model.layers.0.no_such.weight", first)]),
        ("a wrong shape", [*other[1:], (name, torch.zeros(3, 5))]),
        ("a missing weight", other[1:]),
        ("no weights", []),
    ):
        try:
            await subject.server.update_weights(weights, weight_version=version + 1)
        except WeightsError:
            pass
        else:
            raise CheckFailed(f"{what} was accepted")
        await subject.require_version(subject.reference, subject.prompt(20, seed=28), version)


@_check("requests in flight continue across a weight update", ability=Ability.UPDATE_IN_FLIGHT)
async def _in_flight(subject: CheckedServer) -> str:
    version = (await subject.server.health()).weight_version
    weights = [] if subject.given_reference is None else subject.given_reference.weights()
    session = uuid4().hex
    async with asyncio.TaskGroup() as group:
        task = await subject.start_long(subject.prompt(10, seed=29), session=session, group=group)
        await subject.server.update_weights(weights, weight_version=version + 1)
        if not task.done():
            await subject.server.abort(session)
    subject.server.end_session(session)
    versions = [chunk.weight_version for chunk in task.result().chunks]
    require(
        versions in ([version, version + 1], [version], [version + 1]),
        f"its tokens have the versions {versions}, after an update from version {version} to {version + 1}",
    )
    return f"tokens of version(s) {', '.join(map(str, versions))}"


@_check("a closed server refuses requests immediately", method="close")
async def _close(subject: CheckedServer) -> None:
    prompt = subject.prompt(8, seed=30)

    async def request() -> BaseException | None:
        try:
            await subject.greedy(prompt, subject.long_tokens)
        except Exception as error:  # noqa: BLE001  (the check looks at the type)
            return error
        return None

    async with asyncio.TaskGroup() as group:
        task = group.create_task(request())
        for _ in range(5):
            await asyncio.sleep(0)
        await subject.server.close()
    ended = task.result()
    require(
        isinstance(ended, ServerError | None), f"a request in flight ended with {ended!r}, no ServerError"
    )
    await subject.require_refusal(prompt, session=uuid4().hex, what="a request")
    health = await subject.server.health()
    require(
        not health.is_alive and bool(health.detail),
        f"health() returned {health}; a closed server is not alive, and `detail` gives the reason",
    )
