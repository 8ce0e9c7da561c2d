"""Can somebody who may write to the discovery database add a worker? Only who knows the cluster's secret."""

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.stores.entry_codec import EntryCodec, ForeignEntry
from penstock.adapters.stores.sqlite_database import NAME
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.kernel.message_version import NewerVersion
from penstock.kernel.secret import ClusterSecret
from tests.depth import deep

OURS, OTHER = ClusterSecret("the secret of this cluster"), ClusterSecret("the secret of another one")
CARD = b'{"version":1,"card":{"id":"evil","epoch":1,"model":"m","url":"http://evil.example"}}'


def opened(store: SqliteStore) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(store.root / NAME, isolation_level=None))


@pytest.fixture
async def store(tmp_path: Path):
    store = SqliteStore(tmp_path / "discovery", poll=0.01, secret=OURS)
    yield store
    await store.close()


@pytest.mark.parametrize("secret", [OTHER, None])
async def test_a_foreign_entry_is_left_out_counted_and_told_once(store, secret, caplog):
    caplog.set_level(logging.WARNING)
    await store.put("workers/ours", b"ours", ttl=30)
    other = SqliteStore(store.root, secret=secret)
    await other.put("workers/evil", CARD, ttl=30)
    await other.put("workers/evil", CARD + b" ")
    for _ in range(3):
        assert await store.list("workers/") == {"workers/ours": b"ours"}
    assert store.codec.foreign == 1 and store.codec.newer == 0
    assert caplog.text.count("stands in the store with") == 1 and "evil.example" not in caplog.text
    await other.close()


async def test_an_entry_under_another_key_or_lease_is_foreign(store):
    await store.put("workers/ours", b"ours", ttl=30)
    codec = EntryCodec("here", OURS)
    with opened(store) as database:
        lease, raw = database.execute("SELECT lease, entry FROM entries").fetchone()
        assert codec.verify("workers/ours", raw, lease) == b"ours"
        for old, new in (
            (b'"key":"workers/ours"', b'"key":"workers/evil"'),
            (b'"lease":"', b'"lease":"x'),
            (b"ours", b"evil"),
        ):
            changed = raw.replace(old, new)
            assert changed != raw
            with pytest.raises(ForeignEntry):
                codec.verify("workers/ours", changed, lease)
        # Copied whole, to another key or to another lease:
        put = "INSERT OR REPLACE INTO entries (key, lease, entry) VALUES (?, ?, ?)"
        database.execute(put, ("workers/evil", lease, raw))
        assert set(await store.list("workers/")) == {"workers/ours"}
        database.execute(put, ("workers/ours", None, raw))
        assert await store.list("workers/") == {}


@settings(max_examples=deep(200))
@given(st.integers(0, 10_000), st.integers(1, 255), st.binary(max_size=50))
def test_no_changed_byte_passes(place, change, value):
    codec = EntryCodec("here", OURS)
    raw = bytearray(codec.encode("workers/a", value, "l"))
    raw[place % len(raw)] ^= change
    try:
        found = codec.verify("workers/a", bytes(raw), "l")
    except (ForeignEntry, NewerVersion):
        return
    # What still reads may differ only in what says nothing, such as a space or the case of a word.
    assert found is None or found == value


async def test_a_newer_release_is_counted_apart(store, caplog):
    header = {"version": 2, "anything": ["else"]}
    await store.put("workers/ours", b"ours")
    with opened(store) as database:
        raw = msgspec.json.encode(header) + b"\n"
        database.execute("INSERT INTO entries (key, entry) VALUES ('newer', ?)", (raw,))
    assert set(await store.list("")) == {"workers/ours"}
    assert (store.codec.newer, store.codec.foreign) == (1, 0) and "update this one" in caplog.text


async def test_a_database_of_a_newer_release_is_named_and_not_read(store):
    await store.put("workers/ours", b"ours")
    with opened(store) as database:
        database.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreUnavailable, match="have version 2, and this release reads 1"):
        await SqliteStore(store.root, secret=OURS).list("")


async def test_a_reader_without_a_secret_reads_on(tmp_path):
    writer, reader = SqliteStore(tmp_path, secret=OURS), SqliteStore(tmp_path)
    await writer.put("a", b"1")
    assert await reader.list("") == {"a": b"1"}
    await writer.close()
    await reader.close()
