"""Checks of completions under a JSON schema, the same for all engines."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.embedded.grammar import GrammarCompiler
from agent_loop.types import IntArray, SamplingParams, TokenOutput
from tests.engines.common import LOG_PROB_TOLERANCE, generate_all, prompts

COLOURS = ("red", "green", "blue", "bluish")
SCHEMA = json.dumps({"enum": COLOURS})
"""A schema without optional white space, so that all engines allow the same tokens."""
LETTERS = json.dumps({"type": "string", "pattern": "^[ab]{120}$"})
"""A schema that takes long, and in which no token is white space."""


def constrained_logprobs(
    model: Any, path: Path, prompt: IntArray, output: TokenOutput, *, temperature: float
) -> list[float]:
    """Return log-probs of the distribution over the tokens that `SCHEMA` allows, by one forward over all tokens."""
    end = int(model.generation_config.eos_token_id)
    vocab_size = int(model.config.vocab_size)
    compiler = GrammarCompiler(str(path), vocab_size=vocab_size, eos_token_ids=frozenset({end}))
    grammar = compiler.grammar(SCHEMA, stop_token_ids=frozenset({end}))
    ids = torch.tensor([*prompt.tolist(), *output.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].double()
    found: list[float] = []
    for row, token in zip(logits / (temperature or 1.0), output.token_ids, strict=True):
        allowed = torch.from_numpy(grammar.allowed(vocab_size))
        found.append(float(row.masked_fill(~allowed, -torch.inf).log_softmax(-1)[token]))
        grammar.accept(token)
    return found


async def assert_logprobs_are_of_the_allowed_tokens(
    server: AsyncServerBase, model: Any, path: Path, *, temperature: float
) -> None:
    """Compare completions under a schema with the constrained distribution of the reference."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    all_prompts = prompts(12, seed=9)
    params = SamplingParams(temperature=temperature, max_tokens=40, json_schema=SCHEMA, top_logprobs=5)
    outputs = await generate_all(server, all_prompts, params, prefix=f"schema-{temperature}-")
    texts: set[str] = set()
    num_forced = 0
    for prompt, output in zip(all_prompts, outputs, strict=True):
        assert output.stop_reason == "stop"
        texts.add(json.loads(tokenizer.decode(output.token_ids[:-1])))
        expected = constrained_logprobs(model, path, prompt, output, temperature=temperature)
        np.testing.assert_allclose(output.log_probs or [], expected, atol=LOG_PROB_TOLERANCE)
        is_forced = [logprob == 0.0 for logprob in expected]
        assert output.chunks[0].with_forced().extras["forced"].tolist() == is_forced
        num_forced += sum(is_forced)
    assert texts <= set(COLOURS)
    assert len(texts) > 1
    assert num_forced >= len(outputs)


async def assert_penalties_give_log_probs_of_the_penalised_logits(
    server: AsyncServerBase, model: Any, *, has_repetition: bool = True, counts_late: bool = False
) -> None:
    """Compare completions with penalties with the reference's penalised logits.

    Args:
        has_repetition: Whether the server has `repetition_penalty`.
        counts_late: Whether each token counts one step late, and the last token of the prompt at first.
    """
    prompt = prompts(1, seed=10)[0]
    factor = 1.3 if has_repetition else 1.0
    params = SamplingParams(
        temperature=0.8,
        max_tokens=24,
        ignore_eos=True,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=factor,
    )
    output = await server.generate(prompt, params, "penalties")
    ids = torch.tensor([*prompt.tolist(), *output.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, len(prompt) - 1 :].double()
    expected: list[float] = []
    for place, row in enumerate(logits):
        counted = [int(prompt[-1]), *output.token_ids] if counts_late else output.token_ids
        before = counted[:place]
        for token in {*prompt.tolist(), *before}:
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in set(before):
            row[token] -= 0.7 + 0.4 * before.count(token)
        expected.append(float((row / 0.8).log_softmax(-1)[output.token_ids[place]]))
    np.testing.assert_allclose(output.log_probs or [], expected, atol=LOG_PROB_TOLERANCE)


def assert_are_letters(path: Path, outputs: Sequence[TokenOutput]) -> None:
    """Check that completions are whole and match `LETTERS`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    for output in outputs:
        text = tokenizer.decode(output.token_ids)
        assert output.stop_reason == "stop", text
        assert re.fullmatch('"[ab]{120}"', tokenizer.decode(output.token_ids[:-1])), text
