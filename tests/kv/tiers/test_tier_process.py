"""The tier process as an engine knows it: blocks go in and come back with the right bytes, or they are misses."""

import contextlib
from pathlib import Path

import pytest

from penstock_kv.inside.tier_protocol import JobDone, LoadBlocks, RequestHints
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import ROW_BYTES, PlainEngine, block_bytes, block_hashes
from tests.live.cluster import until

pytestmark = pytest.mark.live


def test_stored_blocks_come_back_with_their_bytes(start: Start) -> None:
    tiers = start()
    hashes = block_hashes(16)
    with PlainEngine(tiers.socket) as engine:
        assert engine.welcome.error == ""
        assert engine.welcome.tiers == ["host"]
        assert engine.ask(hashes).blocks == 0
        assert engine.store(hashes) == [True] * 16
        assert engine.ask(hashes).blocks == 16
        assert engine.ask(hashes[:8] + block_hashes(8, "other")).blocks == 8
        assert engine.load(hashes, first_row=32) == [True] * 16
        assert engine.right(hashes, [True] * 16, first_row=32)
        engine.until(lambda: engine.stored.get("host") == set(hashes))
    assert tiers.stop() == 0


def test_blocks_that_the_host_tier_evicts_come_back_from_disk(start: Start) -> None:
    tiers = start(16, 128)
    hashes = block_hashes(32)
    with PlainEngine(tiers.socket) as engine:
        assert engine.welcome.tiers == ["host", "disk"]
        for first in range(0, 32, 4):
            assert engine.store(hashes[first : first + 4]) == [True] * 4
            engine.until(lambda first=first: set(hashes[first : first + 4]) <= engine.stored.get("disk", set()))
        assert len(engine.stored["host"]) <= 16
        assert engine.removed["host"], "the host tier announces what it evicted"
        for first in range(0, 32, 8):
            part = hashes[first : first + 8]
            assert engine.load(part, first_row=32) == [True] * 8
            assert engine.right(part, [True] * 8, first_row=32)


def test_what_is_on_disk_is_there_after_a_restart_and_announced_once_it_is_asked_for(start: Start) -> None:
    tiers = start(64, 64)
    hashes = block_hashes(8)
    with PlainEngine(tiers.socket) as engine:
        assert engine.store(hashes) == [True] * 8
        engine.until(lambda: engine.stored.get("disk") == set(hashes))
        tiers.kill()
        assert engine.read() is None, "a killed tier process is the end of the stream"
    with PlainEngine(start(64, 64).socket) as engine:
        assert engine.stored == {}, "a key does not say what the engine calls its block"
        assert engine.ask(hashes).blocks == 8
        assert engine.stored["disk"] == set(hashes)
        assert engine.load(hashes, first_row=32) == [True] * 8
        assert engine.right(hashes, [True] * 8, first_row=32)
    with PlainEngine(start.last.socket) as another:
        another.until(lambda: another.stored.get("disk") == set(hashes) == another.stored.get("host"))


def test_a_flipped_byte_on_disk_is_a_miss(start: Start, tmp_path: Path) -> None:
    tiers = start(64, 64)
    hashes = block_hashes(8)
    with PlainEngine(tiers.socket) as engine:
        engine.store(hashes)
        engine.until(lambda: engine.stored.get("disk") == set(hashes))
    tiers.kill()
    slab = next((tmp_path / "disk").glob("*.slab"))
    raw = slab.read_bytes()
    place = raw.index(block_bytes(hashes[3])) + 1000
    with slab.open("r+b") as file:
        file.seek(place)
        file.write(bytes((raw[place] ^ 1,)))
    tiers = start(64, 64)
    with PlainEngine(tiers.socket) as engine:
        done = engine.load(hashes, first_row=32)
        assert not done[3] and done[:3] == [True] * 3
        assert engine.right(hashes, done, first_row=32)
        assert engine.untouched(32 + 3), "a block that is wrong never reaches the engine's rows"
        assert engine.ask(hashes).blocks == 3
        engine.until(lambda: hashes[3] in engine.removed.get("disk", set()))


@pytest.mark.parametrize("moment", (0, 3, 5))
def test_killed_at_any_moment_of_stores_and_loads_no_block_is_wrong(start: Start, moment: int) -> None:
    hashes = block_hashes(128)
    tiers = start(64, 512)
    with PlainEngine(tiers.socket, rows=256) as engine:
        for first in range(0, 128, 32):
            engine.begin_store(hashes[first : first + 32], first_row=first)
        for _ in range(min(moment, 4)):
            engine.wait(JobDone)
        for first in range(0, 128, 32):
            engine.begin_load(hashes[first : first + 32], first_row=128 + first)
        for _ in range(max(0, moment - 2)):
            engine.wait(JobDone)
        tiers.kill()
        while engine.read() is not None:
            pass
    tiers = start(64, 512)
    with PlainEngine(tiers.socket, rows=256) as engine:
        for first in range(0, 128, 32):
            part = hashes[first : first + 32]
            done = engine.load(part, first_row=first)
            assert engine.right(part, done, first_row=first)
        assert engine.store(hashes[:16]) == [True] * 16


def test_engines_of_one_kind_share_their_tiers_and_another_kind_is_refused(start: Start) -> None:
    tiers = start()
    hashes = block_hashes(8)
    with PlainEngine(tiers.socket, worker="a") as first, PlainEngine(tiers.socket, worker="b") as second:
        first.store(hashes)
        second.until(lambda: second.stored.get("host") == set(hashes))
        assert second.load(hashes) == [True] * 8
        assert second.right(hashes, [True] * 8)
        assert first.load(hashes[:4], first_row=8) == [True] * 4
        with PlainEngine(tiers.socket, layout="another") as third:
            assert "not of model m, dtype bfloat16, layout another" in third.welcome.error
            assert third.read() is None
    with PlainEngine(tiers.socket) as again:
        assert again.load(hashes) == [True] * 8, "the tiers outlive their engines' connections"


def test_a_process_whose_only_engine_has_another_kind_of_kv_now_ends_so_that_a_new_one_takes_it(start: Start) -> None:
    tiers = start()
    with PlainEngine(tiers.socket) as engine:
        engine.store(block_hashes(2))

    def ended() -> bool:
        with contextlib.suppress(OSError), PlainEngine(tiers.socket, dtype="float32") as engine:
            assert "not of model m, dtype float32" in engine.welcome.error
        return tiers.process.poll() is not None

    until(ended, 20.0)  # the first one's connection may not have ended yet
    assert tiers.process.returncode == 1
    assert "not of model m, dtype float32" in tiers.log.read_text()


def test_an_engine_that_can_not_be_served_is_told_why(start: Start) -> None:
    refusals: list[tuple[dict[str, object], str]] = [
        ({"version": 99}, "speaks version 99"),
        ({"hash_algorithm": "xxhash"}, "not cryptographic"),
        ({"region": "/dev/shm/there-is-no-such-region"}, "can't be opened"),
        ({"offset": 4096}, "its rows end at"),
        ({"region": "/dev/null"}, "its rows end at"),
    ]
    tiers = start()
    for hello, reason in refusals:
        with PlainEngine(tiers.socket, **hello) as engine:  # type: ignore[arg-type]
            assert reason in engine.welcome.error
            assert engine.read() is None


def test_a_tenant_never_gets_the_blocks_of_another(start: Start) -> None:
    hashes = block_hashes(4)
    with PlainEngine(start().socket) as engine:
        engine.store(hashes, hints=RequestHints(tenant="a"))
        assert engine.ask(hashes, hints=RequestHints(tenant="a")).blocks == 4
        assert engine.ask(hashes, hints=RequestHints(tenant="b")).blocks == 0
        assert engine.ask(hashes, hints=RequestHints(tenant="a", lora="x")).blocks == 0
        assert engine.load(hashes, hints=RequestHints(tenant="b")) == [False] * 4
        assert all(engine.untouched(row) for row in range(4))


def test_frames_that_are_none_end_the_connection_and_nothing_else(start: Start) -> None:
    tiers = start()
    for raw in (b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc"):
        with PlainEngine(tiers.socket) as engine:
            engine.socket.sendall(raw)
            assert engine.read() is None
    with PlainEngine(tiers.socket) as engine:
        assert engine.store(block_hashes(4)) == [True] * 4
        engine.send(LoadBlocks(job=9, hashes=block_hashes(1), rows=[64]))  # its region has rows 0 to 63
        while engine.read() is not None:
            pass
    with PlainEngine(tiers.socket) as engine:
        assert engine.load(block_hashes(4)) == [True] * 4


def test_an_engine_that_leaves_in_the_middle_leaves_no_torn_block(start: Start) -> None:
    """It fills its rows with something else right after it closed: what is stored is whole, or it is not stored."""
    tiers = start(64)
    hashes = block_hashes(32)
    for _ in range(5):
        engine = PlainEngine(tiers.socket, rows=32)
        engine.begin_store(hashes)
        engine.socket.close()
        for row in range(32):
            engine.fill(row, b"\xdd" * ROW_BYTES)
        engine.close()
    with PlainEngine(tiers.socket) as engine:
        done = engine.load(hashes)
        assert engine.right(hashes, done)


def test_blocks_of_other_weights_or_of_an_adapters_earlier_files_are_never_found(start: Start) -> None:
    tiers = start(64, 64)
    hashes = block_hashes(8)
    with PlainEngine(tiers.socket, weights="old") as engine:
        assert engine.store(hashes) == [True] * 8
        engine.until(lambda: engine.stored.get("disk") == set(hashes))
        with PlainEngine(tiers.socket, weights="new") as other:
            assert other.ask(hashes).blocks == 0
            assert other.load(hashes, first_row=32) == [False] * 8
            assert other.store(hashes[:4]) == [True] * 4
            other.until(lambda: other.stored.get("disk") == set(hashes[:4]))
            assert other.stored["host"] == set(hashes[:4]), "the blocks of the old ones are not announced to it"
        for lora, found in (("", 8), ("first", 0)):
            assert engine.ask(hashes, hints=RequestHints(lora=lora)).blocks == found
    tiers.stop()
    with PlainEngine(start(64, 64).socket, weights="new") as engine:
        assert engine.ask(hashes).blocks == 4 and engine.stored["disk"] == set(hashes[:4])
