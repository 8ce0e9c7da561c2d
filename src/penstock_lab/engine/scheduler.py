"""Scheduler of the simulated engine: chooses what runs, pass by pass or for many equal decode steps at once.

A pass, in this order (as vLLM does it):

1. Running requests first. Each that decodes takes its tokens of the budget and the block that it may need; then a
   prompt that is part done takes what budget is left. Where blocks run short, a running request is preempted: it
   loses its blocks and goes to the front of the line, to be computed again.
2. Blocks that this pass fills get their names, so that requests admitted now can share them.
3. Unless one was preempted, requests are admitted while budget, ``max_num_seqs`` and blocks allow: first those whose KV
   has come from another engine, then the line. The whole sequence as it is known must fit, cached blocks that others
   hold counted as there. If another engine holds a request's KV, its blocks are reserved; it is no part of the pass.
4. The pass takes what the timing model says of its prompts and of the KV that it reads. At its end every sequence
   that decodes has its next token, and so has every prompt that is done.

While no request can be admitted and nothing but decoding is left, all passes are alike until a request ends, a block
is needed that is not there, or a request arrives: those are one `ForwardPass` of many steps.
"""

from collections.abc import Sequence
from typing import Any

from penstock.kernel.machine import Effect, Nanos, nanos
from penstock.kernel.values import STEP_SUMS, StepStats
from penstock_lab.engine.block_allocation import BlockAllocation, KvCache
from penstock_lab.engine.decode_batch import DecodeBatch, SpeculativeDecodeBatch
from penstock_lab.engine.engine_request import ByPriority, EngineRequest, Fcfs, WaitingQueue, rank
from penstock_lab.engine.events import (
    EndReason,
    EngineCounters,
    EngineFinished,
    EngineFirstToken,
    EngineStarted,
)
from penstock_lab.engine.external_kv import kv_tiers, remote_prefill
from penstock_lab.engine.external_kv.kv_handoff import KvHandoffs, KvHold
from penstock_lab.engine.external_kv.kv_tiers import KvTiers
from penstock_lab.engine.forward_pass import ForwardPass
from penstock_lab.engine.itl_histogram import ItlHistogram
from penstock_lab.engine.media_encoder import MediaEncoder
from penstock_lab.engine.settings import SimSettings
from penstock_lab.engine.timing.timing_model import TimingModel


class Scheduler:
    """The engine's state and how it moves from pass to pass; effects collect in ``out``."""

    def __init__(
        self, settings: SimSettings, timing: TimingModel, cache: KvCache, tiers: KvTiers | None = None
    ) -> None:
        self.settings = settings
        self.timing = timing
        self.out: list[Effect] = []
        self.requests: dict[str, EngineRequest] = {}
        line = ByPriority if settings.scheduling_policy == "priority" else Fcfs
        self.waiting: WaitingQueue = line()
        self.handoffs = KvHandoffs(line())
        self.holdings = BlockAllocation(settings, cache)
        self.cache = self.holdings.cache
        self.encoder = MediaEncoder(settings.encoder)
        self.tiers = tiers
        if tiers is not None:
            self.holdings.fresh = []
        fills = self._exact = self.holdings.decoded
        self.group = (
            SpeculativeDecodeBatch(settings.block_size, fills, settings.num_speculative_tokens, settings.accept_rate)
            if settings.num_speculative_tokens
            else DecodeBatch(settings.block_size, fills)
        )
        self.partial: EngineRequest | None = None
        self.op: ForwardPass | None = None
        self.ready: Nanos = 0
        """When the next pass may begin, while there is no ``op``."""
        self.planned: Nanos | None = None
        """When the next pass was planned, with asynchronous scheduling; None: it is planned when it begins."""
        self.leaving: list[EngineRequest] = []
        """Requests that ended in the pass before; a plan made before that still counts them and gives them blocks."""
        self.stuck = False
        """Whether the line waits for blocks that no running request has: those held for others, or reserved."""
        self.counters = EngineCounters()
        self.window = dict.fromkeys(STEP_SUMS, 0)
        """The sums of the open window, by name; ``wall`` in nanoseconds, which are exact."""
        self.gaps: ItlHistogram | None = None
        """Counts the gaps between tokens, where a caller wants them."""
        self.queued = 0
        self.waiting_prefill = 0
        self.waiting_decode = 0
        self.admissions = 0
        self._width = 1 + settings.num_speculative_tokens
        self._spare = settings.watermark_blocks
        self._hold_timeout = nanos(settings.transfer.hold_timeout)

    @property
    def blocked(self) -> bool:
        """Whether no pass can begin before something happens."""
        return self.stuck or len(self.requests) == len(self.handoffs.pulling)

    @property
    def due(self) -> Nanos | None:
        """When something is over next that is no pass: what is held for another engine, or a move of the tiers."""
        due = self.handoffs.due
        at = None if self.tiers is None else self.tiers.due
        return due if at is None or (due is not None and due <= at) else at

    # --- time -------------------------------------------------------------------------------------------------------

    def advance(self, now: Nanos, inclusive: bool) -> None:
        """Run what lies before ``now``: passes that end by then, and passes that begin before (or at) it."""
        while True:
            op = self.op
            due = self.handoffs.due if self.tiers is None else self.due
            if due is not None and due <= now and self._comes_next(due):
                if self.tiers is not None and due != self.handoffs.due:
                    kv_tiers.advance(self, self.tiers, due)
                    continue
                self.counters.hold_expired += 1
                self.release(next(iter(self.handoffs.retained)), due)
                continue
            if op is not None:
                if op.wake > now:
                    return
                if op.wake < op.end:
                    self._commit(op, op.look)
                    self._set_wake(op)
                    continue
                self._complete(op)
                if due is not None:
                    continue
            if self.ready > now or (self.ready == now and not inclusive):
                return
            self._start(self.ready)
            if self.op is None and ((due := self.due) is None or due > now):
                return

    def _comes_next(self, at: Nanos) -> bool:
        """Tell whether ``at`` comes before what the passes do next; at an equal time, the end of a pass comes first."""
        return at < self.op.wake if self.op is not None else self.blocked or at <= self.ready

    def settle(self, now: Nanos) -> None:
        """Account for the steps of a long op that are over, and for the blocks of the one in progress."""
        op = self.op
        if op is not None and op.steps > 1:
            self._commit(op, op.within(now))
            self._set_wake(op)

    def _set_wake(self, op: ForwardPass) -> None:
        """Wake before a step that evicts blocks, where there is a listener: it hears of that when it happens."""
        look = op.steps
        if self._exact and self.holdings.notify and look - op.done > 1 and op.last is None:
            look = min(look, op.done + self.group.horizon(self.cache.free))
        op.wake = op.after(look)
        op.look = look

    def cut(self) -> None:
        """Let a settled op end with the step in progress, because what comes next is no longer sure."""
        op = self.op
        if op is not None and op.steps - op.done > 1:
            steps = min(op.steps, op.done + (2 if self.settings.async_scheduling else 1))
            op.end = op.after(steps)
            op.steps = steps
            self._set_wake(op)

    # --- requests ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: EngineRequest, now: Nanos) -> None:
        """Let a new request wait."""
        self.requests[request.submit.id] = request
        if self.op is not None and self.op.steps > 1:
            self.settle(now)  # the steps so far had a shorter line
            blocked = self.queued > 0 and self.settings.scheduling_policy == "fcfs"
            if not blocked and len(self.group.members) < self.settings.max_num_seqs:
                self.cut()
        self.add_waiting(request)
        self.stir(now)

    def add_waiting(self, request: EngineRequest) -> None:
        """Put a request at the end of the line, as a snapshot has it there."""
        self.waiting.add(request)
        self._count_waiting(request, 1)

    def put_back(self, request: EngineRequest) -> None:
        """Let a request wait again that has run, or had its blocks, before."""
        self.waiting.put_back(request)
        self._count_waiting(request, 1)

    def abort(self, request: EngineRequest, now: Nanos) -> None:
        """Take a request out, wherever it is; the pass in progress goes on without it."""
        self.settle(now)
        if request.state == "waiting":
            if self.waiting.head() is request:
                self.cut()
            self.waiting.remove(request)
            self._count_waiting(request, -1)
        elif request.state in ("pulling", "landed"):
            self.cut()
            if request.state == "landed":
                self.handoffs.landed.remove(request)
            else:
                del self.handoffs.pulling[request.submit.id]
                if self.tiers is not None and request.loading:
                    self.tiers.cancel(request.submit.id, now)
            self.cache.release(request.chain, request.named, request.private)
        else:
            self.cut()
            if request.state == "decoding":
                op = self.op
                if op is not None and op.last is None:
                    op.last = (len(self.group), self.group.kv)
                self._leave(request, op is not None)
            elif request is self.partial:
                self.partial = None
            self.cache.release(request.chain, request.named, request.private)
        if self.holdings.fresh:
            self.holdings.fresh = [blocks for blocks in self.holdings.fresh if blocks[0] is not request]
        self._finish(request, now, "abort")
        self.stir(now)

    def end(self, request: EngineRequest, at: Nanos) -> None:
        """Let a request that has all its tokens go; one that another engine goes on with leaves its blocks behind."""
        if request.state == "decoding":
            self._leave(request, False)
        answer, retained = request.answer, 0
        reason: EndReason = answer.reason if request.generated >= answer.length else "length"
        if request.submit.hold and reason == "length":
            retained = self.handoffs.hold(request, at + self._hold_timeout)
        elif self.settings.async_scheduling:
            self.leaving.append(request)
        else:
            self.cache.release(request.chain, request.named, request.private)
        self._finish(request, at, reason, retained)

    def _let_leave(self) -> None:
        for request in self.leaving:
            self.cache.release(request.chain, request.named, request.private)
        self.leaving = []

    # --- hand-off ---------------------------------------------------------------------------------------------------

    def release(self, id: str, now: Nanos) -> None:
        """Let go of the blocks that are held of a request, if any are."""
        hold: KvHold | None = self.handoffs.let_go(id)
        if hold is None:
            return
        self.settle(now)
        self.cache.release(hold.chain, hold.named, hold.private)
        if self.queued:
            self.cut()
        self.stir(now)

    def stir(self, now: Nanos) -> None:
        """Try again what could not begin before."""
        if self.op is None:
            self.ready = now
            self.stuck = False

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _start(self, at: Nanos) -> None:
        """Begin the next pass, if there is any."""
        counters, holdings = self.counters, self.holdings
        while not self.blocked:
            before = counters.preemptions
            left, planned = self.leaving, self.planned
            op = self.op = self._schedule(at)
            if left:
                self._let_leave()
            self.planned = None
            if self.tiers is not None:
                kv_tiers.announce(self, self.tiers)
            if holdings.changes:
                self.out.append(holdings.take_changes(at))
            if op is not None:
                return
            if planned is not None:
                continue  # nothing was there to plan ahead, so that this pass is planned when it begins
            # Nothing is left of the pass. Where those that would have run were preempted, the next try admits.
            self.stuck = counters.preemptions == before

    def _schedule(self, at: Nanos) -> ForwardPass | None:
        settings, group, cache, holdings = self.settings, self.group, self.cache, self.holdings
        size = settings.block_size
        preempted = False
        step, seqs = group.step, len(group.members)
        if seqs:
            need = group.takes(step, step + 1)
            if need:
                if need > cache.available:
                    preempted = self._make_room()
                    seqs = len(group.members)
                else:
                    holdings.take(need)
        budget = settings.max_num_batched_tokens - seqs * self._width
        prefills: list[tuple[EngineRequest, int]] = []
        partial = self.partial
        chunk = 0
        if partial is not None:
            chunk = partial.prompt + partial.generated - partial.computed
            if chunk > budget:
                chunk = budget
            # One whose KV was brought has blocks for its whole prompt.
            need = -(-(partial.computed + chunk) // size) - partial.named - partial.private
            if need > 0:
                while need > cache.available and partial.state != "waiting":
                    preempted = True
                    self._preempt(self._victim(), True)
                if partial.state == "waiting":
                    partial = None
                else:
                    holdings.take(need)
                    partial.private += need
                seqs = len(group.members)
        for request in group.fills():
            blocks = (request.prompt + group.generated(request)) // size
            holdings.extend_chain(request, blocks)
            holdings.name(request, blocks)
        if partial is not None and chunk:
            holdings.name(partial, (partial.computed + chunk) // size)
            prefills.append((partial, chunk))
            budget -= chunk
        if not preempted:
            if (self.tiers is not None or self.counters.remote_queries) and self.handoffs.landed:
                budget = remote_prefill.resume(self, at, budget, prefills)
            if self.queued:
                self._admit(at, budget, prefills)
        if prefills:
            tokens = 0
            for _, chunk in prefills:
                tokens += chunk
            kv = group.kv if seqs else 0
            timing = self.timing
            if self.counters.remote_hits:
                length = remote_prefill.length(self, prefills, kv, seqs)
            else:
                longest = group.longest(timing) if timing.uneven else 0
                length = timing.mixed(tokens, [(r.computed, n) for r, n in prefills], kv, seqs, longest)
            encoder = self.encoder
            if encoder.only:
                length = encoder.take()
            elif encoder.pending:
                length += encoder.take()
            end = at + (round(length) or 1)
            return ForwardPass(at, end, 1, step, seqs, prefills, len(prefills), tokens, None, 1, (seqs, kv))
        if not seqs:
            return None
        steps = 1
        if not (preempted or self.partial or self.leaving or (self.queued and not self._known(self.waiting.head()))):
            steps = group.horizon(cache.available)
        run = group.run(self.timing, steps)
        op = ForwardPass(at, at + (run.after(steps) or 1), steps, step, seqs, [], 0, 0, run, 1, None)
        self._set_wake(op)
        return op

    def begin(self, request: EngineRequest, at: Nanos, cached: int) -> None:
        """Let a request run; ``cached``: tokens that the cache had, which count where it has never run before."""
        request.state = "prefilling"
        request.order = self.admissions
        self.admissions += 1
        if request.started is None:
            request.started = at
            request.cached = cached
            counters = self.counters
            own = cached
            for tier, tokens in request.sources.items():
                counters.tier_hits[tier] = counters.tier_hits.get(tier, 0) + tokens
                own -= tokens
            counters.prefix_queries += request.prompt
            counters.prefix_hits += own
            counters.prompt += request.prompt
            counters.prompt_cached += own
            if request.submit.media and not request.brought:
                self.encoder.admit(request.submit, cached)
            self.out.append(EngineStarted(id=request.submit.id, at=at, cached=cached))

    def _admit(self, at: Nanos, budget: int, prefills: list[tuple[EngineRequest, int]]) -> None:
        settings, cache = self.settings, self.cache
        size = settings.block_size
        running = len(self.group.members) + len(prefills) + (self.partial is not None and not prefills)
        running += len(self.leaving)
        while self.queued and running < settings.max_num_seqs and budget > 0:
            request = self.waiting.head()
            if self.planned is not None and not self._known(request):
                return
            known = request.prompt + request.generated
            hit = referenced = 0
            if settings.enable_prefix_caching:
                if request.generated:
                    self.holdings.extend_chain(request, known // size)
                # At least the last token is computed: its logits are the answer's beginning.
                hit = cache.depth(request.chain, min(len(request.chain), (known - 1) // size))
                if hit:
                    referenced = cache.referenced_depth(request.chain, hit)
            chunk = known - hit * size
            if chunk > budget and not request.remote:
                if settings.enable_chunked_prefill:
                    chunk = budget
                elif known <= settings.max_num_batched_tokens or prefills:
                    return
                # Without chunks, a prompt above the budget of any pass gets one of its own. Its cached blocks do not
                # count here, so that losing some never admits it: runs of steps rely on that.
            # Nothing preempts one whose KV is on its way: it may not have what a prompt that is part done still needs.
            reserved = remote_prefill.unfinished(self) if request.remote else 0
            if -(-known // size) - referenced > cache.available - self._spare - reserved:
                return
            tiers, more = self.tiers, 0
            if tiers is not None and not request.remote:
                more = kv_tiers.missing(self, tiers, request, at, hit)
            self.waiting.remove(request)
            self._count_waiting(request, -1)
            if hit:
                cache.hold(request.chain, 0, hit)
            if tiers is not None and more:
                kv_tiers.reserve(self, tiers, request, at, hit, more)
                continue
            if request.remote:
                remote_prefill.reserve(self, request, at, hit)
                continue
            self.begin(request, at, hit * size)
            request.named = hit
            request.computed = hit * size
            need = -(-(request.computed + chunk) // size) - hit
            self.holdings.take(need)
            request.private = need
            self.holdings.name(request, (request.computed + chunk) // size)
            prefills.append((request, chunk))
            budget -= chunk
            running += 1

    def _known(self, request: EngineRequest) -> bool:
        """Tell whether a request was there when the pass that begins was planned."""
        return self.planned is None or request.arrived <= self.planned

    def _complete(self, op: ForwardPass) -> None:
        self._commit(op, op.steps)
        if self.tiers is not None and self.holdings.fresh:
            kv_tiers.store(self, self.tiers, op.end)
        self.op = None
        self.ready = op.end
        if self.settings.async_scheduling:
            self.planned = op.after(op.steps - 1)
        if op.seqs:
            for request in self.group.ended():
                self.end(request, op.end)
        for request, chunk in op.prefills:
            if request.state != "prefilling":
                continue  # aborted meanwhile
            request.computed += chunk
            if request.computed < request.prompt + request.generated:
                self.partial = request
                continue
            if request is self.partial:
                self.partial = None
            request.generated += 1
            self.counters.generated += 1
            if request.paused is not None:
                if self.gaps is not None:
                    self.gaps.add(op.end - request.paused, 1)
                request.paused = None
            if request.first is None:
                request.first = op.end
                self.out.append(EngineFirstToken(id=request.submit.id, at=op.end))
            if request.generated >= request.target:
                self.end(request, op.end)
            else:
                self.group.join(request)
        if len(self.requests) == len(self.handoffs.pulling):
            self._let_leave()  # no request is left whose pass could have been planned

    def _commit(self, op: ForwardPass, done: int) -> None:
        """Account for an op up to its step ``done``."""
        run = op.run
        taken = done + 1 if done < op.steps else done
        if taken > op.taken:
            need = self.group.takes(op.first + op.taken, op.first + taken)
            if need:
                self.holdings.take(need)
                if self.holdings.changes:
                    self.out.append(self.holdings.take_changes(op.after(taken - 1)))
            op.taken = taken
        steps = done - op.done
        if not steps:
            return
        window = self.window
        begin, end = op.reached, op.after(done)
        if op.seqs:
            if op.last is None:
                seqs = op.seqs
                kv, squares = self.group.kv_sums(op.first + op.done, op.first + done)
            else:
                seqs, kv = op.last
                squares = kv * kv
            window["decode_seqs"] += steps * seqs
            window["decode_seqs_sq"] += steps * seqs * seqs
            window["decode_kv"] += kv
            window["decode_kv_sq"] += squares
            if self.gaps is not None:
                if run is None or steps == 1:
                    self.gaps.add(end - begin, seqs)
                else:
                    self.gaps.add_steps(run, op.done, done, begin - op.start, end - op.start, seqs)
            self.group.advance(steps)
        if op.tokens:
            window["prefill_tokens"] += op.tokens
            window["prefill_tokens_sq"] += op.tokens * op.tokens
            window["prefill_requests"] += op.prefilled
        window["passes"] += steps
        window["wall"] += end - begin
        if self.queued:
            window["queued_requests"] += steps * self.queued
            window["queued_prefill_tokens"] += steps * self.waiting_prefill
            window["queued_decode_kv"] += steps * self.waiting_decode
        self.counters.passes += steps
        op.done, op.reached = done, end

    def take_window(self) -> StepStats:
        """Return the sums since the last call, and begin a new window."""
        sums, self.window = self.window, dict.fromkeys(STEP_SUMS, 0)
        values: dict[str, Any] = {**sums, "wall": sums["wall"] / 1e9}
        return StepStats(**values)

    # --- preemption -------------------------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Give each sequence that decodes the blocks of its next step, in running order, preempting for them."""
        group, served, any_preempted = self.group, set[str](), False
        for request in list(group.members.values()):
            if request.state != "decoding":
                continue
            need = group.demand(request)
            while need > self.cache.available and request.state == "decoding":
                victim = self._victim()
                self._preempt(victim, victim.submit.id in served)
                any_preempted = True
            if request.state == "decoding":
                self.holdings.take(need)
                served.add(request.submit.id)
        return any_preempted

    def _victim(self) -> EngineRequest:
        """Return the request that gives up its blocks; at least one runs."""
        members = self.group.members
        if self.settings.scheduling_policy == "priority":
            running = list(members.values())
            if self.partial is not None:
                running.append(self.partial)
            return max(running, key=rank)
        if self.settings.preemption_mode == "lifo":
            return self.partial if self.partial is not None else members[next(reversed(members))]
        if members:
            return members[next(iter(members))]
        assert self.partial is not None
        return self.partial

    def _preempt(self, request: EngineRequest, stepping: bool) -> None:
        if request is self.partial:
            self.partial = None
        else:
            self._leave(request, stepping)
        self.cache.release(request.chain, request.named, request.private)
        request.state = "waiting"
        request.named = request.private = request.computed = request.brought = 0
        request.tried = False
        request.preemptions += 1
        if request.paused is None and request.generated:
            request.paused = self.ready
        self.counters.preemptions += 1
        self.window["preemptions"] += 1
        self.put_back(request)

    def _leave(self, request: EngineRequest, stepping: bool) -> None:
        before = request.generated
        self.group.leave(request, stepping)
        self.counters.generated += request.generated - before

    def _finish(self, request: EngineRequest, at: Nanos, reason: EndReason, retained: int = 0) -> None:
        if self.tiers is not None and request.named:
            # Its first blocks were stored first. Used last, they outlive the later ones, which are of no use without.
            self.tiers.use(request.chain, request.named, at)
            if request.submit.next_in is not None:
                self.tiers.expect(request.chain, request.named, at + nanos(request.submit.next_in))
        request.state = "gone"
        del self.requests[request.submit.id]
        self.counters.ended[reason] += 1
        self.out.append(
            EngineFinished(
                id=request.submit.id,
                at=at,
                reason=reason,
                tokens=request.generated,
                prompt=request.prompt,
                cached=request.cached,
                arrived=request.arrived,
                started=request.started,
                first=request.first,
                preemptions=request.preemptions,
                pulled=request.pulled,
                blocks_retained=retained,
                sources=request.sources,
            )
        )

    def _count_waiting(self, request: EngineRequest, sign: int) -> None:
        self.queued += sign
        if request.preemptions:
            self.waiting_decode += sign * request.tokens_so_far
        else:
            self.waiting_prefill += sign * request.prompt


def fits(settings: SimSettings, prompt: int, max_tokens: int) -> str | None:
    """Return why a request can never run, or None. ``prompt``, ``max_tokens``: tokens."""
    if prompt < 1 or max_tokens < 1:
        return "a request needs at least one prompt token and one output token"
    if prompt + max_tokens > settings.max_model_len:
        return f"{prompt} prompt tokens and {max_tokens} output tokens exceed max_model_len {settings.max_model_len}"
    most = prompt + max_tokens - 1 + settings.num_speculative_tokens
    blocks = -(-most // settings.block_size)
    usable = settings.blocks - settings.watermark_blocks
    if blocks > usable:
        return f"{blocks} blocks exceed the {usable} that a request can have"
    return None


def running(scheduler: Scheduler) -> Sequence[EngineRequest]:
    """Return all requests that hold blocks."""
    return [request for request in scheduler.requests.values() if request.state != "waiting"]
