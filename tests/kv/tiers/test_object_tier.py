"""The object tier of a tier process, over a real S3 server: what one process stored another one loads."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.blocks.tiers.tier_events import TierFound
from penstock_kv.blocks.tiers.tier_machine import TierMachine
from penstock_kv.blocks.tiers.tier_settings import TierSettings
from penstock_kv.transfer.storage import object_store
from penstock_kv.transfer.storage.block_store import BlockIo, StoredRecord
from penstock_kv.transfer.storage.object_store import ObjectStore
from penstock_kv.transfer.storage.shared_objects import SharedObjects
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import PlainEngine, block_hashes
from tests.kv.transfer.object_servers import BUCKET, s3_server

pytestmark = pytest.mark.live


def test_blocks_in_an_object_store_outlive_the_process_and_its_machine(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = block_hashes(8)
    with s3_server(tmp_path) as (options, _):
        for option, value in options.items():
            monkeypatch.setenv(option.upper() if option.startswith("aws") else f"AWS_{option.upper()}", value)
        url = ("--object-url", f"s3://{BUCKET}/tiers")
        with PlainEngine(start(64, 0, *url, name="a").socket) as engine:
            assert engine.welcome.tiers == ["host", "object"]
            engine.store(hashes)
            engine.until(lambda: engine.stored.get("object") == set(hashes))
        start.last.kill()
        with PlainEngine(start(64, 0, *url, name="b").socket) as engine:
            assert engine.ask(hashes).blocks == 8
            assert engine.load(hashes, first_row=32) == [True] * 8
            assert engine.right(hashes, [True] * 8, first_row=32)


async def test_what_others_store_later_is_seen_part_by_part_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LISTED_MAX", 2)
    monkeypatch.setattr(object_store, "LISTED_AT_ONCE", 2)
    size, room = 4096, 6
    with s3_server(tmp_path) as (options, _):
        url = f"s3://{BUCKET}/shared"
        mine, other = (ObjectStore(url, size, room, options=options) for _ in range(2))
        machine = TierMachine(TierSettings(block_bytes=size, block_tokens=16, host_blocks=8, object_blocks=room))
        taken: list[StoredRecord] = []

        def take(records: Sequence[StoredRecord]) -> None:
            taken.extend(records)
            event = TierFound(
                tier="object",
                keys=[BlockKey(each.key) for each in records],
                slots=[each.slot for each in records],
                generations=[each.generation for each in records],
                parents=[None] * len(records),
            )
            machine.handle(0, event)

        shared = SharedObjects(mine, machine.tiers["object"], take)
        assert await shared.look() == "" and taken == []
        blocks = [
            BlockIo(slot, bytes((slot,)) * 34, 7, memoryview(bytearray(b"%d" % slot * size))[:size])
            for slot in range(5)
        ]
        assert {result.outcome for result in await other.write(blocks, 10.0)} == {"ok"}
        after, looks = await shared.look(), 1
        while after:
            after, looks = await shared.look(after), looks + 1
        assert looks == 3 and len(taken) == 5
        assert await shared.look() != "" and len(taken) == 5, "what is known is not taken twice"
        reads = [BlockIo(each.slot, each.key, each.generation, memoryview(bytearray(size))) for each in taken]
        assert {result.outcome for result in await mine.read(reads, 10.0)} == {"ok"}
        assert {bytes(each.buffer) for each in reads} == {bytes(each.buffer) for each in blocks}

        more = [BlockIo(5, bytes((5 + number,)) * 34, number, memoryview(bytearray(size))) for number in range(1, 3)]
        for each in more:  # two further ones, and one slot that is empty
            await ObjectStore(url, size, 8, options=options).write([each], 10.0)
        after = await shared.look()
        while after:
            after = await shared.look(after)
        assert len(taken) == room, "nothing gives way to what others have stored"
        other.forget([0])
        await other.close()
        lost = next(each for each in reads if each.key == blocks[0].key)
        assert [result.outcome for result in await mine.read([lost], 10.0)] == ["absent"]
        await mine.close()


@pytest.mark.slow
def test_an_engine_that_runs_already_loads_what_another_one_stores(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = block_hashes(8)
    with s3_server(tmp_path) as (options, _):
        for option, value in options.items():
            monkeypatch.setenv(option.upper() if option.startswith("aws") else f"AWS_{option.upper()}", value)
        url = ("--object-url", f"s3://{BUCKET}/both")
        a, b = start(64, 0, *url, name="a"), start(64, 0, *url, name="b")
        with PlainEngine(a.socket) as storing, PlainEngine(b.socket) as loading:
            assert loading.ask(hashes).blocks == 0
            storing.store(hashes)
            storing.until(lambda: storing.stored.get("object") == set(hashes))
            loading.until(lambda: loading.ask(hashes).blocks == 8, 40.0)
            assert loading.stored["object"] == set(hashes), "the router is told"
            assert loading.load(hashes, first_row=32) == [True] * 8
            assert loading.right(hashes, [True] * 8, first_row=32)
