"""Batches in verl's TransferQueue: waiting for them, and reading them as padded arrays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import transfer_queue

from overhead.rounds import Columns
from overhead.shapes import Shape

POLL_S = 0.2
"""Seconds between two requests for the statuses."""


def wait_for_statuses(uids: Sequence[str], *, partition: str = "train") -> None:
    """Wait until all prompts are finished.

    Raises:
        RuntimeError: A prompt failed.
    """
    while True:
        tags = transfer_queue.kv_list(partition)[partition]
        statuses = {tags[uid]["status"] for uid in uids}
        if "failure" in statuses:
            raise RuntimeError("a prompt failed; see the log of the workers")
        if statuses == {"finished"}:
            return
        time.sleep(POLL_S)


def read_columns(uids: Sequence[str], *, shape: Shape, pad_token_id: int = 0) -> Columns:
    """Return the trajectories of these prompts in order, with one trajectory for each, padded."""
    keys = [f"{uid}_0_0" for uid in uids]
    data: Any = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
    num_rows = len(keys)
    prompts = np.full((num_rows, shape.prompt_width), pad_token_id, np.int64)
    responses = np.full((num_rows, shape.response_width), pad_token_id, np.int64)
    mask = np.zeros((num_rows, shape.response_width), np.int64)
    logprobs = np.zeros((num_rows, shape.response_width), np.float32)
    for row in range(num_rows):
        prompt, response = data["prompts"][row], data["responses"][row]
        prompts[row, shape.prompt_width - len(prompt) :] = prompt
        responses[row, : len(response)] = response
        mask[row, : len(response)] = data["response_mask"][row]
        logprobs[row, : len(response)] = data["rollout_log_probs"][row]
    return Columns(prompts, responses, mask, logprobs)
