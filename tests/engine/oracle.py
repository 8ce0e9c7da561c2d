"""What should the simulated engine do? The naive twin: one pass at a time, lists only, nothing in closed form.

It is written from the description in `penstock.engine.scheduler`, shares no code with it beyond block hashing, the
definition of the made-up answers and, for the kinds of timing that have tests of their own, how long one pass takes. It
is as slow as it looks.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from penstock.engine.events import Abort, ClearCache, Submit
from penstock.engine.output import Answer, accepted
from penstock.engine.settings import SimSettings
from penstock.engine.timing import timing_of
from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import Event


class Seq:
    """One request: all its blocks in a list, each a name or None."""

    def __init__(self, submit: Submit, number: int, settings: SimSettings) -> None:
        self.submit, self.number = submit, number
        self.prompt = submit.isl if submit.tokens is None else len(submit.tokens)
        self.answer = Answer(submit, settings)
        self.out = 0
        self.computed = 0
        self.blocks: list[int | None] = []
        self.decode_steps = 0
        self.decodes = False  # from the end of its prefill on, also of the prefill after a preemption
        self.started = False
        self.first = False
        self.preempted = 0
        self.key = (submit.priority, number)

    @property
    def known(self) -> int:
        return self.prompt + self.out


class Oracle:
    def __init__(self, settings: SimSettings, table: Mapping[str, Any] | None = None) -> None:
        self.s = settings
        self.timing = timing_of(settings.timing, settings.capacity, table)
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []
        self.free = settings.kv_blocks
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
        events = sorted(events, key=lambda pair: pair[0])
        now, tries = 0, 0
        while True:
            while events and events[0][0] <= now:
                self.event(*events.pop(0))
            if not self.waiting and not self.running:
                if not events:
                    return
                now = events[0][0]
                continue
            work = self.schedule(now)
            if not work:
                tries += 1
                assert tries < 1000, "no progress"
                continue
            tries = 0
            end = now + max(1, round(self.duration(work)))
            reads = [seq.known for seq, n, decode in work if decode]
            new = [n for seq, n, decode in work if not decode]
            while events and events[0][0] < end:
                self.event(*events.pop(0))
            self.passes += 1
            self.queued += len(self.waiting)
            self.prefill_tokens += sum(new)
            self.decode_seqs += len(reads)
            self.decode_kv += sum(reads)
            self.decode_kv_sq += sum(reads) ** 2
            self.finish_pass(work, end)
            now = end

    def event(self, now: int, event: Event) -> None:
        if isinstance(event, Submit):
            seq = Seq(event, self.number, self.s)
            total = seq.prompt + event.max_tokens
            need = ceil((total - 1 + self.s.speculative_tokens) / self.s.block_size)
            usable = self.s.kv_blocks - int(self.s.kv_blocks * self.s.watermark)
            taken = any(event.id == other.submit.id for other in self.running + self.waiting)
            if seq.prompt < 1 or event.max_tokens < 1 or total > self.s.max_len or need > usable or taken:
                self.told.append(("rejected", event.id, now, None))
                return
            self.number += 1
            self.waiting.append(seq)
            self.tokens_out[event.id] = []
            if self.s.scheduling == "priority":
                self.waiting.sort(key=lambda seq: seq.key)
        elif isinstance(event, Abort):
            for line in (self.waiting, self.running):
                for seq in line:
                    if seq.submit.id == event.id:
                        line.remove(seq)
                        self.drop(seq)
                        self.told.append(("abort", event.id, now, seq.out))
                        return
        elif isinstance(event, ClearCache):
            if not self.refs:
                self.note(now, ("cleared",))
            else:
                for name in self.idle:
                    self.note(now, ("removed", name))
            self.free += len(self.idle)
            self.idle = []

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
        if not self.s.prefix_caching:
            return []
        submit = seq.submit
        if submit.blocks is not None and submit.tokens is None:
            return list(submit.blocks)[: min(tokens, seq.prompt) // self.s.block_size]
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

    def schedule(self, now: int) -> list[tuple[Seq, int, bool]]:
        s = self.s
        work: list[tuple[Seq, int, bool]] = []
        budget = s.max_batched_tokens
        preempted = False
        for seq in list(self.running):
            if seq not in self.running:
                continue
            decode = seq.decodes
            if decode:
                spent = 1 + s.speculative_tokens
                n, slots = 1, seq.computed + spent
                assert spent <= budget
            else:
                n = spent = min(seq.known - seq.computed, budget)
                slots = seq.computed + n
            while ceil(slots / s.block_size) - len(seq.blocks) > self.available():
                preempted = True
                if s.scheduling == "priority":
                    victim = max(self.running, key=lambda other: other.key)
                else:
                    victim = self.running[-1 if s.preemption == "lifo" else 0]
                for entry in work:
                    if entry[0] is victim:
                        work.remove(entry)
                        budget += 1 + s.speculative_tokens if entry[2] else entry[1]
                        break
                self.running.remove(victim)
                self.drop(victim)
                victim.preempted += 1
                self.waiting.insert(0, victim)
                if s.scheduling == "priority":
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
        while self.waiting and not preempted and len(self.running) < s.max_seqs and budget > 0:
            seq = self.waiting[0]
            hit = 0
            for name in self.hashes(seq, seq.known - 1):
                if name not in self.refs and name not in self.idle:
                    break
                hit += 1
            names = self.hashes(seq, seq.known - 1)[:hit]
            n = seq.known - hit * s.block_size
            if n > budget:
                if s.chunked_prefill:
                    n = budget
                elif seq.known <= s.max_batched_tokens or any(not decode for _, _, decode in work):
                    break
            whole = ceil(seq.known / s.block_size) - sum(name in self.refs for name in names)
            if whole > self.available() - int(s.kv_blocks * s.watermark):
                break
            self.waiting.pop(0)
            self.running.append(seq)
            for name in names:
                if name in self.idle:
                    self.idle.remove(name)
                self.refs[name] = self.refs.get(name, 0) + 1
                seq.blocks.append(name)
            seq.computed = hit * s.block_size
            self.take(seq, ceil((seq.computed + n) / s.block_size) - hit, now)
            self.name(seq, seq.computed + n, now)
            if not seq.started:
                seq.started = True
                self.told.append(("started", seq.submit.id, now, hit * s.block_size))
            work.append((seq, n, False))
            budget -= n
        return work

    def duration(self, work: list[tuple[Seq, int, bool]]) -> float:
        t = self.s.timing
        new = sum(n for _, n, decode in work if not decode)
        reads = [seq.known for seq, _, decode in work if decode]
        if t.kind in ("roofline", "operators"):
            chunks = [(seq.computed, n) for seq, n, decode in work if not decode]
            return self.timing.mixed(new, chunks, sum(reads), len(reads))
        ms = 0.0
        if t.kind == "constant":
            if new:
                ms += t.constant_prefill_ms + t.constant_prefill_token_ms * new
            if reads:
                ms += t.constant_decode_ms
        else:
            if new:
                ms += t.prefill_quadratic * new * new + t.prefill_linear * new + t.prefill_base
            if reads:
                u = min(1.0, sum(reads) / (self.s.kv_blocks * self.s.block_size))
                ms += max(1.0, t.decode_quadratic * u * u + t.decode_linear * u + t.decode_base)
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
            if decode and self.s.speculative_tokens:
                ladder = accepted(seq.answer.key, self.s.accept_rate, self.s.speculative_tokens, seq.answer.length)
                gain = int(ladder[seq.decode_steps + 1] - ladder[seq.decode_steps])
                gain = min(gain, seq.answer.length - seq.out)
                seq.decode_steps += 1
                seq.computed += gain - 1
            seq.out += gain
            self.tokens_out[seq.submit.id] += [end] * gain
            if not seq.first:
                seq.first = True
                self.told.append(("first", seq.submit.id, end, None))
            if seq.out >= seq.answer.length:
                self.running.remove(seq)
                self.drop(seq)
                self.told.append((seq.answer.reason, seq.submit.id, end, seq.out))
