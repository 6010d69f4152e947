"""Tests of JSON schemas, penalties and min-p in the embedded engine."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agent_loop.checks import Reference, check_server
from agent_loop.errors import SamplingParamsError
from agent_loop.servers.base import Ability
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.grammar import GrammarCompiler
from agent_loop.types import SamplingParams
from tests.engines.common import (
    assert_logprobs_are_of_the_allowed_tokens,
    assert_penalties_give_log_probs_of_the_penalised_logits,
)
from tests.helpers import small_tokenizer
from tests.servers.tiny_embedded import joined, tiny_model

TOKENIZER = small_tokenizer()
VOCAB_SIZE = len(TOKENIZER) + 5
"""Larger than the tokenizer's, as in most models."""
END = int(TOKENIZER.eos_token_id)
PROMPT = np.array(TOKENIZER.encode("say hello"), np.int32)
COLOURS = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["colour", "n"],
    "additionalProperties": False,
}
SCHEMA = json.dumps(COLOURS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    # Small logits, so that a model without training ends runs of white space soon.
    tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=END, initializer_range=0.02).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncGenerator[EmbeddedServer]:
    config = EmbeddedConfig(**{"max_model_len": 400, **settings})
    server = EmbeddedServer.from_pretrained(folder, config=config)
    try:
        yield server
    finally:
        await server.close()


def params(seed: int = 0, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"json_schema": SCHEMA, "max_tokens": 300, "seed": seed, **changes})


def reference() -> Any:
    model = tiny_model(vocab_size=VOCAB_SIZE, eos_token_id=END, initializer_range=0.02)
    model.generation_config.eos_token_id = END
    return model


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("cache", ["shared", "per_request"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_completions_match_the_schema_and_have_the_log_probs_of_the_allowed_tokens(
    folder: Path, cache: str, temperature: float
) -> None:
    async with serving(folder, cache=cache) as server:
        assert {Ability.JSON_SCHEMA, Ability.PENALTIES, Ability.MIN_P} <= server.abilities
        await assert_logprobs_are_of_the_allowed_tokens(server, reference(), folder, temperature=temperature)


async def test_a_completion_resumed_anywhere_is_the_uninterrupted_one(folder: Path) -> None:
    async with serving(folder) as server:
        whole = await server.generate(PROMPT, params(4), "whole")
        for cut in range(1, len(whole.token_ids)):
            prompt = joined(PROMPT, whole.token_ids[:cut])
            rest = await server.generate(prompt, params(4).after(cut), f"cut{cut}")
            assert rest.token_ids == whole.token_ids[cut:]
        with pytest.raises(SamplingParamsError, match="does not allow token 0 of the 1"):
            await server.generate(joined(PROMPT, [5]), params(4).after(1), "other")


async def test_stop_tokens_are_allowed_only_where_the_text_is_complete(folder: Path) -> None:
    [letter] = TOKENIZER.encode("e", add_special_tokens=False)
    async with serving(folder) as server:
        stopped = params(0, json_schema='{"const": "hello"}', stop_token_ids=(letter,))
        with_letter = await server.generate(PROMPT, stopped, "letter")
        free = params(0, json_schema='{"const": "ho"}', ignore_eos=True)
        without_stops = await server.generate(PROMPT, free, "free")
    assert letter not in with_letter.token_ids[:-1]
    assert with_letter.stop_reason == without_stops.stop_reason == "stop"
    assert TOKENIZER.decode(without_stops.token_ids) == '"ho"'


@pytest.mark.parametrize("schema", ['{"type": "nonsense"}', '{"type": "string", "pattern": "("}'])
async def test_an_invalid_schema_is_refused_and_the_engine_runs_on(folder: Path, schema: str) -> None:
    async with serving(folder) as server:
        with pytest.raises(SamplingParamsError, match="fix the schema"):
            await server.generate(PROMPT, params(json_schema=schema), "s")
        assert (await server.generate(PROMPT, params(), "s")).stop_reason == "stop"


async def test_without_the_package_the_ability_is_missing_and_the_error_says_how_to_install_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.servers.embedded.grammar.find_spec", lambda name: None)
    async with serving(folder) as server:
        assert Ability.JSON_SCHEMA not in server.abilities
        with pytest.raises(SamplingParamsError, match=r'pip install "agent-loop\[grammar\]"'):
            await server.generate(PROMPT, params(), "s")


async def test_a_model_without_a_tokenizer_does_not_claim_schemas(tmp_path: Path) -> None:
    tiny_model(vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    without = GrammarCompiler(str(tmp_path), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({END}))
    with pytest.raises(SamplingParamsError, match=r"set model\.tokenizer_path"):
        without.grammar(SCHEMA, stop_token_ids=frozenset({END}))
    async with serving(tmp_path) as server:
        assert Ability.JSON_SCHEMA not in server.abilities
        with pytest.raises(SamplingParamsError, match="needs the tokenizer of the model"):
            await server.generate(PROMPT, params(), "s")


def test_a_tokenizer_like_those_of_qwen_allows_texts_in_many_tokens(tmp_path: Path) -> None:
    """A byte-level BPE whose end token and control tokens lie behind the vocabulary, and a larger embedding."""
    tokenizer: PreTrainedTokenizerFast = copy.deepcopy(small_tokenizer())  # the original is shared
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|behind|>"]})
    tokenizer.save_pretrained(tmp_path)
    end = int(tokenizer.convert_tokens_to_ids("<|behind|>"))
    compiler = GrammarCompiler(str(tmp_path), vocab_size=1024, eos_token_ids=frozenset({end, END}))
    grammar = compiler.grammar('{"const": "Zoë ☃"}', stop_token_ids=frozenset({end}))
    for token in tokenizer.encode('"Zoë ☃"', add_special_tokens=False):
        allowed = grammar.allowed(1024)
        assert allowed[token]
        assert not allowed[[end, END]].any()
        assert not allowed[len(tokenizer) :].any()
        grammar.accept(token)
    assert np.flatnonzero(grammar.allowed(1024)).tolist() == [end]


async def test_penalties_change_the_logits_and_a_resumed_completion_counts_its_tokens(folder: Path) -> None:
    given = SamplingParams(
        seed=3, max_tokens=24, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=0.9
    )
    async with serving(folder) as server:
        await assert_penalties_give_log_probs_of_the_penalised_logits(server, reference())
        output = await server.generate(PROMPT, given, "whole")
        plain = await server.generate(PROMPT, SamplingParams(seed=3, max_tokens=24), "plain")
        rest = await server.generate(joined(PROMPT, output.token_ids[:10]), given.after(10), "rest")
    assert rest.token_ids == output.token_ids[10:]
    assert plain.token_ids != output.token_ids


@pytest.mark.nightly
async def test_a_server_with_a_tokenizer_passes_the_check_of_schemas(folder: Path) -> None:
    async with serving(folder, max_model_len=256) as server:
        report = await check_server(server, max_model_len=256, reference=Reference.load(folder))
    report.raise_if_failed()
    assert "a completion under a schema ends where the text is complete" in report.named("passed")
