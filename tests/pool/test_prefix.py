"""Tests for pool/prefix.py."""

from hypothesis import given
from hypothesis import strategies as st
from pool_helpers import chat_frame

from headrace.pool.prefix import BLOCK_TOKENS, CHARS_PER_TOKEN, PrefixIndex, fingerprint
from headrace.protocol.options import CompletionInput

BLOCK_CHARS = BLOCK_TOKENS * CHARS_PER_TOKEN


def completion(prompt: str | list[int], tenant: str = ""):
    return fingerprint(CompletionInput(prompt=prompt), tenant)


def test_whole_blocks_count():
    """Text by characters, ids by number; what is shorter than a block has no fingerprint."""
    assert completion("x" * (BLOCK_CHARS - 1)) == ()
    assert len(completion("x" * (3 * BLOCK_CHARS + 5))) == 3
    assert len(completion([1] * (2 * BLOCK_TOKENS))) == 2


def test_a_longer_conversation_begins_like_the_shorter_one():
    """The next turn of a conversation has the last one's fingerprint in front."""
    first, answer = "a" * 1000, "b" * 1000
    before = fingerprint(chat_frame(first).input, "t")
    after = fingerprint(chat_frame(first, answer, "and now?").input, "t")
    assert before
    assert after[: len(before)] == before
    assert fingerprint(chat_frame(first).input, "u") != before


@given(st.text("ab", max_size=1500), st.text("ab", max_size=1500))
def test_counts_the_common_beginning(first: str, second: str):
    """As many whole blocks as two prompts have in common."""
    if not first or not second:
        return
    index = PrefixIndex()
    index.add(completion(first))
    num_common = 0
    while num_common < min(len(first), len(second)) and first[num_common] == second[num_common]:
        num_common += 1
    assert index.num_tokens(completion(second)) == num_common // BLOCK_CHARS * BLOCK_TOKENS


def test_forgets_what_was_not_used_for_longest():
    """Bounded; of one prompt the end is forgotten before the beginning."""
    index = PrefixIndex(max_blocks=5)
    old, new = completion("x" * 4 * BLOCK_CHARS), completion("y" * 3 * BLOCK_CHARS)
    index.add(old)
    index.add(new)
    assert len(index) == 5
    assert index.num_tokens(new) == 3 * BLOCK_TOKENS
    assert index.num_tokens(old) == 2 * BLOCK_TOKENS
    index.clear()
    assert index.num_tokens(new) == 0
