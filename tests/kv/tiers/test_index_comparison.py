"""`penstock cache verify` beside a router: does it find blocks that a router believes in and the tiers have not?

A tier process of its own, a plain engine that stores into it, and a frontend with the real router, which gets the
engine's KV events by hand: so each can be made to differ.
"""

import asyncio
from collections.abc import Sequence

import pytest
from click.testing import CliRunner, Result

from penstock.kernel.values import KvRemoved, KvStored, Tier, WorkerId
from penstock.router.events import KvObserved
from penstock_kv.cli.cache import command
from tests.frontend.stand import Stand, stand
from tests.kv.tiers.conftest import Start
from tests.kv.tiers.plain_engine import PlainEngine, block_hashes

pytestmark = pytest.mark.live

COUNT, ROWS, TOKENS = 8, 8, 16
HASHES = block_hashes(COUNT)
NAMES = [int.from_bytes(value[-8:], "big") for value in HASHES]


class Events:
    """KV events of the engine ``e0``, in order."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._number = 0

    def post(self, *events: KvStored | KvRemoved) -> None:
        number, self._number = self._number, self._number + 1
        worker = WorkerId("e0")
        self._stand.live.post(
            "router", KvObserved(worker=worker, rank=0, epoch=1, sequence=number, events=list(events))
        )

    def computed(self) -> None:
        """The engine has the blocks in its own memory: their tokens tell the router which they are."""
        tokens = list(range(COUNT * TOKENS))
        self.post(KvStored(hashes=NAMES, parent=None, tokens=tokens, block_size=TOKENS))

    def stored(self, names: Sequence[int], tier: Tier) -> None:
        self.post(KvStored(hashes=list(names), parent=None, block_size=TOKENS, tier=tier))

    def removed(self, names: Sequence[int], tier: Tier) -> None:
        self.post(KvRemoved(hashes=list(names), tier=tier))


async def verify(start: Start, at: Stand, *words: str) -> Result:
    where = ("--socket", str(start.last.socket), "--url", at.server.url, "--no-bytes", *words)
    return await asyncio.to_thread(
        CliRunner().invoke, command, ["verify", *where], standalone_mode=False, catch_exceptions=False
    )


async def test_blocks_that_only_one_side_has_are_found(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_kv.cli.cache_index.SETTLING", 0.0)
    tiers = start(32, 64)
    async with stand(1, card={"block_size": TOKENS, "events": ("tcp://127.0.0.1:1",)}) as at:
        events = Events(at)
        with PlainEngine(tiers.socket, rows=ROWS, worker="e0") as engine:
            await asyncio.to_thread(engine.store, HASHES)
            await asyncio.to_thread(engine.until, lambda: engine.stored.get("disk") == set(HASHES))
            events.computed()
            events.stored(NAMES, "host")
            events.stored(NAMES, "disk")
            right = await verify(start, at)
            assert "e0 host: 8 blocks believed, 8 there, the same" in right.output
            assert "e0 disk: 8 blocks believed, 8 there, the same" in right.output
            assert right.return_value == 0

            events.removed(NAMES[6:], "disk")
            lost = await verify(start, at)
            assert "e0 disk: 6 blocks believed, 8 there" in lost.output and "2 are there and not known" in lost.output
            assert f"{min(NAMES[6:]):016x}" in lost.output and lost.return_value == 1

            events.stored(NAMES[6:], "disk")
            await asyncio.to_thread(
                CliRunner().invoke, command, ["clear", "--tier", "disk", "--socket", str(tiers.socket)]
            )
            gone = await verify(start, at)
            assert "8 are believed and not there" in gone.output and gone.return_value == 1
            events.removed(NAMES, "disk")
            assert (await verify(start, at)).return_value == 0


async def test_what_the_engine_s_own_host_memory_may_have_is_no_finding(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_kv.cli.cache_index.SETTLING", 0.0)
    tiers = start(32)
    async with stand(1, card={"block_size": TOKENS, "events": ("tcp://127.0.0.1:1",)}) as at:
        events = Events(at)
        with PlainEngine(tiers.socket, rows=ROWS, worker="e0") as engine:
            await asyncio.to_thread(engine.store, HASHES[:4])
            events.computed()
            events.stored(NAMES, "host")
            more = await verify(start, at)
            assert "4 are believed and not there" in more.output
            assert "may be among 8 in the engine's own host memory" in more.output and more.return_value == 0


async def test_a_router_that_can_t_be_asked_is_said(start: Start) -> None:
    tiers = start(32)
    async with stand(0) as at:
        assert "no engine has connected yet" in str((await _refused(start, at)).exception)
        with PlainEngine(tiers.socket, rows=ROWS, worker="e7"):
            unknown = await verify(start, at)
            assert "not compared: " in unknown.output and "e7" in unknown.output and unknown.return_value == 0
            assert "e7" in str((await _refused(start, at, "--index")).exception)
    async with stand(1) as at:  # a worker without KV events
        with PlainEngine(tiers.socket, rows=ROWS, worker="e0"):
            assert "what it knows of e0 is none" in (await verify(start, at)).output


async def _refused(start: Start, at: Stand, *words: str) -> Result:
    where = ["verify", "--socket", str(start.last.socket), "--url", at.server.url, "--no-bytes", *words]
    return await asyncio.to_thread(CliRunner().invoke, command, where, standalone_mode=False)
