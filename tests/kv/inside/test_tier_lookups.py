"""Does a request see one truth of what the tiers have, and are jobs cut where their blocks do not follow each other?"""

from penstock_kv.inside.tier_lookups import ChainRun, DueQuestion, TierLookups, by_group, chain_runs


def key(name: str, group: int = 0) -> bytes:
    return name.encode() + group.to_bytes(4, "big")


def test_a_key_is_asked_for_once_and_answered_by_its_place() -> None:
    lookups = TierLookups()
    assert [lookups.lookup("r", name, end) for name, end in ((key("a"), 64), (key("b"), 96), (key("c"), 128))] == [
        None
    ] * 3
    assert lookups.lookup("r", key("a"), 64) is None
    (question,) = lookups.due()
    assert question == DueQuestion("r", [key("a"), key("b"), key("c")], 64)
    assert lookups.due() == [] and not lookups.open
    lookups.sent(1, question)
    assert lookups.open
    lookups.answered(1, 2)
    assert [lookups.lookup("r", name) for name in (key("a"), key("b"), key("c"))] == [True, True, False]
    assert lookups.due() == []
    lookups.answered(1, 0)
    lookups.answered(99, 1)
    assert lookups.lookup("r", key("a")) is True


def test_two_requests_ask_each_for_themselves() -> None:
    lookups = TierLookups()
    lookups.lookup("one", key("a"))
    lookups.lookup("two", key("a"))
    one, two = lookups.due()
    lookups.settle(one, 1)
    lookups.sent(5, two)
    assert lookups.lookup("one", key("a")) is True and lookups.lookup("two", key("a")) is None


def test_a_failed_load_is_a_miss_for_all_that_live_whatever_is_answered_later() -> None:
    lookups = TierLookups()
    for request in ("one", "two"):
        lookups.lookup(request, key("a"))
    one, two = lookups.due()
    lookups.settle(one, 1)
    lookups.sent(1, two)
    lookups.missed([key("a"), key("other")])
    lookups.answered(1, 1)
    assert lookups.lookup("one", key("a")) is False and lookups.lookup("two", key("a")) is False
    assert lookups.lookup("three", key("a")) is None


def test_a_request_that_is_gone_is_forgotten() -> None:
    lookups = TierLookups()
    lookups.lookup("r", key("a"))
    (question,) = lookups.due()
    lookups.sent(1, question)
    assert lookups.end("r") == [key("a")]
    lookups.answered(1, 1)
    assert lookups.lookup("r", key("a")) is None
    assert lookups.end("never") == []


def test_groups_are_asked_for_each_by_itself() -> None:
    lookups = TierLookups()
    for name, group in (("a", 0), ("a", 2), ("b", 0)):
        lookups.lookup("r", key(name, group), 32)
    assert [question.keys for question in lookups.due()] == [[key("a"), key("b")], [key("a", 2)]]
    assert [group for group, _ in by_group([key("a", 2), key("b"), key("c", 2)])] == [2, 0]
    lookups.lookup("r", key("z", 1))
    lookups.end("r")
    assert lookups.due() == []


def test_the_blocks_of_a_window_are_asked_for_from_the_last_and_behind_each_that_is_missing() -> None:
    lookups = TierLookups()
    names = [key(str(number), 1) for number in range(9, -1, -1)]
    for number, name in zip(range(9, -1, -1), names, strict=True):
        lookups.lookup("r", name, 32 * number)
    there, rounds = {1, 2, 3, 6, 7}, 0
    while due := lookups.due():
        (question,) = due
        rounds += 1
        assert question.window
        found = [int(name[:-4]) in there for name in question.keys]
        lookups.settle(question, found.index(False) if False in found else len(found))
    assert rounds == 5
    verdicts = {int(name[:-4]): lookups.lookup("r", name) for name in names}
    assert verdicts == {number: number in there for number in range(10)}


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
