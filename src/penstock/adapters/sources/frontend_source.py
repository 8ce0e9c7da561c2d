"""Traffic source over Penstock's frontends: reads the counters of all through the first that answers."""

import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import aiohttp
import msgspec
from yarl import URL

from penstock.adapters.http_session import within
from penstock.adapters.sources.frontend_counters import (
    ClusterCounters,
    FrontendCounters,
    RankCounters,
    WorkerCounters,
    since,
    steps_since,
)
from penstock.adapters.sources.traffic_source import ModelReading, Readability, Reading, WorkerReading
from penstock.kernel.errors import PenstockError
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.values import StepStats, Traffic, WorkerId
from penstock.planner.observation import EngineState

PATH = "/admin/planner/seen"
TIMEOUT = 5.0
"""Seconds that one frontend gets, in which it reads the others."""
NOTHING = Traffic(seconds=0.0, arrived=0, prompt_tokens=0)
BORN_WITHIN = 2.0
"""A frontend that is not in the reading before counts from its start, if that was at most so many seconds
before that reading; else it existed and was only unknown here."""

_counters = VersionedDecoder(ClusterCounters, "what frontends tell a planner")

Urls = Callable[[], Awaitable[Sequence[str]]]
"""Returns the admin URLs of frontends; each of them reads the others."""
Sign = Callable[[URL], Mapping[str, str]]
"""Returns the headers that authorize a request."""


class CounterMark(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where everything has been read. ``steps``: by worker and epoch."""

    version: int = 1
    at: float | None = None
    counts: dict[str, dict[str, Traffic]] = {}
    """Frontend -> model -> its counters."""
    steps: dict[str, StepStats] = {}
    """Frontend, worker and epoch -> the passes that were reported."""


class FrontendSource:
    """A `penstock.adapters.sources.traffic_source.TrafficSource` over the frontends of a cluster.

    A window ends only when every frontend has reported: while one is silent no traffic can be read, and once it answers
    the window is as long as the silence. So no count is lost or doubled.

    Args:
        models: those of the config; others are added as they appear.
    """

    def __init__(
        self,
        urls: Urls,
        sign: Sign,
        *,
        models: Iterable[str] = (),
        description: str = "frontends",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._urls = urls
        self._sign = sign
        self._models = set(models)
        self._description = description
        self._mark = CounterMark()
        self._readability = Readability()
        self._http = within(TIMEOUT, tls)

    async def read(self, at: float) -> Reading:
        try:
            answer = await self._ask()
        except PenstockError as error:
            return self._unread(at, str(error))
        if answer.missing:
            reading = self._unread(
                at,
                f"{len(answer.missing)} of {len(answer.missing) + len(answer.frontends)} frontends "
                f"did not answer: {', '.join(answer.missing)}",
            )
            return msgspec.structs.replace(reading, workers=self._workers(answer.frontends, {}))
        return self._whole(answer.frontends, at)

    def snapshot(self) -> bytes:
        return msgspec.json.encode(self._mark)

    def restore(self, state: bytes) -> None:
        self._mark = msgspec.json.decode(state, type=CounterMark)
        self._models |= {model for counts in self._mark.counts.values() for model in counts}

    def describe(self) -> str:
        return self._description

    async def close(self) -> None:
        await self._http.close()

    # --- counters -----------------------------------------------------------------------------------------------------

    def _whole(self, frontends: Sequence[FrontendCounters], at: float) -> Reading:
        mark, first = self._mark, self._mark.at is None
        seconds = 0.0 if mark.at is None else max(0.0, at - mark.at)
        sums: dict[str, Traffic] = {}
        queued: dict[str, int] = {}
        for frontend in frontends:
            before = mark.counts.get(frontend.name)
            for model, each in frontend.models.items():
                self._models.add(model)
                queued[model] = queued.get(model, 0) + each.queued
                known = None if before is None else before.get(model)
                if first or (before is None and each.counts.seconds > seconds + BORN_WITHIN):
                    known = each.counts  # its counts before this reading belong to another time
                part = since(each.counts, known)
                sums[model] = part if model not in sums else sums[model] + part
        workers = self._workers(frontends, mark.steps)
        ready = {worker.model for worker in workers.values() if worker.ready}
        self._mark = CounterMark(
            at=at,
            counts={
                frontend.name: {model: each.counts for model, each in frontend.models.items()} for frontend in frontends
            },
            steps={
                _engine_epoch_key(frontend.name, engine): engine.steps
                for frontend in frontends
                for engine in frontend.engines
                if engine.steps is not None
            },
        )
        self._readability.read(at)
        models = {}
        for model in sorted(self._models):
            traffic = msgspec.structs.replace(sums.get(model, NOTHING), seconds=seconds)
            waiting = queued.get(model, 0)
            models[model] = ModelReading(
                traffic=traffic, queued=waiting, without_worker=0 if model in ready else waiting
            )
        return Reading(models=models, workers=workers)

    def _unread(self, at: float, why: str) -> Reading:
        return Reading(models=dict.fromkeys(sorted(self._models), self._readability.unread(at, why)))

    def _workers(
        self, frontends: Sequence[FrontendCounters], before: Mapping[str, StepStats]
    ) -> dict[str, WorkerReading]:
        """Return each worker from the first frontend that follows its passes; all know the same requests."""
        workers: dict[str, WorkerReading] = {}
        for frontend in sorted(frontends, key=lambda each: each.name):
            for engine in frontend.engines:
                steps = steps_since(engine.steps, before.get(_engine_epoch_key(frontend.name, engine)))
                known = workers.get(engine.worker)
                if known is None or (steps is not None and all(each.steps is None for each in known.engines)):
                    workers[engine.worker] = _worker_reading(engine, steps)
        return workers

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def _ask(self) -> ClusterCounters:
        """Return the counters of all frontends from the first one that answers.

        Raises:
            PenstockError: none answers; the message has the error of each.
        """
        failures: list[str] = []
        best: ClusterCounters | None = None
        for base in await self._urls():
            try:
                counters = await self._ask_one(URL(base.rstrip("/") + PATH))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                failures.append(f"{base}: {str(error) or type(error).__name__}")
                continue
            if not counters.missing:
                return counters
            best = counters if best is None or len(counters.missing) < len(best.missing) else best
        if best is not None:
            return best
        raise PenstockError("; ".join(failures) or "no frontend is known")

    async def _ask_one(self, url: URL) -> ClusterCounters:
        async with self._http.session.get(url, headers=self._sign(url), allow_redirects=False) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise ValueError(f"it answers {answer.status}: {raw[:200].decode(errors='replace')}")
        try:
            counters: ClusterCounters = _counters.decode(raw)
        except (msgspec.DecodeError, NewerVersion) as error:
            raise ValueError(f"its answer can't be read: {error}") from error
        return counters


def _engine_epoch_key(frontend: str, engine: WorkerCounters) -> str:
    return f"{frontend} {engine.worker} {engine.epoch}"


def _worker_reading(engine: WorkerCounters, steps: StepStats | None) -> WorkerReading:
    ranks = []
    for number, rank in enumerate(engine.ranks):
        # An engine's passes are of all its ranks: the first rank carries them, so that they count once.
        own = number == 0
        window = engine.window if own else None
        waiting = _waiting(rank, engine, window)
        ranks.append(
            EngineState(
                worker=WorkerId(engine.worker),
                rank=number,
                role=engine.role,
                steps=steps if own else None,
                running=rank.running - (waiting or 0),
                waiting=waiting,
                queued_prefill_tokens=rank.prefill_tokens,
                queued_decode_kv=None if window is None else _mean_per_pass(window.queued_decode_kv, window),
                decode_kv=_decode_kv(rank, engine),
                limits=engine.limits,
            )
        )
    return WorkerReading(
        id=engine.worker,
        model=engine.model,
        role=engine.role,
        ready=engine.ready,
        flips=engine.flips,
        engines=tuple(ranks),
    )


def _waiting(rank: RankCounters, engine: WorkerCounters, window: StepStats | None) -> int | None:
    """Return how many requests an engine has not begun: those beyond its batch size, or more by its passes' queue.

    The passes' queue is a mean over a window that may be seconds old; the placed requests are of now.
    """
    queued = None if window is None else _mean_per_pass(window.queued_requests, window)
    most = engine.limits.max_num_seqs
    beyond = None if most is None else max(0, rank.running - most)
    known = [number for number in (queued, beyond) if number is not None]
    return min(rank.running, max(known)) if known else None


def _decode_kv(rank: RankCounters, engine: WorkerCounters) -> int | None:
    """Return the KV tokens of the requests that decode: what all occupy by the end of their prompts, minus what is
    still to be prefilled."""
    if engine.block_size is None:
        return None
    return max(0, rank.blocks * engine.block_size - rank.prefill_tokens)


def _mean_per_pass(total: int | None, window: StepStats) -> int | None:
    return None if total is None or not window.passes else round(total / window.passes)
