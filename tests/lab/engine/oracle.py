"""What should the simulated engine do? The naive twin: one pass at a time, lists only, nothing in closed form.

It is written from the description in `penstock_lab.engine.scheduler`, shares no code with it beyond block hashing, the
definition of the made-up answers and, for the kinds of timing that have tests of their own, how long one pass takes. It
is as slow as it looks.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import Event
from penstock_lab.engine.events import AbortRequest, ClearCache, KvPulled, ReleaseKv, SubmitRequest
from penstock_lab.engine.settings import SimSettings
from penstock_lab.engine.simulated_output import SimulatedOutput, accepted
from penstock_lab.engine.timing.timing_model import timing_of


class Seq:
    """One request: all its blocks in a list, each a name or None."""

    def __init__(self, submit: SubmitRequest, number: int, settings: SimSettings) -> None:
        self.submit, self.number = submit, number
        self.prompt = submit.prompt_tokens
        self.answer = SimulatedOutput(submit, settings)
        self.out = 0
        self.computed = 0
        self.blocks: list[int | None] = []
        self.decode_steps = 0
        self.decodes = False  # from the end of its prefill on, also of the prefill after a preemption
        self.started = False
        self.first = False
        self.preempted = 0
        self.remote = min(submit.remote, self.prompt)
        self.brought = 0
        self.hit = 0
        self.key = (submit.priority, number)

    @property
    def known(self) -> int:
        return self.prompt + self.out


Pulls = Mapping[str, tuple[int, bool]]
"""How long the KV of a request is on its way, and whether it comes; what is not here never comes."""


class Oracle:
    def __init__(
        self, settings: SimSettings, table: Mapping[str, Any] | None = None, pulls: Pulls | None = None
    ) -> None:
        self.s = settings
        self.pulls = pulls or {}
        self.events: list[tuple[int, Event]] = []
        self.heard: list[tuple[int, Event]] = []
        self.pulling: list[Seq] = []
        self.landed: list[Seq] = []
        self.held: list[tuple[int, Seq]] = []  # (until, request that has ended)
        self.expired = 0
        self.failed = 0
        self.pulled = 0
        self.timing = timing_of(settings.timing, settings.capacity, table)
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.free = settings.blocks
        self.refs: dict[int, int] = {}
        self.idle: list[int] = []
        self.told: list[tuple] = []  # (what, id or None, time, more)
        self.kv: list[tuple] = []  # ("stored", hash, parent) or ("removed", hash) or ("cleared",)
        self.kv_times: list[int] = []
        self.tokens_out: dict[str, list[int]] = {}  # time of every token
        self.passes = 0
        self.prefill_tokens = 0
        self.decode_kv = 0
        self.decode_kv_sq = 0
        self.decode_seqs = 0
        self.queued = 0
        self.number = 0

    # --- the clock --------------------------------------------------------------------------------------------------

    def run(self, events: list[tuple[int, Event]]) -> None:
        self.events = events = sorted(events, key=lambda pair: pair[0])
        now = 0
        while True:
            self.happen(now + 1)
            work, preempted = [], False
            if self.waiting or self.landed or self.running:
                work, preempted = self.schedule(now)
            if not work:
                if preempted:
                    continue
                ahead = [at for at, _ in events[:1]] + [until for until, _ in self.held[:1]]
                if not ahead:
                    assert not self.waiting and not self.landed and not self.running, "no progress"
                    return
                now = min(ahead)
                continue
            end = now + max(1, round(self.duration(work)))
            reads = [seq.known for seq, n, decode in work if decode]
            new = [n for seq, n, decode in work if not decode]
            self.happen(end)
            self.passes += 1
            self.queued += len(self.waiting)
            self.prefill_tokens += sum(new)
            self.decode_seqs += len(reads)
            self.decode_kv += sum(reads)
            self.decode_kv_sq += sum(reads) ** 2
            self.finish_pass(work, end)
            now = end

    def happen(self, before: int) -> None:
        while True:
            if self.held and self.held[0][0] < before and (not self.events or self.held[0][0] <= self.events[0][0]):
                self.expired += 1
                self.drop(self.held.pop(0)[1])
            elif self.events and self.events[0][0] < before:
                self.event(*self.events.pop(0))
            else:
                return

    def event(self, now: int, event: Event) -> None:
        self.heard.append((now, event))
        if isinstance(event, SubmitRequest):
            seq = Seq(event, self.number, self.s)
            total = seq.prompt + (min(1, event.max_tokens) if event.hold else event.max_tokens)
            need = ceil((total - 1 + self.s.num_speculative_tokens) / self.s.block_size)
            usable = self.s.blocks - int(self.s.blocks * self.s.watermark)
            there = self.running + self.waiting + self.pulling + self.landed + [seq for _, seq in self.held]
            taken = any(event.id == other.submit.id for other in there)
            if seq.prompt < 1 or event.max_tokens < 1 or total > self.s.max_model_len or need > usable or taken:
                self.told.append(("rejected", event.id, now, None))
                return
            self.number += 1
            self.waiting.append(seq)
            self.tokens_out[event.id] = []
            if self.s.scheduling_policy == "priority":
                self.waiting.sort(key=lambda seq: seq.key)
        elif isinstance(event, AbortRequest):
            for line in (self.waiting, self.running, self.pulling, self.landed):
                for seq in line:
                    if seq.submit.id == event.id:
                        line.remove(seq)
                        self.drop(seq)
                        self.told.append(("abort", event.id, now, (seq.out, 0)))
                        return
        elif isinstance(event, ReleaseKv):
            for entry in self.held:
                if entry[1].submit.id == event.id:
                    self.held.remove(entry)
                    self.drop(entry[1])
                    return
        elif isinstance(event, KvPulled):
            for seq in self.pulling:
                if seq.submit.id == event.id:
                    self.pulling.remove(seq)
                    self.arrive(seq, now, event.ok)
                    return
        elif isinstance(event, ClearCache):
            if not self.refs:
                self.note(now, ("cleared",))
            else:
                for name in self.idle:
                    self.note(now, ("removed", name))
            self.free += len(self.idle)
            self.idle = []

    def arrive(self, seq: Seq, now: int, ok: bool) -> None:
        if ok:
            reach = max(seq.computed, seq.remote)
            seq.computed = min(seq.prompt - 1, reach)
            self.name(seq, reach, now)
            self.landed.append(seq)
            self.landed.sort(key=lambda seq: seq.key if self.s.scheduling_policy == "priority" else (0, 0))
        else:
            self.failed += 1
            self.drop(seq)
            seq.brought = 0
            self.waiting.insert(0, seq)
            if self.s.scheduling_policy == "priority":
                self.waiting.sort(key=lambda seq: seq.key)
        seq.remote = 0

    # --- blocks -----------------------------------------------------------------------------------------------------

    def note(self, now: int, change: tuple) -> None:
        self.kv.append(change)
        self.kv_times.append(now)

    def available(self) -> int:
        return self.free + len(self.idle)

    def take(self, seq: Seq, count: int, now: int) -> None:
        for _ in range(count):
            if self.free == 0:
                self.note(now, ("removed", self.idle.pop(0)))
                self.free += 1
            self.free -= 1
            seq.blocks.append(None)

    def drop(self, seq: Seq) -> None:
        for name in reversed(seq.blocks):
            if name is None:
                self.free += 1
                continue
            self.refs[name] -= 1
            if self.refs[name] == 0:
                del self.refs[name]
                self.idle.append(name)
        seq.blocks = []
        seq.computed = 0
        seq.decodes = False

    def hashes(self, seq: Seq, tokens: int) -> list[int]:
        """Return the names of the full blocks among the first ``tokens`` tokens, as far as they have any."""
        if not self.s.enable_prefix_caching:
            return []
        submit = seq.submit
        if submit.prompt is not None and submit.tokens is None:
            return list(submit.prompt.blocks)[: min(tokens, seq.prompt) // self.s.block_size]
        if submit.tokens is None:
            return []
        text = list(submit.tokens)
        if self.s.emit_decode_blocks and tokens > seq.prompt:
            text += seq.answer.upto(tokens - seq.prompt)
        return block_hashes(text[:tokens], self.s.block_size, lora=submit.lora, salt=submit.salt)

    def name(self, seq: Seq, tokens: int, now: int) -> None:
        names = self.hashes(seq, tokens)
        for i, name in enumerate(names):
            if seq.blocks[i] is not None:
                continue
            if name in self.refs:
                self.refs[name] += 1
                self.free += 1
            elif name in self.idle:
                self.idle.remove(name)
                self.refs[name] = 1
                self.free += 1
            else:
                self.refs[name] = 1
                self.note(now, ("stored", name, names[i - 1] if i else None))
            seq.blocks[i] = name

    # --- a pass -----------------------------------------------------------------------------------------------------

    def schedule(self, now: int) -> tuple[list[tuple[Seq, int, bool]], bool]:
        s = self.s
        work: list[tuple[Seq, int, bool]] = []
        budget = s.max_num_batched_tokens
        preempted = False
        for seq in list(self.running):
            if seq not in self.running:
                continue
            decode = seq.decodes
            if decode:
                spent = 1 + s.num_speculative_tokens
                n, slots = 1, seq.computed + spent
                assert spent <= budget
            else:
                n = spent = min(seq.known - seq.computed, budget)
                slots = seq.computed + n
            while ceil(slots / s.block_size) - len(seq.blocks) > self.available():
                preempted = True
                if s.scheduling_policy == "priority":
                    victim = max(self.running, key=lambda other: other.key)
                else:
                    victim = self.running[-1 if s.preemption_mode == "lifo" else 0]
                for entry in work:
                    if entry[0] is victim:
                        work.remove(entry)
                        budget += 1 + s.num_speculative_tokens if entry[2] else entry[1]
                        break
                self.running.remove(victim)
                self.drop(victim)
                victim.preempted += 1
                victim.brought = 0
                self.waiting.insert(0, victim)
                if s.scheduling_policy == "priority":
                    self.waiting.sort(key=lambda other: other.key)
                if victim is seq:
                    break
            if seq not in self.running:
                continue
            self.take(seq, max(0, ceil(slots / s.block_size) - len(seq.blocks)), now)
            budget -= spent
            if n:
                work.append((seq, n, decode))
        for seq, n, _ in work:
            # The blocks that are full of known tokens; drafts are not known.
            self.name(seq, seq.computed + n, now)
        while self.landed and not preempted and len(self.running) < s.max_num_seqs and budget > 0:
            seq = self.landed[0]
            n = seq.known - seq.computed
            if n > budget:
                if s.enable_chunked_prefill:
                    n = budget
                elif n <= s.max_num_batched_tokens or any(not decode for _, _, decode in work):
                    break
            self.running.append(self.landed.pop(0))
            self.name(seq, seq.computed + n, now)
            seq.started = True
            self.pulled += seq.brought
            cached = seq.hit * s.block_size if s.transfer.pull == "missing" else 0
            self.told.append(("started", seq.submit.id, now, cached))
            work.append((seq, n, False))
            budget -= n
        while self.waiting and not preempted and len(self.running) < s.max_num_seqs and budget > 0:
            seq = self.waiting[0]
            hit = 0
            for name in self.hashes(seq, seq.known - 1):
                if name not in self.refs and name not in self.idle:
                    break
                hit += 1
            names = self.hashes(seq, seq.known - 1)[:hit]
            n = seq.known - hit * s.block_size
            if n > budget and not seq.remote:
                if s.enable_chunked_prefill:
                    n = budget
                elif seq.known <= s.max_num_batched_tokens or any(not decode for _, _, decode in work):
                    break
            whole = ceil(seq.known / s.block_size) - sum(name in self.refs for name in names)
            if seq.remote:
                for other in self.running:
                    if not other.decodes:
                        whole += max(0, ceil(other.known / s.block_size) - len(other.blocks))
            if whole > self.available() - int(s.blocks * s.watermark):
                break
            self.waiting.pop(0)
            for name in names:
                if name in self.idle:
                    self.idle.remove(name)
                self.refs[name] = self.refs.get(name, 0) + 1
                seq.blocks.append(name)
            seq.computed = hit * s.block_size
            if seq.remote:
                self.take(seq, ceil(seq.prompt / s.block_size) - hit, now)
                seq.hit = hit
                cached = seq.computed if s.transfer.pull == "missing" else 0
                seq.brought = max(0, seq.remote - cached)
                self.pulling.append(seq)
                self.told.append(("pull", seq.submit.id, now, seq.brought))
                if seq.submit.id in self.pulls:
                    wait, ok = self.pulls[seq.submit.id]
                    self.events.append((now + wait, KvPulled(id=seq.submit.id, ok=ok)))
                    self.events.sort(key=lambda pair: pair[0])
                continue
            self.running.append(seq)
            self.take(seq, ceil((seq.computed + n) / s.block_size) - hit, now)
            self.name(seq, seq.computed + n, now)
            if not seq.started:
                seq.started = True
                self.told.append(("started", seq.submit.id, now, hit * s.block_size))
            work.append((seq, n, False))
            budget -= n
        return work, preempted

    def duration(self, work: list[tuple[Seq, int, bool]]) -> float:
        t = self.s.timing
        # The last token of a prompt that was brought reads what a decoding one would.
        rows = [decode or (n == 1 and seq.brought > 0) for seq, n, decode in work]
        new = sum(n for (_, n, _), row in zip(work, rows, strict=True) if not row)
        reads = [seq.known for (seq, _, _), row in zip(work, rows, strict=True) if row]
        if t.kind in ("roofline", "operators"):
            chunks = [(seq.computed, n) for (seq, n, _), row in zip(work, rows, strict=True) if not row]
            return (
                self.timing.decode(sum(reads), len(reads))
                if not chunks
                else self.timing.mixed(new, chunks, sum(reads), len(reads))
            )
        ms = 0.0
        if new:
            ms += t.prefill[0] * new * new + t.prefill[1] * new + t.prefill[2]
        if reads:
            u = min(1.0, sum(reads) / (self.s.blocks * self.s.block_size))
            ms += max(1.0, t.decode[0] * u * u + t.decode[1] * u + t.decode[2])
        return ms * 1e6 / t.speed_up

    def finish_pass(self, work: list[tuple[Seq, int, bool]], end: int) -> None:
        for seq, n, decode in work:
            if seq not in self.running:
                continue  # aborted meanwhile
            seq.computed += n
            if seq.computed < seq.known:
                continue
            seq.decodes = True
            gain = 1
            if decode and self.s.num_speculative_tokens:
                ladder = accepted(seq.answer.key, self.s.accept_rate, self.s.num_speculative_tokens, seq.answer.length)
                gain = int(ladder[seq.decode_steps + 1] - ladder[seq.decode_steps])
                gain = min(gain, seq.answer.length - seq.out)
                seq.decode_steps += 1
                seq.computed += gain - 1
            seq.out += gain
            self.tokens_out[seq.submit.id] += [end] * gain
            if not seq.first:
                seq.first = True
                self.told.append(("first", seq.submit.id, end, None))
            if seq.out >= (1 if seq.submit.hold else seq.answer.length):
                self.running.remove(seq)
                reason = seq.answer.reason if seq.out >= seq.answer.length else "length"
                if seq.submit.hold and reason == "length":
                    self.held.append((end + round(self.s.transfer.hold_timeout * 1e9), seq))
                    self.told.append((reason, seq.submit.id, end, (seq.out, len(seq.blocks))))
                    continue
                self.drop(seq)
                self.told.append((reason, seq.submit.id, end, (seq.out, 0)))
