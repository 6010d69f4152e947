"""Metrics by data source and by turn equal references that count each trajectory and each token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from msgspec import structs

from agent_loop.config import Config
from agent_loop.rollout.batch import RolloutBatch
from agent_loop.training import metrics as names
from agent_loop.training.breakdowns import MAX_SOURCES, MAX_TURNS, Breakdowns
from agent_loop.training.learned import TOKEN_VALUES, TRAIN_LOG_PROBS
from agent_loop.training.metrics import read_metrics
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row
from tests.harness import examples
from tests.training.fakes import FakeRollouts, tiny_policy
from tests.training.samples import Branch, Rollout, Sample, Turn, batch_of, groups, samples_of
from tests.training.test_actor import make_actor, off_policy_batch
from tests.training.test_ppo_trainer import changed, train

THRESHOLD = 0.5
OF_TOKENS = {
    "entropy": TOKEN_VALUES + names.ENTROPY,
    "clip_fraction": TOKEN_VALUES + names.CLIP_FRACTION,
}


def broken_down(
    batch: RolloutBatch, samples: Sequence[Sample], said: list[str] | None = None
) -> dict[str, float]:
    breakdowns = Breakdowns(success_threshold=THRESHOLD, report=([] if said is None else said).append)
    return breakdowns.metrics(batch, [sample.trajectory for sample in samples])


def annotated(samples: Sequence[Sample]) -> RolloutBatch:
    """Return a batch with random values of tokens, as if every third row was not trained."""
    batch, random = batch_of(samples), np.random.default_rng(0)
    shape = batch["responses"].shape
    for column in (*OF_TOKENS.values(), TRAIN_LOG_PROBS, "rollout_log_probs"):
        values = random.random(shape, np.float32)
        if column != "rollout_log_probs":
            values[::3] = np.nan
        batch[column] = torch.from_numpy(values)
    return batch


def expected(batch: RolloutBatch, samples: Sequence[Sample]) -> dict[str, float]:
    """Return all metrics, with loops over trajectories and tokens."""
    rewards: defaultdict[str, defaultdict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    tokens: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, sample in enumerate(samples):
        t = sample.trajectory
        prefixes = {f"by_turn/{turn}/": [span] for turn, span in enumerate(sample.spans)}
        source = t.row.get("data_source")
        if source is not None:
            prefixes[f"by_source/{source}/"] = sample.spans
        for prefix, spans in prefixes.items():
            rewards[prefix][t.group, t.rollout].extend([] if t.reward is None else [t.reward])
            for column in (place for start, end in spans for place in range(start, end + 1)):
                own = float(batch[TRAIN_LOG_PROBS][row, column])
                if not batch["response_mask"][row, column] or np.isnan(own):
                    continue
                difference = abs(own - float(batch["rollout_log_probs"][row, column]))
                tokens[prefix]["rollout_train_logprob_diff_mean"].append(difference)
                for name, key in OF_TOKENS.items():
                    tokens[prefix][name].append(float(batch[key][row, column]))
    found: dict[str, float] = {}
    for prefix, of_rollouts in rewards.items():
        scored = [each for each in of_rollouts.values() if each]
        found[prefix + "rollouts"] = len(of_rollouts)
        found[prefix + "reward/success_share"] = sum(max(each) >= THRESHOLD for each in scored) / len(
            of_rollouts
        )
        if scored:
            found[prefix + "reward/mean"] = float(np.mean([np.mean(each) for each in scored]))
        found |= {prefix + name: float(np.mean(values)) for name, values in tokens[prefix].items()}
    num_sources = len({prefix for prefix in rewards if prefix.startswith("by_source/")})
    if num_sources < 2:
        found = {name: value for name, value in found.items() if not name.startswith("by_source/")}
    if "by_turn/1/" not in rewards:
        found = {name: value for name, value in found.items() if not name.startswith("by_turn/")}
    return found


@examples(100)
@given(groups=groups)
def test_sources_and_turns_have_the_metrics_of_their_rollouts_and_tokens(groups: list[list[Rollout]]) -> None:
    samples = samples_of(groups)
    batch = annotated(samples)

    found = broken_down(batch, samples)

    assert found == pytest.approx(expected(batch, samples), rel=1e-5)


def test_later_turns_share_one_name() -> None:
    samples = samples_of([[Rollout((Branch(1.0, (Turn(),) * (MAX_TURNS + 3)),)), Rollout((Branch(0.0),))]])

    found = broken_down(annotated(samples), samples)

    assert {name.split("/")[1] for name in found} == {*map(str, range(MAX_TURNS)), f"{MAX_TURNS}+"}
    assert found["by_turn/0/rollouts"] == 2
    assert found["by_turn/0/reward/mean"] == 0.5
    assert found["by_turn/8+/rollouts"] == 1
    assert found["by_turn/8+/reward/mean"] == 1


def test_only_the_first_sources_have_metrics_which_is_reported_once() -> None:
    def samples_from(sources: Sequence[str]) -> list[Sample]:
        return samples_of([[Rollout((Branch(1.0),), source=source)] for source in sources])

    said: list[str] = []
    breakdowns = Breakdowns(success_threshold=THRESHOLD, report=said.append)
    found: dict[str, float] = {}
    for names_of_step in (["s0"], [f"s{n}" for n in range(30)], ["late", "s29", "s1"]):
        samples = samples_from(names_of_step)
        found = breakdowns.metrics(batch_of(samples), [sample.trajectory for sample in samples])

    assert {name.split("/")[1] for name in found} == {"s1"}
    assert said == [
        f"the rows have more than {MAX_SOURCES} data sources, and by_source/ has the first {MAX_SOURCES}; 's20' and "
        "later ones have no metrics of their own"
    ]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_values_of_tokens_are_means_over_epochs(num_threads: int) -> None:
    batch, advantages_BR = off_policy_batch()
    actor = make_actor(
        lr=1e-12, ppo_mini_batches=3, ppo_epochs=2, max_tokens_per_micro_batch=40, kl_loss_coef=0.1
    )
    actor._num_threads = num_threads  # pyright: ignore[reportPrivateUsage]
    own_BR = actor.logprobs(batch).double().numpy()
    keep_B = torch.arange(len(batch)) % 4 != 0

    metrics = actor.update(batch, advantages_BR=advantages_BR, keep_B=keep_B)

    width = batch["prompts"].shape[1]
    is_checked = 0
    for row in range(len(batch)):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        first = int(batch["attention_mask"][row, :width].sum())
        with torch.no_grad():
            logits = actor.model(ids[None]).logits[0].double().numpy()
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        for column in np.flatnonzero(batch["response_mask"][row].numpy()).tolist():
            p = probabilities[first + column - 1]
            ratio = np.exp(own_BR[row, column] - float(batch["rollout_log_probs"][row, column]))
            is_positive = float(advantages_BR[row, column]) > 0
            is_clipped = ratio > 1.28 if is_positive else ratio < 0.8
            values = {
                names.ENTROPY: -(p * np.log(p)).sum(),
                names.CLIP_FRACTION: is_clipped,
                names.KL_LOSS: 0.0,
            }
            for name, value in values.items():
                found = float(batch[TOKEN_VALUES + name][row, column])
                assert np.isnan(found) if not keep_B[row] else found == pytest.approx(float(value), abs=1e-5)
                is_checked += 1
    assert is_checked > 100
    assert metrics[names.CLIP_FRACTION] > 0


class SourcedRollouts(FakeRollouts):
    """Rollouts of rows of several data sources. Each group has a signal."""

    def __init__(self, *sources: str) -> None:
        super().__init__(tiny_policy())
        self._sources = sources

    async def run(self, rows: Sequence[Row], **options: Any) -> list[Trajectory]:
        trajectories = await super().run(rows, **options)
        return [
            structs.replace(
                t,
                row={**t.row, "data_source": self._sources[t.group % len(self._sources)]},
                reward=float(t.rollout % 2 + t.group),
            )
            for t in trajectories
        ]


def test_a_run_writes_the_metrics_of_its_sources_and_turns(config: Config) -> None:
    config = changed(config, "trainer", total_steps=2, save_every=None)

    result = train(
        changed(config, "actor", ppo_mini_batches=1), rollouts=SourcedRollouts("openai/gsm8k", "code")
    )

    for line in read_metrics(result.run_dir / "metrics.jsonl"):
        for kind, parts in {"by_source": ("openai/gsm8k", "code"), "by_turn": ("0", "1")}.items():
            of_parts = [
                {
                    name: line[f"{kind}/{part}/{name}"]
                    for name in ("entropy", "clip_fraction", "rollout_train_logprob_diff_mean")
                }
                for part in parts
            ]
            sizes = [2 * 4 * 5, 2 * 4 * 5] if kind == "by_source" else [16 * 3, 16 * 2]
            for name in of_parts[0]:
                mean = sum(each[name] * size for each, size in zip(of_parts, sizes, strict=True)) / sum(sizes)
                assert mean == pytest.approx(line[f"actor/{name}"], abs=1e-6)
        assert line["by_source/code/rollouts"] == 8
        assert line["by_turn/1/rollouts"] == 16
        means = [line[f"by_source/{source}/reward/mean"] for source in ("openai/gsm8k", "code")]
        assert sum(means) / 2 == pytest.approx(line[names.REWARD_MEAN])


def test_a_run_with_one_source_has_no_metrics_by_source(config: Config) -> None:
    config = changed(config, "trainer", total_steps=1, save_every=None)

    [line] = read_metrics(train(config, rollouts=SourcedRollouts("code")).run_dir / "metrics.jsonl")

    assert not [name for name in line if name.startswith("by_source/")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_have_the_metrics_of_one(config: Config) -> None:
    def lines(num_processes: int) -> list[dict[str, float]]:
        run_dir = f"{config.trainer.run_dir}-{num_processes}"
        settings = changed(
            config, "trainer", num_processes=num_processes, total_steps=2, save_every=None, run_dir=run_dir
        )
        settings = changed(settings, "actor", lr=3e-4, ppo_epochs=2)
        result = train(settings, rollouts=SourcedRollouts("math", "code"))
        read = read_metrics(result.run_dir / "metrics.jsonl")
        return [{name: value for name, value in line.items() if name.startswith("by_")} for line in read]

    alone, together = lines(1), lines(2)

    assert "by_source/code/entropy" in alone[0]
    assert [line == pytest.approx(other, abs=1e-5) for line, other in zip(together, alone, strict=True)] == [
        True,
        True,
    ]
