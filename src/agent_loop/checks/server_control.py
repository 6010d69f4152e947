"""Checks of abort, refusal, sleep, weight updates and close."""

from __future__ import annotations

import asyncio
from functools import partial

import torch

from agent_loop.checks.checked_server import CheckedServer, Reference, add_check
from agent_loop.errors import ServerError, WeightsError
from agent_loop.servers.base import Ability
from agent_loop.testing.conformance import CheckFailed, CheckSuite, require
from agent_loop.types import IntArray, TokenOutput, as_token_ids

MAX_ATTEMPTS = 5
"""Attempts to abort a completion before it ends by itself; those of small models end soon."""
CONTROL_CHECKS = CheckSuite[CheckedServer]()
_check = partial(add_check, suite=CONTROL_CHECKS)


@_check("an aborted request returns the tokens sampled so far", method="abort")
async def _abort(subject: CheckedServer) -> str:
    session, prompt = subject.session(), subject.prompt(10, seed=20)
    output = await _aborted(subject, prompt, session=session)
    require(output.stop_reason == "aborted", f"stop reason is {output.stop_reason!r}, not 'aborted'")
    wanted = await subject.greedy(prompt, max(1, len(output.token_ids)))
    subject.require_same(
        output.token_ids, wanted[: len(output.token_ids)], prompt=prompt, what="the partial completion"
    )
    await subject.until_idle("after the abort")
    again = await subject.greedy(prompt, 3, session=session)
    require(len(again) == 3, "the session could not continue after an abort")
    subject.server.end_session(session)
    return f"{len(output.token_ids)} tokens kept"


@_check("aborting a request that is not running has no effect", method="abort")
async def _abort_nothing(subject: CheckedServer) -> None:
    await subject.server.abort("check-never-seen")
    subject.server.end_session("check-never-seen")
    session = subject.session()
    await subject.greedy(subject.prompt(6, seed=21), 2, session=session)
    await subject.server.abort(session)
    require(
        len(await subject.greedy(subject.prompt(6, seed=21), 2, session=session)) == 2,
        "the next request of the session returned no tokens",
    )
    subject.server.end_session(session)


@_check("cancelling a request frees its slot")
async def _cancel(subject: CheckedServer) -> str:
    clock = asyncio.get_running_loop().time
    session, prompt = subject.session(), subject.prompt(10, seed=22)
    started = clock()
    await _long(subject, prompt, session=session)
    whole_s = clock() - started

    async def start_and_cancel() -> None:
        async with asyncio.TaskGroup() as group:
            task = await _start_long(subject, prompt, session=session, group=group)
            task.cancel()

    share = await subject.require_early_end(start_and_cancel, whole_s=whole_s)
    require(
        len(await subject.greedy(prompt, 2, session=session)) == 2,
        "the session could not continue after a cancellation",
    )
    subject.server.end_session(session)
    return share


@_check("a second request of a session is refused while the first runs")
async def _second(subject: CheckedServer) -> None:
    session, prompt = subject.session(), subject.prompt(10, seed=23)
    # Both are sent at once: even a fast server cannot finish the first before the second arrives.
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_long(subject, prompt, session=session))
        group.create_task(
            _require_refusal(subject, prompt, session=session, what="a second request of the session")
        )
    require(len(first.result().token_ids) == subject.long_tokens, "the first request was cut short")
    subject.server.end_session(session)


@_check("invalid requests are refused, and the server keeps running")
async def _refusals(subject: CheckedServer) -> None:
    too_long = subject.prompt(subject.max_model_len + 1, seed=24)
    wrong_id = as_token_ids([1, subject.vocab_size + 7, 2])
    for what, prompt in (
        ("an empty prompt", as_token_ids([])),
        ("a prompt longer than the context", too_long),
        ("a token id outside the vocabulary", wrong_id),
        ("a negative token id", as_token_ids([3, -1])),
    ):
        await _require_refusal(subject, prompt, session=subject.session(), what=what)
    health = await subject.server.health()
    require(health.is_alive, f"an invalid request stopped the server: {health.detail}")
    require(len(await subject.greedy(subject.prompt(5), 2)) == 2, "the next request returned no tokens")


@_check("a sleeping server refuses requests, and wakes up unchanged", method="sleep")
async def _sleep(subject: CheckedServer) -> None:
    prompt = subject.prompt(12, seed=25)
    before = await subject.greedy(prompt, 6)
    await subject.server.sleep()
    try:
        await _require_refusal(subject, prompt, session=subject.session(), what="a request while asleep")
    finally:
        await subject.server.wake_up()
    await subject.server.wake_up()
    subject.require_same(await subject.greedy(prompt, 6), before, prompt=prompt, what="after waking up")


@_check("a server with requests in flight refuses to sleep", method="sleep")
async def _busy_sleep(subject: CheckedServer) -> None:
    session = subject.session()
    async with asyncio.TaskGroup() as group:
        await _start_long(subject, subject.prompt(9, seed=26), session=session, group=group)
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


@_check(
    "completions after a weight update come from the new weights",
    ability=Ability.WEIGHT_UPDATE,
    needs_reference=True,
)
async def _update(subject: CheckedServer) -> str:
    assert subject.reference is not None
    version = (await subject.server.health()).weight_version
    worst = 0.0
    # Every update uses the same prompt, which finds a KV cache that is kept across updates.
    prompt = subject.prompt(64, seed=27)
    for step, model in enumerate(
        (subject.reference.shifted(seed=1), subject.reference.shifted(seed=2), None), 1
    ):
        model = model or subject.reference
        await subject.server.update_weights(model.weights(), weight_version=version + step)
        worst = max(worst, await _require_model(subject, model, prompt=prompt, version=version + step))
    return f"largest difference {worst:.1g} nats"


@_check("invalid weights are refused and change nothing", ability=Ability.WEIGHT_UPDATE, needs_reference=True)
async def _bad_weights(subject: CheckedServer) -> None:
    assert subject.reference is not None
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
        prompt = subject.prompt(20, seed=28)
        await _require_model(subject, subject.reference, prompt=prompt, version=version)


@_check("requests in flight continue across a weight update", ability=Ability.UPDATE_IN_FLIGHT)
async def _in_flight(subject: CheckedServer) -> str:
    version = (await subject.server.health()).weight_version
    weights = [] if subject.reference is None else subject.reference.weights()
    session = subject.session()
    async with asyncio.TaskGroup() as group:
        task = await _start_long(subject, subject.prompt(10, seed=29), session=session, group=group)
        await subject.server.update_weights(weights, weight_version=version + 1)
        if not task.done():
            await subject.server.abort(session)
    subject.server.end_session(session)
    output = task.result()
    versions = [chunk.weight_version for chunk in output.chunks]
    require(
        versions in ([version, version + 1], [version], [version + 1]),
        f"its tokens have the versions {versions}, after an update from version {version} to {version + 1}",
    )
    return f"{len(output.token_ids)} tokens of version(s) {', '.join(map(str, versions))}"


@_check("a closed server refuses requests immediately", method="close")
async def _close(subject: CheckedServer) -> None:
    session = subject.session()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_error_of(subject, session=session))
        for _ in range(5):
            await asyncio.sleep(0)
        await subject.server.close()
    require(
        isinstance(task.result(), ServerError | None),
        f"a request in flight ended with {task.result()!r} instead of a ServerError",
    )
    await _require_refusal(subject, subject.prompt(4), session=subject.session(), what="a request")
    health = await subject.server.health()
    require(
        not health.is_alive and bool(health.detail),
        f"health() returned {health}; a closed server is not alive, and `detail` gives the reason",
    )


async def _long(subject: CheckedServer, prompt: IntArray, *, session: str) -> TokenOutput:
    """Return a completion of `long_tokens` tokens."""
    return await subject.generate(
        prompt, session=session, temperature=0.0, max_tokens=subject.long_tokens, ignore_eos=True
    )


async def _start_long(
    subject: CheckedServer, prompt: IntArray, *, session: str, group: asyncio.TaskGroup
) -> asyncio.Task[TokenOutput]:
    """Start a long completion and return its task once the engine runs it.

    The completions of a small model may all end before `health` shows them. The last attempt then returns at once.
    """
    for _ in range(MAX_ATTEMPTS):
        task = group.create_task(_long(subject, prompt, session=session))
        await subject.until_running(task)
        if not task.done():
            return task
    task = group.create_task(_long(subject, prompt, session=session))
    await asyncio.sleep(0)
    return task


async def _aborted(subject: CheckedServer, prompt: IntArray, *, session: str) -> TokenOutput:
    """Return a long completion that was aborted. Tries again if it ended by itself."""
    num_attempts = 0
    while True:
        num_attempts += 1
        async with asyncio.TaskGroup() as group:
            task = await _start_long(subject, prompt, session=session, group=group)
            await subject.server.abort(session)
        output = task.result()
        if output.stop_reason != "length" or num_attempts == MAX_ATTEMPTS:
            return output


async def _error_of(subject: CheckedServer, *, session: str) -> BaseException | None:
    try:
        await _long(subject, subject.prompt(8, seed=30), session=session)
    except Exception as error:  # noqa: BLE001  (the check looks at the type)
        return error
    return None


async def _require_refusal(subject: CheckedServer, prompt: IntArray, *, session: str, what: str) -> None:
    try:
        await subject.generate(prompt, session=session, max_tokens=2)
    except ServerError as error:
        require(error.server == subject.server.name, f"{what}: the error does not name the server: {error}")
        require(error.request_id == session, f"{what}: the error does not name the request: {error}")
    except Exception as error:
        raise CheckFailed(f"{what}: {type(error).__name__} instead of ServerError: {error}") from error
    else:
        raise CheckFailed(f"{what} was not refused")


async def _require_model(
    subject: CheckedServer, model: Reference, *, prompt: IntArray, version: int
) -> float:
    """Fail the check unless completions come from `model` and carry `version`.

    Returns:
        Largest difference of log-probs, in nats.
    """
    output = await subject.generate(prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
    reason = model.disagreement(prompt.tolist(), output.token_ids)
    require(not reason, f"version {version}: {reason}")
    require(
        output.weight_version == version,
        f"a completion has weight version {output.weight_version}, but the weights have version {version}",
    )
    health = await subject.server.health()
    require(
        health.weight_version == version,
        f"health() reports weight version {health.weight_version}, not {version}",
    )
    if output.log_probs is None:
        return 0.0
    wanted = model.logprobs(prompt.tolist(), output.token_ids)
    difference = float(abs(wanted - output.log_probs).max())
    require(
        difference <= subject.tolerance,
        f"version {version}: log-probs differ from the reference by up to {difference:.2g} nats",
    )
    return difference
