"""An object store that hangs, dies, lies or is shared ends as a miss, and never as wrong bytes."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.storage import object_store
from penstock_kv.transfer.storage.object_store import ObjectName, ObjectStore, parse_name
from penstock_kv.transfer.storage.record_header import SIZE
from tests.kv.transfer.block_store_contract import PATIENCE, block, empty, outcomes, payload_of, written
from tests.kv.transfer.object_servers import BUCKET, s3_server

obstore = pytest.importorskip("obstore")

SIZE_OF_BLOCK = 8192
PREFIXES = itertools.count()


class Bucket:
    """A server of its own: tests stop and kill it."""

    def __init__(self, options: dict[str, str], pid: int) -> None:
        self.options = options
        self.pid = pid
        self.url = f"s3://{BUCKET}/prefix-{next(PREFIXES)}"

    def open(self, slots: int = 8) -> ObjectStore:
        return ObjectStore(self.url, SIZE_OF_BLOCK, slots, options=self.options)

    def client(self) -> obstore.store.S3Store:
        return obstore.store.S3Store.from_url(self.url, client_options={"allow_http": True}, **self.options)

    def paths(self) -> list[str]:
        return [each["path"].rpartition("/")[2] for batch in obstore.list(self.client()) for each in batch]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], int]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as options_and_pid:
        yield options_and_pid


@pytest.fixture
def bucket(server: tuple[dict[str, str], int]) -> Bucket:
    return Bucket(*server)


async def settled(store: ObjectStore) -> None:
    async with asyncio.timeout(PATIENCE):
        while store.busy():
            await asyncio.sleep(0.001)


async def test_a_server_that_hangs_makes_late_results(bucket: Bucket) -> None:
    store = bucket.open()
    (one,) = await written(store, [0])
    new = block(1, b"late", 3, payload_of(3, SIZE_OF_BLOCK))
    os.kill(bucket.pid, signal.SIGSTOP)
    try:
        (read,), (write,) = await asyncio.gather(store.read([empty(one)], 0.1), store.write([new], 0.1))
        assert (read.outcome, write.outcome) == ("late", "late")
        assert store.busy() == {0, 1}
    finally:
        os.kill(bucket.pid, signal.SIGCONT)
    await settled(store)
    assert await outcomes(store, [empty(one), empty(new)]) == ["ok", "absent"]
    await store.close()
    assert bucket.paths() == [ObjectName(one.key, one.generation, None).text()], "the late object is deleted"


async def test_requests_at_a_time_are_limited_and_so_is_what_waits(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "QUEUE_LIMIT", 5)
    store = bucket.open(64)
    os.kill(bucket.pid, signal.SIGSTOP)
    try:
        blocks = [block(slot, b"%d" % slot, 1, payload_of(slot, SIZE_OF_BLOCK)) for slot in range(40)]
        results = await store.write(blocks, 0.3)
        counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("late", "failed")}
        assert counts == {"late": object_store.CONCURRENCY + 5, "failed": 40 - object_store.CONCURRENCY - 5}
        assert len(store.busy()) == object_store.CONCURRENCY
    finally:
        os.kill(bucket.pid, signal.SIGCONT)
    await settled(store)
    await store.close()
    assert bucket.paths() == []


async def test_objects_of_another_length_are_corrupt(bucket: Bucket) -> None:
    store = bucket.open()
    blocks = await written(store, [0, 1, 2])
    names = [ObjectName(each.key, each.generation, each.parent).text() for each in blocks]
    raw = bytes(obstore.get(bucket.client(), names[0]).bytes())
    assert len(raw) == SIZE + SIZE_OF_BLOCK
    for name, content in zip(names, [raw[:-1], raw + b"x", b"x" * 10], strict=True):
        obstore.put(bucket.client(), name, content)
    assert await outcomes(store, [empty(each) for each in blocks]) == ["corrupt"] * 3
    await store.close()
    assert [len(each.records()) for each in [bucket.open()]] == [0]


async def test_an_object_of_another_block_is_not_served(bucket: Bucket) -> None:
    store = bucket.open()
    one, two = await written(store, [0, 1])
    names = [ObjectName(each.key, each.generation, each.parent).text() for each in (one, two)]
    obstore.copy(bucket.client(), names[0], names[1], overwrite=True)
    (outcome,) = await outcomes(store, [empty(two)])
    assert outcome in ("corrupt", "stale")
    await store.close()


async def test_two_handles_share_a_prefix(bucket: Bucket) -> None:
    first = bucket.open()
    blocks = await written(first, range(4))
    obstore.put(bucket.client(), "somebody-elses.txt", b"hello")
    second = bucket.open(3)
    assert len(second.records()) == 3, "no more than it has slots for, and none that is not a block"
    reads = [block(each.slot, each.key, each.generation, bytes(SIZE_OF_BLOCK)) for each in second.records()]
    assert await outcomes(second, reads) == ["ok"] * 3
    first.forget(range(4))
    await first.close()
    assert await outcomes(second, reads) == ["absent"] * 3
    await second.close()
    assert len(blocks) == 4


async def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    with pytest.raises(ConfigError, match="s3://nobodys/x can't be listed"):
        ObjectStore("s3://nobodys/x", SIZE_OF_BLOCK, 4, options=bucket.options)
    with pytest.raises(ConfigError, match="can't be listed"):
        ObjectStore("no-url", SIZE_OF_BLOCK, 4)


async def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "INSTALLED", False)
    with pytest.raises(ConfigError, match=r"penstock\[object\]"):
        ObjectStore("s3://bucket", SIZE_OF_BLOCK, 4)


async def test_a_server_that_dies_makes_failures(tmp_path: Path) -> None:
    with s3_server(tmp_path) as own:
        bucket = Bucket(*own)
        store = bucket.open()
        (one,) = await written(store, [0])
        os.kill(bucket.pid, signal.SIGKILL)
        (result,) = await store.read([empty(one)], PATIENCE)
        assert result.outcome == "failed"
        assert "\n" not in result.cause
        assert "error" in result.cause.lower()
        await store.close()


def test_names_say_what_they_are() -> None:
    name = ObjectName(bytes(range(20)), 2**63, b"parent")
    assert parse_name(name.text()) == name
    assert parse_name(ObjectName(b"k", 0, None).text()) == ObjectName(b"k", 0, None)
    for text in ("", "a", "00.1", "00.01.-", "0.1.-", "00.1.-.x", "AB.1.-", "zz.1.-"):
        assert parse_name(text) is None, text
