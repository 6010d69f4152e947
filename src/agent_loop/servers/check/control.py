"""What a server must do beside completions: abort, refuse, sleep, take new weights."""

from __future__ import annotations

import asyncio
from functools import partial

import torch

from agent_loop.errors import AgentLoopError, ServerError, WeightsError
from agent_loop.servers.base import Ability
from agent_loop.servers.check.reference import Reference
from agent_loop.servers.check.subject import Check, Subject, check
from agent_loop.testing.checks import CheckFailed, require
from agent_loop.types import IntArray, TokenOutput, as_token_ids

MAX_ATTEMPTS = 5
"""To abort a completion before it ends by itself, as those of small models soon do."""
CONTROL_CHECKS: list[Check] = []
_check = partial(check, into=CONTROL_CHECKS)


@_check("an aborted request returns what it has", method="abort")
async def _abort(subject: Subject) -> str:
    session, prompt = subject.session(), subject.prompt(10, seed=20)
    output = await _aborted(subject, prompt, session=session)
    require(output.stop_reason == "aborted", f"stop reason is {output.stop_reason!r}, not 'aborted'")
    wanted = await subject.greedy(prompt, max(1, len(output.token_ids)))
    subject.require_same(
        output.token_ids, wanted[: len(output.token_ids)], prompt=prompt, what="the partial completion"
    )
    await subject.until_idle("after the abort")
    again = await subject.greedy(prompt, 3, session=session)
    require(len(again) == 3, "the session could not go on after an abort")
    subject.server.end_session(session)
    return f"{len(output.token_ids)} tokens kept"


@_check("aborting what does not run does nothing", method="abort")
async def _abort_nothing(subject: Subject) -> None:
    await subject.server.abort("check-never-seen")
    subject.server.end_session("check-never-seen")
    session = subject.session()
    await subject.greedy(subject.prompt(6, seed=21), 2, session=session)
    await subject.server.abort(session)
    require(len(await subject.greedy(subject.prompt(6, seed=21), 2, session=session)) == 2, "no tokens came")
    subject.server.end_session(session)


@_check("cancelling a request frees its place")
async def _cancel(subject: Subject) -> str:
    clock = asyncio.get_running_loop().time
    session, prompt = subject.session(), subject.prompt(10, seed=22)
    started = clock()
    await _long(subject, prompt, session=session)
    whole_s = clock() - started

    async def begin_and_cancel() -> None:
        async with asyncio.TaskGroup() as group:
            task = await _begun(subject, prompt, session=session, group=group)
            task.cancel()

    share = await subject.require_early_end(begin_and_cancel, whole_s=whole_s)
    require(len(await subject.greedy(prompt, 2, session=session)) == 2, "the session could not go on")
    subject.server.end_session(session)
    return share


@_check("a second request of a running session is refused")
async def _second(subject: Subject) -> None:
    session, prompt = subject.session(), subject.prompt(10, seed=23)
    # Both at once: no server is so fast that the first is over before the second comes.
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_long(subject, prompt, session=session))
        group.create_task(
            _require_refusal(subject, prompt, session=session, what="a second request of the session")
        )
    require(len(first.result().token_ids) == subject.long_tokens, "the first request did not go on")
    subject.server.end_session(session)


@_check("what no engine can do is refused by name, and the server goes on")
async def _refusals(subject: Subject) -> None:
    too_long = subject.prompt(subject.max_model_len + 1, seed=24)
    wrong_id = as_token_ids([1, subject.vocab_size + 7, 2])
    for what, prompt in (
        ("an empty prompt", as_token_ids([])),
        ("a prompt longer than the context", too_long),
        ("a token id out of the vocabulary", wrong_id),
        ("a negative token id", as_token_ids([3, -1])),
    ):
        await _require_refusal(subject, prompt, session=subject.session(), what=what)
    health = await subject.server.health()
    require(health.is_alive, f"the server died of it: {health.detail}")
    require(len(await subject.greedy(subject.prompt(5), 2)) == 2, "the server does not go on")


@_check("a server that sleeps generates nothing, and wakes up as it was", method="sleep")
async def _sleep(subject: Subject) -> None:
    prompt = subject.prompt(12, seed=25)
    before = await subject.greedy(prompt, 6)
    await subject.server.sleep()
    try:
        await _require_refusal(subject, prompt, session=subject.session(), what="a request while asleep")
    finally:
        await subject.server.wake_up()
    await subject.server.wake_up()
    subject.require_same(await subject.greedy(prompt, 6), before, prompt=prompt, what="after waking up")


@_check("a server with requests does not go to sleep", method="sleep")
async def _busy_sleep(subject: Subject) -> None:
    session = subject.session()
    async with asyncio.TaskGroup() as group:
        await _begun(subject, subject.prompt(9, seed=26), session=session, group=group)
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


@_check("new weights are what is sampled from", ability=Ability.WEIGHT_UPDATE, needs_reference=True)
async def _update(subject: Subject) -> str:
    assert subject.reference is not None
    version = (await subject.server.health()).weight_version
    worst = 0.0
    # The same prompt each time: a cache that outlives the update shows.
    prompt = subject.prompt(64, seed=27)
    for step, model in enumerate(
        (subject.reference.shifted(seed=1), subject.reference.shifted(seed=2), None), 1
    ):
        model = model or subject.reference
        await subject.server.update_weights(model.weights(), weight_version=version + step)
        worst = max(worst, await _require_model(subject, model, prompt=prompt, version=version + step))
    return f"largest difference {worst:.1g} nats"


@_check("weights that do not fit change nothing", ability=Ability.WEIGHT_UPDATE, needs_reference=True)
async def _bad_weights(subject: Subject) -> None:
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


@_check("requests in flight go on across an update", ability=Ability.UPDATE_IN_FLIGHT)
async def _in_flight(subject: Subject) -> str:
    version = (await subject.server.health()).weight_version
    weights = [] if subject.reference is None else subject.reference.weights()
    session = subject.session()
    async with asyncio.TaskGroup() as group:
        task = await _begun(subject, subject.prompt(10, seed=29), session=session, group=group)
        await subject.server.update_weights(weights, weight_version=version + 1)
        if not task.done():
            await subject.server.abort(session)
    subject.server.end_session(session)
    output = task.result()
    versions = [chunk.weight_version for chunk in output.chunks]
    require(
        versions in ([version, version + 1], [version], [version + 1]),
        f"updated from version {version} to {version + 1}, and its tokens are of versions {versions}",
    )
    return f"{len(output.token_ids)} tokens of version(s) {', '.join(map(str, versions))}"


@_check("a closed server refuses at once", method="close")
async def _close(subject: Subject) -> None:
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
    require(not health.is_alive and bool(health.detail), f"its health is {health}")


async def _long(subject: Subject, prompt: IntArray, *, session: str) -> TokenOutput:
    return await subject.ask(
        prompt, session=session, temperature=0.0, max_tokens=subject.long_tokens, ignore_eos=True
    )


async def _begun(
    subject: Subject, prompt: IntArray, *, session: str, group: asyncio.TaskGroup
) -> asyncio.Task[TokenOutput]:
    """A long completion that runs. Where each is over before health has shown it, as those of a small model may be on a
    busy machine, one that was just asked for."""
    for _ in range(MAX_ATTEMPTS):
        task = group.create_task(_long(subject, prompt, session=session))
        await subject.until_running(task)
        if not task.done():
            return task
    task = group.create_task(_long(subject, prompt, session=session))
    await asyncio.sleep(0)
    return task


async def _aborted(subject: Subject, prompt: IntArray, *, session: str) -> TokenOutput:
    """A long completion that is aborted while it runs; one that ends by itself before that is begun again."""
    num_attempts = 0
    while True:
        num_attempts += 1
        async with asyncio.TaskGroup() as group:
            task = await _begun(subject, prompt, session=session, group=group)
            await subject.server.abort(session)
        output = task.result()
        if output.stop_reason != "length" or num_attempts == MAX_ATTEMPTS:
            return output


async def _error_of(subject: Subject, *, session: str) -> BaseException | None:
    try:
        await _long(subject, subject.prompt(8, seed=30), session=session)
    except Exception as error:  # noqa: BLE001  (what kind it is, is what is checked)
        return error
    return None


async def _require_refusal(subject: Subject, prompt: IntArray, *, session: str, what: str) -> None:
    try:
        await subject.ask(prompt, session=session, max_tokens=2)
    except ServerError as error:
        require(error.server == subject.server.name, f"{what}: the error does not name the server: {error}")
        require(error.request_id == session, f"{what}: the error does not name the request: {error}")
    except AgentLoopError as error:
        raise CheckFailed(f"{what}: {type(error).__name__} instead of ServerError: {error}") from error
    except Exception as error:
        raise CheckFailed(f"{what}: {type(error).__name__} instead of ServerError: {error}") from error
    else:
        raise CheckFailed(f"{what} was not refused")


async def _require_model(subject: Subject, model: Reference, *, prompt: IntArray, version: int) -> float:
    """That completions are this model's, and are stamped so; returns the largest difference of log-probs."""
    output = await subject.ask(prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
    reason = model.disagreement(prompt.tolist(), output.token_ids)
    require(not reason, f"version {version}: {reason}")
    require(
        output.weight_version == version,
        f"a completion is stamped {output.weight_version}, but the weights are of version {version}",
    )
    health = await subject.server.health()
    require(health.weight_version == version, f"health says version {health.weight_version}, not {version}")
    if output.log_probs is None:
        return 0.0
    wanted = model.logprobs(prompt.tolist(), output.token_ids)
    difference = float(abs(wanted - output.log_probs).max())
    require(difference <= subject.tolerance, f"version {version}: log-probs are {difference:.2g} nats off")
    return difference
