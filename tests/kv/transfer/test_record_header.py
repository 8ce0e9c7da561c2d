"""A record's header says what was written, or nothing."""

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from penstock_kv.transfer.storage.record_header import (
    KEY_MAX,
    SECTOR,
    SIZE,
    RecordHeader,
    check_record,
    misfit,
    pack_header,
    parse_header,
)
from tests.kv.transfer.block_store_contract import block

numbers = st.integers(0, 2**64 - 1)
keys = st.binary(max_size=KEY_MAX)
headers = st.builds(RecordHeader, numbers, keys, st.none() | keys, numbers, numbers, numbers, numbers)


@given(headers)
def test_a_header_comes_back(header: RecordHeader) -> None:
    raw = pack_header(header)
    assert len(raw) == SIZE <= SECTOR
    assert parse_header(raw) == header == parse_header(raw + bytes(SECTOR - SIZE))


@given(headers, st.integers(0, SIZE * 8 - 1))
def test_a_flipped_bit_leaves_no_header(header: RecordHeader, bit: int) -> None:
    raw = bytearray(pack_header(header))
    raw[bit // 8] ^= 1 << bit % 8
    assert parse_header(bytes(raw)) is None


@given(st.binary(max_size=2 * SIZE))
def test_no_bytes_are_an_error(raw: bytes) -> None:
    parse_header(raw)


def test_keys_that_do_not_fit_are_said_before_a_write() -> None:
    one = block(0, bytes(KEY_MAX), 1, bytes(100), bytes(KEY_MAX))
    assert misfit(one, 1, 100) == ""
    assert "longer" in misfit(one._replace(key=bytes(KEY_MAX + 1)), 1, 100)
    assert "longer" in misfit(one._replace(parent=bytes(KEY_MAX + 1)), 1, 100)


@given(headers, st.sampled_from(["slot", "key", "length", "generation", "stamp", "checksum"]))
def test_each_field_is_checked(header: RecordHeader, field: str) -> None:
    payload = memoryview(bytearray(b"payload"))
    one = block(3, b"key", 5, bytes(payload))
    right = RecordHeader(3, b"key", None, len(payload), 5, 9, xxh3_64_intdigest(payload))
    assert check_record(right, one, payload, 9).outcome == "ok"
    wrong = right._replace(**{field: getattr(header, field)})
    assert (check_record(wrong, one, payload, 9).outcome == "ok") == (wrong == right)
