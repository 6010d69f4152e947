"""Task: questions that take two or three searches, after Search-R1 (https://arxiv.org/abs/2503.09516)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from agent_loop.trajectory import AgentLoopOutput

SYSTEM = (
    "Answer the question. Search for what you do not know, as often as you need. "
    "End with the answer between <answer> and </answer>, without explanations."
)
IN_TWO_STEPS = "In which town was the author of {} born?"
IN_THREE_STEPS = "On which river lies the town where the author of {} was born?"
FACTS = {
    "The Salt Ledger": ("Merrowby", "Teal"),
    "Nine Lanterns": ("Castel Anor", "Brune"),
    "A House of Wrens": ("Hjelm", "Sva"),
    "The Glass Ferry": ("Port Selwyn", "Isk"),
    "Winter Grammar": ("Tal Miran", "Orrin"),
    "The Cartographer's Oath": ("Oxholt", "Lathe"),
}
"""Town and river by novel, as in `corpus.jsonl`."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def rows() -> list[dict[str, Any]]:
    """Return two rows for each novel."""
    return [
        {
            "prompt": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question.format(novel)},
            ],
            "agent_name": "tool_agent",
            "golden_answers": [answer],
        }
        for novel, (town, river) in FACTS.items()
        for question, answer in ((IN_TWO_STEPS, town), (IN_THREE_STEPS, river))
    ]


def reward(output: AgentLoopOutput, row: Mapping[str, Any]) -> float:
    """Return 1 if the last answer is one of the golden answers, else 0. Case, articles and punctuation are ignored."""
    given = _ANSWER.findall(output.answer)
    golden = {_normalised(answer) for answer in row["golden_answers"]}
    return float(bool(given) and _normalised(given[-1]) in golden)


def _normalised(text: str) -> str:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))
