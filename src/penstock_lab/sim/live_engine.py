"""Live engine: runs the engine machine in real time; a monotonic clock and a timer pace its token streams.

No token is made here: `penstock_lab.engine.engine.Engine` knows how many of a request's tokens are out at any time. The
timer wakes at the next end of a pass, or at the end of the engine's run of passes while no client streams.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.kernel.machine import MILLISECOND, Event, Nanos, Wake, Woken, nanos
from penstock.kernel.values import KvEvent, RequestId, StepStats
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import (
    AbortRequest,
    ClearCache,
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
from penstock_lab.engine.settings import SimSettings
from penstock_lab.engine.simulated_output import SimulatedOutput, Words
from penstock_lab.sim.sim_metrics import SimMetrics
from penstock_lab.sim.transfer.kv_transfer import KvTransferServer
from penstock_lab.simulate.tiers.tier_assembly import tiers_of
from penstock_lab.simulate.tiers.tier_plan import TierPlan

Publish = Callable[[list[KvEvent]], None]
TICK = 4 * MILLISECOND
"""Shortest time between two writes: what falls due together goes as one chunk, so that a fast engine costs less CPU."""
READERS_MAX = 64
"""Readers of step statistics that are remembered; the one idle for longest is forgotten."""


class TokenStream:
    """One answer on its way. ``out``: tokens that may be sent; ``news`` is set when there are more, or at the end.

    ``interval``: tokens after which the reader is woken; 0 where only the end matters.
    """

    __slots__ = ("answer", "arrived", "cached", "finished", "id", "interval", "news", "out", "prompt", "rejected")

    def __init__(self, id: str, prompt: int, news: asyncio.Event, interval: int, arrived: Nanos) -> None:
        self.id = id
        self.prompt = prompt
        self.news = news
        self.interval = interval
        self.arrived = arrived
        self.out = 0
        self.cached = 0
        self.answer: SimulatedOutput | None = None
        self.finished: EngineFinished | None = None
        self.rejected: str | None = None

    @property
    def over(self) -> bool:
        """Whether no more tokens will come."""
        return self.finished is not None or self.rejected is not None


class LiveEngine:
    """The engine of one server.

    Args:
        cache: simulated tiers below its memory, of this process alone.
        publish: takes the KV events of one change; None where they are not published.
    """

    def __init__(
        self,
        settings: SimSettings,
        *,
        words: Words,
        end: int | None,
        turn: int | None = None,
        table: Mapping[str, Any] | None = None,
        cache: TierPlan | None = None,
        publish: Publish | None = None,
    ) -> None:
        self.settings = settings
        tiers = partial(tiers_of, cache, table=table) if cache is not None and cache.host else None
        self.engine = Engine(settings, table=table, words=words, end=end, turn=turn, tiers=tiers)
        self.metrics = SimMetrics(settings.max_model_len)
        self.exchange = KvTransferServer(self)
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._origin = time.monotonic_ns()
        self._frozen: tuple[Nanos, int] | None = None
        self._streams: dict[str, TokenStream] = {}
        self._paced: dict[str, TokenStream] = {}
        self._wake: Nanos | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed: Nanos = 0
        self._reported_at: Nanos = 0
        self._windows: dict[str, StepStats | None] = {}

    def now(self) -> Nanos:
        """Return the engine's time: nanoseconds since it began, stalls left out."""
        clock = time.monotonic_ns()
        if self._frozen is not None:
            now, until = self._frozen
            if clock < until:
                return now
            self._origin, self._frozen = until - now, None
        return clock - self._origin

    def stall(self, duration: float) -> None:
        """Let the engine's clock stand still for so many seconds, as if its GPU hung (a fault switch of tests)."""
        self._frozen = (self.now(), time.monotonic_ns() + nanos(duration))
        self._arm(self.now())

    @property
    def load(self) -> int:
        """Requests that are not finished."""
        return len(self._streams)

    def submit(self, submit: SubmitRequest, news: asyncio.Event, interval: int, now: Nanos) -> TokenStream:
        """Submit a request; its stream is rejected at once where it can never run.

        Requests with one ``now`` (the answers to one HTTP request) begin in one pass.
        """
        stream = TokenStream(submit.id, submit.prompt_tokens, news, interval, now)
        self._streams[submit.id] = stream
        self._handle(now, submit)
        if not stream.over:
            stream.answer = self.engine.answer(submit.id)
            if interval:
                self._paced[submit.id] = stream
        self._arm(now)
        return stream

    def abort(self, stream: TokenStream) -> None:
        """Stop a request whose client is gone; one that is over stays as it is."""
        if not stream.over:
            self._tell(AbortRequest(id=RequestId(stream.id)))

    def pulled(self, id: str, ok: bool) -> None:
        """Continue a request whose KV has come, or, where not ``ok``, will not."""
        self._tell(KvPulled(id=RequestId(id), ok=ok))

    def release(self, id: str) -> None:
        """Release the KV that is held of a request for another engine."""
        self._tell(ReleaseKv(id=RequestId(id)))

    def clear(self) -> None:
        """Drop the cached blocks that no request uses."""
        self._tell(ClearCache())

    def step_stats(self, reader: str) -> StepStats:
        """Return what the engine did since this reader's last call; each reader has its own window."""
        window = self.engine.take_stats(self.now())
        for name, earlier in self._windows.items():
            self._windows[name] = window if earlier is None else earlier + window
        mine = self._windows.pop(reader, None) or window
        self._windows[reader] = None
        while len(self._windows) > READERS_MAX:
            del self._windows[next(iter(self._windows))]
        return mine

    async def close(self) -> None:
        """Stop the timer and all transfers; no stream gets tokens any more."""
        await self.exchange.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, event: Event) -> None:
        now = self.now()
        self._handle(now, event)
        self._arm(now)

    def _handle(self, now: Nanos, event: Event) -> None:
        for effect in self.engine.handle(now, event):
            if isinstance(effect, Wake):
                self._wake = effect.at
            elif isinstance(effect, KvChanged):
                if self._publish is not None:
                    self._publish(effect.events)
            elif isinstance(effect, EngineStarted):
                stream = self._streams[effect.id]
                stream.cached = effect.cached
            elif isinstance(effect, EngineFirstToken):
                self.metrics.first_token(effect.at - self._streams[effect.id].arrived)
            elif isinstance(effect, EngineFinished):
                self._end(effect.id).finished = effect
                self.metrics.finished(effect)
                self.exchange.ended(effect.id, effect)
            elif isinstance(effect, PullKv):
                self.exchange.pull(effect)
            elif isinstance(effect, EngineRejected):
                self._end(effect.id).rejected = effect.why
                self.exchange.ended(effect.id, None)

    def _end(self, id: str) -> TokenStream:
        stream = self._streams.pop(id)
        self._paced.pop(id, None)
        stream.news.set()
        return stream

    def _run(self) -> None:
        """Catch up with the clock and set for each stream how many tokens are out."""
        self._timer = None
        now = self.now()
        if self._wake is not None and self._wake <= now:
            self._wake = None
            self._handle(now, Woken())
        for id, stream in self._paced.items():
            out = self.engine.tokens_at(id, now)
            if out >= stream.out + stream.interval or (out and not stream.out):
                stream.out = out
                stream.news.set()
        self._reported_at = now
        self._arm(now)

    def _arm(self, now: Nanos) -> None:
        at = self._wake
        if at is None:
            return
        if self._paced:
            step = self.engine.next_step(now)
            if step is not None:
                at = min(at, max(step, self._reported_at + TICK))
        if self._frozen is not None:
            at = max(at, now) + self._frozen[1] - time.monotonic_ns()
        if self._timer is not None:
            if self._armed == at:
                return
            self._timer.cancel()
        self._armed = at
        self._timer = self._loop.call_later(max(0, at - now) / 1e9, self._run)
