"""`Engine`: the simulated engine as a machine: requests in, milestones and KV events out.

It is lazy. An event makes it catch up; between events nothing happens, and `Wake` names the end of the pass, or of
the run of equal decode steps, that it is in. Where its output stands in between is a closed form: `Engine.tokens_at`
and `Engine.token_time`, from which a live process paces its streams.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import Effect, Event, Nanos, Snapshot, Wake, Woken, check_version
from penstock.kernel.values import KvCleared, KvEvent, KvRemoved, RequestId, StepStats
from penstock_lab.engine.block_allocation import KvCache
from penstock_lab.engine.block_cache import BlockCache
from penstock_lab.engine.engine_request import EngineRequest
from penstock_lab.engine.events import (
    AbortRequest,
    ClearCache,
    EngineCounters,
    EngineFinished,
    EngineFirstToken,
    EngineRejected,
    EngineStarted,
    KvChanged,
    KvPulled,
    PullKv,
    ReleaseKv,
    SubmitRequest,
)
from penstock_lab.engine.external_kv import remote_prefill
from penstock_lab.engine.external_kv.kv_tiers import KvTiers
from penstock_lab.engine.forward_pass import ForwardPass
from penstock_lab.engine.itl_histogram import ItlHistogram
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.scheduler import Scheduler, fits, running
from penstock_lab.engine.settings import SimSettings, checked
from penstock_lab.engine.simulated_output import PLAIN, SimulatedOutput, Words
from penstock_lab.engine.timing.decode_steps import TabulatedSteps
from penstock_lab.engine.timing.timing_model import TimingModel, timing_of

VERSION = 7
_PendingEffect = EngineStarted | EngineFirstToken | EngineFinished | PullKv | EngineRejected | KvChanged


class Engine:
    """One simulated engine, as a machine.

    Args:
        settings: scheduler, cache and speed.
        table: what the files of the timing settings hold, as `penstock_lab.config.timing_files` reads them.
        words: token ids of the words that answers are made of.
        end: token id that ends an answer which ends by itself.
        turn: token id after which the model's turn begins; None takes every prompt as a whole one.
        cache: class of its block cache, and so the form in which prompts come: hashes or tokens, or with `RunCache` as
            `penstock_lab.runs.block_runs.Chain`.
        tiers: makes the tiers below its memory for the settings and the timing model; None where there are none.
    Raises:
        ConfigError: the settings contradict each other.
    Cost: per request, not per token: 3 or 4 events and a few microseconds for each 64 blocks of prompt.
    """

    def __init__(
        self,
        settings: SimSettings,
        *,
        table: Mapping[str, Any] | None = None,
        words: Words = PLAIN,
        end: int | None = None,
        turn: int | None = None,
        cache: Callable[[int], KvCache] = BlockCache,
        tiers: Callable[[SimSettings, TimingModel], KvTiers | None] | None = None,
    ) -> None:
        settings = self.settings = with_blocks(checked(settings), table)
        self.timing: TimingModel = timing_of(settings.timing, settings.capacity, table)
        self._words = words
        self._end = end
        self._turn = turn
        self._cache = cache
        self.tiers = None if tiers is None else tiers(settings, self.timing)
        self._core = Scheduler(settings, self.timing, cache(settings.blocks), self.tiers)
        self._serial = 0
        self._wake: Nanos | None = None
        self._now: Nanos = 0

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Take one event: `SubmitRequest`, `AbortRequest`, `ReleaseKv`, `KvPulled`, `ClearCache` or `Woken`.

        Other events are ignored.
        """
        core = self._core
        now = self._now = max(now, self._now)
        if isinstance(event, Woken):
            self._wake = None
            core.advance(now, True)
        elif isinstance(event, SubmitRequest):
            core.advance(now, False)
            self._submit(now, event)
        elif isinstance(event, AbortRequest):
            core.advance(now, False)
            request = core.requests.get(event.id)
            if request is not None:
                core.abort(request, now)
        elif isinstance(event, KvPulled):
            core.advance(now, False)
            remote_prefill.land(core, event.id, now, event.ok)
        elif isinstance(event, ReleaseKv):
            core.advance(now, False)
            core.release(event.id, now)
        elif isinstance(event, ClearCache):
            core.advance(now, False)
            self._clear(now)
        out, op = core.out, core.op
        due = core.handoffs.due if core.tiers is None else core.due
        core.out = []
        wake = op.wake if op is not None else None if core.blocked else max(now, core.ready)
        if due is not None and (wake is None or due < wake):
            wake = due
        if wake is None:
            if self._wake is None:
                return out
            wake = now  # what it was to be woken for is over: that must not keep a simulation going
        if wake != self._wake:
            self._wake = wake
            out.append(Wake(at=wake))
        return out

    # --- questions --------------------------------------------------------------------------------------------------

    def tokens_at(self, id: RequestId | str, now: Nanos) -> int:
        """Return how many tokens of a request are out at ``now``, which is no earlier than the last event.

        Raises:
            KeyError: the request is not here (any more).
        Cost: constant.
        """
        request = self._core.requests[id]
        op = self._core.op
        if request.state == "decoding":
            step = self._core.group.step if op is None else op.first + op.within(now)
            return self._core.group.generated(request, step)
        if op is not None and now >= op.end and self._prefilled_by(op, request):
            return request.generated + 1
        return request.generated

    def token_time(self, id: RequestId | str, index: int) -> Nanos | None:
        """Return when token number ``index`` (from 1) of a request comes out, under the present plan.

        None where the plan does not reach that far, or the token was out before the op in progress began.
        Raises:
            KeyError: the request is not here (any more).
        """
        request = self._core.requests[id]
        op = self._core.op
        if op is None or index > request.target:
            return None
        if request.state == "decoding":
            if index <= request.generated:
                return None
            steps = self._core.group.step_of(request, index) - op.first
            return op.after(steps) if 0 < steps <= op.steps else None
        return op.end if index == request.generated + 1 and self._prefilled_by(op, request) else None

    def next_step(self, now: Nanos) -> Nanos | None:
        """Return when the next pass after ``now`` ends, under the present plan; None while idle."""
        op = self._core.op
        if op is None or now >= op.end:
            return self._wake
        return op.after(op.within(now) + 1)

    def answer(self, id: RequestId | str) -> SimulatedOutput:
        """Return the output of a request.

        Raises:
            KeyError: the request is not here (any more).
        """
        return self._core.requests[id].answer

    @property
    def running(self) -> int:
        """Requests that passes compute."""
        return len(self._core.requests) - self.waiting - self.pulling

    @property
    def waiting(self) -> int:
        """Requests in line, those included whose KV has come from another engine."""
        return self._core.queued + len(self._core.handoffs.landed)

    @property
    def pulling(self) -> int:
        """Requests whose KV is on its way here."""
        return len(self._core.handoffs.pulling)

    @property
    def blocks_retained(self) -> int:
        """Blocks held for other engines; one that is held of two requests counts twice."""
        return self._core.handoffs.blocks

    def holds(self, id: RequestId | str) -> int:
        """Return how many blocks are held of a request that has ended; 0 where they were released, or never held."""
        hold = self._core.handoffs.retained.get(id)
        return 0 if hold is None else hold.named + hold.private

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that requests hold, also those held for others or reserved, as of the last event."""
        return self._core.cache.used / self._core.cache.blocks

    @property
    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens of the requests in line, cached ones included, as of the last event."""
        return self._core.waiting_prefill

    def decode_kv(self, now: Nanos) -> int:
        """Return the KV tokens that the sequences which decode hold at ``now``. Cost: constant."""
        group, op = self._core.group, self._core.op
        return group.kv + (0 if op is None else len(group) * op.within(now))

    @property
    def media_counts(self) -> tuple[int, int, int]:
        """Media that it encoded, found in its own cache of embeddings, and read from the store."""
        encoder = self._core.encoder
        return encoder.encoded, encoder.hits, encoder.fetched

    @property
    def cached_blocks(self) -> int:
        """Blocks with a name, held or idle, as of the last event."""
        return self._core.cache.cached

    def counters(self, now: Nanos) -> EngineCounters:
        """Return the counters, with the passes that are over and the tokens that are out at ``now``.

        Cost: O(running).
        """
        group, op = self._core.group, self._core.op
        step = group.step if op is None else op.first + op.within(now)
        ahead = sum(group.generated(request, step) - request.generated for request in group.members.values())
        known = self._core.counters
        over = 0 if op is None else max(0, op.within(now) - op.done)
        counters = msgspec.structs.replace(known, generated=known.generated + ahead, passes=known.passes + over)
        counters.ended, counters.tier_hits = dict(counters.ended), dict(counters.tier_hits)
        return counters

    def take_stats(self, now: Nanos) -> StepStats:
        """Return what was done since the last call, and begin a new window. Cost: constant."""
        self._core.settle(now)
        return self._core.take_window()

    def mute_kv_events(self) -> None:
        """Report no changes of the cache from now on: there is no listener."""
        self._core.holdings.notify = False

    def count_gaps(self) -> ItlHistogram:
        """Count the gaps between tokens from now on, and return the histogram; it is no part of the state."""
        self._core.gaps = ItlHistogram()
        return self._core.gaps

    # --- the machine's state ----------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data. The generators are functions of the settings' seed: no state."""
        core = self._core
        op = core.op
        return {
            "version": VERSION,
            "now": self._now,
            "serial": self._serial,
            "wake": self._wake,
            "ready": core.ready,
            "stuck": core.stuck,
            "planned": core.planned,
            "leaving": [request.dump() for request in core.leaving],
            "step": core.group.step,
            "admissions": core.admissions,
            "requests": [request.dump() for request in core.requests.values()],
            "members": list(core.group.members),
            "waiting": [request.id for request in core.waiting],
            "partial": core.partial.id if core.partial is not None else None,
            "handoffs": core.handoffs.snapshot(),
            "cache": core.cache.snapshot(),
            "encoder": core.encoder.snapshot(),
            "tiers": None if core.tiers is None else core.tiers.snapshot(),
            "fresh": [[request.id, start, end] for request, start, end in core.holdings.fresh or ()],
            "counters": msgspec.to_builtins(core.counters),
            "window": dict(core.window),
            "timing": [self.timing.lookups, self.timing.extrapolated],
            "pending": msgspec.to_builtins(core.out),
            "op": None
            if op is None
            else {
                "start": op.after(op.done),
                "ends": [op.after(steps) for steps in range(op.done + 1, op.steps + 1)],
                "first": op.first + op.done,
                "seqs": op.seqs,
                "prefills": [(r.id, n) for r, n in op.prefills if r.state == "prefilling"],
                "prefilled": op.prefilled,
                "tokens": op.tokens,
                "taken": op.taken - op.done,
                "last": list(op.last) if op.last is not None else None,
                "look": op.look - op.done,
            },
        }

    def restore(self, snapshot: Snapshot) -> None:
        """Become the engine that wrote the snapshot; it must have had the same settings.

        Raises:
            ValueError: it is of another version.
        """
        check_version(snapshot, VERSION, "an engine")
        gaps, tells = self._core.gaps, self._core.holdings.notify
        core = self._core = Scheduler(self.settings, self.timing, self._cache(self.settings.blocks), self.tiers)
        core.gaps, core.holdings.notify = gaps, tells
        self._now, self._serial, self._wake = snapshot["now"], snapshot["serial"], snapshot["wake"]
        core.ready, core.stuck, core.admissions = snapshot["ready"], snapshot["stuck"], snapshot["admissions"]
        chain = core.cache.chain
        loaded = [self._loaded(state, chain) for state in [*snapshot["requests"], *snapshot["leaving"]]]
        here = len(snapshot["requests"])
        core.requests = {request.submit.id: request for request in loaded[:here]}
        core.planned, core.leaving = snapshot["planned"], loaded[here:]
        core.group.rebuild([core.requests[id] for id in snapshot["members"]], snapshot["step"])
        for id in snapshot["waiting"]:
            core.add_waiting(core.requests[id])
        core.partial = core.requests[snapshot["partial"]] if snapshot["partial"] is not None else None
        core.handoffs.restore(snapshot["handoffs"], core.requests, chain)
        core.cache.restore(snapshot["cache"])
        core.encoder.restore(snapshot["encoder"])
        if core.tiers is not None:
            core.tiers.restore(snapshot["tiers"])
            core.holdings.fresh = [(core.requests[id], start, end) for id, start, end in snapshot["fresh"]]
        core.counters = msgspec.convert(snapshot["counters"], EngineCounters)
        core.window = dict(snapshot["window"])
        self.timing.lookups, self.timing.extrapolated = snapshot["timing"]
        core.out = [msgspec.convert(effect, _PendingEffect) for effect in snapshot["pending"]]
        state = snapshot["op"]
        if state is not None:
            ends = state["ends"]
            prefills = [(core.requests[id], chunk) for id, chunk in state["prefills"]]
            core.op = ForwardPass(
                state["start"],
                ends[-1],
                len(ends),
                state["first"],
                state["seqs"],
                prefills,
                state["prefilled"],
                state["tokens"],
                TabulatedSteps([end - state["start"] for end in ends]),
                state["taken"],
                None if state["last"] is None else (state["last"][0], state["last"][1]),
            )
            core.op.look, core.op.wake = state["look"], core.op.after(state["look"])

    def _loaded(self, state: Any, chain: Callable[[Sequence[int]], Sequence[int]]) -> EngineRequest:
        submit = msgspec.convert(state["submit"], SubmitRequest)
        answer = SimulatedOutput(submit, self.settings, self._words, self._end, self._turn)
        return EngineRequest.load(state, submit, answer, chain)

    def check(self) -> None:
        """Raise `InvariantError` where blocks, references or sequences do not add up. Cost: walks everything."""
        core = self._core
        holders: dict[int, int] = {}
        private = 0
        group = core.group
        stepping = core.op is not None
        holding = running(core)
        chains = [request.chain[: request.named] for request in holding]
        chains += [hold.chain[: hold.named] for hold in core.handoffs.retained.values()]
        chains += [request.chain[: request.named] for request in core.leaving]
        for names in chains:
            for name in names:
                holders[name] = holders.get(name, 0) + 1
        for request in holding:
            decodes = request.state == "decoding"
            private += group.private(request, stepping) if decodes else request.private
        private += sum(hold.private for hold in core.handoffs.retained.values())
        private += sum(request.private for request in core.leaving)
        core.cache.check(holders, private)
        core.handoffs.check()
        core.encoder.check()
        if core.tiers is not None:
            core.tiers.check()
        if len(group) + sum(r.state == "prefilling" for r in core.requests.values()) != self.running:
            raise InvariantError(f"{self.running} requests run, but not all of them decode or prefill")
        if len(group) > self.settings.max_num_seqs:
            raise InvariantError(f"{len(group)} sequences decode, above max_num_seqs {self.settings.max_num_seqs}")
        if len(core.waiting) != core.queued or any(request.state != "waiting" for request in core.waiting):
            raise InvariantError("the line holds a request that runs, or was miscounted")
        kv = sum(request.prompt + group.generated(request) for request in group.members.values())
        if kv != group.kv:
            raise InvariantError(f"sequences read {kv} tokens, but {group.kv} were counted")
        if (not core.blocked or core.handoffs.retained) and not stepping and self._wake is None:
            raise InvariantError("there is work, but no wake was asked for")

    # --- events -----------------------------------------------------------------------------------------------------

    def _submit(self, now: Nanos, event: SubmitRequest) -> None:
        core = self._core
        tokens = event.tokens
        prompt, given = event.prompt_tokens, event.prompt
        core.counters.requests += 1
        why = fits(self.settings, prompt, min(1, event.max_tokens) if event.hold else event.max_tokens)
        if why is None and (event.id in core.requests or event.id in core.handoffs.retained):
            why = f"a request {event.id} runs already"
        if why is not None:
            core.counters.rejected += 1
            core.out.append(EngineRejected(id=event.id, at=now, why=why))
            return
        size = self.settings.block_size
        if not self.settings.enable_prefix_caching or (given is None and tokens is None):
            chain = core.cache.chain(())
        elif given is not None:
            most = prompt // size
            chain = core.cache.chain(given.blocks if len(given.blocks) <= most else given.blocks[:most])
        else:
            chain = block_hashes(tokens or (), size, lora=event.lora, salt=event.salt, media=event.media)
        answer = SimulatedOutput(event, self.settings, self._words, self._end, self._turn)
        target = 1 if event.hold else answer.length
        request = EngineRequest(event, self._serial, now, prompt, chain, answer, target, event.priority)
        if event.remote > 0:
            request.remote = min(event.remote, prompt)
        self._serial += 1
        core.enqueue(request, now)

    def _clear(self, now: Nanos) -> None:
        core = self._core
        core.settle(now)
        names = core.cache.drop_idle()
        if not core.holdings.notify:
            return
        if not core.cache.cached and core.tiers is None:
            event: KvEvent = KvCleared()
        elif names:
            event = KvRemoved(hashes=names)
        else:
            return
        core.out.append(KvChanged(at=now, events=[event]))

    def _prefilled_by(self, op: ForwardPass, request: EngineRequest) -> bool:
        return any(r is request and request.computed + chunk >= request.tokens_so_far for r, chunk in op.prefills)
