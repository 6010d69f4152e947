"""Comparison of batched rows with single rows before a training, for each kind of batching that it will use.

In some models, padding or neighbouring rows change the outputs of a row: recurrent layers run through padding, and
convolutions and windows reach into the previous row. Such a model would be trained on wrong log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_loop.config import OptimConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.length_limits import length_limits
from agent_loop.servers.embedded.rounding import rounding_sensitivity
from agent_loop.servers.embedded.vision import VISION_MODELS
from agent_loop.training.forward import model_inputs, outputs_at
from agent_loop.training.logit_head import logit_transform
from agent_loop.training.micro_batches import MicroBatch
from agent_loop.training.prefix_tree import use_tree_attention

TOLERANCE = 1e-4
"""Difference of float32 outputs that is always accepted, as a share of the largest output."""
LARGEST_TOLERANCE = 5e-3
"""Difference of float32 outputs that is never accepted as rounding."""
TOLERANCE_OF_SHORT_TYPES = 0.02
MARGIN = 16.0
"""Factor on the measured effect of rounding. Two kinds of batching differ in many roundings; the measured disturbance
is one per embedding."""
SHORT_ROWS = ((3, 6), (7, 2), (1, 4), (5, 5))
"""Tokens of the prompt and of the response of each row."""
TOKENS_BEYOND = 6
"""Number of tokens by which a row exceeds the limit that it crosses."""
LONGEST_LINE = 256
"""Tokens of the longest line in which short rows are tested together around a limit."""
CPU_OPERATIONS = 2e12
"""On a CPU, maximum of the tokens of a row times the parameters of the model."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: list[int]
    response: list[int]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Rows of one micro-batch, and the outputs of the model for each row alone."""

    rows: tuple[_Row, ...]
    micro_batch: MicroBatch
    """The rows, padded."""
    expected_MX: Tensor


def prove_batching(model: PreTrainedModel, *, config: OptimConfig, section: str, max_row_tokens: int) -> bool:
    """Test the configured kinds of batching on rows that cross the model's windows and chunks, and test the head.

    With shared prefixes, the model gets the attention of prefix trees, which computes other rows as before.

    Args:
        model: Language model, or a model with one value per token.
        config: Settings; `use_packing` and `share_prefixes` select the kinds. Rows with images are always padded.
        section: Name of `config` in messages: `actor` or `critic`.
        max_row_tokens: Length of the longest row to test.

    Returns:
        Whether rows may be padded. If not, a warning is logged, and each row needs its own forward.

    Raises:
        ConfigError: The model's forward fails, packed rows or rows of a prefix tree differ from single rows, or the
            model cannot be computed over a prefix tree.
    """
    name = type(model).__name__
    packs, shares = config.use_packing and not config.share_prefixes, config.share_prefixes
    with torch.no_grad():
        trials = _trials(model, section=section, max_row_tokens=max_row_tokens)
        tolerance = _tolerance(model, trials[0])
        if cast(Any, model).get_output_embeddings() is not None:
            alone = _padded(trials[0].rows[:1], device=model.device)
            logit_transform(model, model_inputs(model, alone)[0])
        if packs or shares:
            fault = _tree_fault(model) if shares else None
            fault = fault or _fault(model, trials, tolerance=tolerance, batch=_shared if shares else _packed)
            if fault is not None:
                key = f"{section}.{'share_prefixes' if shares else 'use_packing'}"
                raise ConfigError(f"{key} is on, but with it {name} {fault}; set {key}=false")
            if model.config.model_type not in VISION_MODELS:
                return True
        fault = _fault(model, trials, tolerance=tolerance, batch=lambda padded: padded)
    if fault is not None:
        logger.warning(
            "%s: each row is computed in a forward of its own, which is slower, because with padded rows %s %s",
            section,
            name,
            fault,
        )
    return fault is None


def _tree_fault(model: PreTrainedModel) -> str | None:
    """Give the model the attention of prefix trees, or return why it cannot have it."""
    try:
        use_tree_attention(model)
    except ConfigError as error:
        return str(error)
    return None


def _fault(
    model: PreTrainedModel,
    trials: Sequence[_Trial],
    *,
    tolerance: float,
    batch: Callable[[MicroBatch], MicroBatch],
) -> str | None:
    """Return a description of what is wrong with a kind of batching, or None."""
    for trial in trials:
        try:
            found_MX = _outputs(model, batch(trial.micro_batch))
        except Exception as error:  # noqa: BLE001  (the model's code may raise anything)
            return f"fails with {type(error).__name__}: {error}"
        largest = float(trial.expected_MX.abs().max())
        difference = float((found_MX - trial.expected_MX).abs().max()) / largest
        if not difference <= tolerance:
            longest = int(trial.micro_batch.attention_mask_BW.sum(dim=1).max())
            return (
                f"computes rows of up to {longest} tokens differently than alone (outputs differ by {difference:.2g} "
                f"of the largest, tolerance {tolerance:.2g})"
            )
    return None


def _packed(padded: MicroBatch) -> MicroBatch:
    return replace(padded, lines=(tuple(range(len(padded.rows_B))),))


def _shared(padded: MicroBatch) -> MicroBatch:
    return replace(padded, shares_prefixes=True)


def _trials(model: PreTrainedModel, *, section: str, max_row_tokens: int) -> list[_Trial]:
    """Return test rows: short rows, and rows around each limit of the model.

    For each limit there are rows that end shortly before it, that cross it, that are twice as long, and rows that are
    shorter than the limit in a line that is longer.

    Raises:
        ConfigError: The model's forward fails.
    """
    longest = max_row_tokens - TOKENS_BEYOND
    if model.device.type == "cpu":
        longest = min(longest, int(CPU_OPERATIONS / max(1, model.num_parameters())))
    limits = {limit.length for limit in length_limits(model.config)}
    lengths = sorted({min(n, longest) for limit in limits if limit < longest for n in (limit, 2 * limit)})
    sizes: list[Sequence[tuple[int, int]]] = [SHORT_ROWS]
    sizes += [((n + 2, 4), (max(1, n - 4), 9), (1, 6)) for n in lengths]
    sizes += [_line(limit, longest) for limit in limits if limit < max(longest, LONGEST_LINE)]
    random, vocabulary = Random(0), _vocabulary(model)
    try:
        return [_trial(model, _rows(each, random, vocabulary=vocabulary)) for each in sizes]
    except Exception as error:
        raise ConfigError(
            f"{section}: {type(model).__name__} cannot be trained: its forward fails with {type(error).__name__}: "
            f"{error}"
        ) from error


def _line(limit: int, longest: int) -> list[tuple[int, int]]:
    """Return sizes of rows that share a line twice as long as a limit."""
    num_sampled = max(6, min(limit // 4, longest - 3))
    return [(3, num_sampled)] * (2 * limit // num_sampled + 1)


def _rows(sizes: Sequence[tuple[int, int]], random: Random, *, vocabulary: Sequence[int]) -> list[_Row]:
    """Return rows of random tokens, whose prompts share a prefix."""
    prompt = random.choices(vocabulary, k=max(length for length, _ in sizes))
    return [_Row(prompt[:length], random.choices(vocabulary, k=num_sampled)) for length, num_sampled in sizes]


def _trial(model: PreTrainedModel, rows: Sequence[_Row]) -> _Trial:
    alone = [_outputs(model, _padded([row], device=model.device)) for row in rows]
    return _Trial(tuple(rows), _padded(rows, device=model.device), torch.cat(alone))


def _padded(rows: Sequence[_Row], *, device: torch.device) -> MicroBatch:
    prompt_width = max(len(row.prompt) for row in rows)
    response_width = max(len(row.response) for row in rows)
    ids_BW = torch.zeros((len(rows), prompt_width + response_width), dtype=torch.long)
    mask_BW = torch.zeros_like(ids_BW)
    for number, row in enumerate(rows):
        places = slice(prompt_width - len(row.prompt), prompt_width + len(row.response))
        ids_BW[number, places] = torch.tensor(row.prompt + row.response)
        mask_BW[number, places] = 1
    return MicroBatch(
        rows_B=torch.arange(len(rows)),
        input_ids_BW=ids_BW.to(device),
        attention_mask_BW=mask_BW.to(device),
        position_ids=(mask_BW.cumsum(dim=1) - 1).clamp(min=0).to(device),
        mask_BR=mask_BW[:, prompt_width:].to(device),
    )


def _outputs(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return the logits before each token of the responses, [M, vocab], or the last hidden states, [M, hidden]."""
    inputs, before_M = model_inputs(model, micro_batch)
    if cast(Any, model).get_output_embeddings() is not None:
        return outputs_at(model, before_M, inputs).float()
    # A head of values starts at zero, which would hide every difference.
    hidden_KLH: Tensor = cast(Any, model).base_model(**inputs, use_cache=False).last_hidden_state
    return hidden_KLH.flatten(0, 1).index_select(0, before_M).float()


def _tolerance(model: PreTrainedModel, trial: _Trial) -> float:
    if model.dtype not in (torch.float32, torch.float64):
        return TOLERANCE_OF_SHORT_TYPES
    alone = _padded(trial.rows[:1], device=model.device)
    largest = float(trial.expected_MX.abs().max())
    moved_by = rounding_sensitivity(model, lambda: _outputs(model, alone)) / largest
    return min(max(TOLERANCE, MARGIN * moved_by), LARGEST_TOLERANCE)


def _vocabulary(model: PreTrainedModel) -> list[int]:
    """Return the token ids without a special meaning in the configuration, such as that of an image."""
    config: Any = cast(Any, model.config).get_text_config()
    special: set[Any] = set()
    for part in (model.config, config):
        for name, value in cast(dict[str, Any], part.to_dict()).items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(cast(list[int], value) if isinstance(value, list) else [value])
    return [token for token in range(config.vocab_size) if token not in special]
