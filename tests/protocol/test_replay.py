"""The ring of sent frames: bounded in bytes and in time, and never without the newest."""

from headrace.protocol.replay import FRAME_OVERHEAD_BYTES, Replay

FRAME_BYTES = FRAME_OVERHEAD_BYTES + 10


def ring_of(num_frames: int, *, max_bytes: int = 1 << 20, max_age_s: float = 1e9) -> Replay:
    """Return a ring to which frames of 10 bytes were added, one a second."""
    ring = Replay(max_bytes, max_age_s)
    for seq in range(num_frames):
        ring.add(seq, b"%010d" % seq, float(seq))
    return ring


def test_every_frame_after_any_seq() -> None:
    """-1 stands before the first."""
    ring = ring_of(200)
    for after in range(-1, 200):
        missed = ring.after(after, 200.0)
        assert missed == [b"%010d" % seq for seq in range(after + 1, 200)]


def test_what_was_not_sent_is_not_there() -> None:
    """Nor anything before the first."""
    assert ring_of(3).after(3, 3.0) is None
    assert ring_of(3).after(-2, 3.0) is None
    assert Replay(1, 1).after(-1, 0.0) == []
    assert Replay(1, 1).after(0, 0.0) is None


def test_the_oldest_go_when_it_is_full() -> None:
    """And it never holds more than it may."""
    ring = ring_of(100, max_bytes=10 * FRAME_BYTES)
    assert ring.size_bytes == 10 * FRAME_BYTES
    assert ring.after(88, 100.0) is None
    missed = ring.after(89, 100.0)
    assert missed is not None
    assert len(missed) == 10


def test_frames_grow_old() -> None:
    """Also when no new ones come; the last one stays."""
    ring = ring_of(100, max_age_s=10.0)
    assert ring.after(88, 99.0) == [b"%010d" % seq for seq in range(89, 100)]
    assert ring.after(88, 100.0) is None
    assert ring.after(98, 1e6) == [b"%010d" % 99]
    assert ring.after(99, 1e6) == []
    assert ring.size_bytes == FRAME_BYTES


def test_a_frame_larger_than_the_ring_is_kept_alone() -> None:
    """A whole answer in `done` must not be lost to its own size."""
    ring = ring_of(5, max_bytes=1000)
    ring.add(5, b"x" * 5000, 5.0)
    assert ring.after(4, 5.0) == [b"x" * 5000]
    assert ring.after(3, 5.0) is None
