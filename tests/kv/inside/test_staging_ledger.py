"""Are rows of the staging region never lost and never used twice, whatever the tier process and the requests do?"""

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock_kv.inside.request_hints import TierParams
from penstock_kv.inside.staging_ledger import RowCopy, StagingLedger
from penstock_kv.inside.tier_protocol import AnswerBlocks, JobDone

NONE = TierParams()
ROWS = 8


class Client:
    """Stands in for `TierClient`: what it was asked, and what it is to say."""

    def __init__(self) -> None:
        self.connected = True
        self.asks: dict[int, list[bytes]] = {}
        self.loads: dict[int, list[int]] = {}
        self.stores: dict[int, tuple[list[bytes], list[int], bytes | None]] = {}
        self.waiting: list[Any] = []
        self._number = 0

    def ask(self, hashes: list[bytes], group: int, tokens_before: int, hints: object) -> int | None:
        if not self.connected:
            return None
        self._number += 1
        self.asks[self._number] = hashes
        return self._number

    def load(self, job: int, hashes: list[bytes], rows: list[int], group: int, hints: object) -> bool:
        if self.connected:
            self.loads[job] = rows
        return self.connected

    def store(
        self, job: int, hashes: list[bytes], rows: list[int], group: int, parent: bytes | None, hints: object
    ) -> bool:
        if self.connected:
            self.stores[job] = (hashes, rows, parent)
        return self.connected

    def poll(self) -> list[Any]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def answer(self, blocks: int) -> None:
        number = next(iter(self.asks))
        del self.asks[number]
        self.waiting.append(AnswerBlocks(id=number, blocks=blocks))

    def loaded(self, done: Callable[[int], bool] = lambda place: True) -> None:
        number = next(iter(self.loads))
        rows = self.loads.pop(number)
        self.waiting.append(JobDone(job=number, done=[done(place) for place in range(len(rows))]))

    def stored(self) -> None:
        number = next(iter(self.stores))
        _, rows, _ = self.stores.pop(number)
        self.waiting.append(JobDone(job=number, done=[True] * len(rows)))

    def lose(self) -> None:
        while self.asks:
            self.answer(0)
        while self.loads:
            self.loaded(lambda place: False)
        while self.stores:
            self.stored()


def made() -> tuple[Client, StagingLedger]:
    client = Client()
    return client, StagingLedger(client, ROWS, 32)  # type: ignore[arg-type]


HASHES = [bytes([n]) for n in range(20)]


def test_blocks_are_there_before_the_engine_hears_of_them() -> None:
    client, ledger = made()
    assert ledger.matched("r", HASHES, 1, 5, NONE) is None
    assert list(client.asks.values()) == [HASHES[1:5]]
    client.answer(3)
    assert ledger.matched("r", HASHES, 1, 5, NONE) is None
    client.loaded(lambda place: place != 2)
    assert ledger.matched("r", HASHES, 1, 5, NONE) == 2
    assert ledger.matched("r", HASHES, 2, 5, NONE) == 1
    assert ledger.matched("r", HASHES, 0, 5, NONE) == 0, "there is a hole"
    copies = ledger.take("r", 2, [70])
    assert copies == [RowCopy(copies[0].row, 70, HASHES[2])]
    assert ledger.free == ROWS - 1
    step = ledger.begin_step()
    ledger.end_step(step)
    assert ledger.free == ROWS


def test_a_miss_and_nobody_there() -> None:
    client, ledger = made()
    assert ledger.matched("r", HASHES, 0, 0, NONE) == 0
    ledger.matched("r", HASHES, 0, 5, NONE)
    client.answer(0)
    assert ledger.matched("r", HASHES, 0, 5, NONE) == 0
    client.connected = False
    assert ledger.matched("other", HASHES, 0, 5, NONE) == 0
    assert ledger.take("r", 0, []) == [] and ledger.take("other", 0, []) == []


def test_blocks_are_stored_in_the_step_after_which_they_are_full() -> None:
    client, ledger = made()
    copies = ledger.offer(HASHES[2:8], [10, 11, 12, 13, 14, 15], HASHES[1], NONE)
    assert [copy.block for copy in copies] == [10, 11, 12, 13], "half of the rows"
    assert ledger.offer(HASHES[8:9], [16], HASHES[7], NONE) == []
    step = ledger.begin_step()
    assert client.stores == {}
    ledger.end_step(step)
    ((hashes, rows, parent),) = client.stores.values()
    assert (hashes, rows, parent) == (HASHES[2:6], [copy.row for copy in copies], HASHES[1])
    client.stored()
    ledger.poll()
    assert ledger.free == ROWS


class Rows(RuleBasedStateMachine):
    """Requests come and go, the tier process answers or is lost: every row has one use."""

    def __init__(self) -> None:
        super().__init__()
        self.client, self.ledger = made()
        self.steps: list[int] = []
        self.reading: dict[int, set[int]] = {}
        self.taken: list[RowCopy] = []

    @rule(name=st.sampled_from("abc"), computed=st.integers(0, 3), take=st.booleans())
    def request(self, name: str, computed: int, take: bool) -> None:
        ready = self.ledger.matched(name, HASHES, computed, 12, NONE)
        if take:
            copies = self.ledger.take(name, computed, list(range(ready or 0)))
            assert len(copies) == (ready or 0)
            self.taken += copies

    @rule(name=st.sampled_from("abc"))
    def finish(self, name: str) -> None:
        self.ledger.finished(name)

    @rule(count=st.integers(1, 4))
    def offer(self, count: int) -> None:
        self.taken += self.ledger.offer(HASHES[:count], list(range(count)), None, NONE)

    @rule()
    def begin(self) -> None:
        self.steps.append(self.ledger.begin_step())
        self.reading[self.steps[-1]] = {copy.row for copy in self.taken}
        self.taken = []

    @precondition(lambda self: self.steps)
    @rule()
    def end(self) -> None:
        step = self.steps.pop(0)
        del self.reading[step]
        self.ledger.end_step(step)

    @precondition(lambda self: self.client.asks)
    @rule(blocks=st.integers(0, 12))
    def answer(self, blocks: int) -> None:
        self.client.answer(blocks)

    @precondition(lambda self: self.client.loads)
    @rule(bad=st.integers(0, 8))
    def loaded(self, bad: int) -> None:
        self.client.loaded(lambda place: place != bad)

    @precondition(lambda self: self.client.stores)
    @rule()
    def stored(self) -> None:
        self.client.stored()

    @rule(connected=st.booleans())
    def connection(self, connected: bool) -> None:
        if self.client.connected and not connected:
            self.client.lose()
        self.client.connected = connected

    @invariant()
    def every_row_has_one_use(self) -> None:
        free = list(self.ledger._free)
        assert len(set(free)) == len(free)
        busy = [row for rows in self.client.loads.values() for row in rows]
        busy += [row for _, rows, _ in self.client.stores.values() for row in rows]
        busy += [copy.row for copy in self.taken] + [row for rows in self.reading.values() for row in rows]
        assert len(set(busy)) == len(busy) and not set(busy) & set(free)

    def teardown(self) -> None:
        self.client.connected = True
        for step in [*self.steps, self.ledger.begin_step()]:
            self.ledger.end_step(step)
        self.client.lose()
        self.ledger.poll()
        self.client.lose()
        self.ledger.poll()
        for name in "abc":
            self.ledger.finished(name)
        assert sorted(self.ledger._free) == list(range(ROWS)), "a row was lost"


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
