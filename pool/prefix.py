"""Which engine process has read the beginning of a prompt before: a guess, without a tokenizer.

A prompt is cut into blocks, and each block's hash goes on from the last one's, so that equal hashes mean
equal prompts up to there. What a worker has read is kept as a set of hashes. Both guesses, that a token has
`CHARS_PER_TOKEN` characters and that the engine still has what it read, may be wrong; that costs a detour,
never a wrong answer.
"""

from collections import OrderedDict
from collections.abc import Sequence

from ..protocol.options import ChatInput, CompletionInput

CHARS_PER_TOKEN = 4
BLOCK_TOKENS = 64
MAX_PROMPT_BLOCKS = 512
"""What comes after so many blocks of a prompt makes no difference."""
MAX_WORKER_BLOCKS = 16_384

Fingerprint = tuple[int, ...]
"""A hash for each whole block of a prompt."""


def fingerprint(source: CompletionInput | ChatInput, tenant: str) -> Fingerprint:
    """Return the fingerprint of a prompt. Another tenant's differs for the same text: caches are apart."""
    prompt: str | list[int]
    if isinstance(source, ChatInput):
        prompt, size = _render(source), BLOCK_TOKENS * CHARS_PER_TOKEN
    elif isinstance(source.prompt, str):
        prompt, size = source.prompt, BLOCK_TOKENS * CHARS_PER_TOKEN
    else:
        prompt, size = source.prompt, BLOCK_TOKENS
    hashes: list[int] = []
    value = hash(tenant)
    for index in range(min(len(prompt) // size, MAX_PROMPT_BLOCKS)):
        block = prompt[index * size : (index + 1) * size]
        value = hash((value, block if isinstance(block, str) else tuple(block)))
        hashes.append(value)
    return tuple(hashes)


def _render(chat: ChatInput) -> str:
    """Return a conversation as a text that begins alike where the model's template would."""
    parts = [repr(chat.chat_template_kwargs or ""), *(tool.model_dump_json() for tool in chat.tools or ())]
    for message in chat.messages:
        calls = [call.function.name + call.function.arguments for call in message.tool_calls or ()]
        parts += (message.role, message.text, *calls)
    return "\0".join(parts)


class PrefixIndex:
    """The blocks that one engine process has read, the most recent `max_blocks` of them."""

    def __init__(self, max_blocks: int = MAX_WORKER_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, prompt: Sequence[int]) -> None:
        """Note that a prompt has been read. Of one prompt, the last blocks are forgotten first."""
        for block in reversed(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def num_tokens(self, prompt: Sequence[int]) -> int:
        """Return about how many tokens of a prompt have been read before."""
        num_blocks = 0
        for block in prompt:
            if block not in self._blocks:
                break
            num_blocks += 1
        return num_blocks * BLOCK_TOKENS

    def clear(self) -> None:
        """Forget everything: the process has gone."""
        self._blocks.clear()
