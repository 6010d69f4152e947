"""Tests of `prompt_logprobs` of `/v1/completions`, and of the scores of a pool of servers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import openai
import pytest

from agent_loop.errors import ServerDied
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.types import IntArray
from tests.helpers import small_tokenizer
from tests.serve.applications import MODEL, SpellingServer, embedded, serve_app

pytestmark = pytest.mark.virtual_time


def half(token_ids: IntArray) -> list[float]:
    return [math.log(0.5)] * (len(token_ids) - 1)


def score(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    body = {"prompt_logprobs": 1, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, extra_body=body)


def test_prompts_of_text_and_of_token_ids_have_the_same_log_probs() -> None:
    ids = small_tokenizer().encode("say hello")
    with serve_app([embedded()]) as served:
        client = openai.OpenAI(base_url=served.url, api_key="-", max_retries=0)
        several = score(client, ["say hello", "hello"])
        one = score(client, ids)
    assert len(several.choices) == 2
    first, *places = one.choices[0].prompt_logprobs
    assert first is None
    for place, other in zip(places, several.choices[0].prompt_logprobs[1:], strict=True):
        assert place.keys() == other.keys()
        assert [place[token]["logprob"] for token in place] == pytest.approx(
            [other[token]["logprob"] for token in place], abs=1e-5
        )
    assert [str(token) in place for token, place in zip(ids[1:], places, strict=True)] == [True] * len(places)
    assert {len(place) for place in places} <= {1, 2}, "the token itself and the likeliest one"
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(ids), 0)


def test_requests_that_cannot_be_answered_say_why() -> None:
    with serve_app([embedded()], max_model_len=8) as served:
        client = openai.OpenAI(base_url=served.url, api_key="-", max_retries=0)
        for fields, message in (
            ({"extra_body": {"prompt_logprobs": 1}, "max_tokens": 2}, "set max_tokens to 0"),
            ({"max_tokens": 0}, "give at least 1, or prompt_logprobs"),
            ({"extra_body": {"prompt_logprobs": -1}, "max_tokens": 0}, "prompt_logprobs"),
            ({"extra_body": {"prompt_logprobs": 1}, "max_tokens": 0, "prompt": [1] * 9}, "has 9 tokens"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.completions.create(**{"model": MODEL, "prompt": [1, 2], **fields})
    with serve_app([SpellingServer()]) as served:
        client = openai.OpenAI(base_url=served.url, api_key="-", max_retries=0)
        with pytest.raises(openai.APIStatusError, match="no server can score the tokens of a text"):
            score(client, [1, 2])


async def test_texts_are_spread_over_the_servers_and_another_one_replaces_a_dead_one() -> None:
    first, second = (ScriptedServer([], name=name, scorer=half) for name in ("a", "b"))
    plain = ScriptedServer([], name="c")
    manager = AsyncLLMServerManager([plain, first, second])
    first.die()
    scores = await manager.score([1, 2, 3], start=2)
    assert scores.logprobs.tolist() == [np.float32(math.log(0.5))]
    assert [len(server.scored) for server in (plain, first, second)] == [0, 0, 1]
    second.die()
    with pytest.raises(ServerDied):
        await manager.score([1, 2, 3])
