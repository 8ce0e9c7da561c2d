"""Whatever befalls a planner, its limits hold, one tick is under way, and a restart changes nothing that it does."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from penstock.kernel.values import Slo
from penstock.planner import events as planning
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.planner import Planner
from penstock.planner.plugins.plugin_registry import PlannerPlugin
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.engine.settings import SimSettings
from tests.depth import seeds
from tests.stateful.planner_world import BASE, Made, Past, Wanderer, World

SEEDS = 240
CHUNK = 60


@pytest.fixture
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ticks up early enough that some of them are."""
    monkeypatch.setattr("penstock.planner.planner.TICK_TIMEOUT", 11.0)


def wanderers(seed: int) -> Made:
    """Return a planner of steps that want anything, some of them not on every tick."""

    def made() -> tuple[PlannerSettings, Sequence[PlannerPlugin]]:
        dice = random.Random(seed)
        settings = PlannerSettings(tick=BASE, manual_hold=dice.choice((0.0, 20.0)))
        settings = msgspec.structs.replace(settings, budget=BudgetSettings(max_gpus=dice.choice((None, 6, 16))))
        return settings, [
            Wanderer(1, stage="predict"),
            Wanderer(2, priority=10, interval=10.0, hold="hold_last"),
            Wanderer(3, priority=20, requires=("predictions",)),
            Wanderer(4, stage="reconcile", interval=5.0),
            Wanderer(5, stage="constrain"),
        ]

    return made


def policy(name: str) -> Made:
    """Return a planner of a policy, its engines known beforehand."""
    known = KnownSpeeds(metrics={"self-benchmark": perf_metrics(SimSettings(kv_blocks=2000))})
    inputs = PolicyInputs(slo=Slo(ttft=1.0, itl=0.03), speeds={"": {"prefill": known, "decode": known}})

    def made() -> tuple[PlannerSettings, Sequence[PlannerPlugin]]:
        settings = PlannerSettings(
            tick=BASE,
            policy=name,  # type: ignore[arg-type]
            budget=BudgetSettings(max_gpus=30),
            throughput_interval=30.0,
        )
        return settings, plugins_of(settings, inputs)

    return made


def differs(made: Made, world: World, place: int) -> str | None:
    """Keep a planner after ``place`` events, go on with one that was restored, and say where the two part."""
    first = replayed(made, world.past[:place])
    saved = first.snapshot()
    twin = Planner(*made(), strict=True)
    twin.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(saved), strict=False))
    if msgspec.msgpack.encode(twin.snapshot()) != msgspec.msgpack.encode(saved):
        return f"after {place} events: it does not keep what it was given"
    for number, (now, event, effects) in enumerate(world.past[place:]):
        found = twin.handle(now, event)
        twin.check()
        if msgspec.msgpack.encode(found) != msgspec.msgpack.encode(effects):
            return f"restored after {place} events, {number} events later: {found} instead of {effects}"
    return None


def replayed(made: Made, past: Past) -> Planner:
    planner = Planner(*made(), strict=True)
    for now, event, effects in past:
        assert msgspec.msgpack.encode(planner.handle(now, event)) == msgspec.msgpack.encode(effects)
    return planner


@pytest.mark.usefixtures("short_ticks")
@pytest.mark.parametrize("first", seeds(SEEDS, CHUNK))
def test_whatever_happens_the_limits_hold_and_a_restart_changes_nothing(first: int) -> None:
    scaled = kinds = 0
    seen = set[str]()
    for seed in range(first, first + CHUNK):
        made = wanderers(seed)
        world = World(seed, made)
        try:
            world.run(120)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        place = random.Random(seed).randrange(len(world.past))
        assert (found := differs(made, world, place)) is None, f"seed {seed}: {found}"
        scaled += world.scaled
        kinds += len({type(event) for _, event, _ in world.past})
        seen |= {e.record.outcome for _, _, effects in world.past for e in effects if isinstance(e, planning.Ticked)}
    assert scaled > CHUNK and kinds > 7 * CHUNK, "hardly anything happened: this is not tested then"
    assert seen >= {"apply", "keep", "veto", "blind", "timeout"}


@pytest.mark.parametrize("name", ["slo", "hybrid", "load-classic", "sla-classic"])
def test_a_policy_that_was_restored_goes_on_as_the_original_would(name: str) -> None:
    made = policy(name)
    applied = 0
    for seed in range(6):
        world = World(seed, made, quiet=seed % 2 == 0)
        world.run(160)
        applied += world.scaled
        place = random.Random(seed).randrange(len(world.past) // 3, len(world.past))
        assert (found := differs(made, world, place)) is None, f"seed {seed}: {found}"
    assert applied, "nothing was ever scaled: this is not tested then"


@pytest.mark.usefixtures("short_ticks")
def test_the_same_events_lead_to_the_same_effects() -> None:
    for seed in range(10):
        world = World(seed, wanderers(seed))
        world.run(60)
        replayed(wanderers(seed), world.past)


def test_a_snapshot_of_another_version_is_refused() -> None:
    planner = Planner(*wanderers(0)())
    with pytest.raises(ValueError, match="a planner has version 99, and this release reads 7"):
        planner.restore({**planner.snapshot(), "version": 99})


def test_plugins_that_are_configured_no_more_are_forgotten_and_new_ones_begin_anew() -> None:
    world = World(0, wanderers(0))
    world.run(40)
    settings, plugins = wanderers(0)()
    fresh = Wanderer(99)
    twin = Planner(settings, [*plugins[:2], fresh], strict=True)
    twin.restore(world.planner.snapshot())
    ours = {id for id, seat in twin.registry.seats.items() if seat.plugin is not None}
    assert ours == {plugin.spec.id for plugin in plugins[:2]} | {fresh.spec.id}
