"""Tiers of a whole simulated cluster: disk, peers, books that add up after every event, and a snapshot that goes on."""

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import SECOND, Wake, Woken
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import Prompt
from penstock.router.settings import RouterSettings
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import Fault, PoolPlan, SimulationPlan
from penstock_lab.simulate.tiers.simulated_tiers import keys_of
from penstock_lab.simulate.tiers.tier_assembly import tiers_of
from penstock_lab.simulate.tiers.tier_plan import TierPlan
from tests.lab.simulate.test_tier_hit_rates import BYTES, SIZE, generated

SLOW = TimingSettings(prefill=(0.0, 0.5, 10.0), decode=(0.0, 0.0, 5.0))
"""An engine that computes so slowly that loading pays."""
SIM = SimSettings(block_size=SIZE, kv_blocks=90, max_model_len=1 << 20, timing=SLOW)
SIM = msgspec.structs.replace(SIM, transfer=msgspec.structs.replace(SIM.transfer, kv_bytes_per_token=BYTES // SIZE))


def ended(cache: TierPlan, *, mode: str = "round_robin", faults: tuple[Fault, ...] = ()) -> list[RequestRecord]:
    """Simulate two engines, every machine checked after every event."""
    requests = [msgspec.structs.replace(each, at=number * 2.0) for number, each in enumerate(generated(40, 5))]
    pool = PoolPlan(sim=SIM, replicas=2, cache=cache)
    router = RouterSettings(mode=mode, request_timeout=100_000.0)
    plan = SimulationPlan(model="m", pools={"main": pool}, router=router, faults=faults, checked=True)
    found: list[RequestRecord] = []
    SimulatedCluster(plan, iter(requests), record=found.append).run()
    return found


def tokens(found: list[RequestRecord], tier: str) -> int:
    return sum((record.cached_by_tier or {}).get(tier, 0) for record in found)


def test_what_host_memory_lacks_comes_from_disk() -> None:
    small, large = TierPlan(host=100 * BYTES, order="lru"), TierPlan(host=100 * BYTES, disk=600 * BYTES, order="lru")
    without, with_disk = ended(small), ended(large)
    assert tokens(without, "disk") == 0 < tokens(with_disk, "disk")
    assert sum(record.cached or 0 for record in with_disk) > sum(record.cached or 0 for record in without)
    assert ended(large) == with_disk  # and again the same


def test_peers_give_what_an_engine_never_computed_also_where_one_dies() -> None:
    plan = TierPlan(host=400 * BYTES, order="lru", peers=True)
    assert tokens(ended(plan), "peer") > 0
    fault = Fault(at=51.0, kind="fail", worker="main-0", restart=5.0)
    found = ended(plan, mode="kv", faults=(fault,))
    assert [record.outcome for record in found] == ["ok"] * len(found)


def test_blocks_come_up_when_the_next_request_is_expected() -> None:
    plan = TierPlan(host=100 * BYTES, disk=1000 * BYTES, order="lru")
    tiers = tiers_of(plan, SIM, Engine(SIM).timing)
    assert tiers is not None

    def keep(base: int, at: int) -> None:
        tiers.store(SubmitRequest(id=f"r{base}", max_tokens=1), range(base, base + 40), 0, 40, at)
        tiers.advance(at + 50 * SECOND)

    for number in range(4):
        keep(1000 * number, 60 * number * SECOND)
    gone = set(keys_of(range(40))) - tiers.places["host"]  # on disk alone now
    assert len(gone) > 20
    tiers.expect(range(40), 40, 300 * SECOND)
    assert tiers.due == 300 * SECOND
    again = tiers_of(plan, SIM, Engine(SIM).timing)
    assert again is not None
    again.restore(tiers.snapshot())
    for each in (tiers, again):
        each.advance(299 * SECOND)
        assert not gone & each.places["host"] and each.prefetched()["brought"] == 0
        each.advance(400 * SECOND)
        assert len(gone & each.places["host"]) == each.prefetched()["brought"] > 20


def test_lower_tiers_without_host_memory_are_refused() -> None:
    try:
        tiers_of(TierPlan(disk=1 << 40), SIM, Engine(SIM).timing)
    except ConfigError as error:
        assert "cache.host is 0" in str(error) and "--host-cache" in str(error.hint)
    else:
        raise AssertionError("a disk tier without host memory was taken")


def test_a_snapshot_with_tiers_goes_on_as_the_engine_does() -> None:
    def engine() -> Engine:
        plan = TierPlan(host=100 * BYTES, disk=1000 * BYTES, order="lru")
        return Engine(SIM, tiers=lambda settings, timing: tiers_of(plan, settings, timing))

    def prompt(base: int, blocks: int) -> SubmitRequest:
        names = list(range(base, base + blocks))
        return SubmitRequest(id=f"r{base}-{blocks}", prompt=Prompt(blocks * SIZE, names), max_tokens=3)

    def run(each: Engine, at: int, event: object, until: int) -> list:
        out = list(each.handle(at, event))
        wake = next((effect.at for effect in out if isinstance(effect, Wake)), None)
        while wake is not None and wake <= until:
            more = list(each.handle(wake, Woken()))
            each.check()
            out += more
            wake = next((effect.at for effect in more if isinstance(effect, Wake)), None)
        return [effect for effect in out if not isinstance(effect, Wake)]

    first = engine()
    for turn, base in enumerate((1000, 2000, 3000)):
        run(first, turn * 10**11, prompt(base, 80), (turn + 1) * 10**11)
    run(first, 4 * 10**11, prompt(1000, 70), 4 * 10**11)
    assert first.pulling == 1
    second = engine()
    second.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(first.snapshot())))
    after = [run(each, 4 * 10**11 + 1, prompt(5000, 3), 6 * 10**11) for each in (first, second)]
    assert after[0] == after[1]
    done = [effect for effect in after[0] if isinstance(effect, EngineFinished)]
    assert len(done) == 2 and {tier for each in done for tier in each.sources} >= {"disk"}


@pytest.mark.parametrize(("hint", "kept"), [({}, 0), ({"keep": 3}, 16), ({"pin": 50.0}, 16)])
def test_blocks_of_a_request_with_a_hint_outlive_others(hint: dict[str, float], kept: int) -> None:
    tiers = tiers_of(TierPlan(host=100 * BYTES), SIM, Engine(SIM).timing)
    assert tiers is not None

    def store(base: int, **more: float) -> None:
        nonlocal now
        submit = SubmitRequest(id=f"r{base}", prompt=Prompt(0), max_tokens=1, **more)
        tiers.store(submit, list(range(base, base + 16)), 0, 16, now)
        now += 1_000_000_000
        tiers.advance(now)
        tiers.check()

    now = 0
    store(1000, **hint)
    for base in range(2000, 12_000, 1000):
        store(base)
    asked = SubmitRequest(id="again", prompt=Prompt(0), max_tokens=1)
    assert tiers.lookup(asked, list(range(1000, 1016)), 0, 16, now) == kept
