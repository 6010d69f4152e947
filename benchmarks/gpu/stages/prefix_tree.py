"""Training on prefix trees (`actor.share_prefixes`) against single rows, and its attention against a dense mask.

On a GPU the attention is FlexAttention, which is compiled; on a CPU it is a sum over blocks. Tolerances are those of
the trainer's stage: the order of sums in float32, and in bfloat16 twice the error of the plain computation. The
attention alone may have an error of a few roundings in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agent_loop.training.prefix_tree import attention
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out
from benchmarks.gpu.devices import GB, PeakMemory, elapsed_s, synchronize
from benchmarks.gpu.models import copy_of, random_model, small_config, windowed_config
from benchmarks.gpu.report import Check, NotRun, StageReport
from benchmarks.gpu.rows import (
    Row,
    actor_gradients,
    actor_of,
    as_batch,
    batch_near,
    plain_gradients,
    random_rows,
)

TOLERANCE = 5e-5
BFLOAT16_FACTOR = 2.0
BFLOAT16_TOLERANCE = 0.01
"""Largest error of the attention in bfloat16: a few roundings of 0.002 each, of the weights, their sums and gradients.
"""
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 128
WINDOWS = (None, 40)
MOST_COMPILATIONS = 4
"""Largest number of compilations per function, however many trees of different sizes there are."""


def run(device: torch.device, report: StageReport) -> None:
    """Run the checks."""
    for dtype in (torch.float32, torch.bfloat16):
        for window in WINDOWS:
            name = f"{str(dtype).removeprefix('torch.')}, " + (f"window {window}" if window else "no window")
            with report.check(f"attention, {name}") as check:
                _compare_attention(check, device, dtype=dtype, window=window)
    with report.check("FlexAttention against blocks, on the CPU") as check:
        if device.type != "cpu":
            raise NotRun("the other checks run FlexAttention")
        _compare_kernels(check, device)
    for name, settings, dtype in (
        ("float32", {}, torch.float32),
        ("float32, several trees", {"max_tokens_per_micro_batch": 200}, torch.float32),
        ("float32, gradient checkpointing", {"gradient_checkpointing": True}, torch.float32),
        ("bfloat16", {}, torch.bfloat16),
    ):
        with report.check(f"update, {name}") as check:
            model = random_model(small_config(device), device=device)
            _compare_update(check, model, dtype=dtype, settings=settings)
    with report.check("update, float32, sliding window") as check:
        model = random_model(windowed_config(device, window=24), device=device)
        _compare_update(check, model, dtype=torch.float32, settings={})
    with report.check("compilations over many trees") as check:
        _count_compilations(check, device)
    with report.check("time and memory against single rows") as check:
        _compare_cost(check, device)


def tree_rows(*, prompt: int, response: int, num_rows: int, vocabulary: int, seed: int = 0) -> list[Row]:
    """Return a group whose rows share a prompt; half of them also share the first turns of another row."""
    [shared] = random_rows([(prompt, response // 2, 6)], vocabulary=vocabulary, seed=seed)
    own = random_rows([(1, response // 2, 4, response // 4)] * num_rows, vocabulary=vocabulary, seed=seed + 1)
    return [
        Row(shared.prompt, [*(shared.runs if number % 2 else []), *row.runs[: 1 if number % 2 else 3]])
        for number, row in enumerate(own)
    ]


def layout_of(rows: Sequence[Row], *, device: torch.device) -> TreeLayout:
    return lay_out([np.asarray(row.token_ids, dtype=np.int64) for row in rows], device=device)


def _compare_attention(check: Check, device: torch.device, *, dtype: torch.dtype, window: int | None) -> None:
    """Compare the attention and its gradients with a dense mask in float32."""
    rows = tree_rows(prompt=70, response=60, num_rows=6, vocabulary=500)
    layout = layout_of(rows, device=device)
    inputs = _random_heads(layout, device=device, dtype=dtype)
    mask = _dense_mask(layout, window=window).to(device)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def tree(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        module = SimpleNamespace()
        options = {"sliding_window": window, "prefix_tree": layout}
        return attention._attend(module, query, key, value, None, **options)[0].transpose(1, 2)

    exact = _with_gradients(dense, [each.float() for each in inputs])
    limit = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    names = ("outputs", "gradients of queries", "of keys", "of values")
    for name, found, expected in zip(names, _with_gradients(tree, inputs), exact, strict=True):
        check.at_most(name, _error(found, expected), limit)


def _dense_mask(layout: TreeLayout, *, window: int | None) -> Tensor:
    """Return which keys each query sees, from the positions of the tokens of each row."""
    mask = torch.zeros((layout.num_tokens, layout.num_tokens), dtype=torch.bool)
    for places in layout.places:
        steps = torch.arange(len(places))
        is_seen = steps[:, None] >= steps
        if window is not None:
            is_seen &= steps[:, None] - steps < window
        index = torch.from_numpy(places)
        mask[index[:, None], index] |= is_seen
    return mask


def _random_heads(layout: TreeLayout, *, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        values = torch.randn(1, count, layout.num_tokens, HEAD_DIM, generator=generator)
        return values.to(device=device, dtype=dtype)

    return [heads(HEADS), heads(KV_HEADS), heads(KV_HEADS)]


def _with_gradients(attend: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of an attention, and the gradients of its inputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = attend(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the distance relative to the norm of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@torch.no_grad()
def _compare_kernels(check: Check, device: torch.device) -> None:
    """Compare FlexAttention as it is, without compilation, with the blocks. It has no backward pass on a CPU."""
    layout = layout_of(tree_rows(prompt=70, response=60, num_rows=6, vocabulary=500), device=device)
    inputs = _random_heads(layout, device=device, dtype=torch.float32)
    for window in WINDOWS:
        options = {"layout": layout, "window": window, "scale": HEAD_DIM**-0.5}
        found, expected = attention._flex(*inputs, **options), attention._blockwise(*inputs, **options)
        check.at_most(f"window {window}", _error(found, expected), TOLERANCE)


def _compare_update(check: Check, model: Any, *, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """Compare loss and gradients of an update with those of single rows."""
    device = model.device
    rows = tree_rows(prompt=40, response=40, num_rows=6, vocabulary=model.config.vocab_size)
    rounded = copy_of(model, device=device, dtype=dtype)
    batch, advantages_BR = batch_near(rounded, rows)
    actor = actor_of(
        copy_of(model, device=device, dtype=torch.float32), dtype=dtype, share_prefixes=True, **settings
    )
    ours = actor_gradients(actor, batch, advantages_BR)
    options = {"config": actor._config}
    plain = plain_gradients(rounded, rows, batch, advantages_BR, **options)
    if dtype == torch.float32:
        check.at_most("loss", abs(ours.loss - plain.loss) / abs(plain.loss), TOLERANCE)
        check.at_most("gradients", ours.error(plain), TOLERANCE)
        return
    upcast = copy_of(rounded, device=device, dtype=torch.float32)
    exact = plain_gradients(upcast, rows, batch, advantages_BR, **options)
    check.at_most("gradients", ours.error(exact), BFLOAT16_FACTOR * plain.error(exact))


def _count_compilations(check: Check, device: torch.device) -> None:
    """Compute trees of many sizes, and count how often each function is compiled."""

    if device.type == "cpu":
        raise NotRun("nothing is compiled on a CPU")
    from torch._dynamo.utils import counters

    counters.clear()
    for number in range(12):
        rows = tree_rows(
            prompt=30 + 17 * number, response=60, num_rows=3 + number, vocabulary=500, seed=number
        )
        layout = layout_of(rows, device=device)
        inputs = _random_heads(layout, device=device, dtype=torch.bfloat16)

        def tree(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout = layout) -> Tensor:
            return attention._attend(SimpleNamespace(), query, key, value, None, prefix_tree=layout)[0]

        _with_gradients(tree, inputs)
    synchronize(device)
    check.at_most("compiled graphs", counters["stats"]["unique_graphs"], 2 * MOST_COMPILATIONS)


def _compare_cost(check: Check, device: torch.device) -> None:
    """Measure time and peak memory of an update of a group with a long prompt, on the tree and in rows."""
    is_gpu = device.type == "cuda"
    prompt, response, num_rows = (2000, 300, 8) if is_gpu else (200, 32, 4)
    changes = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 3072} if is_gpu else {}
    model = random_model(small_config(device, **changes), device=device)
    rows = random_rows([(prompt, response)] * num_rows, vocabulary=model.config.vocab_size)
    rows = [Row(rows[0].prompt, row.runs) for row in rows]
    batch = as_batch(rows, [[-7.0] * response] * num_rows)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    seconds: dict[bool, float] = {}
    peaks: dict[bool, float] = {}
    for shares in (False, True):
        copied = copy_of(model, device=device, dtype=torch.float32)
        actor = actor_of(copied, dtype=dtype, share_prefixes=shares, max_tokens_per_micro_batch=32_768)
        advantages_BR = torch.ones(batch["responses"].shape)

        def update(actor: Any = actor, advantages_BR: Tensor = advantages_BR) -> None:
            actor.update(batch, advantages_BR=advantages_BR)

        update()  # compiles
        peak = PeakMemory(device)
        seconds[shares] = min(elapsed_s(device, update) for _ in range(3))
        peaks[shares] = peak.num_bytes
    num_distinct = prompt + num_rows * response
    check.figure("share of distinct tokens", num_distinct / (num_rows * (prompt + response)))
    check.figure("time, tree / rows", seconds[True] / seconds[False])
    if is_gpu:
        check.at_most("memory, tree / rows", peaks[True] / peaks[False], 1.0)
        check.figure("memory of the tree", peaks[True] / GB, "GB")
