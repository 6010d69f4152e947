from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent_loop.training.metrics import REWARD_MEAN, SUCCESS_SHARE, TOOL_CALLS_MEAN
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from examples.common.report import ReportInput, TargetResult, print_comparison, write_report

QUESTION = "Which <b>shelf</b> [bold]?"


def test_the_page_shows_both_trajectories_and_their_logprobs(tmp_path: Path) -> None:
    page = write_report(report(), folder=tmp_path).read_text(encoding="utf-8")
    assert "0.0% → 100.0%" in page
    assert 'class="model" title="token 7, log-prob -0.500 (60.7%)"' in page
    assert 'class="tool" title="token 9"' in page
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_escapes_text_of_models_and_rows(tmp_path: Path) -> None:
    page = write_report(report(answer="<script>x</script>"), folder=tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "Which &lt;b&gt;shelf" in page


@pytest.mark.parametrize("answer", ["Shelf 1.", "[/red] [bold", ""])
def test_the_terminal_shows_answers_without_interpreting_markup(answer: str) -> None:
    console = Console(file=io.StringIO(), width=120)
    print_comparison(report(answer=answer), console=console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert QUESTION in shown
    assert (answer or "(nothing)") in shown


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
