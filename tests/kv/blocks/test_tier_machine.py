"""Does the tier machine give only right blocks, end every job and announce what is gone, whatever fails?"""

import random
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import MILLISECOND, SECOND
from penstock_kv.blocks.block_manager import OrderName
from penstock_kv.blocks.tiers import tier_events as events
from penstock_kv.blocks.tiers.tier_settings import COPY_DEADLINE, LOAD_DEADLINE, PEER_DEADLINE, REST, TierSettings
from penstock_kv.blocks.tiers.tier_state import Edge
from tests.depth import deep
from tests.kv.blocks.tier_world import CHAINS, PEERS, World, random_step

SEEDS = 200
STEPS = 1_000
ORDERS: tuple[OrderName, ...] = get_args(OrderName)


def random_settings(rng: random.Random) -> TierSettings:
    return TierSettings(
        block_bytes=1 << 20,
        block_tokens=16,
        host_blocks=rng.choice((2, 9, 24)),
        disk_blocks=rng.choice((0, 12, 40)),
        object_blocks=rng.choice((0, 20)),
        order=rng.choice(ORDERS),
        offload=rng.choice(("all", "all", "presence", "second_hit")),
        min_priority=rng.choice((0, 0, 1)),
        write=rng.choice(("through", "selective", "back")),
        bytes_in_flight=rng.choice((1, 4, 100)) << 20,
    )


@pytest.mark.parametrize("first", range(0, deep(SEEDS), 10))
def test_whatever_fails_no_wrong_block_is_given_and_every_job_ends(first: int) -> None:
    hits: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        world = World(random_settings(rng), rng, faults=rng.choice((0.0, 0.3)))
        for step in range(STEPS):
            random_step(world)
            if step % 5 == 0:
                world.check()
        world.end_all()
        world.check()
        world.tally()
        hits.update(world.hits)
        missed.update(world.missed)
        skipped.update(world.skipped)
    assert min(hits["host"], sum(hits.values()) - hits["host"]) > 0
    assert {"absent", "cancelled"} <= set(missed)
    assert skipped["full"] + skipped["busy"] > 0


positions = st.integers(0, 1 << 20)
chains = st.integers(0, len(CHAINS) - 1)


class TierWorlds(RuleBasedStateMachine):
    """The same, chosen so that hypothesis can shrink what fails."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        rng = random.Random(seed)
        self.world = World(random_settings(rng), rng, faults=0.3)

    @rule(chain=chains, first=st.integers(0, 12), count=st.integers(1, 8), priority=st.integers(0, 2))
    def store(self, chain: int, first: int, count: int, priority: int) -> None:
        if len(self.world.free_rows) >= count:
            self.world.store(chain, first, count, priority=priority)

    @rule(chain=chains, count=st.integers(1, 20), deadline=st.sampled_from((None, 0.001)))
    def load(self, chain: int, count: int, deadline: float | None) -> None:
        if len(self.world.free_rows) >= count:
            self.world.load(CHAINS[chain][:count], deadline=deadline)  # type: ignore[arg-type]

    @rule(chain=chains, count=st.integers(1, 20))
    def ask_and_prefetch(self, chain: int, count: int) -> None:
        self.world.ask(CHAINS[chain][:count])
        self.world.post(events.PrefetchWanted(keys=CHAINS[chain][:count]))

    @precondition(lambda self: self.world.open_moves)
    @rule(which=positions, failing=st.sets(st.integers(0, 8)))
    def end_move(self, which: int, failing: set[int]) -> None:
        ids = sorted(self.world.open_moves)
        self.world.end_move(ids[which % len(ids)], failing.__contains__)

    @precondition(lambda self: self.world.jobs)
    @rule(which=positions)
    def cancel(self, which: int) -> None:
        ids = sorted(self.world.jobs)
        self.world.cancel(ids[which % len(ids)])

    @precondition(lambda self: self.world.asks)
    @rule(blocks=st.integers(0, 20))
    def answer_peer(self, blocks: int) -> None:
        self.world.answer_peer(min(self.world.asks), blocks)

    @rule(passed=st.sampled_from((1, 100, 12_000)))
    def pass_time(self, passed: int) -> None:
        self.world.pass_time(passed * MILLISECOND)

    @rule(peers=st.sampled_from(((), PEERS)), chain=chains)
    def change_peers(self, peers: tuple[str, ...], chain: int) -> None:
        self.world.post(events.PeersChanged(peers=peers))
        self.world.post(events.BlocksUsed(keys=CHAINS[chain]))

    @rule(chain=chains, until=st.sampled_from((0, 50)))
    def pin(self, chain: int, until: int) -> None:
        self.world.post(events.BlocksPinned(keys=CHAINS[chain], until=until and self.world.now + until * MILLISECOND))

    @rule(tier=st.sampled_from((None, "host", "disk", "object", "peer")))
    def clear(self, tier: Any) -> None:
        self.world.clear(tier)

    @rule()
    def damage(self) -> None:
        self.world.damage()

    @rule(whole=st.booleans())
    def restart(self, whole: bool) -> None:
        if whole:
            self.world.crash()
        else:
            self.world.restart()

    @invariant()
    def right(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end_all()
            self.world.check()


TestTierWorlds = TierWorlds.TestCase
TestTierWorlds.settings = settings(max_examples=deep(150), stateful_step_count=50, deadline=None)


# --- tables and situations --------------------------------------------------------------------------------------------


def world_of(**settings: Any) -> World:
    defaults = {"block_bytes": 1 << 20, "block_tokens": 16, "host_blocks": 32}
    return World(TierSettings(**(defaults | settings)), random.Random(0))


def stored(world: World, chain: int = 0, first: int = 0, count: int = 4, **hints: float) -> int:
    """Store blocks and let everything come to its end."""
    job = world.store(chain, first, count, **hints)
    world.end_all()
    return job


def evicted(world: World, chain: int = 0) -> None:
    """Take a chain's blocks out of the host tier only."""
    world.clear("host")
    assert not set(CHAINS[chain]) & set(world.machine.tiers["host"].index)


def moves(world: World) -> list[tuple[str, str, int]]:
    """Open moves, and how many blocks each has."""
    return [(move.source, move.target, len(move.keys)) for move in world.open_moves.values()]


@pytest.mark.parametrize(
    ("policy", "again", "second_chain", "in_disk"),
    [
        ({"offload": "all"}, [], 4, 4),
        ({"offload": "presence"}, [], 4, 0),
        ({"offload": "second_hit"}, [4], 0, 0),
    ],
)
def test_each_policy_takes_its_blocks(
    policy: dict[str, str], again: list[int], second_chain: int, in_disk: int
) -> None:
    world = world_of(disk_blocks=32, **policy)
    taken = []
    for chain, before in ((0, False), (0, False), (3, False), (0, True)):
        if before:
            evicted(world)
        world.store(chain, 0, 4)
        taken.append(sum(count for source, _, count in moves(world) if source == "engine"))
        world.end_all()
    assert taken == [0 if again else 4, sum(again), second_chain, in_disk]


def test_blocks_below_the_threshold_and_behind_a_hole_are_not_taken() -> None:
    world = world_of(min_priority=2)
    assert world.ended[stored(world, priority=1)] == [False] * 4
    assert world.ended[stored(world, first=4, priority=2)] == [False] * 4, "nothing before it was taken"
    assert world.ended[stored(world, priority=2)] == [True] * 4
    assert world.ended[stored(world, first=4, priority=3)] == [True] * 4
    assert world.machine.state.tiers["host"].skipped == {"priority": 4, "hole": 4}


def test_write_through_writes_at_once_and_selective_at_second_use() -> None:
    world = world_of(disk_blocks=32, object_blocks=32)
    world.store(0, 0, 4)
    world.end_move()
    assert moves(world) == [("host", "disk", 4), ("host", "object", 4)]
    world = world_of(disk_blocks=32, write="selective")
    stored(world)
    assert not world.machine.tiers["disk"].index
    world.load(CHAINS[0][:3])
    assert moves(world) == [("host", "engine", 3), ("host", "disk", 3)]


def test_write_back_saves_blocks_before_their_slots_are_used() -> None:
    world = world_of(host_blocks=8, disk_blocks=32, write="back")
    stored(world, count=2)
    stored(world, chain=3, count=2)
    stored(world, chain=6, count=2)
    assert not world.machine.tiers["disk"].index
    world.store(9, 0, 2)
    world.end_move()  # the host tier is full, and two slots are to be kept empty
    assert moves(world) == [("host", "disk", 2)]
    assert not set(CHAINS[0][:2]) & set(world.machine.tiers["host"].index), "what is being written can't be read"
    world.store(9, 2, 2)
    assert moves(world) == [("host", "disk", 2)], "its slots are not empty yet"
    assert world.machine.state.tiers["host"].skipped == {"full": 2}
    world.end_all()
    world.load(CHAINS[0][:2])
    assert moves(world) == [("disk", "host", 2)]
    world.end_all()
    assert world.machine.state.counts.loaded == 2


def test_write_back_loses_old_blocks_rather_than_refusing_new_ones_while_a_disk_rests() -> None:
    world = world_of(host_blocks=8, disk_blocks=32, write="back")
    for chain in (0, 3, 6, 9):
        stored(world, chain, count=2)
    stored(world, 0, 8, 1)
    world.end_all()
    world.machine.state.edges["host>disk"].rest_until = world.now + REST
    for number in range(10, 18):
        assert world.ended[stored(world, 0, number, 1)] == [True]
    assert world.machine.state.tiers["host"].lost > 0


def test_a_full_tier_skips_and_counts() -> None:
    world = world_of(host_blocks=8, disk_blocks=2)
    stored(world, count=2, pin=60.0)
    for chain in (3, 6, 9):
        stored(world, chain, count=2, pin=60.0)
    assert world.ended[stored(world, first=8, count=2)] == [False, False]
    assert world.machine.state.tiers["host"].skipped == {"full": 2}
    assert world.machine.state.tiers["disk"].skipped == {"full": 6}
    world.pass_time(61 * SECOND)
    assert world.ended[stored(world, first=8, count=2)] == [True, True]


def test_what_is_offered_beyond_the_bytes_in_flight_is_skipped() -> None:
    world = world_of(host_blocks=16)
    world.store(0, 0, 6)
    world.store(3, 0, 6)
    assert moves(world) == [("engine", "host", 6), ("engine", "host", 2)]
    assert world.machine.state.tiers["host"].skipped == {"busy": 4}


def test_writes_wait_for_each_other_and_go_in_larger_moves() -> None:
    world = world_of(disk_blocks=64, bytes_in_flight=4 << 20)
    for first in range(4):
        world.store(0, first, 1)
    for _ in range(4):
        world.end_move(min(id for id, move in world.open_moves.items() if move.source == "engine"))
    assert moves(world) == [("host", "disk", 1)] * 4
    for first in range(4, 8):
        world.store(0, first, 1)
        world.end_move(max(world.open_moves))
    for _ in range(4):
        world.end_move()
    assert moves(world) == [("host", "disk", 4)]


def mixed() -> World:
    """Blocks 2 and 3 of six are in the host tier, the others on disk."""
    world = world_of(disk_blocks=32)
    stored(world, count=6)
    evicted(world)
    stored(world, first=2, count=2)
    return world


def test_a_load_copies_what_is_in_the_host_tier_at_once_and_fetches_the_rest() -> None:
    world = mixed()
    job = world.load(CHAINS[0][:7])
    assert moves(world) == [("host", "engine", 2), ("disk", "host", 4)]
    world.end_move()
    assert job not in world.ended
    world.end_move()
    assert moves(world) == [("host", "engine", 4)]
    world.end_move()
    assert world.ended[job] == [True] * 6 + [False]
    assert world.machine.state.counts.missed == {"absent": 1}
    assert {name: counts.hits for name, counts in world.machine.state.tiers.items() if counts.hits} == {
        "host": 2,
        "disk": 4,
    }


def test_a_part_that_fails_makes_all_behind_it_misses() -> None:
    world = mixed()
    job = world.load(CHAINS[0][:6])
    world.end_move()
    world.end_move(fail=lambda position: position == 1)
    assert moves(world) == [("host", "engine", 1)], "what is behind the failed block is not copied"
    world.end_all()
    assert world.ended[job] == [True] + [False] * 5
    assert world.machine.state.counts.missed == {"failed": 5}


def test_several_jobs_share_one_fetch() -> None:
    world = mixed()
    jobs = [world.load(CHAINS[0][:6]), world.load(CHAINS[0][:1]), world.load(CHAINS[0][4:6])]
    assert sum(move.source == "disk" for move in world.open_moves.values()) == 1
    world.cancel(jobs[0])
    world.end_all()
    assert [world.ended[job] for job in jobs] == [[False] * 6, [True], [True, True]]


def test_a_fetch_that_nobody_wants_any_more_is_cancelled() -> None:
    world = mixed()
    job = world.load(CHAINS[0][:2])
    world.cancel(job)
    assert world.ended[job] == [False, False], "nothing touches its rows"
    assert world.cancelled == set(world.open_moves)


def test_a_late_fetch_is_a_miss_at_once_and_what_it_brings_later_is_of_use() -> None:
    world = mixed()
    job = world.load(CHAINS[0][:2], deadline=0.5)
    world.pass_time(SECOND // 2)
    assert world.ended[job] == [False, False]
    assert world.machine.state.counts.missed == {"late": 2}
    world.pass_time(LOAD_DEADLINE)
    assert world.machine.state.tiers["disk"].late == 1
    assert world.answers[world.ask(CHAINS[0][4:6])].reason == "resting", "the disk is left alone for a while"
    world.end_move()
    job = world.load(CHAINS[0][:2])
    world.end_all()
    assert world.ended[job] == [True, True]
    world.pass_time(REST)
    assert world.answers[world.ask(CHAINS[0][4:6])].blocks == 2


def test_a_corrupt_block_is_never_read_again() -> None:
    world = mixed()
    slot = world.machine.tiers["disk"].index[CHAINS[0][1]]
    world.damaged.add(("disk", slot))
    job = world.load(CHAINS[0][:4])
    world.end_all()
    assert world.ended[job] == [True, False, False, False]
    assert world.log.count(events.BlocksRemoved(tier="disk", keys=[CHAINS[0][1]])) == 1
    assert world.log.count(events.ForgetRecords(tier="disk", slots=(slot,), keys=(CHAINS[0][1],))) == 1
    assert world.answers[world.ask(CHAINS[0][:4])] == events.BlocksAnswered(
        query=world.next_id, blocks=1, reason="absent"
    )
    world.damaged.add(("host", world.machine.tiers["host"].index[CHAINS[0][0]]))
    job = world.load(CHAINS[0][:1])
    world.end_all()
    assert world.ended[job] == [False]
    assert CHAINS[0][0] not in world.machine.tiers["host"].index


def test_clearing_all_voids_what_is_under_way() -> None:
    world = mixed()
    jobs = [world.load(CHAINS[0][:6]), world.store(3, 0, 2)]
    world.clear(None)
    world.end_all()
    assert [any(world.ended[job]) for job in jobs] == [False, False]
    assert world.announced == {"host": set(), "disk": set()}
    assert not world.records


def test_what_a_peer_sends_while_all_is_cleared_is_void() -> None:
    world = world_of()
    world.post(events.PeersChanged(peers=PEERS[:1]))
    world.ask(CHAINS[0][:2])
    world.answer_peer(min(world.asks), 2)
    job = world.load(CHAINS[0][:2])
    world.clear(None)
    assert world.ended[job] == [False, False]
    world.end_move()
    assert not world.machine.tiers["host"].index


def test_prefetched_blocks_are_in_the_host_tier_when_they_are_wanted() -> None:
    world = mixed()
    world.post(events.PrefetchWanted(keys=CHAINS[0][:7]))
    assert moves(world) == [("disk", "host", 4)]
    world.end_all()
    assert world.machine.state.counts.prefetched == 4
    world.load(CHAINS[0][:6])
    assert moves(world) == [("host", "engine", 6)]
    world.end_all()
    counts = world.machine.state.counts
    assert (counts.prefetch_hits, counts.prefetch_wasted) == (4, 0)


def test_what_was_prefetched_for_nobody_is_counted_as_wasted_once_it_is_evicted() -> None:
    world = mixed()
    world.post(events.PrefetchWanted(keys=CHAINS[0][:7]))
    world.end_all()
    counts = world.machine.state.counts
    evicted(world)
    assert (counts.prefetch_hits, counts.prefetch_wasted) == (0, 4) and not world.machine.state.ahead


def test_pins_and_priorities_hold_in_every_tier_and_are_counted_where_they_can_not() -> None:
    world = world_of(host_blocks=8, disk_blocks=8)
    stored(world, count=4, pin=10.0, priority=1)
    for chain in (3, 6, 9, 3, 6, 9):
        stored(world, chain, count=4)
    assert all(set(CHAINS[0][:4]) <= world.announced[name] for name in ("host", "disk"))
    world.post(events.BlocksPinned(keys=CHAINS[0][:4], until=0))
    for chain in (3, 6, 9, 3, 6, 9):
        stored(world, chain, count=4, priority=1)
    assert not any(set(CHAINS[0][:4]) & world.announced[name] for name in ("host", "disk"))
    world = world_of(order="lru")
    stored(world, pin=10.0)
    assert world.machine.state.tiers["host"].hints_ignored == 4


def test_the_peer_that_has_most_is_fetched_from_and_its_answer_is_remembered() -> None:
    world = world_of()
    world.post(events.PeersChanged(peers=PEERS))
    query = world.ask(CHAINS[0][:6])
    near, far = sorted(world.asks)
    world.answer_peer(near, 2)
    assert query not in world.answers
    world.answer_peer(far, 4)
    assert world.answers[query] == events.BlocksAnswered(query=query, blocks=4, reason="absent")
    assert world.answers[world.ask(CHAINS[0][:6])].blocks == 4, "nobody is asked again"
    job = world.load(CHAINS[0][:6])
    assert [(move.source, move.peer, move.source_slots) for move in world.open_moves.values()] == [
        ("peer", "far", [-1] * 4)
    ]
    world.end_all()
    assert world.ended[job] == [True] * 4 + [False] * 2
    assert world.machine.state.tiers["peer"].hits == 4


def test_a_peer_that_fails_is_left_alone_for_a_while() -> None:
    world = world_of()
    world.post(events.PeersChanged(peers=PEERS))
    query = world.ask(CHAINS[0][:6])
    world.answer_peer(min(world.asks), 2)
    world.pass_time(PEER_DEADLINE)
    assert world.answers[query].blocks == 2, "who does not answer is not waited for"
    world.asks.clear()
    job = world.load(CHAINS[0][:2])
    world.end_move(fail=lambda position: True)
    assert world.ended[job] == [False, False]
    assert world.answers[world.ask(CHAINS[3][:6])].blocks == 0
    assert not world.asks
    world.pass_time(REST)
    world.ask(CHAINS[3][:6])
    assert len(world.asks) == 2


@pytest.mark.parametrize(
    ("seconds_per_token", "deadline", "blocks", "reason"),
    [
        (0.0, None, 6, ""),  # not measured yet: all that is there
        (1e-3, None, 6, ""),
        (1e-6, None, 0, "recompute is cheaper"),
        (20e-6, None, 2, "recompute is cheaper"),  # those in the host tier only
        (1e-3, 0.004, 4, "deadline"),  # 0.1 ms and 1 ms of latency, 0.1 and 1 ms per block
    ],
)
def test_only_what_beats_computing_is_answered(
    seconds_per_token: float, deadline: float | None, blocks: int, reason: str
) -> None:
    world = world_of(disk_blocks=32)
    stored(world, count=6)
    evicted(world)
    stored(world, count=2)
    world.machine.state.edges.clear()
    world.machine.restore(world.machine.snapshot())  # nothing is measured
    world.post(events.EngineSpeed(seconds_per_token=seconds_per_token))
    answer = world.answers[world.ask(CHAINS[0][:6], deadline=deadline)]  # type: ignore[arg-type]
    assert (answer.blocks, answer.reason) == (blocks, reason)


def test_a_slow_tier_is_measured_and_no_longer_answered_for() -> None:
    world = mixed()
    world.post(events.EngineSpeed(seconds_per_token=1e-3))
    assert world.answers[world.ask(CHAINS[0][:6])].blocks == 6
    world.load(CHAINS[0][:2])
    world.end_move(seconds=5.0)
    world.end_all()
    assert world.answers[world.ask(CHAINS[0][:6])] == events.BlocksAnswered(
        query=world.next_id, blocks=4, reason="recompute is cheaper"
    )


def test_a_slow_copy_keeps_loads_away_for_a_while_and_not_for_ever() -> None:
    world = world_of()
    stored(world, count=6)
    world.post(events.EngineSpeed(seconds_per_token=1e-3))
    world.load(CHAINS[0][:6])
    world.end_move(seconds=5.0)
    assert world.answers[world.ask(CHAINS[0][:6])].blocks == 0
    world.now += 20 * 60 * SECOND
    assert world.answers[world.ask(CHAINS[0][:6])].blocks == 6


def test_latency_and_rate_of_an_edge_are_those_of_its_moves() -> None:
    edge = Edge(source="disk", target="host")
    assert edge.speed(0).rate == pytest.approx(1e9)
    for number in range(100):
        size = (1 + number % 8) << 20
        edge.measured(0, size, 0.02 + size / 200e6)
    assert edge.speed(0).rate == pytest.approx(200e6, rel=0.15)
    assert edge.speed(0).latency == pytest.approx(0.02, rel=0.25)
    edge.in_flight = 200_000_000
    assert edge.seconds(0, 0) == pytest.approx(1.0, rel=0.1)


def test_what_survived_a_restart_is_announced_and_served() -> None:
    world = world_of(disk_blocks=32)
    stored(world, count=6)
    world.crash()
    assert world.announced == {"disk": set(CHAINS[0][:6])}
    job = world.load(CHAINS[0][:6])
    world.end_all()
    assert world.ended[job] == [True] * 6
    world.post(
        events.TierFound(tier="disk", keys=CHAINS[3][:2], slots=[0, 99], generations=[0, 0], parents=[None, None])
    )
    assert world.log[-1] == events.ForgetRecords(tier="disk", slots=(0, 99), keys=tuple(CHAINS[3][:2]))


def test_answers_that_nobody_waits_for_are_counted() -> None:
    world = world_of()
    world.post(events.MoveEnded(id=99, done=[]))
    world.post(events.PeerAnswered(id=99, blocks=1))
    world.post(events.JobCancelled(job=99))
    assert world.machine.state.counts.unknown == 3
    job = world.store(0, 0, 2)
    world.post(events.BlocksWanted(job=job, keys=CHAINS[0][:1], rows=[0]))
    assert world.machine.state.counts.unknown == 4
    assert world.open_moves[1].deadline == COPY_DEADLINE


def test_wrong_settings_name_the_fix() -> None:
    with pytest.raises(ConfigError, match="host_blocks is 0"):
        TierSettings(block_bytes=1, block_tokens=1, host_blocks=0)
    with pytest.raises(ConfigError, match="disk_blocks is -1"):
        TierSettings(block_bytes=1, block_tokens=1, host_blocks=1, disk_blocks=-1)
