"""KV event stream of one target: finds sequence gaps, requests a replay, and clears the target where that fails.

One `KvEventStream` per target follows the sequence numbers of its publisher. In order, batches are passed on. One too
far ahead means that some are missing: they are requested, what comes meanwhile waits, and the answer closes the gap.

    joining      what its engine cached before we listened is being asked for; it counts as it comes
    exact        nothing is missing: what the index says of this target is what its engine holds
    recovering   a replay was requested; later batches wait for its answer, at most `buffer_max` of them
    late         the first batches came before we listened, and there is no replay: nothing is missing since then
    approximate  events were lost for good; the target was cleared and is learnt again from later events

Blocks whose fate is unknown are not trusted: the index may then miss blocks that the engine holds, never claim one that
it does not. `late` and `approximate` end when the engine clears its cache or starts over, when the cache has turned
over (as many blocks were stored as it has room for, or `relearn_after` batches came), and after `COMPARED` answers in a
row that took from the cache what was believed to be there, no less and no more.

Answers show whether that holds: `compared` counts what an engine took from its cache beside what it was believed to
hold. Where half of `COMPARED` answers had less, the target is cleared, and all that its engine still has is replayed;
where that was wrong as well, it is approximate.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from penstock.kernel.errors import InvariantError
from penstock.kernel.values import KvCleared, KvEvent, KvStored
from penstock.router.events import KvObserved, ReplayEnded
from penstock.router.kv_index.index_states import EventStreamState

StreamState = Literal["joining", "exact", "recovering", "late", "approximate"]

_LATE_RUN = 3
"""So many consecutive numbers from the past, and none that is new between them, are no late duplicates but a publisher
that started over."""
COMPARED = 16
"""Answers that are judged together: a few may have come before the events of their blocks' end."""
ALL = 1 << 40
"""More blocks than any cache has."""
NUMBERS = (
    *("wrong", "wrong_sets", "removed", "believed", "had", "_compared"),
    *("buffer_max", "relearn_after", "epoch", "next", "applied", "duplicates", "gaps", "recovered", "unrecovered"),
    *("restarts", "relearnt", "overflows", "answers_unused", "_complete", "_learnt", "_recovering", "_asked", "_stale"),
    *("_suspect", "_heard", "_late_next", "_late_run", "since", "kv_blocks", "_stored", "_agreed"),
    *("joining", "_wanted"),
)
"""Attributes that are numbers: all but those with events."""


class StreamOutcome(NamedTuple):
    """What to do, in this order: clear the target in the index, apply the events, ask for a replay, send the note."""

    clear: bool = False
    events: tuple[KvEvent, ...] = ()
    replay_from: int | None = None
    """First sequence wanted; its answer goes to `KvEventStream.replayed`. At most one request is open per stream."""
    note: str | None = None


class KvEventStream:
    """The order of one target's KV event batches. Counts are of batches and happenings, ``applied`` of events.

    Args:
        buffer_max: most batches that wait for a replay; with one more the gap is given up.
        relearn_after: batches applied after a loss until the target counts as exact again.
        kv_blocks: blocks that it has room for; None where that is unknown.
    """

    def __init__(self, *, buffer_max: int = 4096, relearn_after: int = 4096, kv_blocks: int | None = None) -> None:
        self.buffer_max = buffer_max
        self.relearn_after = relearn_after
        self.kv_blocks = kv_blocks
        self.joining = False
        """What came before we listened is being asked for."""
        self.epoch: int | None = None
        self.next = 0
        """The sequence number that is due."""
        self.applied = 0
        self.duplicates = 0
        self.gaps = 0
        self.recovered = 0
        self.unrecovered = 0
        self.restarts = 0
        self.relearnt = 0
        self.overflows = 0
        self.answers_unused = 0
        self.wrong = 0
        """Of the answers compared since the last set, those that had less from the cache than was believed."""
        self.wrong_sets = 0
        """Sets of `COMPARED` answers in a row of which half were wrong."""
        self.believed = self.had = 0
        """Tokens that were believed cached and that the engine had, of the last wrong one."""
        self.removed = 0
        """Blocks that its events took out of the device's cache; far more where all were dropped."""
        self.since: int | None = None
        """The first number that came, where what came before can't be had; None where all came, or some was lost."""
        self._compared = 0
        self._agreed = 0
        """Answers in a row that agreed with what was believed, while not all is known."""
        self._stored = 0
        """Blocks stored since then."""
        self._complete = True
        self._learnt = 0
        self._recovering = False
        self._asked = False
        """A replay request is open..."""
        self._wanted = 0
        """... for the batches from this number on..."""
        self._stale = False
        """... whose answer is of no use any more."""
        self._waiting: dict[int, list[KvEvent]] = {}
        self._suspect = False
        """What waits may be of a publisher that started over, or a late duplicate: only a replay can decide."""
        self._repeated: list[KvEvent] | None = None
        """A batch 0 that may be a new beginning, where no replay could decide: the batch after it will."""
        self._heard = -1
        """Highest sequence that came without a replay; an answer may run ahead of it."""
        self._late_next = -1
        self._late_run = 0

    @property
    def state(self) -> StreamState:
        if self._recovering:
            return "recovering"
        if self.joining:
            return "joining"
        return "exact" if self._complete else "approximate" if self.since is None else "late"

    # --- what happens -----------------------------------------------------------------------------------------------

    def observe(self, batch: KvObserved) -> StreamOutcome:
        """Take a batch as it came from the publisher."""
        if batch.sequence < 0 or (self.epoch is not None and batch.epoch < self.epoch):
            self.duplicates += 1
            return StreamOutcome()
        fresh = self.epoch is not None and batch.epoch > self.epoch
        self.epoch = batch.epoch
        if fresh:
            self.restarts += 1
            self._begin()
            outcome = self._apply_batch(batch)
            return outcome._replace(clear=True, note=outcome.note or "it started over")
        return self._apply_batch(batch)

    def replayed(self, answer: ReplayEnded) -> StreamOutcome:
        """Take the answer to the replay request that is open."""
        if not self._asked:
            self.answers_unused += 1
            return StreamOutcome()
        ours = [batch for batch in answer.batches or () if batch.epoch == self.epoch]
        if answer.more:
            return StreamOutcome() if self._stale else self._part(ours)
        self._asked = False
        whole = next((batch for batch in reversed(ours) if batch.whole), None)
        if self._stale:
            self._stale = False
            if whole is None or (self._complete and not self._recovering):
                self.answers_unused += 1
                return StreamOutcome(replay_from=self._ask() if self._recovering else None)
        for batch in ours:
            if batch.sequence >= self.next and not batch.whole:
                self._waiting.setdefault(batch.sequence, batch.events)
        if whole is not None:
            return self._replaced(whole.sequence, whole.events)
        if self._suspect and not answer.batches:
            return self._doubt()
        self._suspect = False
        events = self._drain()
        if not self._waiting:
            self._recovering = False
            self.recovered += 1
            return StreamOutcome(events=events, note="what was missing of its KV events was replayed")
        if self.next > self._wanted and all(batch.sequence < self.next for batch in answer.batches or ()):
            # All of the answer was of use, and what is missing now went missing since.
            return StreamOutcome(events=events, replay_from=self._ask())
        return self._give_up("the missing KV events could not be replayed")

    def _part(self, batches: list[KvObserved]) -> StreamOutcome:
        """Take a part of the answer that is open."""
        for batch in batches:
            if batch.sequence >= self.next:
                self._waiting.setdefault(batch.sequence, batch.events)
        self._suspect = False
        events = self._drain()
        self._recovering = bool(self._waiting)
        return StreamOutcome(events=events)

    def lost(self, reason: str) -> StreamOutcome:
        """The publisher is out of reach; whatever comes later is a new beginning."""
        self._begin()
        self._unsure()
        self.unrecovered += 1
        return StreamOutcome(clear=True, note=f"its KV events are lost: {reason}")

    def compared(self, believed: int, had: int, evicted: int, block_size: int) -> StreamOutcome:
        """Compare the prompt tokens that an engine was believed to have in its device's cache with those it had.

        Args:
            evicted: blocks that its events have taken out since: those of the prompt may be among them.
        """
        if not self._complete and self._agrees(abs(believed - had) < block_size, believed > 0):
            return StreamOutcome(note=f"{COMPARED} answers in a row agree with what is known of its cache")
        self._compared += 1
        if believed - had >= (evicted + 1) * block_size:
            self.wrong += 1
            self.believed, self.had = believed, had
        if self._compared < COMPARED:
            return StreamOutcome()
        wrong, self._compared, self.wrong = self.wrong, 0, 0
        if 2 * wrong < COMPARED:
            self.wrong_sets = 0
            return StreamOutcome()
        self.wrong_sets += 1
        again = self.wrong_sets == 1  # a second time, what a replay tells has been wrong as well
        if again:
            self._begin()
        self._unsure()
        note = f"{wrong} of {COMPARED} answers had less from its cache than was believed: learning it anew"
        return StreamOutcome(clear=True, replay_from=self._ask() if again else None, note=note)

    def _agrees(self, agrees: bool, says: bool) -> bool:
        """Count an answer of a cache of which not all is known; return whether that is enough to trust it."""
        self._agreed = self._agreed + says if agrees else 0
        if self._agreed >= COMPARED:
            self._known()
            self.wrong_sets = 0
        return self._complete

    # --- the cases --------------------------------------------------------------------------------------------------

    def _apply_batch(self, batch: KvObserved) -> StreamOutcome:
        if not batch.whole:
            return self._received(batch.sequence, batch.events)
        if batch.sequence < self.next and self._complete and not self._recovering:
            self.duplicates += 1  # we know as much, or more
            return StreamOutcome()
        return self._replaced(batch.sequence, batch.events)

    def _replaced(self, number: int, events: list[KvEvent]) -> StreamOutcome:
        """Begin anew with everything that the target held after a number."""
        later = {sequence: waits for sequence, waits in self._waiting.items() if sequence > number}
        heard = max(number, self._heard)
        self._begin()
        self.next, self._heard, self._waiting = number + 1, heard, later
        self.applied += len(events)
        self.recovered += 1
        passed = (*events, *self._drain())
        self._recovering = bool(self._waiting)
        ask = self._ask() if self._recovering else None
        note = None if self.joining else "all that it holds was told anew"
        return StreamOutcome(clear=True, events=passed, replay_from=ask, note=note)

    def _received(self, number: int, events: list[KvEvent]) -> StreamOutcome:
        if self._repeated is not None:
            held, self._repeated = self._repeated, None
            if number == 1:
                self.restarts += 1
                self.next = 2
                self._late_run = 0
                return StreamOutcome(events=self._pass_on([(0, held), (1, events)]), note="it started over")
            self.duplicates += 1
            if number == 0:
                self._repeated = events  # the same again, or one more start
                return StreamOutcome()
            self.next = number  # that was a late duplicate: the numbering goes on where it was
        ahead, self._heard = number > self._heard, max(number, self._heard)
        if number < self.next:
            if not ahead:
                return self._late(number, events)
            self.duplicates += 1  # an answer had it before it came by itself
            return StreamOutcome()
        self._late_run = 0
        if self._recovering:
            return self._wait(number, events)
        if number == self.next:
            self.next += 1
            return StreamOutcome(events=self._pass_on([(number, events)]))
        self.gaps += 1
        self._waiting[number] = events
        self._recovering = True
        note = f"KV events {self.next} to {number - 1} are missing; asking for them"
        return StreamOutcome(replay_from=self._ask(), note=note)

    def _late(self, number: int, events: list[KvEvent]) -> StreamOutcome:
        """A number from the past: a duplicate, or a publisher that counts anew."""
        self._late_run = self._late_run + 1 if number == self._late_next else 1
        self._late_next = number + 1
        if number and self._late_run < _LATE_RUN:
            self.duplicates += 1
            return StreamOutcome()
        self.restarts += 1
        self._begin()
        self._suspect = self._recovering = True
        self._heard = number
        self._waiting[number] = events
        return StreamOutcome(
            clear=True, replay_from=self._ask(), note=f"its KV events went back to number {number}; starting over"
        )

    def _wait(self, number: int, events: list[KvEvent]) -> StreamOutcome:
        """Keep a batch until the answer comes, unless it is itself what was missing."""
        if number in self._waiting:
            self.duplicates += 1
            return StreamOutcome()
        self._waiting[number] = events
        passed = () if self._suspect else self._drain()
        if not self._waiting:
            self._recovering = False
            self._stale = self._asked
            self.recovered += 1
            return StreamOutcome(events=passed, note="what was missing of its KV events came late")
        if len(self._waiting) <= self.buffer_max:
            return StreamOutcome(events=passed)
        self.overflows += 1
        if self._suspect:
            return self._doubt()
        return self._give_up(f"more than {self.buffer_max} batches wait for a replay")

    def _doubt(self) -> StreamOutcome:
        """It is not known whether the publisher started over: trust nothing of what waits, for it may be old."""
        self.unrecovered += 1
        self._recovering = self._suspect = False
        self._stale = self._asked
        self._unsure()
        self.next = max(self._waiting) + 1
        self._repeated = self._waiting[0] if set(self._waiting) == {0} else None
        self._waiting = {}
        return StreamOutcome(
            clear=True, note="it may have started over and could not be asked: learning its cache anew"
        )

    def _give_up(self, why: str) -> StreamOutcome:
        """Go on without what is missing: trust only the unbroken end of what was received."""
        self._recovering = False
        self._stale = self._asked
        last = first = max(self._waiting)
        while first - 1 in self._waiting:
            first -= 1
        late = self.next == 0 and self._complete  # nothing was heard before: nothing is lost
        self.unrecovered += not late
        self._unsure(since=first if late else None)
        self.next = last + 1
        run = [(number, self._waiting[number]) for number in range(first, last + 1)]
        self._waiting = {}
        then = f"its cache is known from KV event {first} on" if late else f"{why}: learning its cache anew"
        return StreamOutcome(clear=True, events=self._pass_on(run), note=then)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Expect a publisher's first batch; an open replay request is about something else."""
        self.next = 0
        self._known()
        self._recovering = self._suspect = False
        self._stale = self._asked
        self._waiting = {}
        self._repeated = None
        self._heard = self._late_next = -1
        self._late_run = 0

    def _known(self) -> None:
        """All that it holds is known from here."""
        self._complete, self.since = True, None

    def _unsure(self, since: int | None = None) -> None:
        """It may hold what is not known, from before a number or from before a loss."""
        self._complete, self.since = False, since
        self._learnt = self._stored = self._agreed = 0

    def _ask(self) -> int | None:
        """Return the first sequence to ask for, or None while the answer to an older request is still to come."""
        if self._asked:
            self._stale = True
            return None
        self._asked = True
        self._wanted = self.next
        return self.next

    def _drain(self) -> tuple[KvEvent, ...]:
        """Pass on what waits and is due."""
        ready: list[tuple[int, list[KvEvent]]] = []
        while self.next in self._waiting:
            ready.append((self.next, self._waiting.pop(self.next)))
            self.next += 1
        return self._pass_on(ready)

    def _pass_on(self, batches: Iterable[tuple[int, list[KvEvent]]]) -> tuple[KvEvent, ...]:
        """Join batches in order, and decide whether the target is exact again."""
        events: list[KvEvent] = []
        for number, part in batches:
            events.extend(part)
            if self._complete:
                continue
            self._learnt += 1
            self._stored += sum(len(e.hashes) for e in part if isinstance(e, KvStored) and e.tier == "device")
            over = self._learnt >= self.relearn_after or (self.kv_blocks is not None and self._stored >= self.kv_blocks)
            if number == 0 or over or any(isinstance(e, KvCleared) for e in part):
                self._known()
                self.relearnt += 1
        self.applied += len(events)
        return tuple(events)

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> EventStreamState:
        """Return the state."""
        return EventStreamState({name: getattr(self, name) for name in NUMBERS}, self._waiting, self._repeated)

    def restore(self, state: EventStreamState) -> None:
        """Become the stream of a state."""
        for name in NUMBERS:
            setattr(self, name, state.numbers[name])
        self._waiting, self._repeated = state.waiting, state.repeated

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself."""
        if self._recovering != bool(self._waiting):
            raise InvariantError("batches wait if and only if a gap is being closed")
        if self._recovering and not self._asked:
            raise InvariantError("a gap is being closed, but nothing was asked")
        if len(self._waiting) > self.buffer_max or any(number < self.next for number in self._waiting):
            raise InvariantError("too many batches wait, or some that were passed on already")
