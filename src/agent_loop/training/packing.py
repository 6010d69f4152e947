"""Several rows in one line of the input, so that little of it is padding.

A line holds rows end to end, with positions that begin at 0 for each: from those, `transformers` builds a mask that
keeps the rows apart. K lines of L tokens, M response tokens; B, P, R as in `micro_batches`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.errors import ConfigError
from agent_loop.training.micro_batches import MicroBatch

TOLERANCE = 0.02
"""Of the largest activation: half-precision attention differs by so much where its shapes do."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What the model gets, and where it answers."""

    input_ids_KL: Tensor
    position_ids_KL: Tensor
    """0 at padding, so that each pad is a row of its own."""
    before_M: Tensor
    """For each response token, row by row, the place in the flattened lines of the token before it."""


def pack(micro_batch: MicroBatch) -> PackedRows:
    """Lays the rows of a micro-batch out as its `lines` say."""
    is_token_BW = micro_batch.attention_mask_BW.bool()
    lengths: list[int] = cast(Any, is_token_BW.sum(dim=1)).tolist()
    responses: list[int] = cast(Any, micro_batch.is_response_BR.sum(dim=1)).tolist()
    width = max(sum(lengths[row] for row in line) for line in micro_batch.lines)
    input_ids_KL = micro_batch.input_ids_BW.new_zeros(len(micro_batch.lines), width)
    position_ids_KL = torch.zeros_like(input_ids_KL)
    before: list[Tensor] = [torch.empty(0)] * len(lengths)
    for number, line in enumerate(micro_batch.lines):
        start = 0
        for row in line:
            end = start + lengths[row]
            input_ids_KL[number, start:end] = micro_batch.input_ids_BW[row, is_token_BW[row]]
            position_ids_KL[number, start:end] = torch.arange(lengths[row], device=input_ids_KL.device)
            last = number * width + end - 1
            before[row] = torch.arange(last - responses[row], last)
            start = end
    return PackedRows(
        input_ids_KL=input_ids_KL,
        position_ids_KL=position_ids_KL,
        before_M=torch.cat(before).to(input_ids_KL.device),
    )


@torch.no_grad()
def prove_packing(model: PreTrainedModel) -> None:
    """Tries whether rows that share lines get the activations that they get alone.

    Raises:
        ConfigError: They do not: the model's attention sees across them.
    """
    config: Any = model.config
    ids_BW = torch.arange(12, device=model.device).view(4, 3) % config.get_text_config().vocab_size
    positions_BW = torch.arange(3, device=model.device).expand(4, 3)

    def activations(*, num_lines: int) -> Tensor:
        outputs = cast(Any, model).base_model(
            input_ids=ids_BW.reshape(num_lines, -1),
            position_ids=positions_BW.reshape(num_lines, -1),
            use_cache=False,
        )
        return outputs.last_hidden_state.reshape(12, -1).float()

    packed, alone = activations(num_lines=2), activations(num_lines=4)
    difference = float((packed - alone).abs().max())
    if not difference <= TOLERANCE * float(alone.abs().max()):
        raise ConfigError(
            f"use_packing is on, but {config.model_type} with {config._attn_implementation} attention lets packed rows "
            f"see each other (activations differ by {difference:.2g}); set use_packing=false"
        )
