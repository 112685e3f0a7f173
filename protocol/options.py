"""The options of a request: one object for both request frames, streaming or not. PROTOCOL.md, "Options".

A request body of OpenAI's API keeps its field names. What is not served is refused by name, never ignored.
"""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_DEPTH = 64
"""How deep objects and lists of the client's own making may be nested; orjson writes 253 levels at most."""
INT64_MAX = 2**63 - 1


def not_served(detail: str, param: str | None = None) -> PydanticCustomError:
    """Return the validation error of a field or value that exists elsewhere and not here."""
    return PydanticCustomError("not_served", "is not served: {detail}", {"detail": detail, "param": param})


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_expected", "must be a number, not a boolean")
    return value


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _logit_bias(value: dict[str, float] | None) -> dict[str, float] | None:
    for key in value or ():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise PydanticCustomError("token_id", "keys must be token ids written as decimal digits")
    return value


def _not_too_deep(value: dict[str, Any]) -> dict[str, Any]:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for holder in level
            if isinstance(holder, dict | list)
            for item in (holder.values() if isinstance(holder, dict) else holder)
        ]
        if not level:
            return value
    raise PydanticCustomError("depth", "is nested more than {most} deep", {"most": MAX_DEPTH})


def _json_only(value: Any) -> Any:
    """Refuse what can't be sent on: of a program's own making, since a frame has come as JSON."""
    try:
        orjson.dumps(value)
    except TypeError:
        raise PydanticCustomError("json", "has a value that JSON does not have") from None
    return value


FreeObject = Annotated[dict[str, Any], AfterValidator(_not_too_deep), AfterValidator(_json_only)]
Number = Annotated[float, BeforeValidator(_no_bool)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


class GenerationOptions(BaseModel):
    """How to generate: validated once, carried unchanged to the engine, echoed in `accepted`.

    None means "the server's default". `resolve` fills the defaults in, so that an engine sees none of those.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    stream: bool = True
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    logit_bias: (
        Annotated[
            dict[str, Annotated[Number, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIAS),
            AfterValidator(_logit_bias),
        ]
        | None
    ) = None
    stop: Annotated[
        list[StopString],
        Field(fail_fast=True),
        BeforeValidator(_stop_list),
        Field(max_length=MAX_STOP_STRINGS),
    ] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    echo: bool = False
    specprefill: StrictBool | None = None
    specprefill_keep_pct: Annotated[Number, Field(gt=0, le=1)] | None = None
    specprefill_debug: bool = False
    cache_prompt: bool = True
    timeout_ms: Annotated[int, Field(ge=1, le=86_400_000)] | None = None
    flush_ms: Annotated[int, Field(ge=0, le=1_000)] = 0
    window: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    detach: bool = False

    @model_validator(mode="before")
    @classmethod
    def _openai_spellings(cls, data: Any) -> Any:
        """Take OpenAI's other spellings of the same things: they say nothing that the options don't."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        choices = data.pop("n", None)
        if isinstance(choices, bool) or choices not in (None, 1):
            raise not_served("only 1 choice for each request", "n")
        if data.pop("stream_options", None) not in (None, {}, {"include_usage": True}):
            raise not_served("usage is in every last frame, and nothing else can be set", "stream_options")
        if (limit := data.pop("max_completion_tokens", None)) is not None:
            if data.get("max_tokens") not in (None, limit):
                raise PydanticCustomError(
                    "conflict",
                    "and max_tokens are one option: give one of them",
                    {"param": "max_completion_tokens"},
                )
            data["max_tokens"] = limit
        # The older completions API has a number here: how many alternatives to list.
        logprobs = data.get("logprobs")
        if isinstance(logprobs, int) and not isinstance(logprobs, bool):
            if not 0 <= logprobs <= MAX_TOP_LOGPROBS:
                raise PydanticCustomError(
                    "logprobs_range",
                    "must be true, false or a number from 0 to {most}",
                    {"most": MAX_TOP_LOGPROBS, "param": "logprobs"},
                )
            data["logprobs"] = True
            if data.get("top_logprobs") is None:
                data["top_logprobs"] = logprobs
        for name in (
            "stop",
            "stream",
            "logprobs",
            "top_logprobs",
            "echo",
            "specprefill_debug",
            "cache_prompt",
            *_NULL_IS_DEFAULT,
        ):
            if name in data and data[name] is None:
                del data[name]
        return data

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("conflict", "needs logprobs: true", {"param": "top_logprobs"})
        return self

    def resolve(self, *, model: str, max_tokens: int, temperature: float, seed: int) -> "GenerationOptions":
        """Return the options with the server's defaults in place of what the client left out."""
        return self.model_copy(
            update={
                "model": model,
                "max_tokens": max_tokens if self.max_tokens is None else self.max_tokens,
                "temperature": temperature if self.temperature is None else self.temperature,
                "seed": seed if self.seed is None else self.seed,
            }
        )


_NULL_IS_DEFAULT = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "flush_ms",
    "detach",
)

OPENAI_SPELLINGS = frozenset({"n", "stream_options", "max_completion_tokens"})
OPTION_NAMES = frozenset(GenerationOptions.model_fields) | OPENAI_SPELLINGS
"""Names of frame fields that belong to the options; the rest belongs to the frame."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(_Strict):
    """One part of a message whose content is a list."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_only(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") in ("image_url", "input_audio", "file", "video_url"):
            raise not_served(f"content of type {data['type']}")
        return data


class FunctionCall(_Strict):
    """The function that an assistant's earlier message called."""

    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str


class ToolCall(_Strict):
    """A tool call of an assistant's earlier message, as `done.message.tool_calls` has it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError(
                "content_missing",
                "must have content (only an assistant's message with tool calls goes without)",
            )
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(_Strict):
    """The function that a tool offers; `parameters` is a JSON Schema, passed to the template as it is."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    description: str | None = None
    parameters: FreeObject | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


def _tool_choice(value: Any) -> Any:
    if value not in (None, "auto", "none"):
        raise not_served('only "auto" and "none"')
    return value


def _response_format(value: Any) -> Any:
    if value not in (None, {"type": "text"}):
        raise not_served('only {"type": "text"}')
    return value


class ChatInput(_Strict):
    """What a `chat` frame has beside its options."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[Literal["auto", "none"] | None, BeforeValidator(_tool_choice)] = None
    response_format: Annotated[dict[str, str] | None, BeforeValidator(_response_format)] = None
    chat_template_kwargs: FreeObject | None = None


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class CompletionInput(_Strict):
    """What a `completion` frame has beside its options."""

    prompt: (
        Annotated[str, StringConstraints(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
    )
