"""Short texts on which two encoders are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

NUM_PROBES_OF_A_KIND = 150
MAX_LENGTH = 24
NUM_CHARACTERS = 60
"""Number of characters from the smaller scripts together, and from the larger scripts together."""
RUN_LENGTHS = (2, 3, 4, 7, 16, 100, 1000)

_WORDS = (
    "hello",
    "WORLD",
    "Don't",
    "we'LL",
    "x1",
    "2024",
    "3.14",
    "naïve",
    "\u017f",
    "'\u017f",
    "İ",
    "ǅ",
    "ß",
    "ﬁ",
)
_CODE = (
    "def f(x):",
    "\n    ",
    "\t",
    "\r\n",
    "{}",
    "=>",
    "//",
    "</",
    "<|",
    "|>",
    "==",
    "_",
    "\\n",
    ";",
    '"',
    "`",
)
_SPACES = " \t\n\r\x0b\x0c\x1c\x85\u00a0\u2003\u2028\u3000\u200b\ufeff"
_MARKS = "e\u0301o\u0308\u0323\u093f\u0e33\u0345\u1100\u1161\u11a8\u212b\u2126\u0958\uf900"
_EMOJI = "😀👩\u200d🚀🏽🇫🇷❤\ufe0f✈1\u20e3"
_SCRIPTS = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x600), (0x600, 0x780), (0x900, 0xE80), (0x1D00, 0x2600))
_WIDE_SCRIPTS = ((0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xF900, 0xFB00), (0x10000, 0x1F800))


def encoder_probes(control_texts: Sequence[str]) -> Iterator[str]:
    """Yield the texts, which are the same in each run.

    Args:
        control_texts: Texts of the added tokens. Some of the texts contain them, whole and in pieces.
    """
    chance = random.Random(0)
    controls = list(control_texts)[:40]
    scripts, wide_scripts = (
        "".join(chr(chance.randrange(*chance.choice(ranges))) for _ in range(NUM_CHARACTERS))
        for ranges in (_SCRIPTS, _WIDE_SCRIPTS)
    )
    pieces = [text[:end] for text in controls for end in (1, -1, None)] + [text[1:] for text in controls]
    kinds: list[Callable[[], str]] = [
        lambda: chr(chance.randrange(128)),
        lambda: chance.choice(_SPACES),
        lambda: chance.choice(_WORDS) + chance.choice(("", " ", "  ", ".")),
        lambda: chance.choice(_CODE),
        lambda: chance.choice("0123456789 .,a"),
        lambda: chance.choice(_MARKS + "aé"),
        lambda: chance.choice(_EMOJI),
        lambda: chance.choice(scripts),
        lambda: chance.choice(wide_scripts),
        lambda: chance.randbytes(4).decode(errors="replace"),
        lambda: chance.choice([*pieces, "a", " "]),
    ]
    yield from ("", *(kind() for kind in kinds))
    for kind in (*kinds, lambda: chance.choice(kinds)()):
        for _ in range(NUM_PROBES_OF_A_KIND):
            yield "".join(kind() for _ in range(chance.randrange(1, MAX_LENGTH)))
    for length in RUN_LENGTHS:
        for kind in kinds:
            yield f"{kind()}{kind() * length}{kind()}"
