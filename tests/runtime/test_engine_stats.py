"""Do windows reach every reader once, is what can be estimated marked so, and does one odd engine harm no other?"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.adapters.engines.stats.step_stats_source import Source
from penstock.config.settings.cluster_settings import EngineStatsSettings
from penstock.kernel.machine import SECOND
from penstock.kernel.tiers.load_worth import LoadCosts, metrics_of
from penstock.kernel.values import TIERS_LABEL, RequestId, StepStats, Target, WorkerCard, WorkerId
from penstock.router.workers.active_sequences import ActiveSequences
from penstock.runtime.node import engine_stats as module
from penstock.runtime.node.engine_stats import EngineStats, LoadLook, completed, described, look

A, B = WorkerId("a"), WorkerId("b")
BUSY = LoadLook(decoding=2, decode_kv=300.0, ages=1.0, silent=((50.0, 2.0), (70.0, 1.0)))
IDLE = LoadLook(decoding=0, decode_kv=0.0, ages=0.0)


class Told:
    """A source whose windows the test hands in."""

    def __init__(self) -> None:
        self.source: Source = "plug-in"
        self.windows: list[Any] = []
        self.busy: list[bool] = []
        self.closed = False

    async def take(self, *, busy: bool) -> StepStats | None:
        self.busy.append(busy)
        found = self.windows.pop(0) if self.windows else None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed = True


def card(worker: WorkerId) -> WorkerCard:
    return WorkerCard(id=worker, epoch=1, model="m", url="http://127.0.0.1:9", engine="vllm")


def passes(count: int, **more: Any) -> StepStats:
    return StepStats(
        **{"passes": count, "wall": count * 0.01, "decode_seqs": 2 * count, "queued_requests": count, **more}
    )


async def ask(stats: EngineStats) -> None:
    """End the window of every engine."""
    await asyncio.gather(*(stats._ask(watched) for watched in list(stats._watched.values())))


def look_at(stats: EngineStats) -> None:
    """Take one sample of every engine."""
    for worker, watched in stats._watched.items():
        watched.samples += stats._look([worker])


@pytest.mark.parametrize("engines, most", [(1, 60), (4, 60), (50, 60), (40, 2), (37, 1)])
async def test_every_engine_has_its_turn_and_none_is_asked_too_often(
    sources: dict[WorkerId, Told], engines: int, most: int
) -> None:
    stats = EngineStats(EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "me")
    asked: Counter[WorkerId] = Counter()
    for number in range(engines):
        stats.start(card(WorkerId(f"e-{number}")))
    turns = 80 * module.LOOKS
    for _ in range(turns):
        before = [len(watched.samples) for watched in stats._watched.values()]
        stats.turn(most)
        begun = [watched for watched in stats._watched.values() if watched.pending]
        assert len(begun) <= most, "no more than may be asked at once"
        for watched, count in zip(stats._watched.values(), before, strict=True):
            assert len(watched.samples) <= count + 1
        asked.update(watched.card.id for watched in begun)
        await stats._asks.settled()
    expected = min(turns / module.LOOKS, turns * most / engines)
    assert len(asked) == engines and max(asked.values()) - min(asked.values()) <= 1
    assert abs(sum(asked.values()) / engines - expected) <= 1
    await stats.close()


async def test_an_engine_that_hangs_delays_no_other(sources: dict[WorkerId, Told]) -> None:
    stats = EngineStats(EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "me")
    stats.start(card(A))
    stats.start(card(B))
    held = asyncio.Event()
    sources[A].take = lambda *, busy: held.wait()  # type: ignore[assignment,method-assign,return-value]
    sources[B].windows = [passes(n) for n in range(1, 9)]
    for _ in range(5 * module.LOOKS):
        stats.turn(60)
        for _ in range(5):
            await asyncio.sleep(0)
    last = stats.last(B)
    assert last is not None and last.steps.passes == 5 and stats.last(A) is None
    assert sum(watched.pending for watched in stats._watched.values()) == 1
    await stats._asks.close()
    await stats.close()


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[WorkerId, Told]:
    made: dict[WorkerId, Told] = {}

    def steps_of(card: WorkerCard, *args: Any, **kwargs: Any) -> Told:
        made[card.id] = Told()
        return made[card.id]

    monkeypatch.setattr(module, "steps_of", steps_of)
    return made


async def test_each_reader_gets_every_window_once(sources: dict[WorkerId, Told]) -> None:
    stats = EngineStats(EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "me")
    stats.start(card(A))
    stats.start(card(B))
    assert stats.take("planner") == {} and stats.status(A) is None
    sources[A].windows = [passes(1), passes(2), passes(4)]
    await ask(stats)
    assert stats.take("late")[A].passes == 1  # who comes late begins with the last window
    await ask(stats)
    assert {worker: steps.passes for worker, steps in stats.take("planner").items()} == {A: 3}
    assert stats.take("planner") == {}
    await ask(stats)
    assert stats.take("planner")[A].passes == 4 and stats.take("late")[A].passes == 6
    assert stats.failures == 3  # the other engine could not be asked
    stats.stop(card(A))
    assert sources[A].closed and stats.last(A) is None
    await stats.close()
    assert sources[B].closed


async def test_readers_that_stay_away_are_forgotten(sources: dict[WorkerId, Told]) -> None:
    stats = EngineStats(EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "me")
    stats.start(card(A))
    for number in range(2 * module.READERS_MAX):
        stats.take(f"reader-{number}")
    sources[A].windows = [passes(1), passes(1)]
    await ask(stats)
    await ask(stats)
    watched = stats._watched[A]
    assert len(watched.unread) == module.READERS_MAX
    await stats.close()


async def test_an_engine_that_makes_no_sense_harms_no_other(
    sources: dict[WorkerId, Told], caplog: pytest.LogCaptureFixture
) -> None:
    stats = EngineStats(EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "me")
    stats.start(card(A))
    stats.start(card(B))
    sources[A].windows = [RuntimeError("odd"), passes(3)]
    sources[B].windows = [passes(5), passes(5)]
    await ask(stats)
    assert stats.last(A) is None and stats.last(B) is not None
    assert "could not be read" in caplog.text
    await ask(stats)
    assert stats.last(A) is not None
    await stats.close()


async def test_silence_counts_as_idleness_only_while_nothing_was_placed(sources: dict[WorkerId, Told]) -> None:
    seen = {A: IDLE}
    stats = EngineStats(EngineStatsSettings(), lambda workers: [seen[worker] for worker in workers], "me")
    stats.start(card(A))
    look_at(stats)
    await ask(stats)
    look_at(stats)
    seen[A] = BUSY
    look_at(stats)
    await ask(stats)
    assert sources[A].busy == [False, True]
    await stats.close()


async def test_it_runs_by_itself_and_can_be_switched_off(sources: dict[WorkerId, Told]) -> None:
    stats = EngineStats(EngineStatsSettings(interval=0.02), lambda workers: [BUSY] * len(workers), "me")
    stats.start(card(A))
    sources[A].windows = [passes(1), passes(2)]
    task = asyncio.create_task(stats.run())
    async with asyncio.timeout(30):
        while stats.last(A) is None:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    window = stats.last(A)
    assert window is not None and "decode_kv" in window.steps.estimated
    await stats.close()
    off = EngineStats(EngineStatsSettings(interval=0), lambda workers: [BUSY] * len(workers), "me")
    off.start(card(B))
    await off.run()
    assert B not in sources


def test_a_look_counts_what_the_router_placed() -> None:
    active, target = ActiveSequences(), Target(A)
    place = {"unhashed_blocks": 1, "now": SECOND // 2}
    active.place(RequestId("x"), target, prefill_tokens=100, blocks=[1, 2, 3], **place)
    active.place(RequestId("y"), target, prefill_tokens=40, blocks=[1, 2], **place)
    assert look(active, 16, SECOND) == LoadLook(0, 0.0, 0.0, ((16 * 3.5, 0.5), (16 * 2.5, 0.5)))
    active.first_token(RequestId("x"), SECOND)
    seen = look(active, 16, 3 * SECOND)
    assert seen == LoadLook(decoding=1, decode_kv=16 * 3.5, ages=2.0, silent=((16 * 2.5, 2.5),))
    active.grown(RequestId("x"), 2, 3 * SECOND)
    assert look(active, 16, 3 * SECOND) == LoadLook(1, 16 * 5.5, 0.0, ((16 * 2.5, 2.5),))


def test_what_can_be_estimated_is_put_in_and_named() -> None:
    window = completed(passes(100), [BUSY, BUSY])
    # 2 sequences hold 300 tokens and have decoded for 1 s together, at 100 passes a second: 200 tokens each.
    assert window.decode_kv == 200 * 200
    # One request waits, on average, and those without a first token have prompts of 60 tokens.
    assert window.queued_prefill_tokens == 100 * 60
    assert window.estimated == ("decode_kv", "queued_prefill_tokens")
    assert window.decode_kv_sq is None and window.queued_decode_kv is None


def test_nothing_is_estimated_from_nothing() -> None:
    assert completed(passes(0), [BUSY]).estimated == ()
    assert completed(passes(5), []).estimated == ()
    assert completed(passes(5), [IDLE]).decode_kv is None  # it decodes, and we placed nothing there
    assert completed(passes(5, decode_seqs=0), [IDLE]).decode_kv == 0
    exact = passes(5, decode_kv=7, queued_prefill_tokens=3)
    assert completed(exact, [BUSY]) == exact
    unknown = StepStats(passes=5, wall=None)
    assert completed(unknown, [BUSY]) == unknown


def test_answers_that_are_not_streamed_decode_in_silence_the_oldest_first() -> None:
    silent = LoadLook(decoding=0, decode_kv=0.0, ages=0.0, silent=((100.0, 2.0), (200.0, 1.0), (900.0, 0.1)))
    window = completed(passes(100), [silent])  # two sequences in each of 100 passes of 10 ms; one waits
    assert window.decode_kv == 200 * (100 + 200 + 3.0 * 100) / 2
    assert window.queued_prefill_tokens == 100 * 900


def test_time_in_the_engines_line_is_no_time_of_decoding() -> None:
    silent = LoadLook(decoding=0, decode_kv=0.0, ages=0.0, silent=((100.0, 9.0),))
    window = passes(100, decode_seqs=100, queued_requests=800, prefill_requests=1)  # 8 wait, and 1 starts per second
    assert completed(window, [silent]).decode_kv == 100 * (100 + 1.0 * 100)


def test_a_request_that_no_look_saw_waiting_is_taken_to_be_like_the_others() -> None:
    decoding = LoadLook(decoding=2, decode_kv=300.0, ages=0.0)
    assert completed(passes(10), [decoding]).queued_prefill_tokens == 10 * 150
    assert completed(passes(10, queued_requests=0), [IDLE]).queued_prefill_tokens == 0
    assert completed(passes(10), [IDLE]).queued_prefill_tokens is None


def test_status_has_rates_and_leaves_the_unknown_open() -> None:
    steps = StepStats(passes=100, wall=1.0, decode_seqs=400, prefill_tokens=None)
    shown = described(module.StatsWindow(steps, "metrics", 5.0, 10.0), 12.0)
    assert shown.wall_pass_ms == 10.0 and shown.wall_decode_tokens_per_s == 80.0
    assert shown.wall_decode_seqs == 4.0 and shown.wall_passes == 100
    assert shown.wall_prefill_tokens_per_s is None and shown.wall_decode_kv_tokens is None
    assert shown.source == "metrics" and shown.wall_age_s == 2.0


async def test_kv_that_expired_is_a_finding(sources: dict[WorkerId, Told], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter(["7.0", "7.0", "9.0", "1.0", "2.0", "NaN", "1e999"])

    async def text(self: Any, path: str) -> str:
        return f'vllm:nixl_num_kv_expired_reqs_total{{engine="0"}} {next(pages)}'

    monkeypatch.setattr(module.EngineServer, "text", text)
    stats = EngineStats(EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "r")
    stats.start(msgspec.structs.replace(card(A), role="prefill"))
    stats.start(msgspec.structs.replace(card(B), role="decode"))
    counts = []
    for _ in range(7):
        await ask(stats)
        counts.append([finding.text for finding in stats.findings()])
    await stats.close()
    assert counts[:2] == [[], []], "from before it was watched"
    assert counts[2] == ["KV of 2 requests expired on a after its lease of 30 s, before another engine had fetched it"]
    assert counts[3] == [], "the engine started anew"
    assert "KV of 1 request expired on a" in counts[4][0]
    assert counts[4] == counts[5] == counts[6], "what no count is changes nothing"


async def test_costs_of_tiers_are_told_when_they_change(
    sources: dict[WorkerId, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = (LoadCosts(compute=1e-3, host_start=1e-4, host_token=each) for each in (1e-2, 1e-5))
    pages = iter([None, {}, metrics_of(slow), metrics_of(slow), metrics_of(fast)])
    told: list[tuple[WorkerId, LoadCosts]] = []

    async def text(self: Any, path: str) -> str | None:
        page = next(pages)
        return None if page is None else "\n".join(f'{name}{{engine="0"}} {value}' for name, value in page.items())

    monkeypatch.setattr(module.EngineServer, "text", text)
    stats = EngineStats(
        EngineStatsSettings(), lambda workers: [IDLE] * len(workers), "r", priced=lambda *each: told.append(each)
    )
    stats.start(msgspec.structs.replace(card(A), labels={TIERS_LABEL: "lru"}))
    stats.start(card(B))  # without tiers: its page is not read
    for _ in range(5):
        await ask(stats)
    await stats.close()
    assert told == [(A, slow), (A, fast)]
