"""Single examples with a scripted model, their demonstrations and configurations, and what runs and reports them."""

from __future__ import annotations

import io
import json
import random
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_loop.checks import check_interaction
from agent_loop.config import load_config
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.scripted import ScriptedReply, ScriptedRequest
from agent_loop.training.metrics import REWARD_MEAN, SUCCESS_SHARE, TOOL_CALLS_MEAN
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import Message, StopReason
from examples.common.report import ReportInput, TargetResult, print_comparison, write_report
from examples.frozen_lake.task import demonstrations
from examples.gsm8k import preprocess
from examples.guess_the_number.task import GuessTheNumber, solution, val_rows
from examples.retool.task import PROBLEMS
from examples.run import EXIT_ERROR, RECIPES, main
from tests.examples.conftest import context_of, load_task, run_scripted
from tests.helpers import text_reply, tool_call_reply
from tests.tools.sandboxes import python_tool

ROOMY_CODE = ["rollout.prompt_length=4000", "rollout.multi_turn.max_tool_response_length=2000"]
RETOOL = Path("examples/retool")
PROGRAMS = {
    168: "sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, 1000))",
    1366: "sum(int(digit) for digit in str(2**1000))",
    292: "def ways(left, coins):\n    if not coins:\n        return left == 0\n    return "
    "sum(ways(left - used, coins[1:]) for used in range(0, left + 1, coins[0]))\nways(100, (50, 25, 10, 5, 1))",
    232792560: "import math\nmath.lcm(*range(1, 21))",
    198: "sum(str(n) == str(n)[::-1] for n in range(1, 10001))",
    6857: "n, d = 600851475143, 2\nwhile d * d <= n:\n    n, d = (n // d, d) if n % d == 0 else (n, d + 1)\nn",
    92: "from itertools import permutations\nsum(len({q + c for c, q in enumerate(p)}) == len({q - c for c, q in "
    "enumerate(p)}) == 8 for p in permutations(range(8)))",
    556308: "a, b = 0, 1\nfor _ in range(100):\n    a, b = b, a + b\na % 1000007",
}


def outcome(trajectory: Trajectory) -> tuple[object, StopReason, float | None]:
    return trajectory.output.failure, trajectory.output.stop_reason, trajectory.reward


def solver(request: ScriptedRequest) -> ScriptedReply:
    """Return a program with an error, then its fixed last line, then the boxed result."""
    context = context_of(request)
    [program] = [PROGRAMS[answer] for question, answer in PROBLEMS if question in context]
    *setup, last = program.split("\n")
    if request.turn == 0:
        return tool_call_reply("python", code="\n".join([*setup, "undefined_name"]))
    if request.turn == 1:
        assert "NameError" in context
        return tool_call_reply("python", code=last)
    found = re.findall(r"<tool_response>\s*(\d+)\s*</tool_response>", context)
    return text_reply(rf"The answer is \boxed{{{found[-1]}}}.")


def test_problems_are_solved_with_code_and_mistakes_are_read() -> None:
    python_tool(python=sys.executable)  # skips the test if no isolation mechanism is available
    rows = load_rows(["examples/retool/task.py:rows"], prompt_key="prompt")
    trajectories = run_scripted(RETOOL, rows, solver, overrides=ROOMY_CODE)
    assert [outcome(t) for t in trajectories] == [(None, StopReason.ANSWERED, 1.0)] * len(PROBLEMS)
    assert {t.output.metrics.num_tool_calls for t in trajectories} == {2}
    for answer in ("168", r"\boxed{169}", r"\boxed{168} or \boxed{1}"):
        [trajectory] = run_scripted(
            RETOOL, rows[:1], lambda _, text=answer: text_reply(text), overrides=ROOMY_CODE
        )
        assert trajectory.reward == -1.0


GSM8K = Path("examples/gsm8k")
TRUTHS = ["39", "33", "1400", "-5"]


def gsm8k_rows(tmp_path: Path) -> list[dict[str, Any]]:
    out = tmp_path / "data" / "train.parquet"
    assert preprocess.main([str(GSM8K / "sample.jsonl"), "--out", str(out)]) == 0
    return load_rows([str(out)], prompt_key="prompt")


def run_gsm8k(task_rows: list[dict[str, Any]], *turns: ScriptedReply) -> list[Trajectory]:
    return run_scripted(GSM8K, task_rows, lambda request: turns[request.turn])


def test_preprocessing_creates_a_row_for_each_record(tmp_path: Path) -> None:
    task_rows = gsm8k_rows(tmp_path)
    assert [row["reward_model"]["ground_truth"] for row in task_rows] == TRUTHS
    first = task_rows[0]
    assert first["agent_name"] == "tool_agent"
    assert first["tools_kwargs"] == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "39"}}}
    assert first["interaction_kwargs"]["query"] == first["raw_prompt"][-1]["content"]
    assert "39" not in json.dumps(first["raw_prompt"])
    assert first["extra_info"]["split"] == "train"


def test_the_tool_s_score_is_the_reward(tmp_path: Path) -> None:
    [row, *_] = gsm8k_rows(tmp_path)
    [trajectory] = run_gsm8k(
        [row],
        tool_call_reply("calc_gsm8k_reward", answer="38"),
        tool_call_reply("calc_gsm8k_reward", answer="39"),
        text_reply("So it is #### 38"),
        text_reply("No: #### 39"),
    )
    output = trajectory.output
    assert output.failure is None
    assert output.tool_rewards == (-0.05, 0.0)
    assert output.turn_scores == (0.0, 1.0)
    assert output.stop_reason is StopReason.INTERACTION_FINISHED
    assert trajectory.reward == 1.0


def test_without_a_tool_call_the_reward_function_scores_the_answer(tmp_path: Path) -> None:
    for answer, rewards in (("#### 1,400", [0.0, 0.0, 1.0, 0.0]), ("none", [0.0] * 4)):
        trajectories = run_gsm8k(gsm8k_rows(tmp_path), *[text_reply(answer)] * 6)
        assert [(t.output.failure, t.reward) for t in trajectories] == [(None, reward) for reward in rewards]


SEARCH = Path("examples/search_r1")
ROOMY_SEARCH = [
    "rollout.prompt_length=4000",
    "rollout.response_length=8000",
    "rollout.multi_turn.max_tool_response_length=2000",
]


def hopper(request: ScriptedRequest) -> ScriptedReply:
    """Search for the novel, then for its author, then for the town, each as named in the previous result."""
    context = context_of(request)
    asked = re.findall(r"the author of (.+?)(?: born| was born)\?", context)[-1]
    author = re.search(rf"{re.escape(asked)} is a novel by ([\w ]+)\.", context)
    if author is None:
        return tool_call_reply("search", query_list=[f"novel {asked}"])
    town = re.search(rf"{author[1]} is a novelist, born in ([\w ]+?) as", context)
    if town is None:
        return tool_call_reply("search", query_list=[f"{author[1]} novelist born"])
    if "On which river" not in context:
        return text_reply(f"<answer>{town[1]}</answer>")
    river = re.search(rf"{town[1]} is a market town on the river (\w+)", context)
    if river is None:
        return tool_call_reply("search", query_list=[f"{town[1]} market town river"])
    return text_reply(f"<answer>The {river[1]}.</answer>")


def test_the_corpus_answers_every_question_step_by_step_and_answers_are_normalised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # (the index is cached there)
    rows = load_rows(["examples/search_r1/task.py:rows"], prompt_key="prompt")
    trajectories = run_scripted(SEARCH, rows, hopper, overrides=ROOMY_SEARCH)
    assert [outcome(t) for t in trajectories] == [(None, StopReason.ANSWERED, 1.0)] * 12
    assert [t.output.metrics.num_tool_calls for t in trajectories] == [2, 3] * 6

    for answer, reward in (("<answer> merrowby! </answer>", 1.0), ("Merrowby", 0.0)):
        [trajectory] = run_scripted(
            SEARCH, rows[:1], lambda _, text=answer: text_reply(text), overrides=ROOMY_SEARCH
        )
        assert trajectory.reward == reward


NUM_WALKS = 500
LAKE = load_config("examples/frozen_lake/config.yaml")


@pytest.fixture(scope="module")
def walks() -> list[list[Message]]:
    return list(islice(demonstrations(random.Random(0)), NUM_WALKS))


def test_demonstrations_take_each_action_equally_often_whatever_the_map(walks: list[list[Message]]) -> None:
    moves = [message["content"] for walk in walks for message in walk if message["role"] == "assistant"]
    shares = {action: moves.count(action) / len(moves) for action in ("left", "down", "right", "up")}
    assert all(0.2 < share < 0.3 for share in shares.values()), shares


def maps(sources: list[str]) -> set[str]:
    rows = load_rows(sources, prompt_key=LAKE.data.prompt_key)
    return {row["raw_prompt"][-1]["content"] for row in rows}


def test_held_out_maps_are_in_no_demonstration_and_in_no_training_row(walks: list[list[Message]]) -> None:
    held_out = maps(LAKE.data.val_files)
    assert held_out.isdisjoint(walk[1]["content"] for walk in walks)
    assert held_out.isdisjoint(maps(LAKE.data.train_files))
    assert len(held_out) > 60


def test_the_standard_map_is_an_example_of_its_own_with_the_same_warm_start() -> None:
    assert len(maps(load_config("examples/frozen_lake_4x4/config.yaml").data.train_files)) == 1
    assert load_task("frozen_lake_4x4").demonstrations is demonstrations


TWO_HOP = Path("examples/two_hop_lookup")
OTHERS = sorted(path.name for path in TWO_HOP.glob("*.yaml") if path.name != "config.yaml")


@pytest.mark.parametrize("name", OTHERS)
def test_a_configuration_for_an_engine_differs_in_the_engine_only(name: str) -> None:
    plain, other = load_config(TWO_HOP / "config.yaml"), load_config(TWO_HOP / name)
    assert other.rollout.engine == name.removesuffix(".yaml")
    engine = {"engine": other.rollout.engine, "engine_kwargs": other.rollout.engine_kwargs}
    assert other == plain.model_copy(update={"rollout": plain.rollout.model_copy(update=engine)})


def test_four_guesses_at_the_middle_are_enough() -> None:
    lengths = {(len(solution(row)) + 1) // 2 for row in val_rows(count=500)}
    assert lengths == {2, 3, 4}


async def test_the_game_passes_check_interaction() -> None:
    row = {"low": 20, "high": 34, "secret": 30}
    answers = ["Is it 27?", "Is it 31?", "Is it 19?"]
    report = await check_interaction(GuessTheNumber({}), interaction_kwargs=row, answers=answers)
    report.raise_if_failed()


def test_help_lists_the_examples_and_an_unknown_example_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in RECIPES)
    with pytest.raises(SystemExit, match=str(EXIT_ERROR)):
        main(["no_such_example"])
    assert "no_such_example" in capsys.readouterr().err


def test_settings_may_follow_options(monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, object] = {}

    async def run_example(task: str, **options: object) -> int:
        received.update(options, task=task)
        return 0

    monkeypatch.setattr("examples.run.run_example", run_example)
    assert main(["two_hop_lookup", "--seed", "3", "rollout.deterministic=true", "--steps", "2"]) == 0
    assert (received["task"], received["seed"]) == ("two_hop_lookup", 3)
    assert received["settings"] == ["rollout.deterministic=true", "trainer.total_steps=2"]


QUESTION = "Which <b>shelf</b> [bold]?"


def test_the_page_shows_both_trajectories_and_their_logprobs_and_escapes_texts(tmp_path: Path) -> None:
    page = write_report(report(), folder=tmp_path).read_text(encoding="utf-8")
    assert "0.0% → 100.0%" in page
    assert 'class="model" title="token 7, log-prob -0.500 (60.7%)"' in page
    assert 'class="tool" title="token 9"' in page
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = write_report(report(answer="<script>x</script>"), folder=tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "Which &lt;b&gt;shelf" in page


def test_the_terminal_shows_answers_without_interpreting_markup() -> None:
    for answer in ("Shelf 1.", "[/red] [bold", ""):
        file = io.StringIO()
        print_comparison(report(answer=answer), console=Console(file=file, width=120))
        assert QUESTION in file.getvalue()
        assert (answer or "(nothing)") in file.getvalue()


def report(answer: str = "Shelf 1.") -> ReportInput:
    metrics = [{SUCCESS_SHARE: step / 10, REWARD_MEAN: step / 10, TOOL_CALLS_MEAN: 1.0} for step in range(10)]
    return ReportInput(
        title="a task",
        subtitle="seed 0",
        verdict=TargetResult(is_passed=True, sentence="success went up"),
        before=[trajectory(answer, reward=0.0)],
        after=[trajectory(answer, reward=1.0)],
        success_threshold=1.0,
        metrics=metrics,
        right_answer=lambda row: str(row["answer"]),
        decode=lambda token_ids: "".join(f"<{token_id}>" for token_id in token_ids),
    )


def trajectory(answer: str, *, reward: float) -> Trajectory:
    output = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[7, 9, 8],
        response_mask=[1, 0, 1],
        response_logprobs=[-0.5, 0.0, -0.1],
        messages=[{"role": "assistant", "content": answer}],
    )
    row = {"raw_prompt": [{"role": "user", "content": QUESTION}], "answer": "Shelf 1."}
    return Trajectory(output=output, row=row, group=0, rollout=0, reward=reward, reward_extra={})
