"""Tests for protocol/delta_buffer.py."""

import time

from headrace.protocol.delta_buffer import DeltaBuffer
from headrace.protocol.frames import RequestId
from headrace.protocol.messages import Delta

RID = RequestId("r")


def test_what_was_added_comes_back_as_one() -> None:
    """Texts joined, tokens added, in order; then nothing waits."""
    buffer = DeltaBuffer()
    assert not buffer
    assert buffer.take() is None
    for text, reasoning in (("a", ""), ("", "so "), ("bé", "it is"), ("c", "")):
        buffer.add(Delta(RID, text, 1, reasoning, tokens=[len(text)]))
        assert buffer
    assert buffer.take() == Delta(RID, "abéc", 4, "so it is", tokens=[1, 0, 2, 1])
    assert not buffer
    buffer.add(Delta(RID, "d", 1))
    assert buffer.take() == Delta(RID, "d", 1)


def test_a_long_answer_is_collected_in_time_that_grows_with_its_length() -> None:
    """A text that is copied for every token keeps everybody waiting."""
    buffer, began_s = DeltaBuffer(), time.process_time()
    for _ in range(300_000):
        buffer.add(Delta(RID, "ten chars ", 1))
    whole = buffer.take()
    assert whole is not None
    assert (len(whole.text), whole.n) == (3_000_000, 300_000)
    assert time.process_time() - began_s < 10, "it would be minutes"
