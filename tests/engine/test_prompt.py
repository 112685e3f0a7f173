"""Tests for engine/prompt.py."""

import pytest
from byte_tokenizer import byte_tokenizer

from headrace.engine.prompt import Prompt, PromptBuilder
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.options import ChatInput, CompletionInput

VOCABULARY = 261
CONTEXT = 4096


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def chat(*messages, **fields) -> ChatInput:
    return ChatInput.model_validate({"messages": list(messages), **fields})


def build(tokenizer, request) -> Prompt:
    return PromptBuilder(tokenizer, VOCABULARY, CONTEXT).build(request)


def text_of(tokenizer, request) -> str:
    return tokenizer.decode(build(tokenizer, request).tokens)


def refused(tokenizer, request) -> tuple[ErrorCode, str | None]:
    with pytest.raises(RequestError) as caught:
        build(tokenizer, request)
    return caught.value.code, caught.value.param


def test_text_and_tokens_give_the_same_prompt(tokenizer):
    """A completion's prompt may be either."""
    by_text = build(tokenizer, CompletionInput(prompt="héllo"))
    by_tokens = build(tokenizer, CompletionInput(prompt=by_text.tokens))
    assert by_tokens == by_text
    assert by_tokens.text == "héllo"


def test_a_token_outside_the_vocabulary_is_named(tokenizer):
    """The error says which."""
    request = CompletionInput(prompt=[1, 2, VOCABULARY])
    assert refused(tokenizer, request) == (ErrorCode.INVALID_PARAM, "prompt[2]")


def test_what_is_too_long_for_certain_is_not_tokenized(tokenizer, monkeypatch):
    """By the number of ids, or of bytes: a token stands for only so many."""
    text = "x" * 1_000_000
    rendered = tokenizer.encode("x")
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: rendered, raising=False)
    for request in (CompletionInput(prompt=[1] * CONTEXT), CompletionInput(prompt=text)):
        assert refused(tokenizer, request) == (ErrorCode.CONTEXT_TOO_LONG, "prompt")
    messages = chat({"role": "user", "content": text})
    assert refused(tokenizer, messages) == (ErrorCode.CONTEXT_TOO_LONG, "messages")


def test_messages_go_through_the_chat_template(tokenizer):
    """Roles, parts and `developer` arrive as templates know them."""
    request = chat(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    )
    assert text_of(tokenizer, request) == "[system]be brief[user]ab[assistant]"


def test_tools_reach_the_template_unless_the_choice_is_none(tokenizer):
    """`tool_choice: none` hides them."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    user = {"role": "user", "content": "x"}
    assert text_of(tokenizer, chat(user, tools=tools)) == "[user]x[tools]weather[assistant]"
    assert text_of(tokenizer, chat(user, tools=tools, tool_choice="none")) == "[user]x[assistant]"


def test_template_arguments_reach_the_template(tokenizer):
    """And an opened reasoning in the prompt is where the answer begins."""
    prompt = build(tokenizer, chat({"role": "user", "content": "x"}, chat_template_kwargs={"think": True}))
    assert prompt.starts_in == "reasoning"
    assert build(tokenizer, chat({"role": "user", "content": "x"})).starts_in == "normal"


@pytest.mark.parametrize("name", ["tokenize", "messages", "add_generation_prompt"])
def test_reserved_template_arguments_are_refused(tokenizer, name):
    """A client cannot change the call itself."""
    request = chat({"role": "user", "content": "x"}, chat_template_kwargs={name: 0})
    assert refused(tokenizer, request) == (ErrorCode.INVALID_PARAM, f"chat_template_kwargs.{name}")


def test_a_template_that_fails_refuses_the_messages(tokenizer):
    """What its author says reaches the client; what Python says does not."""
    user = {"role": "user", "content": "x"}
    with pytest.raises(RequestError, match="roles must alternate"):
        build(tokenizer, chat(user, chat_template_kwargs={"refuse": True}))
    with pytest.raises(RequestError) as caught:
        build(tokenizer, chat(user, chat_template_kwargs={"explode": True}))
    assert "zero" not in caught.value.message


def test_tool_call_arguments_must_be_json(tokenizer):
    """The path of the bad one is named."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    request = chat({"role": "assistant", "content": None, "tool_calls": [call]})
    assert refused(tokenizer, request)[1] == "messages[0].tool_calls[0].function.arguments"


def test_without_a_chat_template_completion_is_the_way(tokenizer):
    """The error says so."""
    plain = byte_tokenizer()
    plain.has_chat_template = False
    assert refused(plain, chat({"role": "user", "content": "x"})) == (ErrorCode.NOT_SERVED, "type")
