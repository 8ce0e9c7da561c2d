"""A cluster of two frontends whose placements and KV events go through a real nats-server."""

import time
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, holders, served, until
from tests.live.test_etcd import LIMIT, SECRET
from tests.live.test_operate import FAST, load
from tests.servers import Nats


@pytest.mark.parametrize("kv_events", ["nats", pytest.param("jetstream", marks=pytest.mark.slow)])
def test_two_frontends_route_by_caches_that_they_know_through_nats(tmp_path: Path, kv_events: str) -> None:
    nats = Nats(tmp_path / "nats", jetstream=True)
    nats.start()
    words = [*("--discovery.plane", "nats"), *("--discovery.kv_events", kv_events)]
    words += ["--discovery.nats.urls", nats.url, "--frontend.processes", "2", "--frontend.port", str(free_port())]
    try:
        with served(tmp_path, "up", *FAST, *words, env=SECRET) as cluster:
            prompt = "All of this is known to one engine only. " * 40
            seen = [asked(cluster, prompt)]
            while seen[-1]["cached"] == 0:  # it may come to the other frontend before that has heard of the cache
                seen.append(asked(cluster, prompt))
            again = [asked(cluster, prompt) for _ in range(6)]
            assert {one["worker"] for one in again} <= {one["worker"] for one in seen}
            assert all(one["cached"] > 0 and one["predicted"] > 0 for one in again)
            with load(cluster, 4):
                nats.kill()
                until(lambda: "NATS can't be reached" in str(cluster.get("/admin/status")[1]["findings"]), LIMIT)
                lost = f"{time.time_ns()} is asked while the broker is away. " * 40
                worker = asked(cluster, lost)["worker"]
                nats.start()
                # The index is right again by itself: what was stored meanwhile is known.
                until(lambda: worker in holders(cluster, lost), LIMIT)
    finally:
        nats.kill()


def asked(cluster: Served, prompt: str) -> dict[str, Any]:
    """Ask, and say who answered, with how many tokens from its cache and how many the router expected."""
    status, body, headers = cluster.chat(prompt)
    assert status == 200, body
    details = body["usage"].get("prompt_tokens_details") or {}
    return {
        "worker": headers["x-penstock-worker"],
        "cached": details.get("cached_tokens") or 0,
        "predicted": int(headers["x-penstock-expected-cached-tokens"]),
    }
