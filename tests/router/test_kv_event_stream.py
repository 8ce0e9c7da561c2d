"""KV events that get lost, doubled, swapped or start over: what the index may believe."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.machine import SECOND
from penstock.kernel.values import KvCleared, KvEvent, KvRemoved, KvStored, WorkerId
from penstock.router.events import Dispatch, Finished, KvObserved, ReplayEnded, ReplayWanted
from penstock.router.kv_index.kv_event_stream import COMPARED, NUMBERS, KvEventStream, StreamOutcome
from penstock.testing import RouterWorld, arrived, card, only, prompt
from tests.router.written_states import written

W = WorkerId("w")


def batch(number: int, *events: KvEvent, epoch: int = 1) -> KvObserved:
    return KvObserved(worker=W, rank=0, epoch=epoch, sequence=number, events=list(events))


def held(number: int, *blocks: int, epoch: int = 1) -> KvObserved:
    events: list[KvEvent] = [stored(*blocks)] if blocks else []
    return KvObserved(worker=W, rank=0, epoch=epoch, sequence=number, events=events, whole=True)


def stored(*blocks: int) -> KvStored:
    return KvStored(hashes=list(blocks))


def answer(*batches: KvObserved) -> ReplayEnded:
    return ReplayEnded(id=1, batches=list(batches))


FAILED = ReplayEnded(id=1, batches=None)


class Believed:
    """What an index would hold after a stream's verdicts."""

    def __init__(self) -> None:
        self.stream = KvEventStream(buffer_max=8, relearn_after=10_000)
        self.blocks: set[int] = set()
        self.asked: int | None = None

    def carry_out(self, outcome: StreamOutcome) -> StreamOutcome:
        if outcome.clear:
            self.blocks.clear()
        for event in outcome.events:
            change(self.blocks, event)
        if outcome.replay_from is not None:
            assert self.asked is None, "one question at a time"
            self.asked = outcome.replay_from
        self.stream.check()
        return outcome

    def observe(self, *batches: KvObserved) -> StreamOutcome:
        outcome = StreamOutcome()
        for one in batches:
            outcome = self.carry_out(self.stream.observe(one))
        return outcome

    def replayed(self, event: ReplayEnded) -> StreamOutcome:
        if not event.more:
            self.asked = None
        return self.carry_out(self.stream.replayed(event))


def change(blocks: set[int], event: KvEvent) -> None:
    if isinstance(event, KvStored):
        blocks.update(event.hashes)
    elif isinstance(event, KvRemoved):
        blocks.difference_update(event.hashes)
    else:
        blocks.clear()


# --- situations -----------------------------------------------------------------------------------------------------


def test_batches_in_order_are_passed_on() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(1, stored(2)), batch(2, KvRemoved(hashes=[1])))
    assert world.blocks == {2} and world.stream.state == "exact" and world.stream.applied == 3


def test_a_gap_is_asked_for_and_what_comes_meanwhile_waits() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)))
    outcome = world.observe(batch(3, stored(4)))
    assert (outcome.replay_from, outcome.events, world.stream.state) == (1, (), "recovering")
    assert world.observe(batch(4, stored(5))) == StreamOutcome()
    world.replayed(answer(batch(1, stored(2)), batch(2, stored(3)), batch(3, stored(4))))
    assert world.blocks == {1, 2, 3, 4, 5} and world.stream.state == "exact"
    assert (world.stream.gaps, world.stream.recovered, world.stream.next) == (1, 1, 5)


def test_an_answer_in_parts_closes_a_gap_as_a_whole_one_does() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(4, stored(5)))
    world.replayed(ReplayEnded(id=1, batches=[batch(1, stored(2)), batch(2, stored(3))], more=True))
    assert world.blocks == {1, 2, 3} and world.stream.state == "recovering"
    assert world.observe(batch(5, stored(6))).events == ()
    world.replayed(ReplayEnded(id=1, batches=[batch(3, stored(4))], more=True))
    assert world.blocks == {1, 2, 3, 4, 5, 6} and world.stream.state == "exact"
    world.observe(batch(6, stored(7)))
    world.replayed(answer(batch(4, stored(5))))
    assert world.blocks == {1, 2, 3, 4, 5, 6, 7} and (world.stream.recovered, world.stream.next) == (1, 7)


def test_what_comes_by_itself_before_the_last_part_of_an_answer_does_not_make_it_useless() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(5, stored(6)))
    world.replayed(ReplayEnded(id=1, batches=[batch(1, stored(2))], more=True))
    world.observe(batch(2, stored(3)), batch(3, stored(4)))
    outcome = world.replayed(answer(batch(2, stored(3)), batch(3, stored(4))))
    assert outcome.replay_from == 4 and world.stream.state == "recovering" and world.stream.unrecovered == 0
    world.replayed(answer(batch(4, stored(5))))
    assert world.stream.state == "exact" and world.blocks == {1, 2, 3, 4, 5, 6}


def test_until_the_past_is_known_a_cache_is_not_taken_as_known() -> None:
    stream = KvEventStream()
    stream.joining = True
    stream.observe(batch(0, stored(1)))
    assert stream.state == "joining"
    assert stream.observe(held(7, 1, 2)).clear
    stream.joining = False
    assert (stream.state, stream.next) == ("exact", 8)


def test_the_first_contact_may_be_late() -> None:
    world = Believed()
    assert world.observe(batch(2, stored(3))).replay_from == 0
    world.replayed(answer(batch(0, stored(1)), batch(1, stored(2)), batch(2, stored(3))))
    assert world.blocks == {1, 2, 3} and world.stream.state == "exact"


@pytest.mark.parametrize("event", [FAILED, answer(), answer(batch(3, stored(9)), batch(4, stored(5)))])
def test_a_gap_that_cannot_be_closed_clears_what_was_known(event: ReplayEnded) -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(4, stored(5)))
    outcome = world.replayed(event)
    assert outcome.clear and world.stream.state == "approximate" and world.stream.unrecovered == 1
    assert world.blocks == ({5, 9} if event.batches else {5})
    world.observe(batch(5, stored(6)), batch(6, KvRemoved(hashes=[1, 5])))
    assert 6 in world.blocks and not world.blocks & {1, 5}


def test_a_clear_makes_the_picture_whole_again() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(4, stored(5)))
    world.replayed(FAILED)
    world.observe(batch(5, KvCleared()), batch(6, stored(7)))
    assert world.stream.state == "exact" and world.blocks == {7} and world.stream.relearnt == 1


def test_enough_later_events_count_as_learnt() -> None:
    stream = KvEventStream(relearn_after=3)
    stream.observe(batch(0))
    stream.observe(batch(5))
    stream.replayed(FAILED)
    states = [stream.state]
    for number in range(6, 9):
        stream.observe(batch(number))
        states.append(stream.state)
    assert states == ["approximate", "approximate", "exact", "exact"]


def told(world: Believed, *answers: tuple[int, int], gone: int = 0) -> list[StreamOutcome]:
    return [world.carry_out(world.stream.compared(believed, had, gone, 16)) for believed, had in answers]


def test_answers_that_had_less_than_was_believed_have_all_learnt_anew_from_a_replay() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(1, stored(2)))
    outcomes = told(world, *[(1024, 0), (1024, 1008)] * (COMPARED // 2 - 1), (64, 0), (64, 64))
    assert [outcome.clear for outcome in outcomes] == [False] * (COMPARED - 1) + [True]
    assert outcomes[-1].replay_from == 0 and world.blocks == set() and world.stream.state == "approximate"
    world.replayed(answer(batch(0, stored(7)), batch(1, KvRemoved(hashes=[1]))))
    assert world.blocks == {7} and world.stream.state == "exact"
    told(world, *[(64, 64)] * COMPARED)
    assert world.stream.wrong_sets == 0


def test_a_replay_that_was_wrong_too_is_not_asked_for_again() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)))
    assert told(world, *[(1024, 0)] * COMPARED)[-1].replay_from == 0
    world.replayed(answer(batch(0, stored(1))))
    last = told(world, *[(1024, 0)] * COMPARED)[-1]
    assert last.clear and last.replay_from is None and world.stream.state == "approximate"
    world.observe(batch(1, stored(2)))
    assert world.blocks == {2} and world.stream.state == "approximate"


def test_blocks_that_were_evicted_meanwhile_are_no_wrong_belief() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)))
    assert not any(outcome.clear for outcome in told(world, *[(1024, 0)] * COMPARED, gone=64))
    assert any(outcome.clear for outcome in told(world, *[(1024, 0)] * COMPARED, gone=63))


def test_an_answer_that_computes_its_last_block_again_or_had_more_is_right() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)))
    outcomes = told(world, *[(1024, 1009), (64, 64), (64, 1024)] * COMPARED)
    assert not any(outcome.clear for outcome in outcomes) and world.blocks == {1}


def test_the_missing_batch_may_come_by_itself() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(2, stored(3)), batch(1, stored(2)))
    assert world.blocks == {1, 2, 3} and world.stream.state == "exact"
    world.replayed(answer(batch(1, KvRemoved(hashes=[3]))))
    assert world.blocks == {1, 2, 3} and world.stream.answers_unused == 1


def test_a_new_gap_waits_for_the_answer_to_the_old_question() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(2, stored(3)), batch(1, stored(2)))
    assert world.observe(batch(4, stored(5))).replay_from is None
    assert world.stream.state == "recovering"
    assert world.replayed(answer(batch(1), batch(2))).replay_from == 3
    world.replayed(answer(batch(3, stored(4)), batch(4, stored(5))))
    assert world.blocks == {1, 2, 3, 4, 5} and world.stream.state == "exact"


def test_an_answer_that_helps_in_part_leads_to_the_next_question() -> None:
    world = Believed()
    world.observe(batch(0), batch(2), batch(6, stored(6)))
    outcome = world.replayed(answer(batch(1, stored(1)), batch(2), batch(3)))
    assert outcome.replay_from == 4 and world.stream.state == "recovering" and world.blocks == {1}
    world.replayed(answer(batch(4), batch(5, stored(5))))
    assert world.blocks == {1, 5, 6} and world.stream.state == "exact"


def test_duplicates_are_dropped() -> None:
    world = Believed()
    world.observe(batch(0), batch(1, stored(1)), batch(2, KvRemoved(hashes=[1])), batch(1, stored(1)))
    assert world.blocks == set() and world.stream.duplicates == 1 and world.stream.state == "exact"


def test_a_new_epoch_starts_over() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(1, stored(2)))
    outcome = world.observe(batch(0, stored(3), epoch=2))
    assert outcome.clear and world.blocks == {3} and world.stream.state == "exact"
    world.observe(batch(2, stored(9), epoch=1))
    assert world.blocks == {3}


def test_a_publisher_that_counts_anew_is_asked_and_believed() -> None:
    world = Believed()
    world.observe(*(batch(i, stored(i)) for i in range(5)))
    outcome = world.observe(batch(0, stored(100)))
    assert outcome.clear and outcome.replay_from == 0 and world.stream.state == "recovering"
    world.replayed(answer(batch(0, stored(100)), batch(1, stored(101))))
    world.observe(batch(2, stored(102)))
    assert world.blocks == {100, 101, 102} and world.stream.state == "exact" and world.stream.restarts == 1


def test_without_an_answer_the_next_batch_tells_a_restart_from_a_late_duplicate() -> None:
    for following, blocks, state in (
        (batch(1, stored(101)), {100, 101}, "exact"),
        (batch(5, stored(5)), {5}, "approximate"),
    ):
        world = Believed()
        world.observe(*(batch(i, stored(i)) for i in range(5)), batch(0, stored(100)))
        world.replayed(FAILED)
        assert world.blocks == set() and world.stream.state == "approximate"
        world.observe(following)
        assert world.blocks == blocks and world.stream.state == state


def test_a_run_of_old_numbers_is_a_publisher_that_counts_anew() -> None:
    world = Believed()
    world.observe(*(batch(i, stored(i)) for i in range(100)))
    world.observe(batch(3, stored(203)), batch(4, stored(204)))
    assert world.stream.state == "exact"
    assert world.observe(batch(5, stored(205))).replay_from == 0
    world.replayed(answer(*(batch(i, stored(200 + i)) for i in range(7))))
    assert world.blocks == set(range(200, 207)) and world.stream.state == "exact"


def test_repeats_between_new_numbers_are_no_new_beginning() -> None:
    world = Believed()
    world.observe(batch(0, stored(0)))
    for number in range(1, 20):
        world.observe(batch(number, stored(number)))
        assert world.observe(batch(number, stored(number))).replay_from is None
    assert world.stream.duplicates == 19 and world.stream.restarts == 0
    assert world.blocks == set(range(20)) and world.stream.state == "exact"


def test_an_answer_may_run_ahead_of_the_wire() -> None:
    world = Believed()
    world.observe(batch(0), batch(2, stored(2)))
    world.replayed(answer(*(batch(i, stored(i)) for i in range(1, 10))))
    world.observe(*(batch(i, stored(i)) for i in range(3, 12)))
    assert world.blocks == set(range(1, 12)) and world.stream.state == "exact" and world.stream.restarts == 0


def test_too_much_waiting_gives_the_gap_up() -> None:
    world = Believed()
    world.observe(batch(0, stored(0)), *(batch(i, stored(i)) for i in range(2, 11)))
    assert world.stream.state == "approximate" and world.stream.overflows == 1
    assert world.blocks == set(range(2, 11))
    world.replayed(answer(batch(1, stored(1))))
    assert world.blocks == set(range(2, 11))


def test_a_lost_source_is_a_new_beginning() -> None:
    world = Believed()
    world.observe(batch(0, stored(0)), batch(1, stored(1)))
    assert world.carry_out(world.stream.lost("connection refused")).clear
    assert world.stream.state == "approximate" and world.blocks == set()
    assert world.observe(batch(2, stored(2))).replay_from == 0
    world.replayed(answer(*(batch(i, stored(i)) for i in range(3))))
    assert world.blocks == {0, 1, 2} and world.stream.state == "exact"


def test_an_answer_that_nobody_waits_for_is_counted() -> None:
    world = Believed()
    world.replayed(answer(batch(0, stored(1))))
    assert world.blocks == set() and world.stream.answers_unused == 1


def test_all_that_is_held_stands_for_what_is_missing() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(5, stored(6)))
    outcome = world.replayed(answer(held(4, 2, 3), batch(5, stored(6))))
    assert outcome.clear and world.blocks == {2, 3, 6}
    assert (world.stream.state, world.stream.next, world.stream.recovered) == ("exact", 6, 1)
    # Told by itself it helps as well, also a first time and after a loss; what is known already does not matter.
    assert world.observe(held(4, 9)) == StreamOutcome() and world.blocks == {2, 3, 6}
    world.carry_out(world.stream.lost("the test says so"))
    world.observe(held(7, 8))
    assert (world.blocks, world.stream.state, world.stream.next) == ({8}, "exact", 8)
    world.observe(batch(8, stored(9)))
    assert world.blocks == {8, 9}


def test_what_waits_goes_behind_all_that_is_held_and_a_new_gap_is_asked_for() -> None:
    world = Believed()
    world.observe(batch(3, stored(4)), batch(4, stored(5)), batch(7, stored(8)))
    outcome = world.replayed(answer(held(3, 1)))
    assert world.blocks == {1, 5} and outcome.replay_from == 5
    world.replayed(answer(held(6, 7)))
    assert world.blocks == {7, 8} and world.stream.state == "exact"


def test_all_that_is_held_in_a_new_epoch_is_a_start() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)))
    outcome = world.observe(held(9, 2, epoch=2))
    assert outcome.clear and world.blocks == {2} and (world.stream.next, world.stream.restarts) == (10, 1)


def test_a_snapshot_has_every_attribute() -> None:
    stream = KvEventStream()
    if not hasattr(stream, "__dict__"):
        pytest.skip("compiled: a class has no list of its attributes")
    assert vars(stream).keys() == {*NUMBERS, "_waiting", "_repeated"}


def test_a_snapshot_is_the_whole_stream() -> None:
    world = Believed()
    world.observe(batch(0, stored(1)), batch(2, stored(3), KvCleared()))
    other = KvEventStream()
    other.restore(written(world.stream))
    assert other.snapshot() == world.stream.snapshot()
    event = answer(batch(1, stored(2)))
    assert other.replayed(event) == world.stream.replayed(event)


# --- random histories -----------------------------------------------------------------------------------------------


class Publisher:
    """An engine with a small cache, and the last ``kept`` batches for whoever asks."""

    def __init__(self, rng: random.Random, kept: int) -> None:
        self.rng = rng
        self.blocks: set[int] = set()
        self.epoch = 1
        self.number = 0
        self.buffer: deque[KvObserved] = deque(maxlen=kept)
        self.fresh = 0
        self.restarts = 0

    def step(self) -> KvObserved:
        rng, events = self.rng, list[KvEvent]()
        for _ in range(rng.randint(0, 3)):
            kind = rng.random()
            if kind < 0.55 or not self.blocks:
                self.fresh += 1
                events.append(stored(self.fresh % 40, (self.fresh * 7) % 40))
            elif kind < 0.97:
                events.append(KvRemoved(hashes=rng.sample(sorted(self.blocks), 1)))
            else:
                events.append(KvCleared())
            change(self.blocks, events[-1])
        made = batch(self.number, *events, epoch=self.epoch)
        self.number += 1
        self.buffer.append(made)
        return made

    def restart(self, new_epoch: bool) -> None:
        self.blocks.clear()
        self.number = 0
        self.buffer.clear()
        self.epoch += new_epoch
        self.restarts += 1

    def replay(self, first: int) -> ReplayEnded:
        return answer(*(one for one in self.buffer if one.sequence >= first))

    def tell(self, first: int) -> ReplayEnded:
        """Answer as a relay does: with all that is held, where the batches from there on are not kept any more."""
        if self.number and not self.buffer[0].sequence <= first < self.number:
            return answer(held(self.number - 1, *self.blocks, epoch=self.epoch))
        return self.replay(first)


@given(st.integers(0, 2**32), st.sampled_from(["whole", "short", "none", "mixed", "told"]), st.booleans())
def test_whatever_happens_to_events_no_block_is_claimed_that_is_not_held(seed: int, replay: str, tells: bool) -> None:
    """``tells``: a restart shows as a new epoch, whatever else goes wrong; else only by numbers that begin at 0.

    A restart that shows by its numbers alone can be told only where its first batches arrive and no question is open.
    """
    rng = random.Random(seed)
    tells = tells or replay == "told"  # a relay begins anew with each epoch of its engine's card
    engine = Publisher(rng, kept=3 if replay in ("short", "told") else 10_000)
    world = Believed()
    wire: list[KvObserved] = []
    sent: deque[KvObserved] = deque(maxlen=4)

    def reply() -> None:
        first = world.asked
        assert first is not None
        fails = replay == "none" or (replay == "mixed" and rng.random() < 0.5)
        found = engine.tell(first) if replay == "told" else engine.replay(first)
        batches = found.batches or []
        if not fails and batches and batches[0].sequence == first and not batches[0].whole and rng.random() < 0.5:
            while len(batches) > 2:  # in parts, between which others arrive
                part, batches = batches[:2], batches[2:]
                world.replayed(ReplayEnded(id=1, batches=part, more=True))
                if wire and rng.random() < 0.3:
                    world.observe(wire.pop(0))
            found = answer(*batches)
        world.replayed(FAILED if fails else found)

    for _ in range(60):
        kind = rng.random()
        if kind < 0.55:
            made = engine.step()
            if rng.random() > 0.15 or (not tells and engine.restarts and made.sequence < 3):
                wire.append(made)
                sent.append(made)
        elif kind < 0.6 and len(wire) >= 2:
            wire[-1], wire[-2] = wire[-2], wire[-1]
        elif kind < 0.65 and sent:
            again = rng.choice(sent)
            if not wire or wire[-1].sequence != again.sequence - 1:  # a run of old numbers reads as a restart
                wire.append(again)
        elif kind < 0.67 and (tells or world.asked is None):
            engine.restart(new_epoch=tells)
            if not tells:
                wire.clear()
            sent.clear()
        elif kind < 0.9 and wire:
            world.observe(wire.pop(0))
        elif world.asked is not None:
            reply()
    # The stream quiets: everything on the way arrives, then two more steps, and questions are answered.
    wire += [engine.step(), engine.step()]
    while wire or world.asked is not None:
        if wire:
            world.observe(wire.pop(0))
        else:
            reply()
    for _ in range(3):
        world.observe(engine.step())
        while world.asked is not None:
            reply()
    stream = world.stream
    assert stream.state != "recovering"
    if replay == "told" and not stream.overflows:
        assert stream.state == "exact" and stream.next == engine.number and world.blocks == engine.blocks
    if stream.next == engine.number:
        assert world.blocks <= engine.blocks
        if stream.state == "exact":
            assert world.blocks == engine.blocks
        if replay == "whole" and not stream.overflows:
            assert stream.state == "exact"
    else:
        # Restarted without a word and still below the old numbers: only what comes next can show it.
        assert not tells and stream.next > engine.number


# --- listeners that came late -------------------------------------------------------------------------------------


def late(kv_blocks: int | None = None) -> KvEventStream:
    """Return the stream of an engine whose first events came before anybody listened, and that replays nothing."""
    stream = KvEventStream(kv_blocks=kv_blocks)
    stream.observe(batch(7, stored(1, 2)))
    outcome = stream.replayed(FAILED)
    assert outcome.events and outcome.note == "its cache is known from KV event 7 on"
    return stream


def test_late_is_not_lost() -> None:
    stream = late()
    assert (stream.state, stream.since, stream.unrecovered) == ("late", 7, 0)
    assert stream.observe(batch(8, stored(3))).events == (stored(3),)
    stream.observe(batch(10, stored(5)))
    stream.replayed(FAILED)
    assert (stream.state, stream.unrecovered) == ("approximate", 1), "what goes missing now was announced to us"


def test_a_late_listener_knows_all_once_the_cache_has_turned_over() -> None:
    stream = late(kv_blocks=6)
    stream.observe(batch(8, stored(3, 4, 5)))
    assert stream.state == "late"
    stream.observe(batch(9, stored(6, 7, 8)))
    assert (stream.state, stream.relearnt) == ("exact", 1)


def test_answers_that_agree_end_a_late_start_and_one_that_does_not_begins_anew() -> None:
    stream = late()
    for _ in range(COMPARED - 1):
        stream.compared(32, 32, 0, 16)
    stream.compared(32, 64, 0, 16)
    assert stream.state == "late", "it had what we did not know of"
    for _ in range(COMPARED):
        stream.compared(0, 0, 0, 16)
    assert stream.state == "late", "a prompt of which nothing is known shows nothing"
    outcomes = [stream.compared(32, 32, 0, 16) for _ in range(COMPARED)]
    assert stream.state == "exact" and "agree" in str(outcomes[-1].note)


def test_routing_history_adds_nothing_to_a_late_listeners_events() -> None:
    world = RouterWorld(card("a", events=("tcp://a",)))
    unseen = KvObserved(worker=WorkerId("a"), rank=0, epoch=1, sequence=5, events=[stored(1)])
    world.post(ReplayEnded(id=only(world.post(unseen), ReplayWanted).id, batches=None))
    pool, tokens = world.router.pools["m"], prompt(3, 64)
    first = only(world.post(arrived("r", tokens)), Dispatch)
    world.post(Finished(id=first.id, attempt=1, tokens=1))
    assert pool.index.kv_state(first.target) == "late"
    held = pool.index.overlaps(arrived("again", tokens).prompt, world.now + 60 * SECOND)
    assert held == {}, "its events say nothing of it, and they came since before we asked"
