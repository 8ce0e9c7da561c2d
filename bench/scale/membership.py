"""What do 2,000 workers cost in each discovery store, at rest, when 500 join or leave at once, and where it is slow?
And a rolling restart of a large pool, and what frontends tell each other of requests (rolling_restart, placements)?

usage: python bench/scale/membership.py [--workers N] [--stores sqlite etcd kubernetes] [--docs PAGE]

An owner process holds the workers' entries, as a supervisor does; this process follows them into a router and writes
which ones it knows, as a frontend does; the owner waits for that, as before it calls an engine ready. etcd is a real
one on this machine (it is left out where there is none in PATH), the API server our double.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import placements  # noqa: E402
import rolling_restart  # noqa: E402

from penstock.adapters.seams import Store, StoreUnavailable  # noqa: E402
from penstock.adapters.stores.etcd_client import EtcdClient  # noqa: E402
from penstock.adapters.stores.etcd_store import EtcdStore  # noqa: E402
from penstock.adapters.stores.sqlite_store import SqliteStore  # noqa: E402
from penstock.adapters.task_cancel import cancel_all  # noqa: E402
from penstock.config.settings.discovery_settings import KubernetesSettings  # noqa: E402
from penstock.kernel.values import WorkerCard, WorkerId  # noqa: E402
from penstock.router.events import OperatorNote, Publish, ReplayWanted  # noqa: E402
from penstock.router.router import Router  # noqa: E402
from penstock.router.settings import RouterSettings  # noqa: E402
from penstock.runtime.cluster_state.membership import Membership, MembershipEntry, key_of  # noqa: E402
from penstock.runtime.cluster_state.membership_ack import MembershipAck, acknowledged_by_all, acks_in  # noqa: E402
from penstock.runtime.cluster_state.placement_sync import FRONTENDS  # noqa: E402
from penstock.runtime.live_driver import LiveDriver  # noqa: E402
from penstock_kubernetes.store.kubernetes_leases import KubernetesLeases  # noqa: E402
from penstock_lab.report.markdown import write_part  # noqa: E402
from tests.servers import Etcd  # noqa: E402

STORES = ("sqlite", "etcd", "kubernetes")
TTL = 10.0
AT_ONCE = 64
"""Requests that the owner has under way."""
BATCH = 500
RESTARTS = ((200, 10), (600, 30))
"""Engines of pools that are restarted, and how many of them at once."""
REST, PAUSE = 6.0, 3.0
"""Seconds of rest that are measured, and for which the store answers nobody."""


class Place(NamedTuple):
    """A store: ``where`` it is, the ``pid`` of its server, and what stops and resumes it."""

    kind: str
    where: str
    pid: int | None
    stop: Callable[[], None]
    resume: Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2000)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    parser.add_argument("--docs", type=Path, help="page whose measured part is replaced")
    options = parser.parse_args()
    rows = []
    for kind in options.stores:
        if kind == "etcd" and shutil.which("etcd") is None:
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-membership-") as text, place(kind, Path(text)) as found:
            rows += asyncio.run(measured(found, options.workers))
    rollouts = []
    for replicas, at_once in RESTARTS:
        with tempfile.TemporaryDirectory(prefix="penstock-membership-") as text:
            rollouts.append(asyncio.run(rolling_restart.restarted(Path(text), replicas, at_once, _cpu)))
    report = page(rows, options.workers, rollouts, placements.measured())
    print(report)
    if options.docs is not None:
        write_part(options.docs, report)
    return 0


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    """Run a store's server."""
    if kind == "sqlite":
        locks: list[sqlite3.Connection] = []

        def lock() -> None:
            path = folder / "discovery/store.db"
            locks.append(sqlite3.connect(path, isolation_level=None, check_same_thread=False))
            locks[0].execute("BEGIN EXCLUSIVE")

        yield Place(kind, str(folder / "discovery"), None, lock, lambda: locks.pop().close())
    elif kind == "etcd":
        etcd = Etcd(folder)
        etcd.start()
        try:
            yield Place(kind, etcd.url, etcd.pid, etcd.suspend, etcd.resume)
        finally:
            etcd.kill()
    else:
        from tests.kubernetes.conftest import running_double
        from tests.kubernetes.discovery.conftest import CRD, install

        with running_double(folder) as api:
            install(api.kubeconfig, CRD)
            pid = int(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()[-1])
            stop, resume = partial(os.kill, pid, signal.SIGSTOP), partial(os.kill, pid, signal.SIGCONT)
            yield Place(kind, str(api.kubeconfig), pid, stop, resume)


def opened(kind: str, where: str) -> Store:
    """Open a handle on a store."""
    if kind == "sqlite":
        return SqliteStore(Path(where))
    if kind == "etcd":
        return EtcdStore(EtcdClient([where]), settle=TTL / 2)
    from penstock_kubernetes.api.api_client import open_client
    from penstock_kubernetes.store.kubernetes_store import KubernetesStore

    os.environ["KUBECONFIG"] = where
    return KubernetesStore(open_client(KubernetesSettings()), "bench")


# --- the owner --------------------------------------------------------------------------------------------------------


def own(kind: str, where: str, parent: Connection) -> None:
    """Put and delete entries as the parent says, and answer when every frontend knows them."""
    renewals = 0

    def counted(owner: type, name: str, count: Callable[..., int]) -> None:
        work = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            nonlocal renewals
            renewals += count(*arguments)
            return work(*arguments)

        setattr(owner, name, call)

    counted(SqliteStore, "_touch", lambda *_: 1)
    counted(EtcdClient, "keep_alive", lambda client, leases: len(leases))
    counted(KubernetesLeases, "_renew_once", lambda *_: 1)

    async def run() -> None:
        store = opened(kind, where)
        acks = acks_in(store)
        slots = asyncio.Semaphore(AT_ONCE)
        cards: dict[int, WorkerCard] = {}

        async def put(number: int) -> None:
            cards[number] = WorkerCard(
                id=WorkerId(f"main-{number}"), url=f"http://10.0.0.1:{number}", model="m", block_size=16, epoch=1
            )
            entry = msgspec.json.encode(MembershipEntry(card=cards[number]))
            async with slots:
                while True:
                    try:
                        return await store.put(key_of(cards[number].id), entry, ttl=TTL)
                    except StoreUnavailable:
                        await asyncio.sleep(0.2)  # a supervisor tries again, too

        async def delete(number: int) -> None:
            async with slots:
                await store.delete(key_of(cards.pop(number).id))

        while True:
            work, first, end = await asyncio.to_thread(parent.recv)
            if work == "end":
                return
            if work == "put":
                await asyncio.gather(*map(put, range(first, end)))
            elif work == "delete":
                await asyncio.gather(*map(delete, range(first, end)))
            elif work == "known":
                await asyncio.gather(*(acknowledged_by_all(acks, cards[number]) for number in range(first, end)))
            elif work == "known, each for itself":
                each = [acknowledged_by_all(acks_in(store), cards[number]) for number in range(first, end)]
                await asyncio.gather(*each)
            parent.send(renewals)

    asyncio.run(run())


# --- the frontend -----------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """What one thing cost: seconds, CPU seconds of owner, frontend and server, and what else is to be said."""

    store: str
    what: str
    seconds: float
    owner: float
    frontend: float
    server: float | None
    more: str


async def measured(place: Place, workers: int) -> list[Row]:
    """Return the rows of one store."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(place.kind, place.where, theirs), daemon=True)
    owner.start()
    store = opened(place.kind, place.where)
    live = LiveDriver({"router": Router(RouterSettings(), name="f0", seed=1)})
    for kind in (OperatorNote, Publish, ReplayWanted):
        live.on(kind, lambda now, sender, effect: None)
    lost: list[str] = []
    written = 0
    put = store.put

    async def counted(key: str, value: bytes, *, ttl: float | None = None) -> None:
        nonlocal written
        written += len(value)
        await put(key, value, ttl=ttl)

    store.put = counted  # type: ignore[method-assign]

    async def stopped(card: WorkerCard) -> None:
        lost.append(card.id)

    ack = MembershipAck(store, "f0", lambda: membership.cards, TTL)
    membership = Membership(store, live, started=lambda card: None, stopped=stopped, heard=lambda: passed_on())
    await store.put(FRONTENDS + "f0", b"{}", ttl=TTL)
    tasks = [asyncio.create_task(membership.run()), asyncio.create_task(ack.run())]
    rows: list[Row] = []

    async def ask(work: str, first: int = 0, end: int = 0) -> int:
        ours.send((work, first, end))
        return int(await asyncio.to_thread(ours.recv))

    heard = asyncio.Event()

    def passed_on() -> None:
        heard.set()
        ack.changed()

    async def until(count: int) -> None:
        while len(membership.cards) != count:
            heard.clear()
            await heard.wait()

    @contextmanager
    def row(what: str) -> Iterator[list[str]]:
        said: list[str] = []
        pids = (owner.pid, os.getpid(), place.pid)
        before, began = [_cpu(pid) for pid in pids], time.monotonic()
        yield said
        seconds = time.monotonic() - began
        spent = [None if a is None or b is None else b - a for a, b in zip(before, map(_cpu, pids), strict=True)]
        rows.append(Row(place.kind, what, seconds, spent[0] or 0, spent[1] or 0, spent[2], ", ".join(said)))
        print(*rows[-1], file=sys.stderr, flush=True)

    try:
        await ask("nothing")
        with row(f"{workers:,} join") as said:
            await ask("put", 0, workers)
            await until(workers)
            await ask("known", 0, workers)
            said.append(f"{written / 1e3:,.0f} kB acknowledged")
        with row(f"{REST:.0f} s at rest") as said:
            renewed = await ask("nothing")
            await asyncio.sleep(REST)
            said.append(f"{(await ask('nothing') - renewed) / REST:.1f} renewals/s")
        written = 0
        with row(f"{BATCH} more join") as said:
            await ask("put", workers, workers + BATCH)
            await until(workers + BATCH)
            await ask("known", workers, workers + BATCH)
            said.append(f"{written / 1e3:,.0f} kB acknowledged")
        with row(f"{BATCH} wait for the frontend"):
            await ask("known", workers, workers + BATCH)
        if place.kind != "kubernetes":  # whose API server had no time left for renewals of leases
            with row(f"{BATCH} wait, each by reads of its own"):
                await ask("known, each for itself", workers, workers + BATCH)
        with row(f"{BATCH} leave"):
            await ask("delete", workers, workers + BATCH)
            await until(workers)
        lost.clear()
        with row(f"no answer for {PAUSE:.0f} s, one joins meanwhile") as said:
            await asyncio.to_thread(place.stop)
            joining = asyncio.create_task(ask("put", workers, workers + 1))
            await asyncio.sleep(PAUSE)
            await asyncio.to_thread(place.resume)
            resumed = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * TTL):
                    await joining
                    await until(workers + 1)
            said.append(f"known {time.monotonic() - resumed:.1f} s after it, {len(lost)} lost")
    finally:
        await cancel_all(tasks)
        owner.terminate()
        await store.close()
        live.close()
    return rows


def _cpu(pid: int | None) -> float | None:
    """Return the seconds that a process has run, the threads that ended included."""
    if pid is None:
        return None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page(
    rows: list[Row], workers: int, rollouts: list[rolling_restart.Rollout], tellings: list[placements.Telling]
) -> str:
    """Return the measured part of the page."""
    lines = [
        f"{os.cpu_count()} cores, {workers:,} workers of one owner, one frontend, leases of {TTL:.0f} s; the owner "
        f"writes {AT_ONCE} at a time.",
        "",
        "| store | what | s | owner, CPU s | frontend, CPU s | server, CPU s | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        server = "" if row.server is None else f"{row.server:.2f}"
        lines.append(
            f"| {row.store} | {row.what} | {row.seconds:.1f} | {row.owner:.2f} | {row.frontend:.2f} | {server} | "
            f"{row.more} |"
        )
    lines += [
        "",
        f"Rolling restarts over SQLite, {rolling_restart.REQUESTS:.0f} requests/s of {rolling_restart.TAKES} s "
        f"meanwhile, engines that start in {rolling_restart.START} s:",
        "",
        "| engines | at once | s | supervisor, CPU s | frontend, CPU s | writes | MB written | requests lost |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in rollouts:
        lines.append(
            f"| {one.replicas} | {one.at_once} | {one.seconds:.0f} | {one.supervisor:.1f} | {one.frontend:.1f} | "
            f"{one.writes:,} | {one.kilobytes / 1e3:.1f} | {one.lost} of {one.requests:,} |"
        )
    lines += [
        "",
        f"{placements.FRONTENDS} frontends, {placements.RATE} requests/s each over {placements.WORKERS} workers, "
        f"blocks of {placements.BLOCK} tokens; per request and peer, and CPU of a frontend per own request:",
        "",
        "| plane | tokens | requests come | messages | bytes | MB/s sent | alone, ms | of four, ms |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for each in tellings:
        lines.append(
            f"| {each.plane} | {each.tokens:,} | {'all at once' if each.at_once else 'evenly'} | {each.messages:.2f} | "
            f"{each.bytes:,.0f} | {each.per_second / 1e6:.2f} | {each.alone_ms:.2f} | {each.ms:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
