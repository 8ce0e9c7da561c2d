"""Are only passes of equal requests joined, and is it said where production has not been?"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from penstock.config.derived.engine_flags import TP_SIZE
from penstock.config.files.profile_manifest import read_measured
from penstock.frontend.admin.admin_answers import ClusterStatus, LastMinute, LoopStatus
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import StepStats
from penstock.router.status_rows import StatusCounts, WorkerStatus
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.profiler.measurement.pass_watch import PassBook, alike, points_of, uneven, watch
from penstock_lab.testing import simulated_servers


def window(passes: int = 1, wall: float = 0.1, **sums: int) -> StepStats:
    usual = {"prefill_tokens": 0, "prefill_requests": 0, "decode_seqs": 0, "decode_seqs_sq": 0, "decode_kv": 0}
    return StepStats(passes=passes, wall=wall, **{**usual, **sums})


def test_unequal_requests_are_never_averaged_into_equal_ones() -> None:
    book = PassBook(1, None)
    book.add(window(prefill_tokens=3_100, prefill_requests=2))  # 100 and 3,000 tokens are no two prompts of 1,550
    book.add(window(2, prefill_tokens=3_100, prefill_requests=2))
    book.add(window(2, decode_seqs=12, decode_seqs_sq=4 + 100, decode_kv=12_000))  # 2 and 10 sequences are not 6
    assert points_of([book]) == [] and (book.passes, book.unequal) == (5, 5)
    book.add(window(4, 0.4, decode_seqs=24, decode_seqs_sq=4 * 36, decode_kv=4 * 6_000))
    book.add(window(prefill_tokens=3_000, prefill_requests=1, wall=0.3))
    book.add(window(prefill_tokens=1_000, prefill_requests=1, decode_seqs=5, decode_seqs_sq=25, decode_kv=5_000))
    found = {(p.kind, p.tokens, p.seqs, p.context, round(p.mean, 6)) for p in points_of([book])}
    assert found == {("decode", 0, 6, 1_000.0, 0.1), ("prefill", 3_000, 0, 0.0, 0.3), ("mixed", 1_000, 5, 1_000.0, 0.1)}


def test_estimates_of_wall_time_do_not_count_and_kv_comes_from_use_where_passes_lack_it() -> None:
    estimated = StepStats(passes=3, wall=1.0, decode_seqs=3, decode_seqs_sq=3, prefill_tokens=0, estimated=("wall",))
    plain = StepStats(passes=1, wall=0.02, decode_seqs=4, decode_seqs_sq=16, prefill_tokens=0)
    book = PassBook(1, 100_000)
    book.add(estimated)
    assert book.passes == 0
    book.add(plain)
    assert book.unequal == 1, "what it read is not known"
    book.usage = 0.2
    book.add(plain)
    (point,) = points_of([book])
    assert (point.seqs, point.context) == (4, 5_000.0)
    assert alike(StepStats(passes=1, wall=0.1)) == (None, 0.0, 0.0)


def test_engines_are_joined_where_their_passes_are_alike_and_one_that_is_slower_is_named() -> None:
    slow, fast, other, wide = (PassBook(tp, None, name) for name, tp in (("a", 1), ("b", 1), ("c", 1), ("d", 2)))
    for book, wall in ((slow, 0.3), (fast, 0.1), (other, 0.1)):
        book.add(window(wall=wall, decode_seqs=6, decode_seqs_sq=36, decode_kv=6_000))
    fast.add(window(wall=0.2, decode_seqs=60, decode_seqs_sq=3_600, decode_kv=60_000))
    wide.add(window(wall=0.05, decode_seqs=6, decode_seqs_sq=36, decode_kv=6_000))
    points = points_of([slow, fast, other, wide])
    found = {(p.tp, p.seqs, p.context, p.repeats, round(p.mean, 6)) for p in points}
    assert found == {(1, 6, 1_000.0, 3, 0.166667), (1, 60, 1_000.0, 1, 0.2), (2, 6, 1_000.0, 1, 0.05)}
    assert next(p.sd for p in points if p.repeats == 3) > 0.1, "that they differ is not lost"
    assert any(text.startswith("a takes 3.00 times") for text in uneven([slow, fast, other, wide]))
    assert uneven([fast, other]) == [] and uneven([slow, wide]) == []


async def use(http: aiohttp.ClientSession, url: str) -> None:
    for number in range(6):
        prompt = [3 + (number + place) % 250 for place in range(700)]
        body = {"model": "sim", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200


async def test_a_serving_engine_is_watched_at_no_cost(tmp_path: Path) -> None:
    settings = SimSettings(kv_blocks=512, timing=TimingSettings(prefill=(0.0, 0.02, 20.0), decode=(0.0, 40.0, 12.0)))
    async with simulated_servers(1, settings) as (server,), aiohttp.ClientSession() as http:
        _, manifest = await asyncio.gather(use(http, server.url), watch(server.url, 2.0, tmp_path / "seen"))
    profile = read_measured(tmp_path / "seen")
    assert profile.manifest.source == "production" and (tmp_path / "seen" / "report.html").exists()
    decode = [point for point in profile.points if point.kind == "decode"]
    assert decode and all(point.seqs == 1 for point in decode)
    for point in decode:
        assert point.mean == pytest.approx(0.012 + 0.04 * point.context / settings.capacity, rel=0.1)
    for point in profile.points:
        if point.kind == "prefill":
            assert point.mean == pytest.approx(0.020 + 2e-5 * point.tokens, rel=0.05)
    assert any("more than 1 sequences in flight were not seen" in text for text in manifest.left_out) or any(
        "KV use above" in text for text in manifest.left_out
    )


async def test_an_engine_that_nobody_uses_makes_no_profile(tmp_path: Path) -> None:
    async with simulated_servers() as (server,):
        with pytest.raises(EngineError, match="no pass that counts"):
            await watch(server.url, 0.1, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def row(url: str, name: str, model: str = "sim", **more: object) -> WorkerStatus:
    card = {"id": name, "model": model, "role": "aggregated", "url": url, "engine": "sim", "state": "ready"}
    zeros = dict.fromkeys(("epoch", "since", "active_requests", "active_prefill_tokens", "active_blocks"), 0)
    zeros |= dict.fromkeys(("requests", "failures"), 0)
    unknown = dict.fromkeys(("why_not", "pid", "kv_blocks", "block_size", "kv_events"))
    return msgspec.convert({**card, **zeros, **unknown, "index": "exact", "breaker": "closed", **more}, WorkerStatus)


@asynccontextmanager
async def frontend(rows: list[WorkerStatus], key: str | None = None) -> AsyncIterator[str]:
    """A server that answers as a frontend's status does; yields its URL."""
    minute = LastMinute(ended=0, **dict.fromkeys(LastMinute.__struct_fields__[1:]))
    lists: dict[str, list[object]] = {name: [] for name in ("models", "crashes", "findings", "frontends")}
    texts = dict.fromkeys(("cluster", "version", "run", "endpoint", "mode"), "")
    others = {"queue": {}, "tokenizers": {}, "hit_rate": None, "planner": None, "uptime": 1.0, "draining": False}
    status = ClusterStatus(
        **lists, **texts, **others, workers=rows, requests=StatusCounts(), loop=LoopStatus(None, None),
        router_faults=0, last_minute=minute,
    )  # fmt: skip

    async def answer(request: web.Request) -> web.Response:
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return web.Response(status=401)
        return web.Response(body=msgspec.json.encode(status))

    app = web.Application()
    app.router.add_get("/admin/status", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_all_engines_of_a_cluster_make_one_profile(tmp_path: Path) -> None:
    async with (
        simulated_servers(2) as (first, second),
        simulated_servers(model="other") as (other,),
        aiohttp.ClientSession() as http,
    ):
        rows = [
            row(first.url, "main-0"),
            row(second.url, "main-1", labels={TP_SIZE: "2"}),
            row(other.url, "other-0", "other"),
        ]
        async with frontend(rows, key="the-key") as url:
            with pytest.raises(ConfigError, match="asks for a key"):
                await watch(url, 0.1, tmp_path / "none")
            with pytest.raises(ConfigError, match="of models other, sim"):
                await watch(url, 0.1, tmp_path / "none", key="the-key")
            with pytest.raises(EngineError, match="no engine of third"):
                await watch(url, 0.1, tmp_path / "none", model="third", key="the-key")
            listening = watch(url + "/v1", 1.5, tmp_path / "all", model="sim", key="the-key")
            _, _, manifest = await asyncio.gather(use(http, first.url), use(http, second.url), listening)
    assert manifest.model == "sim" and manifest.sizes == (1, 2)
    assert "of 2 engines" in manifest.left_out[0]
    points = read_measured(tmp_path / "all").points
    assert {point.tp for point in points if point.kind == "decode"} == {1, 2}
