"""From a frame's input to prompt tokens."""

import json
import logging
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..protocol.errors import ErrorCode, RequestError
from ..protocol.options import ChatInput, ChatMessage, CompletionInput

logger = logging.getLogger(__name__)

RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "return_dict",
        "return_tensors",
        "chat_template",
        "tokenizer_kwargs",
        "truncation",
        "padding",
        "max_length",
    }
)
"""Names that mean something to the call itself: a client must not set them."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens; `text` is what `echo` repeats; `starts_in` is the state the answer begins in."""

    tokens: list[int]
    text: str
    starts_in: Literal["normal", "reasoning"] | str = "normal"
    tools: list[dict[str, Any]] | None = None


class PromptBuilder:
    """Makes prompts for one model. Threads may share it.

    Args:
        context_length: what is longer by its bytes alone is refused before it is tokenized.
    """

    def __init__(self, tokenizer: TokenizerWrapper, vocab_size: int, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._context_length = context_length
        # Of its name, which is no shorter than the text that the token stands for: but for special tokens
        # that swallow blanks, and nobody sends half a megabyte of those.
        self._longest_token_bytes = max(
            len(name.encode("utf-8", "replace")) for name in tokenizer.get_vocab()
        )

    def build(self, request: CompletionInput | ChatInput) -> Prompt:
        """Return the prompt of a request.

        Raises:
            RequestError: the model cannot take it; the error names the field.
        """
        if isinstance(request, ChatInput):
            return self._chat(request)
        if isinstance(request.prompt, str):
            self._check_length(self._least_tokens(request.prompt), "prompt")
            tokens = self._tokenizer.encode(request.prompt)
            if not tokens:
                raise RequestError(ErrorCode.INVALID_PARAM, "prompt: has no tokens", param="prompt")
            return Prompt(tokens, request.prompt)
        self._check_length(len(request.prompt), "prompt")
        for index, token in enumerate(request.prompt):
            if token >= self._vocab_size:
                message = f"token id {token} is not in the vocabulary of {self._vocab_size} tokens"
                raise RequestError(
                    ErrorCode.INVALID_PARAM, f"prompt[{index}]: {message}", param=f"prompt[{index}]"
                )
        return Prompt(list(request.prompt), self._tokenizer.decode(request.prompt))

    def _chat(self, request: ChatInput) -> Prompt:
        tokenizer = self._tokenizer
        if not tokenizer.has_chat_template:
            raise RequestError(
                ErrorCode.NOT_SERVED, "this model has no chat template: send a completion frame", param="type"
            )
        kwargs = request.chat_template_kwargs or {}
        if reserved := sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
            raise RequestError(
                ErrorCode.INVALID_PARAM,
                f"chat_template_kwargs.{reserved[0]}: cannot be set",
                param=f"chat_template_kwargs.{reserved[0]}",
            )
        tools = None
        if request.tools and request.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        messages = [_message(index, message) for index, message in enumerate(request.messages)]
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
            )
        except Exception as error:
            # A template is a program of the model's: it may fail in any way on what a client sends.
            logger.info("the chat template failed: %s: %s", type(error).__name__, error)
            # `raise_exception` in a template says what its author wants the caller to know.
            detail = f": {str(error)[:200]}" if type(error) is TemplateError else ""
            raise RequestError(
                ErrorCode.INVALID_PARAM,
                f"messages: the model's chat template does not take them{detail}",
                param="messages",
            ) from None
        self._check_length(self._least_tokens(text), "messages")
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if not tokens:
            raise RequestError(ErrorCode.INVALID_PARAM, "messages: have no tokens", param="messages")
        return Prompt(tokens, "", _initial_state(tokenizer, tokens), tools)

    def _least_tokens(self, text: str) -> int:
        return len(text.encode()) // self._longest_token_bytes

    def _check_length(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self._context_length:
            raise RequestError(
                ErrorCode.CONTEXT_TOO_LONG,
                f"at least {num_tokens} prompt tokens do not fit a context of {self._context_length} tokens",
                param=param,
            )


def system_prompt_tokens(tokenizer: TokenizerWrapper, request: ChatInput, prompt: Prompt) -> int:
    """Return how many of a prompt's first tokens are its system prompt: 0 if it has none of its own."""
    if request.messages[0].role not in ("system", "developer"):
        return 0
    try:
        alone = tokenizer.apply_chat_template(
            [_message(0, request.messages[0])], add_generation_prompt=False, tokenize=True
        )
    except Exception:  # a template may want more than a system prompt
        return 0
    pairs = zip(alone, prompt.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates want it: text content, arguments of tool calls as objects."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"messages[{index}].tool_calls[{number}]"
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return fields


def _arguments(text: str, path: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        param = f"{path}.function.arguments"
        raise RequestError(ErrorCode.INVALID_PARAM, f"{param}: is not a JSON text", param=param) from None


def _initial_state(tokenizer: TokenizerWrapper, tokens: list[int]) -> str:
    """Return the state an answer begins in: templates may open the reasoning in the prompt."""
    if tokenizer.response_initial_state:
        return str(tokenizer.response_initial_state)
    if tokenizer.has_thinking:
        opened = tokenizer.rfind_think_start(tokens)
        if opened >= 0 and opened > tokenizer.rfind_think_end(tokens):
            return "reasoning"
    return "normal"
