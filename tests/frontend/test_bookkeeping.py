"""Bookkeeping: what is noted is entered in order, once, and before anybody reads."""

import pytest

from penstock.frontend.http.bookkeeping import NOTES_MAX, Bookkeeping
from tests.frontend.stand import eventually, stand


def test_notes_are_entered_in_order_and_once() -> None:
    books, entered = Bookkeeping(), list[int]()
    for number in range(3):
        books.add((entered.append, (number,)))
    assert entered == []
    books.enter()
    books.enter()
    assert entered == [0, 1, 2]


def test_a_note_may_make_another_one() -> None:
    books, entered = Bookkeeping(), list[str]()
    books.add((books.add, ((entered.append, ("later",)),)))
    books.enter()
    assert entered == []
    books.enter()
    assert entered == ["later"]


def test_the_bug_of_one_entry_loses_no_other(caplog: pytest.LogCaptureFixture) -> None:
    books, entered = Bookkeeping(), list[int]()
    books.add((int, ("none",)))
    books.add((entered.append, (1,)))
    books.enter()
    assert entered == [1] and "a bug of ours" in caplog.text


async def test_a_request_is_answered_before_it_is_entered_and_every_reader_finds_it() -> None:
    async with stand(1) as s:
        assert (await s.chat()).status == 200
        await eventually(lambda: s.service.gate.inflight == 0)
        assert s.kept_records == []
        text = await (await s.http.get("/metrics")).text()
        assert 'penstock_requests_total{fault="none",model="m",outcome="ok"} 1' in text
        assert [record.outcome for record in s.kept_records] == ["ok"]


async def test_not_many_are_held() -> None:
    async with stand(1) as s:
        for _ in range(NOTES_MAX):
            await s.chat()
        await eventually(lambda: s.service.gate.inflight == 0)
        assert NOTES_MAX - NOTES_MAX // 4 <= len(s.kept_records) < NOTES_MAX
