"""Is a segment read as far as it is whole, and does the reading say where it ends?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.journal_frames import Frames, frame

PAYLOADS = st.lists(st.binary(max_size=40), max_size=6)


@given(PAYLOADS)
def test_what_was_written_is_read(payloads: list[bytes]) -> None:
    frames = Frames(b"".join(map(frame, payloads)))
    assert list(frames) == payloads and frames.problem is None


@given(PAYLOADS.filter(bool), st.data())
def test_a_segment_cut_off_anywhere_gives_what_is_whole(payloads: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(frame, payloads))
    ends = [len(b"".join(map(frame, payloads[:n]))) for n in range(len(payloads) + 1)]
    cut = data.draw(st.integers(0, len(whole) - 1))
    frames = Frames(whole[:cut])
    expected = max(n for n, end in enumerate(ends) if end <= cut)
    assert list(frames) == payloads[:expected]
    if cut in ends:
        assert frames.problem is None
    else:
        assert frames.problem is not None and f"cut off at byte {ends[expected]}" in frames.problem


@given(PAYLOADS.filter(bool), st.data())
def test_a_damaged_byte_ends_the_reading_before_it(payloads: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(frame, payloads)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    frames = Frames(bytes(whole))
    found = list(frames)
    before = len([n for n in range(1, len(payloads) + 1) if len(b"".join(map(frame, payloads[:n]))) <= at])
    assert found == payloads[:before] and frames.problem is not None


@pytest.mark.parametrize("data", [b"\xff" * 40, b"not a journal at all, but some text"])
def test_what_is_no_journal_is_told(data: bytes) -> None:
    frames = Frames(data)
    assert list(frames) == [] and "byte 0" in str(frames.problem)
