"""Losses and gradients of adapters, compared with plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_loop.errors import AlgorithmError, DataError
from agent_loop.integrations.tinker.adapters import AdamSettings, AdapterTrainer, BaseModel, LoraSettings
from agent_loop.integrations.tinker.losses import load_loss
from agent_loop.integrations.tinker.messages import Datum

LORA = LoraSettings(rank=4, seed=5)


@pytest.fixture(scope="module")
def base(model_folder: Path) -> BaseModel:
    return BaseModel(str(model_folder), device="cpu")


def cross_entropy(logprobs: Any, *, weights: Any) -> Any:
    return -(logprobs * weights).sum()


def importance_sampling(new: Any, *, logprobs: Any, advantages: Any) -> Any:
    return -((new - logprobs).exp() * advantages).sum()


def ppo(new: Any, *, logprobs: Any, advantages: Any, low: float = 0.8, high: float = 1.2) -> Any:
    ratio: Any = (new - logprobs).exp()
    return -cast(Any, torch).min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def ppo_of_settings(new: Any, **inputs: Any) -> Any:
    return ppo(new, **inputs, low=0.99, high=1.01)


def cispo(new: Any, *, logprobs: Any, advantages: Any) -> Any:
    return -((new - logprobs).exp().clamp(0.8, 1.2).detach() * new * advantages).sum()


def dro(new: Any, *, logprobs: Any, advantages: Any) -> Any:
    return -(new * advantages - 0.5 * 0.05 * (new - logprobs) ** 2).sum()


CASES: list[tuple[str, dict[str, float], Any]] = [
    ("cross_entropy", {}, cross_entropy),
    ("importance_sampling", {}, importance_sampling),
    ("ppo", {}, ppo),
    ("ppo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}, ppo_of_settings),
    ("cispo", {}, cispo),
    ("dro", {}, dro),
]


def make_data(names: tuple[str, ...], *, num_targets: int | None = None, shifted: bool = True) -> list[Datum]:
    """Return rows of different lengths, two of which share a prefix."""
    random = np.random.default_rng(0)
    rows = [random.integers(3, 60, size).astype(np.int32) for size in (9, 2, 14)]
    rows.append(np.concatenate([rows[0][:6], rows[2][:5]]))
    data: list[Datum] = []
    for row in rows:
        shape = (len(row) - 1,) if num_targets is None else (len(row) - 1, num_targets)
        targets = row[1:] if shifted and num_targets is None else random.integers(3, 60, shape)
        inputs: dict[str, Any] = {"target_tokens": targets.astype(np.int64)}
        for name in names:
            values = random.normal(size=shape) if name == "advantages" else random.uniform(size=shape)
            inputs[name] = (values * (-5 if name == "logprobs" else 1)).astype(np.float32)
        data.append(Datum(row[:-1], inputs))
    return data


def reference_model(model_folder: Path, adapters: Path) -> Any:
    """Return the model with adapters as PEFT loads them, with all adapters trainable."""
    model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(model_folder, dtype=torch.float32)
    return cast(Any, peft.PeftModel).from_pretrained(model, str(adapters), is_trainable=True).eval()


def plain_logprobs(model: Any, datum: Datum) -> Any:
    logits = model(input_ids=torch.tensor(datum.token_ids[None].astype(np.int64))).logits[0]
    targets = torch.tensor(datum.inputs["target_tokens"])
    matrix = targets if targets.dim() == 2 else targets[:, None]
    return logits.log_softmax(-1).gather(1, matrix).reshape(targets.shape)


def gradients(model: Any) -> Mapping[str, Any]:
    return {
        name.replace("base_model.model.", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def moved(trainer: AdapterTrainer) -> AdapterTrainer:
    """Take a step, so that both factors of each adapter have a gradient."""
    loss = load_loss("cross_entropy", {})
    trainer.forward(make_data(("weights",)), loss, has_backward=True)
    trainer.step(AdamSettings(learning_rate=0.02))
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "settings", "reference"), CASES)
@pytest.mark.parametrize("shifted", [True, False])
def test_the_loss_and_its_gradient_are_those_of_plain_torch(
    name: str,
    settings: Any,
    reference: Any,
    shifted: bool,
    base: BaseModel,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    trainer, loss = moved(AdapterTrainer(base, LORA, seed=0)), load_loss(name, settings)
    trainer.save(tmp_path / "saved", has_optimizer=False)
    data = make_data(loss.inputs, shifted=shifted)
    outputs, value = trainer.forward(data, loss, has_backward=True)

    plain, expected = reference_model(model_folder, tmp_path / "saved"), 0.0
    for datum, output in zip(data, outputs, strict=True):
        new = plain_logprobs(plain, datum)
        np.testing.assert_allclose(output, new.detach().numpy(), atol=1e-5)
        term = reference(new, **{key: torch.tensor(datum.inputs[key]) for key in loss.inputs})
        term.backward()
        expected += float(term)
    assert value == pytest.approx(expected, abs=1e-4, rel=1e-5)
    own, wanted = gradients(trainer.model), gradients(plain)
    assert own.keys() == wanted.keys()
    scale = max(float(gradient.abs().max()) for gradient in wanted.values())
    for key, gradient in wanted.items():
        torch.testing.assert_close(own[key], gradient, atol=1e-5 * max(1, scale), rtol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_several_targets_of_a_position_are_weighted(
    base: BaseModel, model_folder: Path, tmp_path: Path
) -> None:
    trainer, loss = moved(AdapterTrainer(base, LORA, seed=0)), load_loss("cross_entropy", {})
    trainer.save(tmp_path / "saved", has_optimizer=False)
    data = make_data(loss.inputs, num_targets=3)
    outputs, value = trainer.forward(data, loss, has_backward=False)
    plain = reference_model(model_folder, tmp_path / "saved")
    new = [plain_logprobs(plain, datum) for datum in data]
    for output, logprobs in zip(outputs, new, strict=True):
        np.testing.assert_allclose(output, logprobs.detach().numpy(), atol=1e-5)
    expected = sum(
        float(cross_entropy(logprobs, weights=torch.tensor(datum.inputs["weights"])))
        for logprobs, datum in zip(new, data, strict=True)
    )
    assert value == pytest.approx(expected, rel=1e-5)


def test_a_step_is_that_of_adamw_and_clients_share_nothing_but_the_base(base: BaseModel) -> None:
    loss, data = load_loss("cross_entropy", {}), make_data(("weights",))
    settings = AdamSettings(
        learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5
    )
    trainer, other = AdapterTrainer(base, LORA, seed=0), AdapterTrainer(base, LORA, seed=0)
    before, _ = other.forward(data, loss, has_backward=False)
    own = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    copies = [value.detach().clone().requires_grad_() for value in own.values()]
    reference: Any = torch.optim.AdamW(copies, lr=0.01, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.1)
    for _ in range(3):
        trainer.forward(data, loss, has_backward=True)
        for copy, value in zip(copies, own.values(), strict=True):
            copy.grad = None if value.grad is None else value.grad.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(copies, 0.5))
        reference.step()
        assert trainer.step(settings) == {"grad_norm": pytest.approx(norm)}
        for copy, value in zip(copies, own.values(), strict=True):
            torch.testing.assert_close(value.detach(), copy.detach(), atol=1e-6, rtol=1e-5)
    after, _ = other.forward(data, loss, has_backward=False)
    assert all(np.array_equal(one, two) for one, two in zip(before, after, strict=True))


def test_a_checkpoint_continues_to_the_last_bit(base: BaseModel, tmp_path: Path) -> None:
    loss, data = load_loss("cross_entropy", {}), make_data(("weights",))
    trainer = moved(AdapterTrainer(base, LORA, seed=0))
    trainer.save(tmp_path / "saved", has_optimizer=True)
    loaded = AdapterTrainer(base, LORA, seed=1)
    loaded.load(tmp_path / "saved", has_optimizer=True)
    for _ in range(2):
        one, two = (each.forward(data, loss, has_backward=True)[0] for each in (trainer, loaded))
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
        assert trainer.step(AdamSettings()) == loaded.step(AdamSettings())
    loaded.load(tmp_path / "saved", has_optimizer=False)
    assert loaded.step(AdamSettings()) == {"grad_norm": 0.0}


@pytest.mark.parametrize("name", ["stable_reinforce", "gspo", "custom", "unknown"])
def test_other_losses_are_refused_by_name(name: str) -> None:
    with pytest.raises(AlgorithmError, match=name):
        load_loss(name, {})


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (Datum(np.array([5], np.int32), {"target_tokens": np.array([6])}), "weights"),
        (Datum(np.array([9999], np.int32), {"target_tokens": np.array([6]), "weights": np.ones(1)}), "9999"),
    ],
)
def test_rows_that_do_not_fit_are_refused(datum: Datum, message: str, base: BaseModel) -> None:
    with pytest.raises(DataError, match=message):
        AdapterTrainer(base, LORA, seed=0).forward([datum], load_loss("cross_entropy", {}), has_backward=True)
