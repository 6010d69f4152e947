"""Readers of the scores of vLLM and SGLang, without the engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_loop.errors import BadPrompt, BadServerReply, ServerError
from agent_loop.servers.sglang.requests import read_scores, score_body
from agent_loop.servers.vllm.limits import ModelInfo
from agent_loop.servers.vllm.replies import ReplyReader
from agent_loop.servers.vllm.scores import read_flat_scores, score_sampling
from agent_loop.types import as_token_ids

TEXT = as_token_ids([4, 5, 6])


def flat(token_ids: list[int], logprobs: list[float]) -> Any:
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs)


def read_flat(given: Any, *, start: int = 1, num_top: int = 1) -> Any:
    return read_flat_scores(given, token_ids=TEXT, start=start, num_top=num_top, server="s")


def test_flat_log_probs_of_vllm_have_the_own_token_of_each_place_first() -> None:
    scores = read_flat(flat([5, 9, 6, 6], [-2.0, -0.5, -0.25, -0.25]))
    assert scores.logprobs.tolist() == [-2.0, -0.25]
    assert (scores.top_ids.tolist(), scores.top_logprobs.tolist()) == ([[9], [6]], [[-0.5], [-0.25]])
    later = read_flat(flat([5, 6], [-2.0, -0.25]), start=2, num_top=0)
    assert (later.logprobs.tolist(), later.top_ids) == ([-0.25], None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (flat([5, 9, 6], [-2.0, -0.5, -0.25]), "3 log-probs of a prompt, not 2 x 2"),
        (flat([5, 9, 7, 6], [-2.0, -0.5, -0.25, -0.25]), "another prompt"),
    ],
)
def test_flat_log_probs_of_another_prompt_are_refused(given: Any, message: str) -> None:
    with pytest.raises(BadServerReply, match=message):
        read_flat(given)


def test_a_limit_of_vllm_names_its_option() -> None:
    assert score_sampling(64, max_logprobs=-1, server="s")["prompt_logprobs"] == 64
    with pytest.raises(
        BadPrompt, match=r"engine_kwargs\.max_logprobs is 20; leave max_logprobs out, or set it to 64"
    ):
        score_sampling(64, max_logprobs=20, server="s")


@pytest.mark.parametrize("reply", [{}, {"prompt_logprobs": None}, {"prompt_logprobs": [None, {}, {}]}, []])
def test_a_reply_of_vllm_without_log_probs_of_the_prompt_is_refused(reply: Any) -> None:
    with pytest.raises(BadServerReply, match="no log-probs of the prompt"):
        ReplyReader("s").scores(reply, token_ids=TEXT, start=1, num_top=0)


@pytest.mark.parametrize(("num_positions", "context"), [(512, 193), (193, 193), (192, 192), (0, 192)])
def test_vllm_gets_one_further_token_of_context_if_the_model_has_the_position(
    num_positions: int, context: int
) -> None:
    model = ModelInfo(vocab_size=9, eos_token_ids=(), num_positions=num_positions)
    assert model.context_for_scores(192) == context


def reply_of_sglang(entries: Any, *, top: Any = None, finish: Any = None) -> dict[str, Any]:
    meta = {"input_token_logprobs": entries, "input_top_logprobs": top, "finish_reason": finish}
    return {"output_ids": [], "meta_info": meta}


def read_sglang(reply: Any, *, start: int = 1, num_top: int = 1) -> Any:
    return read_scores(reply, token_ids=TEXT, start=start, num_top=num_top, server="s")


def test_sglang_is_asked_for_one_token_more_because_its_first_has_no_log_prob() -> None:
    body = score_body(TEXT, start=2, num_top=1, rid="r")
    assert (body["logprob_start_len"], body["top_logprobs_num"]) == (1, 1)
    top = [None, [[-0.25, 8, None]]]
    scores = read_sglang(reply_of_sglang([[None, 5, None], [-0.5, 6, None]], top=top), start=2)
    assert scores.logprobs.tolist() == [-0.5]
    assert (scores.top_ids.tolist(), scores.top_logprobs.tolist()) == ([[8]], [[-0.25]])
    assert scores.logprobs.dtype == np.float32


def test_sglang_may_write_the_last_id_of_the_vocabulary_as_0() -> None:
    reply = reply_of_sglang([[None, 4], [-1.0, 5], [-0.5, 0]])
    assert read_sglang(reply, num_top=0).logprobs.tolist() == [-1.0, -0.5]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ([], BadServerReply),
        (reply_of_sglang([[None, 4], [-1.0, 0], [-0.5, 6]]), BadServerReply),
        (reply_of_sglang([[None, 4], [-0.5, 5]]), BadServerReply),
        (reply_of_sglang([[None, 4], [None, 5], [-0.5, 6]]), BadServerReply),
        (reply_of_sglang([[None, 4], [-1.0, 5], [-0.5, 6]], top=[None, [[-1.0, 5]]]), BadServerReply),
        (reply_of_sglang([], finish={"type": "abort", "message": "too long"}), ServerError),
        ({"error": {"message": "no memory"}}, ServerError),
    ],
)
def test_a_reply_of_sglang_without_the_log_probs_is_an_error(reply: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        read_sglang(reply)
    assert type(caught.value) is error
