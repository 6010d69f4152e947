"""Reading of launch scripts: variables, arrays, arithmetic, tests and control flow, without running a program."""

from __future__ import annotations

import pytest

from agent_loop.errors import ConfigError
from agent_loop.files.shell import read_script


def commands(script: str, *arguments: str, **environment: str) -> list[list[str]]:
    reading = read_script(script, name="scripts/run.sh", arguments=arguments, environment=environment)
    return [list(command) for command in reading.commands]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a=1 \\\n  b=2  # note\n", ["a=1", "b=2"]),
        ("X=3; run x=$X y=${X} z=\"$X $X\" w='$X'", ["x=3", "y=3", "z=3 3", "w=$X"]),
        ("run ${A:-one} ${HOME:-two} ${B:+three} ${HOME:+four}", ["one", "/home/u", "four"]),
        (
            "A=(a=1 'b=x y')\nA+=(c=3)\nrun \"${A[@]}\" ${#A[@]} ${A[1]}",
            ["a=1", "b=x y", "c=3", "3", "b=x", "y"],
        ),
        ('A=()\nrun "${A[@]}" end', ["end"]),
        ("L=1024; N=$((L * 2 + 1)); run $N $(( (L + 1) / 2 ))", ["2049", "512"]),
        (
            "P=/a/b.tar.gz; run ${P##*/} ${P%.gz} ${P%%.*} ${P/b/c}",
            ["b.tar.gz", "/a/b.tar", "/a/b", "/a/c.tar.gz"],
        ),
        ("export X=5 Y=6\nreadonly Z=7\nrun $X$Y$Z", ["567"]),
        ("X=${Y:=4}; run $X $Y", ["4", "4"]),
        ('run "$@" $# $1', ["n=8", "lr=1", "2", "n=8"]),
        ('run name="[\\"console\\",\\"wandb\\"]" \'["a"]\'', ['name=["console","wandb"]', '["a"]']),
        ("run $(pwd)/x $(basename /a/b.sh .sh) $(dirname /a/b) `echo hi`", ["/work/x", "b", "/a", "hi"]),
        ('R=$(cd "$(dirname "$0")/.." >/dev/null 2>&1 && pwd); run $R', ["/work"]),
        ("now() { echo 12; }\nrun $(now)", ["12"]),
        ("G=$(nvidia-smi -L | wc -l); run gpus=$G", ["gpus="]),
        ("D=$(python -c 'import x' 2>/dev/null && echo npu || echo gpu); run $D", ["gpu"]),
    ],
)
def test_words_are_expanded_as_a_shell_does(script: str, expected: list[str]) -> None:
    found = commands(script, "n=8", "lr=1", HOME="/home/u", PWD="/work")
    assert found == [["run", *expected]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('if [ "$B" = sglang ]; then X=1; elif [[ $B == v* && -z $C ]]; then X=2; else X=3; fi; run $X', "2"),
        ("case $B in sglang) X=1 ;; vllm|hf) X=2;; *) X=3 ;; esac; run $X", "2"),
        ("X=0; for i in 1 2 3; do X=$((X + i)); done; run $X", "6"),
        ("X=1; while true; do X=2; done; run $X", "1"),
        ('[ -n "$B" ] && X=1 || X=2; run $X', "1"),
        ("X=1; [ 3 -gt 4 ] && X=2; run $X", "1"),
        ("if ! command -v uv >/dev/null; then X=1; else X=2; fi; run $X", "1"),
        ("if (( 3 > 2 )); then X=1; fi; run $X", "1"),
        ("f() { X=$1; }\nf 7\nrun $X", "7"),
        ("X=1\ncat > file <<'EOF'\nX=2\nEOF\nrun $X", "1"),
        ("set -euo pipefail; X=1; exit 1; run $X", "1"),
        ("eval 'X=5'; run $X", "5"),
    ],
)
def test_control_flow_is_followed(script: str, expected: str) -> None:
    found = [command for command in commands(script, B="vllm") if command[0] == "run"]
    assert found == [["run", expected]]


def test_no_program_is_run_and_all_are_listed(tmp_path: object) -> None:
    script = f"pip install x && hf download y; rm -rf {tmp_path} | tee log; bash -c 'python train.py a=1'"
    assert commands(script) == [
        ["pip", "install", "x"],
        ["hf", "download", "y"],
        ["rm", "-rf", str(tmp_path)],
        ["tee", "log"],
        ["python", "train.py", "a=1"],
    ]


def test_unknown_values_are_named() -> None:
    reading = read_script("run $MISSING ${ALSO} $(hostname -i)", name="run.sh", environment={})
    assert list(reading.unset) == ["MISSING", "ALSO"]
    assert list(reading.not_run) == ["hostname -i"]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("run 'a", "not closed"),
        ("A=(1 2", r"\( that is not closed"),
        ("if true; then run", "'fi' belongs"),
        ("f() { f; }; f", "calls itself"),
        ("X=ab; for i in " + "1 " * 60 + "; do X=$X$X; done", "more than 1000000 characters"),
    ],
)
def test_a_broken_script_is_an_error(script: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        commands(script)
