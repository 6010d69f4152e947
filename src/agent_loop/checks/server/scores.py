"""Checks of scores: the log-probs that a server gives to the tokens of a text."""

from __future__ import annotations

from functools import partial

import numpy as np

from agent_loop.checks.server.checked_server import CheckedServer, add_check
from agent_loop.runtime.concurrency import run_together
from agent_loop.servers.base import Ability
from agent_loop.servers.scores import TokenScores, checked_scores
from agent_loop.testing.conformance import CheckFailed, CheckSkipped, CheckSuite, require
from agent_loop.types import FloatArray, IntArray, as_token_ids

NUM_TOP = 3
SCORE_CHECKS = CheckSuite[CheckedServer]()
_check = partial(add_check, suite=SCORE_CHECKS, ability=Ability.SCORE)


@_check("scores begin at start, and do not depend on it or on other requests")
async def _start(subject: CheckedServer) -> None:
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


@_check("scores of a completion are its log-probs")
async def _completion(subject: CheckedServer) -> str:
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


@_check("the likeliest tokens of scores are in order")
async def _top(subject: CheckedServer) -> None:
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


@_check("scores match the reference model", needs_reference=True)
async def _reference(subject: CheckedServer) -> str:
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
