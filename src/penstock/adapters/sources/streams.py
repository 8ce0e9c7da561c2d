"""What do our own frontends know of traffic? All of them, through whichever answers first, since the reading before."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import aiohttp
import msgspec
from yarl import URL

from penstock.adapters.sources.reading import ModelRead, Reading, WorkerRead
from penstock.adapters.sources.told import ClusterTold, EngineTold, FrontendTold, RankTold, since, steps_since
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import StepStats, WorkerId
from penstock.kernel.wire import NewerVersion, WireDecoder
from penstock.planner.seen import EngineSeen, Health, Traffic

log = logging.getLogger("penstock.planner")

PATH = "/admin/planner/seen"
TIMEOUT = 5.0
"""Seconds that one frontend gets, in which it asks the others."""
NOTHING = Traffic(seconds=0.0, arrived=0, prompt_tokens=0)
BORN_WITHIN = 2.0
"""A frontend that was not there at the reading before counts from its start, if that was at most so many seconds
before that reading; else it was there and only unknown to us."""

_told = WireDecoder(ClusterTold, "what frontends tell a planner")

Urls = Callable[[], Awaitable[Sequence[str]]]
"""Returns the admin URLs of frontends; each of them asks the others."""
Sign = Callable[[URL], Mapping[str, str]]
"""Returns the headers by which a request is let in."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where everything has been read. ``steps``: by worker and epoch."""

    version: int = 1
    at: float | None = None
    counts: dict[str, dict[str, Traffic]] = {}
    """Frontend -> model -> its counters."""
    steps: dict[str, StepStats] = {}
    """Frontend, worker and epoch -> the passes that were told."""


class StreamsSource:
    """A `penstock.adapters.sources.reading.Source` over the frontends of a cluster.

    A window ends only when every frontend has told its part: while one is silent there is no traffic to be read, and
    once it answers the window is as long as it was silent. What was counted is then neither lost nor counted twice.

    Args:
        stale_after: seconds without a whole reading after which the source is broken.
        models: those of the config; the others are found.
    """

    def __init__(
        self, urls: Urls, sign: Sign, *, stale_after: float, models: Iterable[str] = (), told_by: str = "frontends"
    ) -> None:
        self._urls = urls
        self._sign = sign
        self._stale_after = stale_after
        self._models = set(models)
        self._told_by = told_by
        self._mark = Mark()
        self._readable: float | None = None
        self._http: aiohttp.ClientSession | None = None

    async def read(self, at: float) -> Reading:
        try:
            told = await self._ask()
        except PenstockError as error:
            return self._unread(at, str(error))
        if told.missing:
            reading = self._unread(
                at,
                f"{len(told.missing)} of {len(told.missing) + len(told.frontends)} frontends "
                f"did not answer: {', '.join(told.missing)}",
            )
            return msgspec.structs.replace(reading, workers=self._workers(told.frontends, {}))
        return self._whole(told.frontends, at)

    def snapshot(self) -> bytes:
        return msgspec.json.encode(self._mark)

    def restore(self, state: bytes) -> None:
        self._mark = msgspec.json.decode(state, type=Mark)
        self._models |= {model for counts in self._mark.counts.values() for model in counts}

    def describe(self) -> str:
        return self._told_by

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    # --- what was told ------------------------------------------------------------------------------------------------

    def _whole(self, frontends: Sequence[FrontendTold], at: float) -> Reading:
        mark, first = self._mark, self._mark.at is None
        seconds = 0.0 if mark.at is None else max(0.0, at - mark.at)
        sums: dict[str, Traffic] = {}
        queued: dict[str, int] = {}
        for told in frontends:
            before = mark.counts.get(told.name)
            for model, each in told.models.items():
                self._models.add(model)
                queued[model] = queued.get(model, 0) + each.queued
                known = None if before is None else before.get(model)
                if first or (before is None and each.counts.seconds > seconds + BORN_WITHIN):
                    known = each.counts  # what it counted before we knew it is of another time
                part = since(each.counts, known)
                sums[model] = part if model not in sums else sums[model] + part
        workers = self._workers(frontends, mark.steps)
        ready = {worker.model for worker in workers.values() if worker.ready}
        self._mark = Mark(
            at=at,
            counts={told.name: {model: each.counts for model, each in told.models.items()} for told in frontends},
            steps={
                _place(told.name, engine): engine.steps
                for told in frontends
                for engine in told.engines
                if engine.steps is not None
            },
        )
        self._readable = at
        models = {}
        for model in sorted(self._models):
            traffic = msgspec.structs.replace(sums.get(model, NOTHING), seconds=seconds)
            waiting = queued.get(model, 0)
            models[model] = ModelRead(traffic=traffic, queued=waiting, held=0 if model in ready else waiting)
        return Reading(models=models, workers=workers)

    def _unread(self, at: float, why: str) -> Reading:
        if self._readable is None:
            self._readable = at
        silent = at - self._readable
        health: Health = "broken" if silent >= self._stale_after else "stale"
        unread = ModelRead(traffic=None, health=health, why=why)
        return Reading(models=dict.fromkeys(sorted(self._models), unread))

    def _workers(self, frontends: Sequence[FrontendTold], before: Mapping[str, StepStats]) -> dict[str, WorkerRead]:
        """Return each worker as the first frontend sees it that follows its passes; all see the same requests."""
        found: dict[str, WorkerRead] = {}
        for told in sorted(frontends, key=lambda each: each.name):
            for engine in told.engines:
                steps = steps_since(engine.steps, before.get(_place(told.name, engine)))
                known = found.get(engine.worker)
                if known is None or (steps is not None and all(each.steps is None for each in known.engines)):
                    found[engine.worker] = _worker(engine, steps)
        return found

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _ask(self) -> ClusterTold:
        """Return what the first frontend that answers tells of all.

        Raises:
            PenstockError: none answers; the message says what each said.
        """
        failures: list[str] = []
        best: ClusterTold | None = None
        for base in await self._urls():
            try:
                told = await self._ask_one(URL(base.rstrip("/") + PATH))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                failures.append(f"{base}: {str(error) or type(error).__name__}")
                continue
            if not told.missing:
                return told
            best = told if best is None or len(told.missing) < len(best.missing) else best
        if best is not None:
            return best
        raise PenstockError("; ".join(failures) or "no frontend is known")

    async def _ask_one(self, url: URL) -> ClusterTold:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))
        async with self._http.get(url, headers=self._sign(url), allow_redirects=False) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise ValueError(f"it answers {answer.status}: {raw[:200].decode(errors='replace')}")
        try:
            told: ClusterTold = _told.decode(raw)
        except (msgspec.DecodeError, NewerVersion) as error:
            raise ValueError(f"its answer can't be read: {error}") from error
        return told


def _place(frontend: str, engine: EngineTold) -> str:
    return f"{frontend} {engine.worker} {engine.epoch}"


def _worker(engine: EngineTold, steps: StepStats | None) -> WorkerRead:
    ranks = []
    for number, rank in enumerate(engine.ranks):
        # An engine's passes are of all its ranks: they stand with the first one, and count once.
        own = number == 0
        window = engine.window if own else None
        waiting = _waiting(rank, engine, window)
        ranks.append(
            EngineSeen(
                worker=WorkerId(engine.worker),
                rank=number,
                role=engine.role,
                steps=steps if own else None,
                running=rank.running - (waiting or 0),
                waiting=waiting,
                queued_prefill_tokens=rank.prefill_tokens,
                queued_decode_kv=None if window is None else _mean(window.queued_decode_kv, window),
                decode_kv=_decode_kv(rank, engine),
                kv_tokens=engine.kv_tokens,
                max_seqs=engine.max_seqs,
                max_batched_tokens=engine.max_batched_tokens,
                max_len=engine.max_len,
            )
        )
    return WorkerRead(
        id=engine.worker,
        model=engine.model,
        role=engine.role,
        ready=engine.ready,
        flips=engine.flips,
        engines=tuple(ranks),
    )


def _waiting(rank: RankTold, engine: EngineTold, window: StepStats | None) -> int | None:
    """Return how many requests an engine has not begun: those beyond its places, or more where its passes say so.

    What its passes tell is a mean over a window that may be seconds old; what it was given is of now.
    """
    told = None if window is None else _mean(window.queued_requests, window)
    beyond = None if engine.max_seqs is None else max(0, rank.running - engine.max_seqs)
    known = [number for number in (told, beyond) if number is not None]
    return min(rank.running, max(known)) if known else None


def _decode_kv(rank: RankTold, engine: EngineTold) -> int | None:
    """Return the KV tokens of the requests that decode: what all occupy by the end of their prompts, less what is still
    to be prefilled."""
    if engine.block_size is None:
        return None
    return max(0, rank.blocks * engine.block_size - rank.prefill_tokens)


def _mean(total: int | None, window: StepStats) -> int | None:
    return None if total is None or not window.passes else round(total / window.passes)
