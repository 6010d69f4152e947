"""Micro-batches contain every token and little padding."""

from __future__ import annotations

import pytest
import torch

from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.training.forward import response_logprobs
from agent_loop.training.losses.logprobs import token_logprobs
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    return assemble(sample_trajectories(tiny_policy()), pad_token_id=PAD, prompt_width=9, response_width=12)


def cut(batch: RolloutBatch, *, max_tokens: int) -> list[MicroBatch]:
    rows = torch.arange(len(batch))
    return list(micro_batches(batch, rows=rows, max_tokens=max_tokens, device=torch.device("cpu")))


@pytest.mark.parametrize("max_tokens", [1, 20, 50, 10_000])
def test_every_token_is_in_exactly_one_micro_batch(batch: RolloutBatch, max_tokens: int) -> None:
    parts = cut(batch, max_tokens=max_tokens)

    assert sorted(torch.cat([part.rows_B for part in parts]).tolist()) == list(range(len(batch)))
    for part in parts:
        whole = batch[part.rows_B]
        for mine, theirs in (
            (part.input_ids_BW, whole["input_ids"]),
            (part.position_ids, whole["position_ids"]),
        ):
            attended = part.attention_mask_BW.bool()
            assert torch.equal(mine[attended], theirs[whole["attention_mask"].bool()])
        assert torch.equal(
            part.response_ids_BR[part.mask_BR.bool()], whole["responses"][whole["response_mask"].bool()]
        )
        assert torch.equal(part.cut(batch["responses"]), part.response_ids_BR)


def test_a_micro_batch_keeps_to_its_budget_unless_one_row_is_longer(batch: RolloutBatch) -> None:
    for max_tokens in (1, 20, 50):
        for part in cut(batch, max_tokens=max_tokens):
            assert part.input_ids_BW.numel() <= max_tokens or len(part.rows_B) == 1


def test_logprobs_of_a_padded_micro_batch_equal_those_of_each_row_alone(batch: RolloutBatch) -> None:
    model = tiny_policy()
    for part in cut(batch, max_tokens=60):
        found = response_logprobs(model, part, temperature=0.8)
        for index, row in enumerate(part.rows_B.tolist()):
            attended = batch["attention_mask"][row].bool()
            ids = batch["input_ids"][row][attended]
            num_prompt = int(batch["attention_mask"][row, :9].sum())
            logits_TV = model(ids[None]).logits[0, num_prompt - 1 : -1]
            expected = token_logprobs(
                logits_TV,
                token_ids_M=ids[num_prompt:],
                place_M=torch.arange(len(logits_TV)),
                temperature=0.8,
            )
            is_model_T = part.mask_BR[index, : len(logits_TV)].bool()
            for found_BR, expected_T in (
                (found.sampled_BR, expected.sampled_M),
                (found.entropy_BR, expected.entropy_M),
            ):
                found_R = found_BR[index]
                torch.testing.assert_close(
                    found_R[: len(is_model_T)], expected_T * is_model_T, atol=1e-5, rtol=1e-5
                )
                assert not found_R[len(is_model_T) :].any()
