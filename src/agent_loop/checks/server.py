"""Conformance checks of servers: does an implementation of `AsyncServerBase` follow its contract?"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import Any

import numpy as np

from agent_loop.checks.checked_server import CheckedServer, Reference, add_check
from agent_loop.checks.server_control import CONTROL_CHECKS
from agent_loop.errors import ConfigError
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.scores import TokenScores, checked_scores
from agent_loop.testing.conformance import (
    CheckFailed,
    CheckReport,
    CheckSkipped,
    CheckSuite,
    OnResult,
    require,
)
from agent_loop.types import FloatArray, IntArray, SamplingParams, TokenOutput, as_token_ids

MIN_MODEL_LEN = 64
LONGEST_TRUE = len("true") + 1
"""Largest number of tokens of the text, with its end token."""
NUM_TOP = 3
SERVER_CHECKS = CheckSuite[CheckedServer]()
_check = partial(add_check, suite=SERVER_CHECKS)
_score_check = partial(add_check, suite=SERVER_CHECKS, ability=Ability.SCORE)


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
    subject = CheckedServer(
        server=server,
        vocab_size=vocab_size or (reference.vocab_size if reference else 0),
        max_model_len=max_model_len,
        reference=reference,
        tolerance=tolerance,
        long_tokens=max_model_len - 24,
    )
    return await SERVER_CHECKS.run(
        subject, name=f"server {server.name!r}", timeout_s=timeout_s, on_result=on_result
    )


@_check("a completion has valid token ids and ends at max_tokens")
async def _length(subject: CheckedServer) -> None:
    for num_tokens in (1, 5):
        output = await subject.generate(subject.prompt(9), max_tokens=num_tokens, ignore_eos=True)
        require(
            len(output.token_ids) == num_tokens,
            f"max_tokens is {num_tokens}, but {len(output.token_ids)} tokens were returned",
        )
        require(output.stop_reason == "length", f"stop reason is {output.stop_reason!r}, not 'length'")
        _require_valid(subject, output)


@_check("without max_tokens, a completion runs to the end of the context")
async def _to_the_end(subject: CheckedServer) -> None:
    prompt = subject.prompt(max(1, subject.max_model_len - 12))
    output = await subject.generate(prompt, ignore_eos=True)
    require(output.stop_reason == "length", f"stop reason is {output.stop_reason!r}, not 'length'")
    room = subject.max_model_len - len(prompt)
    require(
        room - 1 <= len(output.token_ids) <= room,
        f"the prompt has {len(prompt)} tokens of a context of {subject.max_model_len}, "
        f"but {len(output.token_ids)} tokens were returned",
    )


@_check("a stop token ends the completion and is returned")
async def _stop_token(subject: CheckedServer) -> None:
    prompt = subject.prompt(11, seed=1)
    tokens = await subject.greedy(prompt, 12)
    position = max(tokens.index(token) for token in tokens)
    unseen = next(token for token in range(subject.vocab_size) if token not in tokens)
    for ignore_eos in (True, False):
        output = await subject.generate(
            prompt,
            temperature=0.0,
            max_tokens=12,
            stop_token_ids=(tokens[position], unseen),
            ignore_eos=ignore_eos,
        )
        got = output.token_ids
        if (
            not ignore_eos
            and got == tokens[: len(got)]
            and output.stop_reason == "stop"
            and len(got) <= position
        ):
            continue  # one of the model's own end tokens came first
        subject.require_same(got, tokens[: position + 1], prompt=prompt, what=f"ignore_eos={ignore_eos}")
        require(output.stop_reason == "stop", f"stop reason is {output.stop_reason!r}, not 'stop'")


@_check("tokens sent back in a prompt are read as the same tokens")
async def _continuity(subject: CheckedServer) -> None:
    for seed in range(3):
        prompt = subject.prompt(24, seed=seed)
        whole = await subject.greedy(prompt, 12)
        context = as_token_ids([*prompt.tolist(), *whole[:5]])
        rest = await subject.greedy(context, 7)
        subject.require_same(rest, whole[5:], prompt=context, what="after 5 sampled tokens in the prompt")


@_check("greedy completions match the reference model", needs_reference=True)
async def _greedy(subject: CheckedServer) -> None:
    assert subject.reference is not None
    for seed, num_tokens in ((0, 1), (1, 17), (2, 64)):
        prompt = subject.prompt(num_tokens, seed=seed)
        tokens = await subject.greedy(prompt, 16)
        reason = subject.reference.disagreement(prompt.tolist(), tokens)
        require(not reason, f"prompt of {num_tokens} tokens: {reason}")


@_check("log-probs match the reference model", ability=Ability.LOG_PROBS, needs_reference=True)
async def _logprobs(subject: CheckedServer) -> str:
    assert subject.reference is not None
    variants: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 5},
    ]
    worst, num_without = 0.0, 0
    for seed, variant in enumerate(variants):
        prompt = subject.prompt(31, seed=seed)
        output = await subject.generate(prompt, max_tokens=16, ignore_eos=True, **variant)
        is_truncated = "top_p" in variant or "top_k" in variant
        if output.log_probs is None and is_truncated:
            num_without += 1
            continue
        require(output.log_probs is not None, f"no log-probs were returned with {variant}")
        wanted = subject.reference.logprobs(
            prompt.tolist(), output.token_ids, temperature=variant["temperature"]
        )
        difference = _difference(wanted, np.array(output.log_probs))
        require(
            difference <= subject.tolerance,
            f"with {variant} log-probs differ from the reference by up to {difference:.2g} nats; return "
            "log_softmax(logits / temperature), before top-k and top-p",
        )
        worst = max(worst, difference)
    suffix = "; no log-probs with top-k or top-p" if num_without else ""
    return f"largest difference {worst:.1g} nats{suffix}"


@_check(
    "the likeliest tokens and their log-probs are those of the model",
    ability=Ability.TOP_LOGPROBS,
    needs_reference=True,
)
async def _top_logprobs(subject: CheckedServer) -> str:
    assert subject.reference is not None
    num_top, worst = 3, 0.0
    for seed, temperature in enumerate((1.0, 0.7, 0.0)):
        prompt = subject.prompt(21, seed=seed)
        output = await subject.generate(
            prompt, max_tokens=4, ignore_eos=True, temperature=temperature, top_logprobs=num_top
        )
        shape = (len(output.token_ids), num_top)
        extras = output.extras
        for name in ("top_token_ids", "top_logprobs"):
            require(name in extras, f"extras have no {name}")
            require(
                extras[name].shape == shape, f"{name} has shape {list(extras[name].shape)}, not {list(shape)}"
            )
        for place, (tokens, logprobs) in enumerate(
            zip(extras["top_token_ids"].tolist(), extras["top_logprobs"].tolist(), strict=True)
        ):
            before = output.token_ids[:place]
            expected = [
                float(subject.reference.logprobs(prompt.tolist(), [*before, t], temperature=temperature)[-1])
                for t in tokens
            ]
            worst = max(worst, *[abs(a - b) for a, b in zip(logprobs, expected, strict=True)])
            require(len(set(tokens)) == num_top, f"the tokens {tokens} are not different")
            require(logprobs == sorted(logprobs, reverse=True), f"log-probs {logprobs} do not decrease")
            best = subject.reference.disagreement([*prompt.tolist(), *before], tokens[:1])
            require(not best, f"the first of the likeliest tokens after {place} tokens: {best}")
    require(
        worst <= subject.tolerance,
        f"log-probs are up to {worst:.2g} nats off; they must be log_softmax(logits / temperature)",
    )
    return f"largest difference {worst:.1g} nats"


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
        _require_valid(subject, output)


@_check("sampling with top_k=1 is greedy")
async def _top_k_one(subject: CheckedServer) -> None:
    prompt = subject.prompt(14, seed=4)
    output = await subject.generate(prompt, top_k=1, max_tokens=8, ignore_eos=True)
    subject.require_same(output.token_ids, await subject.greedy(prompt, 8), prompt=prompt, what="top_k=1")


@_check("a seed makes a completion reproducible", ability=Ability.SEED)
async def _seed(subject: CheckedServer) -> None:
    prompt = subject.prompt(13, seed=5)

    async def sample(seed: int) -> list[int]:
        output = await subject.generate(prompt, seed=seed, max_tokens=24, ignore_eos=True)
        return output.token_ids

    alone = await sample(7)
    together = await run_together(sample(seed) for seed in (7, 8, 9, 7))
    require(alone == together[0] == together[3], "the same seed gave different completions")
    require(len({tuple(tokens) for tokens in together}) > 1, "different seeds gave the same completion")


@_check("a resumed completion with a seed samples the same tokens", ability=Ability.FREE_SEEDS)
async def _continued_seed(subject: CheckedServer) -> None:
    for seed, kept in ((5, 1), (2**62 + 3, 9)):
        prompt = subject.prompt(17, seed=seed % 100)
        params: dict[str, Any] = {"seed": seed, "ignore_eos": True}
        whole = await subject.generate(prompt, max_tokens=20, **params)
        context = as_token_ids([*prompt.tolist(), *whole.token_ids[:kept]])
        rest = await subject.generate(context, max_tokens=20 - kept, num_sampled=kept, **params)
        require(
            rest.token_ids == whole.token_ids[kept:],
            f"resumed after {kept} tokens, it samples {rest.token_ids}, not {whole.token_ids[kept:]}",
        )


@_check("concurrent requests do not affect each other")
async def _concurrency(subject: CheckedServer) -> None:
    prompts = [subject.prompt(5 + 3 * i, seed=i) for i in range(16)]
    together = await run_together(subject.greedy(prompt, 6 + i) for i, prompt in enumerate(prompts))
    for i, (prompt, tokens) in enumerate(zip(prompts, together, strict=True)):
        alone = await subject.greedy(prompt, 6 + i)
        subject.require_same(tokens, alone, prompt=prompt, what=f"request {i} of {len(prompts)}")


@_check("the next turn of a session sees all earlier tokens")
async def _session(subject: CheckedServer) -> None:
    session = subject.session()
    prompt = subject.prompt(40, seed=6)
    first = await subject.greedy(prompt, 8, session=session)
    context = as_token_ids([*prompt.tolist(), *first, *subject.prompt(7, seed=7).tolist()])
    second = await subject.greedy(context, 8, session=session)
    subject.server.end_session(session)
    subject.require_same(second, await subject.greedy(context, 8), prompt=context, what="the second turn")


@_check("the next turn of a session reuses the cached prefix", ability=Ability.PREFIX_REUSE)
async def _prefix_reuse(subject: CheckedServer) -> str:
    try:
        return await _require_reuse(subject, seed=8)
    except CheckFailed:  # a working cache may evict one prefix, but not two in a row
        return await _require_reuse(subject, seed=80)


async def _require_reuse(subject: CheckedServer, *, seed: int) -> str:
    session = subject.session()
    prompt = subject.prompt(subject.max_model_len // 2, seed=seed)
    first = await subject.greedy(prompt, 8, session=session)
    context = as_token_ids([*prompt.tolist(), *first, *subject.prompt(5, seed=9).tolist()])
    output = await subject.generate(context, session=session, temperature=0.0, max_tokens=2)
    subject.server.end_session(session)
    cached = output.num_cached_tokens
    require(cached is not None, "num_cached_tokens is None; return the number of cached prompt tokens")
    require(
        (cached or 0) >= len(prompt) // 2,
        f"only {cached} of the {len(prompt)} prompt tokens of the first turn were cached",
    )
    return f"{cached} of {len(prompt) + len(first)} tokens cached"


@_check("a stream returns the whole completion in chunks")
async def _stream(subject: CheckedServer) -> str:
    prompt = subject.prompt(15, seed=10)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    session = subject.session()
    chunks = [chunk async for chunk in subject.server.stream(prompt, params, session)]
    subject.server.end_session(session)
    output = TokenOutput.from_chunks(chunks)
    _require_valid(subject, output)
    subject.require_same(output.token_ids, await subject.greedy(prompt, 24), prompt=prompt, what="the stream")
    require(
        [chunk.stop_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        and output.stop_reason == "length",
        f"the stop reasons of the chunks are {[chunk.stop_reason for chunk in chunks]}; "
        "set 'length' on the last one and None on the others",
    )
    if Ability.STREAMING in subject.server.abilities:
        require(len(chunks) > 1, "24 tokens were returned in a single chunk")
    return f"{len(chunks)} chunks"


@_check("closing a stream aborts its request", ability=Ability.STREAMING)
async def _closed_stream(subject: CheckedServer) -> str:
    clock = asyncio.get_running_loop().time
    params = SamplingParams(max_tokens=subject.long_tokens, ignore_eos=True)
    session, prompt = subject.session(), subject.prompt(8, seed=11)
    started = clock()
    num_tokens = sum([len(c.token_ids) async for c in subject.server.stream(prompt, params, session)])
    whole_s = clock() - started
    require(num_tokens == subject.long_tokens, f"{num_tokens} of {subject.long_tokens} tokens were streamed")

    async def start_and_close() -> None:
        stream = subject.server.stream(prompt, params, session)
        await anext(stream)
        await stream.aclose()

    share = await subject.require_early_end(start_and_close, whole_s=whole_s)
    subject.server.end_session(session)
    return share


def _require_valid(subject: CheckedServer, output: TokenOutput) -> None:
    invalid = [token for token in output.token_ids if not 0 <= token < subject.vocab_size]
    require(not invalid, f"token ids {invalid[:3]} are not below the vocabulary size {subject.vocab_size}")
    if Ability.LOG_PROBS not in subject.server.abilities:
        return
    if output.log_probs is None:
        raise CheckFailed("no log-probs were returned, although the server claims them")
    wrong = [p for p in output.log_probs if not math.isfinite(p) or p > 1e-4]
    require(not wrong, f"{wrong[:3]} are not log-probs; they must be finite and at most 0")


@_score_check("scores begin at start, and do not depend on it or on other requests")
async def _score_start(subject: CheckedServer) -> None:
    texts = [subject.prompt(20 + 3 * number, seed=number) for number in range(4)]
    whole = await run_together(_score(subject, text) for text in texts)
    for text, scores in zip(texts, whole, strict=True):
        for start in (1, len(text) // 2, len(text) - 1):
            part = await _score(subject, text, start=start)
            difference = _difference(part.logprobs, scores.logprobs[start - 1 :])
            require(
                difference <= subject.tolerance,
                f"from start={start}, log-probs of a text of {len(text)} tokens differ by up to {difference:.2g} nats "
                "from those of the whole text; every token is scored given all tokens before it",
            )


@_score_check("scores of a completion are its log-probs")
async def _score_completion(subject: CheckedServer) -> str:
    if Ability.LOG_PROBS not in subject.server.abilities:
        raise CheckSkipped(f"the server does not claim {Ability.LOG_PROBS}")
    worst = 0.0
    for seed in range(2):
        prompt = subject.prompt(19, seed=seed)
        output = await subject.generate(prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
        text = as_token_ids([*prompt.tolist(), *output.token_ids])
        scores = await _score(subject, text, start=len(prompt))
        worst = max(worst, _difference(scores.logprobs, np.array(output.log_probs, np.float32)))
    require(
        worst <= subject.tolerance,
        f"scores differ from the log-probs of a greedy completion by up to {worst:.2g} nats; both are "
        "log_softmax(logits)",
    )
    return f"largest difference {worst:.1g} nats"


@_score_check("the likeliest tokens of scores are in order")
async def _score_top(subject: CheckedServer) -> None:
    text, start = subject.prompt(26, seed=5), 7
    scores = await _score(subject, text, start=start, top_logprobs=NUM_TOP)
    top_ids, top_logprobs = scores.top_ids, scores.top_logprobs
    if top_ids is None or top_logprobs is None:
        raise CheckFailed(f"top_logprobs is {NUM_TOP}, but no likeliest tokens were returned")
    for place, (token, logprob) in enumerate(zip(text[start:].tolist(), scores.logprobs, strict=True)):
        tokens, logprobs = top_ids[place].tolist(), top_logprobs[place]
        require(len(set(tokens)) == NUM_TOP, f"the tokens {tokens} are not different")
        require(bool((np.diff(logprobs) <= 0).all()), f"log-probs {logprobs.tolist()} do not decrease")
        own = logprobs[tokens.index(token)] if token in tokens else logprobs[-1]
        is_right = abs(own - logprob) <= subject.tolerance if token in tokens else own >= logprob
        require(
            bool(is_right),
            f"token {start + place} has log-prob {logprob}, but the likeliest tokens there are {tokens} with "
            f"{logprobs.tolist()}",
        )


@_score_check("scores match the reference model", needs_reference=True)
async def _score_reference(subject: CheckedServer) -> str:
    assert subject.reference is not None
    worst = 0.0
    for num_tokens in (2, 33, subject.max_model_len - 1):
        text = subject.prompt(num_tokens, seed=num_tokens)
        scores = await _score(subject, text)
        wanted = subject.reference.logprobs(text[:1].tolist(), text[1:].tolist())
        worst = max(worst, _difference(scores.logprobs, wanted))
    require(
        worst <= subject.tolerance,
        f"scores differ from the reference by up to {worst:.2g} nats; return log_softmax(logits) at temperature 1",
    )
    return f"largest difference {worst:.1g} nats"


async def _score(
    subject: CheckedServer, text: IntArray, *, start: int = 1, top_logprobs: int = 0
) -> TokenScores:
    return checked_scores(
        await subject.server.score(text, start=start, top_logprobs=top_logprobs),
        num_scores=len(text) - start,
        top_logprobs=top_logprobs,
        server=subject.server.name,
        vocab_size=subject.vocab_size,
    )


def _difference(one: FloatArray, other: FloatArray) -> float:
    return float(np.abs(one - other).max(initial=0.0))


SERVER_CHECKS.checks += CONTROL_CHECKS.checks
