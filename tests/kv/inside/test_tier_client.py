"""Does the client of the tier process never wait, and does a lost process end every job as failed?"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_kv.inside import tier_client
from penstock_kv.inside.tier_client import TierClient
from penstock_kv.inside.tier_protocol import AnswerBlocks, JobDone, RemovedBlocks, RequestHints, StoredBlocks, TierHello
from tests.kv.inside.plain_tiers import PlainTiers

ROW = 4096


class World:
    """A region, a tier process and a client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "s"
        self.region = folder / "region"
        self.region.write_bytes(b"".join(bytes([n]) * ROW for n in range(8)))
        self.tiers = PlainTiers(self.path)
        self.client = TierClient(str(self.path), self.hello())
        self.until(lambda: self.client.connected)

    def hello(self) -> TierHello:
        return TierHello(
            model="m",
            dtype="bf16",
            layout="l",
            block_tokens=16,
            hash_algorithm="sha256_cbor",
            region=str(self.region),
            rows=8,
            row_bytes=ROW,
        )

    def until(self, done: Callable[[], Any], limit: float = 5.0) -> None:
        end = time.monotonic() + limit
        while not done():
            assert time.monotonic() < end
            time.sleep(0.002)

    def polled(self, kind: type, number: int = 1) -> list[Any]:
        got: list[Any] = []

        def some() -> bool:
            got.extend(message for message in self.client.poll() if isinstance(message, kind))
            return len(got) >= number

        self.until(some)
        return got

    def row(self, row: int) -> bytes:
        return self.region.read_bytes()[row * ROW : (row + 1) * ROW]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(tier_client, "BACKOFF_FIRST", 0.01)
    monkeypatch.setattr(tier_client, "BACKOFF_LAST", 0.02)
    folder = Path(os.path.relpath(tmp_path)) if len(str(tmp_path)) > 90 else tmp_path
    world = World(folder)
    yield world
    world.client.close()
    world.tiers.close()


def test_blocks_go_and_come_back_into_other_rows(world: World) -> None:
    assert world.client.store(1, [b"a", b"b"], [1, 2], parent=b"p", hints=RequestHints(priority=3))
    assert world.polled(JobDone) == [JobDone(job=1, done=[True, True])]
    number = world.client.ask([b"a", b"b", b"c"], tokens_before=32)
    assert world.polled(AnswerBlocks) == [AnswerBlocks(id=number or 0, blocks=2)]
    assert world.client.load(2, [b"b", b"c"], [5, 6])
    assert world.polled(JobDone) == [JobDone(job=2, done=[True, False])]
    assert world.row(5) == bytes([2]) * ROW and world.row(6) == bytes([6]) * ROW
    stored = world.tiers.messages[1]
    assert (stored.parent, stored.hints) == (b"p", RequestHints(priority=3))
    assert not world.client.busy


def test_announcements_are_polled(world: World) -> None:
    world.client.store(1, [b"a"], [1])
    assert world.polled(StoredBlocks) == [StoredBlocks(tier="host", hashes=[b"a"])]
    world.tiers.remove(b"a")
    assert world.polled(RemovedBlocks) == [RemovedBlocks(tier="host", hashes=[b"a"])]


def test_an_idle_engine_loses_announcements_and_counts_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_client, "UNPOLLED_MAX", 3)
    for number in range(5):
        world.tiers.send(StoredBlocks(tier="host", hashes=[bytes([number])]))
    world.until(lambda: world.client.dropped == 2)
    assert len(world.polled(StoredBlocks, 3)) == 3


def test_a_process_that_is_gone_ends_all_that_is_open_and_comes_back(world: World) -> None:
    world.tiers.mute = True
    number = world.client.ask([b"a"])
    world.tiers.delay = 0.2
    assert world.client.load(7, [b"a", b"b"], [1, 2])
    world.until(lambda: len(world.tiers.messages) == 3)
    world.tiers.close()
    assert world.polled(JobDone) == [JobDone(job=7, done=[False, False])]
    assert number is not None
    assert not world.client.connected
    assert world.client.ask([b"a"]) is None and not world.client.load(8, [b"a"], [1])
    assert not world.client.store(9, [b"a"], [1])
    world.client.wait_idle()
    world.tiers = PlainTiers(world.path)
    world.until(lambda: world.client.connected)
    assert world.client.store(10, [b"a"], [1])
    assert world.polled(JobDone) == [JobDone(job=10, done=[True])]
    assert world.client.losses == 1


def test_a_question_that_is_not_answered_is_a_miss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_client, "ASK_LIMIT", 0.01)
    world.tiers.mute = True
    number = world.client.ask([b"a"])
    assert world.polled(AnswerBlocks) == [AnswerBlocks(id=number or 0, blocks=0, reason="late")]
    world.tiers.send(AnswerBlocks(id=number or 0, blocks=1))
    world.tiers.send(StoredBlocks(tier="host", hashes=[b"x"]))
    world.polled(StoredBlocks)
    assert world.client.poll() == []


def test_a_tier_process_that_stands_still_costs_one_deadline_and_is_asked_again_once_it_speaks(world: World) -> None:
    world.tiers.mute = True
    number = world.client.ask([b"a"], hints=RequestHints(deadline=0.01))
    assert [answer.reason for answer in world.polled(AnswerBlocks)] == ["late"]
    assert world.client.ask([b"b"]) is None, "nobody waits for it a second time"
    assert not world.client.store(1, [b"a"], [1]) and not world.client.load(2, [b"a"], [2])
    assert world.client.connected and not world.client.busy
    world.tiers.mute = False
    world.tiers.send(AnswerBlocks(id=number or 0, blocks=1))
    world.until(lambda: world.client.store(3, [b"a"], [1]))
    assert world.polled(JobDone) == [JobDone(job=3, done=[True])]


def test_a_result_of_another_length_is_a_failure(world: World) -> None:
    world.tiers.delay = 0.1
    world.client.load(1, [b"a", b"b"], [1, 2])
    world.until(lambda: len(world.tiers.messages) == 2)
    world.tiers.send(JobDone(job=1, done=[True]))
    assert world.polled(JobDone) == [JobDone(job=1, done=[False, False])]


def test_a_full_queue_takes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_client, "UNSENT_MAX", -1)
    assert not world.client.store(1, [b"a"], [1])
    assert world.client.ask([b"a"]) is None


def test_garbage_ends_the_connection_but_rows_are_open_until_its_end(world: World) -> None:
    world.tiers.delay = 0.3
    assert world.client.load(1, [b"a"], [1])
    world.until(lambda: len(world.tiers.messages) == 2)
    assert world.tiers.link is not None
    world.tiers.link.sendall(b"\xff\xff\xff\xff")
    time.sleep(0.05)
    assert world.client.poll() == []
    assert world.polled(JobDone) == [JobDone(job=1, done=[False])]


def test_a_refusal_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(tier_client, "BACKOFF_FIRST", 0.01)
    monkeypatch.setattr(tier_client, "BACKOFF_LAST", 0.01)
    path = tmp_path / "s"
    region = tmp_path / "region"
    region.write_bytes(bytes(ROW))
    tiers = PlainTiers(path, error="another model is served")
    hello = TierHello(
        model="m", dtype="d", layout="l", block_tokens=1, hash_algorithm="h", region=str(region), rows=1, row_bytes=ROW
    )
    client = TierClient(str(path), hello)
    end = time.monotonic() + 10.0
    while len(tiers.messages) < 4:  # it has asked again
        assert time.monotonic() < end
        time.sleep(0.002)
    assert not client.connected
    client.close()
    tiers.close()
    assert caplog.text.count("another model is served") == 1
