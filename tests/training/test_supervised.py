"""Supervised training: examples from conversations and stored trajectories, runs, and steps between rollouts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from msgspec import structs
from transformers import Qwen3ForCausalLM

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, SftConfig, load_config
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.batch import assemble
from agent_loop.storage import write_trajectories
from agent_loop.storage.vocabulary import write_vocabulary
from agent_loop.training import metrics as names
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.training.run import TrainResult
from agent_loop.training.supervised.examples import Examples, load_examples
from agent_loop.training.supervised.trainer import SupervisedTrainer
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import FORCED, Origin
from tests.cli.project import make_project
from tests.helpers import call_text, hermes_template, small_tokenizer, user
from tests.storage.samples import failed, model, prompt, solved, tool
from tests.training.fakes import tiny_tokenizer
from tests.training.runs import assert_same_policy, changed, console_to, fit, lines_of

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    *user("1 + 2?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "three"},
]


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*user("hi"), *messages]}


def of_chats(tmp_path: Path, *rows: Any, template: ChatTemplate | None = None, **config: Any) -> Examples:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_examples([str(path)], config=SftConfig(**config), template=template or hermes_template())


def trained(examples: Examples) -> list[list[int]]:
    """Return the trained tokens of each example, as the trainer gets them."""
    batch = assemble(examples.trajectories, pad_token_id=0)
    return [
        response[mask.bool()].tolist()
        for response, mask in zip(batch["responses"], batch["response_mask"], strict=True)
    ]


def texts(examples: Examples) -> tuple[str, str]:
    """Return the prompt and the response of the first example."""
    output = examples.trajectories[0].output
    return hermes_template().decode(output.prompt_ids), hermes_template().decode(output.response_ids)


def test_the_tokens_of_the_assistant_are_trained_and_no_others(tmp_path: Path) -> None:
    examples = of_chats(tmp_path, {"messages": CHAT, "tools": TOOLS})
    [ids] = trained(examples)
    assert hermes_template().decode(ids) == call_text("add", a=1) + "<|im_end|>three<|im_end|>"
    prompt, response = texts(examples)
    assert "Be brief." in prompt
    assert '"name": "add"' in prompt
    assert "<tool_response>\n3\n</tool_response>" in response
    assert examples.num_trained_tokens == len(ids)


def test_a_message_of_weight_0_is_context_only(tmp_path: Path) -> None:
    examples = of_chats(tmp_path, {"messages": [*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]]})
    assert hermes_template().decode(trained(examples)[0]) == "three<|im_end|>"
    assert call_text("add", a=1) in texts(examples)[1]


def test_other_columns_hold_messages_and_schemas_as_json(tmp_path: Path) -> None:
    definitions = {"Number": {"type": "integer"}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Number"}}, "$defs": definitions}
    row = {"chat": CHAT, "schemas": json.dumps([{"name": "add", "parameters": parameters}])}
    examples = of_chats(tmp_path, row, messages_key="chat", tools_key="schemas")
    shown = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "function", "function": {"name": "add", "parameters": shown}}
    assert json.dumps(schema) in texts(examples)[0]


def test_results_of_parallel_calls_follow_the_order_of_the_calls(tmp_path: Path) -> None:
    calls = [{**CALL, "id": name} for name in ("one", "two")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("two", "one")]
    chat = [*CHAT[:2], {**CHAT[2], "tool_calls": calls}, *results, CHAT[4]]
    response = texts(of_chats(tmp_path, {"messages": chat}))[1]
    assert "of one\n</tool_response>\n<tool_response>\nof two" in response


THINKS = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- else -%}<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>\n{% endif -%}
"""
"""Opens reasoning in its prompt, and drops reasoning from messages, as DeepSeek's templates do."""
CHANNELS = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}<|end|>
{%- else -%}<|assistant|>
{%- if 'thinking' in m and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|assistant|>{% endif -%}
<|channel|>final<|message|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{% endif -%}
"""
"""Reads reasoning under another name, as that of gpt-oss does."""
IN_CHANNELS = (
    "<|channel|>analysis<|message|>It is 3.<|end|><|assistant|><|channel|>final<|message|>three<|end|>"
)
THOUGHT = "It is 3.\n</think>\n\nthree<|end|>"


@pytest.mark.parametrize(
    ("source", "turn", "expected"),
    [
        (THINKS, {"reasoning_content": "It is 3."}, THOUGHT),
        (THINKS, {"content": "<think>\nIt is 3.\n</think>\n\nthree"}, THOUGHT),
        (CHANNELS, {"reasoning": "It is 3."}, IN_CHANNELS),
    ],
)
def test_reasoning_is_trained_with_templates_that_drop_it_or_have_another_name_for_it(
    tmp_path: Path, source: str, turn: dict[str, Any], expected: str
) -> None:
    template = ChatTemplate(placeholder_tokenizer(source))
    answer = {"role": "assistant", "content": "three", **turn}
    row = {"messages": [*user("1 + 2?"), answer, *user("Sure?"), answer]}
    [trajectory] = of_chats(tmp_path, row, template=template).trajectories
    found = [s.token_ids for s in trajectory.output.segments if s.origin is Origin.MODEL]
    assert [template.decode(token_ids) for token_ids in found] == [expected] * 2


def test_long_conversations_are_left_out_and_counted(tmp_path: Path) -> None:
    long = [*user("hello " * 400), assistant("yes")]
    examples = of_chats(tmp_path, {"messages": long}, {"messages": CHAT}, max_tokens=300)
    assert (len(examples.trajectories), examples.num_overlong) == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (chat(), "conversation 1: the conversation has no assistant message"),
        (chat({"role": "robot", "content": "hi"}), "conversation 1: a message has the role 'robot'"),
        (chat(assistant("a", weight=2)), "the weight of a message is 2; give 0 or 1"),
        (chat(assistant("a", weight=0)), "none of 1 examples can be trained: 1 have no trained token"),
        (chat(assistant("3", reasoning_content="It is 3.")), "leaves out the reasoning of .* message 1"),
        (chat(assistant("", tool_calls=[{"function": {}}])), r"messages\[1\].tool_calls\[0\] is not"),
        ({"messages": CHAT, "tools": "{"}, "column 'tools' is not valid JSON"),
        ({"messages": CHAT, "tools": {"a": 1}}, "column 'tools' is .*; give a list of tool schemas"),
        ({"prompt": "hi"}, "has no 'messages'"),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        of_chats(tmp_path, row)


def of_stored(tmp_path: Path, *trajectories: Trajectory, **config: Any) -> Examples:
    folder = tmp_path / "trajectories"
    write_trajectories(folder / "train-000001.parquet", list(trajectories), step=1, split="train")
    return load_examples([str(tmp_path)], config=SftConfig(**config), template=hermes_template())


def replaced(segments: list[Any], *, branch: int | None = None, **place: Any) -> Trajectory:
    """Return a solved trajectory with other segments."""
    return structs.replace(solved(**place), output=AgentLoopOutput(segments=segments), branch=branch)


def test_the_sampled_tokens_are_trained_and_no_others(tmp_path: Path) -> None:
    examples = of_stored(tmp_path, solved())
    assert examples.trajectories[0].output.response_ids.tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert trained(examples) == [[4, 5, 9, 10]]


def test_tokens_that_a_grammar_forced_are_not_trained(tmp_path: Path) -> None:
    forced = structs.replace(model([4, 5, 9]), extras={FORCED: np.array([0, 1, 0], np.uint8)})
    assert trained(of_stored(tmp_path, replaced([prompt([1]), forced]))) == [[4, 9]]


def test_conditions_and_the_rank_in_the_group_select_trajectories(tmp_path: Path) -> None:
    trajectories = [
        replaced([prompt([1]), model([token])], group=group, rollout=rollout, reward=reward)
        for token, group, rollout, reward in ((4, 0, 0, 0.5), (5, 0, 1, 1.0), (6, 0, 2, 1.0), (7, 1, 0, 0.0))
    ]
    assert trained(of_stored(tmp_path, *trajectories, failed(), best_of_group=1)) == [[5], [7]]
    assert trained(of_stored(tmp_path, *trajectories, failed(), where="reward >= 1")) == [[5], [6]]


def test_tokens_that_branches_share_are_trained_once(tmp_path: Path) -> None:
    shared = [prompt([1, 2]), model([3, 4]), tool([5])]
    branches = [replaced([*shared, model([6 + n])], branch=n, reward=1.0) for n in range(3)]
    assert trained(of_stored(tmp_path, *branches)) == [[3, 4, 6], [7], [8]]


def test_trajectories_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocabulary.json", tiny_tokenizer())
    with pytest.raises(DataError, match="another vocabulary than that of"):
        of_stored(tmp_path, solved())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return the settings of a project with twelve conversations, whose rewards are all equal."""
    path = make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text("def reward(output, row):\n    return 0.0\n")
    chats = [{"messages": [*user(f"{n}?"), assistant(f"{n} {n % 3}")]} for n in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    settings = yaml.safe_load(path.read_text())
    settings["actor"] = {"lr": 3e-3, "warmup_steps": 2}
    settings["sft"] = {"files": ["chats.jsonl"], "val_files": ["chats.jsonl"], "batch_size": 4}
    path.write_text(yaml.safe_dump(settings))
    return load_config(path)


def supervise(config: Config, **options: Any) -> TrainResult:
    return fit(SupervisedTrainer(config, console=console_to(), **options))


def losses(result: TrainResult) -> list[float]:
    return [line[names.SFT_LOSS] for line in lines_of(result)]


def test_a_run_lowers_its_loss_on_both_splits(project: Config) -> None:
    result = supervise(changed(project, "trainer", total_steps=30, val_every=10, save_every=None))
    lines = lines_of(result)
    assert lines[0][names.SFT_LOSS] == pytest.approx(math.log(len(small_tokenizer())), rel=0.05)
    assert lines[-1][names.SFT_LOSS] < 0.7 * lines[0][names.SFT_LOSS]
    assert [line["step"] for line in lines if names.SFT_VALIDATION_LOSS in line] == [10, 20, 30]
    assert lines[29][names.SFT_VALIDATION_LOSS] < lines[9][names.SFT_VALIDATION_LOSS]
    assert result.checkpoint is None


def test_the_loss_is_the_cross_entropy_of_transformers_on_the_same_tokens(project: Config) -> None:
    tokenizer = small_tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(project.model.path)
    total, count, num_tokens = 0.0, 0, 0
    for line in Path(project.sft.files[0]).read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(messages, return_dict=False)[:-1]  # without the last line break
        labels = [-100] * len(prompt) + ids[len(prompt) :]
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total += float(loss) * (len(ids) - len(prompt))
        count += len(ids) - len(prompt)
        num_tokens += len(ids)
    result = supervise(changed(changed(project, "sft", batch_size=12), "trainer", total_steps=1))
    assert losses(result)[0] == pytest.approx(total / count, abs=1e-5)
    assert result.metrics[names.SFT_TOKENS] == count
    seconds = result.metrics[f"{names.SECONDS}update"]
    assert result.metrics[names.TOKENS_PER_SECOND] * seconds == pytest.approx(num_tokens)


def test_four_steps_and_two_more_after_a_resume_are_six_steps_bit_for_bit(project: Config) -> None:
    whole = supervise(changed(project, "trainer", total_steps=6))
    half = changed(project, "trainer", total_steps=4, run_dir="half")
    supervise(half)
    resumed = supervise(changed(half, "trainer", total_steps=6), resume=True)
    assert losses(resumed) == losses(whole)
    assert_same_policy(whole, resumed)


def test_epochs_set_the_number_of_steps(project: Config) -> None:
    assert supervise(changed(project, "sft", epochs=1.5)).step == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"files": []}, "sft.files is empty"),
        ({"val_files": []}, "validation is switched on but sft.val_files is empty"),
    ],
)
def test_settings_that_do_not_fit_are_refused(project: Config, values: dict[str, Any], message: str) -> None:
    config = changed(project, "trainer", val_every=3)
    with pytest.raises(ConfigError, match=message):
        supervise(changed(config, "sft", **values))


def mix(config: Config, **options: Any) -> TrainResult:
    """Train with rollouts, and with a supervised step after every second step."""
    return fit(PPOTrainer(changed(config, "sft", every=2), console=console_to(), **options))


def test_supervised_steps_end_a_row_of_dead_steps_and_resume_exactly(project: Config) -> None:
    config = changed(project, "trainer", total_steps=4, max_dead_steps=2)
    config = changed(config, "actor", lr=1e-2, warmup_steps=0)
    whole = mix(config)
    lines = lines_of(whole)
    assert [names.SFT_LOSS in line for line in lines] == [False, True, False, True]
    assert [line[names.DEAD_STEPS] for line in lines] == [1, 0, 1, 0]
    assert lines[3][names.SFT_LOSS] < lines[1][names.SFT_LOSS]
    half = changed(config, "trainer", total_steps=2, run_dir="half")
    mix(half)
    resumed = mix(changed(half, "trainer", total_steps=4), resume=True)
    assert lines_of(resumed)[3][names.SFT_LOSS] == lines[3][names.SFT_LOSS]
    assert_same_policy(whole, resumed)


def test_supervised_steps_without_files_are_refused(project: Config) -> None:
    with pytest.raises(ConfigError, match=r"sft\.every is set but sft\.files is empty"):
        mix(changed(project, "sft", files=[]))
