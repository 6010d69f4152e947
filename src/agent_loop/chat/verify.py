"""Check of a chat template: whether a trajectory equals a full render of its messages, and if not, why."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count
from typing import Any

from agent_loop.chat.conversations import completion_ids
from agent_loop.chat.encoding import num_shared
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message, ToolCall

MAX_CONTROL_TOKENS = 40
"""Number of control tokens in the text of a hostile reply."""
LEN_EXAMPLE = 32
"""Characters of an example."""
NUM_TOKENS = 3
"""Tokens of an example of merged tokens."""

_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_REASONING = re.compile("reasoning|think", re.IGNORECASE)
"""Found in the source of a template that renders or drops reasoning."""

_log = logging.getLogger(__name__)


class TemplateVerdict(StrEnum):
    """Result of comparing the tokens of a trajectory with a full render of its messages."""

    EXACT = "exact"
    """The tokens were equal in every conversation of the check."""
    DIFFERS = "differs"
    """The tokens were not equal, or the template leaves something out of both sides. The trajectory keeps the tokens
    that the model saw and sampled."""
    UNSUPPORTED = "unsupported"
    """The template cannot render such a conversation."""


class CauseKind(StrEnum):
    """Severity of a cause; the most severe first."""

    meaning: str
    """One line for display."""

    LEFT_OUT = "left_out", "the template leaves out what the model should see or what it sampled"
    REWRITTEN = (
        "rewritten",
        "the template rewrites history; the trajectory keeps what the model saw and sampled",
    )
    MERGED = "merged", "the tokenizer merges tokens where turns meet; the trajectory keeps the sampled ones"

    def __new__(cls, value: str, meaning: str) -> CauseKind:
        kind = str.__new__(cls, value)
        kind._value_, kind.meaning = value, meaning
        return kind


class Cause(StrEnum):
    """Reason why a full render differs; the most severe first."""

    IGNORED_TOOLS = "ignored_tools"
    IGNORED_SYSTEM_PROMPT = "ignored_system_prompt"
    DROPPED_CALL = "dropped_call"
    DROPPED_TEXT = "dropped_text"
    STRIPPED_REASONING = "stripped_reasoning"
    REWRITTEN_HISTORY = "rewritten_history"
    MERGED_TOKENS = "merged_tokens"

    @property
    def kind(self) -> CauseKind:
        """Severity of the cause."""
        if self in (Cause.IGNORED_TOOLS, Cause.IGNORED_SYSTEM_PROMPT, Cause.DROPPED_CALL):
            return CauseKind.LEFT_OUT
        return CauseKind.MERGED if self is Cause.MERGED_TOKENS else CauseKind.REWRITTEN

    @property
    def meaning(self) -> str:
        """One line for display."""
        return _MEANINGS[self]


_MEANINGS = {
    Cause.IGNORED_TOOLS: "the template leaves the descriptions of tools out; describe the tools in the system prompt",
    Cause.IGNORED_SYSTEM_PROMPT: "the template leaves the system prompt out; put it into the first user message",
    Cause.DROPPED_CALL: "the template leaves calls of the assistant out",
    Cause.DROPPED_TEXT: "the template leaves text of the assistant out",
    Cause.STRIPPED_REASONING: "the template drops or adds a reasoning block when it renders an earlier turn",
    Cause.REWRITTEN_HISTORY: "the template renders earlier messages differently once more messages follow",
    Cause.MERGED_TOKENS: "the text is the same, but its tokens differ where the turns meet",
}


@dataclass(frozen=True, slots=True)
class RenderDifference:
    """Example of a cause."""

    cause: Cause
    kept: str = ""
    """Text of the trajectory from the difference on; merged tokens are separated by bars."""
    rendered: str = ""
    """Text of the full render from the difference on."""
    is_in_no_render: bool = False
    """Whether the template leaves `kept` out of every render. The tokens of both sides may be equal."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Comparison of one conversation."""

    name: str
    has_tools: bool
    is_essential: bool
    """Whether a template that refuses the conversation is unsupported. Refusing other conversations is a limit."""
    verdict: TemplateVerdict
    differences: tuple[RenderDifference, ...] = ()
    """One example per cause, the most severe first."""
    error: str = ""
    """The template's error, if the template cannot render the conversation."""
    position: int | None = None
    """Index of the first token that differs."""
    is_bridge_exact: bool = True
    """Whether the tokens after an assistant turn are equal."""
    num_bridge_tokens: int = 0
    num_kept_tokens: int = 0
    """Number of tokens of the trajectory minus number of tokens of the full render."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Causes of the differences, the most severe first."""
        return tuple(difference.cause for difference in self.differences)


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Result of `verify_template` for a chat template."""

    results: tuple[ProbeResult, ...]
    has_date: bool = False
    """Whether the template writes the date into the prompt. The prompt is rendered once, so the date does not change
    during a trajectory."""
    has_reasoning: bool = True
    """Whether the template renders reasoning. Otherwise the report holds for models that do not reason."""

    @property
    def without_tools(self) -> TemplateVerdict:
        return _overall([result for result in self.results if not result.has_tools])

    @property
    def with_tools(self) -> TemplateVerdict | None:
        """Verdict of the conversations with tools, or None if there were none."""
        results = [result for result in self.results if result.has_tools]
        return _overall(results) if results else None

    @property
    def verdict(self) -> TemplateVerdict:
        """The worse of both verdicts."""
        return _overall(self.results)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All causes, once each: by kind, then by frequency."""
        counts = Counter(cause for result in self.results for cause in result.causes)
        found = [cause for cause in Cause if cause in counts]
        return tuple(sorted(found, key=lambda cause: ([*CauseKind].index(cause.kind), -counts[cause])))

    def kinds(self, *, tools: bool | None = None) -> tuple[CauseKind, ...]:
        """Return the kinds of the causes, the most severe first."""
        results = [result for result in self.results if tools is None or result.has_tools is tools]
        found = {cause.kind for result in results for cause in result.causes}
        return tuple(kind for kind in CauseKind if kind in found)

    def examples(self, cause: Cause) -> list[tuple[ProbeResult, RenderDifference]]:
        """Return the probes that show a cause, with their examples."""
        return [(r, found) for r in self.results for found in r.differences if found.cause is cause]

    @property
    def limits(self) -> tuple[ProbeResult, ...]:
        """Conversations that the template refuses and that a run does not need."""
        return tuple(r for r in self.results if r.error and not r.is_essential)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "verdict": self.verdict,
            "without_tools": self.without_tools,
            "with_tools": self.with_tools,
            "kinds": {kind: kind.meaning for kind in self.kinds()},
            "causes": {cause: cause.meaning for cause in self.causes},
            "has_date": self.has_date,
            "has_reasoning": self.has_reasoning,
            "probes": [asdict(result) for result in self.results],
        }


def _overall(results: Sequence[ProbeResult]) -> TemplateVerdict:
    if any(result.error and result.is_essential for result in results):
        return TemplateVerdict.UNSUPPORTED
    if any(result.differences for result in results):
        return TemplateVerdict.DIFFERS
    return TemplateVerdict.EXACT


_TOOL = "get_weather"


def _schema(name: str, description: str, **parameters: str) -> Mapping[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    parameters_schema = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "description": description, "parameters": parameters_schema}
    return {"type": "function", "function": function}


PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
    _schema(_TOOL, "Gives the weather of a city.", city="Name of the city."),
    _schema("get_tides", "Gives the tides of a port.", port="Name of the port."),
)
_SCHEMA_TEXTS = tuple(
    (Cause.IGNORED_TOOLS, text)
    for text in ("Gives the weather of a city.", "Name of the city.", "Gives the tides of a port.")
)

_ESSENTIAL = ("user follow-up", "tool")
_PLANS = {
    "user follow-up": "user answer user",
    "system prompt": "system user answer user answer user",
    "two user messages": "user answer user user answer user",
    "thinking": "user thinking+answer user",
    "thinking in some turns": "system user thinking+answer user answer user thinking+answer user",
    "odd texts": "user answer user answer user answer user",
}
_TOOL_PLANS = {
    "tool": "user call reply",
    "parallel tools": "user call+call reply reply",
    "parallel tools in each turn": "user call+call reply reply call+call reply reply answer user",
    "system prompt and tool": "system user call reply answer user call reply call reply",
    "user behind tool reply": "user call reply user answer user call reply answer user",
    "tool without reply": "user call user answer user",
    "text and tool in each turn": "user text+call reply text+call reply answer user text+call reply",
    "text and tool without reply": "user text+call user answer user",
    "text and parallel tools": "user text+call+call reply reply answer user",
    "thinking with tools": "user thinking+answer user thinking+answer user",
    "thinking and tool": "user thinking+call reply thinking+answer user",
    "thinking in each tool turn": "system user thinking+call reply thinking+call+call reply reply answer user",
    "thinking, text and tool": "user thinking+text+call reply thinking+answer user",
    "odd tool replies": "user call reply call reply call reply call reply",
}
"""Short conversations by name. Each word is a message; `+` joins the parts of an assistant's message."""

_ROLES = {"system": "system", "user": "user", "reply": "tool"}
"""Roles of the messages that are not the assistant's."""
_TEXTS: Mapping[str, Sequence[str]] = {
    "system": ("Answer briefly.",),
    "user": ("How is the weather?", "And tomorrow?", "And by the sea?", "And in the hills?", "And at night?"),
    "answer": ("Sunny.", "Cloudy.", "Windy.", "Foggy."),
    "text": ("I will look it up.", "Let me check once more.", "One last look."),
    "thinking": ("I recall that this was asked.", "It may have changed.", "It is a new day.", "Now I know."),
    "call": ("Lisbon", "Oslo", "Quito", "Hanoi", "Tunis", "Perth"),
    "reply": ("21 degrees", "5 degrees", "30 degrees", "9 degrees", "17 degrees", "8 degrees"),
}
"""Texts of each word, one after the other. Each occurs once in a conversation, so that a render can be searched."""
_UNICODE = "¿Qué tal? 你好, 🌦️ e\u0301\n\n  <b>&amp;</b> \\n {{ x }}"
_ERROR = 'Error: "city" is unknown;\ngive one of {"Paris", "Rome"}'


@dataclass(frozen=True, slots=True)
class Probe:
    """Conversation whose assistant turns are checked one by one."""

    name: str
    messages: Sequence[Message]
    has_tools: bool

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return PROBE_TOOLS if self.has_tools else ()

    @property
    def turns(self) -> Iterator[tuple[int, int]]:
        """Index of each message of the assistant, and of the one behind its replies."""
        roles = [message["role"] for message in self.messages]
        starts = [i for i, role in enumerate(roles) if role == "assistant"]
        return zip(starts, [*starts[1:], len(roles)], strict=True)


def make_probes(hostile: str, *, tools: bool) -> list[Probe]:
    """Return the conversations of the check. Some contain `hostile`, which has the text of control tokens."""
    odd = {
        "user": ("How is the weather?", _UNICODE, hostile, ""),
        "answer": (_UNICODE, "", "Sunny."),
        "reply": (_ERROR, "", _UNICODE, hostile),
    }
    return [
        Probe(
            name, _messages(plan, {**_TEXTS, **(odd if name.startswith("odd") else {})}), plans is _TOOL_PLANS
        )
        for plans in (_PLANS, *([_TOOL_PLANS] if tools else []))
        for name, plan in plans.items()
    ]


def _messages(plan: str, texts: Mapping[str, Sequence[str]]) -> list[Message]:
    unused = {word: iter(choice) for word, choice in texts.items()}
    ids = (f"probe{number:04d}" for number in count(1))
    calls: list[ToolCall] = []
    messages: list[Message] = []
    for words in plan.split():
        message: Message = {"role": _ROLES.get(words, "assistant"), "content": ""}
        if message["role"] == "assistant":
            calls = []
        for word in words.split("+"):
            text = next(unused[word])
            if word == "thinking":
                message["reasoning_content"] = text
            elif word == "call":
                calls.append(ToolCall(_TOOL, {"city": text}, id=next(ids)))
                message["tool_calls"] = [call.as_message() for call in calls]
            else:
                message["content"] = text
        if words == "reply":
            message |= {"name": _TOOL, "tool_call_id": calls.pop(0).id}
        messages.append(message)
    return messages


def _texts_of(messages: Sequence[Message]) -> list[tuple[Cause, str]]:
    """Return the texts of messages in the order of a render, each with its cause if a template omits it."""
    texts: list[tuple[Cause, str]] = []
    for message in messages:
        if message["role"] == "assistant":
            texts.append((Cause.STRIPPED_REASONING, message.get("reasoning_content", "")))
            texts.append((Cause.DROPPED_TEXT, message["content"]))
            cities = [call["function"]["arguments"]["city"] for call in message.get("tool_calls", ())]
            texts += [(Cause.DROPPED_CALL, city) for city in cities]
        else:
            is_system = message["role"] == "system"
            texts.append(
                (Cause.IGNORED_SYSTEM_PROMPT if is_system else Cause.REWRITTEN_HISTORY, message["content"])
            )
    return [(cause, text) for cause, text in texts if text]


def verify_template(template: ChatTemplate | Any, *, tools: bool) -> TemplateReport:
    """Compare prompt, completion and bridge with a full render, over a set of short conversations.

    The completion is the assistant turn as the template itself renders it, up to the token at which a model would stop.
    Its text begins and ends without white space.

    Args:
        template: A chat template, or a tokenizer with one.
        tools: Also check conversations with tools.

    Raises:
        ChatTemplateError: The tokenizer has no chat template, or is not fast.
    """
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate(template)
    hostile = "".join(f"a{text}" for text in template.encoder.control_texts[:MAX_CONTROL_TOKENS])
    source = _COMMENT.sub("", str(template.tokenizer.chat_template))
    has_reasoning = _REASONING.search(source) is not None
    return TemplateReport(
        results=tuple(
            _verify_probe(template, probe)
            for probe in make_probes(hostile, tools=tools)
            if has_reasoning or "thinking" not in probe.name
        ),
        has_date="strftime_now" in source,
        has_reasoning=has_reasoning,
    )


def require_template(template: ChatTemplate, *, tools: bool) -> None:
    """Refuse a template that cannot render the replies of a run, and log what its first prompt leaves out."""
    for joint in (template.bridges.user, *([template.bridges.tool] if tools else [])):
        if isinstance(joint, ChatTemplateError):
            raise ChatTemplateError(
                f"the chat template cannot be used{' with tools' if tools else ''}; "
                f"set model.chat_template_path to another template: {joint}"
            ) from joint
    if not tools:
        return
    prompt = template.renderer.text([{"role": "user", "content": "-"}], tools=PROBE_TOOLS)
    if any(text not in prompt for _, text in _SCHEMA_TEXTS):
        _log.error("chat template: %s (%s)", Cause.IGNORED_TOOLS, Cause.IGNORED_TOOLS.meaning)


def _verify_probe(template: ChatTemplate, probe: Probe) -> ProbeResult:
    checks: list[_TurnCheck] = []
    error = ""
    try:
        checks += (_TurnCheck(template, probe, start=start, end=end) for start, end in probe.turns)
    except ChatTemplateError as refusal:
        error = " ".join(str(refusal).split())
    differences = {d.cause: d for check in reversed(checks) for d in reversed(check.differences)}
    verdict = TemplateVerdict.DIFFERS if differences else TemplateVerdict.EXACT
    return ProbeResult(
        name=probe.name,
        has_tools=probe.has_tools,
        is_essential=probe.name in _ESSENTIAL,
        verdict=TemplateVerdict.UNSUPPORTED if error else verdict,
        differences=tuple(differences[cause] for cause in Cause if cause in differences),
        error=error,
        position=next((check.position for check in checks if check.position is not None), None),
        is_bridge_exact=all(check.is_bridge_exact for check in checks),
        num_bridge_tokens=sum(len(check.bridge) for check in checks),
        num_kept_tokens=sum(len(check.kept) - len(check.rendered) for check in checks),
    )


class _TurnCheck:
    """Comparison of a trajectory after one assistant turn and its replies with a full render of the same messages."""

    def __init__(self, template: ChatTemplate, probe: Probe, *, start: int, end: int) -> None:
        self._template = template
        self._tools = probe.tools
        self._opening, self._said = probe.messages[:start], probe.messages[start]
        self._replies = probe.messages[start + 1 : end]
        self._calls = [
            ToolCall(call["function"]["name"], {}, id=call["id"]) for call in self._said.get("tool_calls", ())
        ]
        opening = [template.bridges.adapted(message) for message in self._opening]
        turn = [*opening, template.bridges.adapted(self._said)]
        self._before = self._text(opening)
        self._ended = self._text(turn, add_generation_prompt=False)
        completion = self._sampled()
        self.bridge = self._bridge_after(completion)
        self.kept = [*template.encoder.encode(self._before), *completion, *self.bridge]
        """Tokens of the trajectory."""
        replies = template.bridges.filled(self._replies, calls=self._calls)
        self.rendered = template.encoder.encode(self._text([*turn, *replies]))
        """Tokens of the full render."""
        self.is_bridge_exact = self.rendered[len(self.rendered) - len(self.bridge) :] == self.bridge
        self.position = None if self.kept == self.rendered else num_shared(self.kept, self.rendered)
        self.differences = list(self._left_out())
        if self.position is not None:
            self.differences.append(self._first_difference(self.position))

    def _text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        return self._template.renderer.text(
            messages, tools=self._tools, add_generation_prompt=add_generation_prompt
        )

    def _sampled(self) -> list[int]:
        """Return the completion of a model that samples what the template renders."""
        before, ended = self._before, self._ended
        if not ended.startswith(before):
            # The template renders history differently before this turn: start at the last common text before the turn.
            for _, text in reversed(_texts_of(self._opening)):
                if text in before and text in ended:
                    before, ended = before[before.rindex(text) :], ended[ended.rindex(text) :]
                    break
        shared = before if ended.startswith(before) else self._template.encoder.shared(ended, before)
        return completion_ids(self._template, ended[len(shared) :], next_id=self._bridge_after([])[0])

    def _bridge_after(self, completion: Sequence[int]) -> list[int]:
        last = completion[-1] if completion else None
        return self._template.bridge(self._replies, last_token_id=last, calls=self._calls).tolist()

    def _left_out(self) -> Iterator[RenderDifference]:
        """Yield the texts that the template leaves out of every render."""
        system = [found for found in _texts_of(self._opening) if found[0] is Cause.IGNORED_SYSTEM_PROMPT]
        expected = [(each, self._before) for each in (*(_SCHEMA_TEXTS if self._tools else ()), *system)]
        expected += [(each, self._ended) for each in _texts_of([self._said]) if each[1].isascii()]
        for (cause, text), render in expected:
            if text not in render:
                yield RenderDifference(cause, text[:LEN_EXAMPLE], is_in_no_render=True)

    def _first_difference(self, position: int) -> RenderDifference:
        """Return the first text or token that differs, with its cause."""
        decode = self._template.decode
        kept, rendered = decode(self.kept), decode(self.rendered)
        if kept == rendered:
            kept, rendered = (
                "|".join(decode([token_id]) for token_id in ids[position : position + NUM_TOKENS])
                for ids in (self.kept, self.rendered)
            )
            return RenderDifference(Cause.MERGED_TOKENS, kept, rendered)
        start = num_shared(kept, rendered)
        shown = slice(start, start + LEN_EXAMPLE)
        return RenderDifference(self._cause(kept, rendered), kept[shown], rendered[shown])

    def _cause(self, kept: str, rendered: str) -> Cause:
        for cause, text in _texts_of([*self._opening, self._said, *self._replies]):
            if (text in kept) != (text in rendered):
                return Cause.REWRITTEN_HISTORY if cause is Cause.IGNORED_SYSTEM_PROMPT else cause
        is_reasoning = kept.count("think>") != rendered.count("think>")
        return Cause.STRIPPED_REASONING if is_reasoning else Cause.REWRITTEN_HISTORY
