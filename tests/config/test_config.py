"""Settings from files and overrides: what they become, and errors that name the key, the value and the remedy."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.config import Config, RolloutConfig, all_keys, load_config, parse_section
from agent_loop.errors import ConfigError
from agent_loop.rollout.components import load_template
from tests.harness import examples


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


def test_an_interpolation_takes_the_overridden_value_or_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "trainer: {seed: 7}\nrollout: {seed: '${trainer.seed}'}\n")
    assert load_config(path, overrides=["trainer.seed=9"]).rollout.seed == 9
    config = load_config(overrides=["rollout.trace.path=${trainer.run_dir}/traces.jsonl"])
    assert config.rollout.trace.path == "runs/train/traces.jsonl"


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
        ("rollout.engine=mine.py:Server", "is deterministic; set rollout.engine=embedded"),
        (
            "rollout.agent.custom_async_server={path: mine.py, name: S}",
            "only the embedded engine is determin",
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
            "is 'many': input should be a valid integer, .* or input should be 'auto'",
        ),
        (
            "rollout.trace.backend=mlfow",
            "rollout.trace.backend is 'mlfow': input should be 'file', 'mlflow', 'otel'",
        ),
        (
            "rollout.trace.backend=[mlfow]",
            "rollout.trace.backend.0 is 'mlfow': input should be 'file', 'mlflow'",
        ),
        ("rollout.temperature=inf", "rollout.temperature is 'inf': input should be a finite number"),
        ("rollout.temperature=1e-5", r"give 0 \(greedy\) or at least 0.0001"),
        ("rollout.top_k=0", r"rollout.top_k is 0: give -1 \(no limit\) or at least 1"),
        ("rollout.n=100000000000000000000", "less than or equal to 65536"),
        ("rollout.start_timeout_s=1e300", "less than or equal to 31622400"),
        ("rollout.seed=-1", "greater than or equal to 0"),
        ("actor.lr=inf", "actor.lr is 'inf': input should be a finite number"),
        ("actor.betas=[0.9, 1]", "actor.betas.1 is 1: input should be less than 1"),
        ("critic.kl_loss_coef=1", "unknown key"),
        ("trainer.run_dir=''", "trainer.run_dir is ''"),
        ("rollout=3", "rollout is 3: it is a section; set its keys, such as rollout.engine"),
        ("trainer.ray=none", "is a section; set its keys, such as trainer.ray.address"),
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


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@examples(300)
@given(key=st.sampled_from(all_keys(Config)) | st.text(), value=VALUES)
def test_any_tree_of_values_is_accepted_or_rejected(key: str, value: Any) -> None:
    for part in reversed(key.split(".")):
        value = {part: value}
    with suppress(ConfigError):
        parse_section(Config, value, where="settings")


@examples(300)
@given(
    key=st.sampled_from(all_keys(Config)) | st.text("abn.[]=${}\\ ", max_size=12),
    text=st.text("[]{}:,&*!?|>'\"${}#-\n\\0 ainrolut.59e", max_size=30) | st.text(max_size=12),
)
def test_any_override_is_accepted_or_rejected(key: str, text: str) -> None:
    with suppress(ConfigError):
        load_config(overrides=[f"{key}={text}"])


@pytest.mark.parametrize(
    "override",
    [
        "rollout.seed=${rollout.seed}",
        "rollout.agent=${rollout}",
        "rollout.engine_kwargs.a=${rollout.engine_kwargs}",
        "rollout.seed=${oc.env:NO_SUCH_VARIABLE_IS_SET}",
        "rollout.seed=${nothing.there}",
    ],
)
def test_a_circular_or_missing_interpolation_raises_an_error_of_one_line(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]) as raised:
        load_config(overrides=[override])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("multi_turn", "expected"),
    [
        ({}, "single_turn_agent"),
        ({"tools": ["task.py:lookup"]}, "tool_agent"),
        ({"tool_config_path": "tools.yaml"}, "tool_agent"),
        ({"interaction_config_path": "interactions.yaml"}, "tool_agent"),
    ],
    ids=["neither", "tools", "file-of-tools", "interaction"],
)
def test_a_run_with_tools_or_an_interaction_uses_the_tool_agent(
    multi_turn: dict[str, Any], expected: str
) -> None:
    assert RolloutConfig.model_validate({"multi_turn": multi_turn}).default_agent_loop == expected


def test_the_loop_that_a_config_names_is_used_with_tools_too() -> None:
    config = RolloutConfig.model_validate(
        {"agent": {"default_agent_loop": "single_turn_agent"}, "multi_turn": {"tools": ["task.py:lookup"]}}
    )
    assert config.default_agent_loop == "single_turn_agent"
