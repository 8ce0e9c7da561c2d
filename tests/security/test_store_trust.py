"""Can somebody who may write to the discovery folder add a worker? Only who knows the cluster's secret."""

import logging
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.adapters.stores.file_layout import FileEntry, ForeignEntry, decode, encode, file_name
from penstock.adapters.stores.file_store import FileStore
from penstock.kernel.message_version import NewerVersion
from penstock.kernel.secret import ClusterSecret
from tests.depth import deep

OURS, OTHER = ClusterSecret("the secret of this cluster"), ClusterSecret("the secret of another one")
CARD = b'{"version":1,"card":{"id":"evil","epoch":1,"model":"m","url":"http://evil.example"}}'


@pytest.fixture
async def store(tmp_path: Path):
    store = FileStore(tmp_path / "discovery", poll=0.01, secret=OURS)
    yield store
    await store.close()


@pytest.mark.parametrize("secret", [OTHER, None])
async def test_a_foreign_entry_is_left_out_counted_and_told_once(store, secret, caplog):
    caplog.set_level(logging.WARNING)
    await store.put("workers/ours", b"ours", ttl=30)
    other = FileStore(store.root, secret=secret)
    await other.put("workers/evil", CARD, ttl=30)
    await other.put("workers/evil", CARD + b" ")
    for _ in range(3):
        assert await store.list("workers/") == {"workers/ours": b"ours"}
    assert store.foreign == 1 and store.newer == 0
    assert caplog.text.count("stands in the store with") == 1 and "evil.example" not in caplog.text
    await other.close()


async def test_an_entry_under_another_key_or_lease_is_foreign(store):
    await store.put("workers/ours", b"ours", ttl=30)
    (path,) = (store.root / "keys").iterdir()
    raw = path.read_bytes()
    assert decode(raw, OURS) is not None
    for old, new in (
        (b'"key":"workers/ours"', b'"key":"workers/evil"'),
        (b'"lease":"', b'"lease":"x'),
        (b"ours", b"evil"),
    ):
        changed = raw.replace(old, new)
        assert changed != raw
        with pytest.raises(ForeignEntry):
            decode(changed, OURS)
    (store.root / "keys" / file_name("workers/evil")).write_bytes(raw)  # copied under another name
    assert set(await store.list("workers/")) == {"workers/ours"}


@settings(max_examples=deep(200))
@given(st.integers(0, 10_000), st.integers(1, 255), st.binary(max_size=50))
def test_no_changed_byte_passes(place, change, value):
    entry = FileEntry(key="workers/a", value=value, lease="l")
    raw = bytearray(encode(entry, OURS))
    raw[place % len(raw)] ^= change
    try:
        found = decode(bytes(raw), OURS)
    except (ForeignEntry, NewerVersion):
        return
    # What still reads may differ only in what says nothing, such as a space or the case of a word.
    assert found is None or found == entry


async def test_a_newer_release_is_counted_apart(store, caplog):
    header = {"version": 2, "anything": ["else"]}
    await store.put("workers/ours", b"ours")
    (store.root / "keys" / "newer.key").write_bytes(msgspec.json.encode(header) + b"\n")
    assert set(await store.list("")) == {"workers/ours"}
    assert (store.newer, store.foreign) == (1, 0) and "update this one" in caplog.text


async def test_a_reader_without_a_secret_reads_on(tmp_path):
    writer, reader = FileStore(tmp_path, secret=OURS), FileStore(tmp_path)
    await writer.put("a", b"1")
    assert await reader.list("") == {"a": b"1"}
    await writer.close()
    await reader.close()
