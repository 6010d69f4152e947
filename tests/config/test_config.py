from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.config import load_config
from agent_loop.errors import ConfigError
from agent_loop.rollout.components import load_template


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_and_overrides_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path, "rollout:\n  n: 4\n  multi_turn: {max_user_turns: 3}\n")
    config = load_config(path, overrides=["rollout.n=8", "data.train_files=[a.jsonl,b.jsonl]"])
    assert config.rollout.n == 8
    assert config.rollout.multi_turn.max_user_turns == 3
    assert config.data.train_files == ["a.jsonl", "b.jsonl"]


def test_an_interpolation_takes_the_overridden_value(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer: {seed: 7}\nrollout: {seed: '${trainer.seed}'}\n")
    assert load_config(path, overrides=["trainer.seed=9"]).rollout.seed == 9


def test_verl_names_set_the_corresponding_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        data: {return_raw_chat: true, max_prompt_length: 100}
        actor_rollout_ref:
          model: {path: somewhere}
          actor: {optim: {lr: 1.0e-4}}
          rollout:
            name: embedded
            mode: async
            n: 4
            multi_turn: {format: hermes, max_assistant_turns: 5}
            agent: {num_workers: 2}
            val_kwargs: {temperature: 0.0}
        """,
    )
    config = load_config(path, overrides=["actor_rollout_ref.rollout.n=6", "rollout.top_p=0.9"])
    assert config.model.path == "somewhere"
    assert config.actor.lr == 1e-4
    assert (config.rollout.n, config.rollout.top_p, config.rollout.prompt_length) == (6, 0.9, 100)
    assert config.rollout.val.temperature == 0.0
    assert config.rollout.agent.num_workers == 2


@pytest.mark.parametrize("key", ["data.apply_chat_template_kwargs", "model.chat_template_kwargs"])
def test_variables_of_the_chat_template_are_in_every_prompt_also_if_they_are_false(
    tmp_path: Path, key: str
) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    placeholder_tokenizer(source).save_pretrained(tmp_path)
    template = load_template(
        load_config(overrides=[f"model.path={tmp_path}", f"{key}.enable_thinking=false"])
    )
    messages = [{"role": "user", "content": "-"}]
    assert template.decode(template.open(messages)).endswith("<think>\n\n</think>\n\n")
    assert template.decode(template.bridge(messages)).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.engine=vllm", "rollout.deterministic is True: only the embedded engine is deterministic"),
        (
            "rollout.engine=mine.py:Server",
            "only the embedded engine is deterministic; set rollout.engine=embedded",
        ),
        (
            "rollout.agent.custom_async_server={path: mine.py, name: Server}",
            "only the embedded engine is deterministic",
        ),
        ("rollout.over_sample=1.5", "rollout.over_sample is 1.5, and the groups that end first are random"),
        ("trainer.mode=async", "trainer.mode is 'async'.* set trainer.mode=sync"),
    ],
)
def test_settings_with_random_effects_are_rejected_for_deterministic_runs(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=["rollout.deterministic=true", setting])
    load_config(overrides=[setting])
    load_config(overrides=["rollout.deterministic=true", "rollout.engine=embedded_process"])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        (
            "rollout.max_concurrent=many",
            "rollout.max_concurrent is 'many': input should be a valid integer, unable to parse string as an integer, "
            "or input should be 'auto'",
        ),
        (
            "rollout.trace.backend=mlfow",
            "rollout.trace.backend is 'mlfow': input should be 'file', 'mlflow', 'otel'",
        ),
        (
            "rollout.trace.backend=[mlfow]",
            "rollout.trace.backend.0 is 'mlfow': input should be 'file', 'mlflow'",
        ),
        ("trainer.save_every=x", "trainer.save_every is 'x': input should be a valid integer"),
        ("rolout.n=4", "unknown key 'rolout'; did you mean 'rollout'"),
        ("n=4", "did you mean 'rollout.n'"),
        ("rollout.multi_turn.max_turns=4", "unknown key 'rollout.multi_turn.max_turns'"),
        ("data.return_raw_chat=false", "only True is supported"),
        ("trainer.val_every=0", r"trainer\.val_every is 0: .* greater than or equal to 1, or null$"),
        ("actor.clip_ratio_c=1", r"actor\.clip_ratio_c is 1: .* greater than 1, or null$"),
        ("algorithm.kl_reward_type=k4", r"algorithm\.kl_reward_type is 'k4'"),
        ("rollout.n", "not of the form key=value"),
        ("rollout={a: [", "cannot be read"),
    ],
)
def test_an_invalid_setting_raises_an_error_with_the_remedy(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(overrides=[override])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a: [", "not valid YAML"), ("- a\n- b\n", "holds a list"), ("rollout: 3", "rollout")],
)
def test_a_file_that_is_not_a_configuration_raises_an_error_that_names_the_file(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.yaml.*{complaint}"):
        load_config(write(tmp_path, text))
