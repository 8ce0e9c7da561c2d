"""Engine jobs: which engine has which job, kept in the discovery store: every frontend finds it, also a restarted one.

A job is a video or an image that an engine makes, or a file that it has. The store has names and times only; what a job
is about and what came of it stays with its engine.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from penstock.adapters.engines.http.engine_access import OPEN, EngineAccess, engine_session
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.stores.memory_store import MemoryStore
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.prompt.request_body import FILES, IMAGES, VIDEOS
from penstock.frontend.service import Service
from penstock.kernel.errors import EngineError, OverloadedError
from penstock.kernel.values import WorkerCard, WorkerId

JOBS = "jobs/"
"""``jobs/<id>``: `PlacedJob`."""
JOB_TTL = 24 * 3600.0
"""Seconds that a job can be asked for: engines keep what they made no longer, and whoever wants it has fetched it."""
JOBS_MAX = 10_000
"""Most jobs of the cluster: some 3 MB in the store; the next is refused."""
_FILE = re.compile(rb"(?:\"|\r\n)(file_[0-9a-f]{32})(?=\"|\r\n)")
"""A file's id in a body, as a text of JSON or as a field of a form."""
ANSWER_TIMEOUT = 10.0
"""Seconds that an engine has to say how a job is."""


class JobKind(NamedTuple):
    """One kind of job.

    Args:
        noun: its name, with which its ids begin.
        route: of the engines, and of ours.
    """

    noun: str
    route: str

    def knows(self, id: str) -> bool:
        """Return whether an id is one that we give to jobs of this kind."""
        return re.fullmatch(rf"{self.noun}_[0-9a-f]{{32}}", id) is not None


VIDEO, IMAGE, FILE = JobKind("video", VIDEOS), JobKind("image", IMAGES), JobKind("file", FILES)
KINDS = {kind.noun: kind for kind in (VIDEO, IMAGE, FILE)}


class PlacedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job.

    Args:
        id: ours; ``engine_id``: its engine's, which two engines may give twice.
        worker, url: of the engine. Either finds it again: a name changes when servers are attached anew.
        owner: the API key's name, or nothing where no keys are set.
        source: our id of the job that this one changes.
        kind: the noun of its `JobKind`.
        name: by which its model was asked for, where that is another one.
        created_at: seconds since 1970.
    """

    id: str
    engine_id: str
    worker: WorkerId
    url: str
    model: str
    owner: str
    created_at: float
    source: str | None = None
    kind: str = VIDEO.noun
    name: str | None = None
    version: int = 1

    def path(self, rest: str = "") -> str:
        """Return its path at its engine."""
        return f"{KINDS[self.kind].route}/{quote(self.engine_id, safe='')}{rest}"


class EngineJobs:
    """All jobs of the cluster, as one frontend process finds them.

    Args:
        store: returns the discovery store; without one, jobs live in this process alone.
        cards: returns the cards of all present workers.
        access: what a server asks for, by its URL.
    """

    def __init__(
        self,
        store: Callable[[], Store | None],
        cards: Callable[[], Sequence[WorkerCard]],
        access: Callable[[str], EngineAccess] = lambda url: OPEN,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._given, self._cards, self._access, self._clock = store, cards, access, clock
        self._own = MemoryStore()
        self._http: aiohttp.ClientSession | None = None

    async def make_room(self) -> None:
        """Forget jobs that are too old.

        Raises:
            OverloadedError: 429: there are too many; 503: the store can't be read, so nobody would find another one.
        """
        jobs = await self._all()
        old = [job for job in jobs if job.created_at < self._clock() - JOB_TTL]
        for job in old:
            await self.forget(job.id)
        if len(jobs) - len(old) >= JOBS_MAX:
            raise OverloadedError(f"the cluster has {JOBS_MAX} jobs; delete some", retry_after=60.0, status=429)

    async def add(
        self,
        card: WorkerCard,
        engine_id: str,
        model: str,
        owner: str,
        source: str | None = None,
        kind: JobKind = VIDEO,
        name: str | None = None,
    ) -> PlacedJob:
        """Remember a job that an engine has begun, or a file that it has."""
        job = PlacedJob(
            id=f"{kind.noun}_{secrets.token_hex(16)}",
            engine_id=engine_id,
            worker=card.id,
            url=card.url,
            model=model,
            owner=owner,
            created_at=self._clock(),
            source=source,
            kind=kind.noun,
            name=name,
        )
        try:
            await self._store.put(JOBS + job.id, msgspec.json.encode(job))
        except StoreUnavailable as error:
            raise _unavailable(error) from error
        return job

    async def job(self, id: str, owner: str, kind: JobKind) -> PlacedJob:
        """Return a job of this owner.

        Raises:
            ClientError: 404: there is none.
        """
        job = await self._lookup(id, owner, kind)
        if job is None:
            raise rejected(f"there is no {kind.noun} {quoted(id)}", f"{kind.noun}_id", code="not_found", status=404)
        return job

    async def jobs(self, owner: str, kind: JobKind) -> list[PlacedJob]:
        """Return all jobs of one kind and of this owner, the newest first."""
        mine = [job for job in await self._all(kind.noun) if self._is_of(job, owner)]
        return sorted(mine, key=lambda job: (job.created_at, job.id), reverse=True)

    async def with_engine_files(self, raw: bytes, owner: str) -> tuple[bytes, PlacedJob | None]:
        """Return a body with its engine's ids of the files that it names, and one of these files, where it names some.

        Raises:
            ClientError: 400: they lie at several engines.
        """
        first: PlacedJob | None = None
        for id in dict.fromkeys(_FILE.findall(raw)) if b"file_" in raw else ():
            job = await self._lookup(id.decode(), owner, FILE)
            if job is None:
                continue  # a text that looks like one, or another's: the engine says that it has none
            if first is not None and first.url != job.url:
                text = f"the files {first.id} and {job.id} lie at two engines; upload both with the header "
                raise rejected(text + f"x-penstock-worker: {first.worker}", "file_id")
            first = first or job
            raw = raw.replace(id, msgspec.json.encode(job.engine_id)[1:-1])
        return raw, first

    async def forget(self, id: str) -> None:
        """Forget a job, where it is known."""
        try:
            await self._store.delete(JOBS + id)
        except StoreUnavailable as error:
            raise _unavailable(error) from error

    def engine(self, job: PlacedJob) -> WorkerCard:
        """Return the engine that has a job.

        Raises:
            OverloadedError: 503: it is not in the cluster; it may come back.
        """
        cards = self._cards()
        for card in (*(c for c in cards if c.url == job.url), *(c for c in cards if c.id == job.worker)):
            return card
        raise OverloadedError(
            f"{job.kind} {job.id} is at the engine {job.worker} ({_without_password(job.url)}), which is not in "
            f"the cluster now; ask again when it is back, or have the {job.kind} made anew",
            retry_after=10.0,
        )

    async def ask(
        self, job: PlacedJob, method: str, path: str = "", *, headers: Mapping[str, str] | None = None, query: str = ""
    ) -> aiohttp.ClientResponse:
        """Send a request about a job to its engine; the caller closes the answer.

        Raises:
            OverloadedError: 503: as of `engine`.
            EngineError: it gives no answer.
        """
        url = f"{self.engine(job).url.rstrip('/')}{job.path(path)}"
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_TIMEOUT, sock_read=ANSWER_TIMEOUT)
            self._http = engine_session(self._access, timeout=timeout, auto_decompress=False)
        try:
            asked = URL(url + (f"?{query}" if query else ""), encoded=True)
            return await self._http.request(method, asked, headers=headers)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = str(error) or type(error).__name__
            raise EngineError(
                f"the engine {job.worker}, which has {job.kind} {job.id}, gives no answer: {text}"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._own.close()
        if self._http is not None:
            await self._http.close()

    async def _lookup(self, id: str, owner: str, kind: JobKind) -> PlacedJob | None:
        for job in await self._all(id) if kind.knows(id) else ():
            if self._is_of(job, owner):
                return job
        return None

    def _is_of(self, job: PlacedJob, owner: str) -> bool:
        return job.owner == owner and job.created_at >= self._clock() - JOB_TTL

    @property
    def _store(self) -> Store:
        return self._given() or self._own

    async def _all(self, id: str = "") -> list[PlacedJob]:
        try:
            entries = await self._store.list(JOBS + id)
        except StoreUnavailable as error:
            raise _unavailable(error) from error
        return [msgspec.json.decode(entry, type=PlacedJob) for entry in entries.values()]


def _unavailable(error: StoreUnavailable) -> OverloadedError:
    text = f"the discovery store can't be used, which knows the engine of each job: {error}"
    return OverloadedError(text, retry_after=5.0)


def _without_password(url: str) -> str:
    """Return a URL without a password in it."""
    return url.rpartition("@")[2] if "@" in url else url


def renamed(answer: Any, job: PlacedJob) -> Any:
    """Return an engine's answer about a job with our ids in it, and the name by which its model was asked for."""
    if not isinstance(answer, dict):
        return answer
    source = {"remixed_from_video_id": job.source} if job.source and answer.get("remixed_from_video_id") else {}
    named = {"model": job.name} if job.name is not None and "model" in answer else {}
    return {**answer, "id": job.id, **source, **named}


def jobs_of(service: Service) -> EngineJobs:
    """Return the jobs of a frontend, which begin with its first route of them."""
    if service.jobs is None:
        service.jobs = EngineJobs(lambda: service.cluster.store, service.cluster.cards, service.access)
    assert isinstance(service.jobs, EngineJobs)
    return service.jobs
