"""Does a request see one truth of what the tiers have, and are jobs cut where their blocks do not follow each other?"""

from penstock.inside.tier_lookups import ChainRun, DueQuestion, TierLookups, chain_runs


def test_a_key_is_asked_for_once_and_answered_by_its_place() -> None:
    lookups = TierLookups()
    assert [lookups.lookup("r", key, end) for key, end in ((b"a", 64), (b"b", 96), (b"c", 128))] == [None] * 3
    assert lookups.lookup("r", b"a", 64) is None
    (question,) = lookups.due()
    assert question == DueQuestion("r", [b"a", b"b", b"c"], 64)
    assert lookups.due() == [] and not lookups.open
    lookups.sent(1, question)
    assert lookups.open
    lookups.answered(1, 2)
    assert [lookups.lookup("r", key) for key in (b"a", b"b", b"c")] == [True, True, False]
    assert lookups.due() == []
    lookups.answered(1, 0)
    lookups.answered(99, 1)
    assert lookups.lookup("r", b"a") is True


def test_two_requests_ask_each_for_themselves() -> None:
    lookups = TierLookups()
    lookups.lookup("one", b"a")
    lookups.lookup("two", b"a")
    one, two = lookups.due()
    lookups.settle(one, 1)
    lookups.sent(5, two)
    assert lookups.lookup("one", b"a") is True and lookups.lookup("two", b"a") is None


def test_a_failed_load_is_a_miss_for_all_that_live_whatever_is_answered_later() -> None:
    lookups = TierLookups()
    for request in ("one", "two"):
        lookups.lookup(request, b"a")
    one, two = lookups.due()
    lookups.settle(one, 1)
    lookups.sent(1, two)
    lookups.missed([b"a", b"other"])
    lookups.answered(1, 1)
    assert lookups.lookup("one", b"a") is False and lookups.lookup("two", b"a") is False
    assert lookups.lookup("three", b"a") is None


def test_a_request_that_is_gone_is_forgotten() -> None:
    lookups = TierLookups()
    lookups.lookup("r", b"a")
    (question,) = lookups.due()
    lookups.sent(1, question)
    assert lookups.end("r") == [b"a"]
    lookups.answered(1, 1)
    assert lookups.lookup("r", b"a") is None
    assert lookups.end("never") == []


def test_runs_of_a_chain() -> None:
    chain = {32: b"A", 64: b"B", 96: b"C", 160: b"E"}
    assert chain_runs([b"b", b"c"], [64, 96], chain, 32) == [ChainRun([0, 1], b"A")]
    assert chain_runs([b"a", b"c", b"e"], [32, 96, 160], chain, 32) == [
        ChainRun([0], None),
        ChainRun([1], b"B"),
        ChainRun([2], None),
    ]
    assert chain_runs([b"x", b"y"], [None, None], chain, 32) == [ChainRun([0], None), ChainRun([1], None)]
    assert chain_runs([], [], chain, 32) == []
