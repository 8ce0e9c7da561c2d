"""Crashes: counted by a supervisor, known to every frontend, told with their reasons."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.runtime.cluster_state.crash_log import RECENT, CrashBook, Crashes


class Moody(MemoryStore):
    """A store whose first writes fail."""

    failures = 1

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("it is away")
        await super().put(key, value, ttl=ttl)


async def eventually(met: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not met():
            await asyncio.sleep(0.001)


async def test_a_crash_is_known_to_frontends_with_its_count_and_reason(caplog, monkeypatch):
    monkeypatch.setattr("penstock.runtime.cluster_state.crash_log.RETRY", 0.001)
    space = MemorySpace()
    now = [0.0]
    book, known = CrashBook(Moody(space), 5.0), Crashes(MemoryStore(space), lambda: now[0])
    tasks = [asyncio.create_task(book.run()), asyncio.create_task(known.run())]
    try:
        book.add("main-0", "engine", "ended with status 3")
        book.add("main-0", "engine", "was killed by SIGKILL")
        book.add("frontend-0", "frontend", "was killed by SIGSEGV")
        await eventually(lambda: len(known.known) == 2 and known.known["main-0"].count == 2)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    told = {crash.name: (crash.kind, crash.count, crash.reason) for crash in known.status()}
    assert told == {
        "main-0": ("engine", 2, "was killed by SIGKILL"),
        "frontend-0": ("frontend", 1, "was killed by SIGSEGV"),
    }
    workers = [SimpleNamespace(id=name, restarts=0, restart_reason=None) for name in ("main-0", "main-1")]
    known.describe(workers)
    assert [(w.restarts, w.restart_reason) for w in workers] == [(2, "was killed by SIGKILL"), (0, None)]
    now[0] = known.known["main-0"].at + 1.0
    texts = [finding.text for finding in known.findings()]
    assert any("main-0 was killed by SIGKILL" in text and "for the 2nd time" in text for text in texts)
    assert {finding.level for finding in known.findings()} == {"warning"}
    assert any(record.levelname == "WARNING" and "SIGSEGV" in record.getMessage() for record in caplog.records)
    now[0] += RECENT + 60.0
    assert known.findings() == []
