"""Kill at any moment: over thousands of seeds, no request is lost, none ends twice, nothing goes to the gone."""

import msgspec
import pytest

from penstock.kernel.machine import Effect, Event, Nanos
from penstock.router.router import Router
from tests.depth import seeds
from tests.stateful.cluster import MODEL, Cluster

SEEDS = 2000
CHUNK = 100


@pytest.mark.parametrize("first", seeds(SEEDS, CHUNK))
def test_every_request_ends_once_whatever_dies(first: int) -> None:
    migrations = handoffs = 0
    for seed in range(first, first + CHUNK):
        cluster = Cluster(seed)
        try:
            cluster.finish()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        migrations += cluster.migrations
        handoffs += cluster.handoffs
    assert handoffs, "no prefill was ever handed over: this is not tested then"
    assert migrations, "no answer ever went on elsewhere: this is not tested then"


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_when_all_is_quiet_the_index_claims_nothing_that_is_not_there(first: int) -> None:
    for seed in range(first, first + 50):
        cluster = Cluster(seed)
        cluster.finish()
        assert not cluster.overclaimed(), f"seed {seed}: {cluster.overclaimed()}"


def test_without_faults_every_request_is_answered_unless_its_client_or_deadline_ended_it() -> None:
    for seed in range(100):
        cluster = Cluster(seed, faults=False)
        cluster.finish()
        for ends in cluster.closed.values():
            assert ends[0].outcome != "failed", f"seed {seed}: {ends[0]}"


def test_without_faults_the_index_equals_the_caches() -> None:
    for seed in range(100):
        cluster = Cluster(seed, faults=False)
        cluster.finish()
        pool = cluster.router.pools[MODEL]
        if pool.index.exact is None:
            continue
        for target, stream in pool.index.streams.items():
            assert stream.state == "exact"
            assert pool.index.exact.blocks_of(target) == set(cluster.engines[target.worker].blocks), f"seed {seed}"


def test_the_same_seed_gives_the_same_effects_byte_for_byte() -> None:
    for seed in range(20):
        assert effects_of(seed) == effects_of(seed)


def test_a_restored_router_goes_on_as_the_original_would() -> None:
    for seed in range(60):
        cluster = Cluster(seed, requests=25)
        cluster.run.run(limit=20 + seed)
        twin = Router(cluster.settings, seed=99)
        saved = cluster.router.snapshot()
        twin.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(saved), strict=False))
        assert twin.snapshot() == saved
        assert continued(cluster, twin), f"seed {seed}"


def continued(cluster: Cluster, twin: Router) -> bool:
    """Feed the rest of the run to both and compare their effects event by event."""
    same = True
    before = cluster.watch

    def watch(now: Nanos, name: str, event: Event, effects: list[Effect]) -> None:
        nonlocal same
        before(now, name, event, effects)
        if name == "router":
            same = same and twin.handle(now, event) == effects

    cluster.run._watch = watch
    cluster.finish()
    return same


def effects_of(seed: int) -> bytes:
    cluster = Cluster(seed)
    written: list[bytes] = []
    before = cluster.watch

    def watch(now: Nanos, name: str, event: Event, effects: list[Effect]) -> None:
        before(now, name, event, effects)
        written.extend(msgspec.msgpack.encode(effect) for effect in effects)

    cluster.run._watch = watch
    cluster.finish()
    return b"".join(written)
