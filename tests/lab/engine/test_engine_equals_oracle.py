"""Does the lazy engine do what the naive one does? Same milestones, times and KV events, over random workloads."""

from bisect import bisect_right
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.machine import Event
from penstock.kernel.values import Prompt
from penstock_lab.engine.events import AbortRequest, ClearCache, ReleaseKv, SubmitRequest
from penstock_lab.engine.settings import SimSettings, TimingSettings, TransferSettings
from tests.depth import deep
from tests.lab.engine.driving import Driven
from tests.lab.engine.models import SLOW, profile_with_experts
from tests.lab.engine.oracle import Oracle

MICROSECOND = 1_000
TIMINGS = [
    TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 10.0)),
    TimingSettings(kind="polynomial"),
    TimingSettings(kind="roofline", model="given", gpu="given"),
    TimingSettings(kind="operators", model="given", profile="given"),
]
TABLE = {**profile_with_experts(), "gpu": SLOW}
"""What the kinds of timing read from files; each takes its own."""


class Work(NamedTuple):
    """What happens to an engine: events, and how long which request's KV is on its way and whether it comes."""

    events: list[tuple[int, Event]]
    pulls: dict[str, tuple[int, bool]]


@st.composite
def small_engines(draw: st.DrawFn) -> SimSettings:
    """Engines so small that everything runs short."""
    drafts = draw(st.sampled_from([0, 0, 0, 1, 3]))
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    return SimSettings(
        block_size=block_size,
        kv_blocks=draw(st.integers(70, 160)) // block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs * (1 + drafts), draw(st.integers(1, 64))),
        max_model_len=400,
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.25])),
        preemption_mode=draw(st.sampled_from(["lifo", "fifo"])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=draw(st.booleans()),
        emit_decode_blocks=draw(st.booleans()),
        num_speculative_tokens=drafts,
        accept_rate=draw(st.sampled_from([0.0, 0.5, 1.0])),
        reply_tokens=draw(st.sampled_from([0, 6])),
        timing=draw(st.sampled_from(TIMINGS)),
        transfer=TransferSettings(
            pull=draw(st.sampled_from(["full_prompt", "missing"])),
            hold_timeout=draw(st.sampled_from([0.040000031, 0.5000000371, 480.0])),
        ),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Work:
    """Requests with shared prefixes, some handed off, some of them aborted, and now and then a cleared cache."""
    handed = draw(st.booleans())
    pulls: dict[str, tuple[int, bool]] = {}
    prefixes = [[100 + p] * draw(st.integers(1, 24)) for p in range(3)]
    events: list[tuple[int, Event]] = []
    at = 0
    for number in range(draw(st.integers(1, 14))):
        # Odd nanoseconds, so that nothing falls on the end of a pass by a rounding.
        at += draw(st.sampled_from([0, 0, 0, 7_000_013, 33_000_017, 250_000_037, 2_000_000_011]))
        prompt = draw(st.sampled_from(prefixes))[: draw(st.integers(1, 24))] + [number] * draw(st.integers(0, 20))
        kind = draw(st.sampled_from(["tokens", "tokens", "blocks", "nothing"]))
        fields = {"tokens": prompt}
        if kind == "blocks":
            fields = {"prompt": Prompt(len(prompt), [prompt[0] * 1000 + i for i in range(len(prompt))])}
        elif kind == "nothing":
            fields = {"prompt": Prompt(len(prompt))}
        role = draw(st.sampled_from(["whole", "hold", "remote"])) if handed else "whole"
        if role == "hold":
            fields["hold"] = True
            if draw(st.booleans()):
                after = draw(st.sampled_from([11_000_003, 73_000_043, 420_000_047]))
                events.append((at + after, ReleaseKv(id=f"r{number}")))
        elif role == "remote":
            fields["remote"] = draw(st.sampled_from([len(prompt), len(prompt), len(prompt) - 1, 99, 5]))
            wait = draw(st.sampled_from([0, 1_000_051, 9_000_053, 300_000_057]))
            pulls[f"r{number}"] = (wait, draw(st.sampled_from([True, True, False])))
        events.append(
            (
                at,
                SubmitRequest(
                    id=f"r{number}",
                    max_tokens=draw(st.integers(1, 40)),
                    min_tokens=draw(st.sampled_from([0, 3])),
                    ignore_eos=draw(st.booleans()),
                    priority=draw(st.integers(0, 2)),
                    salt=draw(st.sampled_from([None, None, "tenant"])),
                    **fields,
                ),
            )
        )
        if draw(st.integers(0, 4)) == 0:
            wait = draw(st.sampled_from([0, 3_000_019, 51_000_023, 400_000_041]))
            events.append((at + wait, AbortRequest(id=f"r{number}")))
        if draw(st.integers(0, 9)) == 0:
            events.append((at + draw(st.sampled_from([1, 60_000_029])), ClearCache()))
    return Work(events, pulls)


def drive(config: SimSettings, work: Work) -> Driven:
    return Driven(config, work.events, table=TABLE, pulls=work.pulls)


def naive(config: SimSettings, work: Work) -> Oracle:
    oracle = Oracle(config, TABLE, work.pulls)
    oracle.run(list(work.events))
    return oracle


def assert_equal(config: SimSettings, work: Work) -> Driven:
    oracle = naive(config, work)
    driven = drive(config, work).run()
    assert [line[:2] + line[3:] for line in driven.told] == [line[:2] + line[3:] for line in oracle.told]
    for mine, theirs in zip(driven.told, oracle.told, strict=True):
        assert abs(mine[2] - theirs[2]) <= MICROSECOND, (mine, theirs)
    assert driven.kv == oracle.kv
    if config.emit_decode_blocks:  # else evictions within a run are told at its end
        for mine, theirs in zip(driven.kv_times, oracle.kv_times, strict=True):
            assert abs(mine - theirs) <= MICROSECOND
    stats = driven.engine.take_stats(driven.simulation.now)
    assert (stats.passes, stats.queued_requests) == (oracle.passes, oracle.queued)
    assert (stats.prefill_tokens, stats.decode_seqs) == (oracle.prefill_tokens, oracle.decode_seqs)
    assert (stats.decode_kv, stats.decode_kv_sq) == (oracle.decode_kv, oracle.decode_kv_sq)
    counters = driven.engine.counters(driven.simulation.now)
    assert (counters.hold_expired, counters.pulls_failed) == (oracle.expired, oracle.failed)
    assert counters.pulled == oracle.pulled
    assert driven.engine.kv_usage == 0.0 and driven.engine.blocks_retained == 0
    return driven


@given(small_engines(), workloads())
@settings(max_examples=deep(250), deadline=None)
def test_the_lazy_engine_equals_the_naive_one(config: SimSettings, work: Work) -> None:
    assert_equal(config, work)


def test_each_eviction_within_a_run_of_steps_is_told_when_it_happens() -> None:
    """Blocks of ended requests make room for one long answer, whose steps are one run; nothing else happens."""
    config = SimSettings(
        block_size=4, kv_blocks=24, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=90, timing=TIMINGS[0]
    )
    events: list[tuple[int, Event]] = [
        (number, SubmitRequest(id=f"r{number}", prompt=Prompt(20, [number * 10 + i for i in range(5)]), max_tokens=1))
        for number in range(4)
    ]
    events.append((10_000_000_019, SubmitRequest(id="long", prompt=Prompt(4), max_tokens=80, ignore_eos=True)))
    driven = assert_equal(config, Work(events, {}))
    removed = [at for at, change in zip(driven.kv_times, driven.kv, strict=True) if change[0] == "removed"]
    assert len(removed) == len(set(removed)) == 17
    deaf = drive(config, Work(events, {}))
    deaf.engine.mute_kv_events()
    assert deaf.run().told == driven.told


@given(small_engines(), workloads(), st.lists(st.integers(0, 3_000_000_000), max_size=6))
@settings(max_examples=deep(100), deadline=None)
def test_tokens_are_out_when_the_naive_engine_says(config: SimSettings, work: Work, looks: list[int]) -> None:
    oracle = naive(config, work)
    driven = drive(config, work)
    last = max(at for at, _ in oracle.heard)
    for look in sorted(look * 2 + 1 for look in looks):
        driven.run(until=look)
        engine = driven.engine
        for id in list(engine._core.requests):
            times = oracle.tokens_out[id]
            out = engine.tokens_at(id, look)
            assert out == bisect_right(times, look)
            planned = engine.token_time(id, out + 1)
            if planned is not None and last <= look:
                assert look < planned and abs(planned - times[out]) <= MICROSECOND


@given(small_engines(), workloads(), st.integers(0, 3_000_000_000), st.booleans())
@settings(max_examples=deep(100), deadline=None)
def test_a_snapshot_taken_at_any_time_changes_nothing(config: SimSettings, work: Work, at: int, ahead: bool) -> None:
    config = msgspec.structs.replace(config, async_scheduling=ahead)
    straight = drive(config, work).run()
    broken = drive(config, work).run(until=at)
    # Plain data: it goes through the journal's encoding.
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(broken.engine.snapshot()))
    broken.engine.restore(state)
    assert msgspec.msgpack.encode(broken.engine.snapshot()) == msgspec.msgpack.encode(state)
    broken.engine.check()
    broken.run()
    assert broken.told == straight.told and broken.kv == straight.kv


@given(small_engines(), workloads(), st.lists(st.integers(0, 3_000_000_000), max_size=8), st.booleans())
@settings(max_examples=deep(100), deadline=None)
def test_looking_at_statistics_changes_nothing(config: SimSettings, work: Work, looks: list[int], ahead: bool) -> None:
    config = msgspec.structs.replace(config, async_scheduling=ahead)
    straight = drive(config, work).run()
    watched = drive(config, work)
    total = watched.engine.take_stats(0)
    for look in sorted(looks):
        watched.run(until=look)
        total += watched.engine.take_stats(look)
    watched.run()
    total += watched.engine.take_stats(watched.simulation.now)
    assert watched.told == straight.told and watched.kv == straight.kv
    want = straight.engine.take_stats(straight.simulation.now)
    assert msgspec.structs.replace(total, wall=0.0) == msgspec.structs.replace(want, wall=0.0)
    assert total.wall == pytest.approx(want.wall, abs=1e-6)
