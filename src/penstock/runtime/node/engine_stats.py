"""Engine statistics: reads every engine's step statistics once per window, and sums them for each reader.

A planner is one reader, the status page another: each takes the sum since its last call.

vLLM reports how many sequences decoded, not how much KV they read, and how many requests wait, not how many tokens that
is. The router knows each request's prompt, when its first token came, and which have none yet. Some samples of that per
window give both; docs/guides/engines.md has the errors.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.dialects.kv_transfer_protocol import lease_of
from penstock.adapters.engines.http.engine_http import EngineServer
from penstock.adapters.engines.stats.step_stats_source import Source, StepSource, steps_of
from penstock.adapters.http_session import HttpSession
from penstock.config.settings.cluster_settings import EngineStatsSettings
from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.plurals import counted
from penstock.kernel.tiers.load_worth import LoadCosts, costs_in
from penstock.kernel.values import TIERS_LABEL, StepStats, WorkerCard, WorkerId
from penstock.router.status_rows import StatusFinding, StepsStatus
from penstock.router.workers.active import Active

log = logging.getLogger("penstock.stats")
LOOKS = 8
"""Samples of the router's requests per window, for the estimates."""
ASKED_MAX = 50
"""Engines asked per second: each costs some 0.3 ms of CPU here. The windows of a larger fleet are longer."""
READERS_MAX = 16
"""Readers that are remembered; the one idle for longest is forgotten."""


@dataclass(frozen=True, slots=True)
class LoadLook:
    """One sample of an engine's requests.

    ``decoding``: those with a first token; ``decode_kv``: KV tokens of theirs that are known; ``ages`` seconds, summed,
    in which each has made tokens that are not counted in ``decode_kv``. ``silent``: prompt tokens (cached ones
    included, as engines count their queue) and seconds since dispatch, of each request without a token yet, the oldest
    first: it waits, is prefilled, or makes tokens that come all at once at the end.
    """

    decoding: int
    decode_kv: float
    ages: float
    silent: tuple[tuple[float, float], ...] = ()


def look(requests: Iterable[Active], block_size: int, now: Nanos) -> LoadLook:
    """Sample the requests that occupy an engine. Cost: O(requests)."""
    decoding = 0
    decode_kv = ages = 0.0
    silent: list[tuple[float, float]] = []
    for active in requests:
        # The last block of a prompt is half full, on average.
        prompt = (len(active.blocks) + (active.unhashed_blocks - 0.5 if active.unhashed_blocks else 0.0)) * block_size
        age = (now - active.touched) / SECOND
        if active.prefill_tokens:
            silent.append((prompt, age))
        else:
            decoding += 1
            decode_kv += prompt + active.output_blocks * block_size
            ages += age
    return LoadLook(decoding, decode_kv, ages, tuple(silent))


def completed(window: StepStats, looks: Sequence[LoadLook]) -> StepStats:
    """Return a window with estimates added, and named in ``estimated``.

    Args:
        looks: samples of the same engine, spread evenly over the window; without any nothing is estimated.
    """
    if not looks or not window.passes:
        return window
    if window.decode_seqs is not None:
        running, wait = window.decode_seqs / window.passes, _queue_wait(window)
        looks = [_with_silent_decodes(one, running, wait) for one in looks]
    estimates: dict[str, int] = {}
    if window.decode_kv is None and window.decode_seqs is not None:
        kv = _kv_per_sequence(window, looks)
        if kv is not None:
            estimates["decode_kv"] = round(window.decode_seqs * kv)
    if window.queued_prefill_tokens is None and window.queued_requests is not None:
        prompt = _waiting_prompt(looks)
        if prompt is not None or not window.queued_requests:
            estimates["queued_prefill_tokens"] = round(window.queued_requests * (prompt or 0.0))
    if not estimates:
        return window
    return msgspec.structs.replace(window, **estimates, estimated=tuple(sorted({*window.estimated, *estimates})))


def _queue_wait(window: StepStats) -> float:
    """Return how long a request waits in the engine, in seconds: the queue's length by the rate at which it moves."""
    if not window.queued_requests or not window.prefill_requests or not window.wall:
        return 0.0
    return window.queued_requests / window.passes * window.wall / window.prefill_requests


def _with_silent_decodes(one: LoadLook, running: float, wait: float) -> LoadLook:
    """Count the oldest silent requests as decoding, where the engine decodes more than have a first token.

    An answer that is not streamed is silent until its end; the request sent first is the likeliest to be decoding,
    for as long as it did not wait.
    """
    more = min(round(running) - one.decoding, len(one.silent))
    if more <= 0:
        return one
    decode_kv = one.decode_kv + sum(prompt for prompt, _ in one.silent[:more])
    ages = one.ages + sum(max(0.0, age - wait) for _, age in one.silent[:more])
    return LoadLook(one.decoding + more, decode_kv, ages, one.silent[more:])


def _kv_per_sequence(window: StepStats, looks: Sequence[LoadLook]) -> float | None:
    """Return the KV tokens that a decoding sequence reads in a pass, on average."""
    sequences = sum(one.decoding for one in looks)
    if not sequences:
        return None if window.decode_seqs else 0.0
    decode_kv = sum(one.decode_kv for one in looks)
    if window.wall:
        # A pass gives a sequence one token, so its age in passes is the length of its output.
        decode_kv += sum(one.ages for one in looks) * window.passes / window.wall
    return decode_kv / sequences


def _waiting_prompt(looks: Sequence[LoadLook]) -> float | None:
    """Return the mean prompt of requests without a first token, or, where no sample has one, of those that decode."""
    silent = [prompt for one in looks for prompt, _ in one.silent]
    if silent:
        return sum(silent) / len(silent)
    count = sum(one.decoding for one in looks)
    return sum(one.decode_kv for one in looks) / count if count else None


Looker = Callable[[Sequence[WorkerId]], Sequence[LoadLook]]


@dataclass(frozen=True, slots=True)
class StatsWindow:
    """The last window of one engine. ``seconds``: how long it was; ``at``: monotonic seconds of its end."""

    steps: StepStats
    source: Source
    seconds: float
    at: float


@dataclass(slots=True)
class _WatchedEngine:
    card: WorkerCard
    source: StepSource
    since: float
    turn: int = 0
    """In which it was asked last."""
    pending: bool = False
    """Whether its answer is on the way."""
    samples: list[LoadLook] = field(default_factory=list)
    last: StatsWindow | None = None
    expired: list[float] = field(default_factory=list)
    """The engine's count of requests whose KV expired: at first, and now."""
    costs: LoadCosts | None = None
    unread: dict[str, StepStats] = field(default_factory=dict)
    """Reader -> the sum that it has not taken yet."""


class EngineStats:
    """The passes of every engine.

    Args:
        look: returns a sample of the requests that the router has placed on each of some workers.
        reader: this frontend's name towards simulated engines.
        priced: takes what loading from its tiers costs an engine, whenever that has changed.
    """

    def __init__(
        self,
        settings: EngineStatsSettings,
        look: Looker,
        reader: str,
        http: HttpSession | None = None,
        priced: Callable[[WorkerId, LoadCosts], object] = lambda worker, costs: None,
    ) -> None:
        self.failures = 0
        """Windows in which an engine could not be read."""
        self._settings = settings
        self._look = look
        self._reader = reader
        self._priced = priced
        self._watched: dict[WorkerId, _WatchedEngine] = {}
        self._asks = BackgroundTasks()
        self._turns = 0
        self._readers: dict[str, None] = {}
        self._http = http or HttpSession()

    def start(self, card: WorkerCard) -> None:
        """Begin to follow an engine."""
        self.stop(card)
        if self._settings.interval:
            source = steps_of(card, self._http.session, self._reader)
            turn = self._turns - len(self._watched) % LOOKS  # those that join together are asked one after another
            self._watched[card.id] = _WatchedEngine(card, source, time.monotonic(), turn=turn)

    def stop(self, card: WorkerCard) -> None:
        """Follow an engine no more."""
        watched = self._watched.pop(card.id, None)
        if watched is not None:
            watched.source.close()

    async def run(self) -> None:
        """Read every engine once per interval, a few at a time, until cancelled."""
        pause = self._settings.interval / LOOKS
        try:
            while pause:
                await asyncio.sleep(pause)
                self.turn(math.ceil(ASKED_MAX * pause))
        finally:
            await self._asks.close()

    def turn(self, most: int) -> None:
        """Let the eighth part of a window pass: look at engines, and begin to ask those whose turn it is.

        Args:
            most: engines that are asked in such a time; where there are more, their windows are longer.
        """
        engines = list(self._watched.values())
        apart = max(1, round(len(engines) / LOOKS / most))  # looks are rarer where windows are longer
        self._turns += 1
        looked_at = engines[self._turns % apart :: apart]
        for watched, look in zip(looked_at, self._look([each.card.id for each in looked_at]), strict=True):
            watched.samples.append(look)
        due = [watched for watched in engines if watched.turn <= self._turns - LOOKS and not watched.pending]
        for watched in sorted(due, key=lambda each: each.turn)[:most]:
            watched.turn, watched.pending = self._turns, True
            self._asks.spawn(self._ask(watched), f"passes-of-{watched.card.id}")

    def last(self, worker: WorkerId) -> StatsWindow | None:
        """Return the last window of an engine, or None where there is none yet."""
        watched = self._watched.get(worker)
        return None if watched is None else watched.last

    def findings(self) -> Iterator[StatusFinding]:
        """Yield on which engines KV expired since they are watched: whoever fetched it later may have got another's."""
        for worker, watched in self._watched.items():
            count = round(watched.expired[-1] - watched.expired[0]) if watched.expired else 0
            if count:
                yield StatusFinding(
                    "warning",
                    f"KV of {counted(count, 'request')} expired on {worker} after its lease of "
                    f"{lease_of(watched.card):g} s, before another engine had fetched it",
                    "decode workers are behind or stood still: start it with a longer kv_lease_duration, and say so in "
                    "its label kv_lease",
                )

    def take(self, reader: str) -> dict[WorkerId, StepStats]:
        """Return what every engine did since this reader's last call; engines without a report are absent."""
        known = reader in self._readers
        self._readers.pop(reader, None)
        self._readers[reader] = None
        while len(self._readers) > READERS_MAX:
            del self._readers[next(iter(self._readers))]
        windows: dict[WorkerId, StepStats] = {}
        for worker, watched in self._watched.items():
            steps = watched.unread.pop(reader, None)
            if steps is not None:
                windows[worker] = steps
            elif not known and watched.last is not None:
                windows[worker] = watched.last.steps
        return windows

    def status(self, worker: WorkerId) -> StepsStatus | None:
        """Return an engine's last window for operators: rates and means; None where there is none."""
        window = self.last(worker)
        return None if window is None else described(window, time.monotonic())

    async def close(self) -> None:
        for watched in self._watched.values():
            watched.source.close()
        self._watched.clear()
        await self._http.close()

    async def _read_metrics(self, watched: _WatchedEngine) -> None:
        """Read what an engine's page alone says: KV that it held for others in vain, and the costs of its tiers."""
        card, name = watched.card, dialect_of(watched.card.engine).counters.kv_expired
        name = name if card.role == "prefill" else None
        if name is None and TIERS_LABEL not in card.labels:
            return
        page = await EngineServer(self._http.session, card.url).text("/metrics")
        found = {} if page is None else samples(page)
        now = None if name is None else found.get(name)
        if now is not None and math.isfinite(now):
            watched.expired = [*watched.expired[:1], now] if now >= sum(watched.expired[:1]) else [now]
        costs = costs_in(found)
        if costs is not None and costs != watched.costs:
            watched.costs = costs
            self._priced(card.id, costs)

    async def _ask(self, watched: _WatchedEngine) -> None:
        looks, watched.samples = watched.samples, []
        busy = any(look.decoding or look.silent for look in looks)
        try:
            await self._read_metrics(watched)
            steps = await watched.source.take(busy=busy)
        except Exception:  # supervision boundary: one engine's bad answer must not end the statistics of all
            log.exception("the passes of %s could not be read", watched.card.id)
            steps = None
        finally:
            watched.pending = False
        now = time.monotonic()
        seconds, watched.since = now - watched.since, now
        if steps is None:
            self.failures += watched.source.source != "none"
            return
        steps = completed(steps, looks)
        watched.last = StatsWindow(steps, watched.source.source, seconds, now)
        for reader in self._readers:
            unread = watched.unread.get(reader)
            watched.unread[reader] = steps if unread is None else unread + steps
        for ended in [reader for reader in watched.unread if reader not in self._readers]:
            del watched.unread[ended]


def described(window: StatsWindow, now: float) -> StepsStatus:
    """Return a window for the status: means of a pass, tokens per second; unknown is None.

    Keys of what was measured begin with ``wall``.
    """
    steps = window.steps
    return StepsStatus(
        source=window.source,
        wall_window_s=round(window.seconds, 3),
        wall_age_s=round(now - window.at, 3),
        wall_passes=steps.passes,
        wall_pass_ms=_scaled_share(steps.wall, steps.passes, 1e3),
        wall_prefill_tokens_per_s=_scaled_share(steps.prefill_tokens, window.seconds),
        wall_decode_tokens_per_s=_scaled_share(steps.decode_seqs, window.seconds),
        wall_decode_seqs=_scaled_share(steps.decode_seqs, steps.passes),
        wall_decode_kv_tokens=_scaled_share(steps.decode_kv, steps.passes),
        wall_queued_requests=_scaled_share(steps.queued_requests, steps.passes),
        wall_queued_prefill_tokens=_scaled_share(steps.queued_prefill_tokens, steps.passes),
        estimated=list(steps.estimated),
    )


def _scaled_share(part: float | None, whole: float, scale: float = 1.0) -> float | None:
    return None if part is None or not whole else round(part * scale / whole, 3)
