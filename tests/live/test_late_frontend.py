"""Does a frontend that is started anew learn from the other one what the engines hold?"""

import asyncio
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.listen_address import free_port
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.config.cluster_secret_file import stored_secret
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard
from tests.live.cluster import Served, alive, post, request, served, until

FAST = ["--set", "models.sim.pools.main.sim.timing.speed_up=20", "--set", "models.sim.pools.main.replicas=3"]


def frontends(run: Path) -> dict[int, str]:
    """Return the admin URLs of the frontends by their process."""

    async def read() -> dict[str, bytes]:
        store = SqliteStore(run / "discovery", secret=ClusterSecret(stored_secret(run) or ""))
        try:
            return dict(await store.list(FRONTENDS))
        finally:
            await store.close()

    cards = [msgspec.json.decode(raw, type=FrontendCard) for raw in asyncio.run(read()).values()]
    return {card.pid: card.admin_url for card in cards if alive(card.pid)}


def knowledge(url: str) -> tuple[int | None, list[str]]:
    """Return how many pairs a frontend's index has, and how well it knows each engine."""
    status: dict[str, Any] = request(f"{url}/admin/status?scope=process")[1]
    return status["models"][0]["index_pairs"], [worker["index"] for worker in status["workers"]]


def test_a_frontend_that_is_started_anew_is_told_by_the_other_one(tmp_path: Path) -> None:
    words = ["up", "--frontend.port", str(free_port()), "--frontend.processes", "2", *FAST]
    with served(tmp_path, *words) as cluster:
        ask(cluster, 12)
        until(lambda: len(frontends(cluster.run)) == 2, 20)
        (victim, _), (_, other) = frontends(cluster.run).items()
        until(lambda: (knowledge(other)[0] or 0) > 0, 20)
        os.kill(victim, signal.SIGKILL)
        until(lambda: not alive(victim) and len(frontends(cluster.run)) == 2, 30)
        [late] = [url for url in frontends(cluster.run).values() if url != other]
        until(lambda: knowledge(late) == knowledge(other) and set(knowledge(late)[1]) == {"exact"}, 20)
        with urllib.request.urlopen(f"{late}/metrics?scope=process", timeout=20) as answer:
            metrics = answer.read().decode()
        [told] = re.findall(r"^penstock_kv_engines_told_total (\S+)$", metrics, re.MULTILINE)
        assert float(told) > 0


def ask(cluster: Served, count: int) -> None:
    for number in range(count):
        body = {"model": "sim", "prompt": f"{number} " + "the walrus " * 200, "max_tokens": 2}
        assert post(f"{cluster.url}/v1/completions", body)[0] == 200
