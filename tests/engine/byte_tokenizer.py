"""A tokenizer whose tokens are bytes and a few markers: every border between characters can be tried."""

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MARKERS = ["<|end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for tool_call in m.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name }}{% endfor %}{% endfor %}"
    "{% if tools %}[tools]{{ tools[0].function.name }}{% endif %}"
    "{% if refuse %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if explode %}{{ 1 / 0 }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if think %}<think>{% endif %}"
)


def byte_tokenizer(**wrapper: Any) -> TokenizerWrapper:
    """Return a tokenizer of 256 byte tokens and MARKERS, without a beginning-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    defaults = {
        "tool_call_start": json_tools.tool_call_start,
        "tool_call_end": json_tools.tool_call_end,
        "tool_parser": json_tools.parse_tool_call,
    }
    return TokenizerWrapper(tokenizer, **(defaults | wrapper))
