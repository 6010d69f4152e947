from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat.parsers import ToolParser
from agent_loop.serve.stream_parser import ContinuedParser, ParsedDelta, StreamParser
from agent_loop.types import MalformedCall, ParsedCompletion, ToolCall
from tests.chat.parsers.formats import FORMATS, Format
from tests.helpers import call_text

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HERMES = ToolParser.get("hermes")


def read(
    text: str, cuts: list[int] | None = None, *, parser: ToolParser = HERMES, **options
) -> list[ParsedDelta]:
    reader = StreamParser(parser, **{"tools": [ADD], **options})
    places = sorted({cut % (len(text) + 1) for cut in cuts or []})
    parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    return [*(reader.feed(part) for part in parts), reader.finish()]


def whole(text: str, **options) -> ParsedDelta:
    return sum(read(text, **options), ParsedDelta())


def calls_in(form: Format) -> list[ToolCall]:
    ids = ("functions.add:0", "functions.add:1") if form.has_ids else ("", "")
    return [ToolCall("add", {"a": "x y", "b": [1, 2]}, ids[0]), ToolCall("add", {}, ids[1])]


def test_text_is_returned_until_it_may_be_the_start_of_a_call() -> None:
    reader = StreamParser(HERMES, tools=[ADD])
    contents = [
        reader.feed(part).content for part in ("So: 1 <", " 2 and <tool", "box> then", " <tool_c", "all>{")
    ]
    assert contents == ["So: 1", " < 2 and", " <toolbox> then", "", ""]


def test_reasoning_is_streamed_even_if_the_prompt_opened_it() -> None:
    reader = StreamParser(HERMES, prompt_end="<|im_start|>assistant\n<think>\n")
    parts = [reader.feed(part) for part in ("\nI thi", "nk.\n", "So.\n</th", "ink>\n", "\nYes", ".")]
    assert [part.reasoning for part in parts] == ["I thi", "nk.", "\nSo.", "", "", ""]
    assert "".join(part.content for part in parts) == "Yes."


def test_malformed_calls_stay_in_the_content_unchanged() -> None:
    for broken in ("<tool_call>\n{'name': 'add'}\n</tool_call>", '<tool_call>{"name": "add", "argum'):
        assert whole(f"Now: {broken}") == ParsedDelta(f"Now: {broken}")
    mixed = whole(f"Now: {call_text('add', a=1)}<tool_call>nonsense</tool_call>")
    assert mixed == ParsedDelta("Now:\nnonsense", "", (ToolCall("add", {"a": 1}),))


def test_without_tools_calls_are_content() -> None:
    text = f"Write {call_text('add', a=1)} to add."
    assert whole(text, tools=[]) == ParsedDelta(text)


def test_a_parser_with_unknown_markers_parses_at_the_end() -> None:
    class Shouting(ToolParser):
        def parse(self, text, *, tools=()):
            words = text.split()
            calls = [
                ToolCall(word, {}) if word != "BAD" else MalformedCall(word, "")
                for word in words
                if word.isupper()
            ]
            return ParsedCompletion(" ".join(word for word in words if not word.isupper()), tuple(calls))

    assert [part.content for part in read("please ADD it", [4, 9], parser=Shouting())] == [
        "",
        "",
        "",
        "please it",
    ]
    assert whole("please ADD it", parser=Shouting()).tool_calls == (ToolCall("ADD", {}),)
    assert whole("please ADD it", parser=Shouting(), tools=[]) == ParsedDelta("please ADD it")
    assert whole("please BAD it", parser=Shouting()) == ParsedDelta("please BAD it")


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_split(form: Format, data: st.DataObject) -> None:
    parser = ToolParser.get(form.name)
    calls = calls_in(form)
    pieces = st.sampled_from(
        [
            "Hi ",
            " ",
            "\n",
            "a < b",
            *form.reasoning,
            *form.markers,
            form.cut,
            form.render(calls[:1]),
            form.render(calls),
        ]
    )
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=12))
    tools = data.draw(st.sampled_from([[], [ADD]]))
    assert sum(read(text, cuts, parser=parser, tools=tools), ParsedDelta()) == whole(
        text, parser=parser, tools=tools
    )


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_streamed_result_equals_the_tool_parsers(form: Format) -> None:
    parser = ToolParser.get(form.name)
    calls = calls_in(form)
    opening, closing = form.reasoning
    for text in (
        form.render(calls),
        f"{opening}Hm.{closing}{form.render(calls)}",
        f"{opening}Hm.{closing}\nSo it is.",
    ):
        parsed = parser.parse(text, tools=[ADD])
        reading = sum(read(text, list(range(0, 400, 3)), parser=parser), ParsedDelta())
        assert (reading.content, reading.reasoning) == (parsed.content, parsed.reasoning or "")
        assert list(reading.tool_calls) == parsed.tool_calls


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(data=st.data())
def test_a_continued_turn_adds_what_the_client_does_not_have(form: Format, data: st.DataObject) -> None:
    parser = ToolParser.get(form.name)
    calls = calls_in(form)
    pieces = st.sampled_from(
        ["Hi ", " ", "\n", "a < b", *form.reasoning, *form.markers, form.render(calls[:1])]
    )
    text = "".join(data.draw(st.lists(pieces, max_size=5)))
    cut = data.draw(st.integers(0, len(text)))
    has_text = data.draw(st.booleans())
    begun = whole(text[:cut], parser=parser)
    complete = whole(text, parser=parser)
    if begun.tool_calls:
        return  # messages with calls are not continued
    # A client has the text that it gave itself, or the content of a turn that was cut, without space at its end.
    given = text[:cut] if has_text and begun.content == text[:cut].strip() else begun.content
    rests = []
    for cuts in ([], list(range(0, len(text), 3))):
        stream = ContinuedParser(StreamParser(parser, tools=[ADD]), begun=text[:cut], given=given)
        ends = [*[each for each in cuts if cut < each < len(text)], len(text)]
        parts = [text[start:end] for start, end in zip([cut, *ends], ends, strict=False)]
        deltas = [stream.feed(part) for part in parts]
        rests.append(sum([*deltas, stream.finish()], ParsedDelta()))
    rest = rests[0]
    assert rests[1] == rest
    assert rest.tool_calls == complete.tool_calls
    # The beginning of a marker, which the client has as text, may become the marker.
    is_kept = complete.content.startswith(given.strip()) and complete.reasoning.startswith(begun.reasoning)
    if is_kept and not complete.tool_calls:
        assert begun.reasoning + rest.reasoning == complete.reasoning
        assert (given + rest.content).strip() == complete.content.strip()
