"""From inputs to prompts, beside the engine's steps: a long text takes the tokenizer seconds.

The tokenizer releases Python's lock while it works. Short inputs are not worth a thread.
"""

import contextlib
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ..protocol.messages import Submit
from ..protocol.options import ChatInput, CompletionInput
from .loading.loader import LoadedModel
from .prompt import Prompt, PromptBuilder

SHORT_LENGTH = 8192
"""Inputs of so many characters, or token ids, become prompts when their turn comes: in some milliseconds."""
MESSAGE_LENGTH = 64
"""What a template adds to a message, about."""
THREADS = 2
"""So that one long text does not keep all others waiting."""


@dataclass(eq=False)
class Waiting:
    """A request that has not been admitted: its prompt is made meanwhile, or when its turn comes."""

    message: Submit
    arrived_s: float
    prompt: Future[Prompt] | None


class Tokenizing:
    """Makes prompts for one model. Belongs to the engine's thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._builder = PromptBuilder(loaded.tokenizer, loaded.vocab_size, loaded.context_length)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    def begin(self, message: Submit, arrived_s: float) -> Waiting:
        """Take a request, and begin with its prompt if that takes long."""
        prompt = None
        if not _is_short(message.input):
            with contextlib.suppress(RuntimeError):  # No room for a thread: when its turn comes, then.
                prompt = self._threads.submit(self._builder.build, message.input)
        return Waiting(message, arrived_s, prompt)

    def is_ready(self, waiting: Waiting) -> bool:
        """Return whether `finish` need not wait."""
        return waiting.prompt is None or waiting.prompt.done()

    def finish(self, waiting: Waiting) -> Prompt:
        """Return a request's prompt.

        Raises:
            RequestError: the model cannot take it; the error names the field.
        """
        if waiting.prompt is None:
            return self._builder.build(waiting.message.input)
        return waiting.prompt.result()

    def drop(self, waiting: Waiting) -> None:
        """Forget a request that was cancelled. What a thread has begun, it completes for nothing."""
        if waiting.prompt is not None:
            waiting.prompt.cancel()

    def wait_any(self, all_waiting: list[Waiting], timeout_s: float) -> None:
        """Wait until one is ready, but no longer than so."""
        if not any(map(self.is_ready, all_waiting)):
            wait([w.prompt for w in all_waiting if w.prompt is not None], timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Begin no more prompts."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_short(source: ChatInput | CompletionInput) -> bool:
    if isinstance(source, CompletionInput):
        return len(source.prompt) <= SHORT_LENGTH
    if source.tools or source.chat_template_kwargs or any(message.tool_calls for message in source.messages):
        return False  # there is no telling how long a template makes them
    return sum(len(message.text) + MESSAGE_LENGTH for message in source.messages) <= SHORT_LENGTH
