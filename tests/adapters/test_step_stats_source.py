"""Do the three ways of knowing an engine's passes add up, say what they don't know, and notice what went wrong?"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from penstock.adapters.engines.dialects.vllm import VLLM
from penstock.adapters.engines.stats.step_stats_metrics import ScrapedSteps, between
from penstock.adapters.engines.stats.step_stats_plugin import PassSubscriber
from penstock.adapters.engines.stats.step_stats_source import SimSteps, steps_of
from penstock.inside.stats_publisher import StatsPublisher
from penstock.kernel.pass_report import PassReport
from penstock.kernel.values import StepStats, WorkerCard, WorkerId
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.sim.sim_server import start
from tests.adapters.answering import answering

PATIENCE = 30.0


def told(number: int, **changes: Any) -> PassReport:
    plain: dict[str, Any] = {
        "rank": 0,
        "number": number,
        "wall": 0.01,
        "prefill_requests": 1,
        "prefill_tokens": 100,
        "decode_seqs": 3,
        "decode_tokens": 3,
        "waiting": 2,
        "preemptions": 0,
    }
    return PassReport(**{**plain, **changes})


def page(**values: float) -> str:
    """A /metrics page of vLLM with these counters."""
    return "".join(f'vllm:{name}{{engine="0",model_name="m"}} {value}\n' for name, value in values.items())


BEFORE = {
    "iteration_tokens_total_count": 100,
    "prompt_tokens_total": 1000,
    "prompt_tokens_cached_total": 200,
    "generation_tokens_total": 500,
    "time_to_first_token_seconds_count": 20,
    "inter_token_latency_seconds_sum": 4.0,
    "inter_token_latency_seconds_count": 480,
    "num_requests_waiting": 0,
    "num_preemptions_total": 1,
}
AFTER = {
    "iteration_tokens_total_count": 150,
    "prompt_tokens_total": 3000,
    "prompt_tokens_cached_total": 700,
    "generation_tokens_total": 700,
    "time_to_first_token_seconds_count": 30,
    "inter_token_latency_seconds_sum": 5.9,
    "inter_token_latency_seconds_count": 670,
    "num_requests_waiting": 4,
    "num_preemptions_total": 1,
}


@contextlib.contextmanager
def hearing() -> Any:
    """The sums of one endpoint, fed by hand."""
    passes = PassSubscriber("tcp://127.0.0.1:9")
    try:
        yield passes
    finally:
        passes.close()


async def test_passes_add_up_and_what_vllm_does_not_tell_is_absent() -> None:
    with hearing() as passes:
        for number in range(3):
            passes.receive(msgspec.msgpack.encode(told(number, prefill_tokens=10 * number)))
        window = passes.take()
        assert (window.passes, window.wall) == (3, pytest.approx(0.03))
        assert (window.prefill_tokens, window.prefill_tokens_sq, window.prefill_requests) == (30, 500, 3)
        assert (window.decode_seqs, window.decode_seqs_sq, window.queued_requests) == (9, 27, 6)
        assert window.preemptions == 0
        assert (window.decode_kv, window.queued_prefill_tokens, window.estimated) == (None, None, ())
        assert passes.take().passes == 0


async def test_a_count_that_one_pass_lacks_is_unknown_for_the_window() -> None:
    with hearing() as passes:
        passes.receive(msgspec.msgpack.encode(told(0)))
        passes.receive(msgspec.msgpack.encode(told(1, waiting=None, preemptions=None)))
        passes.receive(msgspec.msgpack.encode(told(2)))
        window = passes.take()
        assert (window.passes, window.queued_requests, window.preemptions) == (3, None, None)


async def test_lost_and_unreadable_passes_are_counted() -> None:
    with hearing() as passes:
        for payload in (told(0), told(4), told(5)):
            passes.receive(msgspec.msgpack.encode(payload))
        for payload in (
            b"",
            b"\xc1",
            msgspec.msgpack.encode({"number": 1}),
            msgspec.msgpack.encode(told(6, version=2)),
        ):
            passes.receive(payload)
        assert (passes.passes, passes.lost, passes.malformed) == (3, 3, 4)
        passes.receive(msgspec.msgpack.encode(told(0)))  # the engine began anew
        passes.receive(msgspec.msgpack.encode(told(1)))
        assert (passes.passes, passes.lost) == (5, 3)


async def test_two_pages_of_metrics_say_what_was_between_them() -> None:
    scraped = ScrapedSteps(VLLM.counters)
    assert scraped.take(page(**BEFORE)) is None
    window = scraped.take(page(**AFTER))
    assert window is not None
    assert (window.passes, window.wall) == (50, pytest.approx(50 * 1.9 / 190))
    assert window.prefill_tokens == 1500 and window.prefill_requests == 10
    assert window.decode_seqs == 190 and window.queued_requests == 100 and window.preemptions == 0
    assert window.decode_seqs_sq is None and window.decode_kv is None
    assert set(window.estimated) == {"wall", "prefill_tokens", "prefill_requests", "decode_seqs", "queued_requests"}
    assert scraped.take(page(**AFTER)) == StepStats(
        passes=0,
        wall=0.0,
        prefill_tokens=0,
        prefill_requests=0,
        decode_seqs=0,
        queued_requests=0,
        preemptions=0,
        estimated=("decode_seqs", "prefill_requests", "prefill_tokens", "queued_requests"),
    )


async def test_an_engine_that_started_over_gives_no_window() -> None:
    scraped = ScrapedSteps(VLLM.counters)
    scraped.take(page(**AFTER))
    assert scraped.take(page(**BEFORE)) is None
    assert scraped.take(page(**AFTER)) is not None


async def test_counters_that_are_missing_are_unknown_not_zero() -> None:
    names = {"vllm:iteration_tokens_total_count": 5.0}
    window = between(VLLM.counters, {"vllm:iteration_tokens_total_count": 1.0}, names)
    assert window == StepStats(passes=4, wall=None)
    assert between(VLLM.counters, {}, names) is None


def card(url: str, **more: Any) -> WorkerCard:
    return WorkerCard(id=WorkerId("w"), epoch=1, model="m", url=url, engine="vllm", **more)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def heard_by(source: Any, publisher: StatsPublisher, payload: PassReport) -> None:
    """Publish until the subscription hears."""
    async with asyncio.timeout(PATIENCE):
        while not source.passes.passes:
            publisher.publish(payload)
            await asyncio.sleep(0.01)


async def test_the_plug_in_is_believed_once_it_was_heard_and_metrics_before(http: aiohttp.ClientSession) -> None:
    routes: dict[str, Any] = {"/metrics": page(**BEFORE)}
    publisher = StatsPublisher("tcp://127.0.0.1:*")
    async with answering(routes) as url:
        source = steps_of(card(url, stats=publisher.endpoint), http, "me")
        try:
            assert await source.take(busy=True) is None
            routes["/metrics"] = page(**AFTER)
            window = await source.take(busy=True)
            assert source.source == "metrics" and window is not None and window.passes == 50
            await heard_by(source, publisher, told(0))
            window = await source.take(busy=True)
            assert (
                source.source == "plug-in" and window is not None and window.wall == pytest.approx(0.01 * window.passes)
            )
            window = await source.take(busy=False)
            assert source.source == "plug-in" and window is not None and window.passes == 0
            # Requests ran and the plug-in said nothing: it must have gone. What /metrics counted before is not ours.
            assert await source.take(busy=True) is None and source.source == "metrics"
        finally:
            source.close()
            publisher.close()


async def test_an_engine_that_tells_nothing_has_no_source(http: aiohttp.ClientSession) -> None:
    plain = WorkerCard(id=WorkerId("w"), epoch=1, model="m", url="http://127.0.0.1:9", engine="openai")
    source = steps_of(plain, http, "me")
    assert await source.take(busy=True) is None and source.source == "none"
    source.close()
    away = steps_of(card("http://127.0.0.1:9"), http, "me")
    assert await away.take(busy=True) is None and away.source == "metrics"


async def test_a_simulated_engine_tells_all_and_its_metrics_agree(http: aiohttp.ClientSession) -> None:
    settings = SimSettings(
        block_size=16,
        kv_blocks=512,
        max_model_len=4096,
        reply_tokens=0,
        timing=TimingSettings(prefill=(0.0, 0.02, 1.0), decode=(0.0, 0.0, 2.0)),
    )
    server = await start(settings)
    try:
        sim = WorkerCard(id=WorkerId("w"), epoch=1, model="sim", url=server.url, engine="sim")
        exact, worked_out = steps_of(sim, http, "me"), steps_of(sim, http, "me", scrape=True)
        assert isinstance(exact, SimSteps)
        assert await exact.take(busy=False) is None and await worked_out.take(busy=False) is None
        body = {"model": "sim", "max_tokens": 40, "ignore_eos": True}
        prompts = [[number + 7] * 200 for number in range(4)]
        answers = [http.post(f"{server.url}/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts]
        for answer in await asyncio.gather(*answers):
            assert answer.status == 200
            await answer.read()
        truth, guess = await exact.take(busy=True), await worked_out.take(busy=True)
        assert truth is not None and guess is not None
        assert truth.decode_kv is not None and truth.estimated == ()
        assert guess.passes == truth.passes and guess.decode_seqs == truth.decode_seqs == 4 * 39
        assert guess.prefill_tokens == truth.prefill_tokens == 800
        assert truth.wall is not None and guess.wall is not None and abs(guess.wall / truth.wall - 1) < 0.2
        assert guess.decode_kv is None
    finally:
        await server.stop()


def test_a_window_without_wall_time_makes_none_of_the_sum() -> None:
    assert (StepStats(passes=1, wall=1.0) + StepStats(passes=2, wall=None)).wall is None
