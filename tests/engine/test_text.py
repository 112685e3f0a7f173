"""Tests for engine/text.py."""

import random

import pytest
from byte_tokenizer import byte_tokenizer

from headrace.engine.text import MAX_HELD_TOKENS, Answer, AnswerFormat, Detokenizer, Piece, StopMatcher

TEXTS = [
    "plain words",
    "emoji 👩‍👩‍👧 and 🇫🇷 and 👍🏽",
    "世界，你好。日本語のテキスト",
    "cafe\u0301 n\u0303 combining \u0e01\u0e33",
    "a\u0000b\u200bc\n\n\t d",
    "🙂",
]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def answer(tokenizer, *, stops=(), starts_in="normal", tools=None) -> Answer:
    return Answer(
        Detokenizer(tokenizer),
        AnswerFormat(tokenizer),
        stops=stops,
        starts_in=starts_in,
        tools=tools,
        call_id_prefix="call_",
    )


def run(answer: Answer, tokens: list[int]) -> tuple[Piece, list[Piece]]:
    """Feed tokens until the answer stops; return everything joined, and the pieces."""
    pieces = []
    for token in tokens:
        pieces.append(answer.push(token))
        if answer.stopped:
            break
    pieces.append(answer.finish())
    whole = Piece()
    for piece in pieces:
        whole += Piece(piece.text, piece.reasoning, list(piece.tool_calls))
    return whole, pieces


# --- characters ---


@pytest.mark.parametrize("text", TEXTS)
def test_joined_pieces_equal_the_whole_and_no_character_is_split(tokenizer, text):
    """Each byte is a token, so that each character is cut everywhere; no piece shows half of one."""
    whole, pieces = run(answer(tokenizer), tokenizer.encode(text))
    assert whole.text == text
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_text_appears_with_the_token_that_completes_it(tokenizer):
    """Nothing is held longer than its character takes."""
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in tokenizer.encode("aé🙂")] == ["a", "", "é", "", "", "", "🙂"]


def test_bytes_that_are_no_text_look_as_in_a_whole_decode(tokenizer):
    """What the model really produced is shown, also when it is broken, also at the end."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(256) for _ in range(rng.randrange(1, 40))]
        whole, _ = run(answer(tokenizer), tokens)
        assert whole.text == tokenizer.decode(tokens)


def test_broken_bytes_are_not_held_for_ever(tokenizer):
    """A model that produces only continuation bytes still shows something."""
    detokenizer = Detokenizer(tokenizer)
    [continuation] = [t for t in range(256) if tokenizer.convert_ids_to_tokens(t) == "\u0122"]
    shown = [detokenizer.push(continuation) for _ in range(3 * MAX_HELD_TOKENS)]
    assert sum(map(len, shown)) >= 2 * MAX_HELD_TOKENS


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_prompt_that_ends_inside_a_character(tokenizer, cut):
    """The answer completes the character; it does not repeat the prompt."""
    tokens = tokenizer.encode("abc🙂d")
    detokenizer = Detokenizer(tokenizer, tokens[:cut])
    text = "".join(detokenizer.push(token) for token in tokens[cut:]) + detokenizer.finish()
    assert text == ("abc🙂d"[cut:] if cut <= 3 else "🙂d" if cut < 7 else "d")


def test_slow_tokenizers_go_through_mlx_lms_detokenizer(tokenizer):
    """Without a fast implementation the text is the same."""

    class Slow:
        """A tokenizer that offers nothing but mlx-lm's streaming detokenizer."""

        detokenizer = tokenizer.detokenizer

    detokenizer = Detokenizer(Slow())
    text = (
        "".join(detokenizer.push(token) for token in tokenizer.encode("word 世界 🙂")) + detokenizer.finish()
    )
    assert text == "word 世界 🙂"


# --- stop strings ---


def reference_stop(text: str, stops: list[str]) -> str:
    """Cut before the stop string that is complete first; of two complete at once, before the longer."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


def test_stop_strings_over_any_borders_equal_the_reference():
    """However the text is cut into chunks, it ends at the same place."""
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(0, 24)))
        stops = [
            "".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 5)))
            for _ in range(rng.randrange(1, 4))
        ]
        matcher, out, position = StopMatcher(stops), "", 0
        while position < len(text) and not matcher.stopped:
            step = rng.randrange(1, 5)
            out += matcher.push(text[position : position + step])
            position += step
        out += "" if matcher.stopped else matcher.finish()
        assert out == reference_stop(text, stops), (text, stops)


def test_held_back_is_the_shortest_end_that_may_become_a_stop_string():
    """After each character, exactly the open end is held, and no more: `aab` over many a's holds two."""
    matcher = StopMatcher(["aab"])
    assert [matcher.push("a") for _ in range(6)] == ["", "", "a", "a", "a", "a"]
    assert matcher.push("c") == "aac"
    assert matcher.push("xaa") == "x"
    assert matcher.push("b") == ""
    assert matcher.stopped


def test_a_stop_string_inside_a_multi_byte_character_border(tokenizer):
    """Stop strings are text: tokens that split a character neither hide nor fake one."""
    whole, _ = run(answer(tokenizer, stops=["界"]), tokenizer.encode("世界你好"))
    assert whole.text == "世"


def test_text_held_back_comes_at_the_end_if_it_was_no_stop_string(tokenizer):
    """Nothing is lost."""
    whole, pieces = run(answer(tokenizer, stops=["\n\nHuman:"]), tokenizer.encode("yes\n\nHum"))
    assert whole.text == "yes\n\nHum"
    assert pieces[-1].text == "\n\nHum"


# --- reasoning and tool calls ---


def test_reasoning_is_separated(tokenizer):
    """What stands between the markers is reasoning; the markers are nowhere."""
    whole, _ = run(answer(tokenizer), tokenizer.encode("<think>hm 🙂</think>yes"))
    assert (whole.text, whole.reasoning) == ("yes", "hm 🙂")


def test_an_answer_that_begins_inside_its_reasoning(tokenizer):
    """Templates may open the reasoning in the prompt."""
    whole, _ = run(answer(tokenizer, starts_in="reasoning"), tokenizer.encode("hm</think>yes"))
    assert (whole.text, whole.reasoning) == ("yes", "hm")


def test_tool_calls_are_parsed(tokenizer):
    """Each call has an index, an id and arguments as JSON text; text around them stays."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'
    whole, _ = run(answer(tokenizer, tools=TOOLS), tokenizer.encode(f"I look. {call}{call}"))
    assert whole.text == "I look. "
    assert [(c["index"], c["id"], c["function"]["name"]) for c in whole.tool_calls] == [
        (0, "call_0", "weather"),
        (1, "call_1", "weather"),
    ]
    assert whole.tool_calls[0]["function"]["arguments"] == '{"city": "K\\u00f6ln"}'


@pytest.mark.parametrize(
    ("text", "tools"),
    [
        ('a<tool_call>{"name": "weather"}</tool_call>b', None),
        ("a<tool_call>no json</tool_call>b", TOOLS),
        ('a<tool_call>{"no": "name"}</tool_call>b', TOOLS),
        ('a<tool_call>{"name": "wea', TOOLS),
        ("a<tool_call>", TOOLS),
        ("a<tool_call>[]</tool_call>b", TOOLS),
        (r'a<tool_call>{"name": "\ud800"}</tool_call>b', TOOLS),
        (r'a<tool_call>{"name": "x", "arguments": "\ud800"}</tool_call>b', TOOLS),
        ('a<tool_call>{"name": "x", "arguments": {"y": NaN}}</tool_call>b', TOOLS),
    ],
)
def test_what_is_no_tool_call_stays_text(tokenizer, text, tools):
    """Without tools, or malformed, or cut off, or no JSON that a frame can hold: the whole text is there."""
    whole, _ = run(answer(tokenizer, tools=tools), tokenizer.encode(text))
    assert (whole.text, whole.tool_calls) == (text, [])
