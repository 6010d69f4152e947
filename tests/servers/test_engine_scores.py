"""Readers of the scores of vLLM and SGLang, without the engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent_loop.errors import BadServerReply, ServerError
from agent_loop.servers.sglang.requests import read_scores, score_body
from agent_loop.servers.vllm.limits import ModelInfo
from agent_loop.types import as_token_ids

TEXT = as_token_ids([4, 5, 6])


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
